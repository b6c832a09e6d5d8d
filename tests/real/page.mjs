// A page of another origin in a browser, which calls the URL for tests/real/clients: page.mjs URL.
// Prints one JSON object with one member for each call. Needs $CHROMIUM. All addresses are on
// loopback.
import { createServer } from "node:http";
import { chromium } from "playwright-core";

const url = process.argv[2];
const server = createServer((_, response) =>
  response.setHeader("content-type", "text/html").end("<title>another origin</title>"));
await new Promise(resolve => server.listen(0, "127.0.0.1", resolve));
const args = [
  "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync",
];
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args });
const page = await browser.newPage();
await page.goto(`http://localhost:${server.address().port}/`);

const results = await page.evaluate(async url => {
  const chat = {
    model: "tiny", messages: [{ role: "user", content: "The quick brown fox" }],
    temperature: 0, max_tokens: 6, ignore_eos: true,
  };
  const key = { authorization: "Bearer none" };
  const json = { "content-type": "application/json" };
  const sdk = { "x-stainless-os": "?", "x-api-key": "none", "anthropic-version": "2023-06-01" };
  const get = (path, headers) => fetch(url + path, { headers });
  const send = (path, body, headers, more) =>
    fetch(url + path, { method: "POST", headers: { ...json, ...headers }, body, ...more });
  const ask = (path, body, headers) => send(path, JSON.stringify(body), { ...key, ...headers });
  const talk = (more, headers) => ask("/v1/chat/completions", { ...chat, ...more }, headers);
  const content = text =>
    text.split("\n").filter(line => line.startsWith("data: {"))
      .map(line => JSON.parse(line.slice(6)).choices[0]?.delta.content ?? "").join("");
  const calls = {
    models: async () => (await (await get("/v1/models", key)).json()).data.map(model => model.id),
    "models without a preflight": async () => (await get("/v1/models")).status,
    health: async () => (await get("/health")).status,
    chat: async () => (await (await talk()).json()).choices[0].message.content,
    "chat, headers of SDKs": async () => (await talk({}, sdk)).status,
    "chat, streamed": async () => content(await (await talk({ stream: true })).text()),
    messages: async () => (await (await ask("/v1/messages", chat, sdk)).json()).content[0].text,
    "unknown model": async () => {
      const response = await talk({ model: "nope" });
      return [response.status, typeof (await response.json()).error.message];
    },
    "unknown path": async () => (await ask("/v1/nothing", {})).status,
    "unknown method": async () => (await fetch(`${url}/v1/models`, { method: "DELETE" })).status,
    "not JSON": async () => (await send("/v1/chat/completions", "{")).status,
    "with cookies": async () => {
      const include = { credentials: "include" };
      return (await send("/v1/chat/completions", JSON.stringify(chat), key, include)).status;
    },
  };
  const results = {};
  for (const [name, call] of Object.entries(calls)) {
    results[name] = await call().catch(error => `not readable: ${error.name}`);
  }
  return results;
}, url);
console.log(JSON.stringify(results));
await browser.close();
server.close();
