// The overview: one card per result with its sentence, its number and a small picture, linking to its section.

import { h, s, section } from "./dom.js";
import { inOrder, isNumber, plural, sentence } from "./format.js";
import { hatched } from "./chart.js";
import { isTransformer, scaleOf, scanChoices, cellsOf } from "./blockmap.js";
import { headGrid } from "./heads.js";
import { treeOf } from "./integrity.js";
import { influenceImage } from "./curvature.js";
import { shareKept } from "./plan.js";
import { isHead } from "./layers.js";
import { CLASSES, OKABE, cividis, extent, ordered, stateColour } from "./scale.js";

const WIDTH = 300;
const HEIGHT = 76;
const GOOD = "var(--blue)";
const BAD = "var(--red)";

export function overview(title, parts, remark) {
  const body = section("overview", title, `${plural(parts.length, "result")}. Each card says what was found and leads to its section.`);
  body.dataset.title = "Overview";
  if (remark) body.append(remark);
  body.append(h("div", { class: "briefs" }, parts.map(card)));
  return body;
}

function card({ result, verb, body }) {
  const lines = Array.isArray(result.summary) && verb !== "heads" ? result.summary : [];
  const [answer, detail] = verb === "apply" && lines.length > 1 ? [lines[1], lines[0]] : lines; // what was measured, then where it is
  const text = answer || body.querySelector(".lead").textContent;
  let picture = null;
  try {
    picture = THUMBS[verb] ? THUMBS[verb](result) : null;
  } catch {
    picture = null; // a field is missing: the sentence remains
  }
  const mood = MOODS[verb] ? MOODS[verb](result) : "";
  return h("a", { class: mood ? `card brief ${mood}` : "card brief", href: `#${body.id}`, "data-verb": verb },
    h("span", { class: "eyebrow" }, body.dataset.title), h("span", { class: "answer" }, sentence(text)), detail ? h("span", { class: "caption" }, sentence(detail)) : null,
    picture, (result.warnings || []).length ? h("span", { class: "caption" }, `⚑ ${plural(result.warnings.length, "warning")}`) : null);
}

// Good and bad news by fields of the result, never by its words.
const MOODS = {
  check: (r) => (r.passed ? "good" : "bad"),
  scan: (r) => ((r.layers || []).some((l) => l.state === "broken") ? "caution" : ""),
  plan: (r) => (["better", "smaller"].includes(r.outcome) ? "good" : ["not-better", "not-smaller"].includes(r.outcome) ? "caution" : ""),
  llc: (r) => (isNumber(r.estimate) ? "" : "caution"),
  reassemble: (r) => (r.exact ? "good" : "caution"),
};

function canvas(...marks) {
  return s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "thumb", "aria-hidden": "true" }, marks);
}

