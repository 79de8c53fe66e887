// Runs: a list to choose from, the curves of those chosen, and the checkpoints of one.

import { aligned, curve, joined, more, moreReports, smoothed } from "./curves.js";
import { ago, bytes, card, decimals, duration, facts, figures, h, moment, NARROW, number, only, plural, short, table, tick, wide } from "./dom.js";
import { download, get, poll, Refused, request, save, send } from "./server.js";
import { COLOURS, stepChart } from "./charts.js";

const EVERY_MS = 3000;
const MOST_COMPARED = 8;
const MOST_PARENTS = 20;
const MOST_POINTS = 1000; // of a run in the list
const SILENT_S = 60;
const LEADING_HEIGHT = 300;
const ROUNDING = 1e-3; // smaller differences would fill a chart of their own and look like drift
const OF_SUMS = 1e-5; // likewise, where advantages that add up to 0 leave nothing but rounding
const REWARD_ABOUT = "as its script reports it";
const CURVES = [
  ["loss", "Loss per trained token", "sum of the losses by sum of the weights, or by trained positions", { height: LEADING_HEIGHT, span: OF_SUMS, none: "no position had a weight" }],
  ["sampler_gap", "Trainer–sampler gap", "difference of their logprobs on the probe after a sync",
    { least: [0, ROUNDING], none: "it is measured after a save of weights for sampling" }],
  ["policy_shift", "Policy shift", "mean of sampled − trained logprob: 0 while the policy is the one that sampled",
    { least: [-ROUNDING, ROUNDING], none: "the data has no logprobs as sampled" }],
  ["entropy_proxy", "Entropy proxy", "mean of −logprob of the trained tokens, as sampled"],
  ["grad_norm", "Gradient norm", "before clipping", { zero: true }],
  ["learning_rate", "Learning rate", "as given to optim_step", { zero: true }],
  ["tokens", "Tokens of a step", "of all data since the step before", { zero: true }],
  ["reward_proxy", "Advantage × logprob", "its mean, not the reward: with advantages centred in their group it goes to 0",
    { span: OF_SUMS, none: "the data has no advantages" }],
];
const HYPERPARAMETERS = [
  ["base model", (run) => run.base_model],
  ["rank", rank],
  ["loss function", lossFunction],
  ["learning rate", (run) => number(run.last?.learning_rate)],
  ["datums of a step", (run) => number(run.last?.datums)],
];
const SECONDS = ["wait_s", "compute_s", "answer_s"];
const STATES = { ready: "good", failed: "error", lost: "error", parked: "warning" };
const LISTED = 200;
const COLUMNS = [ // the third: its name where the server sorts
  ["", "check", null],
  ["run", "run", "name"],
  ["project", "optional", "project"],
  ["base model", "optional", "base_model"],
  ["owner", "", "owner"],
  ["rank", "number", "rank"],
  ["learning rate", "number roomy optional", null],
  ["loss function", "roomy optional", null],
  ["datums", "number roomy optional", null],
  ["state", "", "state"],
  ["steps", "number", "steps"],
  ["reward", "number", "reward"],
  ["loss", "number", "loss"],
  ["last request", "", "last_request"],
];
const GREATEST_FIRST = COLUMNS.findIndex(([name]) => name === "steps"); // and the columns behind it

export function showRuns(main, { path, failed, recovered }) {
  return path[0] ? showCurves(main, path[0].split(",").slice(0, MOST_COMPARED), failed, recovered) : showList(main, failed, recovered);
}

