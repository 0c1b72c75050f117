// What each number of a layer means, in one line, and what the literature or the mathematics says about trusting it.

export const METRICS = [
  { key: "alpha", label: "α", name: "tail exponent", tail: true, meaning: "Exponent of the power-law tail: the smaller, the heavier the tail.", trust: "The literature reads 2 to 6 as well trained. That is a claim, not a fact: it does not survive intervention." },
  { key: "alpha_stderr", label: "α error", name: "standard error of α", tail: true, meaning: "Upper bound on the standard error of the exponent, the choice of the tail's start included; never less than (α − 1)/√n.", trust: "1.1 to 9 times the real spread where a tail starts sharply; too small where the exponent is reached slowly." },
  { key: "xmin", label: "xmin", name: "start of the tail", tail: true, meaning: "Eigenvalue from which the tail is fitted.", trust: "Chosen by least KS distance; move the slider to see how much depends on it." },
  { key: "ks_distance", label: "KS", name: "KS distance of the tail", tail: true, meaning: "Largest gap between the tail and its power law.", trust: "Small means a good description, not that a power law is the reason." },
  { key: "tail_size", label: "tail n", name: "eigenvalues in the tail", tail: true, meaning: "How many eigenvalues the exponent rests on.", trust: "Below about 50 the exponent is loose." },
  { key: "tail_pvalue", label: "tail p", name: "p-value of the tail", tail: true, meaning: "Share of synthetic power laws that fit worse than this one.", trust: "Small speaks against a power law." },
  { key: "alpha_weighted", label: "α̂", name: "weighted α", tail: true, meaning: "α · log₁₀ λmax: exponent and scale in one.", trust: "Depends on the units of the weights." },
  { key: "log_alpha_norm", label: "log α-norm", name: "log α-norm", tail: true, meaning: "log₁₀ Σ λ^α.", trust: "Dominated by the largest eigenvalues and by scale." },
  { key: "mu", label: "μ", name: "tail exponent of the entries", tail: true, meaning: "Exponent of the entries' distribution that such a spectrum would come from.", trust: "Finite-size corrections are large for 2 < μ < 4." },
  { key: "hard_rank", label: "rank", name: "hard rank", exact: true, meaning: "Singular values that differ from zero at the precision of the weights.", trust: "Computed, not fitted; counted at the precision of the weights." },
  { key: "stable_rank", label: "stable rank", name: "stable rank", exact: true, meaning: "Σλ / λmax: how many directions share the energy.", trust: "Computed, not fitted; blind to where the directions point." },
  { key: "entropy", label: "entropy", name: "matrix entropy", exact: true, meaning: "Evenness of the spectrum: 1 is flat, 0 is one direction.", trust: "Computed, not fitted; close to 1 for anything with a wide bulk." },
  { key: "frobenius_norm", label: "‖W‖F", name: "Frobenius norm", exact: true, meaning: "Root of the sum of squared weights.", trust: "Computed, not fitted; depends on the scale of the layer." },
  { key: "spectral_norm", label: "‖W‖₂", name: "spectral norm", exact: true, meaning: "Largest stretch the matrix gives any vector.", trust: "Computed, not fitted; depends on the scale of the layer." },
  { key: "mp_sigma", label: "σ", name: "bulk σ", meaning: "Standard deviation of the entries of the random part.", trust: "Meaningful where a bulk exists; see its KS distance." },
  { key: "mp_lambda_minus", label: "λ₋", name: "lower edge", meaning: "Where the random bulk begins.", trust: "Zero for square matrices." },
  { key: "mp_lambda_plus", label: "λ₊", name: "upper edge", meaning: "Where the random bulk ends.", trust: "Blurred by Tracy-Widom fluctuations at finite size." },
  { key: "mp_soft_rank", label: "soft rank", name: "MP soft rank", meaning: "λ₊ / λmax: 1 is pure noise, near 0 is strong signal.", trust: "As good as the bulk fit." },
  { key: "mp_ks_distance", label: "bulk KS", name: "KS distance of the bulk", meaning: "Largest gap between the bulk and the random law.", trust: "Large means that there is no random bulk to speak of." },
  { key: "spikes", label: "spikes", name: "spikes", meaning: "Eigenvalues beyond the random edge: candidates for learned directions; of convolutions counted slice by slice.", trust: "One in a hundred random matrices shows one (--level); a few in a hundred below 20 columns." },
  { key: "quasi_null", label: "quasi-null", name: "quasi-null", meaning: "Eigenvalues far below what noise of the layer's strength leaves: directions hardly used.", trust: "One in a hundred square random matrices shows one, one in a thousand tall ones; the level is that of a whole convolution." },
  { key: "aspect", label: "Q", name: "aspect ratio", exact: true, meaning: "Longer side over shorter side.", trust: "Counted." },
  { key: "parameters", label: "parameters", name: "parameters", exact: true, meaning: "Weights in this layer.", trust: "Counted." },
];

