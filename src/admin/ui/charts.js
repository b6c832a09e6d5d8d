// Small charts as SVG. Coordinates are 0..1000 by 0..100, stretched to the box; texts are beside the SVG so that they are not stretched.
import { h } from "./dom.js";
import { NONE } from "./units.js";

const WIDTH = 1000, HEIGHT = 100;
/** The interval at which the pointer was pressed. It is not kept in the view, because the next event can come before the view is drawn. */
let pressed;

/** The least of 1, 2, 2.5 and 5 times a power of ten that is not below the value. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map(step => step * power).find(step => step >= value * 0.999) || value;
}

/** Path of a line that has gaps where values are absent; a single value is a short line. */
function path(values, x, y) {
  let text = "", pen = false;
  values.forEach((value, index) => {
    if (value === null || value === undefined) { pen = false; return; }
    const last = index + 1 >= values.length || values[index + 1] === null || values[index + 1] === undefined;
    text += `${pen ? "L" : "M"}${x(index).toFixed(1)},${y(value).toFixed(1)}`;
    if (!pen && last) text += `h${(WIDTH / values.length / 2).toFixed(1)}`;
    pen = true;
  });
  return text;
}

/**
 * A chart of lines over intervals. `lines`: [{name, style, values}], `show`: a value as text, `seconds`: length of an interval.
 * `shown`: how many of the last intervals, without the last `skip`. `wide`: across all columns. `marks`: [{ago, title}], vertical lines where
 * the configuration was replaced. `hover` is {index, from}: the interval under the pointer, and the one at which the pointer was pressed;
 * `onHover` sets it. `onSelect` gets both when the pointer is released.
 */
