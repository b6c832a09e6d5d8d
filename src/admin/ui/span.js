// The span of time of latencies: the last hour, the last five minutes, or the part that an address names by from= and to=. One view has
// one span, and says its name.
import { h } from "./dom.js";
import { link } from "./links.js";

/** Intervals that a chart shows at least. */
const FEWEST = 12;
/** Until the gateway has run for this many seconds, five minutes are shown, because the hour would have only a few points. */
const YOUNG = 300;

/** When the interval with this index begins, milliseconds since 1970. The last one is in progress. */
const begin = (history, index) => history.at - (history.covered_seconds % history.interval_seconds + (history.intervals - 1 - index) * history.interval_seconds) * 1000;

const clock = at => new Date(at).toLocaleTimeString([], { hour12: false, hour: "2-digit", minute: "2-digit" });
const stamp = at => new Date(at).toISOString().slice(0, 19) + "Z";

/** `{history, name, part, shown, skip}`: the history, how it is called, whether it is a part, and how many intervals of it to show, without the last `skip`. */
export function spanOf({ place, status, report, hour }) {
  const [from, to] = [Date.parse(place.from), Date.parse(place.to)], part = to > from, recent = report?.recent;
  // An arrangement of a demo runs for too short a time to be seen in the hour's intervals.
  const isShort = part ? recent && from >= begin(recent, 0) : place.span ? place.span === "5min" : status?.uptime_seconds < YOUNG || Boolean(status?.applied?.at(-1)?.title);
  const history = isShort ? recent : hour, seconds = history?.interval_seconds;
  if (!part || !history) {
    const covered = history && Math.min(history.intervals, Math.max(FEWEST, Math.ceil(history.covered_seconds / seconds) + 1));
    return { history, isShort, part: false, name: isShort ? "last 5 min, each 5 s" : "last hour, each minute", shown: covered, skip: 0 };
  }
  const last = history.intervals - 1, index = at => Math.max(-1, Math.min(last, Math.floor((at - begin(history, 0)) / (seconds * 1000))));
  const [first, end] = [index(from), index(to - 1)];
  return { history, isShort, part, name: `${clock(from)} to ${clock(to)}`, shown: end < 0 ? 0 : end - Math.max(first, 0) + 1, skip: last - end };
}

/** Goes to the latencies of the intervals between two of a chart. */
export function select({ history, shown, skip }, place, app) {
  return (one, other) => {
    const first = history.intervals - skip - shown;
    app.go({ view: "latency", ...place, span: undefined, from: stamp(begin(history, first + Math.min(one, other))), to: stamp(begin(history, first + Math.max(one, other) + 1)) });
  };
}

/** Rows of classes, short prompts first. */
export function byLength(rows) {
  const length = row => row.prompt_tokens / Math.max(1, row.completed);
  return rows.toSorted((a, b) => length(a) - length(b));
}

export function choice(label, options, value, set) {
  return h("div", { class: "choice", role: "group", "aria-label": label },
    options.map(([text, own]) => h("button", { type: "button", "aria-pressed": String(own === value), onclick: () => set(own) }, text)));
}

/** The buttons that choose between five minutes and an hour for the place `own`. */
export const spanChoice = (shown, app, own) => choice("Span", [["5 min", "5min"], ["1 h", "hour"]],
  shown.part ? null : shown.isShort ? "5min" : "hour", span => app.go({ ...own, from: undefined, to: undefined, span }));

/** A form for a part of the hour. */
export function partChoice({ place, status }, shown, app, own) {
  return h("form", { class: "row", "aria-label": "A part of the last hour", onsubmit: event => { event.preventDefault(); app.go({ ...own, span: undefined, ...times(event.target.elements, status) }); } },
    [["from", place.from], ["to", place.to]].map(([name, value]) => h("label", { class: "row soft" }, name, h("input", { type: "time", name, required: true, value: shown.part ? clock(Date.parse(value)) : undefined }))),
    h("button", { type: "submit", class: "small" }, "Show"));
}

/** Times of day within the last 24 hours as times. */
function times({ from, to }, status) {
  const now = Date.parse(status.time);
  const of = text => {
    const at = new Date(now);
    at.setHours(...text.split(":").map(Number), 0, 0);
    return at > now + 60_000 ? at.getTime() - 86_400_000 : at.getTime();
  };
  return { from: stamp(of(from.value)), to: stamp(of(to.value)) };
}