function bars(values, colour) {
  const most = Math.max(...values.filter(isNumber), 1e-300);
  const step = WIDTH / values.length;
  return canvas(s("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }), values.map((v, i) => (isNumber(v) ? s("rect", { x: i * step + step * 0.1, width: Math.max(0.8, step * 0.8), y: HEIGHT - 1 - Math.max(1, (HEIGHT - 4) * (v / most)), height: Math.max(1, (HEIGHT - 4) * (v / most)), fill: typeof colour === "function" ? colour(i) : colour || "var(--used)" }) : null)));
}

// One bar in parts, from the top; several below each other.
function stacks(rows) {
  const step = Math.min(24, HEIGHT / rows.length);
  return canvas(rows.map((parts, i) => {
    const total = parts.reduce((sum, [size]) => sum + (size || 0), 0) || 1;
    let x = 0;
    return parts.map(([size, fill]) => {
      const width = (WIDTH * (size || 0)) / total;
      x += width;
      return s("rect", { x: x - width, width: Math.max(0, width - 0.6), y: i * step + (HEIGHT - rows.length * step) / 2, height: step - 3, fill });
    });
  }));
}

// Lines on common axes; `log` where all values are positive.
function lines(series, log, colour = (i) => ordered(i, series.length)) {
  const xs = extent(series.flatMap((p) => p.map(([x]) => x))) || [0, 1];
  const map = (v) => (log ? Math.log10(Math.max(v, 1e-300)) : v);
  const ys = extent(series.flatMap((p) => p.map(([, y]) => (isNumber(y) && (!log || y > 0) ? map(y) : NaN)))) || [0, 1];
  const at = ([x, y]) => `${(2 + ((x - xs[0]) / (xs[1] - xs[0] || 1)) * (WIDTH - 4)).toFixed(1)} ${(HEIGHT - 4 - ((map(y) - ys[0]) / (ys[1] - ys[0] || 1)) * (HEIGHT - 8)).toFixed(1)}`;
  return canvas(series.map((points, i) => s("path", { class: series.length > 12 ? "line thin" : "line", stroke: colour(i), d: points.filter(([, y]) => isNumber(y) && (!log || y > 0)).map((p, k) => `${k ? "L" : "M"}${at(p)}`).join("") })));
}

function cells(rows, columns, fill, height = HEIGHT) {
  const [w, step] = [WIDTH / columns, Math.min(height / rows, 18)];
  return Array.from({ length: rows * columns }, (_, k) => {
    const colour = fill(Math.floor(k / columns), k % columns);
    return colour ? s("rect", { x: (k % columns) * w, y: Math.floor(k / columns) * step, width: Math.max(0.6, w - 1), height: Math.max(0.6, step - 1), fill: colour }) : null;
  });
}

function scanThumb(result) {
  const layers = (result.layers || []).filter((l) => !isHead(l));
  const choices = scanChoices(layers);
  const what = choices.find((c) => c.key === "stable_rank");
  if (!layers.length) return null;
  if (!isTransformer(layers) || !what) return stacks([layers.map((l) => [l.parameters, l.state ? stateColour(l.state) : "var(--used)"])]);
  const grid = cellsOf(layers);
  const scale = scaleOf(layers, what);
  const svg = canvas();
  const stripes = hatched(svg);
  svg.append(...cells(grid.roles.length, grid.blocks.length, (i, k) => {
    const layer = grid.at(grid.roles[i], grid.blocks[k])[0];
    return layer ? (layer.state === "broken" || what.doubt(layer) ? stripes : scale(what.of(layer))) : null;
  }).filter(Boolean));
  return svg;
}

const last = (v) => (Array.isArray(v) ? v[v.length - 1] : v);

const THUMBS = {
  scan: scanThumb,
  heads: headGrid,
  inspect: (r) => stacks([Object.values((r.totals || {}).roles || {}).map((v, i) => [v.parameters, OKABE[i % OKABE.length]])]),
  check: (r) => {
    const total = Math.min(r.tensors || 0, 400);
    const hurt = new Set((r.found || []).map((f) => f.layer)).size;
    const columns = Math.max(24, Math.ceil(Math.sqrt(total * 4)));
    return total ? canvas(cells(Math.ceil(total / columns), columns, (i, k) => (i * columns + k >= total ? null : i * columns + k < hurt ? BAD : GOOD))) : null;
  },
  compare: (r) => (r.series && (r.series.layers || []).length ? lines(r.series.layers.map((l) => (l.stable_rank || []).map((v, k) => [k, v])), true) : bars((r.layers || []).map((l) => last(l.relative_change)))),
  lineage: (r) => treeOf(r, WIDTH),
  track: (r) => {
    const rows = (r.series || []).filter((q) => q.layer === null && q.what === "loss");
    const mine = rows.length ? rows : (r.series || []).filter((q) => q.what === "stable_rank");
    return lines(mine.map((q) => (q.values || []).map((v, k) => [k, v])), true, rows.length ? () => GOOD : undefined);
  },
  audit: (r) => {
    const columns = inOrder([...new Set((r.layers || []).map((c) => c.layer))]);
    const rows = [...new Set((r.layers || []).map((c) => `${c.intervention} ${c.setting ?? ""}`))];
    const at = new Map((r.layers || []).map((c) => [`${c.layer} ${c.intervention} ${c.setting ?? ""}`, c]));
    return canvas(cells(rows.length, columns.length, (i, k) => CLASSES[(at.get(`${columns[k]} ${rows[i]}`) || {}).class] || "var(--none)"));
  },
  study: (r) => stacks([[[r.done, GOOD], [r.failed, BAD], [Math.max(0, (r.units || 0) - (r.done || 0) - (r.failed || 0)), "var(--none)"]]]),
  plan: (r) => bars((r.curves || []).map(shareKept), GOOD),
  apply: (r) => stacks([[[r.parameters_before, "var(--none)"]], [[r.parameters_after, GOOD], [r.parameters_before - r.parameters_after, "transparent"]]]),
  degeneracy: (r) => stacks((r.layers || []).slice(0, 12).map((l) => [[(l.parameters || 0) - (l.free || 0), "var(--used)"], [l.free, "var(--free)"]])),
  llc: (r) => lines((r.traces || []).slice(0, 6).map((t) => t.map((v, k) => [k, v])), false, (i) => OKABE[i]),
  "llc-parts": (r) => bars((r.parts || []).map((q) => q.estimate)),
  scales: (r) => lines([(r.scales || []).map((q) => [Math.log10(q.epsilon), q.effective])], false, () => GOOD),
  curvature: (r) => bars((r.top || []).map((v) => Math.abs(v)), (i) => (r.top[i] < 0 ? BAD : GOOD)),
  influence: (r) => canvas(s("image", { class: "pixels", href: influenceImage(r.values), x: (WIDTH - HEIGHT) / 2, width: HEIGHT, height: HEIGHT, preserveAspectRatio: "none" })),
  basis: (r) => lines((r.layers || []).filter((l) => (l.eigenvalues || []).length > 1).map((l) => Array.from(l.eigenvalues).sort((a, b) => b - a).filter((v) => v > 1e-9 * Math.max(...l.eigenvalues)).map((v, k) => [Math.log10(k + 1), v])), true),
  reassemble: (r) => {
    const stage = last((r.progression || []).filter((p) => Array.isArray(p.order)));
    const first = (r.progression || []).find((p) => Array.isArray(p.order));
    return stage ? canvas([first, stage].map((p, i) => p.order.map((place, k) => s("rect", { x: (k * WIDTH) / p.order.length, width: Math.max(0.6, WIDTH / p.order.length - 1), y: i * 40, height: 34, fill: cividis(place / Math.max(1, p.order.length - 1)) })))) : null;
  },
};
