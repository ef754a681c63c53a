// The last hour, in four charts that share their time and their cursor.

import uPlot from "./vendor/uplot/uPlot.esm.js";

import { get } from "./api.js";
import { attr, byId, el, name, text, visible } from "./dom.js";
import { big, clock, rate, span } from "./format.js";

const EVERY_MS = 10_000, HEIGHT = 168, MOST = 8;
// Series differ by dash as well as by colour, for who sees colours differently.
const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [14, 4], [4, 4], [1, 4], [12, 3, 2, 3, 2, 3]];

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6];
// Steps that a tenth can tell: half of a half would be rounded.
const RATES = [0.1, 0.2, 0.5, ...WHOLE];
const SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600];

const CHARTS = [
  { id: "waiting", head: "Waiting, by lane", value: big, incrs: WHOLE, series: (h) => named(h.lanes, "waiting") },
  { id: "decided", head: "Let go and refused, by second", value: (v) => rate(v), incrs: RATES, series: decided },
  { id: "tokens", head: "Tokens a second, by upstream", value: (v) => rate(v), incrs: RATES, series: (h) => named(h.upstreams, "tokens_per_s"), shade: rested },
  { id: "p95", head: "Wait p95, by lane", value: span, incrs: SECONDS, series: (h) => named(h.lanes, "wait_p95_s") },
];

const drawn = new Map();

/** Ask for the history every ten seconds while somebody looks. */
export async function start() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  addEventListener("tidegate:theme", recolour);
  addEventListener("tidegate:proof", refresh);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
  setInterval(() => { if (!document.hidden) refresh(); }, EVERY_MS);
  await refresh();
}

async function refresh() {
  try {
    show(await get("history"));
  } catch {
    // The banner tells that the connection is lost; the old curves stay.
  }
}

export function show(history) {
  const none = !history?.at?.length;
  byId("no-history").hidden = !none;
  byId("charts").hidden = none;
  if (none) return;
  for (const chart of CHARTS) draw(chart, history);
}

function draw(chart, history) {
  const all = chart.series(history);
  const series = all.map((one, i) => ({ slot: i, ...one })).sort((a, b) => total(b) - total(a)).slice(0, MOST).sort((a, b) => a.slot - b.slot);
  const shape = JSON.stringify(series.map((one) => one.label));
  let made = drawn.get(chart.id);
  if (made?.shape !== shape) {
    made?.stop();
    made = build(chart, series, shape, made?.figure);
    drawn.set(chart.id, made);
  }
  made.shade(chart.shade?.(history) ?? []);
  made.plot.setData([history.at, ...series.map((one) => one.data)]);
  made.describe(all.length - series.length);
}

function build(chart, series, shape, old) {
  const place = el("div", { className: "plot", role: "img", tabIndex: 0 });
  const legend = el("ul", { className: "legend" });
  const figure = el("figure", { className: "card" }, el("figcaption", {}, el("h3", {}, chart.head), el("span", { className: "soft when" })), place,
    legend, el("p", { className: "shaded", hidden: true }, "Shaded: the breaker of an upstream was open."), el("span", { className: "shade" }));
  if (old) old.replaceWith(figure);
  else byId("charts").append(figure);
  const items = series.map((one) => {
    const value = el("span", { className: "n" }), words = el("span", { className: "cut" });
    name(words, one.label);
    const swatch = el("span", { className: `swatch s${one.slot % MOST}`, "data-dash": String(one.dash ?? one.slot % MOST) });
    const item = el("button", { type: "button", "aria-pressed": "true" }, swatch, words, value);
    legend.append(el("li", {}, item));
    return { item, value, swatch };
  });
  const shades = { spans: [] };
  const plot = new uPlot(options(chart, series, items, place, figure, shades), [[], ...series.map(() => [])], place);
  items.forEach(({ item }, i) => item.addEventListener("click", () => {
    plot.setSeries(i + 1, { show: !plot.series[i + 1].show });
    attr(item, "aria-pressed", String(plot.series[i + 1].show));
  }));
  place.addEventListener("keydown", (event) => step(plot, event));
  const watch = new ResizeObserver(() => plot.setSize({ width: place.clientWidth, height: HEIGHT }));
  watch.observe(place);
  const stop = () => { watch.disconnect(); plot.destroy(); };
  const shade = (spans) => {
    shades.spans = spans;
    figure.querySelector(".shaded").hidden = spans.length === 0;
  };
  return { plot, figure, shape, stop, shade, describe: (left) => describe(chart, series, plot, place, left) };
}

