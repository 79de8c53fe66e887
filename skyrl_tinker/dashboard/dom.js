// Elements and the text of numbers. Text is only ever set as text: nothing here parses HTML.

export const NARROW = matchMedia("(max-width: 640px)"); // as in style.css

export function h(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export function card(title, ...children) {
  return h("section", { class: "card", "aria-label": title }, h("h2", {}, title), ...children);
}

export function wide(section) {
  section.classList.add("wide");
  return section;
}

// The only card of a view, whose heading says the same.
export function only(section) {
  section.classList.add("only");
  return section;
}

// A table whose rows can be replaced while it stays where it was scrolled to. `none`: its text without rows.
// `sort(place)`: the head of a column with a third part was clicked. A column that is `optional` is not there while none of
// its cells has a value. `most`: rows that are shown, from one on, until all are asked for.
export function table(label, columns, none, { sort = null, most = Infinity } = {}) {
  const head = columns.map(([name, kind, sorted], place) => h("th", { scope: "col", class: kind },
    sort && sorted ? h("button", { type: "button", class: "plain", onclick: () => sort(place) }, name) : name));
  const body = h("tbody");
  const empty = h("p", { class: "quiet" }, none);
  const scroll = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    h("table", {}, h("thead", {}, h("tr", {}, ...head)), body));
  const more = h("button", { type: "button", onclick: () => { most = Infinity; fill(all); scroll.focus({ preventScroll: true }); } }, "Show more");
  const node = h("div", {}, scroll, more, empty);
  let all = [];
  function fill(rows, from = 0) {
    all = rows;
    more.hidden = rows.length <= most;
    const absent = columns.map(([, kind], place) => kind.includes("optional") && rows.every((cells) => cells[place] === null));
    head.forEach((cell, place) => { cell.hidden = absent[place]; });
    scroll.hidden = rows.length === 0;
    empty.hidden = rows.length > 0;
    body.replaceChildren(...(more.hidden ? rows : rows.slice(from, from + most)).map((cells) =>
      h("tr", {}, ...cells.map((cell, place) => h("td", { class: columns[place][1], "data-label": columns[place][0], hidden: absent[place] }, cell ?? "–")))));
  }
  function mark(place, down) {
    head.forEach((cell, each) => cell.setAttribute("aria-sort", each !== place ? "none" : down ? "descending" : "ascending"));
  }
  fill([]);
  return { node, fill, mark };
}

export function facts(pairs) {
  return h("dl", {}, ...pairs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value ?? "–")]));
}

// Numbers to be read first, each below its name.
export function figures(pairs) {
  return h("dl", { class: "figures" }, ...pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e7)) return signed(value.toExponential(digits - 1).replace(/\.?0+e/, "e"));
  return signed(value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, String(Math.trunc(Math.abs(value))).length) }));
}

// A number of a column, with the same decimals as those above and below it; very large ones have none.
export function decimals(value) {
  if (value === null || value === undefined || Number.isNaN(value) || Math.abs(value) >= 1e4) return number(value);
  return signed(value.toLocaleString("en", { minimumFractionDigits: 4, maximumFractionDigits: 4, signDisplay: "negative" }));
}

// With a minus as wide as a digit, not a hyphen.
function signed(text) {
  return text.replaceAll("-", "−");
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (value >= 1000 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${number(value)} ${units[place]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${number(seconds, 2)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

export function moment(text) {
  return text ? new Date(text).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "long" }) : "–";
}

// A moment in seconds, on the reader's clock, whose zone a `long` one names.
export function clock(at, timeStyle = "medium") {
  return new Date(1000 * at).toLocaleTimeString("en-GB", { timeStyle });
}

// How long ago, with the moment as its title. `tick` tells the time of all below a node again.
export function ago(text) {
  return text ? h("time", { datetime: text, title: moment(text) }, since(text)) : "–";
}

export function tick(node) {
  for (const each of node.querySelectorAll("time")) each.textContent = since(each.dateTime);
}

function since(text) {
  return `${duration(Math.max(1, Math.round((Date.now() - Date.parse(text)) / 1000)))} ago`;
}

// An id whose first part is a UUID.
export function short(id) {
  const end = id.indexOf(":");
  return end < 0 ? id.slice(0, 8) : `${id.slice(0, 8)}…${id.slice(end)}`;
}

// A request's id, which begins with its time.
export function shortRequest(id) {
  return `…${id.slice(-8)}`;
}

export function plural(amount, noun) {
  return `${number(amount)} ${noun}${amount === 1 ? "" : "s"}`;
}
