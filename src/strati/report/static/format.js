// Numbers and names as a reader wants them.

const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function power(exponent) {
  return `10${[...String(exponent)].map((c) => SUPERSCRIPT[c] || c).join("")}`;
}

// Four significant digits, thin thousands, powers of ten spelled out; a missing value is a dash.
export function number(value, digits = 4) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en").replace(/,/g, "\u2009").replace("-", "−");
  if (size >= 1e6 || size < 1e-4) {
    let exponent = Math.floor(Math.log10(size));
    let mantissa = (value / 10 ** exponent).toPrecision(Math.max(2, digits - 1));
    if (Math.abs(Number(mantissa)) >= 10) {
      exponent += 1;
      mantissa = (value / 10 ** exponent).toPrecision(Math.max(2, digits - 1));
    }
    return `${mantissa}×${power(exponent)}`.replace("-", "−");
  }
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

export function count(value) {
  if (!isNumber(value)) return "–";
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= size) return `${Number((value / size).toPrecision(3))}\u2009${unit}`;
  }
  return String(value);
}

export function percent(value) {
  return isNumber(value) ? `${Number((100 * value).toPrecision(3))}\u2009%` : "–";
}

export function interval(ci) {
  return Array.isArray(ci) && ci.length === 2 && isNumber(ci[0]) && isNumber(ci[1])
    ? `[${number(ci[0], 3)}, ${number(ci[1], 3)}]` : "–";
}

// The last part of a path, which is what tells networks apart.
export function basename(path) {
  const parts = String(path || "").split(/[\\/]/).filter(Boolean);
  return parts.length ? parts[parts.length - 1] : "network";
}

export function plural(n, word) {
  return `${number(n)} ${word}${n === 1 ? "" : "s"}`;
}

// Long names keep their two ends.
export function shorten(text, limit) {
  const name = String(text);
  if (name.length <= limit) return name;
  const tail = Math.ceil((limit - 1) * 0.6);
  return `${name.slice(0, limit - 1 - tail)}…${name.slice(-tail)}`;
}

// A sentence begins with a capital.
export function sentence(text) {
  const said = String(text || "");
  return said.charAt(0).toUpperCase() + said.slice(1);
}

// Dotted names give up their leading words first: encoder.layer.0.attention.query -> e.l.0.attention.query.
export function abbreviate(text, limit) {
  const words = String(text).split(".");
  for (let i = 0; i < words.length - 2 && words.join(".").length > limit; i += 1) {
    if (!/^\d+$/.test(words[i])) words[i] = words[i].slice(0, 1);
  }
  return shorten(words.join("."), limit);
}
