// Pictures of a plan: what stays of each layer as strata, performance over the budget, and what every setting costs.

import { s } from "./dom.js";
import { abbreviate, isNumber, number, percent } from "./format.js";
import { errorBar, figure, frame, legend, line, rowName } from "./chart.js";
import { OKABE, padded } from "./scale.js";

const LINES = [["plan", "plan", OKABE[0]], ["uniform", "spread evenly", OKABE[1]], ["alpha", "by alpha", OKABE[2]], ["stable_rank", "by stable rank", OKABE[3]]];
const MOST = 120;
const KEPT_BITS = 16;
const LOST = { loss: "loss gained", accuracy: "accuracy lost", perplexity: "log perplexity gained" };

export function planFigures(result) {
  const curves = (result.curves || []).filter((c) => Array.isArray(c.points) && c.points.length);
  const points = (result.frontier || []).filter((p) => isNumber(p.size));
  const axis = axisOf((result.size && result.size.unit) || "size");
  const guess = String(result.quantity || "").startsWith("guess");
  const lost = guess ? "share of the gradient beyond the rank" : LOST[result.performance && result.performance.name] || "performance lost";
  const how = guess ? "a guess, nothing was measured" : "when this layer alone is changed, with its 95 % interval";
  const found = [];
  if (curves.length) found.push(figure({ title: "What stays of each layer", wide: true, draw: (w) => drawStrata(w, curves, axis), caption: `Each bar is a layer from input to output; the filled part is what the plan leaves of it (${axis.label}).` }));
  if (points.length > 1) {
    const lines = LINES.filter(([k]) => points.some((p) => isNumber(p[k])));
    const node = figure({ title: "Budget against performance", wide: true, draw: (w) => drawFrontier(w, points, lines, axis, result), caption: "Lines: costs of single layers added up, without the correction for how they combine. Filled dots: this plan and the even spread, measured." });
    node.append(legend(lines.map(([, label, colour]) => [label, colour, label, "stroke"])));
    found.push(node);
  }
  if (curves.length) {
    const shown = curves.slice(0, MOST);
    const rest = curves.length > MOST ? ` The first ${MOST} of ${curves.length} layers.` : "";
    found.push(figure({ title: "Cost of each setting, layer by layer", wide: true, draw: (w) => drawCurves(w, shown, axis, lost), caption: `Across: ${axis.label}; up: ${lost}${guess ? ": " : " "}${how}. All layers share both axes. The large orange dot is the plan's choice.${rest}` }));
  }
  return found;
}

// How a size is shown: bits as a mean per weight, everything else as a share of the layer.
function axisOf(unit) {
  const bits = unit === "bits";
  return { label: bits ? "bits per weight" : `share of ${unit}`, most: bits ? KEPT_BITS : 1, text: (t) => (bits ? number(t) : percent(t)) };
}

const full = (curve) => Math.max(...curve.points.map((p) => p.size), 1e-12);
const chosen = (curve) => curve.points.find((p) => p.choice === curve.choice) || curve.points[curve.points.length - 1];

function drawStrata(width, curves, axis) {
  const step = curves.length > 80 ? 9 : 20;
  const chart = frame({ width, height: curves.length * step + 58, margin: { left: Math.min(220, width * 0.36), top: 6 }, label: "What stays of each layer", x: { domain: [0, axis.most], text: axis.text, label: axis.label }, y: { domain: [curves.length - 0.5, -0.5], none: true } });
  curves.forEach((curve, i) => {
    rowName(chart, i, curve.layer, step);
    const point = chosen(curve);
    const share = Math.min(1, point.size / full(curve));
    const box = { x: chart.x(0), y: chart.y(i) - step / 2 + 1, height: step - 2 };
    chart.marks.append(s("rect", { ...box, width: chart.x(axis.most) - chart.x(0), fill: "var(--none)" }), s("rect", { class: "kept", ...box, width: Math.max(0, chart.x(share * axis.most) - chart.x(0)), fill: OKABE[0], tip: `${curve.layer}\n${point.choice}: ${percent(share)}, cost ${number(point.cost)}` }));
  });
  return chart.svg;
}

function drawFrontier(width, points, lines, axis, result) {
  const most = Math.max(...points.map((p) => p.size), 1e-12);
  const at = (size) => (size / most) * axis.most;
  const measured = [["plan", result.predicted && result.predicted.measured, OKABE[0]], ["spread evenly", result.uniform && result.uniform.performance, OKABE[1]]].filter(([, v]) => isNumber(v));
  const values = points.flatMap((p) => lines.map(([k]) => p[k])).concat(measured.map(([, v]) => v)).filter(isNumber);
  const name = (result.performance && result.performance.name) || "performance";
  const chart = frame({ width, height: 300, label: "Performance over budget", x: { domain: [at(Math.min(...points.map((p) => p.size))), axis.most], text: axis.text, label: axis.label }, y: { domain: padded(values), label: name } });
  for (const [key, label, colour] of lines) line(chart, points.map((p) => [at(p.size), p[key]]), { stroke: colour, tip: label });
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
    chart.over.append(s("text", { class: "name", x: 44, y: 12, tip: curve.layer }, abbreviate(curve.layer, Math.floor((cell.width - 48) / 6.7))));
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
