// Findings: causes of slow requests, the most severe first, each with its evidence, since when, and what to do.
import { h } from "./dom.js";
import { span, words } from "./units.js";
import { engineLink, link } from "./links.js";

/** Causes by which requests fail; the others make requests slower. */
const FAIL = ["silent_engine", "engine_down"];
/** Seconds after a start in which the gateway cannot compare yet. */
const YOUNG = 90;
/** Seconds before the beginning of a cause that a link shows. */
const BEFORE = 300;

export const kind = finding => FAIL.includes(finding.cause) ? "bad" : "warn";

/** Whether a finding is about an engine, or about a key. */
export const isOfEngine = (finding, pool, name) => finding.cause !== "busy_key" && finding.pool === pool && finding.subject === name;
export const isOfKey = (finding, name) => finding.cause === "busy_key" && finding.subject === name;

/** All findings, or one calm line. */
export function findings({ status }) {
  const all = status.findings || [];
  if (!all.length) return h("section", { class: "card calm", "aria-label": "Findings" }, h("p", {}, h("span", { class: "chip good" }, "no finding"), " ",
    status.uptime_seconds < YOUNG ? "The gateway has just started; findings need about a minute and a half of requests." : "No engine, key or load stands out."));
  return h("section", { class: "card", "aria-labelledby": "findings" },
    h("div", { class: "head" }, h("h2", { id: "findings" }, "Findings"), h("span", { class: "chip " + kind(all[0]) }, all.length), h("span", { class: "grow" }), h("span", { class: "hint" }, "most severe first")),
    list(all, status, true));
}

/** These findings as a list; `named`: with links to the things that they are about. */
export function list(all, status, named) {
  return h("ol", { class: "findings" }, all.map(finding => h("li", { class: kind(finding) },
    h("p", {}, h("b", {}, finding.sentence), " ", h("span", { class: "chip " + kind(finding) }, `for ${span(finding.since_seconds)}`)),
    h("p", { class: "sub" }, "Seen: ", finding.evidence),
    h("p", {}, h("span", { class: "sub" }, "Do: "), finding.advice),
    h("p", { class: "row sub" }, links(finding, status, named).map(([text, href]) => h("a", { href }, text))))));
}

function links(finding, status, named) {
  const now = Date.parse(status.time), minute = at => new Date(at).toISOString().slice(0, 16) + "Z";
  const subject = finding.subject && (finding.cause === "busy_key" ? ["the key", link({ key: finding.subject })] : ["the engine", engineLink(finding.pool, finding.subject)]);
  const since = link({ view: "latency", by: "pool", pool: finding.pool, from: minute(now - (finding.since_seconds + BEFORE) * 1000), to: minute(now + 60_000) });
  return [named && subject, named && !subject && ["engines of the pool", link({ view: "engines", pool: finding.pool })], ["latency since then", since]].filter(Boolean);
}

/** Chips that name the findings about one thing. */
export const chips = all => all.map(finding => h("span", { class: "chip " + kind(finding), title: finding.sentence }, words(finding.cause)));
