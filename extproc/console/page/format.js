// Figures as people read them: units always and on the same line, thousands separated, as few digits as tell.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const NONE = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (known(value) ? whole.format(value) : NONE);

/** 62,000 as it is; millions and more as 12.3 M. */
export function big(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e9) return `${tenth.format(value / 1e9)}\u00a0G`;
  if (size >= 1e6) return `${tenth.format(value / 1e6)}\u00a0M`;
  return whole.format(value);
}

export function rate(value, unit = "/s") {
  if (!known(value)) return NONE;
  return `${value !== 0 && Math.abs(value) < 99.95 ? tenth.format(value) : whole.format(value)}${unit}`;
}

/** Seconds: 0.42 s, 12 s, 3 min 05 s, 2 h 10 min, 3 d 4 h. */
export function span(seconds) {
  if (!known(seconds)) return NONE;
  const s = Math.max(0, seconds);
  if (s === 0) return "0\u00a0s";
  if (s < 0.0995) return `${Math.max(1, Math.round(s * 1000))}\u00a0ms`;
  if (s < 9.95) return `${tenth.format(s)}\u00a0s`;
  if (s < 119.5) return `${Math.round(s)}\u00a0s`;
  const all = Math.round(s);
  if (all < 3600) return `${Math.floor(all / 60)}\u00a0min\u00a0${String(all % 60).padStart(2, "0")}\u00a0s`;
  if (all < 172800) return `${Math.floor(all / 3600)}\u00a0h\u00a0${String(Math.floor((all % 3600) / 60)).padStart(2, "0")}\u00a0min`;
  return `${Math.floor(all / 86400)}\u00a0d\u00a0${Math.floor((all % 86400) / 3600)}\u00a0h`;
}

export function usd(value) {
  if (!known(value)) return NONE;
  const digits = value === 0 || Math.abs(value) >= 1 ? 2 : 4;
  return `$${new Intl.NumberFormat("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }).format(value)}`;
}

export const share = (value) => (known(value) ? `${whole.format(value * 100)}\u00a0%` : NONE);

/** Time of day, of the reader's own clock. */
export function clock(epoch, seconds = true) {
  if (!known(epoch)) return NONE;
  const wanted = { hour: "2-digit", minute: "2-digit", hour12: false, ...(seconds ? { second: "2-digit" } : {}) };
  return new Date(epoch * 1000).toLocaleTimeString("en-GB", wanted);
}

/** How long ago, seen from `now`, both epoch seconds. */
export function ago(epoch, now) {
  if (!known(epoch)) return NONE;
  return now - epoch < 1 ? "just now" : `${age(now - epoch)} ago`;
}

/** A duration in whole seconds, for what counts on while somebody looks. */
export const age = (seconds) => (known(seconds) && seconds < 120 ? `${Math.max(0, Math.round(seconds))}\u00a0s` : span(seconds));

/** Until when something holds: a time, or until somebody undoes it. */
export const until = (epoch) => (known(epoch) ? `until ${clock(epoch)}` : "until undone");

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