export const metricOf = (key) => METRICS.find((m) => m.key === key);

// What each recommendation of an audit says of a number: a word for the chip, and a sentence. A quantity that is computed
// exactly is right whatever the audit finds; what the audit judges is whether it predicts performance.
const SAID = {
  use: ["yes", "held up", "It went with performance when layers were changed."],
  "use-with-care": ["low", "with care", "It goes with performance in part: see the audit for where it fails."],
  "distinguish-only": ["low", "tells apart only", "It tells kinds of layers apart, but does not predict performance."],
  "do-not-use": ["no", "do not rely", "It did not go with performance when layers were changed."],
  unknown: ["unknown", "unknown", "Nothing can be said: too few points in the study"],
};

// The verdicts that apply to one scan: {metric -> verdict}, each with where it comes from. A study of this very network
// (same layers, same norms) comes before one of other networks.
export function verdictsFor(audits, layers) {
  const found = new Map();
  const ranked = audits.map((audit) => ({ audit, from: originOf(audit, layers) })).sort((a, b) => Number(a.from.own) - Number(b.from.own));
  for (const { audit, from } of ranked) {
    for (const v of audit.verdicts || []) if (v.intervention === null || v.intervention === undefined) found.set(v.metric, { ...v, from });
  }
  return found;
}

function originOf(audit, layers) {
  const points = audit.points || [];
  const norms = new Map(layers.map((l) => [String(l.name).replace(/\.weight$/, ""), l.frobenius_norm]));
  const close = (a, b) => typeof a === "number" && typeof b === "number" && Math.abs(a - b) <= 1e-4 * Math.abs(b);
  const own = points.some((p) => p.intervention === "intact" && close((p.metrics || {}).frobenius_norm, norms.get(String(p.layer).replace(/\.weight$/, ""))));
  const networks = new Set(points.map((p) => p.network)).size;
  const name = (audit.study || {}).name;
  const what = name ? ` (study “${name}”)` : "";
  return { own, text: own ? `Audited on this network${what}.` : `Audited on ${networks > 1 ? `${networks} other networks` : "another network"}${what}.` };
}

// How far one number of one layer may be trusted: the layer's own flags first, then the audit, then what is known.
export function trust(metric, layer, verdicts) {
  const codes = new Set((layer.warnings || []).map((w) => w.code));
  if (metric.tail && codes.has("noise-like")) return { level: "no", chip: "do not rely", text: "The random bulk explains this spectrum: the tail means nothing here." };
  const verdict = verdicts.get(metric.key);
  if (verdict) {
    const recommendation = verdict.recommendation;
    const [level, chip, said] = SAID[recommendation] || SAID.unknown;
    const points = recommendation === "unknown" && typeof verdict.n === "number" ? ` (${verdict.n}).` : recommendation === "unknown" ? "." : "";
    const numbers = String(verdict.text || "").split(" (").slice(1).join(" (");
    const audit = { more: numbers ? `(${numbers}` : null, audit: true, own: verdict.from.own };
    if (metric.exact && recommendation === "do-not-use") return { ...audit, level: "known", chip: "exact", text: `${metric.trust} It does not predict performance. ${verdict.from.text}` };
    if (metric.exact) return { ...audit, level, chip: `exact; as a predictor: ${chip}`, text: `${said}${points} ${verdict.from.text}` };
    return { ...audit, level, chip, text: `${said}${points} ${verdict.from.text}` };
  }
  if (metric.tail && (codes.has("short-tail") || codes.has("few-eigenvalues"))) return { level: "low", chip: "with care", text: "Rests on few eigenvalues. " + metric.trust };
  if (codes.has("quantised")) return { level: "low", chip: "with care", text: "Quantised weights: rounding adds its own noise. " + metric.trust };
  return { level: "known", chip: metric.exact ? "exact" : "", text: metric.trust };
}

// Lithology: each family of roles has a texture of its own, so that colour is free for the metric.
export function texture(role) {
  const family = String(role || "").split(".")[0];
  return ["attention", "mlp", "embedding", "head", "conv"].includes(family) ? family : "linear";
}

export const TEXTURES = [["attention", "attention"], ["mlp", "mlp"], ["embedding", "embedding"], ["head", "head"], ["conv", "convolution"], ["linear", "linear"]];
