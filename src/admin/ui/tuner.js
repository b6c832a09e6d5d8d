// The tuner: its estimates and their reasons, the proposed changes, the past changes, and the results. Limits of the gateway and flags of engines.
import { h } from "./dom.js";
import { NONE, clock, percent, span, words } from "./units.js";
import { act, tunerAction } from "./actions.js";

const MODES = {
  off: "It does nothing (tuner.mode).", advise: "It shows what it would change, and changes nothing (tuner.mode).",
  approve: "It makes changes that an operator approves (tuner.mode).", apply: "It makes changes by itself, one at a time (tuner.mode).",
};
const KINDS = { kept: "good", promoted: "good", undone: "warn", stood_back: "warn", reset: "warn", frozen: "bad", proposed: "", tried: "", compared: "" };

export function tuner({ report }) {
  if (!report) return [h("div", { class: "card empty" }, "Waiting for the gateway.")];
  const own = report.tuner, frozen = Boolean(own.frozen), order = frozen ? "resume" : "freeze";
  return [
    h("section", { class: "card", "aria-labelledby": "tuner-now" },
      h("div", { class: "head" },
        h("h2", { id: "tuner-now" }, "Tuner"), h("span", { class: "chip " + (frozen ? "warn" : "") }, frozen ? `frozen ${own.frozen}` : own.mode),
        h("span", { class: "hint" }, MODES[own.mode]), h("span", { class: "grow" }),
        own.mode !== "off" && h("button", { type: "button", "data-action": order, onclick: () => act(tunerAction[order]()) }, words(order))),
      own.mode !== "off" && !own.groups.length && h("p", { class: "empty" }, "It has nothing to tune by: set objectives in [slo].")),
    own.groups.map(group => groupCard(group, own.mode)),
    engines(own.engines, own.mode),
    h("section", { class: "card", "aria-labelledby": "timeline" },
      h("div", { class: "head" }, h("h2", { id: "timeline" }, "What it did")),
      own.events.length ? h("ol", { class: "events" }, own.events.map(event => h("li", { key: event.time + event.kind + event.key },
        h("time", { datetime: event.time, title: event.time }, clock(event.time)),
        h("span", {}, h("span", { class: "chip " + KINDS[event.kind] }, words(event.kind))),
        h("div", {}, h("b", { class: "mono" }, event.key), ` ${event.values[0]} → ${event.values[1]}`, h("div", { class: "sub" }, event.why)))))
        : h("p", { class: "empty" }, "Nothing yet.")),
  ];
}

function offer(proposal, mode) {
  return h("div", { class: "offer" },
    h("div", { class: "grow" },
      h("b", {}, `Proposal ${proposal.id}: `), h("span", { class: "mono" }, proposal.key), ` ${proposal.from} → ${proposal.to}`,
      h("div", { class: "sub" }, proposal.why)),
    proposal.approved ? h("span", { class: "chip" }, "approved: it begins as soon as nothing else is tried") : mode === "approve"
      ? h("button", { type: "button", class: "primary", "data-action": "approve", onclick: () => act(tunerAction.approve(proposal)) }, "approve")
      : h("span", { class: "sub" }, mode === "advise" ? "to make it: change the file, or set tuner.mode = \"approve\"" : ""));
}

function groupCard(group, mode) {
  const title = "group-" + group.pools.join("-");
  return h("section", { class: "card", key: title, "aria-labelledby": title },
    h("div", { class: "head" },
      h("h2", { id: title }, (group.pools.length > 1 ? "pools " : "pool ") + group.pools.join(", ")),
      h("span", { class: "chip" }, group.doing), h("span", { class: "grow" }),
      group.attainment !== null && h("span", { class: "chip " + (group.attainment >= group.target ? "good" : "warn") }, `in its own window: objectives met ${percent(group.attainment)}, target ${percent(group.target)}`)),
    h("p", {}, group.why),
    group.diagnoses.length > 0 && h("div", {},
      h("h3", {}, "Diagnosis"),
      h("ul", { class: "plain" }, group.diagnoses.map(found => h("li", {},
        h("span", { class: "chip" }, words(found.reading)), " ", found.evidence, found.backends.length > 0 && h("span", { class: "soft" }, ` (${found.backends.join(", ")})`),
        found.advice && h("div", { class: "sub" }, found.advice))))),
    group.proposal && offer(group.proposal, mode),
    group.limits.length > 0 && h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Limits that were moved" }, h("table", {},
      h("thead", {}, h("tr", {}, ["Limit that was moved", "Configured", "In force"].map(head => h("th", { scope: "col" }, head)))),
      h("tbody", {}, group.limits.map(limit => h("tr", {}, h("td", { class: "mono" }, limit.key), h("td", {}, limit.configured), h("td", {}, h("b", {}, limit.in_force))))))),
    group.blocked.length > 0 && h("ul", { class: "plain sub" }, group.blocked.map(one => h("li", {}, `${one.key} is not ${one.up ? "raised" : "lowered"} for ${span(one.left)}: ${one.why}`))));
}

function engines(own, mode) {
  if (!own.doing && !own.changes.length) return null;
  const gain = value => value.toFixed(3);
  return h("section", { class: "card", "aria-labelledby": "tuner-engines" },
    h("div", { class: "head" }, h("h2", { id: "tuner-engines" }, "Flags of engines"), h("span", { class: "chip" }, own.doing || "idle")),
    own.why && h("p", {}, own.why),
    own.proposal && offer(own.proposal, mode),
    own.changes.length > 0 && h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Changes that were measured" }, h("table", {},
      h("thead", {}, h("tr", {}, ["Pool", "Flag", "Change", "Outcome", "Loss lower by", "Forecast"].map(head => h("th", { scope: "col" }, head)))),
      h("tbody", {}, own.changes.map(one => h("tr", {},
        h("td", {}, one.pool), h("td", { class: "mono" }, words(one.flag)), h("td", {}, `${one.values[0]} → ${one.values[1]}`),
        h("td", {}, h("span", { class: "chip " + (one.verdict === "promoted" ? "good" : "warn") }, words(one.verdict))),
        h("td", {}, `${gain(one.realised)} (${gain(one.range[0])} to ${gain(one.range[1])})`),
        h("td", {}, one.forecast === null ? NONE : gain(one.forecast))))))));
}
