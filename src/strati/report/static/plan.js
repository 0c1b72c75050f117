// A plan and what became of it: what stays of each layer, performance over the budget, what every setting costs.

import { fold, h, note, s, section, stat } from "./dom.js";
import { basename, count, interval, isNumber, number, percent, plural, sentence, shortName } from "./format.js";
import { errorBar, figure, frame, legend, line, rowFrame } from "./chart.js";
import { OKABE, padded } from "./scale.js";
import { dataTable, layerColumn, textColumn } from "./table.js";

const LINES = [["plan", "plan", OKABE[0]], ["uniform", "uniform allocation", OKABE[1]], ["alpha", "by alpha", OKABE[2]], ["stable_rank", "by stable rank", OKABE[3]]];
const MOST = 120;
const KEPT_BITS = 16;
const LOST = { loss: "loss gained", accuracy: "accuracy lost", perplexity: "log perplexity gained" };
const MOODS = { better: "good", smaller: "good", "not-better": "bad", "not-smaller": "bad" };

const rangeOf = (v) => (v && isNumber(v.low) && isNumber(v.high) ? `95 % ${interval([v.low, v.high])}` : "");
const value = (v) => (v && typeof v === "object" ? v.performance : v);

export function planSection(result, id) {
  const layers = result.layers || [];
  const text = (v) => (v === null || v === undefined ? "–" : typeof v === "object" ? JSON.stringify(v) : String(v));
  const about = result.performance || {};
  const name = about.name || "performance";
  const unit = (result.size && result.size.unit) || "size";
  const even = result.uniform && (result.uniform.predicted || result.uniform);
  const changed = layers.filter((l) => l.choice !== "keep");
  const kept = layers.length - changed.length;
  return section(id, "Compression plan", `${sentence(result.action || "change")} within ${text(result.budget)}: ${plural(changed.length, "layer")} of ${layers.length} change.`,
    h("div", { class: "stats" }, isNumber(about.intact) ? stat(`${name}, intact`, number(about.intact)) : null,
      stat(`${name}, predicted`, number(value(result.predicted)), rangeOf(result.predicted)),
      result.predicted && isNumber(result.predicted.measured) ? stat(`${name}, measured`, number(result.predicted.measured)) : null,
      even ? stat("uniform allocation, same budget", number(value(even)), rangeOf(even)) : null,
      result.size && isNumber(result.size.planned) && result.size.full ? stat(unit === "bits" ? "bits per weight" : `${unit} left`, unit === "bits" ? number(result.size.planned / result.size.full) : percent(result.size.planned / result.size.full)) : null),
    result.verdict ? note(MOODS[result.outcome] ?? "", sentence(String(result.verdict))) : null,
    planFigures(result),
    dataTable({ title: "Choice for every layer", rows: [...changed, ...layers.filter((l) => l.choice === "keep")], columns: [
      layerColumn((l) => l.name), textColumn("choice"), { label: `saves (${unit})`, value: (l) => l.saves },
      { label: `costs alone (${LOST[name] || "performance lost"})`, value: (l) => l.cost, show: (l) => (l.choice === "keep" ? "–" : number(l.cost, 2)) },
      { label: "95 % interval", value: (l) => (l.choice === "keep" ? null : (l.cost_ci || [])[0]), csv: (l) => l.cost_ci, show: (l) => (l.choice === "keep" ? "–" : interval(l.cost_ci)) }] }),
    kept ? h("p", { class: "caption" }, `${plural(kept, "layer")} kept as ${kept === 1 ? "it is" : "they are"}.`) : null,
    result.additivity && isNumber(result.additivity.measured) ? h("p", { class: "caption" }, `Costs of single layers were checked on ${plural(result.additivity.n, "combination")}: mean ${name} ${number(result.additivity.measured)} measured, ${number(result.additivity.predicted)} by adding costs.`) : null);
}

export function applySection(result, id) {
  const share = (after, before) => (isNumber(after) && isNumber(before) && before > 0 ? `${percent(after / before)} of before` : "");
  const written = Array.isArray(result.written) ? result.written : [result.written].filter((w) => w);
  const name = (result.performance || {}).name || "performance";
  return section(id, "Plan applied", `Written: ${written.map((w) => basename(String(w))).join(", ") || "nothing"}.`,
    h("div", { class: "stats" }, stat("parameters", count(result.parameters_after), share(result.parameters_after, result.parameters_before)), stat("bytes", count(result.bytes_after), share(result.bytes_after, result.bytes_before)),
      isNumber((result.performance || {}).intact) ? stat(`${name}, intact`, number(result.performance.intact)) : null,
      stat(`${name}, predicted`, number(value(result.predicted)), rangeOf(result.predicted)), stat(`${name}, measured`, number(value(result.measured)), rangeOf(result.measured)),
      isNumber(result.seconds_after) ? stat("forward pass", `${number(1000 * result.seconds_after)} ms`, `before: ${number(1000 * result.seconds_before)} ms`) : null));
}

