// Curves by uPlot, in the colours of the page, as wide as their place.

import { clock, h, number } from "./dom.js";

export const COLOURS = ["#149a8c", "#d9730d", "#3f6fd8", "#c2358c", "#7a5af5", "#5d8a1c", "#b58900", "#d0342c"];
const HEIGHT = 160;
const LETTERS = "Figtree, system-ui, sans-serif";
const FADED = "1f"; // alpha of the area below a curve
const DARK = matchMedia("(prefers-color-scheme: dark)");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function axis(more = {}) {
  return {
    stroke: () => colour("--quiet"),
    font: `12px ${LETTERS}`,
    grid: { stroke: () => colour("--line"), width: 1 },
    ticks: { stroke: () => colour("--line"), width: 1 },
    ...more,
  };
}

// `layout`: of a style the scales, the axes, the series of the x axis, the name under which charts share a cursor,
// and whether the areas below the curves are filled.
function chart(label, names, layout, height) {
  const node = h("div", { class: "chart", role: "img", "aria-label": label });
  let marks = [];
  const hooks = {
    setCursor: [(each) => { if (each.cursor.idx === null) tellLast(each); }],
    drawAxes: [(each) => { for (const at of marks) paintMark(each, at, height > HEIGHT); }],
  };
  let data = [[], ...names.map(() => [])];
  let plot = null;
  function restyle(style) {
    const { scales, axes, x, shared, filled } = layout(style);
    const series = names.map((name, place) => ({
      label: name, stroke: COLOURS[place % COLOURS.length], width: 2, fill: filled ? COLOURS[place % COLOURS.length] + FADED : null,
      points: { fill: () => colour("--card"), filter: lone }, value: (_, value) => number(value, 4),
    }));
    const cursor = { y: false, ...(shared && { sync: { key: shared, scales: ["x", null] } }) };
    plot?.destroy();
    plot = new uPlot({ width: node.clientWidth || 300, height, scales, axes, series: [x, ...series], cursor, hooks, legend: LEGEND }, data, node);
    tellLast(plot);
  }
  restyle({ axis: "step", log: false });
  const fit = () => { if (node.clientWidth) plot.setSize({ width: node.clientWidth, height }); };
  const watch = new ResizeObserver(fit);
  watch.observe(node);
  const recolour = () => plot.redraw();
  DARK.addEventListener("change", recolour);
  return {
    node,
    restyle,
    draw(next, marked = []) {
      marks = marked;
      const { min, max } = plot.scales.x;
      const zoomed = min !== null && (min > data[0][0] || max < data[0].at(-1));
      data = next;
      plot.setData(data, !zoomed);
      if (zoomed) plot.redraw();
      if (plot.cursor.idx === null || plot.cursor.idx === undefined) tellLast(plot);
    },
    close() { watch.disconnect(); DARK.removeEventListener("change", recolour); plot.destroy(); },
  };
}

const LEGEND = { markers: { width: 0, fill: (_, place) => COLOURS[(place - 1) % COLOURS.length] } };

// Where a run goes on from another; with the word where there is room.
function paintMark({ ctx, bbox, valToPos }, at, told) {
  const x = Math.round(valToPos(at, "x", true));
  if (!(bbox.left <= x && x <= bbox.left + bbox.width)) return;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colour("--quiet");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.font = `${12 * devicePixelRatio}px ${LETTERS}`;
  ctx.textBaseline = "top";
  const room = x - bbox.left > 64 * devicePixelRatio; // rising and falling curves leave the left of it free
  ctx.textAlign = room ? "right" : "left";
  if (told) ctx.fillText("resumed", x + (room ? -6 : 6) * devicePixelRatio, bbox.top + 4 * devicePixelRatio);
  ctx.restore();
}

function known(value) {
  return value !== null && value !== undefined;
}

// Where there are too many points for dots: those between two gaps, of which no line would tell.
function lone(plot, place, all) {
  if (all) return null;
  const own = [...plot.data[place].entries()].filter(([, value]) => value !== undefined);
  return own.filter(([, value], each) => value !== null && !known(own[each - 1]?.[1]) && !known(own[each + 1]?.[1])).map(([at]) => at);
}

// The legend has the last known values while no point is looked at.
function tellLast(plot) {
  plot.setLegend({ idxs: plot.data.map((column) => column.findLastIndex(known)) }, false);
}

const values = (_, splits) => splits.map((value) => value === null ? "" : number(value));

const clocks = (_, splits) => splits.map((at) => clock(at));
const aMinuteOrMore = (_, first, last) => [Math.min(first, last - 60), last];
const fromZero = (_, low, high) => [0, Math.max(1, 1.1 * (high ?? 0))];

// Of rates: none is below 0. The legend names the zone of the axis.
export function timeChart(label, names) {
  const x = { label: "at", value: (_, at) => at === null ? "–" : clock(at, "long") };
  return chart(label, names, () => ({
    scales: { x: { time: true, range: aMinuteOrMore }, y: { range: fromZero } }, axes: [axis({ values: clocks, space: 90, size: 34 }), axis({ size: 66, values })], x, filled: true }), HEIGHT);
}

const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

// At least a factor of four.
const decades = (_, low, high) => (low === null ? [0.1, 1] : high < 2 * low ? [low / 2, 2 * high] : uPlot.rangeLog(low, high, 10, false));

const TO_ZERO = { range: { min: { pad: 0.1, soft: 0, mode: 1 }, max: { pad: 0.1, mode: 0 } } };

// As uPlot does it, but values near 0 at least so high.
function spanned(low, high, span) {
  if (low === null) return [low, high];
  const near = low < high && Math.max(-low, high) < 100 * span;
  const more = near ? Math.max(0, span - (high - low)) / 2 : 0;
  return uPlot.rangeNum(low - more, high + more, 0.1, true);
}

// Of the values' axis, unless it is logarithmic: `least`, the range that it shows at least; `span`, its least height near 0; `zero`: values above 0
// are seen from 0 on. All of a page share a cursor.
export function stepChart(label, names, { least = null, span = 0, zero = false, height = HEIGHT } = {}) {
  const range = least ? { range: (_, low, high) => [Math.min(low ?? 0, least[0]), Math.max(high ?? 0, least[1])] }
    : zero ? TO_ZERO : span ? { range: (_, low, high) => spanned(low, high, span) } : null;
  return chart(label, names, ({ axis: name, log }) => {
    const y = log ? { distr: 3, range: decades } : range;
    return {
      scales: { x: { time: false }, ...(y && { y }) },
      axes: [axis({ size: 34, ...(name === "step" ? { incrs: WHOLE } : { values }) }), axis({ size: 66, values })],
      x: { label: name },
      shared: "steps",
      filled: names.length === 1,
    };
  }, height);
}
