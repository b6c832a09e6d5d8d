// The setup of the checks: an engine, a gateway that runs two more engines, a load, and a browser.
// Everything listens on free ports of loopback. The setup ends only processes that it has started,
// by their ids.
import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { mkdtempSync, openSync, readFileSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { chromium } from "playwright-core";

const BIN = process.env.SLUICE_BIN;
export const TOKEN = "token-of-the-test";
/** The key that sends nearly all requests, and the other one. */
export const KEYS = { busy: "busy-key-of-the-test", calm: "calm-key-of-the-test" };
/** Time limit of a wait. */
const DEADLINE_MS = 30_000;
const FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];

export const freePort = () => new Promise((resolve, reject) => {
  const server = createServer().once("error", reject).listen(0, "127.0.0.1", () => {
    const { port } = server.address();
    server.close(() => resolve(port));
  });
});

const sha256 = text => createHash("sha256").update(text).digest("hex");
const pause = ms => new Promise(resolve => setTimeout(resolve, ms));

/** Waits until `reached` returns a true value, and returns the value. */
export async function until(what, reached, deadline = DEADLINE_MS) {
  const end = Date.now() + deadline;
  for (let last; ;) {
    try {
      const found = await reached();
      if (found) return found;
    } catch (error) {
      if (error.final) throw error;
      last = error;
    }
    if (Date.now() > end) throw new Error(`${what}: not within ${deadline / 1000} s${last ? `: ${last.message}` : ""}`);
    await pause(100);
  }
}

export class Rig {
  children = [];
  folder = mkdtempSync("rig-");

  start(name, args) {
    const log = openSync(`${this.folder}/${name}.log`, "w");
    const child = spawn(BIN, args, { stdio: ["ignore", log, log] });
    this.children.push(child);
    return child;
  }

  log(name) { return readFileSync(`${this.folder}/${name}.log`, "utf8").split("\n").slice(-15).join("\n"); }

  async up() {
    const [client, admin, engine] = [await freePort(), await freePort(), await freePort()];
    this.client = `http://127.0.0.1:${client}`;
    this.admin = `http://127.0.0.1:${admin}`;
    const words = { CLIENT_PORT: client, ADMIN_PORT: admin, ENGINE_PORT: engine, ADMIN_TOKEN: TOKEN, SLUICE_BIN: BIN, BUSY_SHA256: sha256(KEYS.busy), CALM_SHA256: sha256(KEYS.calm), STATE_FOLDER: `${process.cwd()}/${this.folder}/state` };
    const text = Object.entries(words).reduce((text, [word, value]) => text.replaceAll(word, value), readFileSync("gateway.toml", "utf8"));
    writeFileSync(`${this.folder}/gateway.toml`, text);
    this.start("engine", ["sim", "llama-3.1-8b", "--host", "127.0.0.1", "--port", String(engine), "--sim-speed", "0.2", "--sim-startup", "0.5", "--enable-lora", "--lora-modules", "sql=adapters/sql"]);
    this.gateway = this.start("gateway", ["serve", "--config", `${this.folder}/gateway.toml`]);
    await until("all engines are ready", async () => {
      if (this.gateway.exitCode !== null) throw Object.assign(new Error(this.log("gateway")), { final: true });
      const { pools } = await this.get("/admin/status");
      return pools.every(pool => pool.backends.every(backend => backend.state === "ready" && (backend.engine?.step ?? "serve") === "serve"));
    });
  }

  load(seconds) {
    for (const [name, rate, short] of [["busy", "30", 14], ["calm", "1", 2]]) {
      this.start("load-" + name, ["bench", "--base-url", this.client, "--backend", "openai-chat", "--model", "default", "--class", `short:weight=${short},in=200,out=48`, "--class", "long:weight=1,in=4000,out=32",
        "--request-rate", rate, "--duration", String(seconds), "--header", `authorization=Bearer ${KEYS[name]}`]);
    }
  }

  /** A chat of the calm key with this request id; it may be shed. */
  async chat(id, content) {
    const body = JSON.stringify({ model: "default", stream: true, max_tokens: 16, messages: [{ role: "user", content }] });
    const headers = { authorization: `Bearer ${KEYS.calm}`, "content-type": "application/json", "x-request-id": id };
    const answer = await fetch(this.client + "/v1/chat/completions", { method: "POST", headers, body });
    await answer.text();
  }

  /** A GET with the token. */
  async get(path) {
    const response = await fetch(this.admin + path, { headers: { authorization: `Bearer ${TOKEN}` } });
    if (!response.ok) throw new Error(`${path}: ${response.status}`);
    return response.json();
  }

  state(pool, backend) {
    return this.get("/admin/status").then(({ pools }) => pools.find(one => one.name === pool).backends.find(one => one.name === backend).state);
  }

  /** Opens a page in the browser; records its errors and the other hosts that it requests. */
  async page({ width = 1440, height = 900, colorScheme = "light", token = true } = {}) {
    this.browser ??= await chromium.launch({ executablePath: process.env.CHROMIUM, args: FLAGS });
    const context = await this.browser.newContext({ viewport: { width, height }, colorScheme });
    if (token) await context.addInitScript(value => sessionStorage.setItem("token", value), TOKEN);
    const page = await context.newPage();
    page.complaints = [];
    page.elsewhere = [];
    page.on("console", message => ["error", "warning"].includes(message.type()) && page.complaints.push(message.text()));
    page.on("pageerror", error => page.complaints.push(String(error)));
    page.on("request", request => !request.url().startsWith(this.admin) && page.elsewhere.push(request.url()));
    await page.goto(this.admin + "/");
    if (token) await live(page);
    return page;
  }

  /** A page of another server. */
  async elsewhere(url) {
    this.browser ??= await chromium.launch({ executablePath: process.env.CHROMIUM, args: FLAGS });
    const page = await (await this.browser.newContext()).newPage();
    await page.goto(url);
    return page;
  }

  async down() {
    await this.browser?.close();
    for (const child of this.children.reverse()) {
      if (child.exitCode !== null || child.signalCode !== null) continue;
      const ended = new Promise(resolve => child.once("exit", resolve));
      child.kill("SIGCONT");
      child.kill("SIGTERM");
      // The gateway waits for requests that run. A second signal cuts them.
      await Promise.race([ended, pause(3000).then(() => child.kill("SIGTERM"))]);
      await Promise.race([ended, pause(5000).then(() => child.kill("SIGKILL"))]);
    }
  }
}

export const live = page => page.waitForFunction(() => document.getElementById("live").textContent === "live");

export async function show(page, view) {
  await page.click(`#nav a[href="#${view}"]`);
  await page.waitForFunction(name => document.getElementById("view").dataset.name === name && !document.querySelector("#view .card.empty"), view);
}
