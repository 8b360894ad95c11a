// The map, with the core in the middle, regions as islands around it, and learners as dots on the islands.

import { h, keyed, roving, s, set, setSign, show, sign, text } from "./dom.js";
import { about, count, rate, sum } from "./format.js";
import { captionLines, crowded, dotPlaces, heightOf, layout, links, MOST_ISLANDS, shore } from "./map_layout.js";
import { learnerLink, regionLink, regionName, STATES, stateWord, stateWords, total, unheard } from "./labels.js";

const OTHERS = "others";
const byName = new Intl.Collator("en", { numeric: true }).compare;

// At most 16 regions, sorted by name. Regions with silent learners are chosen first, then the largest. One more island
// shows the others.
function islandsOf(regions) {
  if (regions.length <= MOST_ISLANDS) return regions;
  const silent = (region) => Math.sign(unheard(region.learners));
  const ranked = [...regions].sort((one, other) => {
    return silent(other) - silent(one) || total(other.learners) - total(one.learners);
  });
  const chosen = ranked.slice(0, MOST_ISLANDS).sort((one, other) => byName(one.region, other.region));
  const rest = ranked.slice(MOST_ISLANDS);
  const whole = (name) => sum(...rest.map((region) => region[name]));
  const learners = {};
  for (const state of STATES) learners[state] = sum(...rest.map((each) => each.learners[state] ?? 0));
  return [...chosen, {
    region: `${rest.length} ${OTHERS}`, others: true, learners, dots: [], links: [],
    up_bytes_per_s: whole("up_bytes_per_s"), down_bytes_per_s: whole("down_bytes_per_s"),
  }];
}

export function makePicture() {
  const seas = ["shelf", "ring", "inside"].map((name) => s("rect", { class: name }));
  const ways = s("g", { class: "ways", "aria-hidden": "true" });
  const lagoon = makeCore();
  const islands = s("g");
  const drawing = s(
    "svg", { class: "picture", role: "group", "aria-label": "The core, the regions and their learners" },
    ...seas, ways, lagoon.node, islands,
  );
  const legend = h("ul", { class: "legend", "aria-label": "Learners by state" });
  const empty = h("p", { class: "empty", hidden: true }, "No learner has joined yet.");
  const hint = h("p", { class: "hint" }, "Press Tab to move between regions, and the arrow keys to move between learners.");
  const frame = h("div", { class: "sea" }, drawing, empty, hint);
  const node = h("div", { class: "atoll" }, frame, legend);
  let width = 0;
  let last = null;

  new ResizeObserver((entries) => {
    const wide = Math.round(entries[0].contentRect.width);
    if (wide > 0 && wide !== width) {
      width = wide;
      if (last !== null) draw(last);
    }
  }).observe(frame);

  function draw(feed) {
    last = feed;
    if (width === 0) return;
    const { run, regions } = feed.now;
    const shown = islandsOf(regions);
    const height = heightOf(width, shown.length);
    set(drawing, "viewBox", `0 0 ${width} ${height}`);
    set(drawing, "height", height);
    show(empty, shown.length === 0);
    const places = layout(width, height, shown.map((region) => Math.min(48, region.dots.length)));
    const { core } = places;
    drawRing(seas, places);
    lagoon.update(core, run);
    const many = crowded(width, shown.length);
    const items = shown.map((region, n) => ({
      region, place: places.islands[n], core, many, now: feed.coreNow(), stopped: !run.reachable, width,
      lines: captionLines(width, shown.length),
    }));
    keyed(ways, items, (item) => item.region.region, makeWay, updateWay);
    keyed(islands, items, (item) => item.region.region, makeIsland, updateIsland);
    keyed(legend, [...STATES, "uploading"], String, makeKey, (key, state) => {
      if (state !== "uploading") text(key.querySelector("b"), count(run.learners[state] ?? 0));
    });
  }

  return { node, update: draw };
}

/** The ring on which the islands lie. */
function drawRing(seas, { core, ring }) {
  [46, 15, -15].forEach((more, n) => {
    const [rx, ry] = [Math.max(0, ring.rx + more), Math.max(0, ring.ry + more)];
    const corner = { rx: Math.max(0, ring.corner.rx + more), ry: Math.max(0, ring.corner.ry + more) };
    const sizes = { x: core.x - rx, y: core.y - ry, width: 2 * rx, height: 2 * ry, ...corner };
    for (const [name, value] of Object.entries(sizes)) set(seas[n], name, value.toFixed(0));
  });
}

