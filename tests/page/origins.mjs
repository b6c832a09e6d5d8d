// Pages of two other origins in a browser, which use a gateway with a simulated engine: an origin
// that server.cors lists, and one that it does not list. A gateway without server.cors passes on
// the engine's policy. The last line is "N passed, N failed".
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { Rig, freePort, until } from "./rig.mjs";

const KEY = "key-of-the-test";
const MODEL = "llama-3.1-8b";
const rig = new Rig();
let passed = 0, failed = 0;

async function check(what, test) {
  try {
    await test();
    passed++;
    console.log(`ok   ${what}`);
  } catch (error) {
    failed++;
    console.log(`FAIL ${what}: ${error.stack}`);
  }
}

/** The origin of a server on loopback that serves one empty page. */
async function site() {
  const server = createServer((_, response) => response.setHeader("content-type", "text/html").end("<title>a page</title>"));
  await new Promise(resolve => server.listen(0, "127.0.0.1", resolve));
  server.unref();
  return `http://localhost:${server.address().port}`;
}

/** An engine that lets pages of one origin read it, as vLLM does with --allowed-origins. */
async function allowing(origin) {
  const models = JSON.stringify({ object: "list", data: [{ id: MODEL, object: "model" }] });
  const server = createServer((request, response) => {
    const allowed = request.headers.origin === origin;
    if (allowed) response.setHeader("access-control-allow-origin", origin);
    response.statusCode = request.method === "OPTIONS" && !allowed ? 400 : 200;
    response.setHeader("content-type", "application/json").end(models);
  });
  await new Promise(resolve => server.listen(0, "127.0.0.1", resolve));
  server.unref();
  return `http://127.0.0.1:${server.address().port}`;
}

/** Starts a gateway in front of `engine`; returns its URL. `cors`: the line of the setting. */
async function gateway(name, engine, cors) {
  const [client, admin] = [await freePort(), await freePort()];
  const digest = createHash("sha256").update(KEY).digest("hex");
  writeFileSync(`${rig.folder}/${name}.toml`, `[server]\nlisten = "127.0.0.1:${client}"\nadmin = "127.0.0.1:${admin}"\n${cors}\n[[auth.keys]]\nname = "page"\nsha256 = "${digest}"\n[[pool]]\nname = "only"\n[[pool.backend]]\nname = "engine"\nurl = "${engine}"\n`);
  rig.start(name, ["serve", "--config", `${rig.folder}/${name}.toml`]);
  await until(`${name} is ready`, async () => (await fetch(`http://127.0.0.1:${client}/ready`)).ok);
  return `http://127.0.0.1:${client}`;
}

/** The parts of a response that a page can read: status, headers, body; `null` if none. */
const read = (page, url, path, options) => page.evaluate(async ([url, path, options]) => {
  const response = await fetch(url + path, options).catch(() => null);
  return response && { status: response.status, headers: Object.fromEntries(response.headers), text: await response.text() };
}, [url, path, options]);

async function checks() {
  const [port, listed, other] = [await freePort(), await site(), await site()];
  const engine = `http://127.0.0.1:${port}`;
  rig.start("engine", ["sim", MODEL, "--host", "127.0.0.1", "--port", String(port), "--sim-startup", "0"]);
  await until("the engine is ready", async () => (await fetch(`${engine}/health`)).ok);
  const url = await gateway("listing", engine, `cors = ["${listed}"]`);
  const [unset, allowed] = [await gateway("unset", engine, ""), await gateway("allowed", await allowing(listed), "")];
  const [page, stranger] = [await rig.elsewhere(listed), await rig.elsewhere(other)];
  const headers = { authorization: `Bearer ${KEY}`, "content-type": "application/json", "x-stainless-os": "Unknown", "x-request-id": "from-a-page" };
  const chat = stream => ({ method: "POST", headers, body: JSON.stringify({ model: MODEL, max_tokens: 4, stream, messages: [{ role: "user", content: "hi" }] }) });

  await check("a listed page lists models, and chats with its key in a header", async () => {
    assert.equal((await read(page, url, "/v1/models", { headers })).status, 200);
    for (const stream of [false, true]) {
      const answer = await read(page, url, "/v1/chat/completions", chat(stream));
      assert.equal(answer.status, 200);
      assert.match(answer.text, stream ? /data: \[DONE\]/ : /"usage"/);
      assert.equal(answer.headers["x-request-id"], "from-a-page");
      assert.ok(answer.headers["x-sluice-backend"] && answer.headers["server-timing"]);
    }
  });

  await check("it can read every error, with the code in its header", async () => {
    for (const [path, options, status, code] of [
      ["/v1/models", {}, 401, "missing_api_key"],
      ["/v1/nothing", { headers }, 404, "route_not_found"],
      ["/v1/chat/completions", { ...chat(false), headers: { ...headers, authorization: "Bearer wrong" } }, 401, "invalid_api_key"],
      ["/v1/chat/completions", { ...chat(false), body: "{" }, 400, "invalid_request"],
      ["/v1/completions", { method: "DELETE", headers }, 405, "method_not_allowed"],
    ]) {
      const answer = await read(page, url, path, options);
      assert.deepEqual([answer?.status, answer?.headers["x-sluice-error"], JSON.parse(answer.text).error.code], [status, code, code], path);
    }
  });

  await check("a page that is not listed can read nothing", async () => {
    for (const [path, options] of [["/health", {}], ["/v1/models", { headers }], ["/v1/chat/completions", chat(false)]]) {
      assert.equal((await read(page, url, path, options))?.status, 200, `a listed page reads ${path}`);
      assert.equal(await read(stranger, url, path, options), null, path);
    }
  });

  await check("cookies are never allowed", async () => {
    assert.equal((await read(page, url, "/health", { credentials: "omit" }))?.status, 200, "without them it is read");
    assert.equal(await read(page, url, "/health", { credentials: "include" }), null);
  });

  await check("without the setting the engine decides: one allows no page, and one allows one", async () => {
    for (const one of [page, stranger]) assert.equal(await read(one, unset, "/v1/models", { headers }), null);
    assert.equal((await read(page, allowed, "/v1/models", { headers }))?.status, 200, "the page that the engine allows");
    assert.equal(await read(stranger, allowed, "/v1/models", { headers }), null);
  });
}

try {
  await checks();
} catch (error) {
  failed++;
  console.log(`FAIL ${error.stack}`);
} finally {
  await rig.down();
}
console.log(`${passed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
