// A transformer as a map: one row per role, one column per block, coloured by a metric, the phase or the warnings; and
// the metric over depth, one line per role, with the median and the spread of all roles. A click opens the layer.

import { h, picker, replace, s } from "./dom.js";
import { isNumber, number, plural } from "./format.js";
import { figure, frame, legend, line, rampKey } from "./chart.js";
import { METRICS, metricOf } from "./meanings.js";
import { OKABE, PHASES, colourScale, padded, phaseColour, quantile, sorted } from "./scale.js";

const CELL = 22;
const ORDER = ["attention.qkv", "attention.q", "attention.k", "attention.v", "attention.out", "mlp.in", "mlp.gate", "mlp.out"];

// Layers that stand in a block, by role; a role that occurs twice in a block (experts) keeps the first.
export function cellsOf(layers) {
  const blocks = [...new Set(layers.map((l) => l.block).filter(isNumber))].sort((a, b) => a - b);
  const place = (role) => (ORDER.indexOf(role) + ORDER.length + 1) % (ORDER.length + 1); // those not named come last
  const roles = [...new Set(layers.filter((l) => isNumber(l.block) && l.role).map((l) => l.role))].sort((a, b) => place(a) - place(b));
  const cells = new Map();
  for (const layer of layers) {
    const key = `${layer.role} ${layer.block}`;
    if (isNumber(layer.block) && layer.role && !cells.has(key)) cells.set(key, layer);
  }
  return { blocks, roles, at: (role, block) => cells.get(`${role} ${block}`) };
}

// A map pays where there are several blocks of several kinds of layers.
export function isTransformer(layers) {
  const { blocks, roles } = cellsOf(layers);
  return blocks.length >= 2 && roles.filter((r) => /^(attention|mlp)/.test(r)).length >= 3;
}

export function blockMap(layers, choose) {
  const grid = cellsOf(layers);
  const available = METRICS.filter((m) => layers.some((l) => isNumber(l[m.key])));
  const state = { by: available.some((m) => m.key === "alpha") ? "alpha" : (available[0] || METRICS[0]).key, chosen: null };
  const key = h("div", { class: "key" });
  const explain = () => replace(key, keyOf(layers, state.by));
  const by = picker("Colour the map by", [["phase", "phase"], ["warnings", "warnings"], ...available.map((m) => [m.key, m.name])], state.by, (v) => { state.by = v; explain(); map.redraw(); depth.redraw(); });
  const map = figure({ title: "Blocks and roles", draw: (width) => drawMap(width, layers, grid, state, pick), controls: h("div", { class: "controls" }, by, key),
    caption: "Every weight matrix of every block. A click opens the layer below; arrow keys move." });
  const depth = figure({ title: "Over depth", draw: (width) => drawDepth(width, grid, state, available) });
  depth.append(roleLegend(layers));
  explain();
  function pick(layer) {
    state.chosen = layer.index;
    map.redraw();
    choose(layer.index);
  }
  return h("div", { class: "blockmap" }, map, depth);
}

function keyOf(layers, by) {
  if (by === "phase") return legend(PHASES.filter((p) => layers.some((l) => l.phase === p.key)).map((p) => [p.key, p.colour, p.meaning]));
  if (by === "warnings") return rampKey(colourScale([0, Math.max(1, ...layers.map((l) => (l.warnings || []).length))]), "warnings", (v) => number(v, 2));
  return rampKey(colourScale(layers.map((l) => l[by])), metricOf(by).name, (v) => number(v, 3));
}

function colouring(layers, by) {
  if (by === "phase") return { fill: (l) => phaseColour(l.phase), text: (l) => l.phase || "no phase" };
  if (by === "warnings") {
    const most = Math.max(1, ...layers.map((l) => (l.warnings || []).length));
    const scale = colourScale([0, most]);
    return { fill: (l) => scale((l.warnings || []).length), text: (l) => (l.warnings || []).map((w) => w.code).join(", ") || "no warning" };
  }
  const scale = colourScale(layers.map((l) => l[by]));
  return { fill: (l) => scale(l[by]), text: (l) => `${metricOf(by).name} ${number(l[by])}` };
}

