// The checks of the live page, in the order of an operator's visit. Each prints one line, and the
// last line counts them. If a check fails, the others still run.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { KEYS, Rig, TOKEN, live, show, until } from "./rig.mjs";

const VIEWS = ["overview", "latency", "engines", "keys", "experiments", "tuner", "requests"];
/** Things that a link shows: the address, and a text that is there. */
const THINGS = { engine: ["#engine=short/gpu1", "Engine short/gpu1"], key: ["#key=team/b", "Key team/b"] };
/** The load goes on until the last check. */
const SECONDS = 400;
/** Findings need a minute of requests, and two looks at them. */
const FINDINGS_MS = 120_000;
const shots = process.argv[2];
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const rig = new Rig();
const began = Date.now();
let passed = 0, failed = 0, page;

async function check(name, run) {
  try {
    await run();
    passed++;
    console.log(`ok   ${((Date.now() - began) / 1000).toFixed(0).padStart(3)} s  ${name}`);
  } catch (error) {
    failed++;
    console.log(`FAIL ${((Date.now() - began) / 1000).toFixed(0).padStart(3)} s  ${name}\n     ${String(error.stack || error).split("\n").slice(0, 6).join("\n     ")}`);
  }
}

/** Waits until assertions about the page hold: it redraws a moment after the gateway has changed. */
const shows = (what, assertions) => until(what, async () => (await assertions(), true));
const text = (selector, on = page) => on.locator(selector).first().innerText();
/** The number that a tile of all pools shows. */
const tile = async caption => parseFloat(await page.locator(".tile", { hasText: caption }).first().locator("b").innerText());
const row = (backend, on = page) => on.locator(".engines tr", { has: on.locator("b", { hasText: new RegExp(`^${backend}$`) }) });
const button = (backend, action, on = page) => row(backend, on).locator(`[data-action=${action}]`);

async function violations(on) {
  // axe runs as a script of the browser, which the page's policy does not restrict.
  await on.evaluate(axe);
  const { violations } = await on.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  const serious = violations.filter(found => ["serious", "critical"].includes(found.impact));
  return serious.map(found => `${found.id}: ${found.help} (${found.nodes.slice(0, 2).map(node => node.target + " " + node.failureSummary).join("; ")})`);
}

