// Scales, ticks and colours. Sequential colours are cividis and viridis, categories Okabe-Ito: both survive colour blindness.

import { power } from "./format.js";

export function extent(values, positive = false) {
  let low = Infinity;
  let high = -Infinity;
  for (const v of values) {
    if (typeof v !== "number" || !Number.isFinite(v) || (positive && v <= 0)) continue;
    if (v < low) low = v;
    if (v > high) high = v;
  }
  return low <= high ? [low, high] : null;
}

// A domain that is never empty and keeps a little air at both ends.
export function padded(values, share = 0.06, positive = false) {
  const range = extent(values, positive);
  if (!range) return positive ? [0.1, 10] : [0, 1];
  const [low, high] = range;
  if (positive) {
    const air = Math.max((high / low) ** share, 1.1);
    return [low / air, high * air];
  }
  const air = (high - low) * share || Math.abs(high) * 0.1 || 1;
  return [low - air, high + air];
}

export function linear(domain, range) {
  const [a, b] = domain;
  const [c, d] = range;
  const scale = (v) => c + ((v - a) / (b - a || 1)) * (d - c);
  scale.invert = (p) => a + ((p - c) / (d - c || 1)) * (b - a);
  scale.ticks = (n) => niceTicks(a, b, n);
  scale.text = (v) => tidy(v);
  return Object.assign(scale, { domain, range, log: false });
}

export function logarithmic(domain, range) {
  const [a, b] = domain.map((v) => Math.log10(Math.max(v, 1e-300)));
  const [c, d] = range;
  const scale = (v) => c + ((Math.log10(Math.max(v, 1e-300)) - a) / (b - a || 1)) * (d - c);
  scale.invert = (p) => 10 ** (a + ((p - c) / (d - c || 1)) * (b - a));
  scale.ticks = (n) => logTicks(a, b, n);
  scale.text = (v) => logText(v);
  return Object.assign(scale, { domain, range, log: true });
}

export function niceTicks(low, high, n = 5) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / Math.max(1, n);
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * ([1, 2, 2.5, 5, 10].find((m) => m * unit >= raw) || 10);
  const ticks = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) ticks.push(Number(v.toPrecision(12)));
  return ticks;
}

function logTicks(a, b, n = 5) {
  const first = Math.ceil(a - 1e-9);
  const last = Math.floor(b + 1e-9);
  const decades = last - first + 1;
  if (decades < 2) return [1, 2, 5].flatMap((m) => [first - 1, first, first + 1].map((e) => m * 10 ** e))
    .filter((v) => v >= 10 ** a * 0.999 && v <= 10 ** b * 1.001).sort((p, q) => p - q);
  const stride = Math.max(1, Math.ceil(decades / n));
  const ticks = [];
  for (let e = first; e <= last; e += stride) ticks.push(10 ** e);
  return ticks;
}

function logText(v) {
  const exponent = Math.log10(v);
  if (Math.abs(exponent - Math.round(exponent)) > 1e-6) return tidy(v);
  return Math.abs(exponent) <= 2 ? tidy(v) : power(Math.round(exponent));
}

function tidy(v) {
  const size = Math.abs(v);
  if (v === 0) return "0";
  if (size >= 1e6 || size < 1e-3) {
    const exponent = Math.floor(Math.log10(size) + 1e-9);
    const mantissa = Number((v / 10 ** exponent).toPrecision(3));
    return `${mantissa === 1 ? "" : `${mantissa}×`}${power(exponent)}`.replace("-", "−");
  }
  if (size >= 1e4) return `${Number((v / 1e3).toPrecision(4))}k`.replace("-", "−");
  return String(Number(v.toPrecision(4))).replace("-", "−");
}

export function quantile(sorted, q) {
  if (!sorted.length) return NaN;
  const at = (sorted.length - 1) * q;
  const low = Math.floor(at);
  const high = Math.min(low + 1, sorted.length - 1);
  return sorted[low] + (sorted[high] - sorted[low]) * (at - low);
}

