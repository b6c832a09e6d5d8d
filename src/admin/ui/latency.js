// Latency by class or pool over a span of time: quantiles, their course, the parts of TTFT, estimates.
import { h } from "./dom.js";
import { NONE, count, percent, timeText } from "./units.js";
import { lineChart, marks, partsBar, partsLegend } from "./charts.js";
import { byLength, choice, partChoice, select, spanChoice, spanOf } from "./span.js";

const METRICS = [
  ["ttft_ms", "TTFT", "time to first token"],
  ["itl_ms", "ITL", "between two tokens"],
  ["tpot_ms", "TPOT", "time per output token"],
  ["e2el_ms", "E2EL", "end to end"],
];

export function latency(state, app) {
  const { place } = state, shown = spanOf(state), { history } = shown, byPool = place.by === "pool";
  const own = { view: "latency", by: place.by, class: place.class, pool: place.pool, span: place.span, from: place.from, to: place.to };
  const of = row => byPool ? row.pool : row.class, wanted = byPool ? place.pool : place.class;
  const all = history && (byPool ? history.pools : byLength(history.classes)).filter(of), rows = all?.filter(row => wanted === undefined || of(row) === wanted);
  return [
    h("div", { class: "row" },
      spanChoice(shown, app, own), partChoice(state, shown, app, own),
      choice("Group", [["by class", false], ["by pool", true]], byPool, pool => app.go({ ...own, by: pool ? "pool" : undefined, class: undefined, pool: undefined })),
      wanted !== undefined && h("button", { type: "button", class: "link", onclick: () => app.go({ ...own, class: undefined, pool: undefined }) }, byPool ? "all pools" : "all classes"),
      h("span", { class: "grow" }),
      h("span", { class: "sub" }, "quantiles are right within 5 %; drag in a chart to see a part"),
      h("div", { class: "legend" }, h("span", { class: "p50" }, "P50"), h("span", { class: "p99" }, "P99"))),
    !history && h("div", { class: "card empty" }, "Waiting for the gateway."),
    shown.part && !shown.shown && h("p", { class: "card", role: "alert" }, `${shown.name} is not within the last hour, which is all that the page has; sluice report reads older records.`),
    history && !rows.length && h("div", { class: "card empty" }, h("p", {}, `No request${wanted === undefined ? "" : ` of ${wanted}`}: ${shown.name}.`),
      h("p", {}, "A class is a kind of request, mostly by the length of its prompt; [[class]] in the configuration declares classes.")),
    (!shown.part || shown.shown) && rows?.map(row => rowCard(row, shown, state, app)),
  ];
}

