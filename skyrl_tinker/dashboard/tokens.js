// Tokens: a datum or a sampled sequence as text, coloured by one of its values.

import { ago, card, decimals, figures, h, NARROW, number, only, plural, short, shortRequest, table, tick, wide } from "./dom.js";
import { get, poll } from "./server.js";

const EVERY_MS = 5000;
const PAGE = 100;
const MOST_ROWS = 1000;
const [MOST_ITEMS, MOST_VALUES, MOST_FIGURES] = [10, 50, 6];
const LOWEST_LOGPROB = -6;
let chosenKind = ""; // also where another run is chosen

export function showTokens(main, { path, failed, recovered }) {
  const run = path[0] === "run" ? path[1] : null;
  if (path[0] && run === null) {
    showOne(main, path[0], Number(path[1] ?? 0)).then(recovered, failed);
    return () => {};
  }
  const list = table("Finished passes and samples", [["prompt, or data", "text"], ["request", "id"], ["kind", ""], ["of", "run"], ["step", "number"], ["accepted", ""]],
    "None yet. Passes and samples stand here once they are finished.");
  const more = h("button", { type: "button", onclick: () => { most += step; refresh().catch(failed); } }, "Older");
  const kind = h("select", { onchange: () => { chosenKind = kind.value; refresh().catch(failed); } },
    ...[["", "all"], ["forward_backward", "forward_backward"], ["forward", "forward"], ["sample", "sample"]].map(([value, name]) => h("option", { value, selected: value === chosenKind }, name)));
  const runs = h("select", { onchange: () => { location.hash = runs.value && `#/tokens/run/${encodeURIComponent(runs.value)}` || "#/tokens"; } });
  main.append(h("h1", {}, "Tokens"),
    run === null ? "" : h("p", { class: "row" }, h("a", { href: `#/runs/${encodeURIComponent(run)}` }, "The run"), h("span", { class: "quiet small id" }, run)),
    only(card("Your finished passes and samples", h("p", { class: "row" }, h("label", {}, "Run", runs), h("label", {}, "Kind", kind)), list.node, more)));
  nameRuns(runs, run).catch(failed);
  let shown = "";
  const step = NARROW.matches ? PAGE / 5 : PAGE;
  let most = step;
  async function refresh() {
    const of = (run === null ? "" : `&run=${encodeURIComponent(run)}`) + (kind.value && `&kind=${kind.value}`);
    const { requests } = await get(`console/requests?limit=${most}${of}`);
    recovered();
    tick(main);
    more.hidden = requests.length < most;
    const text = JSON.stringify(requests);
    if (text === shown) return; // keeps the focus where it is
    shown = text;
    list.fill(grouped(requests, "request_id").map(([each, first]) => [
      each.kind === "sample" ? prompt(each, first) ?? h("span", { class: "quiet" }, "its prompt is no longer stored") : pass(each),
      each.readable ? h("a", { href: `#/tokens/${each.request_id}`, title: each.request_id }, shortRequest(each.request_id))
        : h("span", { class: "quiet", title: "Only the data of a run's newest passes is stored" }, shortRequest(each.request_id)),
      each.kind, origin(each), number(each.step), ago(each.created_at)]));
  }
  return poll(EVERY_MS, refresh, failed);
}

// The runs that were used last, and the one that is shown.
async function nameRuns(select, shown) {
  const [{ runs: all }, { caller }] = await Promise.all([get(`console/runs?limit=${PAGE}`), get("console/now")]);
  const runs = all.filter(({ owner }) => owner === caller.name); // an admin's list has those of all
  const known = runs.map(({ run_id, name }) => [run_id, name === null ? short(run_id) : `${name}, ${short(run_id)}`]);
  if (shown !== null && runs.every((each) => each.run_id !== shown)) known.unshift([shown, short(shown)]);
  select.replaceChildren(...[["", "all"], ...known].map(([value, name]) => h("option", { value, selected: value === (shown ?? "") }, name)));
}

// Those of one prompt beside each other, in the order of the first of each; with whether it is the first.
function grouped(rows, key) {
  const groups = new Map();
  for (const row of rows) {
    const name = row.prompt_id ?? row[key];
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(row);
  }
  return [...groups.values()].flatMap((group) => group.map((row, place) => [row, place === 0]));
}

function prompt(row, first) {
  if (row.prompt === null) return null;
  return first ? row.prompt : h("span", { class: "quiet ditto", title: row.prompt }, "″");
}

function pass({ readable, loss_fn, datums, begins }) {
  if (!readable) return h("span", { class: "quiet" }, "its data is no longer stored");
  return h("div", {}, h("b", {}, `${loss_fn}, ${plural(datums, "datum")}`), h("div", { class: "small quiet" }, begins));
}

