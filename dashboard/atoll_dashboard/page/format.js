// Numbers as text. "–" stands for an unknown value.

export const UNKNOWN = "–";
const CURRENCY = "$";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fixed = [0, 1, 2, 3, 4].map(
  (digits) => new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }),
);
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** The sum of values, or null if one of them is unknown. */
export function sum(...values) {
  return values.every(known) ? values.reduce((whole, value) => whole + value, 0) : null;
}

export function count(value) {
  return known(value) ? whole.format(value) : UNKNOWN;
}

export function decimal(value, digits) {
  return known(value) ? fixed[digits].format(value) : UNKNOWN;
}

function scaled(value, units) {
  let size = Math.abs(value);
  let unit = 0;
  while (size >= 999.5 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return `${value < 0 ? "-" : ""}${fixed[digits].format(size)} ${units[unit]}`.trim();
}

/** A number with a unit prefix: 12,300,000 as 12.3 M. */
export function short(value) {
  return known(value) ? scaled(value, ["", "k", "M", "G", "T", "P"]) : UNKNOWN;
}

export function bytes(value) {
  return known(value) ? scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"]) : UNKNOWN;
}

export function rate(value) {
  return known(value) ? `${bytes(value)}/s` : UNKNOWN;
}

/** price: shows up to four decimals, because a price per GB can include fractions of a cent. */
export function money(value, price = false) {
  if (!known(value)) return UNKNOWN;
  if (price) return CURRENCY + value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 4 });
  return CURRENCY + (Math.abs(value) >= 1000 ? whole : fixed[2]).format(value);
}

export function ratio(value) {
  return decimal(value, 3);
}

export function percent(part, of) {
  if (!known(part) || !(of > 0)) return UNKNOWN;
  const value = (100 * part) / of;
  return `${fixed[value >= 99.95 || value === 0 ? 0 : value >= 9.95 ? 1 : 2].format(value)} %`;
}

/** A duration, with at most two units. */
export function span(seconds) {
  if (!known(seconds)) return UNKNOWN;
  const value = Math.max(0, seconds);
  if (value === 0) return "0 s";
  if (value < 9.95) return `${fixed[1].format(value)} s`;
  const all = Math.round(value);
  if (all < 60) return `${all} s`;
  if (all < 3600) return pair(all, 60, "min", 1, "s");
  if (all < 86400) return pair(all, 3600, "h", 60, "min");
  return pair(all, 86400, "d", 3600, "h");
}

function pair(value, large, largeUnit, small, smallUnit) {
  const rest = Math.floor((value % large) / small);
  const first = `${whole.format(Math.floor(value / large))} ${largeUnit}`;
  return rest > 0 ? `${first} ${rest} ${smallUnit}` : first;
}

/** A duration without decimals, in whole minutes from one minute on. */
export function about(seconds) {
  return known(seconds) ? span(seconds < 60 ? seconds : Math.floor(seconds / 60) * 60).replace(/\.\d/, "") : UNKNOWN;
}

/** A short duration with two decimals, for rounds. */
export function exact(seconds) {
  return known(seconds) ? `${fixed[2].format(seconds)} s` : UNKNOWN;
}

/** The UTC time of day, with the date if it is not today. For columns whose heading names the time zone. */
export function clock(at, tenths = false) {
  if (!known(at)) return UNKNOWN;
  const [day, time] = new Date(at * 1000).toISOString().split("T");
  const shown = time.slice(0, tenths ? 10 : 8);
  return day === new Date().toISOString().slice(0, 10) ? shown : `${day} ${shown}`;
}

/** The same with the time zone, as `atoll status` shows it. */
export function moment(at, tenths = false) {
  return known(at) ? `${clock(at, tenths)} UTC` : UNKNOWN;
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

/** A text, cut to a maximum length. */
export function clipped(line, letters = 180) {
  if (line.length <= letters) return line;
  const start = line.slice(0, letters);
  return `${start.replace(/[^,\s]*$/, "").replace(/[,\s]+$/, "") || start} …`;
}
