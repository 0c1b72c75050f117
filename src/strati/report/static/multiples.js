// Small multiples: the spectra of all layers of a role on the same axes, as a grid of panels or as ridgelines over depth.

import { choice, h, picker, s } from "./dom.js";
import { isNumber, plural, shortName } from "./format.js";
import { figure, frame, hold } from "./chart.js";
import { histogram } from "./refit.js";
import { ordered, padded, phaseColour, stateColour, stateName } from "./scale.js";

const PANEL = { width: 150, height: 92 };
const BINS = 20;
const OVERLAP = 2.4; // how many rows the highest ridge reaches

// Nothing where no role has two layers with eigenvalues.
export function multiples(layers, choose) {
  const held = layers.filter((l) => l.eigenvalues && l.eigenvalues.length > 1 && l.eigenvalues.some((v) => v > 0));
  const roles = [...new Set(held.map((l) => l.role))].filter((role) => held.filter((l) => l.role === role).length > 1);
  if (!roles.length) return null;
  const state = { role: roles[0], form: "grid" };
  const mine = () => held.filter((l) => l.role === state.role);
  const picture = figure({ title: "Spectra of a role", draw: (width) => (state.form === "grid" ? grid(width, mine(), choose) : ridges(width, mine(), choose)),
    controls: h("div", { class: "controls small" }, picker("Role shown", roles, state.role, (v) => { state.role = v; picture.redraw(); }),
      choice("Form", [["grid", "grid"], ["ridges", "ridgelines over depth"]], state.form, (v) => { state.form = v; picture.redraw(); })),
    caption: "Density of the eigenvalues per decade, all layers on the same axes, coloured by state. A click opens the layer." });
  picture.classList.add("multiples");
  return picture;
}

function curvesOf(layers) {
  const spectra = layers.map((l) => Float64Array.from(l.eigenvalues).filter((v) => v > 0));
  // From the 2nd percentile on: a few null directions would stretch the axis of all panels over many decades.
  const low = Math.min(...spectra.map((e) => [...e].sort((a, b) => a - b)[Math.floor(e.length * 0.02)]));
  const high = Math.max(...spectra.map((e) => e.reduce((m, v) => Math.max(m, v), 0)));
  const domain = padded([low, high], 0.02, true);
  const curves = spectra.map((e) => histogram(e, domain, BINS, true));
  return { domain, curves, peak: Math.max(...curves.flat().map((b) => b.density), 1e-12) };
}

const nameOf = (layer) => (isNumber(layer.block) ? `block ${layer.block}` : shortName(layer.name, 22));
const points = (bars) => bars.map((b) => [Math.sqrt(b.from * b.to), b.density]);

// A frame without axes of its own keeps the numbers to copy.
function sheet(width, height, label) {
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart small", role: "group", "aria-label": label });
  svg.held = { x: "eigenvalue", y: "density per decade", rows: [] };
  return svg;
}

function button(node, layer, choose) {
  const told = `${layer.name}\n${layer.state ? stateName(layer.state) : layer.phase || "no phase"}; opens the layer`;
  node.setAttribute("role", "button");
  node.setAttribute("tabindex", "0");
  node.setAttribute("aria-label", told.replace("\n", ", "));
  node.dataset.tip = told;
  node.addEventListener("click", () => choose(layer));
  node.addEventListener("keydown", (e) => {
    if (e.key !== "Enter" && e.key !== " ") return;
    e.preventDefault();
    choose(layer);
  });
  return node;
}

function grid(width, layers, choose) {
  const { domain, curves, peak } = curvesOf(layers);
  const columns = Math.max(1, Math.min(layers.length, Math.floor(width / PANEL.width)));
  const panel = { width: width / columns, height: PANEL.height };
  const rows = Math.ceil(layers.length / columns);
  const svg = sheet(width, rows * panel.height + 18, `Spectra of ${plural(layers.length, "layer")} of the role ${layers[0].role}, on the same axes`);
  layers.forEach((layer, i) => {
    const bottom = i >= layers.length - columns; // the last panel of a column shows the axis
    const part = frame({ width: panel.width, height: panel.height + (bottom ? 18 : 0), margin: { left: 8, right: 8, top: 18, bottom: bottom ? 22 : 4 }, label: layer.name,
      x: { domain, log: true, none: !bottom }, y: { domain: [0, peak * 1.05], none: true } });
    part.marks.append(s("path", { class: "area", fill: stateColour(layer.state) || phaseColour(layer.phase) || "var(--soft)", d: area(part, points(curves[i]), part.bottom) }));
    part.over.append(s("text", { class: "name", x: part.left, y: 12 }, nameOf(layer)));
    hold({ svg }, layer.name, points(curves[i]));
    const group = s("g", { class: "panel", transform: `translate(${(i % columns) * panel.width} ${Math.floor(i / columns) * panel.height})` },
      s("rect", { class: "ground", x: 2, y: 0, width: panel.width - 4, height: panel.height - 3, rx: 5 }), ...part.svg.childNodes);
    svg.append(button(group, layer, choose));
  });
  return svg;
}

function ridges(width, layers, choose) {
  const { domain, curves, peak } = curvesOf(layers);
  const step = layers.length > 40 ? 13 : layers.length > 16 ? 20 : 30;
  const top = OVERLAP * step;
  const chart = frame({ width, height: top + layers.length * step + 54, margin: { left: Math.min(150, width * 0.3), top }, label: "", x: { domain, log: true, label: "eigenvalue λ" }, y: { domain: [layers.length, 0], none: true } });
  chart.svg.setAttribute("role", "group");
  chart.svg.setAttribute("aria-label", `Spectra of ${plural(layers.length, "layer")} of the role ${layers[0].role}, one ridge per layer from the first to the last`);
  chart.svg.held = { x: "eigenvalue", y: "density per decade", rows: [] };
  layers.forEach((layer, i) => {
    const base = chart.y(i + 1);
    const ridge = { x: chart.x, y: (v) => base - (v / peak) * OVERLAP * step };
    hold(chart, layer.name, points(curves[i]));
    const shape = s("path", { class: "ridge", fill: stateColour(layer.state) || phaseColour(layer.phase) || ordered(i, layers.length), d: area(ridge, points(curves[i]), base) });
    const name = layers.length > 40 && i % 4 ? null : s("text", { class: "name", x: chart.left - 8, y: base, dy: "-0.2em", "text-anchor": "end" }, nameOf(layer));
    chart.over.append(button(s("g", { class: "panel" }, shape, name), layer, choose));
  });
  return chart.svg;
}

function area(chart, list, base) {
  const shape = list.map(([x, y]) => `${chart.x(x).toFixed(1)} ${chart.y(y).toFixed(1)}`);
  return `M${chart.x(list[0][0]).toFixed(1)} ${base.toFixed(1)}L${shape.join("L")}L${chart.x(list[list.length - 1][0]).toFixed(1)} ${base.toFixed(1)}Z`;
}
