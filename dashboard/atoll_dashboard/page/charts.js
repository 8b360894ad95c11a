// Line charts over time, with a text alternative. Periods without data are gaps in the lines.

import { h, keyed, s, set, show as reveal, text } from "./dom.js";
import { about, moment, span } from "./format.js";

const HEIGHT = 170;
const EDGE = { left: 62, right: 12, top: 10, bottom: 24 };

/** series: [{name, kind}]; show(value) -> words. update(axis, columns): a TimeAxis, and one column for each series. */
export function lineChart({ title, series, show, zero = false }) {
  const grid = s("g", { class: "grid" });
  const lines = series.map((each) => s("path", { class: `line line-${each.kind}` }));
  const cursor = s("line", { class: "cursor", y1: EDGE.top, y2: HEIGHT - EDGE.bottom, visibility: "hidden" });
  const voids = s("g");
  const drawing = s("svg", { height: HEIGHT, "aria-hidden": "true" }, voids, grid, ...lines, cursor);
  const frame = h("div", { class: "plot", role: "img", tabindex: 0, "aria-label": title }, drawing);
  const readout = h("p", { class: "readout" });
  const keys = series.length > 1 ? series.map((each) => h("span", { class: `key key-${each.kind}` }, each.name)) : [];
  const voidKey = h("span", { class: "key key-void", hidden: true }, "no data");
  const node = h(
    "figure", { class: "chart" },
    h("figcaption", null, h("h3", null, title), h("p", { class: "keys" }, ...keys, voidKey)),
    frame, readout,
  );
  let data = { at: [], gaps: [], now: 0, columns: series.map(() => []) };
  let chosen = null;
  let width = 0;
  let scale = null;

  new ResizeObserver((entries) => {
    const wide = Math.round(entries[0].contentRect.width);
    if (wide > 0 && wide !== width) {
      width = wide;
      draw();
    }
  }).observe(frame);

  function draw() {
    if (width === 0) return;
    set(drawing, "width", width);
    set(drawing, "viewBox", `0 0 ${width} ${HEIGHT}`);
    const seen = data.columns.flat().filter((value) => value !== null && Number.isFinite(value));
    const { at, gaps, now } = data;
    reveal(voidKey, gaps.length > 0);
    if (at.length < 2 || seen.length === 0) {
      scale = null;
      lines.forEach((line) => set(line, "d", ""));
      for (const group of [grid, voids]) keyed(group, [], String, null, null);
      point(null);
      return;
    }
    scale = makeScale(at[0], Math.max(now, at.at(-1)), seen, zero, width);
    drawGrid(grid, scale, show, width);
    const seenGaps = gaps.filter(([, to]) => to > at[0]);
    keyed(voids, seenGaps, ([from]) => from, () => s("rect", { class: "void" }), (node, [from, to]) => {
      const [left, right] = [scale.x(Math.max(from, at[0])), scale.x(to)];
      const sizes = { x: left, width: Math.max(1, right - left), y: EDGE.top, height: HEIGHT - EDGE.top - EDGE.bottom };
      for (const [name, value] of Object.entries(sizes)) set(node, name, value);
    });
    lines.forEach((line, index) => set(line, "d", pathOf(data, data.columns[index], scale)));
    set(frame, "aria-label", `${title}. ${summary()}`);
    point(chosen);
  }

  function summary() {
    const parts = series.map((each, index) => {
      const values = data.columns[index].filter((value) => value !== null);
      if (values.length === 0) return `${each.name}: not known`;
      const [low, high] = extent(values);
      return `${each.name}: ${newest(data)} ${show(values.at(-1))}, lowest ${show(low)}, highest ${show(high)}`;
    });
    return [...parts, `over ${span(scale.last - scale.first)}`, ...data.gaps.slice(-3).map(voidWords)].join("; ");
  }

  /** Shows the values at a point, or a gap at a time. index: null for the newest values. */
  function point(index, gap = null, time = 0) {
    chosen = index === null || scale === null ? null : Math.max(0, Math.min(data.at.length - 1, index));
    set(cursor, "visibility", chosen === null ? "hidden" : "visible");
    const shownAt = chosen ?? data.at.length - 1;
    if (scale === null) return text(readout, "No data yet.");
    const x = scale.x(gap === null ? data.at[shownAt] : time);
    set(cursor, "x1", x);
    set(cursor, "x2", x);
    if (gap !== null) return text(readout, voidWords(gap));
    const values = series.map((each, place) => {
      const name = series.length > 1 ? `${each.name} ` : "";
      return name + show(data.columns[place][shownAt]);
    });
    return text(readout, `${chosen === null ? newest(data) : moment(data.at[chosen])}: ${values.join(", ")}`);
  }

  frame.addEventListener("pointermove", (event) => {
    if (scale === null) return;
    const wanted = scale.back(event.clientX - frame.getBoundingClientRect().left);
    point(nearest(data.at, wanted), data.gaps.find(([from, to]) => from < wanted && wanted < to) ?? null, wanted);
  });
  frame.addEventListener("pointerleave", () => point(null));
  frame.addEventListener("blur", () => point(null));
  frame.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    point((chosen ?? data.at.length - 1) + step);
  });
  return {
    node,
    update({ at, gaps, now }, columns) {
      data = { at, gaps, now, columns };
      draw();
    },
  };
}

