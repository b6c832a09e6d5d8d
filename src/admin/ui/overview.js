// The overview: findings, first tokens by class, totals, pools with their backends, where the time before the first token goes, what was
// lost and why, models.
import { h } from "./dom.js";
import { NONE, count, percent, time, timeText, words } from "./units.js";
import { backendRow, bar, tile } from "./backend.js";
import { lineChart, marks, partsBar, partsLegend } from "./charts.js";
import { findings } from "./findings.js";
import { link } from "./links.js";
import { failureTable } from "./requests.js";
import { byLength, select, spanChoice, spanOf } from "./span.js";

/** From this many backends on there is a filter. */
const MANY = 12;
/** Classes with a chart on this view; the view "Latency" has all. */
const CLASSES = 6;
/** From this share of failed or shed requests on a pool is marked. */
const SOME_FAIL = .02, MOST_FAIL = .5;

const timeTile = (ms, caption) => tile(...time(ms), caption);

export function overview(state, app) {
  const { status, report } = state;
  if (!status) return [h("div", { class: "card empty" }, "Waiting for the gateway.")];
  const backends = status.pools.reduce((sum, pool) => sum + pool.backends.length, 0);
  return [
    findings(state),
    byClass(state, app),
    totals(status),
    backends >= MANY && filter(state, app, backends),
    status.pools.map(pool => ({ pool, shown: matching(pool, state.view) })).filter(({ pool, shown }) => shown.length || !isFiltered(state.view) && !pool.backends.length)
      .map(({ pool, shown }) => poolCard(pool, shown)),
    h("div", { class: "two" }, report && firstToken(report), report && lost(report)),
    report && models(report),
  ];
}

function totals({ pools }) {
  const sum = read => pools.reduce((all, pool) => all + read(pool), 0), recent = key => sum(pool => pool.last_5_minutes[key]);
  const judged = pools.filter(pool => pool.last_5_minutes.attainment !== null);
  const worst = judged.length ? Math.min(...judged.map(pool => pool.last_5_minutes.attainment)) : null;
  return h("section", { class: "card", "aria-label": "All pools" }, h("p", { class: "sub" }, "last 5 min; in flight and waiting: now"), h("div", { class: "tiles" },
    tile(count(recent("requests_per_second")), "/s", "requests"),
    tile(count(sum(pool => pool.backends.reduce((all, one) => all + one.in_flight, 0))), "", "in flight"),
    tile(count(sum(pool => pool.queue.used)), "", "waiting"),
    tile(count(recent("prompt_tokens_per_second")), "tok/s", "prompt"),
    tile(count(recent("generation_tokens_per_second")), "tok/s", "generated"),
    tile(count(recent("spilled")), "", "spilled"),
    tile(count(recent("shed")), "", "shed", recent("shed") ? "warn" : ""),
    tile(count(recent("failed")), "", "failed", recent("failed") ? "bad" : ""),
    tile(...(worst === null ? [NONE, ""] : [(worst * 100).toFixed(1), "%"]), judged.length > 1 ? "objectives met (worst)" : "objectives met")));
}

/** TTFT of each class, so that the tails of short and long requests stand beside each other. Always there, so that what follows keeps its place and stays open. */
function byClass(state, app) {
  const { status, view } = state, shown = spanOf(state), { history } = shown;
  const rows = byLength(history?.classes || []).filter(row => row.class && row.ttft_ms).slice(0, CLASSES);
  const running = status.applied?.at(-1)?.title;
  return h("section", { class: "card", key: "by-class", "aria-labelledby": "by-class" },
    h("div", { class: "head" }, h("h2", { id: "by-class" }, "Time to first token by class"),
      running && h("span", { class: "chip good", id: "running" }, `now: ${running}`), h("span", { class: "hint", id: "window" }, shown.name), h("span", { class: "grow" }),
      h("div", { class: "legend" }, h("span", { class: "p50" }, "P50"), h("span", { class: "p99" }, "P99")), spanChoice(shown, app, { view: "overview" })),
    rows.length ? h("div", { class: "charts" }, rows.map(row => lineChart({
      title: row.class, href: link({ class: row.class, span: state.place.span }), wide: rows.length <= 3, now: `P50 ${timeText(row.ttft_ms.p50)} · P99 ${timeText(row.ttft_ms.p99)} · ${count(row.completed)} completed`,
      lines: [["P50", "p50", 0], ["P99", "p99", 1]].map(([name, style, at]) => ({ name, style, values: row.points.ttft_ms.map(point => point && point[at]) })),
      show: value => value === null || value === undefined ? NONE : timeText(value), seconds: history.interval_seconds,
      ...shown, marks: marks(status), hover: view.hover?.name === "by-class" ? view.hover : null,
      onHover: hover => app.set({ hover: hover && { name: "by-class", ...hover } }), onSelect: select(shown, { class: row.class }, app),
    }))) : h("p", { class: "empty" }, `No streamed request: ${shown.name}.`));
}

