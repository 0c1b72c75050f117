// The data block: base64 -> deflate -> [length of JSON][JSON][spectra]. The Python side is strati.report.pack.

const BYTES = 4;

export async function unpack(text) {
  const binary = atob(text.trim());
  const packed = Uint8Array.from(binary, (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = new DataView(raw.buffer).getUint32(0, true);
  const data = JSON.parse(new TextDecoder().decode(raw.subarray(BYTES, BYTES + length)));
  const words = unshuffle(raw.subarray(BYTES + length));
  return revive(data, words);
}

// Bytes are stored by significance (all lowest bytes first), which deflates far better.
function unshuffle(planes) {
  const n = planes.length / BYTES;
  const words = new Uint32Array(n);
  for (let b = 0; b < BYTES; b += 1) {
    for (let i = 0; i < n; i += 1) words[i] |= planes[b * n + i] << (8 * b);
  }
  return words;
}

function revive(value, words) {
  if (Array.isArray(value)) return value.map((v) => revive(v, words));
  if (value === null || typeof value !== "object") return value;
  if (Array.isArray(value.$spectrum)) return spectrum(value.$spectrum, words);
  for (const key of Object.keys(value)) value[key] = revive(value[key], words);
  return value;
}

// Kept eigenvalues as differences of the bits of float32 ratios to `scale`; between kept ranks, equal ratios.
function spectrum([start, kept, size, scale], words) {
  const bits = new Uint32Array(kept);
  let sum = 0;
  for (let i = 0; i < kept; i += 1) {
    sum = (sum + words[start + i]) >>> 0;
    bits[i] = sum;
  }
  const ratios = new Float32Array(bits.buffer);
  if (kept === size) return Float64Array.from(ratios, (v) => v * scale);
  const all = new Float64Array(size);
  let rank = 0;
  for (let i = 0; i < kept; i += 1) {
    const step = words[start + kept + i];
    const target = rank + step;
    all[target] = ratios[i] * scale;
    const [a, b] = [all[rank], all[target]];
    for (let k = rank + 1; k < target; k += 1) all[k] = a > 0 ? a * (b / a) ** ((k - rank) / step) : (b * (k - rank)) / step;
    rank = target;
  }
  return all;
}