/** The time of the newest values: "now", unless data has been missing since then. */
function newest({ at, gaps, now }) {
  return gaps.length > 0 && gaps.at(-1)[1] >= now ? moment(at.at(-1)) : "now";
}

function voidWords([from, to]) {
  return `no data from ${moment(from)} for ${span(to - from)}`;
}

function extent(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

function nearest(sorted, wanted) {
  let low = 0;
  let high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle;
    else high = middle;
  }
  return wanted - sorted[low] < sorted[high] - wanted ? low : high;
}

/** A round step: 1, 2 or 5 times a power of ten. */
export function niceStep(range, most) {
  const rough = range / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5].find((step) => step * power >= rough * 0.999) ?? 10);
}

function makeScale(first, last, values, zero, width) {
  let [low, high] = extent(values);
  if (zero) low = Math.min(0, low);
  if (high - low < 1e-9 * Math.max(1, Math.abs(high))) high = low + Math.max(1e-3, Math.abs(low) * 0.1);
  const step = niceStep(high - low, 4);
  low = Math.floor(low / step + 1e-9) * step;
  high = Math.ceil(high / step - 1e-9) * step;
  const wide = width - EDGE.left - EDGE.right;
  const tall = HEIGHT - EDGE.top - EDGE.bottom;
  const length = Math.max(1e-6, last - first);
  return {
    low, high, step, first, last,
    x: (time) => +(EDGE.left + ((time - first) / length) * wide).toFixed(1),
    y: (value) => +(EDGE.top + (1 - (value - low) / (high - low)) * tall).toFixed(1),
    back: (x) => first + ((x - EDGE.left) / wide) * length,
  };
}

function drawGrid(grid, scale, show, width) {
  const rows = [];
  for (let n = 0; n <= Math.round((scale.high - scale.low) / scale.step); n += 1) {
    const value = scale.low + n * scale.step;
    rows.push({ key: `y${n}`, y: scale.y(value), words: show(value) });
  }
  const times = width > 420 ? [0, 0.5, 1] : [0, 1];
  const marks = times.map((part) => {
    const time = scale.first + part * (scale.last - scale.first);
    return { key: `x${part}`, x: scale.x(time), words: part === 1 ? "now" : `${about(scale.last - time)} ago`, part };
  });
  const make = (item) => s("g", null, item.y === undefined ? null : s("line"), s("text"));
  keyed(grid, [...rows, ...marks], (item) => item.key, make, (node, item) => {
    const label = node.lastChild;
    text(label, item.words);
    if (item.y === undefined) {
      set(label, "x", item.x);
      set(label, "y", HEIGHT - 6);
      set(label, "text-anchor", item.part === 0 ? "start" : item.part === 1 ? "end" : "middle");
      return;
    }
    for (const [name, value] of Object.entries({ x1: EDGE.left, x2: width - EDGE.right, y1: item.y, y2: item.y })) {
      set(node.firstChild, name, value);
    }
    set(label, "x", EDGE.left - 8);
    set(label, "y", item.y + 4);
    set(label, "text-anchor", "end");
  });
}

/** A line with gaps where values are unknown. A value without neighbors is a dot. */
function pathOf({ at, gaps }, column, scale) {
  let broken = true;
  let path = "";
  let next = 0; // the first gap that ends after the previous point
  column.forEach((value, index) => {
    while (next < gaps.length && gaps[next][1] <= at[index]) {
      broken = true;
      next += 1;
    }
    if (value === null || !Number.isFinite(value)) {
      broken = true;
      return;
    }
    const place = `${scale.x(at[index])} ${scale.y(value)}`;
    path += broken ? `M${place}h0` : `L${place}`;
    broken = false;
  });
  return path;
}