function filter({ view }, app, backends) {
  const set = change => app.set(change);
  return h("div", { class: "row" },
    h("label", { class: "soft", for: "filter" }, `${backends} backends; show`),
    h("input", { id: "filter", type: "search", placeholder: "name or address", value: view.filter, oninput: event => set({ filter: event.target.value }) }),
    h("label", { class: "row" }, h("input", { type: "checkbox", checked: view.troubled, onchange: event => set({ troubled: event.target.checked }) }), "only those that are not ready"));
}

/** How a pool fares, as [kind, text]. */
function health(pool) {
  const present = pool.backends.filter(one => one.state !== "removed" && one.state !== "idle"), ready = present.filter(one => one.state === "ready").length;
  const { failed, completed, shed } = pool.last_minute, failing = failed / Math.max(1, failed + completed), shedding = shed / Math.max(1, shed + failed + completed);
  if (failing >= MOST_FAIL) return ["bad", "most requests fail, last minute"];
  if (!present.length && pool.backends.length) return ["good", "no engine wanted"];
  if (!ready) return ["bad", `0 of ${present.length} ready`];
  if (failing >= SOME_FAIL) return ["warn", `${percent(failing, 0)} of requests fail, last minute`];
  if (shedding >= SOME_FAIL) return ["warn", `${percent(shedding, 0)} of requests shed, last minute`];
  return [ready === present.length ? "good" : "warn", `${ready} of ${present.length} ready`];
}

const isFiltered = view => Boolean(view.filter || view.troubled);

/** The backends that the filter leaves. */
function matching({ backends }, view) {
  const wanted = (view.filter || "").toLowerCase();
  return backends.filter(one => (one.name + " " + one.url).toLowerCase().includes(wanted) && (!view.troubled || one.state !== "ready"));
}

function poolCard(pool, shown) {
  const recent = pool.last_5_minutes, [kind, text] = health(pool), title = "pool-" + pool.name;
  const ends = [["shed", recent.shed], ["failed", recent.failed], ["spilled", recent.spilled], ["client left", recent.client_gone], ["refused", recent.refused]];
  const said = ends.filter(([, n]) => n).map(([what, n]) => `${count(n)} ${what}`).join(" · ");
  return h("section", { class: "card", key: title, "aria-labelledby": title },
    h("div", { class: "head" },
      h("h2", { id: title }, pool.name), h("span", { class: "chip " + kind }, text), h("span", { class: "grow" }),
      h("span", { class: "hint" }, "last 5 min: " + (said || "nothing shed, failed or spilled"))),
    h("div", { class: "tiles" },
      tile(count(recent.requests_per_second), "/s", "requests"),
      timeTile(recent.ttft_ms?.p50, "TTFT P50"), timeTile(recent.ttft_ms?.p99, "TTFT P99"),
      timeTile(recent.tpot_ms?.p50, "TPOT P50"), timeTile(recent.tpot_ms?.p99, "TPOT P99"),
      tile(...(recent.attainment === null ? [NONE, ""] : [(recent.attainment * 100).toFixed(1), "%"]), "objectives met"),
      bar("queue", pool.queue, { loss: true })),
    h("table", { class: "engines" },
      h("caption", { class: "unseen" }, `Backends of pool ${pool.name}`),
      h("colgroup", {}, ["", "use", "use", "use", "speed", "actions"].map(kind => h("col", { class: kind }))),
      h("thead", {}, h("tr", {}, ["Backend", "Slots", "Tokens", "Prefill", "Speed", ""].map(head =>
        h("th", { scope: "col" }, head || h("span", { class: "unseen" }, "Actions"))))),
      h("tbody", {}, shown.map(backend => backendRow(pool, backend)))),
    pool.engines_differ && h("p", { class: "sub" }, `Its engines serve different requests: ${pool.engines_differ}.`),
    shown.length < pool.backends.length && h("p", { class: "sub" }, `${pool.backends.length - shown.length} more do not match the filter.`));
}

