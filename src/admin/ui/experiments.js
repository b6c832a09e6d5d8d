// Experiments: phase, arms, what is known of each arm beside the control, and the confidence sequences over time.
import { h } from "./dom.js";
import { NONE, change, count, percent, span, timeText, words } from "./units.js";
import { sequenceChart } from "./charts.js";

const JUDGED = [["ttft", "TTFT"], ["tpot", "TPOT"], ["e2el", "E2EL"]];
const KINDS = { better: "good", worse: "bad", no_difference: "", not_yet: "" };
const PHASES = { running: "good", promoted: "good", stopped: "", not_active: "warn" };

export function experiments(state) {
  const { report, details } = state;
  if (!report) return [h("div", { class: "card empty" }, "Waiting for the gateway.")];
  if (!report.experiments.length) return [h("div", { class: "card empty" },
    h("p", {}, "There are no experiments."),
    h("p", {}, "An experiment sends a share of the requests to another model, pool or setting and compares what they experience. Declare one with [[experiment]] in the configuration, or create one with sluice experiment create FILE."))];
  return report.experiments.map(short => card(details.get(short.name) || short));
}

function card(one) {
  const title = "experiment-" + one.name, control = one.arms[0]?.name;
  return h("section", { class: "card", key: title, "aria-labelledby": title },
    h("div", { class: "head" },
      h("h2", { id: title }, one.name), h("span", { class: "chip " + (PHASES[one.phase] || "") }, one.promoted ? `promoted: ${one.promoted}` : words(one.phase)),
      h("span", { class: "grow" }),
      h("span", { class: "hint" }, `${percent(one.exposure, 0)} of the units (${words(one.sticky)}) take part` + (one.since ? ` · for ${span((Date.now() - new Date(one.since)) / 1000)}` : ""))),
    one.why && h("p", { class: "sub" }, one.why),
    h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": `Arms of ${one.name}` }, h("table", {},
      h("thead", {}, h("tr", {}, ["Arm", "Model", "Share", "Requests", "Failed", "Missed objectives", "TTFT P50", "TPOT P50", "E2EL P50"].map((head, index) => h("th", { scope: "col", class: index > 1 ? "num" : undefined }, head)))),
      h("tbody", {}, one.arms.map((arm, index) => h("tr", { key: arm.name },
        h("td", {}, h("b", {}, arm.name), index === 0 && h("span", { class: "sub" }, " control"),
          [arm.stopped, arm.waiting].filter(Boolean).map(why => h("div", { class: "sub" }, why)),
          arm.copies && h("div", { class: "sub" }, `shadow: copies of ${percent(arm.copies.share, 0)}`)),
        h("td", {}, arm.model || "as requested"),
        h("td", { class: "num" }, percent(arm.share, 0)), h("td", { class: "num" }, count(arm.requests)), h("td", { class: "num" }, count(arm.failed)),
        h("td", { class: "num" }, arm.missed[1] ? `${count(arm.missed[0])} of ${count(arm.missed[1])}` : NONE),
        JUDGED.map(([quantity]) => h("td", { class: "num" }, median(arm, quantity)))))))),
    one.comparisons.map((comparison, index) => versus(one, comparison, index, control)));
}

function median(arm, quantity) {
  const found = arm.quantities.find(own => own.quantity === quantity);
  return found && found.count ? timeText(found.p50.value * 1000) : NONE;
}

function versus(one, comparison, index, control) {
  const { decided } = comparison, kind = KINDS[(decided || comparison).conclusion] ?? "";
  const points = quantity => (one.history || []).map(({ at, changes }) => {
    const [value, low, high] = changes[index]?.[quantity] || [null, null, null];
    return { at, value, low, high };
  });
  return h("div", { class: "arms", key: "versus-" + comparison.arm },
    h("h3", {}, `${comparison.arm} beside ${control}`),
    h("div", { class: "verdict " + kind },
      h("b", {}, decided ? decided.sentence : comparison.sentence),
      decided && h("div", { class: "sub" }, `Decided after ${count(decided.requests)} requests of the arm. Now: ${comparison.sentence}`),
      comparison.mismatch && h("div", {}, `Do not trust this: ${percent(comparison.mismatch.value)} of the requests are in ${comparison.arm}, which is not what was configured.`),
      comparison.diagnosis.map(found => h("div", { class: "sub" }, found.sentence))),
    one.history?.length > 0 && h("div", { class: "charts" }, JUDGED.map(([, name], quantity) => sequenceChart({
      title: name, points: points(quantity), effect: one.min_effect, show: change, style: ["backend", "decode", "connect"][quantity],
    }))),
    one.history?.length > 0 && h("p", { class: "sub" }, `Change of the arm beside the control, at equal lengths of prompts. The bands hold at all times together with ${percent(one.confidence, 0)} confidence. Within the grey zone, ±${percent(one.min_effect)}, a change does not matter.`));
}
