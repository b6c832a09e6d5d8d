// Engines side by side: each beside the other engines of the same pool in the last minute, and one engine with all that is known of it.
import { h } from "./dom.js";
import { NONE, count, percent, time, timeText, words } from "./units.js";
import { compare, medianWithout } from "./compare.js";
import { chips, isOfEngine, kind, list } from "./findings.js";
import { engineLink, link } from "./links.js";
import { STATES, actions, bar, facts, reasons, stateWord, tile } from "./backend.js";
import { requestsOf } from "./requests.js";

/** A value is marked from OUT times the median of the pool's other engines on, if the engine has had FEWEST requests. */
const OUT = 2, FEWEST = 8;

/** The measured columns: name, heading, meaning, reading of a row, text. A larger value is worse, or with `low` a smaller one. */
const MEASURES = [
  { id: "ttft", head: "TTFT", title: "Mean time from sending to the first token: the engine's queue and the prefill", read: row => ms(row.minute?.engine_ttft_s), show: timeText },
  { id: "tpot", head: "TPOT", title: "Typical time per output token", read: row => ms(row.minute?.tpot_s), show: timeText },
  { id: "prefill", head: "Prefill", low: true, title: "Prompt tokens per second until the first token, waiting in the engine included", read: row => row.backend.prefill_seen_seconds === undefined ? null : row.backend.prefill_tokens_per_second, show: value => `${count(value)}/s` },
  { id: "running", head: "Running", title: "Requests that run, by the engine's own metrics", read: row => row.minute?.engine?.running },
  { id: "waiting", head: "Waiting", title: "Requests that wait in the engine, by its own metrics", read: row => row.minute?.engine?.waiting },
  { id: "kv", head: "KV use", title: "Share of the KV cache in use", read: row => row.minute?.engine?.kv_usage, show: value => percent(value, 0) },
  { id: "preempted", head: "Preempted", title: "Preemptions in the last minute", read: row => row.minute?.engine?.preemptions },
];
/** Measures by which an engine is marked as standing out. The other measures differ with the load. */
const JUDGED = ["ttft", "tpot", "prefill"];

const ms = seconds => seconds === null || seconds === undefined ? null : seconds * 1000;
const known = value => value !== null && value !== undefined;

/** Every engine with the last minute, the findings about it, and how far its values are from the pool's. */
function rowsOf({ status, minute }) {
  const minutes = new Map((minute?.engines || []).map(one => [`${one.pool}/${one.name}`, one]));
  return status.pools.flatMap(pool => {
    const own = pool.backends.map(backend => {
      const key = `${pool.name}/${backend.name}`, found = (status.findings || []).filter(finding => isOfEngine(finding, pool.name, backend.name));
      return { key, name: `${key} ${backend.url}`, pool, backend, minute: minutes.get(key), found, kind: found.length ? kind(found[0]) : "" };
    });
    const busy = own.filter(row => row.backend.state === "ready" && row.minute?.requests >= FEWEST);
    for (const row of own) row.usual = {};
    for (const measure of MEASURES) {
      const sorted = busy.map(measure.read).filter(known).sort((a, b) => a - b);
      for (const row of own) row.usual[measure.id] = medianWithout(sorted, busy.includes(row) ? measure.read(row) : undefined);
    }
    return own;
  });
}

/** How many times worse a value is than the median of the pool's other engines; null if it does not stand out. */
function factor(row, measure) {
  const own = measure.read(row), usual = row.usual[measure.id];
  if (!JUDGED.includes(measure.id) || !own || !usual || !(row.minute?.requests >= FEWEST)) return null;
  const times = measure.low ? usual / own : own / usual;
  return times >= OUT ? times : null;
}

const standsOut = row => row.found.length > 0 || MEASURES.some(measure => factor(row, measure));

