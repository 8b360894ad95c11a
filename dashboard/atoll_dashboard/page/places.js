// PURE: where the islands and their dots lie. Pixels in, pixels out.

export const MOST_ISLANDS = 16;
const FULL_TURN = 2 * Math.PI;
const GOLDEN = Math.PI * (3 - Math.sqrt(5));

/** A small steady number generator: the same name always gives the same shore. */
function dice(name) {
  let state = 2166136261;
  for (const letter of name) state = Math.imul(state ^ letter.codePointAt(0), 16777619);
  return () => {
    state = Math.imul(state ^ (state >>> 15), 2246822519) + 0x9e3779b9;
    return ((state ^ (state >>> 13)) >>> 0) / 4294967296;
  };
}

/** A closed, softly uneven curve round the origin. */
export function shore(name, radius, uneven = 0.09) {
  const roll = dice(name);
  const waves = [2, 3, 5].map((turns) => ({ turns, size: (uneven * (0.5 + roll())) / Math.sqrt(turns), at: roll() * 7 }));
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

/** Angles that cut an ellipse into arcs of equal length; the first lies half an arc after the top. */
function spread(count, rx, ry) {
  const steps = 720;
  const length = [0];
  for (let n = 1; n <= steps; n += 1) {
    const angle = ((n - 0.5) / steps) * FULL_TURN - Math.PI / 2;
    length.push(length[n - 1] + Math.hypot(rx * Math.sin(angle), ry * Math.cos(angle)));
  }
  const whole = length[steps];
  const angles = Array.from({ length: count }, (_, n) => {
    const wanted = ((n + 0.5) / count) * whole;
    const at = length.findIndex((walked) => walked >= wanted);
    return (at / steps) * FULL_TURN - Math.PI / 2;
  });
  return { angles, arc: whole / Math.max(1, count) };
}

/** How far apart dots lie when they have room. */
const pitchOf = (dots) => (dots <= 6 ? 32 : dots <= 16 ? 21 : 14.5);

function radiusOf(dots, pitch) {
  if (dots <= 1) return pitch;
  if (dots <= 6) return pitch * (0.5 / Math.sin(Math.PI / Math.max(2, dots)) + 0.95);
  return (pitch / 1.72) * Math.sqrt(dots) + pitch * 0.8;
}

/** Where a region's dots lie, from its middle. */
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

/** Whether there is no room for rates beside the links. */
export const crowded = (width, count) => width < 600 || count > 6;

/** The height that the picture wants at this width. */
export function heightOf(width, count) {
  if (width >= 600) return count <= 8 ? 520 : 640;
  return count <= 4 ? 470 : count <= 9 ? 620 : 900;
}

/** {core: {x, y, rx, ry}, islands: [{x, y, radius, pitch}]} for regions of that many dots. */
export function layout(width, height, dots) {
  const count = dots.length;
  const many = crowded(width, count);
  const caption = many ? 50 : 36;
  const tight = width < 600;
  const radius = Math.min(width, height) * (tight || many ? 0.12 : 0.16);
  const core = { x: width / 2, y: (height - caption) / 2, radius };
  const most = tight ? (count > 6 ? 34 : 46) : many ? 64 : 84;
  const rx = width / 2 - (tight ? Math.max(52, most) : most + 44);
  const ry = core.y - most - 8;
  const { angles, arc } = spread(count, rx, ry);
  const room = count === 1 ? most : Math.min(most, Math.max(22, arc / 2 - 9));
  const islands = dots.map((dots_, n) => {
    const pitch = pitchOf(dots_);
    const wanted = Math.max(radiusOf(dots_, pitch), tight ? 24 : 32);
    const radius = Math.min(wanted, room);
    const x = core.x + Math.cos(angles[n]) * rx;
    const y = core.y + Math.sin(angles[n]) * ry;
    return { x, y, radius, pitch: (pitch * radius) / wanted };
  });
  return { core, islands, ring: { rx: Math.max(0, rx), ry } };
}

/** The two ways between an island and the core: up bends to one side, down to the other; mid is between them. */
export function links(core, island) {
  const dx = core.x - island.x;
  const dy = core.y - island.y;
  const far = Math.max(1, Math.hypot(dx, dy));
  const [ux, uy] = [dx / far, dy / far];
  const from = [island.x + ux * (island.radius + 5), island.y + uy * (island.radius + 5)];
  const to = [core.x - ux * (core.radius + 5), core.y - uy * (core.radius + 5)];
  const middle = [(from[0] + to[0]) / 2, (from[1] + to[1]) / 2];
  const way = (start, end, side) => {
    const shift = ([x, y], by) => `${(x - uy * by * side).toFixed(1)} ${(y + ux * by * side).toFixed(1)}`;
    return `M${shift(start, 4)}Q${shift(middle, 15)} ${shift(end, 4)}`;
  };
  return { up: way(from, to, 1), down: way(to, from, -1), middle };
}
