// The request inspector: one request by its id with its timeline, the slowest requests, and the last failures.
import { h } from "./dom.js";
import { NONE, clock, count, timeText, words } from "./units.js";
import { read } from "./actions.js";
import { engineLink, link } from "./links.js";

/** Slow, and failed, requests that are shown of one key or engine. */
const OF_ONE = 8;

/** A link to the timeline of a request. */
function requestLink(id) {
  return h("a", { class: "link mono", href: link({ request: id }), title: id }, id.length > 16 ? id.slice(0, 4) + "…" + id.slice(-8) : id);
}

/** Looks up the request that the address names, and shows it. */
export async function find(id, app) {
  app.set({ wanted: id, found: null, missing: null });
  try {
    const { requests } = await read("admin/requests/" + encodeURIComponent(id));
    app.set({ found: requests });
  } catch (error) {
    app.set({ missing: error.message });
  }
}

/** The slow and the failed requests of a key or an engine, among those that are listed. */
export function requestsOf(report, is) {
  const slow = report?.requests.slowest.filter(is).slice(0, OF_ONE) || [], failed = report?.requests.failures.filter(is).slice(0, OF_ONE) || [];
  return h("div", { class: "stacked" },
    h("h3", {}, "Among the slowest and the last failed requests"),
    !slow.length && !failed.length && h("p", { class: "empty" }, "None."),
    slow.length > 0 && slowest(slow), failed.length > 0 && failureTable(failed));
}

export function requests(state, app) {
  const { view, report } = state;
  const submit = event => {
    event.preventDefault();
    const id = event.target.elements.id.value.trim();
    if (!id) return;
    app.go({ request: id });
    find(id, app);
  };
  return [
    h("section", { class: "card", "aria-labelledby": "find-title" },
      h("div", { class: "head" }, h("h2", { id: "find-title" }, "Find a request"),
        report && h("span", { class: "hint" }, `the last ${count(report.requests.kept)} that are over${report.requests.since ? ", since " + clock(report.requests.since) : ""}; no text is kept`)),
      h("form", { class: "find", onsubmit: submit },
        h("label", {}, "x-request-id of the response", h("input", { name: "id", value: view.wanted, autocomplete: "off", spellcheck: "false", placeholder: "paste an id" })),
        h("button", { type: "submit", class: "primary" }, "Show")),
      view.missing && h("p", { role: "alert" }, view.missing)),
    view.found?.map(timeline),
    report && h("section", { class: "card", "aria-labelledby": "slowest" },
      h("div", { class: "head" }, h("h2", { id: "slowest" }, "Slowest of these"), h("span", { class: "hint" }, "by the whole time; generating requests only")),
      report.requests.slowest.length ? slowest(report.requests.slowest) : h("p", { class: "empty" }, "No request is over yet.")),
    report && h("section", { class: "card", "aria-labelledby": "failures" },
      h("div", { class: "head" }, h("h2", { id: "failures" }, "Last failures")),
      report.requests.failures.length ? failureTable(report.requests.failures) : h("p", { class: "empty" }, "No request was shed and none failed since the gateway was started.")),
  ];
}

/** The pool and the engine of a request, with a link. */
const where = ({ pool, backend }) => pool && backend ? h("a", { href: engineLink(pool, backend) }, `${pool} / ${backend}`) : pool || NONE;

/** Requests that were shed or failed. */
export function failureTable(failures) {
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Last failures" }, h("table", {},
    h("thead", {}, h("tr", {}, ["Time", "Reason", "Request", "Class", "Pool / engine", "After"].map(head => h("th", { scope: "col" }, head)))),
    h("tbody", {}, failures.map(one => h("tr", {},
      h("td", { class: "nowrap soft" }, clock(one.time)),
      h("td", { class: "nowrap" }, `${words(one.outcome)}: ${words(one.detail)}`),
      h("td", {}, requestLink(one.request_id)), h("td", { class: "nowrap" }, one.class || NONE),
      h("td", { class: "nowrap" }, where(one)),
      h("td", { class: "nowrap" }, timeText(one.total_ms)))))));
}

function slowest(all) {
  const heads = ["Ended", "Request", "Total", "TTFT", "Queue", "TPOT", "Prompt", "Output", "Class", "Pool / engine", "Outcome"];
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Slowest requests" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head, index) => h("th", { scope: "col", class: index > 1 && index < 8 ? "num" : undefined }, head)))),
    h("tbody", {}, all.map(one => h("tr", {},
      h("td", { class: "nowrap soft" }, clock(one.time)), h("td", {}, requestLink(one.request_id)),
      h("td", { class: "num" }, h("b", {}, timeText(one.total_ms))), h("td", { class: "num" }, timeText(one.ttft_ms)),
      h("td", { class: "num" }, timeText(one.queue_ms)), h("td", { class: "num" }, timeText(one.tpot_ms)),
      h("td", { class: "num" }, count(one.prompt_tokens ?? one.estimate_tokens)), h("td", { class: "num" }, count(one.completion_tokens)), h("td", { class: "nowrap" }, one.class || NONE),
      h("td", { class: "nowrap" }, where(one)), h("td", { class: "nowrap" }, words(one.outcome)))))));
}