export function engines(state, app) {
  const { status, minute, place, view } = state;
  if (!status) return [h("div", { class: "card empty" }, "Waiting for the gateway.")];
  const all = rowsOf(state), one = place.engine && all.find(row => row.key === place.engine);
  const rows = all.filter(row => (!place.pool || row.pool.name === place.pool) && (!view.outliers || standsOut(row)));
  const said = measure => row => {
    const value = measure.read(row), times = factor(row, measure), text = known(value) ? (measure.show || count)(value) : NONE;
    return times ? h("span", { class: "out", title: `${times.toFixed(1)} times worse than the median of the pool's other engines` }, text, h("span", { class: "unseen" }, " stands out")) : text;
  };
  const columns = [
    { id: "name", head: "Engine", text: true, read: row => row.key, cell: row => [h("a", { href: engineLink(row.pool.name, row.backend.name) }, row.key), h("div", { class: "row" }, chips(row.found))] },
    { id: "state", head: "State", text: true, read: row => row.backend.state, cell: row => h("span", { class: "chip " + (row.backend.failing ? "bad" : STATES[row.backend.state] || "") }, stateWord(row.backend)) },
    { id: "flight", head: "In flight / slots", read: row => row.backend.slots.used, cell: row => bar("", row.backend.slots, { known: true }) },
    { id: "requests", head: "Requests", title: "Requests that ended in the last minute", read: row => row.minute?.requests, cell: row => count(row.minute?.requests) },
    { id: "lost", head: "Failed", title: "Requests that failed at the engine in the last minute", read: row => row.minute?.lost, cell: row => row.minute?.lost ? h("span", { class: "out" }, count(row.minute.lost)) : count(row.minute?.lost) },
    ...MEASURES.map(measure => ({ ...measure, cell: said(measure) })),
  ];
  const outliers = h("label", { class: "row" }, h("input", { type: "checkbox", checked: view.outliers, onchange: event => app.set({ outliers: event.target.checked }) }), "only engines that stand out");
  const inPool = place.pool && h("a", { href: "#engines" }, `only pool ${place.pool}: show all`);
  return [
    place.engine && (one ? engineCard(one, state) : h("p", { class: "card", role: "alert" }, `There is no engine ${place.engine} now.`)),
    h("section", { class: "card", "aria-labelledby": "engines-title" },
      h("div", { class: "head" }, h("h2", { id: "engines-title" }, "Engines side by side"), h("span", { class: "grow" }),
        h("span", { class: "hint" }, minute?.engines.length ? "last minute; state and in flight: now" : "the last minute is known a minute after the start")),
      compare({ caption: "Engines", columns, rows, total: all.length, own: ["engines", view], app, filters: [outliers, inPool] }),
      h("p", { class: "sub" }, `Marked: ${OUT} times worse than the median of the pool's other engines, from ${FEWEST} requests on. Running, waiting, KV use and preemptions are the engine's own.`)),
  ];
}

/** One engine. */
function engineCard(row, { report, status }) {
  const { pool, backend, minute } = row;
  const beside = measure => {
    const value = measure.read(row), usual = row.usual[measure.id], show = measure.show || count, seconds = measure.show === timeText;
    const [number, unit] = !known(value) ? [NONE, ""] : seconds ? time(value) : [show(value), ""];
    return tile(number, unit, known(usual) ? `${measure.head}; others ${show(usual)}` : measure.head, factor(row, measure) ? "warn" : "");
  };
  return h("section", { class: "card", key: "engine-" + row.key, "aria-labelledby": "engine-title" },
    h("div", { class: "head" }, h("h2", { id: "engine-title" }, `Engine ${row.key}`),
      h("span", { class: "chip " + (backend.failing ? "bad" : STATES[backend.state] || "") }, stateWord(backend)), h("span", { class: "grow" }),
      h("div", { class: "row" }, actions(pool, backend)), h("a", { href: "#engines" }, "close")),
    row.found.length > 0 && list(row.found, status),
    h("div", {}, reasons(backend).map(text => h("p", { class: "sub" }, text))),
    h("div", { class: "tiles" },
      bar("slots", backend.slots, { known: true }), tile(count(minute?.requests), "", "requests, last minute"), tile(count(minute?.lost), "", "failed, last minute", minute?.lost ? "bad" : ""),
      MEASURES.map(beside)),
    facts(backend),
    requestsOf(report, one => one.pool === pool.name && one.backend === backend.name));
}
