// Latency by class or pool over the last five minutes or the last hour: quantiles, their course, the parts of TTFT, estimates.
import { h } from "./dom.js";
import { NONE, count, percent, timeText } from "./units.js";
import { lineChart, marks, partsBar, partsLegend } from "./charts.js";

/** Intervals that a chart shows at least. */
const FEWEST = 12;
const METRICS = [
  ["ttft_ms", "TTFT", "time to first token"],
  ["itl_ms", "ITL", "between two tokens"],
  ["tpot_ms", "TPOT", "time per output token"],
  ["e2el_ms", "E2EL", "end to end"],
];

export function latency(state, app) {
  const { view, report, hour } = state, history = view.hour ? hour : report?.recent;
  const rows = history && (view.byPool ? history.pools : history.classes).filter(row => row.class || row.pool);
  return [
    h("div", { class: "row" },
      choice("Span", [["5 min", false], ["1 h", true]], Boolean(view.hour), hour => app.set({ hour })),
      choice("Group", [["by class", false], ["by pool", true]], Boolean(view.byPool), byPool => app.set({ byPool })),
      h("span", { class: "grow" }),
      h("span", { class: "sub" }, "quantiles are right within 5 %"),
      h("div", { class: "legend" }, h("span", { class: "p50" }, "P50"), h("span", { class: "p99" }, "P99"))),
    !history && h("div", { class: "card empty" }, "Waiting for the gateway."),
    history && !rows.length && h("div", { class: "card empty" }, h("p", {}, view.hour ? "No request in the last hour." : "No request in the last five minutes."),
      h("p", {}, "A class is the kind of a request by the length of its prompt: its home pool, and in a pool with long_prefix short or long.")),
    rows?.map(row => rowCard(row, history, state, app)),
  ];
}

function choice(label, options, value, set) {
  return h("div", { class: "choice", role: "group", "aria-label": label },
    options.map(([text, own]) => h("button", { type: "button", "aria-pressed": String(own === value), onclick: () => set(own) }, text)));
}

function rowCard(row, history, { view, status }, app) {
  const name = row.class || row.pool, title = "row-" + name;
  const both = history.pairs.filter(pair => row.class ? pair.class === row.class : pair.pool === row.pool), pairs = both.length > 1 ? both : [];
  const all = row.completed + row.shed + row.failed + row.client_gone + row.refused;
  const lost = [[row.shed, "shed"], [row.failed, "failed"], [row.client_gone, "client left"], [row.refused, "refused"]].filter(([n]) => n);
  const hover = view.hover && view.hover.name === name ? view.hover.index : null;
  // The last interval is in progress: a rate of it would be too low.
  const rate = values => values.map((n, index) => index + 1 < values.length ? n / history.interval_seconds : null);
  const onHover = index => app.set({ hover: index === null ? null : { name, index } });
  const seconds = history.interval_seconds;
  // Just after a start there is less than the whole span.
  const shown = Math.min(history.intervals, Math.max(FEWEST, Math.ceil(history.covered_seconds / seconds) + 1));
  return h("section", { class: "card", key: title, "aria-labelledby": title },
    h("div", { class: "head" },
      h("h2", { id: title }, `${row.class ? "class" : "pool"} ${name}`),
      row.attainment !== null && h("span", { class: "chip" }, `objectives met ${percent(row.attainment)}, last ${view.hour ? "hour" : "5 min"}`),
      lost.map(([n, what]) => h("span", { class: "chip " + (what === "failed" ? "bad" : what === "shed" ? "warn" : "") }, `${count(n)} ${what}`)),
      h("span", { class: "grow" }),
      h("span", { class: "hint" }, `${count(all)} requests · ${count(row.prompt_tokens)} prompt and ${count(row.generation_tokens)} generated tokens`)),
    h("div", { class: "charts" },
      METRICS.map(([key, short, long]) => lineChart({
        title: `${short}, ${long}`,
        now: row[key] ? `${timeText(row[key].p50)} · ${timeText(row[key].p99)}` : "",
        lines: [{ name: "P50", style: "p50", values: row.points[key].map(point => point && point[0]) }, { name: "P99", style: "p99", values: row.points[key].map(point => point && point[1]) }],
        show: value => value === null || value === undefined ? NONE : timeText(value), seconds, shown, hover, onHover, marks: marks(status),
      })),
      lineChart({
        title: "requests that ended", now: `${count(all / Math.max(1, history.covered_seconds))} /s`,
        lines: [{ name: "per second", style: "decode", values: rate(row.points.requests) }],
        columns: rate(row.points.requests), show: value => count(value), seconds, shown, hover, onHover, marks: marks(status),
      }),
      lineChart({
        title: "shed or failed", now: count(row.shed + row.failed),
        lines: [{ name: "per second", style: "queue", values: rate(row.points.lost) }],
        columns: rate(row.points.lost), show: value => count(value), seconds, shown, hover, onHover, marks: marks(status),
      })),
    h("div", { class: "two" }, tails(row, pairs), parts(row, pairs)));
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
