// A table of things that an operator compares: sorted by any column, filtered by name, with marks where a value stands out.
import { h } from "./dom.js";

/** Rows that are drawn; the filter and the order decide which. */
const ROWS = 300;

/**
 * `columns`: [{id, head, title, read: row => value, cell: row => children, text}], where `text` columns are aligned to the left and sorted
 * upwards. `rows` have a `name`, and a `key` that is unique; `total` is the number of rows without the view's own filters. `own`: [name, state.view], under which order and filter are kept.
 */
export function compare({ caption, columns, rows, total = rows.length, own: [own, view], app, filters = [] }) {
  const sort = view[own + "Sort"], wanted = (view[own + "Filter"] || "").toLowerCase();
  const column = columns.find(one => one.id === sort?.id);
  const rank = row => { const value = column.read(row); return value === null || value === undefined || Number.isNaN(value) ? -Infinity : value; };
  const order = (a, b) => typeof rank(a) === "string" ? String(rank(a)).localeCompare(String(rank(b)), undefined, { numeric: true }) : rank(a) - rank(b);
  const shown = rows.filter(row => row.name.toLowerCase().includes(wanted));
  if (column) shown.sort((a, b) => sort.up ? order(a, b) : order(b, a));
  const press = one => app.set({ [own + "Sort"]: sort?.id === one.id ? { id: one.id, up: !sort.up } : { id: one.id, up: Boolean(one.text) } });
  return [
    h("div", { class: "row" },
      h("label", { class: "soft", for: own + "-filter" }, `${shown.length} of ${total}; show`),
      h("input", { id: own + "-filter", type: "search", placeholder: "part of a name", value: view[own + "Filter"], oninput: event => app.set({ [own + "Filter"]: event.target.value }) }),
      filters),
    h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": caption }, h("table", { class: "compare" },
      h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, columns.map(one => h("th", { scope: "col", class: one.text ? undefined : "num", "aria-sort": sort?.id === one.id ? sort.up ? "ascending" : "descending" : "none" },
        h("button", { type: "button", class: "order", title: one.title, onclick: () => press(one) }, one.head, sort?.id === one.id && h("span", { "aria-hidden": "true" }, sort.up ? " ↑" : " ↓")))))),
      h("tbody", {}, shown.slice(0, ROWS).map(row => h("tr", { key: row.key, class: row.kind && "marked " + row.kind },
        columns.map((one, index) => index ? h("td", { class: one.text ? undefined : "num" }, one.cell(row)) : h("th", { scope: "row" }, one.cell(row)))))))),
    !shown.length && h("p", { class: "empty" }, rows.length ? "None matches." : "There is none."),
    shown.length > ROWS && h("p", { class: "sub" }, `${shown.length - ROWS} more are not shown; filter them.`),
  ];
}

/** The median of sorted values without one of them. */
export function medianWithout(sorted, own) {
  const at = sorted.indexOf(own), size = sorted.length - (at < 0 ? 0 : 1), value = index => sorted[at >= 0 && index >= at ? index + 1 : index];
  return size ? (value(Math.floor((size - 1) / 2)) + value(Math.floor(size / 2))) / 2 : null;
}
