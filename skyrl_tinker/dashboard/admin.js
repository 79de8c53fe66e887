// Admin: who has keys, what their owners have, and changes to keys.

import { ago, bytes, card, h, moment, number, plural, table, tick, wide } from "./dom.js";
import { get, poll, send } from "./server.js";
import { ask } from "./runs.js";

const EVERY_MS = 10000;
const AT = "console/admin";

export function showAdmin(main, { now, failed, recovered }) {
  if (!now.caller.admin) {
    main.append(h("h1", {}, "Admin"), wide(card("API keys", h("p", {},
      "This server has no API keys, so anybody who reaches it does everything. Make the first one on its machine:"),
    h("p", {}, h("code", {}, "skyrl-tinker keys create --name NAME --admin --home HOME")),
    h("p", { class: "quiet" }, "HOME is the server's, which ", h("code", {}, "serve"), " prints. From then on this page asks for a key, and an admin key makes, limits, rotates and revokes all others here."))));
    return () => {};
  }
  const owners = table("Owners", [
    ["owner", "run"], ["sessions", "number"], ["models", "number"], ["checkpoints", "number"], ["stored", "number"],
    ["trained tokens, 24 h", "number"], ["prompt tokens, 24 h", "number"], ["sampled tokens, 24 h", "number"]], "none");
  const keys = table("API keys", [
    ["id", "number"], ["name", ""], ["rights", ""], ["state", ""], ["last used", ""], ["made", ""], ["limits of its own", ""], ["", ""]], "none");
  const defaults = h("p", { class: "quiet small" });
  const done = h("div", { role: "status" });
  main.append(h("h1", {}, "Admin"),
    h("div", { class: "grid" },
      wide(card("Owners", owners.node)),
      wide(card("API keys", createForm(), done, keys.node, defaults))));
  let shown = "";

  async function refresh() {
    const answer = await get(AT);
    recovered();
    tick(main);
    const text = JSON.stringify(answer);
    if (text === shown) return; // keeps the focus where it is
    shown = text;
    owners.fill([...answer.keys.map((key) => owned(key.name, key.owned)), owned("local, without a key", answer.without_key)]);
    const left = withoutHolder(answer.keys);
    keys.fill(answer.keys.map((key) => [
      String(key.id), key.name, key.admin ? "admin" : "user", state(key), ago(key.last_used_at), ago(key.created_at), limits(key.limits) || null, h("div", { class: "row" }, ...actions(key, left))]));
    defaults.textContent = `Limits of keys without their own: ${limits(answer.limits)}`;
  }

  function action(label, work, className) {
    return h("button", { type: "button", class: className, onclick: () => change(work) }, label);
  }

  async function change(work) {
    try {
      if (await work() === false) return;
      shown = "";
      await refresh();
    } catch (error) {
      failed(error);
    }
  }

  function actions(key, left) {
    if (!key.live || key.id === own(key)) return [];
    const at = `${AT}/keys/${key.id}`;
    return [
      action("Rotate", async () => {
        const hours = await ask(`A new secret for ${key.name}. Hours that the present one stays valid; empty: none`, "number");
        const days = hours === null ? null : await ask(`Days until ${key.name} expires, from now; empty: as it is`, "number");
        if (days === null) return false;
        const expiry = days === "" ? {} : { expires_in_s: 86400 * Number(days) };
        return show(key.name, await send("POST", `${at}/rotate`, { overlap_s: Number(hours || 0) * 3600, ...expiry }));
      }),
      action("Limits", async () => {
        const text = await ask(`Limits of ${key.name}, as in: models=4 stored_gb=200 sessions=default stop_kb=none`, "text");
        return text ? send("PUT", `${at}/limits`, { limits: parsed(text) }) : false;
      }),
      action("Adopt", async () => {
        const former = await ask(`Give ${key.name} all sessions, runs, checkpoints and usage of`, left);
        if (former === null) return false;
        const { sessions } = await send("POST", `${at}/adopt`, { former });
        return done.replaceChildren(h("p", {}, `${key.name} has adopted ${plural(sessions, "session")}.`));
      }),
      action("Revoke", async () =>
        (await ask(`Revoke ${key.name} for good? What it made stays.`)) === null ? false : send("DELETE", at), "danger"),
    ];
  }

  function own(key) {
    return key.admin && key.name === now.caller.name ? key.id : null;
  }

  function createForm() {
    const name = h("input", { name: "name", required: true, maxlength: 64, autocomplete: "off" });
    const days = h("input", { name: "days", type: "number", min: 1, max: 3660, placeholder: "never" });
    const admin = h("input", { name: "admin", type: "checkbox" });
    return h("form", { onsubmit: (event) => {
      event.preventDefault();
      change(async () => {
        const body = { name: name.value.trim(), admin: admin.checked, ...(days.value ? { expires_in_s: 86400 * Number(days.value) } : {}) };
        show(body.name, await send("POST", `${AT}/keys`, body));
        event.target.reset();
      });
    } }, h("label", {}, "Name of a new key's holder", name), h("label", {}, "Days until it expires", days),
    h("label", { class: "check" }, admin, "admin"), h("button", { type: "submit" }, "Create key"));
  }

  function show(name, { key }) {
    done.replaceChildren(h("p", {}, `The key of ${name}, shown only now: `, h("code", { class: "secret", tabindex: 0 }, key)));
  }

  return poll(EVERY_MS, refresh, failed);
}

// The work of keys that have ended, and of none.
function withoutHolder(keys) {
  const ended = keys.filter(({ live }) => !live).reverse();
  return [...ended.map((key) => [String(key.id), `key ${key.id}, ${key.name}`]), ["none", "nobody: all that was made without a key"]];
}

function owned(name, each) {
  return [name, number(each.sessions), number(each.models), number(each.checkpoints), bytes(each.stored_bytes),
    number(each.trained_tokens), number(each.prompt_tokens), number(each.sampled_tokens)];
}

function state(key) {
  if (key.revoked_at) return `revoked ${moment(key.revoked_at)}`;
  const parts = [key.live ? "live" : "expired", key.expires_at ? `expires ${moment(key.expires_at)}` : null,
    key.previous_until && Date.parse(key.previous_until) > Date.now() ? `old secret until ${moment(key.previous_until)}` : null];
  return parts.filter(Boolean).join(", ");
}

function limits(values) {
  const known = Object.entries(values);
  const free = known.filter(([, value]) => value === null).map(([name]) => name);
  const set = known.filter(([, value]) => value !== null).map(([name, value]) => `${name} ${value.toLocaleString("en")}`);
  return [...(set.length ? [set.join(", ")] : []), ...(free.length ? [`no limit of ${free.join(", ")}`] : [])].join("; ");
}

function parsed(text) {
  return Object.fromEntries(text.trim().split(/\s+/).map((pair) => {
    const [name, value] = pair.split("=");
    return [name, value === "none" || value === "default" ? value : Number(value)];
  }));
}
