// Numbers and names as a reader wants them: two or three significant digits, the error beside the number, short names.

const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function power(exponent) {
  return `10${[...String(exponent)].map((c) => SUPERSCRIPT[c] || c).join("")}`;
}

// Significant digits, thin thousands, powers of ten spelled out; a missing value is a dash.
export function number(value, digits = 3) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return thousands(value);
  if (size >= 1e6 || size < 1e-4) {
    let exponent = Math.floor(Math.log10(size));
    let mantissa = (value / 10 ** exponent).toPrecision(Math.max(2, digits - 1));
    if (Math.abs(Number(mantissa)) >= 10) {
      exponent += 1;
      mantissa = (value / 10 ** exponent).toPrecision(Math.max(2, digits - 1));
    }
    return `${mantissa}×${power(exponent)}`.replace("-", "−");
  }
  return thousands(Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size))))));
}

function thousands(value) {
  return value.toLocaleString("en", { maximumFractionDigits: 12 }).replace(/,/g, "\u2009").replace("-", "−");
}

// A number with its standard error: the error to two digits, the number to the same place.
export function withError(value, error) {
  if (!isNumber(value) || !isNumber(error) || error <= 0) return number(value);
  const size = Math.max(Math.abs(value), error);
  if (size >= 1e6 || size < 1e-3) return `${number(value)} ± ${number(error, 2)}`;
  const places = Math.max(0, Math.min(8, 1 - Math.floor(Math.log10(error))));
  const fixed = (v) => v.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places }).replace(/,/g, "\u2009").replace("-", "−");
  return `${fixed(value)} ± ${fixed(error)}`;
}

export function count(value) {
  if (!isNumber(value)) return "–";
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= size) return `${Number((value / size).toPrecision(3))}\u2009${unit}`;
  }
  return String(value);
}

export function percent(value, digits = 3) {
  return isNumber(value) ? `${number(Number((100 * value).toPrecision(digits)))}\u2009%` : "–";
}

export function interval(ci) {
  return Array.isArray(ci) && ci.length === 2 && ci.every(isNumber) ? `${number(ci[0])} to ${number(ci[1])}` : "–";
}

// The last part of a path, which is what tells networks apart.
export function basename(path) {
  const parts = String(path || "").split(/[\\/]/).filter(Boolean);
  return parts.length ? parts[parts.length - 1] : "network";
}

// Networks may share a file name; then the folder tells them apart.
export function networkNames(networks) {
  const paths = networks.map((n) => (typeof n === "string" ? n : (n && (n.label || n.name || n.path)) || ""));
  const short = paths.map(basename);
  return paths.map((p, i) => (short.indexOf(short[i]) === short.lastIndexOf(short[i]) ? short[i] : String(p).split(/[\\/]/).slice(-2).join("/")));
}

export function plural(n, word, several = `${word}s`) {
  return `${number(n)} ${n === 1 ? word : several}`;
}

// Long names keep their two ends.
export function shorten(text, limit) {
  const name = String(text);
  if (name.length <= limit) return name;
  const tail = Math.ceil((limit - 1) * 0.7);
  return `${name.slice(0, limit - 1 - tail)}…${name.slice(-tail)}`;
}

// A sentence begins with a capital, unless its first word is the name of a file or of a layer.
export function sentence(text) {
  const words = String(text || "");
  return /^[a-z]+(?=[ ,]|$)/.test(words) ? words.charAt(0).toUpperCase() + words.slice(1) : words;
}

// Names of layers, one way everywhere: ".weight" and the words that all layers of blocks begin with are left out.
const shortNames = new Map();

export function learnNames(names) {
  const plain = (name) => String(name).replace(/\.weight$/, "");
  const fresh = [...new Set(names.filter((n) => typeof n === "string"))];
  const words = fresh.map((n) => plain(n).split("."));
  const inBlocks = words.filter((w) => w.slice(0, -1).some((part) => /^\d+$/.test(part)));
  const sample = inBlocks.length > 1 ? inBlocks : words;
  const prefix = [];
  while (sample.length > 1 && sample.every((w) => w.length > prefix.length + 1 && w[prefix.length] === sample[0][prefix.length] && !/^\d+$/.test(w[prefix.length]))) prefix.push(sample[0][prefix.length]);
  const strip = (w) => {
    let i = 0;
    while (i < prefix.length && i < w.length - 1 && w[i] === prefix[i]) i += 1;
    return w.slice(i).join(".");
  };
  const cut = words.map(strip);
  const unique = new Set(cut).size === cut.length;
  fresh.forEach((name, i) => { if (!shortNames.has(name)) shortNames.set(name, unique ? cut[i] : plain(name)); });
}

// Layers in the order of the network, as the result that names most of them has it.
export function inOrder(names) {
  const places = new Map([...shortNames.keys()].map((name, i) => [name.replace(/\.weight$/, ""), i]));
  const place = (name) => places.get(String(name).replace(/\.weight$/, "")) ?? Infinity;
  return [...names].sort((a, b) => place(a) - place(b) || 0);
}

export function shortName(name, limit = 40) {
  return shorten(shortNames.get(name) ?? String(name ?? "network").replace(/\.weight$/, ""), limit);
}