function planFigures(result) {
  const curves = (result.curves || []).filter((c) => Array.isArray(c.points) && c.points.length);
  const points = (result.frontier || []).filter((p) => isNumber(p.size));
  const axis = axisOf((result.size && result.size.unit) || "size");
  const guess = String(result.quantity || "").startsWith("guess");
  const lost = guess ? "share of the gradient beyond the rank" : LOST[result.performance && result.performance.name] || "performance lost";
  const how = guess ? "a guess, nothing was measured" : "when this layer alone is changed, with its 95 % interval";
  const pictures = [];
  if (curves.length) pictures.push(figure({ title: "What stays of each layer", wide: true, draw: (w) => drawStrata(w, curves, axis), caption: `Each bar is a layer; the filled part is what the plan leaves of it (${axis.label}).` }));
  if (points.length > 1) {
    const lines = LINES.filter(([k]) => points.some((p) => isNumber(p[k])));
    const node = figure({ title: "Budget against performance", wide: true, draw: (w) => drawFrontier(w, points, lines, axis, result), caption: "Lines: costs of single layers added up; what lies beyond chance is not drawn. Large dots: this plan and uniform allocation, measured." });
    node.append(legend(lines.map(([, label, colour]) => [label, colour, label, "stroke"])));
    pictures.push(node);
  }
  const both = h("div", { class: "grid2" }, pictures);
  if (!curves.length) return both;
  const rest = curves.length > MOST ? ` The first ${MOST} of ${curves.length} layers.` : "";
  const panels = figure({ title: "Cost of each setting, layer by layer", wide: true, draw: (w) => drawCurves(w, curves.slice(0, MOST), axis, lost), caption: `Across: ${axis.label}; up: ${lost}${guess ? ": " : " "}${how}. All layers share both axes. The large orange dot is the plan's choice.${rest}` });
  return [both, curves.length > 12 ? fold("Cost of each setting, layer by layer", panels) : panels];
}

// How a size is shown: bits as a mean per weight, everything else as a share of the layer.
function axisOf(unit) {
  const bits = unit === "bits";
  return { label: bits ? "bits per weight" : `share of ${unit}`, most: bits ? KEPT_BITS : 1, text: (t) => (bits ? number(t) : percent(t)) };
}

const full = (curve) => Math.max(...curve.points.map((p) => p.size), 1e-12);
// What a plan leaves of a layer, as a share.
export const shareKept = (curve) => Math.min(1, chosen(curve).size / full(curve));
const chosen = (curve) => curve.points.find((p) => p.choice === curve.choice) || curve.points[curve.points.length - 1];

const barStep = (curves) => (curves.length > 80 ? 9 : curves.length > 20 ? 15 : 24);

function drawStrata(width, curves, axis) {
  const chart = rowFrame({ width, names: curves.map((c) => c.layer), step: barStep(curves), least: 300, label: "What stays of each layer", x: { domain: [0, axis.most], text: axis.text, label: axis.label } });
  curves.forEach((curve, i) => {
    const point = chosen(curve);
    const share = shareKept(curve);
    const height = Math.max(1, Math.min(chart.thick - 2, 28));
    const box = { x: chart.x(0), y: chart.y(i) - height / 2, height };
    chart.marks.append(s("rect", { ...box, width: chart.x(axis.most) - chart.x(0), fill: "var(--none)" }), s("rect", { class: "kept", ...box, width: Math.max(0, chart.x(share * axis.most) - chart.x(0)), fill: OKABE[0], tip: `${curve.layer}\n${point.choice}: ${percent(share)}, cost ${number(point.cost)}` }));
  });
  return chart.svg;
}