export function lineChart({ title, href, now, lines, show, seconds, shown, skip = 0, hover, onHover, onSelect, columns, marks = [], wide }) {
  const cut = values => values.slice(Math.max(0, values.length - skip - shown), values.length - skip);
  lines = lines.map(line => ({ ...line, values: cut(line.values) }));
  columns = columns && cut(columns);
  const size = lines[0].values.length;
  const all = lines.flatMap(line => line.values).filter(value => value !== null && value !== undefined);
  const most = Math.max(0, ...all), top = most > 0 ? roundUp(most) : 1;
  const x = index => (index + .5) / size * WIDTH, y = value => HEIGHT - value / top * HEIGHT;
  const at = hover ? Math.min(hover.index, size - 1) : null, from = at === null ? undefined : hover.from;
  const ago = index => { const s = (size - 1 - index + skip) * seconds; return s === 0 ? "now" : s < 120 ? `${s} s ago` : `${Math.round(s / 60)} min ago`; };
  const label = lines.map(line => `${line.name} ${show(latest(line.values))}`).join(", ");
  // Each title has the room up to the next mark.
  const span = size * seconds, left = ago => (1 - ago / span) * 100;
  const seen = marks.map(mark => ({ ...mark, ago: mark.ago - skip * seconds })).filter(mark => mark.ago >= 0).filter((mark, at) => (marks[at + 1]?.ago ?? 0) < span)
    .map((mark, at, all) => ({ ...mark, left: Math.max(0, left(mark.ago)), room: left(all[at + 1]?.ago ?? 0) - Math.max(0, left(mark.ago)), cut: mark.ago >= span }));
  const locate = event => {
    const box = event.currentTarget.getBoundingClientRect();
    return Math.max(0, Math.min(size - 1, Math.floor((event.clientX - box.left) / box.width * size)));
  };
  const press = event => onHover({ index: pressed = locate(event), from: pressed });
  const move = event => onHover({ index: locate(event), from: event.buttons ? pressed : undefined });
  const release = event => {
    const [from, index] = [pressed, locate(event)];
    pressed = undefined;
    if (from !== undefined && from !== index) onSelect(from, index); else onHover({ index });
  };
  const leave = () => { pressed = undefined; onHover(null); };
  const kinds = ["chart", wide && "wide", seen.some(mark => mark.title) && "marked"].filter(Boolean).join(" ");
  return h("div", { class: kinds },
    h("div", { class: "title" }, h("b", {}, href ? h("a", { href }, title) : title), h("span", { class: "soft" }, now)),
    h("div", { class: "plot", onpointermove: move, onpointerdown: press, onpointerup: release, onpointerleave: leave },
      h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: ${label}` },
        [0, .5, 1].map(share => h("line", { class: "grid", x1: 0, x2: WIDTH, y1: share * HEIGHT, y2: share * HEIGHT })),
        columns && columns.map((value, index) => value > 0 && h("rect", { class: "column " + lines[0].style, x: (index / size * WIDTH + 1).toFixed(1), width: (WIDTH / size - 2).toFixed(1), y: y(value).toFixed(1), height: (HEIGHT - y(value)).toFixed(1) })),
        seen.map(mark => !mark.cut && h("line", { class: "mark", x1: mark.left * WIDTH / 100, x2: mark.left * WIDTH / 100, y1: 0, y2: HEIGHT })),
        !columns && lines.map(line => h("path", { class: "curve " + line.style, d: path(line.values, x, y) })),
        from !== undefined && h("rect", { class: "selected", x: Math.min(from, at) / size * WIDTH, width: (Math.abs(from - at) + 1) / size * WIDTH, y: 0, height: HEIGHT }),
        at !== null && h("line", { class: "cross", x1: x(at), x2: x(at), y1: 0, y2: HEIGHT })),
      seen.map(mark => mark.title && h("span", { key: "mark", class: "mark-title", title: mark.title, vars: { left: mark.left + "%", "max-width": mark.room + "%" } }, mark.title)),
      h("span", { class: "tick", vars: { top: "0" } }, all.length ? show(top) : ""),
      h("span", { class: "tick", vars: { top: "50%" } }, all.length ? show(top / 2) : "")),
    h("div", { class: "feet" },
      at === null
        ? [h("span", {}, ago(0)), h("span", {}, ago(size - 1))]
        : h("span", { class: "read" }, `${ago(at)}: ` + lines.map(line => `${line.name} ${show(line.values[at])}`).join(" · "))));
}

/** Marks where the configuration was replaced, for charts. */
export const marks = status => (status?.applied || []).map(({ seconds_ago, title }) => ({ ago: seconds_ago, title }));

function latest(values) {
  for (let index = values.length - 1; index >= 0; index--) if (values[index] !== null && values[index] !== undefined) return values[index];
  return null;
}

/**
 * A confidence sequence over time: the bounds between which a change is known to lie. `points`: [{at, value, low, high}], absent where it is not
 * bounded; `effect`: changes up to this share do not matter.
 */
export function sequenceChart({ title, points, effect, show, style }) {
  const known = points.filter(point => point.low !== null && point.high !== null);
  const head = latest(known);
  const now = head ? `${show(head.value)} (${show(head.low)} to ${show(head.high)})` : "not bounded yet";
  // The first intervals are wide; the scale follows the narrower ones.
  const ends = known.map(point => Math.max(Math.abs(point.low), Math.abs(point.high))).sort((a, b) => a - b);
  const top = Math.max(roundUp((ends[Math.floor(ends.length * .4)] || effect * 3) * 1.15), effect * 1.5);
  const [first, last] = [points[0]?.at ?? 0, points.at(-1)?.at ?? 1];
  const x = at => last > first ? (at - first) / (last - first) * WIDTH : WIDTH / 2;
  const y = value => (50 - Math.max(-1.02, Math.min(1.02, value / top)) * 50);
  const line = read => known.map(point => `${x(point.at).toFixed(1)},${y(read(point)).toFixed(1)}`);
  const low = line(point => point.low), high = line(point => point.high).reverse();
  return h("div", { class: "chart" },
    h("div", { class: "title" }, h("b", {}, title), h("span", { class: "soft" }, now)),
    h("div", { class: "plot" },
      h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `Change of ${title}: ${now}` },
        h("rect", { class: "zone", x: 0, width: WIDTH, y: y(effect), height: y(-effect) - y(effect) }),
        h("line", { class: "zero", x1: 0, x2: WIDTH, y1: 50, y2: 50 }),
        known.length > 1 && h("path", { class: "band " + style, d: `M${low.join("L")}L${high.join("L")}Z` }),
        known.length > 1 && h("path", { class: "curve " + style, d: `M${line(point => point.value).join("L")}` })),
      h("span", { class: "tick", vars: { top: "0" } }, show(top)),
      h("span", { class: "tick", vars: { top: "100%" } }, show(-top))),
    h("div", { class: "feet" },
      h("span", {}, points.length ? new Date(first).toLocaleTimeString([], { hour12: false }) : NONE),
      h("span", {}, points.length ? new Date(last).toLocaleTimeString([], { hour12: false }) : "")));
}

export const PARTS = [
  ["queue", "queue", "queue of the gateway"],
  ["connect", "connect", "getting a connection"],
  ["other", "other", "estimate, sending, failed attempts"],
  ["backend", "backend", "backend: its queue and prefill"],
];

/** A bar of the parts of TTFT, as long as its share of `longest`. */
export function partsBar(parts, longest, show) {
  const share = part => (longest > 0 ? parts[part] / longest * 100 : 0).toFixed(2) + "%";
  const text = PARTS.map(([part, , name]) => `${name} ${show(parts[part])}`).join(", ");
  return h("div", { class: "stack", role: "img", "aria-label": text, title: text },
    PARTS.map(([part, style]) => h("div", { class: "part " + style, vars: { "--share": share(part) } })), h("div", { class: "room" }));
}

export const partsLegend = () => h("div", { class: "legend" }, PARTS.map(([, style, name]) => h("span", { class: style }, name)));