function rowCard(row, shown, { view, status, place }, app) {
  const { history } = shown;
  const name = row.class || row.pool, title = "row-" + name;
  const both = history.pairs.filter(pair => row.class ? pair.class === row.class : pair.pool === row.pool), pairs = both.length > 1 ? both : [];
  const all = row.completed + row.shed + row.failed + row.client_gone + row.refused;
  const lost = [[row.shed, "shed"], [row.failed, "failed"], [row.client_gone, "client left"], [row.refused, "refused"]].filter(([n]) => n);
  // The last interval is in progress: a rate of it would be too low.
  const rate = values => values.map((n, index) => index + 1 < values.length ? n / history.interval_seconds : null);
  const chart = {
    ...shown, seconds: history.interval_seconds, marks: marks(status), hover: view.hover && view.hover.name === name ? view.hover : null,
    onHover: hover => app.set({ hover: hover && { name, ...hover } }), onSelect: select(shown, { by: place.by, class: row.class, pool: row.pool }, app),
  };
  return h("section", { class: "card", key: title, "aria-labelledby": title },
    h("div", { class: "head" },
      h("h2", { id: title }, `${row.class ? "class" : "pool"} ${name}`),
      h("span", { class: "hint" }, shown.name),
      !shown.part && row.attainment !== null && h("span", { class: "chip" }, `objectives met ${percent(row.attainment)}`),
      !shown.part && lost.map(([n, what]) => h("span", { class: "chip " + (what === "failed" ? "bad" : what === "shed" ? "warn" : "") }, `${count(n)} ${what}`)),
      h("span", { class: "grow" }),
      !shown.part && h("span", { class: "hint" }, `${count(all)} requests · ${count(row.prompt_tokens)} prompt and ${count(row.generation_tokens)} generated tokens`)),
    h("div", { class: "charts" },
      METRICS.map(([key, short, long]) => lineChart({
        title: `${short}, ${long}`,
        now: row[key] && !shown.part ? `${timeText(row[key].p50)} · ${timeText(row[key].p99)}` : "",
        lines: [{ name: "P50", style: "p50", values: row.points[key].map(point => point && point[0]) }, { name: "P99", style: "p99", values: row.points[key].map(point => point && point[1]) }],
        show: value => value === null || value === undefined ? NONE : timeText(value), ...chart,
      })),
      lineChart({
        title: "requests that ended", now: shown.part ? "" : `${count(all / Math.max(1, history.covered_seconds))} /s`,
        lines: [{ name: "per second", style: "decode", values: rate(row.points.requests) }],
        columns: rate(row.points.requests), show: value => count(value), ...chart,
      }),
      lineChart({
        title: "shed or failed", now: shown.part ? "" : count(row.shed + row.failed),
        lines: [{ name: "per second", style: "queue", values: rate(row.points.lost) }],
        columns: rate(row.points.lost), show: value => count(value), ...chart,
      })),
    !shown.part && h("div", { class: "two" }, tails(row, pairs), parts(row, pairs)));
}

function tails(row, pairs) {
  const rows = [[null, row], ...pairs.map(pair => [row.class ? `in pool ${pair.pool}` : `class ${pair.class}`, pair])];
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Quantiles" }, h("table", {},
    h("caption", { class: "unseen" }, "Quantiles"),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, h("span", { class: "unseen" }, "Quantity")), ["P50", "P90", "P99"].map(head => h("th", { scope: "col", class: "num" }, head)))),
    h("tbody", {}, rows.flatMap(([name, one]) => METRICS.filter(([key]) => one[key]).map(([key, short]) => h("tr", {},
      h("th", { scope: "row" }, name ? `${short} ${name}` : short),
      ["p50", "p90", "p99"].map(quantile => h("td", { class: "num" }, timeText(one[key][quantile]))))))),
    row.estimate && h("tfoot", {}, h("tr", {}, h("td", { colspan: 4 },
      h("span", { class: "sub" }, `Estimated over actual length of prompts: ${row.estimate.p5.toFixed(2)} · ${row.estimate.p50.toFixed(2)} · ${row.estimate.p95.toFixed(2)} (P5 · P50 · P95), ${percent(row.estimate.near, 0)} within 10 %, of ${count(row.estimate.count)} requests`))))));
}

function parts(row, pairs) {
  if (!row.ttft_parts) return h("p", { class: "empty" }, "No streamed request: TTFT and its parts are those of streams.");
  const groups = [
    ["up to the median", row.ttft_parts.typical], ["all", row.ttft_parts.all], ["slowest 5 %", row.ttft_parts.slowest],
    ...pairs.filter(pair => pair.ttft_parts).map(pair => [row.class ? `in ${pair.pool}` : `class ${pair.class}`, pair.ttft_parts.all]),
  ];
  const longest = Math.max(...groups.map(([, group]) => group.ttft));
  return h("div", { class: "stacked" },
    h("h3", {}, "Parts of the mean time to first token"),
    h("div", { class: "split" }, groups.map(([name, group]) => [
      h("span", { class: "who sub" }, name), partsBar(group, longest, timeText), h("span", { class: "num" }, timeText(group.ttft))])),
    partsLegend());
}