function options(chart, series, items, place, figure, shades) {
  const ink = (swatch) => getComputedStyle(swatch).color;
  const axis = { stroke: () => ink(figure.querySelector(".when")), grid: { stroke: () => getComputedStyle(figure).borderTopColor, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return {
    width: place.clientWidth || 400, height: HEIGHT, pxAlign: 0, legend: { show: false }, padding: [8, 26, 0, 0],
    cursor: { sync: { key: "hour", setSeries: false }, drag: { x: false, y: false }, y: false, points: { size: 6 } },
    scales: { x: { time: true }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.08 : 1] } },
    axes: [
      { ...axis, size: 24, space: 64, values: (_, splits, axis, space, step) => splits.map((at) => clock(at, step < 60)) },
      { ...axis, size: 58, space: 30, ...(chart.incrs ? { incrs: chart.incrs } : {}), values: (_, splits) => splits.map((value) => chart.value(value)) },
    ],
    series: [{}, ...series.map((one, i) => ({
      label: one.label, stroke: () => ink(items[i].swatch), width: 1.75, dash: DASHES[one.dash ?? one.slot % MOST], spanGaps: false,
      points: { show: false, filter: alone, size: 5, fill: () => ink(items[i].swatch) },
    }))],
    hooks: {
      drawClear: [(plot) => paint(plot, shades.spans, ink(figure.querySelector(".shade")))],
      setCursor: [(plot) => values(chart, plot, items, figure)], setData: [(plot) => values(chart, plot, items, figure)],
    },
  };
}

/** Where a value stands between gaps: a line has no length there, so that a dot is drawn. */
function alone({ data }, i) {
  const known = (at) => typeof data[i][at] === "number";
  const found = data[i].map((_, at) => at).filter((at) => known(at) && !known(at - 1) && !known(at + 1));
  return found.length ? found : null;
}

function paint({ ctx, bbox, valToPos }, spans, colour) {
  ctx.save();
  ctx.fillStyle = colour;
  for (const [from, to] of spans) {
    const left = Math.max(bbox.left, valToPos(from, "x", true));
    ctx.fillRect(left, bbox.top, Math.max(1, valToPos(to, "x", true) - left), bbox.height);
  }
  ctx.restore();
}

/** [from, to] of each time in which a breaker was open, epoch seconds. */
function rested(history) {
  const states = Object.values(history.upstreams ?? {}).map((upstream) => upstream.state ?? []);
  const spans = [];
  history.at.forEach((at, i) => {
    if (!states.some((state) => state[i] === "open")) return;
    const last = spans.at(-1);
    if (last?.[1] === at) last[1] = history.at[i + 1] ?? at;
    else spans.push([at, history.at[i + 1] ?? at]);
  });
  return spans;
}

/** Beside each name: what it was under the cursor, else what it is now. */
function values(chart, plot, items, figure) {
  const times = plot.data[0];
  const i = plot.cursor.idx ?? times.length - 1;
  text(figure.querySelector(".when"), plot.cursor.idx === null || plot.cursor.idx === undefined ? "now" : clock(times[i]));
  items.forEach(({ value }, k) => text(value, chart.value(plot.data[k + 1]?.[i])));
}

function step(plot, event) {
  const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30 }[event.key];
  if (!by) return;
  event.preventDefault();
  const most = plot.data[0].length - 1;
  const idx = Math.min(most, Math.max(0, (plot.cursor.idx ?? most) + by));
  plot.setCursor({ left: plot.valToPos(plot.data[0][idx], "x"), top: 20 }, true, true);
}

/** In words, for who does not see it: what each is now, and when it was most. */
function describe(chart, series, plot, place, left) {
  const told = series.map((one, k) => {
    const data = plot.data[k + 1];
    const top = data.reduce((best, value, i) => (value > (data[best] ?? -1) ? i : best), 0);
    return `${visible(one.label)} now ${chart.value(data.at(-1))}, most ${chart.value(data[top])} at ${clock(plot.data[0][top], false)}`;
  });
  attr(place, "aria-label", `${chart.head}: ${told.join("; ") || "nothing"}${left > 0 ? `; ${left} more are not drawn` : ""}. Arrow keys move the cursor.`);
}

function recolour() {
  for (const { plot } of drawn.values()) plot.redraw(false, true);
}

function named(groups, key) {
  return Object.entries(groups ?? {}).map(([label, kinds]) => ({ label, data: kinds[key] ?? [] }));
}

function decided(history) {
  const step_s = history.step_s || 10;
  const whole = (columns) => history.at.map((_, i) => columns.reduce((sum, column) => sum + (column[i] ?? 0), 0) / step_s);
  const admitted = Object.values(history.lanes ?? {}).map((lane) => lane.admitted ?? []);
  // By reason, not by lane: some are refused before their lane is known.
  return [{ label: "let go", slot: 0, data: whole(admitted) }, { label: "refused", slot: 1, dash: 1, data: whole(Object.values(history.refused ?? {})) }];
}

const total = (one) => one.data.reduce((sum, value) => sum + (value ?? 0), 0);
