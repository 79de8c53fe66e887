// Now: problems first, then what runs and what waits.

import { ago, bytes, card, duration, facts, figures, h, number, plural, short, table, wide } from "./dom.js";
import { get, poll } from "./server.js";
import { timeChart } from "./charts.js";

const EVERY_MS = 2000;
const MOST_VERSIONS = 3;
const REMEMBERED_S = 3600;
const GAP_S = 10; // over which rates are means

export function showNow(main, { now, failed, recovered }) {
  const badge = h("span", { class: "badge" });
  const calm = h("span", { class: "quiet small" }, " no problems");
  const problems = h("ul", { class: "problems", "aria-live": "polite" });
  const problemCard = wide(card("Problems", problems));
  const server = h("div");
  const trainer = h("div");
  const samplers = h("div");
  const bases = table("Base models", [
    ["base model", "run"], ["state", ""], ["since", ""], ["starts", ""], ["idle for", "number optional"], ["memory", "number optional"],
    ["GPU memory", "number optional"], ["context", "number"], ["runs on", ""]], "none");
  const baseCard = wide(card("Base models", bases.node));
  const rates = h("div");
  const chart = timeChart("Tokens per second, means over ten seconds", ["trained", "sampled"]);
  const queue = table("Queue by session", [
    ["session", "run"], ["owner", ""], ["kind", ""], ["waiting", "number"], ["oldest", "number"], ["reason", ""]], "Nothing waits.");
  const replicas = table("Replicas", [
    ["base model", ""], ["address", ""], ["host", ""], ["state", ""], ["in flight", "number"], ["weights", ""], ["weights by", ""], ["adapters by", ""]], "None: the engine does not answer, or starts them.");
  const processes = table("Processes", [
    ["process", ""], ["pid", "number"], ["memory", "number"], ["GPU memory", "number optional"], ["CPU", "number"], ["age", "number"]], "none");
  processes.node.classList.add("flat");
  const memory = h("p", { class: "quiet small" });
  const processCard = card("Processes", memory, processes.node);
  const history = [];
  main.append(
    h("h1", {}, "Now ", badge, calm),
    h("div", { class: "grid" },
      problemCard,
      card("Server", server), card("Trainer", trainer), card("Samplers", samplers), baseCard,
      wide(card("Tokens per second, of all owners", rates, chart.node)),
      wide(card("Queue", queue.node)),
      wide(card("Replicas", replicas.node)), processCard));

  function show(answer) {
    recovered();
    const none = answer.problems.length === 0;
    badge.textContent = answer.ready ? "ready" : answer.state;
    problemCard.hidden = none;
    calm.hidden = !none;
    badge.className = `badge ${answer.ready ? "good" : "error"}`;
    problems.replaceChildren(...answer.problems.map(problem));
    server.replaceChildren(served(answer.server));
    baseCard.hidden = answer.server.base_models.every(({ start }, _, { length }) => length === 1 && start === "always");
    bases.fill(answer.server.base_models.map((each) => base(each, answer.server.device)));
    trainer.replaceChildren(training(answer.trainers));
    samplers.replaceChildren(sampling(answer.samplers));
    rates.replaceChildren(speeds(answer.rates));
    queue.fill(answer.queue.map((entry) => [
      session(entry), entry.owner, entry.kind, number(entry.waiting), duration(entry.oldest_age_s), entry.reason ?? "running"]));
    replicas.fill(answer.replicas.map((replica) => [
      replica.base_model, replica.address, replica.host, replica.state, replica.in_flight === null ? "–" : number(replica.in_flight), versions(replica.weights),
      replica.weights_by, replica.adapters_by]));
    processCard.hidden = answer.processes === null;
    if (answer.memory) memory.textContent = remaining(answer.memory);
    processes.fill((answer.processes ?? []).map((each) => [
      each.name, String(each.pid), bytes(each.rss_bytes), each.gpu_bytes === null ? null : bytes(each.gpu_bytes), `${Math.round(each.cpu_percent)} %`, duration(each.age_s)]));
    const at = Date.parse(answer.at) / 1000;
    if (at - history.at(-1)?.[0] > GAP_S) history.push([at - GAP_S, null, null]); // the page was hidden, or the server away
    history.push([at, answer.rates?.trained.over_10_s ?? null, answer.rates?.sampled.over_10_s ?? null]);
    while (history[0][0] < at - REMEMBERED_S) history.shift();
    chart.draw([0, 1, 2].map((column) => history.map((row) => row[column])));
  }

  // Before the page was opened.
  async function remember() {
    const { every_s, trained, sampled } = await get("console/rates");
    const last = Date.parse(now.at) / 1000;
    history.unshift(...trained.map((rate, place) => [last - every_s * (trained.length - place), rate, sampled[place]]));
  }

  show(now);
  remember().catch(failed);
  const stop = poll(EVERY_MS, async () => show(await get("console/now")), failed);
  return () => { stop(); chart.close(); };
}

