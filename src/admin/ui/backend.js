// One backend as text, numbers and buttons: its state and limits, the reasons for the state, its engine, and the actions on it.
import { h } from "./dom.js";
import { NONE, count, span, words } from "./units.js";
import { act, backendAction } from "./actions.js";
import { engineLink } from "./links.js";

/** The word for a state. A draining backend without requests in flight is drained. */
export const stateWord = ({ state, in_flight }) => state === "draining" && !in_flight ? "drained" : state;
/** From this many seconds on the silence of an engine with requests in flight is shown. */
const SILENT = 10;
export const STATES = { ready: "good", starting: "warn", probation: "warn", draining: "warn", ejected: "bad", down: "bad" };

export function tile(value, unit, caption, kind) {
  return h("div", { class: "tile" + (kind ? " " + kind : "") }, h("b", {}, value, unit && h("i", {}, unit)), h("small", {}, caption));
}

export function bar(caption, { used, limit }, { loss, known } = {}) {
  const limited = limit !== undefined && limit !== null, share = limited ? (limit ? used / limit : used ? 1 : 0) : 0;
  // A full queue refuses requests; full slots or permits are limits that do their work.
  const kind = share >= 1 && loss ? "full" : share >= .8 ? "high" : "";
  return h("div", { class: known ? "bar-box known" : "bar-box" },
    h("div", { class: "label" }, caption && h("span", {}, caption), h("b", {}, limited ? `${count(used)} / ${count(limit)}` : count(used))),
    h("div", { class: "track" }, h("div", { class: "fill " + kind, vars: { "--share": Math.min(100, share * 100).toFixed(1) + "%" } })));
}

// If there are as many permits as slots, permits limit nothing; they only divide short and long requests.
const limitsPrefill = ({ long_prefills, slots }) => long_prefills.limit < (slots.limit ?? Infinity);

const serves = engine => ["serve", "ramp"].includes(engine?.step);

/** The reasons for a backend's state and the activity of its engine, one text each. */
export function reasons(backend) {
  const { engine } = backend;
  const unknown = backend.models_unknown && `${backend.models_unknown}: it gets requests for every model of its pool`;
  const silent = backend.silent_seconds >= SILENT && `no bytes for ${span(backend.silent_seconds)}, ${count(backend.in_flight)} in flight`;
  // A failure that is over is shown only in the details.
  const failed = !serves(engine) && engine?.why;
  const changing = engine && !["serve", "off"].includes(engine.step);
  const phase = changing && `engine: ${words(engine.step)} for ${span(engine.seconds)}${engine.detail ? ", " + engine.detail : ""}`;
  return [backend.reason, backend.engine_differs, unknown, silent, engine?.taken_back && `a change was taken back: ${engine.taken_back}`, failed, engine?.waits && `waits: ${engine.waits}`, phase].filter(Boolean);
}

/** The buttons that fit the state. */
export function actions(pool, backend) {
  const { engine, state } = backend;
  return state !== "removed" && ["drain", "enable", "restart"].map(action => {
    const fits = { drain: state !== "draining", enable: state === "draining" || engine?.step === "hold" || engine?.step === "backoff", restart: Boolean(engine) }[action];
    return fits && h("button", {
      type: "button", class: "small", "data-action": action, "aria-label": `${action} ${backend.name} of pool ${pool.name}`,
      onclick: () => act(backendAction[action](pool.name, backend.name)),
    }, action);
  });
}

export function backendRow(pool, backend) {
  const { engine, state } = backend, permits = limitsPrefill(backend);
  return h("tr", { key: backend.name },
    h("td", { class: "name" },
      h("div", { class: "row" }, h("b", {}, h("a", { href: engineLink(pool.name, backend.name) }, backend.name)), h("span", { class: "chip " + (backend.failing ? "bad" : STATES[state] || "") }, stateWord(backend)),
        engine?.restarts > 0 && h("span", { class: "chip warn" }, `${engine.restarts} restart${engine.restarts > 1 ? "s" : ""}`)),
      // This element is always there, so that the details after it keep their place and stay open.
      h("div", {}, reasons(backend).map(text => h("div", { class: "reason" }, text))),
      h("details", {}, h("summary", {}, "details"), facts(backend))),
    h("td", { class: "use" }, bar("slots", backend.slots, { known: true })),
    h("td", { class: "use", title: backend.tokens_limit_reason }, bar("tokens", backend.tokens, { known: true })),
    h("td", { class: "use" }, permits && bar("prefill permits", backend.long_prefills), (!permits || backend.prefill_tokens.limit !== undefined) && bar("prefill tokens", backend.prefill_tokens)),
    h("td", { class: "nowrap" },
      h("div", {}, backend.tpot_ms ? `${backend.tpot_ms.toFixed(1)} ms/token` : NONE),
      backend.prefill_seen_seconds !== undefined && h("div", { class: "sub", title: "prompt tokens per second until the first token, waiting in the engine included" },
        `prefill ${count(backend.prefill_tokens_per_second)}/s`, backend.prefill_seen_seconds >= 60 && `, ${span(backend.prefill_seen_seconds)} ago`)),
    h("td", { class: "actions" }, actions(pool, backend)));
}

const kvEvents = ({ state, blocks, linked, unlinked, losses }) =>
  `${state}, ${count(blocks)} blocks; of ${count(linked + unlinked)} prompts ${count(linked)} found` + (losses ? `; lost ${count(losses)} times` : "");

export function facts(backend) {
  const { engine } = backend, last = engine?.last_change;
  const rows = [
    ["address", backend.url], ["weight", backend.weight], ["in flight", count(backend.in_flight)],
    ["context", backend.max_model_len && `${count(backend.max_model_len)} tokens`],
    ["KV events", backend.kv_events && kvEvents(backend.kv_events)],
    ["token limit", backend.tokens_limit_reason && `learned: ${backend.tokens_limit_reason}`],
    ["permits for", limitsPrefill(backend) && backend.long_threshold && `prompts over ${count(backend.long_threshold)} tokens`],
    ["engine", engine ? `${engine.driver}, ${words(engine.step)} for ${span(engine.seconds)}, ${engine.restarts} unplanned restarts` : "run by another program"],
    ["flags", engine?.settings], ["last good flags", engine?.last_good],
    ["last failure", serves(engine) && engine?.why],
    ["last change", last && `#${last.id}: ${words(last.outcome)}${last.why ? ", " + last.why : ""}`],
  ];
  return h("dl", { class: "facts" }, rows.filter(([, value]) => value).map(([key, value]) =>
    [h("dt", {}, key), h("dd", { class: key.includes("flags") || key === "address" ? "mono" : undefined }, String(value))]));
}