function showList(main, failed, recovered) {
  const order = { place: COLUMNS.length - 1, down: true };
  const sortBy = (place, down) => {
    Object.assign(order, { place, down });
    refresh().catch(failed);
  };
  const none = h("span");
  const runs = table("Training runs", COLUMNS, none, {
    most: NARROW.matches ? 20 : Infinity, sort: (place) => sortBy(place, order.place === place ? !order.down : place >= GREATEST_FIRST) });
  const curves = overview();
  const sort = h("select", { onchange: () => sortBy(Number(sort.value), sort.value >= GREATEST_FIRST) }, // where the heads are not shown
    ...COLUMNS.map(([name, , sorted], place) => (sorted ? h("option", { value: place, selected: place === order.place }, name) : null)));
  const chosen = new Set();
  const compare = h("button", { type: "button", disabled: true, onclick: () => { location.hash = `#/runs/${[...chosen].join(",")}`; } }, "Compare");
  const count = h("span", { class: "quiet" });
  const search = h("input", { type: "search", size: 34, "aria-label": "Search", placeholder: "name, project, metadata, state …", oninput: () => refresh().catch(failed) });
  const others = h("input", { type: "checkbox", onchange: () => fill() });
  main.append(h("h1", {}, "Runs"), only(card("Training runs",
    h("p", { class: "row" }, search, h("label", { class: "narrow" }, "Sorted by", sort), h("label", {}, others, "with those of the tinker command"), compare, count),
    runs.node)), curves.node);
  let answer = { runs: [], total: 0 };
  let shown = "";

  function choose(run, box) {
    if (box.checked) chosen.add(run);
    else chosen.delete(run);
    compare.disabled = chosen.size < 1 || chosen.size > MOST_COMPARED;
  }

  function fill() {
    const found = answer.runs.filter((run) => others.checked || !ofCommand(run));
    none.replaceChildren(...noRuns(search.value.trim(), answer.runs.length));
    runs.mark(order.place, order.down);
    sort.value = order.place;
    const of = answer.total > answer.runs.length ? `the first ${answer.runs.length} of ${answer.total} found` : plural(answer.total, "run");
    count.textContent = found.length === answer.runs.length ? of : `${found.length} shown, of ${of}`;
    const several = new Set(answer.runs.map((run) => run.base_model)).size > 1;
    runs.fill(found.map((run) => {
      const box = h("input", { type: "checkbox", "aria-label": `compare ${run.name ?? run.run_id}`, onchange: (event) => choose(run.run_id, event.target) });
      box.checked = chosen.has(run.run_id);
      return [box, named(run), run.project_id, several ? run.base_model : null, run.owner, rank(run),
        run.last && number(run.last.learning_rate), lossFunction(run), run.last && number(run.last.datums), state(run), number(run.steps_before + run.steps), decimals(run.reward), decimals(run.loss), ago(run.last_request_at)];
    }));
    curves.show(found).catch((error) => { shown = ""; failed(error); });
  }

  function wanted() {
    const words = search.value.trim();
    return `console/runs?limit=${LISTED}&sort=${COLUMNS[order.place][2]}&order=${order.down ? "descending" : "ascending"}${words && `&search=${encodeURIComponent(words)}`}`;
  }

  async function refresh() {
    const asked = wanted();
    const read = await get(asked);
    if (asked !== wanted()) return; // a later answer counts
    recovered();
    tick(main);
    const text = JSON.stringify([asked, ...read.runs.map(({ last_heartbeat_at, ...run }) => [run, silence(last_heartbeat_at) > SILENT_S])]);
    if (text === shown) return; // keeps the focus where it is
    shown = text;
    answer = read;
    fill();
  }
  const stop = poll(EVERY_MS, refresh, failed);
  return () => { stop(); curves.close(); };
}

// The curves of listed runs while these are few. Each is asked for more once its row tells of more.
function overview() {
  const known = new Map();
  const node = h("div", { class: "grid curves" });
  let charts = [];
  let drawn = "";
  let left = false;
  let turn = Promise.resolve();

  function keptOf({ run_id, steps, steps_before }) {
    if (!known.has(run_id)) {
      const part = { run: run_id, next: Math.max(0, steps - MOST_POINTS), columns: {}, before: steps_before, until: Infinity };
      known.set(run_id, { part, reports: { run: run_id, next: 0 }, reward: new Map(), values: new Map() });
    }
    return known.get(run_id);
  }

  async function learn(run) {
    const kept = keptOf(run);
    if (kept.part.next < run.steps) await more(kept.part);
    if (kept.reports.next < run.reward_report) await moreReports(kept.reports, kept, "&limit=5000&reward_only=true");
    return kept;
  }

  function begin(names) {
    for (const { chart } of charts) chart.close();
    charts = (names.length ? [["Reward", REWARD_ABOUT], CURVES[0].slice(1)] : []).map(([label, about]) => {
      const chart = stepChart(label, names, { height: LEADING_HEIGHT });
      return { chart, node: card(label, h("p", { class: "quiet small" }, about), chart.node) };
    });
    node.replaceChildren(...charts.map((each) => each.node));
  }

  async function draw(runs) {
    const found = [];
    for (const run of runs) {
      found.push(await learn(run));
      if (left) return;
    }
    const names = titled(runs);
    if (JSON.stringify(names) !== drawn) begin(names);
    drawn = JSON.stringify(names);
    const drawable = [found.map(({ reward }) => curve(reward)), found.map(({ part }) => joined([part], "loss", "step"))];
    charts.forEach(({ node: place, chart }, each) => {
      place.hidden = drawable[each].every(([, values]) => values.every((value) => value === null));
      chart.draw(aligned(drawable[each]));
    });
  }

  // One at a time: each goes on behind the last. The first made comes first, so that colours stay.
  function show(listed) {
    const runs = listed.filter(({ steps, reward }) => steps > 0 || reward !== null).sort((one, other) => one.created_at.localeCompare(other.created_at));
    const next = () => draw(runs.length > MOST_COMPARED ? [] : runs);
    turn = turn.then(next, next);
    return turn.catch((error) => { if (!left) throw error; });
  }
  return { node, show, close() { left = true; for (const { chart } of charts) chart.close(); } };
}

