// API keys side by side: use in the last minute, what is in flight against limits, and one key with its requests.
import { h } from "./dom.js";
import { NONE, count, percent, timeText } from "./units.js";
import { compare } from "./compare.js";
import { chips, isOfKey, kind, list } from "./findings.js";
import { link } from "./links.js";
import { bar, tile } from "./backend.js";
import { requestsOf } from "./requests.js";

function rowsOf({ status, minute }) {
  const rows = new Map();
  const row = name => { if (!rows.has(name)) rows.set(name, { key: name, name }); return rows.get(name); };
  for (const own of minute?.keys || []) row(own.name).minute = own;
  for (const own of minute?.in_flight || []) row(own.name).flight = own;
  for (const own of status.keys || []) row(own.name).limits = own;
  const tokens = [...rows.values()].reduce((sum, one) => sum + (one.minute?.tokens || 0), 0);
  for (const one of rows.values()) {
    one.share = one.minute && tokens ? one.minute.tokens / tokens : null;
    one.found = (status.findings || []).filter(finding => isOfKey(finding, one.name));
    one.kind = one.found.length ? kind(one.found[0]) : "";
  }
  return [...rows.values()];
}

const wait = row => row.minute && row.minute.queue_wait_s * 1000;
const limit = used => !used ? NONE : used.limit === undefined ? count(used.used) : bar("", used, { known: true });
const filled = used => used?.limit ? used.used / used.limit : null;

const COLUMNS = [
  { id: "name", head: "Key", text: true, read: row => row.name, cell: row => [h("a", { href: link({ key: row.name }) }, row.name), h("div", { class: "row" }, chips(row.found))] },
  { id: "requests", head: "Requests", title: "Requests that ended", read: row => row.minute?.requests, cell: row => count(row.minute?.requests) },
  { id: "lost", head: "Shed or failed", read: row => row.minute?.lost, cell: row => row.minute?.lost ? h("span", { class: "out" }, count(row.minute.lost)) : count(row.minute?.lost) },
  { id: "tokens", head: "Tokens", title: "Prompt and output tokens, and the share of all keys", read: row => row.minute?.tokens, cell: row => [count(row.minute?.tokens), h("div", { class: "sub" }, percent(row.share, 0))] },
  { id: "work", head: "Engine time", title: "Engine seconds charged by pools with queue.fair", read: row => row.minute?.work_s, cell: row => row.minute?.work_s === undefined ? NONE : `${count(row.minute.work_s)} s` },
  { id: "wait", head: "Queue wait", title: "Mean wait in the queue of the gateway", read: wait, cell: row => timeText(wait(row)) },
  { id: "waiting", head: "Waiting", title: "Requests that wait in pools with queue.fair now", read: row => row.minute?.waiting, cell: row => count(row.minute?.waiting) },
  { id: "flight", head: "In flight", title: "Requests in flight, and the limit", read: row => row.flight?.requests.used, cell: row => limit(row.flight?.requests) },
  { id: "rate", head: "Tokens / min", title: "Tokens against tokens_per_minute", read: row => filled(row.limits?.minute), cell: row => limit(row.limits?.minute) },
  { id: "day", head: "Tokens / day", title: "Tokens of 24 hours against tokens_per_day", read: row => filled(row.limits?.day), cell: row => limit(row.limits?.day) },
];

export function keys(state, app) {
  const { status, minute, place, view } = state;
  if (!status) return [h("div", { class: "card empty" }, "Waiting for the gateway.")];
  const rows = rowsOf(state), one = place.key !== undefined && rows.find(row => row.name === place.key);
  return [
    place.key !== undefined && keyCard(one || { name: place.key, found: [] }, state),
    h("section", { class: "card", "aria-labelledby": "keys-title" },
      h("div", { class: "head" }, h("h2", { id: "keys-title" }, "Keys side by side"), h("span", { class: "grow" }), h("span", { class: "hint" }, "last minute; waiting and in flight: now")),
      rows.length ? compare({ caption: "Keys", columns: COLUMNS, rows, own: ["keys", view], app })
        : h("p", { class: "empty" }, minute?.engines.length ? "No request with an API key in the last minute." : "The last minute is known a minute after the start."),
      h("p", { class: "sub" }, "Limits are of all gateways together, the use is of this gateway. The page has the 256 keys with most tokens; /admin/findings has all.")),
  ];
}

/** One key. */
function keyCard(row, { report, status }) {
  const { minute, flight, limits } = row, uses = [["requests in flight", flight?.requests], ["sequences in flight", flight?.sequences], ["tokens in flight", flight?.tokens], ["tokens per minute", limits?.minute], ["tokens per day", limits?.day]];
  return h("section", { class: "card", key: "key-" + row.name, "aria-labelledby": "key-title" },
    h("div", { class: "head" }, h("h2", { id: "key-title" }, `Key ${row.name}`), h("span", { class: "hint" }, minute ? "last minute" : "no request in the last minute"), h("span", { class: "grow" }), h("a", { href: "#keys" }, "close")),
    row.found.length > 0 && list(row.found, status),
    minute && h("div", { class: "tiles" },
      tile(count(minute.requests), "", "requests"), tile(count(minute.lost), "", "shed or failed", minute.lost ? "warn" : ""), tile(count(minute.tokens), "", `tokens, ${percent(row.share, 0)} of all`),
      tile(count(minute.work_s), minute.work_s !== undefined && "s", "engine time"), tile(timeText(wait(row)), "", "queue wait"), tile(timeText(minute.engine_ttft_s === undefined ? null : minute.engine_ttft_s * 1000), "", "engine TTFT")),
    uses.some(([, used]) => used) && h("div", { class: "tiles" }, uses.map(([name, used]) => used && (used.limit === undefined ? tile(count(used.used), "", name) : bar(name, used)))),
    requestsOf(report, one => one.key === row.name));
}
