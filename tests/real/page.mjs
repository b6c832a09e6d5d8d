// A page of another origin in a browser, as tests/real/clients uses it: page.mjs URL prints one JSON object, a call a member.
// Needs $CHROMIUM. The page and its server are here; everything is on loopback.
import { createServer } from "node:http";
import { chromium } from "playwright-core";

const url = process.argv[2];
const server = createServer((_, response) => response.setHeader("content-type", "text/html").end("<title>another origin</title>"));
await new Promise(resolve => server.listen(0, "127.0.0.1", resolve));
const flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: flags });
const page = await browser.newPage();
await page.goto(`http://localhost:${server.address().port}/`);

const results = await page.evaluate(async url => {
  const chat = { model: "tiny", messages: [{ role: "user", content: "The quick brown fox" }], temperature: 0, max_tokens: 6, ignore_eos: true };
  const post = (path, body, headers = {}) => fetch(url + path, { method: "POST", headers: { "content-type": "application/json", authorization: "Bearer none", ...headers }, body: JSON.stringify(body) });
  const content = text => text.split("\n").filter(line => line.startsWith("data: {")).map(line => JSON.parse(line.slice(6)).choices[0]?.delta.content ?? "").join("");
  const calls = {
    models: async () => (await (await fetch(`${url}/v1/models`, { headers: { authorization: "Bearer none" } })).json()).data.map(model => model.id),
    "models without a preflight": async () => (await fetch(`${url}/v1/models`)).status,
    health: async () => (await fetch(`${url}/health`)).status,
    chat: async () => (await (await post("/v1/chat/completions", chat)).json()).choices[0].message.content,
    "chat, headers of SDKs": async () => (await post("/v1/chat/completions", chat, { "x-stainless-os": "Unknown", "x-api-key": "none", "anthropic-version": "2023-06-01" })).status,
    "chat, streamed": async () => content(await (await post("/v1/chat/completions", { ...chat, stream: true })).text()),
    "unknown model": async () => { const response = await post("/v1/chat/completions", { ...chat, model: "nope" }); return [response.status, typeof (await response.json()).error.message]; },
    "unknown path": async () => (await post("/v1/nothing", {})).status,
    "not JSON": async () => (await fetch(`${url}/v1/chat/completions`, { method: "POST", headers: { "content-type": "application/json" }, body: "{" })).status,
  };
  const results = {};
  for (const [name, call] of Object.entries(calls)) results[name] = await call().catch(error => `not readable: ${error.name}`);
  return results;
}, url);
console.log(JSON.stringify(results));
await browser.close();
server.close();