export function sorted(values) {
  return Float64Array.from([...values].filter((v) => typeof v === "number" && Number.isFinite(v))).sort();
}

const CIVIDIS = ["#00224e", "#083370", "#35456c", "#4f576c", "#666970", "#7d7c78", "#948e77", "#aea371", "#c8b866", "#e5cf52", "#fee838"];
const VIRIDIS = ["#440154", "#482475", "#414487", "#355f8d", "#2a788e", "#21918c", "#22a884", "#44bf70", "#7ad151", "#bddf26", "#fde725"];

const PURPLE_ORANGE = ["#2d004b", "#542788", "#8073ac", "#b2abd2", "#e6e1ee", "#f2efe9", "#fbe3c3", "#fdb863", "#e08214", "#b35806", "#7f3b08"];

function ramp(stops, t) {
  const at = Math.min(1, Math.max(0, t)) * (stops.length - 1);
  const i = Math.min(stops.length - 2, Math.floor(at));
  const mix = [1, 3, 5].map((k) => {
    const a = parseInt(stops[i].slice(k, k + 2), 16);
    const b = parseInt(stops[i + 1].slice(k, k + 2), 16);
    return Math.round(a + (b - a) * (at - i));
  });
  return `rgb(${mix.join(",")})`;
}

export const cividis = (t) => ramp(CIVIDIS, t);
export const viridis = (t) => ramp(VIRIDIS, t);
export const purpleOrange = (t) => ramp(PURPLE_ORANGE, t);

// The i-th of n things that have an order; neither end fades into a light or a dark page.
export function ordered(i, n) {
  return viridis(n > 1 ? 0.24 + (0.62 * i) / (n - 1) : 0.4);
}

// Colour of a value within the middle 96 % of all values, so that one outlier does not wash out the rest.
export function colourScale(values, map = cividis) {
  const clean = sorted(values);
  if (!clean.length) return Object.assign(() => null, { low: null, high: null });
  const low = quantile(clean, 0.02);
  const high = quantile(clean, 0.98);
  const scale = (v) => (typeof v === "number" && Number.isFinite(v) ? map(high > low ? (v - low) / (high - low) : 0.5) : null);
  return Object.assign(scale, { low, high, map });
}

// Differences: purple below zero, orange above, pale at zero; both ends equally far.
export function differenceScale(values) {
  const clean = sorted(values);
  const most = clean.length ? Math.max(Math.abs(quantile(clean, 0.02)), Math.abs(quantile(clean, 0.98))) : 0;
  const scale = (v) => (typeof v === "number" && Number.isFinite(v) ? purpleOrange(most > 0 ? 0.5 + v / (2 * most) : 0.5) : null);
  return Object.assign(scale, clean.length ? { low: -most, high: most, map: purpleOrange } : { low: null, high: null });
}

export const OKABE = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#b8a80c", "#777777"];

// Blue and grey for states, orange for damage; the words are those of the terminal.
export const STATES = [
  { key: "learned", name: "learned", colour: "#0072b2" },
  { key: "random-like", name: "random-like", colour: "#999999" },
  { key: "too-small", name: "too small to tell", colour: "#c4b99d" },
  { key: "broken", name: "broken", colour: "#d55e00" },
];

export const PHASES = [
  { key: "random-like", colour: "#999999" }, { key: "bleeding-out", colour: "#56b4e9" }, { key: "bulk+spikes", colour: "#0072b2" },
  { key: "bulk-decay", colour: "#009e73" }, { key: "heavy-tailed", colour: "#e69f00" }, { key: "rank-collapse", colour: "#d55e00" },
];

export const stateColour = (state) => (STATES.find((s) => s.key === state) || { colour: null }).colour;
export const stateName = (state) => (STATES.find((s) => s.key === state) || { name: state || "–" }).name;
export const phaseColour = (phase) => (PHASES.find((p) => p.key === phase) || { colour: null }).colour;

// How a layer stands an intervention.
export const CLASSES = { robust: "#0072b2", mixed: "#c9a400", critical: "#d55e00" };