function firstToken({ recent }) {
  const rows = recent.classes.filter(row => row.ttft_parts);
  const longest = Math.max(0, ...rows.flatMap(row => [row.ttft_parts.all.ttft, row.ttft_parts.slowest.ttft]));
  const group = (row, key, caption) => [
    h("span", { class: "sub" }, caption), partsBar(row.ttft_parts[key], longest, timeText),
    h("span", { class: "num" }, timeText(row.ttft_parts[key].ttft))];
  return h("section", { class: "card", "aria-labelledby": "first-token" },
    h("div", { class: "head" }, h("h2", { id: "first-token" }, "Time to first token: where it goes"), h("span", { class: "grow" }), h("span", { class: "hint" }, "means, last 5 min")),
    rows.length ? [partsLegend(), rows.map(row => [
      h("h3", { class: "who" }, row.class || "no class"),
      h("div", { class: "split" }, group(row, "all", "all"), group(row, "slowest", "slowest 5 %"))])]
      : h("p", { class: "empty" }, "No streamed request in the last five minutes."));
}

/** Reasons of all classes together, the most frequent first. */
function reasons(rows) {
  const sums = new Map();
  for (const row of rows) for (const [outcome, detail, n] of row.reasons) {
    const key = `${words(outcome)}: ${words(detail)}`;
    sums.set(key, (sums.get(key) || 0) + n);
  }
  return [...sums].sort((a, b) => b[1] - a[1]);
}

function lost({ recent, requests }) {
  const found = reasons(recent.classes), retries = recent.classes.flatMap(row => row.retries).reduce((sum, [, n]) => sum + n, 0);
  return h("section", { class: "card", "aria-labelledby": "lost" },
    h("div", { class: "head" }, h("h2", { id: "lost" }, "Shed and failed"), h("span", { class: "grow" }), h("span", { class: "hint" }, "last 5 min")),
    h("div", { class: "row" },
      found.map(([what, n]) => h("span", { class: "chip " + (what.startsWith("shed") ? "warn" : "bad") }, `${count(n)} ${what}`)),
      !found.length && h("span", { class: "chip good" }, "none"),
      retries > 0 && h("span", { class: "chip" }, `${count(retries)} attempts repeated`)),
    requests.failures.length ? failureTable(requests.failures.slice(0, 6)) : h("p", { class: "empty" }, "No request was shed and none failed since the gateway was started."));
}

function models({ models: all }) {
  return h("section", { class: "card", "aria-labelledby": "models" },
    h("div", { class: "head" }, h("h2", { id: "models" }, "Models and adapters")),
    all.length ? h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Models and adapters" }, h("table", {},
      h("thead", {}, h("tr", {}, ["Name", "Kind", "Pools", "Served by"].map(head => h("th", { scope: "col" }, head)))),
      h("tbody", {}, all.map(model => h("tr", { key: model.name },
        h("td", {}, h("b", {}, model.name), model.aliases && h("div", { class: "sub" }, "also " + model.aliases.join(", "))),
        h("td", {}, model.adapter ? "LoRA adapter" : "model", !model.declared && h("div", { class: "sub" }, "reported by engines")),
        h("td", {}, model.pools.join(", ") || NONE),
        h("td", {}, h("span", { class: "chip " + (model.serving[0] === 0 ? "bad" : model.serving[0] < model.serving[1] ? "warn" : "good") }, model.serving[1] ? `${model.serving[0]} of ${model.serving[1]} backends` : "no backend is ready")))))))
      : h("p", { class: "empty" }, "No engine has reported a model yet, and the configuration declares none."));
}
