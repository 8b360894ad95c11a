// PURE: positions of the islands and their dots on the map, in pixels.

export const MOST_ISLANDS = 16;
const FULL_TURN = 2 * Math.PI;
const GOLDEN = Math.PI * (3 - Math.sqrt(5));

/** A random number generator with a name as its seed, so that an island keeps its shape. */
function dice(name) {
  let state = 2166136261;
  for (const letter of name) state = Math.imul(state ^ letter.codePointAt(0), 16777619);
  return () => {
    state = Math.imul(state ^ (state >>> 15), 2246822519) + 0x9e3779b9;
    return ((state ^ (state >>> 13)) >>> 0) / 4294967296;
  };
}

/** A closed, slightly uneven curve around the origin. */
export function shore(name, radius, uneven = 0.09) {
  const roll = dice(name);
  const waves = [2, 3, 5].map((turns) => {
    return { turns, size: (uneven * (0.5 + roll())) / Math.sqrt(turns), at: roll() * 7 };
  });
  const count = 28;
  const points = Array.from({ length: count }, (_, n) => {
    const angle = (n / count) * FULL_TURN;
    const swell = waves.reduce((sum, wave) => sum + wave.size * Math.sin(wave.turns * angle + wave.at), 1);
    return [Math.cos(angle) * radius * swell, Math.sin(angle) * radius * swell];
  });
  const middle = ([x, y], [u, v]) => `${((x + u) / 2).toFixed(1)} ${((y + v) / 2).toFixed(1)}`;
  const arcs = points.map((point, n) => {
    const next = points[(n + 1) % count];
    return `Q${point[0].toFixed(1)} ${point[1].toFixed(1)} ${middle(point, next)}`;
  });
  return `M${middle(points.at(-1), points[0])}${arcs.join("")}Z`;
}

/** Distance between dots if there is enough room. */
const pitchOf = (dots, many) => (dots <= 6 && !many ? 32 : dots <= 16 ? 21 : 14.5);

function radiusOf(dots, pitch) {
  if (dots <= 1) return pitch;
  if (dots <= 6) return pitch * (0.5 / Math.sin(Math.PI / Math.max(2, dots)) + 0.95);
  return (pitch / 1.72) * Math.sqrt(dots) + pitch * 0.8;
}

/** Positions of a region's dots, relative to its centre. */
export function dotPlaces(count, pitch) {
  if (count === 1) return [[0, 0]];
  if (count <= 6) {
    const radius = (pitch * 0.55) / Math.sin(Math.PI / count);
    const turn = count === 2 ? 0 : -Math.PI / 2;
    return Array.from({ length: count }, (_, n) => {
      const angle = turn + (n / count) * FULL_TURN;
      return [Math.cos(angle) * radius, Math.sin(angle) * radius];
    });
  }
  return Array.from({ length: count }, (_, n) => {
    const radius = (pitch / 1.72) * Math.sqrt(n + 0.4);
    return [Math.cos(n * GOLDEN) * radius, Math.sin(n * GOLDEN) * radius];
  });
}

/** Whether the rates do not fit next to the links, so that captions show them. */
export const crowded = (width, count) => width < 600 || count > 6;

/** Columns and rows of the grid around the core, for many islands. */
function cells(width, count) {
  if (width < 600) return { columns: 3, rows: Math.max(3, Math.ceil((count - 2) / 2)) };
  const columns = count <= 8 ? 3 : count <= 12 ? 4 : 5;
  return { columns, rows: Math.max(3, Math.ceil((count + 4) / 2) - columns) };
}

/** Number of caption lines per island. */
export const captionLines = (width, count) => (width >= 600 ? (count > 6 ? 3 : 2) : count > 10 ? 2 : 4);

/** The height of the map for this width. */
export function heightOf(width, count) {
  if (!crowded(width, count)) return 530;
  const { rows } = cells(width, count);
  if (width < 600) return rows * (captionLines(width, count) > 2 ? 158 : 122);
  return rows <= 3 ? 570 : rows * 128;
}

/** Positions at equal distances along an ellipse. The first is left of the core, except with four positions. */
function onEllipse(count, rx, ry) {
  const steps = 720;
  const first = count === 4 ? 0.5 : 0;
  const walked = [0];
  for (let n = 1; n <= steps; n += 1) {
    const angle = ((n - 0.5) / steps) * FULL_TURN;
    walked.push(walked[n - 1] + Math.hypot(rx * Math.sin(angle), ry * Math.cos(angle)));
  }
  return Array.from({ length: count }, (_, n) => {
    const wanted = ((n + first) / count) * walked[steps];
    const angle = (walked.findIndex((far) => far >= wanted) / steps) * FULL_TURN;
    return { dx: -Math.cos(angle) * rx, dy: -Math.sin(angle) * ry };
  });
}