/** When each stage began and how long it took, milliseconds. The order of attempts is not kept: times of all of them are added up. */
function stages(one) {
  const steps = [["queue", "queue", one.queue_ms], ["connect", "connect", one.connect_ms]];
  if (one.ttft_ms !== undefined) {
    const backend = one.backend_ttft_ms ?? 0, rest = Math.max(0, one.ttft_ms - one.queue_ms - one.connect_ms - backend);
    const end = Math.max(one.ttft_ms, one.e2el_ms ?? one.ttft_ms);
    steps.push(["other", "estimate, sending, failed attempts", rest], ["backend", "wait for the backend", backend], ["decode", "tokens", end - one.ttft_ms], ["client", "wait for the client", Math.min(one.client_wait_ms ?? 0, Math.max(0, one.total_ms - end))], ["other", "until it was over", Math.max(0, one.total_ms - end - (one.client_wait_ms ?? 0))]);
  } else {
    steps.push(["other", one.backend ? "backend, until it was over" : "until it was over", Math.max(0, one.total_ms - one.queue_ms - one.connect_ms)]);
  }
  let from = 0;
  return steps.map(([style, name, took]) => { const begun = from; from += took; return { style, name, took, begun }; });
}

function timeline(one) {
  const all = Math.max(one.total_ms, 1e-6), share = ms => (ms / all * 100).toFixed(2) + "%";
  const tokens = [one.prompt_tokens !== undefined && `${count(one.prompt_tokens)} prompt tokens`, one.cached_tokens && `${count(one.cached_tokens)} of them cached`,
    one.estimate_tokens !== undefined && `estimated as ${count(one.estimate_tokens)} (${one.estimate_how})`, one.completion_tokens && `${count(one.completion_tokens)} generated`];
  const rows = [
    ["ended", clock(one.time)], ["outcome", [words(one.outcome), one.detail && words(one.detail), one.status && `status ${one.status}`].filter(Boolean).join(", ")],
    ["class", one.class && h("a", { href: link({ class: one.class }) }, one.class)], ["pool / engine", one.pool && where(one)], ["model", one.model], ["arm", one.arm], ["key", one.key && h("a", { href: link({ key: one.key }) }, one.key)],
    ["route", one.route && one.route + (one.stream ? ", streamed" : ", not streamed")], ["tokens", tokens.filter(Boolean).join(", ")],
    ["TTFT", one.ttft_ms !== undefined && timeText(one.ttft_ms)], ["TPOT", one.tpot_ms !== undefined && timeText(one.tpot_ms)],
    ["waited for the client", one.client_wait_ms > 0 && timeText(one.client_wait_ms)], ["longest gap", one.longest_gap_ms !== undefined && timeText(one.longest_gap_ms)], ["E2EL", one.e2el_ms !== undefined && timeText(one.e2el_ms)],
    ["objectives", one.slo_met === undefined ? "" : one.slo_met ? "met" : "missed"], ["repeated", one.retries?.map(words).join(", ")],
    ["upstream id", one.upstream_id],
  ];
  const id = "request-" + one.time + one.request_id;
  return h("section", { class: "card timeline", key: id, "aria-label": "Request " + one.request_id },
    h("div", { class: "head" }, h("h2", { class: "mono" }, one.request_id),
      h("span", { class: "chip " + (one.outcome === "completed" ? "good" : one.outcome === "client_gone" || one.outcome === "refused" ? "" : "bad") }, words(one.outcome)),
      h("span", { class: "grow" }), h("b", {}, timeText(one.total_ms))),
    h("div", { class: "two" }, h("div", { class: "steps" }, stages(one).filter(step => step.took > 0.0005).map(step => [
      h("span", { class: "sub" }, step.name),
      h("div", { class: "lane" }, h("div", { class: "mark " + step.style, vars: { "--from": share(step.begun), "--share": share(step.took) } })),
      h("span", { class: "num" }, timeText(step.took))])),
    h("dl", { class: "facts" }, rows.filter(([, value]) => value).map(([key, value]) => [h("dt", {}, key), h("dd", {}, value)]))));
}