function noRuns(words, ofCommands) {
  if (ofCommands) return ["None but those of the tinker command."];
  if (words) return ["None found. Each word is to be a part of a name, project, base model, owner, state, id or metadata, as in lr=1e-4."];
  return ["None. A script appears here with its first request: ",
    h("code", {}, `TINKER_BASE_URL=${location.origin} TINKER_API_KEY=… python examples/rl_loop.py`)];
}

function ofCommand(run) {
  return run.steps === 0 && (run.user_metadata.created_by ?? "").startsWith("tinker ");
}

function named(run) {
  const [heir, ...others] = run.continued_by;
  return h("div", {}, linked(run),
    h("div", { class: "small quiet" }, metadata(run)),
    heir ? h("div", { class: "small quiet" }, "continued by ", linked(heir), others.length ? ` and ${others.length} more` : null) : null,
    h("div", { class: "small quiet id" }, run.run_id));
}

function linked(run) {
  return h("a", { href: `#/runs/${encodeURIComponent(run.run_id)}` }, title(run));
}

function title(run) {
  return run.name ?? short(run.run_id);
}

// So that those of one name are told apart.
function titled(runs) {
  return runs.map((run) => (runs.filter((each) => title(each) === title(run)).length > 1 ? `${title(run)} ${run.run_id.slice(0, 4)}` : title(run)));
}

function silence(heartbeat) {
  return (Date.now() - Date.parse(heartbeat)) / 1000;
}

// Only of one in training: others need no heartbeat.
function state(run) {
  if (!inTraining(run) || silence(run.last_heartbeat_at) <= SILENT_S) return h("span", { class: `state ${STATES[run.state] ?? "quiet"}` }, run.state);
  return h("span", { class: "state warning", title: "No heartbeat: its script may have been killed" }, `${run.state}, silent since `, ago(run.last_heartbeat_at));
}

function inTraining(run) {
  return run.state === "ready" || run.state === "creating";
}

function rank(run) {
  return run.lora_rank === 0 ? "full" : number(run.lora_rank);
}

function lossFunction(run) {
  const config = Object.entries(run.loss_fn_config).map(([name, value]) => `${name} ${number(value, 5)}`).join(", ");
  return run.loss_fn && (config ? `${run.loss_fn}: ${config}` : run.loss_fn);
}

function metadata(run) {
  return Object.entries(run.user_metadata).map(([name, value]) => `${name}=${value}`).join(", ") || null;
}

function showCurves(main, names, failed, recovered) {
  let stop = null;
  let left = false;
  const begin = async () => {
    const runs = [];
    for (const name of names) runs.push(await lineage(await get(`console/runs/${encodeURIComponent(name)}`)));
    if (!left) stop = drawCurves(main, runs, failed, recovered);
  };
  begin().catch(failed);
  return () => { left = true; stop?.(); };
}

// A run behind those that it goes on from, the first of them first, as far as they are still there.
async function lineage(run) {
  const chain = [run];
  while (chain[0].parent && chain.length < MOST_PARENTS) {
    try {
      chain.unshift(await get(`console/runs/${encodeURIComponent(chain[0].parent)}`));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      break;
    }
  }
  return chain;
}

