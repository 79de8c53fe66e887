// Runs: a list to choose from, the curves of those chosen, and the checkpoints of one.

import { bytes, card, duration, facts, h, moment, number, table, wide } from "./dom.js";
import { download, get, poll, request, save, send } from "./server.js";
import { stepChart } from "./charts.js";

const EVERY_MS = 3000;
const MOST_COMPARED = 8;
const CURVES = [
  ["loss", "Loss per trained token"],
  ["reward_proxy", "Reward proxy: mean of advantage × logprob"],
  ["entropy_proxy", "Entropy proxy: mean of −logprob of sampled tokens"],
  ["policy_shift", "Policy shift: mean of sampled − trained logprob"],
  ["sampler_gap", "Trainer–sampler gap on the probe"],
  ["grad_norm", "Gradient norm"],
  ["learning_rate", "Learning rate"],
  ["tokens", "Tokens of a step"],
];
const SECONDS = ["wait_s", "compute_s", "answer_s"];

export function showRuns(main, { path, failed, recovered }) {
  return path[0] ? showCurves(main, path[0].split(",").slice(0, MOST_COMPARED), failed, recovered) : showList(main, failed, recovered);
}

function showList(main, failed, recovered) {
  const runs = table("Training runs", [
    ["compare", ""], ["run", "id"], ["metadata", ""], ["owner", ""], ["rank", "number"], ["state", ""], ["steps", "number"],
    ["loss", "number"], ["reward proxy", "number"], ["last request", ""]]);
  const chosen = new Set();
  const compare = h("button", { type: "button", disabled: true, onclick: () => { location.hash = `#/runs/${[...chosen].join(",")}`; } }, "Compare");
  const count = h("span", { class: "quiet" });
  main.append(h("h1", {}, "Runs"), wide(card("Training runs", h("div", { class: "row" }, compare, count), runs.node)));
  let shown = "";

  function choose(run, box) {
    if (box.checked) chosen.add(run);
    else chosen.delete(run);
    compare.disabled = chosen.size < 1 || chosen.size > MOST_COMPARED;
  }

  async function refresh() {
    const answer = await get("console/runs?limit=200");
    recovered();
    const text = JSON.stringify(answer);
    if (text === shown) return; // keeps the focus where it is
    shown = text;
    count.textContent = answer.total > answer.runs.length ? `the last ${answer.runs.length} of ${answer.total}` : `${answer.total} run(s)`;
    runs.fill(answer.runs.map((run) => {
      const box = h("input", { type: "checkbox", "aria-label": `compare ${run.run_id}`, onchange: (event) => choose(run.run_id, event.target) });
      box.checked = chosen.has(run.run_id);
      return [box, h("a", { href: `#/runs/${encodeURIComponent(run.run_id)}` }, run.run_id), metadata(run), run.owner,
        rank(run), run.state, number(run.steps), number(run.last?.loss), number(run.last?.reward_proxy),
        moment(run.last_request_at)];
    }));
  }
  return poll(EVERY_MS, refresh, failed);
}

function rank(run) {
  return run.lora_rank === 0 ? "full" : number(run.lora_rank);
}

function metadata(run) {
  return Object.entries(run.user_metadata).map(([name, value]) => `${name}=${value}`).join(", ") || null;
}

function showCurves(main, names, failed, recovered) {
  const points = new Map(names.map((name) => [name, { next: 0, columns: {} }]));
  const alone = names.length === 1;
  const charts = CURVES.map(([column, title]) => [column, title, stepChart(title, names.map(short))]);
  const time = stepChart("Seconds of a step: wait, compute, answer", ["wait", "compute", "answer"]);
  const last = h("div");
  const about = h("div");
  const checkpoints = alone ? checkpointCard(names[0], failed) : null;
  main.append(
    h("h1", {}, alone ? names[0] : `${names.length} runs compared`),
    h("p", { class: "row" }, h("a", { href: "#/runs" }, "All runs"), ...names.map((name) =>
      h("button", { type: "button", onclick: () => download(`console/runs/${encodeURIComponent(name)}/points.csv`, `${name.replaceAll(":", "-")}.csv`).catch(failed) },
        alone ? "Export CSV" : `CSV of ${short(name)}`))),
    h("div", { class: "grid curves" },
      alone ? card("Run", about) : null,
      alone ? card("Last step", last) : null,
      ...charts.map(([, title, chart]) => card(title, chart.node)),
      alone ? card("Seconds of a step", time.node) : null,
      checkpoints?.node));

  async function refresh() {
    for (const [name, kept] of points) await more(name, kept);
    recovered();
    for (const [column, , chart] of charts) chart.draw(aligned([...points.values()].map((kept) => [kept.columns.step, kept.columns[column]])));
    if (!alone) return;
    showRun(about, await get(`console/runs/${encodeURIComponent(names[0])}`), failed);
    const { columns } = points.get(names[0]);
    time.draw(aligned(SECONDS.map((column) => [columns.step, columns[column]])));
    last.replaceChildren(lastStep(columns));
  }
  const stop = poll(EVERY_MS, refresh, failed);
  const stopCheckpoints = checkpoints ? poll(EVERY_MS * 3, checkpoints.refresh, failed) : () => {};
  return () => {
    stop();
    stopCheckpoints();
    for (const [, , chart] of charts) chart.close();
    time.close();
  };
}

