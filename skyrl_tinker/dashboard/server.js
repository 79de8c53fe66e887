// Requests to the server. The key lives in this tab's sessionStorage, and goes into a header, never a URL.

const KEY = "skyrl-tinker key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function storedKey() {
  return sessionStorage.getItem(KEY);
}

export function storeKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export async function request(path, { method = "GET", body } = {}) {
  const headers = {};
  if (storedKey()) headers["X-API-Key"] = storedKey();
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const url = new URL(`api/v1/${path}`, document.baseURI);
  const answer = await fetch(url, { method, headers, body: body && JSON.stringify(body), cache: "no-store" });
  if (!answer.ok) throw new Refused(answer.status, await refusal(answer));
  return answer;
}

export async function get(path) {
  return (await request(path)).json();
}

export async function send(method, path, body) {
  return (await request(path, { method, body })).json();
}

async function refusal(answer) {
  try {
    const { detail } = await answer.json();
    return typeof detail === "string" ? detail : JSON.stringify(detail);
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}

// Save a body as a file of the user's.
export async function download(path, name) {
  save(URL.createObjectURL(await (await request(path)).blob()), name);
}

export function save(url, name) {
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
}

// Call `work` now and every `everyMs` until stopped; not while the tab is hidden, and one call at a time.
export function poll(everyMs, work, failed) {
  let stopped = false;
  let timer = null;
  async function turn() {
    timer = null;
    try {
      await work();
    } catch (error) {
      if (!stopped) failed(error);
    }
    if (!stopped && !document.hidden) timer = setTimeout(turn, everyMs);
  }
  function shown() {
    if (!stopped && !document.hidden && timer === null) turn();
  }
  document.addEventListener("visibilitychange", shown);
  turn();
  return () => {
    stopped = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", shown);
  };
}
