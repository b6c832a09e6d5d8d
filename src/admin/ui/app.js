// The live page: takes events, keeps the last of each kind, and draws the view that the address names.
import { byId, draw } from "./dom.js";
import { askForToken, headers, read } from "./actions.js";
import { clock, span } from "./units.js";
import { Stream } from "./stream.js";
import { overview } from "./overview.js";
import { latency } from "./latency.js";
import { experiments } from "./experiments.js";
import { tuner } from "./tuner.js";
import { find, requests } from "./requests.js";
import { engines } from "./engines.js";
import { keys } from "./keys.js";
import { link, parse } from "./links.js";

const VIEWS = { overview, latency, engines, keys, experiments, tuner, requests };
/** Most experiments whose details are read. */
const DETAILS = 8;

const state = { status: null, report: null, minute: null, hour: null, details: new Map(), view: {}, place: parse(location.hash) };
const app = {
  /** Changes what is shown. */
  set(changes) { Object.assign(state.view, changes); show(); },
  /** Goes to a place of the page, which the address names from then on. */
  go(place) { location.hash = link(place); },
};

const current = () => Object.hasOwn(VIEWS, state.place.view ?? "") ? state.place.view : "overview";

let due = false;
/** Draws before the next frame, once however many events came. */
function show() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    const name = current(), view = byId("view");
    if (view.dataset.name !== name) { draw(view, []); view.dataset.name = name; }
    draw(view, VIEWS[name](state, app).flat(Infinity).filter(Boolean));
  });
}

function showNav() {
  const name = current();
  for (const link of byId("nav").children) {
    if (link.hash === "#" + name) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  byId("title").textContent = name[0].toUpperCase() + name.slice(1);
}

function showCounts() {
  const open = state.report.tuner.groups.filter(group => group.proposal).length + (state.report.tuner.engines.proposal ? 1 : 0);
  const running = state.report.experiments.filter(one => one.phase === "running").length;
  for (const [hash, number, what] of [["#overview", state.status?.findings?.length, "findings"], ["#tuner", open, "proposals"], ["#experiments", running, "running"]]) {
    const link = [...byId("nav").children].find(one => one.hash === hash);
    let badge = link.querySelector(".count");
    if (!number) { badge?.remove(); continue; }
    if (!badge) { badge = document.createElement("span"); badge.className = "count"; link.append(badge); }
    badge.textContent = number;
    badge.title = `${number} ${what}`;
  }
}

function showFrame(status) {
  document.title = "sluice" + (status.shutting_down ? " (shutting down)" : "");
  byId("about").textContent = [`sluice ${status.version}`, "up " + span(status.uptime_seconds), "clients on " + status.listen, status.config || "started from flags"].join(" · ");
  const last = status.last_reload, text = byId("reload");
  text.textContent = last ? `last reload ${clock(last.time)}: ${last.ok ? "ok" : "FAILED: " + last.lines[0]}` : "";
  text.title = last ? last.lines.join("\n") : "";
}

function live(kind, text) { const chip = byId("live"); chip.className = "chip " + kind; if (chip.textContent !== text) chip.textContent = text; }

function notice(text) {
  const box = byId("notice");
  if (box.textContent !== (text || "")) box.textContent = text || "";
  box.hidden = !text;
  byId("view").classList.toggle("stale", Boolean(text));
}

async function readDetails() {
  if (current() !== "experiments" || !state.report) return;
  for (const { name } of state.report.experiments.slice(0, DETAILS)) {
    try { state.details.set(name, await read("admin/experiments/" + encodeURIComponent(name))); } catch { state.details.delete(name); }
  }
  show();
}

const stream = new Stream({
  event(name, data) {
    state[name] = data;
    // When the intervals of a history end.
    const ends = { report: data.recent, hour: data }[name];
    if (ends) ends.at = Date.parse(state.status?.time) || Date.now();
    notice("");
    if (name === "status") {
      live(data.leaving ? "warn" : "good", data.shutting_down ? "shutting down" : data.leaving ? "shutting down soon" : "live");
      showFrame(data);
    }
    if (name === "report") { showCounts(); readDetails(); }
    show();
  },
  state(kind, message) {
    if (kind === "lost") { live("bad", "not connected"); notice(message); }
    if (kind === "paused") live("", "paused");
    if (kind === "locked") { live("warn", "locked"); askForToken().then(() => stream.open()); }
  },
}, headers);

const THEMES = { auto: ["◐", "automatic"], light: ["☀", "light"], dark: ["☾", "dark"] };
function showTheme() {
  const kept = document.documentElement.dataset.theme || "auto", [sign, name] = THEMES[kept];
  byId("theme").textContent = sign;
  byId("theme").setAttribute("aria-label", `Colours: ${name}`);
  byId("theme").title = `Colours: ${name}`;
}
byId("theme").onclick = () => {
  const root = document.documentElement, order = Object.keys(THEMES), kept = root.dataset.theme || "auto";
  const chosen = order[(order.indexOf(kept) + 1) % order.length];
  if (chosen === "auto") { delete root.dataset.theme; localStorage.removeItem("theme"); } else { root.dataset.theme = chosen; localStorage.setItem("theme", chosen); }
  showTheme();
};

/** Takes over the place that the address names. */
function arrive() {
  const last = state.place, place = state.place = parse(location.hash);
  if (place.request && place.request !== state.view.wanted) find(place.request, app);
  showNav();
  readDetails();
  show();
  if (["view", "request", "engine", "key"].some(name => last[name] !== place[name])) scrollTo(0, 0);
}

addEventListener("hashchange", arrive);
showTheme();
arrive();
stream.open();