async function checks() {
  await check("the page asks for the token, refuses a wrong one and shows nothing before", async () => {
    page = await rig.page({ token: false });
    await page.waitForSelector("#locked[open]");
    await page.fill("#token", "wrong");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.getElementById("locked-text").textContent.includes("not the admin token"));
    assert.equal(await page.locator(".engines").count(), 0);
    await page.fill("#token", TOKEN);
    await page.keyboard.press("Enter");
    await live(page);
    const unexpected = page.complaints.filter(complaint => !complaint.includes("401"));
    assert.deepEqual([unexpected, page.elsewhere], [[], []]);
    await page.context().close();
  });

  page = await rig.page();
  await check("pools, backends and models are shown", async () => {
    await shows("backends are ready", async () => {
      for (const backend of ["gpu0", "gpu1", "gpu2"]) assert.equal(await row(backend).locator(".chip").first().innerText(), "ready");
    });
    await page.waitForFunction(() => document.body.innerText.includes("3 of 3 backends"));
    await row("gpu0").locator("summary").click();
    await shows("flags of the engine", async () => assert.match(await row("gpu0").innerText(), /max-num-seqs=64/));
    await shows("no finding", async () => assert.match(await text("#view > section"), /no finding/));
    assert.equal(await button("gpu2", "restart").count(), 0, "an engine that the gateway does not run has no restart");
  });

  await check("a restart shows its phases", async () => {
    await button("gpu0", "restart").click();
    await page.click("#confirm-yes");
    await page.locator(".toast", { hasText: "gpu0 restarts." }).waitFor();
    await row("gpu0").locator(".reason", { hasText: /engine: (drain|stop|start|adapters|golden|warm up|ramp) for/ }).first().waitFor();
    await until("it is back", async () => await rig.state("short", "gpu0") === "ready");
  });

  await check("live values change under load", async () => {
    assert.equal(await tile("requests"), 0);
    rig.load(SECONDS);
    const seen = new Set();
    await until("five different rates", async () => seen.add(await tile("requests")).size >= 5);
    await until("requests in flight", async () => await tile("in flight") > 0);
    assert.equal(await row("gpu0").locator("details").getAttribute("open"), "", "what was opened stays open");
  });

  await check("the parts of the time to first token add up to it", async () => {
    await shows("parts of the history", async () => {
      const { recent } = await rig.get("/admin/history");
      const short = recent.classes.find(one => one.class === "short").ttft_parts.all;
      const sum = short.queue + short.connect + short.backend + short.other;
      assert.ok(Math.abs(sum / short.ttft - 1) < .01 && short.queue > 0 && short.backend > 0, JSON.stringify(short));
    });
    await until("four bars of parts", async () => await page.locator(".stack[role=img]").count() >= 4);
    await show(page, "latency");
    for (const name of ["TTFT", "ITL", "TPOT", "E2EL"]) {
      await shows(`a time of ${name}`, async () => assert.match(await text(`th[scope=row]:text-is("${name}") + td`), /^[\d.]+ m?s$/));
    }
    await page.click("text=by pool");
    await page.locator("#view h2", { hasText: "pool short" }).waitFor();
    await page.click("text=by class");
    const curve = () => page.locator(".curve.p99").first().getAttribute("d");
    const before = await curve();
    await until("a curve moves", async () => await curve() !== before);
  });

  await check("a request is found by its id", async () => {
    await rig.chat("visit/1", "SECRET words");
    await show(page, "requests");
    await page.fill("input[name=id]", "visit/1");
    await page.keyboard.press("Enter");
    await page.locator(".timeline .lane").first().waitFor();
    await shows("its wait", async () => assert.match(await text(".timeline"), /visit\/1[\s\S]*wait for the backend|queue full|queue timeout/));
    assert.ok(!(await page.content()).includes("SECRET"));
    await page.fill("input[name=id]", "unknown");
    await page.click("text=Show");
    await page.locator("[role=alert]", { hasText: "no request with this id" }).waitFor();
    page.complaints = page.complaints.filter(complaint => !complaint.includes("404"));
    await page.locator("table a.link").first().click();
    await page.locator(".timeline .lane").first().waitFor();
  });

  await check("a chart by class shows what the history says, and a part of it has an address", async () => {
    await show(page, "overview");
    const titles = () => page.locator("section:has(#by-class) .chart .title").allInnerTexts();
    await until("the numbers of the history", async () => {
      const { recent } = await rig.get("/admin/history"), of = name => recent.classes.find(one => one.class === name);
      const shown = await titles();
      return shown.length === 2 && ["short", "long"].every((name, index) => shown[index].startsWith(name) && shown[index].includes(`${of(name).completed} completed`));
    });
    await page.locator("#window", { hasText: "last 5 min, each 5 s" }).waitFor();
    await page.click("text=1 h");
    await page.locator("#window", { hasText: "last hour, each minute" }).waitFor();
    await page.reload();
    await live(page);
    await page.locator("#window", { hasText: "last hour, each minute" }).waitFor();
    await page.click("text=5 min");
    const { x, y, width } = await page.locator(".chart .plot").first().boundingBox();
    await page.mouse.move(x + width * .5, y + 20);
    await page.mouse.down();
    await page.mouse.move(x + width * .9, y + 20, { steps: 3 });
    await page.mouse.up();
    await page.waitForFunction(() => /^#class=short&from=[\dT:-]+Z&to=[\dT:-]+Z$/.test(location.hash));
    await page.reload();
    await live(page);
    await shows("the class alone", async () => assert.deepEqual(await page.locator("#view h2").allInnerTexts(), ["class short"]));
    await page.fill("input[name=from]", "00:01");
    await page.fill("input[name=to]", "00:02");
    const minutes = new Date().getHours() * 60 + new Date().getMinutes();
    await page.click("text=Show");
    if (minutes > 65) await page.locator("[role=alert]", { hasText: "not within the last hour" }).waitFor();
  });

  await check("an experiment appears with its confidence sequences", async () => {
    await show(page, "experiments");
    await page.locator("#view h2", { hasText: "sql-adapter" }).waitFor();
    await page.waitForFunction(() => document.querySelectorAll(".band").length === 3);
    const requests = page.locator("tbody tr", { hasText: "control" }).locator("td").nth(3);
    await until("more than 50 requests", async () => parseInt(await requests.innerText()) > 50);
  });

  await check("the tuner proposes; approve, freeze and resume work", async () => {
    await show(page, "tuner");
    // This check comes before the drain, because the tuner measures for at least ten seconds and
    // begins anew when a backend enters or leaves rotation.
    await page.locator(".events .chip", { hasText: "proposed" }).waitFor({ timeout: 40_000 });
    await page.locator("[data-action=approve]").first().click();
    await page.click("#confirm-yes");
    await page.locator(".events .chip", { hasText: "tried" }).waitFor();
    await page.locator("[data-action=freeze]").click();
    await page.click("#confirm-yes");
    await page.locator(".chip", { hasText: "frozen by an operator" }).waitFor();
    await page.locator("[data-action=resume]").click();
    await page.click("#confirm-yes");
    await page.locator("[data-action=freeze]").waitFor();
  });

  await check("drain asks first, works, and enable undoes it", async () => {
    await show(page, "overview");
    await button("gpu1", "drain").click();
    await page.click("#confirm-no");
    assert.equal(await rig.state("short", "gpu1"), "ready");
    await button("gpu1", "drain").click();
    await page.click("#confirm-yes");
    await row("gpu1").locator(".chip", { hasText: /drain(ing|ed)/ }).waitFor();
    assert.equal(await rig.state("short", "gpu1"), "draining");
    await button("gpu1", "enable").click();
    await page.keyboard.press("Escape");
    await button("gpu1", "enable").press("Enter");
    await page.click("#confirm-yes");
    await row("gpu1").locator(".chip", { hasText: "ready" }).waitFor();
  });

  await check("drain needs the token", async () => {
    await page.evaluate(() => sessionStorage.removeItem("token"));
    await button("gpu1", "drain").click();
    await page.click("#confirm-yes");
    await page.waitForSelector("#locked[open]");
    assert.equal(await rig.state("short", "gpu1"), "ready");
    await page.fill("#token", TOKEN);
    await page.keyboard.press("Enter");
    await until("it drains", async () => await rig.state("short", "gpu1") === "draining");
    await button("gpu1", "enable").click();
    await page.click("#confirm-yes");
    await until("it is enabled", async () => await rig.state("short", "gpu1") === "ready");
    page.complaints = page.complaints.filter(complaint => !complaint.includes("401"));
  });

  await check("findings come first, as the gateway has them, and lead to the thing", async () => {
    await show(page, "overview");
    await page.locator(".findings li", { hasText: "Engine gpu1 of pool short" }).waitFor({ timeout: FINDINGS_MS });
    await page.locator(".findings li", { hasText: "Key team/b has" }).waitFor({ timeout: FINDINGS_MS });
    await until("the findings of the gateway", async () => {
      const { findings } = await rig.get("/admin/findings"), shown = await page.locator("#view > section").first().locator("li").allInnerTexts();
      return shown.length === findings.length && findings.every(({ sentence, advice }, index) => shown[index].includes(sentence) && shown[index].includes(advice));
    });
    await shows("the number of findings", async () => assert.equal(await text("#nav a[href='#overview'] .count"), String(await page.locator(".findings li").count())));
    await page.locator(".findings li", { hasText: "gpu1" }).locator("text=the engine").click();
    await page.locator("#view h2", { hasText: "Engine short/gpu1" }).waitFor();
    await page.goBack();
    await page.locator(".findings li", { hasText: "gpu1" }).locator("text=latency since then").click();
    await page.locator("#view h2", { hasText: "pool short" }).waitFor();
    await until("four curves", async () => await page.locator(".chart .curve").count() >= 4);
  });

  await check("engines stand side by side, and the slow one stands out", async () => {
    await show(page, "engines");
    const rows = page.locator(".compare tbody tr"), cells = rows.nth(1).locator("td");
    await shows("all engines", async () => assert.deepEqual(await rows.locator("th a").allInnerTexts(), ["short/gpu0", "short/gpu1", "long/gpu2"]));
    await until("the requests of the gateway's last minute", async () => {
      const { engines } = await rig.get("/admin/findings");
      return parseInt(await cells.nth(2).innerText()) === engines[1].requests && engines[1].requests > 0;
    });
    await shows("the slow engine and known columns", async () => {
      assert.match(await cells.nth(5).locator(".out").innerText(), /ms/);
      assert.match(await rows.nth(1).locator("th").innerText(), /slow engine/);
      for (const known of [6, 7, 8, 9, 10]) assert.match(await rows.nth(2).locator("td").nth(known - 1).innerText(), /\d/, `column ${known}`);
    });
    await page.click(".compare th:has-text('TPOT') button");
    await page.waitForFunction(() => document.querySelector(".compare [aria-sort=descending]")?.textContent.includes("TPOT"));
    await shows("the engine of the largest TPOT first", async () => {
      const { engines } = await rig.get("/admin/findings"), [slowest] = engines.toSorted((one, other) => other.tpot_s - one.tpot_s);
      assert.equal(await rows.first().locator("th a").innerText(), `${slowest.pool}/${slowest.name}`);
    });
    await page.fill("#engines-filter", "gpu2");
    await until("one engine", async () => await rows.count() === 1);
    await page.fill("#engines-filter", "");
    await page.check("text=only engines that stand out");
    await until("the slow engine alone", async () => (await rows.locator("th a").allInnerTexts()).join() === "short/gpu1");
    await page.uncheck("text=only engines that stand out");
  });

  await check("keys stand side by side, with the work and the limits of each", async () => {
    await show(page, "keys");
    const rows = page.locator(".compare tbody tr");
    await until("both keys", async () => (await rows.locator("th a").allInnerTexts()).join() === "team/b,team-a");
    await until("the tokens of the gateway's last minute", async () => {
      const { keys } = await rig.get("/admin/findings");
      const [busy, calm] = await rows.allInnerTexts();
      return busy.includes("busy key") && busy.includes(`${keys[0].requests}\t`) && /\d+ \/ 200/.test(busy) && /^[\d.]+ s$/.test(await rows.first().locator("td").nth(3).innerText()) && /1.0M/.test(calm);
    });
  });

  await check("a link to a thing shows it, also after a reload", async () => {
    // The gateway keeps only the latest requests, so a new one is sent.
    await rig.chat("visit/2", "a question");
    for (const [address, said] of [...Object.values(THINGS), ["#request=visit/2", "visit/2"]]) {
      await page.goto(rig.admin + "/" + address);
      await page.reload();
      await page.locator("#view h2", { hasText: said }).waitFor();
    }
    await page.goto(rig.admin + "/#engine=short/none");
    await page.locator("[role=alert]", { hasText: "no engine short/none" }).waitFor();
  });

  await check("the keyboard reaches everything", async () => {
    await page.evaluate(() => { document.activeElement.blur(); scrollTo(0, 0); });
    await page.goto(rig.admin + "/#overview");
    await page.reload();
    await live(page);
    await page.keyboard.press("Tab");
    assert.equal(await page.evaluate(() => document.activeElement.className), "skip");
    await page.keyboard.press("Tab");
    await page.keyboard.press("Tab");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => location.hash === "#latency" && document.querySelector("#nav [aria-current]").hash === "#latency");
    await page.click("#theme");
    assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "light");
    await page.click("#theme");
    assert.equal(await page.evaluate(() => getComputedStyle(document.documentElement).colorScheme), "dark");
    await page.click("#theme");
  });

  for (const colorScheme of ["light", "dark"]) {
    await check(`no serious fault of accessibility, ${colorScheme}`, async () => {
      const on = await rig.page({ colorScheme });
      for (const view of VIEWS) {
        await show(on, view);
        if (view === "requests") await on.locator("table a.link").first().click();
        if (view === "overview") await row("gpu0", on).locator("summary").click();
        assert.deepEqual(await violations(on), [], view);
        await on.evaluate(() => scrollTo(0, 0));
        await on.screenshot({ path: `${shots}/${colorScheme === "light" ? "desktop" : "dark"}-${view}.png`, fullPage: true });
      }
      for (const [name, [address, said]] of Object.entries(THINGS)) {
        await on.goto(rig.admin + "/" + address);
        await on.locator("#view h2", { hasText: said }).waitFor();
        assert.deepEqual(await violations(on), [], name);
        await on.screenshot({ path: `${shots}/${colorScheme === "light" ? "desktop" : "dark"}-${name}.png`, fullPage: true });
      }
      assert.deepEqual([on.complaints, on.elsewhere], [[], []]);
      await on.context().close();
    });
  }

  await check("a phone shows everything without scrolling sideways", async () => {
    const phone = await rig.page({ width: 390, height: 844 });
    for (const view of [...VIEWS, "engine", "key"]) {
      if (THINGS[view]) await phone.goto(rig.admin + "/" + THINGS[view][0]); else await show(phone, view);
      if (THINGS[view]) await phone.locator("#view h2", { hasText: THINGS[view][1] }).waitFor();
      const [wide, room] = await phone.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
      assert.ok(wide <= room, `${view}: ${wide} px of ${room}`);
      await phone.screenshot({ path: `${shots}/phone-${view}.png`, fullPage: true });
    }
    assert.deepEqual(await violations(phone), []);
    await phone.context().close();
  });

  await check("no console errors, and no request to another host", async () => assert.deepEqual([page.complaints, page.elsewhere], [[], []]));

  await check("a gateway that stops answering is shown as not connected, and found again", async () => {
    rig.gateway.kill("SIGSTOP");
    await page.locator("#live", { hasText: "not connected" }).waitFor();
    await page.locator("#notice").waitFor();
    rig.gateway.kill("SIGCONT");
    await live(page);
    await page.locator("#notice").waitFor({ state: "hidden" });
  });
}

try {
  await rig.up();
  await checks();
} catch (error) {
  failed++;
  console.log(`FAIL ${error.stack}`);
} finally {
  await rig.down();
}
console.log(`${passed} passed, ${failed} failed`);
process.exitCode = failed ? 1 : 0;
