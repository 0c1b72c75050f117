// Pictures of a plan: what stays of each layer as strata, cost against size layer by layer, and cost against budget.

import { h, s } from "./dom.js";
import { abbreviate, isNumber, number, percent } from "./format.js";
import { figure, frame, legend, line, rowName } from "./chart.js";
import { OKABE, padded } from "./scale.js";

const LINES = [["plan", "plan", OKABE[0]], ["uniform", "spread evenly", OKABE[1]], ["alpha", "by alpha", OKABE[2]], ["stable_rank", "by stable rank", OKABE[3]]];
const MOST = 48;

export function planFigures(result) {
  const curves = (result.curves || []).filter((c) => Array.isArray(c.points) && c.points.length);
  const points = (result.frontier || []).filter((p) => isNumber(p.size));
  const unit = (result.size && result.size.unit) || "size";
  const found = [];
  if (curves.length) found.push(figure({ title: "What stays of each layer", wide: true, draw: (w) => drawStrata(w, curves, unit), caption: `Each bar is a layer from input to output; the filled part is its share of ${unit} under the plan.` }));
  if (points.length > 1) {
    const lines = LINES.filter(([k]) => points.some((p) => isNumber(p[k])));
    const node = figure({ title: "Budget against performance", wide: true, draw: (w) => drawFrontier(w, points, lines, unit, result), caption: "Added costs of single layers, without the correction for how they combine." });
    node.append(legend(lines.map(([, label, colour]) => [label, colour, label, "stroke"])));
    found.push(node);
  }
  if (curves.length) found.push(h("div", {}, h("h3", { class: "sub" }, "Cost of each setting, layer by layer"), curves.length > MOST ? h("p", { class: "caption" }, `The first ${MOST} of ${curves.length} layers.`) : null, h("div", { class: "grid2" }, curves.slice(0, MOST).map((c) => figure({ title: abbreviate(c.layer, 40), draw: (w) => drawCurve(w, c, curves, unit) })))));
  return found;
}

const full = (curve) => Math.max(...curve.points.map((p) => p.size), 1e-12);
const chosen = (curve) => curve.points.find((p) => p.choice === curve.choice) || curve.points[curve.points.length - 1];

function drawStrata(width, curves, unit) {
  const step = curves.length > 80 ? 9 : 20;
  const chart = frame({ width, height: curves.length * step + 58, margin: { left: Math.min(220, width * 0.36), top: 6 }, label: "Share of each layer that stays", x: { domain: [0, 1], text: (t) => percent(t), label: `share of the layer's ${unit}` }, y: { domain: [curves.length - 0.5, -0.5], none: true } });
  curves.forEach((curve, i) => {
    rowName(chart, i, curve.layer, step);
    const point = chosen(curve);
    const share = Math.min(1, point.size / full(curve));
    const box = { x: chart.x(0), y: chart.y(i) - step / 2 + 1, height: step - 2 };
    chart.marks.append(s("rect", { ...box, width: chart.x(1) - chart.x(0), fill: "var(--none)" }), s("rect", { ...box, width: Math.max(0, chart.x(share) - chart.x(0)), fill: OKABE[0], tip: `${curve.layer}\n${point.choice}: ${percent(share)}, cost ${number(point.cost)}` }));
  });
  return chart.svg;
}

function drawFrontier(width, points, lines, unit, result) {
  const most = Math.max(...points.map((p) => p.size), 1e-12);
  const values = points.flatMap((p) => lines.map(([k]) => p[k])).filter(isNumber);
  const name = (result.performance && result.performance.name) || "performance";
  const chart = frame({ width, height: 300, label: "Performance over budget", x: { domain: [Math.min(...points.map((p) => p.size)) / most, 1], text: (t) => percent(t), label: `share of ${unit}` }, y: { domain: padded(values), label: name } });
  for (const [key, label, colour] of lines) line(chart, points.map((p) => [p.size / most, p[key]]), { stroke: colour, tip: label });
  return chart.svg;
}

function drawCurve(width, curve, all, unit) {
  const costs = all.flatMap((c) => c.points.map((p) => p.cost)).filter(isNumber);
  const chart = frame({ width, height: 170, label: `Cost of settings of ${curve.layer}`, x: { domain: [0, 1], text: (t) => percent(t), label: `share of ${unit}` }, y: { domain: padded(costs), label: "cost" } });
  line(chart, curve.points.map((p) => [p.size / full(curve), p.cost]), { stroke: OKABE[0] });
  for (const p of curve.points) chart.marks.append(s("circle", { class: "dot", cx: chart.x(p.size / full(curve)), cy: chart.y(p.cost), r: p.choice === curve.choice ? 5 : 3, fill: p.choice === curve.choice ? OKABE[3] : OKABE[0], tip: `${p.choice}: ${number(p.cost)}` }));
  return chart.svg;
}
