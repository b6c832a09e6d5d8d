// Changes: each asks first, is sent with the header that pages of other sites cannot send and with the token, and shows the result.
import { byId } from "./dom.js";

const TOAST_MS = 7000;

export const token = () => sessionStorage.getItem("token") || "";
export const headers = () => token() ? { authorization: "Bearer " + token() } : {};

let waiting = null;

/** Asks for the admin token; resolves when one was given. Requests that ask meanwhile wait for the same dialog. */
export function askForToken() {
  if (waiting) return waiting;
  const dialog = byId("locked"), input = byId("token");
  if (token()) {
    sessionStorage.removeItem("token");
    byId("locked-text").textContent = "This token is not the admin token of the gateway (auth.admin_token).";
  }
  waiting = new Promise(resolve => {
    dialog.querySelector("form").onsubmit = event => {
      event.preventDefault();
      sessionStorage.setItem("token", input.value);
      input.value = "";
      waiting = null;
      dialog.close();
      resolve();
    };
    dialog.oncancel = event => event.preventDefault();
    dialog.showModal();
    input.focus();
  });
  return waiting;
}

/** The answer to a GET as JSON. Throws an error with the gateway's message. */
export async function read(path) {
  const response = await fetch(path, { headers: headers(), cache: "no-store" });
  if (response.status === 401) { await askForToken(); return read(path); }
  const body = await response.json();
  if (!response.ok) throw new Error(body.error.message);
  return body;
}

function confirmed({ title, text, verb }) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = verb;
  dialog.showModal();
  byId("confirm-no").focus();
  return new Promise(resolve => {
    const end = answer => { dialog.onclose = null; dialog.close(); resolve(answer); };
    dialog.querySelector("form").onsubmit = event => { event.preventDefault(); end(true); };
    byId("confirm-no").onclick = () => end(false);
    // The event of an earlier closing may come when the dialog is open again.
    dialog.onclose = () => { if (!dialog.open) resolve(false); };
  });
}

export function toast(text, bad) {
  const made = document.createElement("div");
  made.className = bad ? "toast bad" : "toast";
  made.textContent = text;
  byId("toasts").append(made);
  setTimeout(() => made.remove(), TOAST_MS);
}

/** Asks, then sends a POST. `action`: {title, text, verb, path, done}. */
export async function act(action) {
  if (!await confirmed(action)) return;
  try {
    let response;
    do {
      if (response) await askForToken();
      response = await fetch(action.path, { method: "POST", headers: { ...headers(), "x-sluice-admin": "1" } });
    } while (response.status === 401);
    const body = await response.json();
    if (response.ok) toast(action.done); else toast(body.error.message, true);
  } catch {
    toast("The gateway does not answer; it is not known whether the change was made.", true);
  }
}

const name = text => encodeURIComponent(text);

/** The actions on a backend. */
export const backendAction = {
  drain: (pool, backend) => ({
    title: `Drain ${backend} of pool ${pool}?`, verb: "Drain", done: `${backend} drains.`,
    text: "It gets no new requests; those that run finish. Enable puts it back into rotation.",
    path: `admin/backends/${name(pool)}/${name(backend)}/drain`,
  }),
  enable: (pool, backend) => ({
    title: `Enable ${backend} of pool ${pool}?`, verb: "Enable", done: `${backend} is enabled.`,
    text: "It gets requests again once it is ready. An engine on hold is started.",
    path: `admin/backends/${name(pool)}/${name(backend)}/enable`,
  }),
  restart: (pool, backend) => ({
    title: `Restart the engine of ${backend} in pool ${pool}?`, verb: "Restart", done: `${backend} restarts.`,
    text: "It is drained first, and only while other backends can serve its models; otherwise the restart is refused.",
    path: `admin/backends/${name(pool)}/${name(backend)}/restart`,
  }),
};

/** The actions on the tuner. */
export const tunerAction = {
  approve: proposal => ({
    title: `Approve proposal ${proposal.id}?`, verb: "Approve", done: `Proposal ${proposal.id} is approved.`,
    text: `${proposal.key} changes from ${proposal.from} to ${proposal.to}, and back if it does not help.`,
    path: `admin/tuner/approve/${name(proposal.id)}`,
  }),
  freeze: () => ({
    title: "Freeze the tuner?", verb: "Freeze", done: "The tuner is frozen.",
    text: "It makes no more changes, and the one that it is trying is undone.", path: "admin/tuner/freeze",
  }),
  resume: () => ({
    title: "Resume the tuner?", verb: "Resume", done: "The tuner goes on.",
    text: "It makes or proposes changes again, as tuner.mode says.", path: "admin/tuner/resume",
  }),
};