async function more(name, kept) {
  let answer;
  do {
    answer = await get(`console/runs/${encodeURIComponent(name)}/points?after=${kept.next}`);
    for (const [column, values] of Object.entries(answer.columns)) (kept.columns[column] ??= []).push(...values);
    kept.next = answer.next;
  } while (answer.more);
}

// Join curves of different steps on one axis.
function aligned(curves) {
  const steps = [...new Set(curves.flatMap(([steps]) => steps ?? []))].sort((one, other) => one - other);
  return [steps, ...curves.map(([own, values]) => {
    const byStep = new Map((own ?? []).map((step, place) => [step, values[place]]));
    return steps.map((step) => byStep.get(step) ?? null);
  })];
}

function short(name) {
  return `${name.slice(0, 8)}…${name.slice(name.indexOf(":"))}`;
}

// What it is, and why it is not in training. The button keeps the focus: only the facts before it are replaced.
function showRun(node, run, failed) {
  const inTraining = run.state === "ready" || run.state === "creating";
  const end = node.querySelector("button") ?? h("button", { type: "button", class: "danger", onclick: async () => {
    if (await ask(`End session ${run.session_id}? Its models leave the trainer; checkpoints stay.`) === null) return;
    await send("POST", `sessions/${run.session_id}/finish`, {}).catch(failed);
  } }, "End session");
  end.hidden = !inTraining;
  const about = facts([
    ["state", run.state], ...(run.state_reason ? [["reason", run.state_reason]] : []), ["owner", run.owner], ["base model", run.base_model],
    ["rank", rank(run)], ["created", moment(run.created_at)], ["last request", moment(run.last_request_at)],
    ...Object.entries(run.user_metadata)]);
  if (node.firstChild) node.firstChild.replaceWith(about);
  else node.append(about, h("p", {}, end));
}

function lastStep(columns) {
  const place = (columns.step ?? []).length - 1;
  if (place < 0) return h("p", { class: "quiet" }, "No optimizer step yet.");
  const of = (column) => columns[column][place];
  return facts([
    ["step", number(of("step"))], ["at", moment(1000 * of("at"))], ["loss", number(of("loss"))], ["reward proxy", number(of("reward_proxy"))],
    ["grad norm", number(of("grad_norm"))], ["tokens", `${number(of("tokens"))} in ${number(of("datums"))} datums`],
    ["seconds", `${duration(of("wait_s"))} waiting, ${duration(of("compute_s"))} computing, ${duration(of("answer_s"))} to the answer`],
  ]);
}

// Checkpoints, by the API's own routes.

function checkpointCard(run, failed) {
  const list = table("Checkpoints", [["checkpoint", "id"], ["size", "number"], ["saved", ""], ["expires", ""], ["", ""]]);
  const node = wide(card("Checkpoints", list.node));
  const at = `training_runs/${encodeURIComponent(run)}/checkpoints`;
  let shown = "";

  async function refresh() {
    const { checkpoints } = await get(at);
    const text = JSON.stringify(checkpoints);
    if (text === shown) return;
    shown = text;
    list.fill(checkpoints.map((each) => [
      each.checkpoint_id, bytes(each.size_bytes), moment(each.time), each.expires_at ? moment(each.expires_at) : "never", h("div", { class: "row" }, ...actions(each))]));
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

// A dialog. Returns what was entered, "" without a field, null when it was given up.
export function ask(question, type = null) {
  return new Promise((resolve) => {
    const input = type ? h("input", { type, min: 1, step: "any", "aria-label": question }) : null;
    const dialog = h("dialog", { "aria-label": question });
    const done = (value) => { dialog.close(); dialog.remove(); resolve(value); };
    dialog.append(h("p", {}, question), h("form", { onsubmit: (event) => { event.preventDefault(); done(input ? input.value : ""); } },
      input, h("button", { type: "submit" }, "OK"), h("button", { type: "button", onclick: () => done(null) }, "Cancel")));
    dialog.addEventListener("cancel", (event) => { event.preventDefault(); done(null); });
    document.body.append(dialog);
    dialog.showModal();
  });
}