function makeKey(state) {
  if (state === "uploading") return h("li", { class: "muted" }, sign(state), " uploading");
  return h("li", null, h("a", { href: `#learners?state=${state}` }, sign(state), " ", h("b"), ` ${stateWord(state)}`));
}

function makeCore() {
  const reef = s("path", { class: "reef" });
  const water = s("path", { class: "lagoon" });
  const inner = s("path", { class: "lagoon-deep" });
  const title = s("text", { class: "core-name", "text-anchor": "middle", y: -4 }, "core");
  const line = s("text", { class: "core-words", "text-anchor": "middle", y: 15 });
  const node = s("g", { class: "core" }, reef, water, inner, title, line);
  let drawn = 0;
  return {
    node,
    update({ x, y, radius }, run) {
      set(node, "transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
      if (drawn !== radius) {
        set(reef, "d", shore("reef", radius + 5, 0.03));
        set(water, "d", shore("reef", radius, 0.03));
        set(inner, "d", shore("lagoon", radius * 0.72, 0.05));
        drawn = radius;
      }
      const words = !run.reachable ? "unreachable" : run.paused !== "" ? "paused" : `${count(run.merges)} merges`;
      text(line, words);
      text(title, "core");
      node.classList.toggle("away", !run.reachable);
    },
  };
}

function makeWay() {
  return s("g", null, s("path", { class: "way way-up" }), s("path", { class: "way way-down" }));
}

/** Width and speed of the dashes, from the logarithm of the rate. Few levels, so that they do not change every second. */
function flow(bytesPerS) {
  return bytesPerS < 1 ? 0 : Math.max(1, Math.min(4, Math.round(Math.log10(bytesPerS) - 3)));
}

/** Whether a front of the region, or each learner with its own link, is silent. */
function isCut({ links }) {
  const fronts = links.filter((link) => link.front);
  const silent = (link) => link.state === "silent";
  return fronts.length > 0 ? fronts.some(silent) : links.length > 0 && links.every(silent);
}

function updateWay(node, { region, place, core, stopped }) {
  const [up, down] = node.children;
  const { up: upWay, down: downWay } = links(core, place);
  node.classList.toggle("cut", isCut(region));
  set(up, "d", upWay);
  set(down, "d", downWay);
  set(up, "data-flow", stopped ? 0 : flow(region.up_bytes_per_s));
  set(down, "data-flow", stopped ? 0 : flow(region.down_bytes_per_s));
}

function makeIsland(item) {
  const caption = [0, 1, 2, 3].map((n) => s("text", { class: `caption caption-${n}`, "text-anchor": "middle" }));
  const land = ["shallow", "beach", "ground"].map((name) => s("path", { class: name }));
  const link = s("a", { class: "island", tabindex: 0 }, s("title"), ...land, ...caption);
  const up = s("text", { class: "rates" });
  const down = s("text", { class: "rates rates-down" });
  const rates = s("g", { "aria-hidden": "true" }, up, down);
  const node = s("g", { role: "group", "aria-label": `${item.region.region ? "Region " : ""}${regionName(item.region.region)}` }, link, s("g"), rates);
  node.steady = roving(node, "a");
  return node;
}

function updateIsland(node, item) {
  const { region, place, core, many } = item;
  const [link, dots, rates] = node.children;
  set(node, "class", unheard(region.learners) > 0 ? "place troubled" : "place");
  const [up, down] = [region.up_bytes_per_s, region.down_bytes_per_s].map((each) => rate(item.stopped ? null : each));
  const flows = [`↑ ${up}`, `↓ ${down}`];
  const name = `${region.others ? "The " : region.region ? "Region " : ""}${regionName(region.region)}: ${stateWords(region.learners)}; up `
    + `${up}, down ${down}`;
  set(link, "href", region.others ? "#learners" : regionLink(region.region));
  set(link, "aria-label", name);
  text(link.firstChild, name);
  set(link, "transform", `translate(${place.x.toFixed(1)} ${place.y.toFixed(1)})`);
  if (node.drawn !== place.radius) {
    [9, 3, -3].forEach((more, n) => set(link.children[n + 1], "d", shore(region.region, place.radius + more)));
    node.drawn = place.radius;
  }
  const rateLines = item.lines === 3 ? [flows.join("  ")] : flows;
  const long = many ? "" : cutFor(region, item.now); // too wide for a phone
  const words = [regionName(region.region), islandWords(region, many) + long, ...rateLines];
  link.querySelectorAll(".caption").forEach((line, n) => {
    const row = place.above ? n - item.lines : n;
    set(line, "y", (place.above ? row * 15 - place.radius - 3 : row * 15 + place.radius + 26).toFixed(1));
    const said = n < item.lines ? words[n] : "";
    text(line, said.length > 26 ? `${said.slice(0, 25)}…` : said);
  });
  links(core, place).labels.forEach((label, n) => {
    for (const [key, value] of Object.entries({ x: label.x.toFixed(1), y: label.y.toFixed(1) })) {
      set(rates.children[n], key, value);
    }
    set(rates.children[n], "text-anchor", label.anchor);
    text(rates.children[n], many ? "" : flows[n]);
  });
  updateDots(dots, item);
  node.steady();
}

function islandWords(region, many) {
  const { learners } = region;
  const all = total(learners);
  if (many && learners.cut_off) return `${learners.cut_off} of ${all} cut off`;
  if (many) return learners.silent ? `${learners.silent} of ${all} silent` : `${learners.live ?? 0} of ${all} live`;
  return stateWords(learners);
}

/** For how long the region's learners have been cut off, as the end of a caption; empty if none is. */
function cutFor(region, now) {
  const since = region.dots.filter((dot) => dot.state === "cut_off" && dot.since !== null).map((dot) => dot.since);
  return since.length === 0 ? "" : ` · ${about(now - Math.min(...since))}`;
}

function updateDots(group, { region, place, now, width }) {
  const shown = [...region.dots].sort((one, other) => byName(one.learner, other.learner));
  const spots = dotPlaces(shown.length, place.pitch);
  const size = Math.max(6, Math.min(15, place.pitch * 0.78));
  const labelled = new Set(
    shown.filter((dot) => dot.state === "silent" && dot.since !== null)
      .sort((one, other) => one.since - other.since).slice(0, shown.length > 12 ? 1 : 2).map((dot) => dot.learner),
  );
  // The label is on the dot's side of the island, unless it would leave the map.
  const fitsLeft = place.x - place.radius > 70;
  const fitsRight = place.x + place.radius + 70 < width;
  const items = shown.map((dot, n) => ({
    dot, size, now, x: place.x + spots[n][0], y: place.y + spots[n][1],
    label: labelled.has(dot.learner), left: fitsLeft && (spots[n][0] < 0 || !fitsRight), island: place,
  }));
  keyed(group, items, (item) => item.dot.learner, makeDot, updateDot);
}

function makeDot(item) {
  const link = s(
    "a", { class: "dot", href: learnerLink(item.dot.learner), tabindex: -1 }, s("title"),
    s("circle", { class: "hit" }), s("circle", { class: "sending" }), sign(item.dot.state),
  );
  return s("g", null, link, s("text", { class: "silence", "aria-hidden": "true" }));
}

function updateDot(node, { dot, size, now, x, y, label, left, island }) {
  const [link, words] = node.children;
  const [title, hit, sending, icon] = link.children;
  const long = dot.since === null ? "" : about(now - dot.since);
  const name = `${dot.learner}, ${stateWord(dot.state)}${dot.state === "live" || long === "" ? "" : ` for ${long}`}`
    + `${dot.uploading ? ", uploading" : ""}`;
  set(node, "transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
  set(link, "aria-label", name);
  text(title, name);
  set(hit, "r", (size * 0.85).toFixed(1));
  set(sending, "r", (size * 0.62).toFixed(1));
  set(link, "class", dot.uploading ? "dot uploading" : "dot");
  setSign(icon, dot.state);
  for (const [key, value] of Object.entries({ x: -size / 2, y: -size / 2, width: size, height: size })) {
    set(icon, key, value.toFixed(1));
  }
  text(words, label ? long : "");
  if (!label) return;
  const edge = left ? island.x - x - island.radius - 8 : island.x - x + island.radius + 8;
  set(words, "x", edge.toFixed(1));
  set(words, "y", 4);
  set(words, "text-anchor", left ? "end" : "start");
}
