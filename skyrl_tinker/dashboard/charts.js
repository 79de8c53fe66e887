// Curves by uPlot, in the colours of the page, as wide as their place.

import { h, number } from "./dom.js";

const COLOURS = ["#2f6fde", "#d9730d", "#1f9d55", "#c2358c", "#7a5af5", "#0f8b8d", "#b58900", "#d0342c"];
const HEIGHT = 190;
const DARK = matchMedia("(prefers-color-scheme: dark)");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function axis(more = {}) {
  return {
    stroke: () => colour("--quiet"),
    grid: { stroke: () => colour("--line"), width: 1 },
    ticks: { stroke: () => colour("--line"), width: 1 },
    ...more,
  };
}

function chart(label, names, scales, axes, showPoints) {
  const node = h("div", { class: "chart", role: "img", "aria-label": label });
  const series = names.map((name, place) => ({
    label: name, stroke: COLOURS[place % COLOURS.length], width: 1.5,
    points: { show: showPoints }, value: (_, value) => number(value, 4),
  }));
  const x = scales.x.time ? { label: "at", value: (_, at) => at === null ? "–" : clock(_, [at])[0] } : { label: "step" };
  const hooks = { setCursor: [(plot) => { if (plot.cursor.idx === null) tellLast(plot); }] };
  const plot = new uPlot({ width: 300, height: HEIGHT, scales, axes, series: [x, ...series], cursor: { y: false }, hooks },
    [[], ...names.map(() => [])], node);
  const fit = () => { if (node.clientWidth) plot.setSize({ width: node.clientWidth, height: HEIGHT }); };
  const watch = new ResizeObserver(fit);
  watch.observe(node);
  const recolour = () => plot.redraw();
  DARK.addEventListener("change", recolour);
  return {
    node,
    draw(data) {
      plot.setData(data);
      if (plot.cursor.idx === null || plot.cursor.idx === undefined) tellLast(plot);
    },
    close() { watch.disconnect(); DARK.removeEventListener("change", recolour); plot.destroy(); },
  };
}

// The legend has the last known values while no point is looked at.
function tellLast(plot) {
  plot.setLegend({ idxs: plot.data.map((column) => column.findLastIndex((value) => value !== null && value !== undefined)) }, false);
}

const values = (_, splits) => splits.map((value) => number(value));

const clock = (_, splits) => splits.map((at) => new Date(1000 * at).toLocaleTimeString("en-GB"));
const aMinuteOrMore = (_, first, last) => [Math.min(first, last - 60), last];

export function timeChart(label, names) {
  return chart(label, names, { x: { time: true, range: aMinuteOrMore } }, [axis({ values: clock, space: 90 }), axis({ size: 60, values })], false);
}

const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

// `least`: the range that the values' axis shows at least.
export function stepChart(label, names, least = null) {
  const y = least && { range: (_, low, high) => [Math.min(low ?? 0, least[0]), Math.max(high ?? 0, least[1])] };
  return chart(label, names, { x: { time: false }, ...(y && { y }) }, [axis({ incrs: WHOLE }), axis({ size: 75, values })], undefined);
}
