// The two fits of a spectrum, redone in the page: power-law tail for a given xmin, random bulk for a given sigma.
// Eigenvalues are ascending and of W^T W, unnormalised, as in the JSON.

// Tracy-Widom (beta = 1): what the largest eigenvalue of 1, 3, 9, 27, 81, 243 pooled random matrices stays below
// with probability 0.99. What lies beyond it is a spike.
const TRACY_WIDOM = [2.0234, 2.6436, 3.217, 3.7542, 4.2625, 4.7472];

function tracyWidom(matrices) {
  const at = Math.min(TRACY_WIDOM.length - 1.001, Math.log(matrices) / Math.log(3));
  const i = Math.floor(at);
  return TRACY_WIDOM[i] + (TRACY_WIDOM[i + 1] - TRACY_WIDOM[i]) * (at - i);
}

// Continuous maximum likelihood: alpha = 1 + n / sum ln(x / xmin); D the largest gap, by left limits.
export function fitTail(eigenvalues, xmin) {
  // Stored as float32: the xmin of the JSON may lie a hair above the eigenvalue it is.
  const start = lowerBound(eigenvalues, xmin * (1 - 1e-6));
  const n = eigenvalues.length - start;
  let sum = 0;
  for (let i = start; i < eigenvalues.length; i += 1) sum += Math.log(eigenvalues[i] / xmin);
  if (n < 2 || !(sum > 0)) return { alpha: null, stderr: null, ks: null, size: n, xmin };
  const alpha = 1 + n / sum;
  let ks = 0;
  for (let i = 0; i < n; i += 1) {
    const model = 1 - (eigenvalues[start + i] / xmin) ** (1 - alpha);
    ks = Math.max(ks, Math.abs(model - i / n));
  }
  return { alpha, stderr: (alpha - 1) / Math.sqrt(n), ks, size: n, xmin };
}

export function tailDensity(fit, total, x) {
  return x < fit.xmin ? 0 : (fit.size / total) * ((fit.alpha - 1) / fit.xmin) * (x / fit.xmin) ** -fit.alpha;
}

// The Marchenko-Pastur bulk of an N x M matrix (N >= M) with entries of standard deviation sigma.
export function fitBulk(eigenvalues, rows, cols, sigma, ratio = null) {
  const n = Math.max(rows, cols);
  const m = Math.min(rows, cols);
  const matrices = Math.max(1, Math.round(eigenvalues.length / m));
  const root = Math.sqrt(m / n);
  const minus = n * (sigma * (1 - root)) ** 2;
  const plus = n * (sigma * (1 + root)) ** 2;
  const a = Math.sqrt(Math.max(n - 0.5, 0));
  const b = Math.sqrt(Math.max(m - 0.5, 0));
  const edge = sigma ** 2 * (ratio ?? (a + b) ** 2 + tracyWidom(matrices) * (a + b) * (1 / a + 1 / b) ** (1 / 3));
  const last = lowerBound(eigenvalues, edge);
  const above = eigenvalues.length - last;
  // Spikes take a direction on both sides of each pooled matrix; what is left is held against the law.
  const share = above / matrices;
  const [tall, wide] = [n - share, Math.max(1, m - share)];
  let ks = null;
  if (last > 1) {
    ks = 0;
    for (let i = 0; i < last; i += 1) {
      const model = bulkShare(eigenvalues[i] / (tall * sigma ** 2), Math.min(1, wide / tall));
      ks = Math.max(ks, Math.abs(model - i / last), Math.abs(model - (i + 1) / last));
    }
  }
  const top = eigenvalues[eigenvalues.length - 1];
  return { sigma, n, m, minus, plus, edge, above, ks, softRank: top > 0 ? plus / top : null };
}

export function bulkDensity(bulk, x) {
  if (x <= bulk.minus || x >= bulk.plus) return 0;
  const v = bulk.n * bulk.sigma ** 2;
  const q = bulk.n / bulk.m;
  return (q / (2 * Math.PI)) * (Math.sqrt((bulk.plus - x) * (x - bulk.minus)) / v) / x;
}

// Share of the law below x, in closed form; x in units of N sigma^2, c = M/N.
export function bulkShare(x, c) {
  const low = (1 - Math.sqrt(c)) ** 2;
  const high = (1 + Math.sqrt(c)) ** 2;
  const at = Math.min(high, Math.max(low, x));
  const first = Math.sqrt(Math.max(0, (high - at) * (at - low)));
  const second = (1 + c) * (arcsin((2 * at - low - high) / (high - low)) + Math.PI / 2);
  const third = low > 0 ? (1 - c) * (arcsin(((low + high) * at - 2 * low * high) / (at * (high - low))) + Math.PI / 2) : 0;
  return Math.min(1, Math.max(0, (first + second - third) / (2 * Math.PI * c)));
}

function arcsin(v) {
  return Math.asin(Math.min(1, Math.max(-1, v)));
}

// Index of the first value that is at least x.
export function lowerBound(values, x) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Counts in `bins` equal steps of x, or of log10 x; values at or below zero have no logarithm and are left out.
export function histogram(values, domain, bins, log) {
  const map = log ? Math.log10 : (v) => v;
  const low = map(domain[0]);
  const step = (map(domain[1]) - low) / bins;
  const counts = new Float64Array(bins);
  for (const v of values) {
    if (log && v <= 0) continue;
    const at = Math.floor((map(v) - low) / step);
    if (at >= 0 && at <= bins) counts[Math.min(at, bins - 1)] += 1;
  }
  const edge = (i) => (log ? 10 ** (low + i * step) : low + i * step);
  return Array.from(counts, (count, i) => ({ from: edge(i), to: edge(i + 1), density: count / (values.length * step), count }));
}
