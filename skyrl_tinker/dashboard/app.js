// The frame of all views: which one is shown, who asks, and the key.

import { h } from "./dom.js";
import { get, Refused, storedKey, storeKey } from "./server.js";
import { showNow } from "./now.js";
import { showRuns } from "./runs.js";
import { showTokens } from "./tokens.js";
import { showTrace } from "./trace.js";
import { showAdmin } from "./admin.js";

const VIEWS = [
  ["now", "Now", showNow],
  ["runs", "Runs", showRuns],
  ["tokens", "Tokens", showTokens],
  ["trace", "Trace", showTrace],
  ["admin", "Admin", showAdmin, (caller) => caller.sees_all],
];
const main = document.getElementById("main");
const nav = document.getElementById("nav");
const who = document.getElementById("who");
let stop = () => {};

export function failed(error) {
  if (error instanceof Refused && error.status === 401) {
    askForKey(storedKey() ? error.message : "");
    return;
  }
  const note = main.querySelector(".failure") ?? main.appendChild(h("p", { class: "failure error", role: "alert" }));
  note.textContent = error instanceof Refused ? error.message : "The server does not answer. Trying again …";
}

export function recovered() {
  main.querySelector(".failure")?.remove();
}

function askForKey(objection) {
  leave();
  nav.replaceChildren();
  who.replaceChildren();
  const input = h("input", { type: "password", id: "key", name: "key", autocomplete: "off", required: true, size: 40 });
  const form = h("form", { onsubmit: entered },
    h("label", { for: "key" }, "API key, as printed by skyrl-tinker keys create", input),
    h("button", { type: "submit" }, "Open"));
  main.replaceChildren(h("h1", {}, "This server needs an API key"), form,
    h("p", { class: "error", role: "alert" }, objection),
    h("p", { class: "quiet small" }, "It is kept in this tab until it is closed, and sent in a header to this server only."));
  input.focus();
  function entered(event) {
    event.preventDefault();
    storeKey(input.value.trim());
    open();
  }
}

function leave() {
  stop();
  stop = () => {};
}

async function open() {
  leave();
  let now;
  try {
    now = await get("console/now");
  } catch (error) {
    failed(error);
    if (!(error instanceof Refused)) setTimeout(open, 2000);
    return;
  }
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const views = VIEWS.filter(([, , , allowed]) => !allowed || allowed(now.caller));
  const [current, title, show] = views.find(([each]) => each === name) ?? views[0];
  nav.replaceChildren(...views.map(([each, label]) =>
    h("a", { href: `#/${each}`, "aria-current": each === current ? "page" : null }, label)));
  who.replaceChildren(...identity(now.caller));
  document.title = `${title} – skyrl-tinker`;
  main.replaceChildren();
  stop = show(main, { now, path: rest.map(decoded), failed, recovered }) ?? (() => {});
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch { // a stray %: taken as it is
    return part;
  }
}

function identity(caller) {
  if (!caller.keys) return [h("span", { title: "Anybody who reaches this address sees and does everything" }, "no API keys")];
  return [
    h("span", {}, caller.name + (caller.admin ? " (admin)" : "")),
    h("button", { type: "button", onclick: () => { storeKey(null); open(); } }, "Forget key"),
  ];
}

addEventListener("hashchange", () => {
  if (location.hash === "#main") return;
  open();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
const late = new Promise((done) => setTimeout(done, 1000));
Promise.race([document.fonts.load("1em Figtree"), late]).then(open, open); // the letters of charts are drawn once