function drawMap(width, layers, grid, state, pick) {
  const left = 118;
  const { blocks, roles } = grid;
  const cell = Math.max(6, Math.min(46, (width - left - 12) / blocks.length));
  const height = roles.length * CELL + 40;
  const { fill, text } = colouring(layers, state.by);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart map", role: "grid", "aria-label": `${plural(roles.length, "role")} of ${plural(blocks.length, "block")}; the table below holds all numbers` });
  const every = Math.ceil(26 / cell);
  blocks.forEach((block, k) => {
    if (k % every === 0) svg.append(s("text", { class: "tick", x: left + (k + 0.5) * cell, y: height - 22, "text-anchor": "middle" }, String(block)));
  });
  svg.append(s("text", { class: "axis", x: left + (blocks.length * cell) / 2, y: height - 6, "text-anchor": "middle" }, "block"));
  roles.forEach((role, i) => {
    const line = s("g", { role: "row" });
    line.append(s("text", { class: "name", x: left - 8, y: i * CELL + CELL / 2 + 4, "text-anchor": "end", role: "rowheader" }, role));
    blocks.forEach((block, k) => {
      const layer = grid.at(role, block);
      if (!layer) return;
      const on = layer.index === state.chosen;
      const told = `${layer.name}\n${text(layer)}`;
      line.append(s("rect", { class: on ? "cell on" : "cell", role: "gridcell", tabindex: on || (state.chosen === null && i === 0 && k === 0) ? "0" : "-1", "data-role": role, "data-block": String(block), "aria-label": told.replace("\n", ", "), x: left + k * cell + 0.5, y: i * CELL + 1.5, width: Math.max(2, cell - 1), height: CELL - 3, fill: fill(layer) || "var(--none)", tip: told,
        on: { click: () => pick(layer), keydown: (e) => move(e, svg, grid, role, block, layer, pick) } }));
    });
    svg.append(line);
  });
  return svg;
}

// Arrow keys go to the neighbour that there is; Enter and space open the layer.
function move(event, svg, grid, role, block, layer, pick) {
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    pick(layer);
    return;
  }
  const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  if (!step) return;
  event.preventDefault();
  let i = grid.roles.indexOf(role) + step[0];
  let k = grid.blocks.indexOf(block) + step[1];
  while (i >= 0 && k >= 0 && i < grid.roles.length && k < grid.blocks.length) {
    const next = svg.querySelector(`[data-role="${grid.roles[i]}"][data-block="${grid.blocks[k]}"]`);
    if (next) {
      svg.querySelectorAll("[tabindex='0']").forEach((n) => n.setAttribute("tabindex", "-1"));
      next.setAttribute("tabindex", "0");
      next.focus();
      return;
    }
    i += step[0];
    k += step[1];
  }
}

function drawDepth(width, grid, state, available) {
  const metric = metricOf(state.by) || available[0] || METRICS[0];
  const { blocks, roles } = grid;
  const value = (role, block) => (grid.at(role, block) || {})[metric.key];
  const all = roles.flatMap((r) => blocks.map((b) => value(r, b))).filter(isNumber);
  if (!all.length) return s("svg", { viewBox: `0 0 ${width} 20` }, s("text", { x: 8, y: 14, class: "name" }, `${metric.name}: no values`));
  const chart = frame({ width, height: 260, label: `${metric.name} over depth, one line per role`, x: { domain: [blocks[0], blocks[blocks.length - 1]], ticks: blocks.filter((_, k) => k % Math.ceil(blocks.length / 10) === 0), label: "block" }, y: { domain: padded(all), label: metric.name } });
  const at = (block, q) => {
    const own = sorted(roles.map((r) => value(r, block)));
    return own.length ? quantile(own, q) : NaN;
  };
  const band = [...blocks.map((b) => [b, at(b, 0.75)]), ...[...blocks].reverse().map((b) => [b, at(b, 0.25)])].filter(([, v]) => Number.isFinite(v));
  chart.marks.append(s("path", { class: "band", fill: "var(--soft)", opacity: 0.18, d: `M${band.map(([x, y]) => `${chart.x(x).toFixed(1)} ${chart.y(y).toFixed(1)}`).join("L")}Z` }));
  roles.forEach((role, i) => line(chart, blocks.map((b) => [b, isNumber(value(role, b)) ? value(role, b) : NaN]), { stroke: OKABE[i % OKABE.length], "stroke-dasharray": i >= OKABE.length ? "5 3" : null, tip: role }));
  line(chart, blocks.map((b) => [b, at(b, 0.5)]), { class: "line median", stroke: "var(--ink)", "stroke-width": 2.4, tip: "median over roles" });
  return chart.svg;
}

function roleLegend(layers) {
  return legend([...cellsOf(layers).roles.map((r, i) => [r, OKABE[i % OKABE.length], r]), ["median, and half of the roles", "var(--ink)", "line: the median over roles; band: the middle half"]]);
}