/** Positions in the outer cells of a grid, clockwise from the top left. */
function inCells(count, { columns, rows }, width, height) {
  const outer = [];
  for (let column = 0; column < columns; column += 1) outer.push([column, 0]);
  for (let row = 1; row < rows; row += 1) outer.push([columns - 1, row]);
  for (let column = columns - 2; column >= 0; column -= 1) outer.push([column, rows - 1]);
  for (let row = rows - 2; row > 0; row -= 1) outer.push([0, row]);
  return Array.from({ length: count }, (_, n) => {
    const [column, row] = outer[Math.floor(((n + 0.5) * outer.length) / count)];
    return { dx: ((column + 0.5) / columns - 0.5) * width, dy: ((row + 0.5) / rows - 0.5) * height };
  });
}

/**
 * {core: {x, y, radius}, islands: [{x, y, radius, pitch, above}], ring: {rx, ry, corner}}. dots: number per region.
 * above: whether the caption is above its island, so that links do not cross the caption.
 */
export function layout(width, height, dots) {
  const count = dots.length;
  const many = crowded(width, count);
  const words = captionLines(width, count) * 15 + 8;
  const core = { x: width / 2, y: height / 2, radius: width < 600 ? 46 : many ? 66 : 72 };
  const frame = cells(width, count);
  const room = many ? Math.min(64, (height / frame.rows - words - 24) / 2, width / frame.columns / 2 - 16) : 78;
  const sizes = dots.map((some) => {
    const pitch = pitchOf(some, many);
    const wanted = Math.max(radiusOf(some, pitch), many ? 26 : 34);
    const radius = Math.min(wanted, room);
    return { radius, pitch: (pitch * radius) / wanted };
  });
  const largest = Math.max(40, ...sizes.map((size) => size.radius));
  const rx = many ? (width / 2) * (1 - 1 / frame.columns) : Math.min(width / 2 - largest - 60, 340);
  const ry = many ? (height / 2) * (1 - 1 / frame.rows) : height / 2 - largest - words - 14;
  const spots = many ? inCells(count, frame, width, height) : onEllipse(count, rx, ry);
  const islands = spots.map(({ dx, dy }, n) => {
    const above = dy < 0 && (many ? dy < -ry * 0.99 : -dy > Math.abs(dx) * 0.25);
    // Centres the island and its caption together in their cell.
    const shift = many ? (above ? words / 2 - 4 : -words / 2 + 4) : 0;
    return { x: core.x + dx, y: core.y + dy + shift, above, ...sizes[n] };
  });
  const corner = many ? { rx: rx * 0.6, ry: ry * 0.6 } : { rx, ry };
  return { core, islands, ring: { rx, ry, corner } };
}

/** The two curves between an island and the core, and the positions of their labels. */
export function links(core, island) {
  const dx = core.x - island.x;
  const dy = core.y - island.y;
  const far = Math.max(1, Math.hypot(dx, dy));
  const [ux, uy] = [dx / far, dy / far];
  const from = [island.x + ux * (island.radius + 7), island.y + uy * (island.radius + 7)];
  const to = [core.x - ux * (core.radius + 6), core.y - uy * (core.radius + 6)];
  const middle = [(from[0] + to[0]) / 2, (from[1] + to[1]) / 2];
  const flip = ux < 0 ? -1 : 1; // the upload is always the upper curve
  const shift = ([x, y], by) => [x + uy * by * flip, y - ux * by * flip];
  const write = ([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`;
  const way = (start, end, side) => {
    return `M${write(shift(start, 4 * side))}Q${write(shift(middle, 15 * side))} ${write(shift(end, 4 * side))}`;
  };
  const label = (side) => {
    const [x, y] = shift(middle, 18 * side);
    const lean = uy * flip * side;
    return { x, y: y + 4 - Math.abs(ux) * 2 * side, anchor: lean > 0.4 ? "start" : lean < -0.4 ? "end" : "middle" };
  };
  return { up: way(from, to, 1), down: way(to, from, -1), labels: [label(1), label(-1)] };
}