function remaining({ available_bytes, total_bytes, gpus }) {
  const used = gpus.map((gpu, place) => `; GPU ${place}: ${bytes(gpu.used_bytes)} of ${bytes(gpu.total_bytes)} in use`);
  return `${bytes(available_bytes)} of ${bytes(total_bytes)} of this host are available${used.join("")}`;
}

function versions(names) {
  if (!names.length) return null;
  if (names.length <= MOST_VERSIONS) return names.join(" ");
  return h("span", { title: names.join(" ") }, `${names.slice(-MOST_VERSIONS).join(" ")} and ${names.length - MOST_VERSIONS} more`);
}

function problem({ level, subject, text }) {
  return h("li", { class: level }, h("b", {}, level), h("span", {}, `${subject}: ${text}`));
}

// Facts of one base model, or of each below its name.
function byModel(models, of) {
  if (models.length === 1) return facts(of(models[0]));
  return h("div", { class: "models" }, ...models.map((each) => h("div", {}, h("h3", {}, each.base_model), facts(of(each)))));
}

function served({ base_models, device, started_at, version }) {
  const one = base_models.length === 1 ? base_models[0] : null;
  return facts([
    ...(one ? [["model", one.base_model], ["context", `${number(one.context_length)} tokens`], ["runs on", parts(one, device)]] : [["device", device]]),
    ["started", ago(started_at)], ["version", version]]);
}

function parts({ trainable, trainer_ranks, sampleable, replicas, placement }, device) {
  return `${device}, ${trainable ? plural(trainer_ranks, "trainer rank") : "sampling only"}, ${sampleable ? `${plural(replicas, "replica")}, ${placement}` : "training only"}`;
}

function base(each, device) {
  return [
    each.base_model, each.state === "stopped" ? `stopped: ${each.detail}` : each.state, ago(each.since), each.start === "always" ? "with the server" : "on demand",
    each.idle_s === null ? null : duration(each.idle_s), each.rss_bytes === null ? null : bytes(each.rss_bytes), each.gpu_bytes === null ? null : bytes(each.gpu_bytes),
    number(each.context_length), parts(each, device)];
}

function training(trainers) {
  if (!trainers) return h("p", { class: "quiet" }, "The engine does not answer.");
  return byModel(trainers, (each) => [
    ["running", each.running ? unit(each.running) : "nothing"],
    ["next", each.following ? unit(each.following) : "nothing"],
    ["a unit takes", duration(each.unit_s)],
  ]);
}

function session({ name, session_id }) {
  return h("div", {}, name ?? short(session_id), h("div", { class: "small quiet id" }, session_id));
}

function unit({ kind, model_ids, names, others, tokens, running_s }) {
  const whose = [...model_ids.map((id, place) => names[place] ?? short(id)), ...(others ? [`${plural(others, "model")} of others`] : [])];
  const more = [tokens ? `${number(tokens)} tokens` : null, running_s === null || running_s === undefined ? null : `for ${duration(running_s)}`];
  return h("span", {}, h("b", {}, kind), ` ${more.filter(Boolean).join(" ")}`, h("br"), h("span", { class: "small quiet", title: model_ids.join("\n") }, whose.join(", ")));
}

function sampling(samplers) {
  if (!samplers) return h("p", { class: "quiet" }, "The engine does not answer.");
  if (!samplers.length) return h("p", { class: "quiet" }, "None: this server only trains (replicas = 0).");
  return byModel(samplers, (each) => [
    ["in flight", number(each.in_flight)],
    ["waiting", number(each.waiting)],
    ["finished", each.per_second === null ? "–" : `${number(each.per_second)} a second`],
    ["paused", each.paused ?? "no"],
  ]);
}

function speeds(rates) {
  if (!rates) return h("p", { class: "quiet" }, "The engine does not answer.");
  return figures(["trained", "sampled"].map((name) => [name, h("span", {},
    number(rates[name].over_10_s), h("span", { class: "small quiet" }, `${number(rates[name].over_60_s)} over a minute`))]));
}