function drawCurves(main, chains, failed, recovered) {
  const runs = chains.map((chain) => chain.at(-1));
  const points = chains.map((chain) => chain.map((run, place) =>
    ({ run: run.run_id, next: 0, columns: {}, before: run.steps_before, until: chain[place + 1]?.steps_before ?? Infinity })));
  const reports = chains.map((chain) => ({ parts: chain.map((run) => ({ run: run.run_id, next: 0 })), reward: new Map(), values: new Map() }));
  const alone = runs.length === 1;
  const titles = titled(runs);
  const names = (label) => (alone ? [label.toLowerCase()] : titles);
  const charts = CURVES.map(([column, label, about, { none, ...layout } = {}]) => ({
    column, label, about, none, lack: h("p", { class: "small" }), chart: stepChart(label, names(label), layout) }));
  const allCharts = () => [...charts.map(({ chart }) => chart), reward, reported, time];
  const reward = stepChart("Reward", names("Reward"), { height: LEADING_HEIGHT });
  const reported = stepChart("Reported number", names("Value"));
  const choice = h("select", { "aria-label": "Reported number", onchange: () => drawReports() });
  const rewardCard = card("Reward", h("p", { class: "quiet small" }, REWARD_ABOUT), reward.node);
  const reportedCard = card("Reported by the script", h("p", { class: "quiet small" }, "the number chosen here, by the step that the script gave it"), choice, reported.node);
  const time = stepChart("Seconds of a step: wait, compute, answer", ["wait", "compute", "answer"], { zero: true });
  const last = h("div");
  const about = h("div");
  const checkpoints = alone ? checkpointCard(runs[0].run_id, failed) : null;
  const view = { axis: "step", smoothing: 0, log: false };
  const controls = h("span", { class: "row end" },
    selected("Axis", ["step", "minutes", "tokens"], (name) => { view.axis = name; restyle(); }),
    selected("Smoothing", ["none", "0.6", "0.9", "0.97"], (weight) => { view.smoothing = Number(weight) || 0; drawAll(); }),
    h("label", { title: "Values above 0; others have no place" }, h("input", { type: "checkbox", onchange: (event) => { view.log = event.target.checked; restyle(); } }), "logarithmic"));
  const hyperparameters = table("Hyperparameters", [["run", "run"], ...HYPERPARAMETERS.map(([name]) => [name, name === "base model" ? "" : name === "loss function" ? "text" : "number"]), ["", ""]], "none");
  hyperparameters.fill(runs.map((run, place) => [
    h("div", { class: "row" }, swatch(place), h("a", { href: `#/runs/${encodeURIComponent(run.run_id)}` }, titles[place])),
    ...HYPERPARAMETERS.map(([, of]) => of(run)), h("div", { class: "row" }, exported(run))]));
  rewardCard.hidden = reportedCard.hidden = true;
  main.append(
    h("h1", {}, alone ? title(runs[0]) : `${runs.length} runs compared`),
    alone ? h("p", { class: "quiet small id" }, runs[0].run_id) : "",
    h("p", { class: "row" }, h("a", { href: "#/runs" }, "All runs"),
      alone ? h("a", { href: `#/tokens/run/${encodeURIComponent(runs[0].run_id)}` }, "Tokens of this run") : null,
      alone ? exported(runs[0]) : null, controls),
    h("div", { class: "grid curves" },
      alone ? wide(card("Last step", last)) : wide(card("Hyperparameters", hyperparameters.node)),
      alone ? card("Run", about) : null,
      rewardCard,
      ...charts.slice(0, 1).map(drawn)),
    h("div", { class: "grid small curves" },
      ...charts.slice(1).map(drawn),
      reportedCard,
      alone ? card("Seconds of a step", h("p", { class: "quiet small" }, "from the first request of its window to its commit: computing, then the answer; wait is the rest"), time.node) : null,
      checkpoints?.node));

  function exported(run) {
    return h("button", { type: "button", onclick: () => download(`console/runs/${encodeURIComponent(run.run_id)}/points.csv`, `${run.run_id.replaceAll(":", "-")}.csv`).catch(failed) }, "Export CSV");
  }

  function drawn({ label, about, lack, chart }) {
    return card(label, h("p", { class: "quiet small" }, about), lack, chart.node);
  }

  function drawReports() {
    const known = [...new Set(reports.flatMap(({ values }) => [...values.keys()]))].sort(rewardsLast);
    if (known.length !== choice.length) {
      const chosen = choice.value;
      choice.replaceChildren(...known.map((name) => h("option", { value: name, selected: name === chosen }, name)));
    }
    rewardCard.hidden = reports.every((each) => each.reward.size === 0);
    reportedCard.hidden = known.length === 0;
    reward.draw(shown(reports.map((each, run) => onAxis(each.reward, points[run]))), marks());
    reported.draw(shown(reports.map((each, run) => onAxis(each.values.get(choice.value) ?? new Map(), points[run]))), marks());
  }

  function drawAll() {
    for (const { column, none, lack, chart } of charts) {
      const curves = points.map((parts) => joined(parts, column, view.axis));
      chart.draw(shown(curves), marks());
      lack.hidden = curves.some(([, values]) => values.some((value) => value !== null));
      lack.textContent = curves.every(([places]) => places.length === 0) ? "No step yet." : none ? `None: ${none}.` : "None.";
    }
    drawReports();
    if (alone) time.draw(shown(SECONDS.map((column) => joined(points[0], column, view.axis))), marks());
  }

  // Where a run goes on from another: of several they would not say of which.
  function marks() {
    return alone ? placed(points[0].slice(1).map(({ before }) => before), points[0]) : [];
  }

  function restyle() {
    for (const chart of allCharts()) chart.restyle(view);
    drawAll();
  }

  function shown(curves) {
    return aligned(curves.map(([places, values]) => [places, smoothed(values, view.smoothing).map((value) => (view.log && value <= 0 ? null : value))]));
  }

  // Reports have steps: on another axis they stand where the run took the step, or the last one before it.
  function onAxis(bySteps, parts) {
    const [steps, values] = curve(bySteps);
    if (view.axis === "step") return [steps, values];
    return [placed(steps, parts), values];
  }

  function placed(steps, parts) {
    const [known] = joined(parts, "step", "step");
    const [places] = joined(parts, "step", view.axis);
    return steps.map((step) => places[known.findLastIndex((each) => each <= step)] ?? 0);
  }

  async function refresh() {
    for (const part of points.flat()) await more(part);
    for (const kept of reports) for (const part of kept.parts) await moreReports(part, kept);
    recovered();
    drawAll();
    if (!alone) return;
    const run = await get(`console/runs/${encodeURIComponent(runs[0].run_id)}`);
    showRun(about, run, chains[0].at(-2), failed);
    last.replaceChildren(lastStep(points[0].at(-1), run));
  }
  const stop = poll(EVERY_MS, refresh, failed);
  const stopCheckpoints = checkpoints ? poll(EVERY_MS * 3, checkpoints.refresh, failed) : () => {};
  return () => {
    stop();
    stopCheckpoints();
    for (const chart of allCharts()) chart.close();
  };
}

