// Line charts over time, with a text alternative.

import { h, keyed, s, set, text } from "./dom.js";
import { about, clock, span } from "./format.js";

const HEIGHT = 170;
const EDGE = { left: 62, right: 12, top: 10, bottom: 24 };

/** series: [{name, kind}]; show(value) -> words. update(at, columns) with one column for each series. */
export function lineChart({ title, series, show, zero = false }) {
  const grid = s("g", { class: "grid" });
  const lines = series.map((each) => s("path", { class: `line line-${each.kind}` }));
  const cursor = s("line", { class: "cursor", y1: EDGE.top, y2: HEIGHT - EDGE.bottom, visibility: "hidden" });
  const drawing = s("svg", { height: HEIGHT, "aria-hidden": "true" }, grid, ...lines, cursor);
  const frame = h("div", { class: "plot", role: "img", tabindex: 0, "aria-label": title }, drawing);
  const readout = h("p", { class: "readout" });
  const keys = series.map((each) => h("span", { class: `key key-${each.kind}` }, each.name));
  const node = h(
    "figure", { class: "chart" },
    h("figcaption", null, h("h3", null, title), series.length > 1 ? h("p", { class: "keys" }, ...keys) : null),
    frame, readout,
  );
  let data = { at: [], columns: series.map(() => []) };
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
    const { at } = data;
    if (at.length < 2 || seen.length === 0) {
      scale = null;
      lines.forEach((line) => set(line, "d", ""));
      keyed(grid, [], String, null, null);
      point(null);
      return;
    }
    scale = makeScale(at, seen, zero, width);
    drawGrid(grid, scale, show, width);
    lines.forEach((line, index) => set(line, "d", pathOf(at, data.columns[index], scale)));
    set(frame, "aria-label", `${title}. ${summary()}`);
    point(chosen);
  }

  function summary() {
    const parts = series.map((each, index) => {
      const values = data.columns[index].filter((value) => value !== null);
      if (values.length === 0) return `${each.name}: not known`;
      const [low, high] = extent(values);
      return `${each.name}: now ${show(values.at(-1))}, lowest ${show(low)}, highest ${show(high)}`;
    });
    return `${parts.join("; ")}; over ${span(data.at.at(-1) - data.at[0])}`;
  }

  function point(index) {
    chosen = index === null || scale === null ? null : Math.max(0, Math.min(data.at.length - 1, index));
    set(cursor, "visibility", chosen === null ? "hidden" : "visible");
    const shownAt = chosen ?? data.at.length - 1;
    if (scale === null) return text(readout, "No data yet.");
    set(cursor, "x1", scale.x(data.at[shownAt]));
    set(cursor, "x2", scale.x(data.at[shownAt]));
    const values = series.map((each, place) => {
      const name = series.length > 1 ? `${each.name} ` : "";
      return name + show(data.columns[place][shownAt]);
    });
    return text(readout, `${chosen === null ? "now" : clock(data.at[chosen])}: ${values.join(", ")}`);
  }

  frame.addEventListener("pointermove", (event) => {
    if (scale === null) return;
    const wanted = scale.back(event.clientX - frame.getBoundingClientRect().left);
    point(nearest(data.at, wanted));
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
    update(at, columns) {
      data = { at, columns };
      draw();
    },
  };
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

function makeScale(at, values, zero, width) {
  let [low, high] = extent(values);
  if (zero) low = Math.min(0, low);
  if (high - low < 1e-9 * Math.max(1, Math.abs(high))) high = low + Math.max(1e-3, Math.abs(low) * 0.1);
  const step = niceStep(high - low, 4);
  low = Math.floor(low / step + 1e-9) * step;
  high = Math.ceil(high / step - 1e-9) * step;
  const [first, last] = [at[0], at.at(-1)];
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

/** A line with gaps where values are unknown. */
function pathOf(at, column, scale) {
  let pen = "M";
  let path = "";
  column.forEach((value, index) => {
    if (value === null || !Number.isFinite(value)) {
      pen = "M";
      return;
    }
    path += `${pen}${scale.x(at[index])} ${scale.y(value)}`;
    pen = "L";
  });
  return path;
}
