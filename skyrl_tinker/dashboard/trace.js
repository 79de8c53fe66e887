// Trace: the last minutes as lanes to look at, and as a file for Perfetto.

import { card, duration, h, number, only } from "./dom.js";
import { request, save } from "./server.js";
import { timeline } from "./timeline.js";

const NAME = "skyrl-tinker-trace.json";

export function showTrace(main, { now, failed, recovered }) {
  const minutes = h("input", { type: "number", min: 1, max: 60, value: 1, name: "minutes", required: true });
  const note = h("p", { class: "quiet small", role: "status" });
  const keep = h("button", { type: "button", disabled: true, onclick: () => save(URL.createObjectURL(new Blob([text], { type: "application/json" })), NAME) }, "Save trace");
  let text = "";
  let left = false;
  const form = h("form", { onsubmit: (event) => { event.preventDefault(); load(); } },
    h("label", {}, "Minutes back", minutes), h("button", { type: "submit" }, "Show"), keep);
  const lanes = timeline(form);
  main.append(h("h1", {}, "Trace"), only(card("Trace of the last minutes", note, lanes.node,
    h("p", { class: "quiet small" }, "Your requests by run, and samples by session: how long each waited, ran, and took to its answer; above them the trainer's units "
      + "and the calls of its ranks, and weights on their way to the samplers. The saved file shows the same in ",
    h("a", { href: "https://ui.perfetto.dev", rel: "noreferrer noopener", target: "_blank" }, "ui.perfetto.dev"), " (it stays in your browser) or in chrome://tracing."))));

  async function load() {
    note.textContent = "Collecting …";
    try {
      const read = await (await request(`console/trace?minutes=${Number(minutes.value)}`)).text();
      if (left) return;
      recovered();
      text = read;
      keep.disabled = false;
      show();
    } catch (error) {
      note.textContent = "";
      failed(error);
    }
  }

  function show() {
    const found = lanesOf(JSON.parse(text).traceEvents);
    const slices = found.flatMap((lane) => lane.slices);
    const last = slices.reduce((most, { to }) => (to < Infinity ? Math.max(most, to) : most), Date.parse(now.at) / 1000);
    for (const slice of slices) slice.to = Math.min(slice.to, last);
    const first = slices.reduce((least, { from }) => Math.min(least, from), last);
    note.textContent = slices.length ? "" : "Nothing ran: a script's requests stand here from its first one on.";
    lanes.draw(found, [Math.max(first, last - 60 * Number(minutes.value)), last]);
  }

  load();
  return () => { left = true; lanes.close(); };
}

// The lanes of a trace in the Trace Event Format: complete slices, and asynchronous ones with parts in them.
function lanesOf(events) {
  const processes = new Map();
  const threads = new Map();
  const lanes = new Map();
  const open = new Map();
  const add = (event, slice) => {
    const at = event.ph === "X" ? `${event.pid}.${event.tid}` : String(event.pid);
    if (!lanes.has(at)) lanes.set(at, { pid: event.pid, tid: event.tid, slices: [] });
    lanes.get(at).slices.push(slice);
    return slice;
  };
  for (const event of events) {
    const from = event.ts / 1e6;
    const key = `${event.cat} ${event.id}`;
    if (event.name === "process_name") processes.set(event.pid, { name: event.args.name, title: event.args.name });
    else if (event.name === "process_labels") processes.get(event.pid).title = event.args.labels;
    else if (event.name === "thread_name") threads.set(`${event.pid}.${event.tid}`, event.args.name);
    else if (event.ph === "X") add(event, complete(event.name, from, from + event.dur / 1e6, event.args));
    else if (event.ph === "b" && event.cat === "weights") open.set(key, add(event, complete(event.name, from, Infinity, {})));
    else if (event.ph === "b" && !open.has(key)) open.set(key, add(event, { name: event.name, from, to: Infinity, parts: [], args: event.args }));
    else if (event.ph === "b" && event.name !== "wait") open.get(key).parts.push({ kind: event.name, from, to: Infinity });
    else if (event.ph === "e") end(open, key, event.name, from);
  }
  for (const lane of lanes.values()) for (const slice of lane.slices) slice.text = described(slice);
  const found = [...lanes.entries()].sort(([, one], [, other]) => one.pid - other.pid || one.tid - other.tid);
  return found.map(([at, { pid, slices }]) => {
    const thread = threads.get(at);
    const { name, title } = processes.get(pid);
    return { name: thread ? `${name}, ${thread}` : name, title, slices };
  });
}

function complete(name, from, to, args) {
  return { name, from, to, parts: [{ kind: "run", from, to }], args };
}

function end(open, key, name, at) {
  const slice = open.get(key);
  const part = slice.parts.findLast(({ kind }) => kind === name);
  if (part) part.to = at;
  if (name !== slice.name) return;
  slice.to = at;
  for (const each of slice.parts) each.to = Math.min(each.to, at);
  open.delete(key);
}

function described({ name, from, to, parts, args }) {
  const own = Object.entries(args).filter(([key, value]) => key !== "request_id" && value !== null)
    .map(([key, value]) => `${key} ${typeof value === "number" ? number(value) : value}`);
  const took = to === Infinity ? "not finished" : duration(to - from);
  const divided = parts.length && parts[0].from > from ? [`wait ${duration(parts[0].from - from)}`, ...parts.filter(({ to: until }) => until < Infinity).map((part) => `${part.kind} ${duration(part.to - part.from)}`)] : [];
  return [`${name}: ${took}`, ...divided, ...own].join(", ");
}
