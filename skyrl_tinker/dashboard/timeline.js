// Lanes of slices over one range of time, which is moved, and zoomed by dragging.

import { clock, h } from "./dom.js";

const ROW = 12;
const MOST_ROWS = 8;
const LEAST_S = 1e-3;
const TICK_PX = 110;
const STEPS_S = [1e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600];
const DARK = matchMedia("(prefers-color-scheme: dark)");
const COLOURS = { wait: "--wait", run: "--link", answer: "--answer" };

// A lane has a `name`, a `title` and `slices` of `from` and `to` in seconds, `parts` (of a kind each) and a `text`.
// `first`: what stands before its buttons.
export function timeline(first) {
  const told = h("p", { class: "small told", role: "status" });
  const axis = h("canvas", { height: 20 });
  const lanes = h("div", { class: "lanes" });
  const node = h("div", { class: "timeline" },
    h("div", { class: "row" }, first,
      h("span", { class: "joined" }, ...[["Earlier", () => move(-0.5)], ["Later", () => move(0.5)], ["Closer", () => zoom(0.5)], ["Wider", () => zoom(2)], ["All", () => look(whole)]].map(
        ([name, work]) => h("button", { type: "button", onclick: work }, name))),
      h("span", { class: "small quiet keys" }, ...Object.keys(COLOURS).map((kind) => h("span", { class: kind }, kind)))),
    lanes, told);
  const hint = "Point at a slice; drag across a part of the time to see it closer.";
  let drawn = [];
  let whole = [0, 1];
  let range = whole;

  function look([first, last]) {
    const length = Math.min(Math.max(last - first, LEAST_S), whole[1] - whole[0]);
    const begin = Math.min(Math.max(first, whole[0]), whole[1] - length);
    range = [begin, begin + length];
    paint();
  }

  function move(share) {
    look(range.map((at) => at + share * (range[1] - range[0])));
  }

  function zoom(factor) {
    const middle = (range[0] + range[1]) / 2;
    const half = (factor * (range[1] - range[0])) / 2;
    look([middle - half, middle + half]);
  }

  function paint() {
    const colours = Object.fromEntries(Object.entries({ ...COLOURS, quiet: "--quiet", line: "--line" }).map(([kind, name]) =>
      [kind, getComputedStyle(document.documentElement).getPropertyValue(name).trim()]));
    if (!drawn.length) return;
    const ticks = ticksOf(range, axis.clientWidth);
    for (const { canvas, rows } of drawn) paintLane(canvas, rows, range, ticks, colours);
    paintAxis(axis, range, ticks, colours);
  }

  function draw(found, between) {
    whole = range = between;
    drawn = found.map(({ name, title, slices }) => ({ name, title, rows: packed(slices), canvas: h("canvas", { role: "img", "aria-label": `${name}: ${slices.length} slices` }) }));
    for (const each of drawn) watched(each);
    lanes.replaceChildren(...drawn.flatMap(({ name, title, canvas }) => [h("div", { class: "small lane", title }, name), canvas]), ...(drawn.length ? [h("div", { class: "small quiet" }, `time in ${clock(whole[1], "long").split(" ").pop()}`), axis] : []));
    told.textContent = drawn.length ? hint : "";
    paint();
  }

  function watched({ canvas, rows }) {
    let begun = null;
    canvas.height = ROW * rows.length;
    canvas.addEventListener("pointerdown", (event) => { begun = event.offsetX; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", (event) => {
      const ends = [begun, event.offsetX].sort((one, other) => one - other);
      begun = null;
      if (ends[1] - ends[0] > 4) look(ends.map((x) => at(canvas, x)));
    });
    canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => {
      const slack = (2 * (range[1] - range[0])) / canvas.clientWidth;
      const time = at(canvas, offsetX);
      const row = rows[Math.floor((offsetY / canvas.clientHeight) * rows.length)] ?? [];
      told.textContent = row.findLast(({ from, to }) => from - slack <= time && time <= to + slack)?.text ?? hint;
    });
    canvas.addEventListener("dblclick", () => look(whole));
  }

  function at(canvas, x) {
    return range[0] + (x / canvas.clientWidth) * (range[1] - range[0]);
  }

  const watch = new ResizeObserver(paint);
  watch.observe(node);
  DARK.addEventListener("change", paint);
  return { node, draw, close() { watch.disconnect(); DARK.removeEventListener("change", paint); } };
}

// Rows in which slices do not overlap, as far as there are rows.
function packed(slices) {
  const rows = [];
  for (const slice of [...slices].sort((one, other) => one.from - other.from)) {
    let row = rows.find((each) => each.at(-1).to <= slice.from);
    if (!row && rows.length < MOST_ROWS) rows.push(row = []);
    row ??= rows.reduce((best, each) => (each.at(-1).to < best.at(-1).to ? each : best));
    row.push(slice);
  }
  return rows;
}

function context(canvas) {
  const ratio = devicePixelRatio;
  const height = Math.round(Number(canvas.dataset.height ??= canvas.height));
  canvas.width = Math.round(canvas.clientWidth * ratio);
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const found = canvas.getContext("2d");
  found.scale(ratio, ratio);
  return found;
}

// Moments of the axis, and decimals of a second that they need.
function ticksOf([first, last], width) {
  const step = STEPS_S.find((each) => (each * width) / (last - first) >= TICK_PX) ?? STEPS_S.at(-1);
  const at = [];
  for (let tick = Math.ceil(first / step) * step; tick <= last; tick += step) at.push(tick);
  return { at, digits: Math.max(0, Math.ceil(-Math.log10(step))) };
}

function paintLane(canvas, rows, [first, last], ticks, colours) {
  const pen = context(canvas);
  const scale = canvas.clientWidth / (last - first);
  pen.fillStyle = colours.line;
  for (const tick of ticks.at) pen.fillRect(Math.round((tick - first) * scale), 0, 1, canvas.clientHeight);
  const bar = (from, to, y, kind) => {
    if (to < first || from > last) return;
    const left = Math.max(0, (from - first) * scale);
    const width = (Math.min(to, last) - Math.max(from, first)) * scale;
    pen.fillStyle = colours[kind];
    pen.fillRect(left, y, Math.max(1, width > 4 ? width - 1 : width), ROW - 2);
  };
  rows.forEach((row, place) => row.forEach(({ from, to, parts }) => {
    bar(from, to, place * ROW + 1, "wait");
    for (const part of parts) bar(part.from, part.to, place * ROW + 1, part.kind);
  }));
}

function paintAxis(canvas, [first, last], { at, digits }, colours) {
  const pen = context(canvas);
  const scale = canvas.clientWidth / (last - first);
  pen.font = "12px Figtree, system-ui, sans-serif";
  pen.textBaseline = "bottom";
  pen.fillStyle = colours.quiet;
  for (const tick of at) {
    const x = (tick - first) * scale;
    pen.textAlign = x < 30 ? "left" : x > canvas.clientWidth - 30 ? "right" : "center";
    const fraction = digits ? (tick % 1).toFixed(digits).slice(1) : "";
    pen.fillText(clock(tick) + fraction, x, 19);
  }
}