// A run is a link, a sampler is not.
function origin({ kind, name, origin: id }) {
  const named = name ?? h("span", { class: "id" }, short(id));
  const linked = kind === "sample" ? named : h("a", { href: `#/runs/${encodeURIComponent(id)}` }, named);
  return h("span", { title: id }, linked, " ", name === null ? null : h("span", { class: "small quiet id" }, short(id)));
}

async function showOne(main, request, item) {
  main.replaceChildren(h("h1", {}, "Tokens"), h("p", { class: "row" }, h("a", { href: "#/tokens" }, "All requests"))); // also if it is refused
  const path = `console/requests/${encodeURIComponent(request)}`;
  const answer = await get(`${path}/tokens?item=${item}`);
  const { items, earlier, later, run, name, step: taken, reported } = await get(`${path}/items?limit=${PAGE}&offset=${PAGE * Math.floor(item / PAGE)}`);
  const names = Object.keys(answer.values);
  const choice = h("select", { onchange: paint }, ...names.map((name) => h("option", { value: name }, name)));
  const scale = h("span", { class: "quiet small scale" });
  const text = h("p", { class: "tokens" });
  const spans = answer.texts.map((piece, place) => h("span", { title: described(answer, place) }, piece || "·"));
  text.append(h("span", { class: "prompt" }, answer.prompt ?? ""), ...spans);
  const values = table("Values of each token", [["position", "number"], ["token", "number"], ["text", ""], ...names.map((name) => [name, "number"])], "none", { most: MOST_VALUES });
  values.node.classList.add("flat");
  values.fill(answer.tokens.slice(0, MOST_ROWS).map((token, place) => [
    String(place), String(token), JSON.stringify(answer.texts[place]), ...names.map((name) => number(answer.values[name][place]))]));
  const all = table("Items, grouped by prompt", [["item", "number"], ["prompt", "text"], ["begins", "text"], ["tokens", "number"], ["advantage", "number optional"], ["mean logprob", "number"]], "none", { most: MOST_ITEMS });
  const rows = grouped(items, "item");
  const at = rows.findIndex(([each]) => each.item === item);
  const from = at - (at % MOST_ITEMS); // so that this one is seen
  all.fill(rows.map(([each, first], place) => [
    each.item === item ? h("strong", {}, String(each.item + 1)) : h("a", { href: `#/tokens/${request}/${each.item}` }, String(each.item + 1)),
    prompt(each, first || place === from), each.text, number(each.tokens), each.advantage === null ? null : decimals(each.advantage), decimals(each.logprob)]), from);
  const words = card("Text", h("p", { class: "row" }, h("label", {}, "Coloured by", choice), scale), text);
  const told = Object.entries(reported).map(([name, value]) => [name, number(value)]);
  const other = (label, id) => (id === null ? null : h("a", { href: `#/tokens/${id}` }, label));
  const step = (label, next) => (next < 0 || next >= answer.items ? null : h("a", { href: `#/tokens/${request}/${next}` }, label));
  main.replaceChildren(
    h("h1", {}, "Tokens"),
    h("p", { class: "row" }, h("a", { href: "#/tokens" }, "All requests"), step("Previous", item - 1), step("Next", item + 1),
      h("span", { class: "quiet", title: request }, `${answer.kind} ${shortRequest(request)}, ${item + 1} of ${answer.items}`),
      run === null ? null : h("span", { class: "quiet" }, "weights of ", h("a", { href: `#/runs/${encodeURIComponent(run)}` }, name ?? short(run)), `, step ${number(taken)}`),
      other("Earlier request", earlier), other("Later request", later)),
    h("div", { class: "grid" },
      told.length > MOST_FIGURES ? wide(words) : words,
      told.length ? card(`Reported by the script for step ${taken}`, figures(told)) : null),
    h("div", { class: "grid" },
      items.length > 1 ? card("Items, grouped by prompt", all.node) : null,
      card("Values", values.node)));

  function paint() {
    const column = answer.values[choice.value] ?? [];
    const known = column.filter((value) => value !== null);
    const logprob = choice.value.endsWith("logprob");
    const most = logprob ? -LOWEST_LOGPROB : Math.max(0, ...known.map(Math.abs));
    scale.replaceChildren(...(logprob ? [number(-most), h("i", { class: "down" }), "0: certain"]
      : most ? [number(-most), h("i"), number(most)] : ["all are 0"]));
    spans.forEach((span, place) => { span.style.backgroundColor = colour(column[place], most); });
  }
  paint();
}

function colour(value, most) {
  return value ? `rgb(var(${value > 0 ? "--above" : "--below"}) / ${0.75 * Math.min(1, Math.abs(value) / most)})` : "";
}

function described(answer, place) {
  const values = Object.entries(answer.values).map(([name, column]) => `${name} ${number(column[place])}`);
  return [`token ${answer.tokens[place]}`, ...values].join("\n");
}