function drawFrontier(width, points, lines, axis, result) {
  const most = Math.max(...points.map((p) => p.size), 1e-12);
  const at = (size) => (size / most) * axis.most;
  const about = result.performance || {};
  const higher = about.higher_is_better !== false;
  const measured = [["plan", result.predicted && result.predicted.measured, OKABE[0]], ["uniform allocation", result.uniform && result.uniform.performance, OKABE[1]]].filter(([, v]) => isNumber(v));
  // Added costs say nothing beyond chance: what lies there is left out.
  const inside = (v) => isNumber(v) && (!isNumber(about.chance) || (higher ? v >= about.chance : v <= about.chance));
  const values = points.flatMap((p) => lines.map(([k]) => p[k])).filter(inside).concat(measured.map(([, v]) => v), isNumber(about.intact) ? [about.intact] : []);
  const drawn = points.filter((p) => lines.some(([k]) => inside(p[k])));
  const log = !higher && values.every((v) => v > 0) && Math.max(...values) / Math.min(...values) > 5;
  const sizes = (drawn.length ? drawn : points).map((p) => p.size);
  const chart = frame({ width, height: width > 420 ? Math.max(300, Math.min(600, (result.curves || []).length * barStep(result.curves || []))) : 300, label: "Performance over budget", x: { domain: [at(Math.min(...sizes)), axis.most], text: axis.text, label: axis.label }, y: { domain: padded(values, 0.06, log), log, label: about.name || "performance" } });
  if (isNumber(about.intact)) chart.over.append(s("line", { class: "rule", x1: chart.left, x2: chart.right, y1: chart.y(about.intact), y2: chart.y(about.intact) }), s("text", { class: "rule-text", x: chart.left + 4, y: chart.y(about.intact) + (higher ? 14 : -5) }, "intact"));
  for (const [key, label, colour] of lines) line(chart, points.map((p) => [at(p.size), inside(p[key]) ? p[key] : NaN]), { stroke: colour, tip: label });
  const size = result.size && result.size.planned;
  if (isNumber(size)) for (const [label, v, colour] of measured) chart.marks.append(s("circle", { class: "dot measured", cx: chart.x(at(size)), cy: chart.y(v), r: 5.5, fill: colour, tip: `${label}, measured: ${number(v)}` }));
  return chart.svg;
}

// Small multiples in one picture: every layer the same axes, costs on a logarithmic one where they span decades.
function drawCurves(width, curves, axis, lost) {
  const columns = Math.max(1, Math.min(6, Math.floor(width / 160)));
  const cell = { width: Math.floor(width / columns), height: 128 };
  const costs = curves.flatMap((c) => c.points.map((p) => p.cost)).filter(isNumber);
  const high = Math.max(...costs, 1e-12);
  const small = costs.filter((c) => c > 0).sort((a, b) => a - b);
  const log = small.length > 3 && high / small[Math.floor(small.length / 4)] > 30;
  const floor = log ? Math.max(high * 1e-4, small[0] / 2) : 0;
  const y = log ? { domain: [floor, high * 1.3], log: true } : { domain: padded([0, ...costs]) };
  const place = (v) => (log ? Math.max(v, floor) : v);
  const svg = s("svg", { viewBox: `0 0 ${width} ${Math.ceil(curves.length / columns) * cell.height}`, class: "chart", role: "img", "aria-label": `${lost} over settings, one panel per layer` });
  curves.forEach((curve, i) => {
    const chart = frame({ ...cell, margin: { left: 44, right: 10, top: 20, bottom: 22 }, label: `Cost of settings of ${curve.layer}`, x: { domain: [0, axis.most], text: axis.text, ticks: [0, axis.most / 2, axis.most] }, y });
    chart.over.append(s("text", { class: "name", x: 44, y: 12, tip: curve.layer }, shortName(curve.layer, Math.floor((cell.width - 48) / 6.7))));
    const spots = curve.points.map((p) => ({ ...p, x: (p.size / full(curve)) * axis.most })).filter((p) => isNumber(p.cost));
    line(chart, spots.map((p) => [p.x, place(p.cost)]), { stroke: OKABE[0] });
    for (const p of spots) {
      if (p.stderr > 0) errorBar(chart, p.x, place(p.cost - 1.96 * p.stderr), place(p.cost + 1.96 * p.stderr), { stroke: OKABE[0] });
      const taken = p.choice === curve.choice;
      chart.marks.append(s("circle", { class: taken ? "dot chosen" : "dot", cx: chart.x(p.x), cy: chart.y(place(p.cost)), r: taken ? 5 : 2.6, fill: taken ? OKABE[3] : OKABE[0], tip: `${curve.layer}\n${p.choice}: ${number(p.cost)}` }));
    }
    for (const [key, value] of Object.entries({ x: (i % columns) * cell.width, y: Math.floor(i / columns) * cell.height, ...cell })) chart.svg.setAttribute(key, value);
    svg.append(chart.svg);
  });
  return svg;
}