// They have a chart of their own.
function rewardsLast(one, other) {
  return one.includes("reward") - other.includes("reward") || one.localeCompare(other);
}

function swatch(place) {
  const node = h("i", { class: "swatch" });
  node.style.background = COLOURS[place];
  return node;
}

function selected(label, names, choose) {
  return h("label", {}, label, h("select", { onchange: (event) => choose(event.target.value) }, ...names.map((name) => h("option", { value: name }, name))));
}

// What it is, and why it is not in training. The button keeps the focus: only the facts before it are replaced.
function showRun(node, run, parent, failed) {
  const end = node.querySelector("button") ?? h("button", { type: "button", class: "danger", onclick: async () => {
    if (await ask(`End session ${run.session_id}? Its models leave the trainer; checkpoints stay.`) === null) return;
    await send("POST", `sessions/${run.session_id}/finish`, {}).catch(failed);
  } }, "End session");
  end.hidden = !inTraining(run);
  const about = facts([
    ["state", state(run)], ...(run.state_reason ? [["reason", run.state_reason]] : []), ["owner", run.owner],
    ...(run.parent ? [["continues", fromStep(parent ?? { run_id: run.parent, name: null }, run.steps_before)]] : []),
    ...(run.continued_by.length ? [["continued by", h("div", {}, ...run.continued_by.map((heir) => h("div", {}, fromStep(heir, heir.step))))]] : []),
    ...(run.project_id ? [["project", run.project_id]] : []),
    ...HYPERPARAMETERS.map(([name, of]) => [name, of(run)]),
    ["created", ago(run.created_at)], ["last request", ago(run.last_request_at)], ["last heartbeat", ago(run.last_heartbeat_at)],
    ...Object.entries(run.user_metadata).map(([name, value]) => [name, linkOf(value)])]);
  if (node.firstChild) node.firstChild.replaceWith(about);
  else node.append(about, h("p", {}, end));
}

