// What is known about each number of a layer, and how far one number of one layer may be trusted.

import { isNumber } from "./format.js";

// {key, label, name, family, meaning, trust}: filled from the texts of `strati explain` before anything is drawn.
export const METRICS = [];

export function learnMetrics(rows) {
  METRICS.push(...rows.filter((r) => r.kind === "metric").map((r) => ({ key: r.name, label: r.label || r.name, name: r.title || r.name, family: r.family, meaning: r.meaning, trust: r.reliability || "" })));
}

export const metricOf = (key) => METRICS.find((m) => m.key === key);

const NAMES = { llc: "learning coefficient", loss: "loss", relative_change: "relative change", neff: "effective parameters" };
export const niceName = (key) => (metricOf(key) || { name: NAMES[key] || String(key).replaceAll("_", " ") }).name;

export const FAMILIES = [["exact", "Computed exactly"], ["bulk", "From the fit of the random part"], ["tail", "From the fit of the tail"]];

// Warnings that make the numbers of a family unreliable in a layer.
const AGAINST = {
  tail: ["noise-like", "short-tail", "few-eigenvalues", "gradual-tail", "no-tail", "not-finite", "constant"],
  bulk: ["no-bulk", "structured-noise", "few-eigenvalues", "not-finite", "constant"],
  exact: ["not-finite", "constant", "out-of-range"],
};

// Why a number of a layer should not be compared with others: a warning's code, or an error that exceeds the number.
export function doubt(key, layer) {
  const metric = metricOf(key);
  if (!metric) return null;
  const codes = (layer.warnings || []).map((w) => w.code);
  const code = (AGAINST[metric.family] || []).find((c) => codes.includes(c));
  if (code) return code;
  return metric.family === "tail" && isNumber(layer.alpha_stderr) && isNumber(layer.alpha) && layer.alpha_stderr >= layer.alpha ? "its error exceeds it" : null;
}

export const errorOf = (key, layer) => (key === "alpha" ? layer.alpha_stderr : layer[`${key}_stderr`]);

// What each recommendation of an audit says of a number: a word for the chip, and a sentence. A quantity that is computed
// exactly is right whatever the audit finds; what the audit judges is whether it predicts performance.
export const RECOMMENDATIONS = {
  use: ["yes", "predicts performance", "It correlated with performance when layers were changed."],
  "use-with-care": ["low", "use with care", "It correlated with performance, but not everywhere."],
  "distinguish-only": ["low", "tells interventions apart", "It differs between interventions but does not predict performance."],
  "do-not-use": ["no", "does not predict", "It did not correlate with performance when layers were changed."],
  unknown: ["unknown", "cannot tell", "The study has too few points to tell whether it predicts performance."],
};

// The verdicts that apply to one scan: {metric -> verdict}, each with where it comes from. A study of this very network
// (same layers, same norms) comes before one of other networks.
export function verdictsFor(audits, layers) {
  const verdicts = new Map();
  const ranked = audits.map((audit) => ({ audit, from: originOf(audit, layers) })).sort((a, b) => Number(a.from.same) - Number(b.from.same));
  for (const { audit, from } of ranked) {
    for (const v of audit.verdicts || []) if (v.intervention === null || v.intervention === undefined) verdicts.set(v.metric, { ...v, from });
  }
  return verdicts;
}

function originOf(audit, layers) {
  const points = audit.points || [];
  const bare = (name) => String(name).replace(/\.weight$/, "");
  const norms = new Map(layers.map((l) => [bare(l.name), l.frobenius_norm]));
  const close = (a, b) => isNumber(a) && isNumber(b) && Math.abs(a - b) <= 1e-4 * Math.abs(b);
  const same = points.some((p) => p.intervention === "intact" && close((p.metrics || {}).frobenius_norm, norms.get(bare(p.layer))));
  const networks = new Set(points.map((p) => p.network)).size;
  const name = (audit.study || {}).name;
  const where = same ? "this network" : networks > 1 ? `${networks} other networks` : "another network";
  return { same, text: `Audited on ${where}${name ? ` (study “${name}”)` : ""}.` };
}

// How far one number of one layer may be trusted: the layer's own warnings first, then the audit, then what is known.
export function trust(metric, layer, verdicts) {
  const reason = doubt(metric.key, layer);
  if (reason === "noise-like") return { level: "low", chip: "means nothing here", text: "The layer cannot be told from random weights: its tail means nothing." };
  const verdict = verdicts.get(metric.key);
  const [level, chip, text] = verdict ? RECOMMENDATIONS[verdict.recommendation] || RECOMMENDATIONS.unknown : ["known", "", metric.trust];
  const audited = { audit: Boolean(verdict), text: verdict ? `${text} ${verdict.from.text}` : text };
  if (metric.family === "exact") return { ...audited, level: "known", chip: "exact", text: `${metric.trust} ${verdict ? `As a predictor of performance: ${chip}. ${verdict.from.text}` : ""}`.trim() };
  if (reason) return { ...audited, level: "low", chip: "unreliable here", text: `${reason}: ${metric.trust}` };
  if ((layer.warnings || []).some((w) => w.code === "quantised")) return { ...audited, level: "low", chip: "with care", text: `Quantised weights: rounding adds its own noise. ${metric.trust}` };
  return { ...audited, level, chip };
}