// Text of others: a link is one of this scheme only, such as a tracker's of the run.
function linkOf(value) {
  return value.startsWith("https://") ? h("a", { href: value, target: "_blank", rel: "noreferrer noopener" }, value) : value;
}

function fromStep(run, step) {
  return h("span", {}, linked(run), ` from step ${number(step)}`);
}

function lastStep({ columns, before }, run) {
  const place = (columns.step ?? []).length - 1;
  if (place < 0) return h("p", { class: "quiet" }, "No optimizer step yet.");
  const of = (column) => columns[column][place];
  return figures([
    ["step", number(before + of("step"))], ...(run.reward === null ? [] : [["reward", decimals(run.reward)]]), ["loss", decimals(run.loss)], ["gradient norm", number(of("grad_norm"))],
    ["tokens", number(of("tokens"))], ["waiting", duration(of("wait_s"))], ["computing", duration(of("compute_s"))],
    ["taken", ago(new Date(1000 * of("at")).toISOString())],
  ]);
}

// Checkpoints, by the API's own routes.

function checkpointCard(run, failed) {
  const list = table("Checkpoints", [["checkpoint", "id"], ["size", "number"], ["saved", ""], ["expires", ""], ["", ""]], "None yet: save_state of the training client makes one.");
  const node = wide(card("Checkpoints", list.node));
  const at = `training_runs/${encodeURIComponent(run)}/checkpoints`;
  let shown = "";

  async function refresh() {
    const { checkpoints } = await get(at);
    tick(node);
    const text = JSON.stringify(checkpoints);
    if (text === shown) return;
    shown = text;
    list.fill(checkpoints.map((each) => [
      each.checkpoint_id, bytes(each.size_bytes), ago(each.time), each.expires_at ? moment(each.expires_at) : "never", h("div", { class: "row" }, ...actions(each))]));
  }

  function action(label, work, className) {
    return h("button", { type: "button", class: className, onclick: async () => {
      try { if (await work() !== false) { shown = ""; await refresh(); } } catch (error) { failed(error); }
    } }, label);
  }

  function actions(each) {
    const url = `${at}/${each.checkpoint_id}`;
    return [
      each.public ? action("Make private", () => send("DELETE", `${url}/publish`)) : action("Publish", () => send("POST", `${url}/publish`)),
      action("Set TTL", async () => {
        const hours = await ask("Delete it after so many hours from now; empty: never", "number");
        if (hours === null) return false;
        return send("PUT", `${url}/ttl`, { ttl_seconds: hours === "" ? null : Math.round(Number(hours) * 3600) });
      }),
      action("Download", () => fetchFiles(url, each)),
      action("Delete", async () => (await ask(`Delete ${each.checkpoint_id}? Its files go for good.`)) === null ? false : send("DELETE", url), "danger"),
    ];
  }
  return { node, refresh };
}

async function fetchFiles(url, checkpoint) {
  if (checkpoint.checkpoint_type === "external") {
    const { urls } = await get(`${url}/external_weights_urls`);
    for (const [name, signed] of Object.entries(urls)) save(signed, name);
  } else {
    const answer = await request(`${url}/archive`);
    save(URL.createObjectURL(await answer.blob()), `${checkpoint.checkpoint_id.split("/").pop()}.tar`);
  }
  return false;
}

// A dialog. Returns what was entered, "" without a field, null when it was given up. `type`: of the field, or its choices.
export function ask(question, type = null) {
  return new Promise((resolve) => {
    const input = Array.isArray(type) ? h("select", { "aria-label": question }, ...type.map(([value, name]) => h("option", { value }, name)))
      : type ? h("input", { type, min: 1, step: "any", "aria-label": question }) : null;
    const dialog = h("dialog", { "aria-label": question });
    const done = (value) => { dialog.close(); dialog.remove(); resolve(value); };
    dialog.append(h("p", {}, question), h("form", { onsubmit: (event) => { event.preventDefault(); done(input ? input.value : ""); } },
      input, h("button", { type: "submit" }, "OK"), h("button", { type: "button", onclick: () => done(null) }, "Cancel")));
    dialog.addEventListener("cancel", (event) => { event.preventDefault(); done(null); });
    document.body.append(dialog);
    dialog.showModal();
  });
}
