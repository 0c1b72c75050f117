// A transformer as a map: one row per role, one column per block, coloured by whatever is chosen; and the same over
// depth, one line per role, with the median and the spread of all roles. A click opens the layer. Scans, comparisons and
// runs over time share it: they differ in what there is to choose.

import { h, picker, replace, s } from "./dom.js";
import { isNumber, number, plural } from "./format.js";
import { figure, frame, hold, legend, line, rampKey } from "./chart.js";
import { METRICS } from "./meanings.js";
import { OKABE, PHASES, colourScale, differenceScale, padded, phaseColour, quantile, sorted } from "./scale.js";

const CELL = 22;
const ORDER = ["attention.qkv", "attention.q", "attention.k", "attention.v", "attention.out", "mlp.in", "mlp.gate", "mlp.out"];

// Layers that stand in a block, by role; a cell holds several where a role occurs more than once in a block (experts).
export function cellsOf(layers) {
  const blocks = [...new Set(layers.map((l) => l.block).filter(isNumber))].sort((a, b) => a - b);
  const place = (role) => (ORDER.indexOf(role) + ORDER.length + 1) % (ORDER.length + 1); // those not named come last
  const roles = [...new Set(layers.filter((l) => isNumber(l.block) && l.role).map((l) => l.role))].sort((a, b) => place(a) - place(b));
  const cells = new Map();
  for (const layer of layers) {
    if (!isNumber(layer.block) || !layer.role) continue;
    const key = `${layer.role} ${layer.block}`;
    cells.set(key, [...(cells.get(key) || []), layer]);
  }
  return { blocks, roles, at: (role, block) => cells.get(`${role} ${block}`) || [] };
}

// A map pays where there are several blocks of several kinds of layers.
export function isTransformer(layers) {
  const { blocks, roles } = cellsOf(layers);
  return blocks.length >= 2 && roles.filter((r) => /^(attention|mlp)/.test(r)).length >= 3;
}

// A choice: {key, name, of: layer -> number, difference: true for one that may be below zero}, or with `category` a
// {of: layer -> text, colour: text -> colour, meaning: text -> text}.
const middle = (values) => (values.some(isNumber) ? quantile(sorted(values), 0.5) : null);
const valueOf = (cell, what) => middle(cell.map(what.of));

export function scanChoices(layers) {
  const count = (l) => (l.warnings || []).length;
  const codes = [...new Set(layers.flatMap((l) => (l.warnings || []).map((w) => w.code)))].sort();
  const meaning = Object.fromEntries(PHASES.map((p) => [p.key, p.meaning]));
  return [
    { key: "phase", name: "phase", category: { of: (l) => l.phase, colour: phaseColour, meaning: (p) => meaning[p] } },
    { key: "warnings", name: "number of warnings", of: count, text: (l) => (l.warnings || []).map((w) => w.code).join(", ") || "no warning" },
    ...codes.map((code) => ({ key: `warning-${code}`, name: `warning: ${code}`, category: { of: (l) => ((l.warnings || []).some((w) => w.code === code) ? code : "not warned"), colour: (t) => (t === code ? "#d55e00" : "var(--none)"), meaning: (t) => (t === code ? `layers that carry the warning ${code}` : "all others") } })),
    ...METRICS.filter((m) => layers.some((l) => isNumber(l[m.key]))).map((m) => ({ key: m.key, name: m.name, of: (l) => l[m.key] })),
  ];
}

// `choose(layer)` opens a layer; `first` is the key chosen at the start. `map.refresh()` draws anew what changed.
export function blockMap(layers, { choices, first, choose, title = "Blocks and roles", caption }) {
  const grid = cellsOf(layers);
  const state = { what: choices.find((c) => c.key === first) || choices[0], chosen: null };
  const numbers = choices.filter((c) => c.of);
  const key = h("div", { class: "key" });
  const by = picker("Colour the map by", choices.map((c) => [c.key, c.name]), state.what.key, (v) => { state.what = choices.find((c) => c.key === v); refresh(); });
  const map = figure({ title, draw: (width) => drawMap(width, layers, grid, state, pick), controls: h("div", { class: "controls" }, by, key), caption });
  // What has no number (a phase) leaves the lines at the last number that was shown.
  const depth = figure({ title: `${title}: over depth`, draw: (width) => { state.line = state.what.of ? state.what : state.line || choices.find((c) => c.key === first && c.of) || numbers[0]; return drawDepth(width, grid, state.line); } });
  depth.append(roleLegend(grid));
  function refresh() {
    replace(key, keyOf(layers, state.what));
    map.redraw();
    depth.redraw();
  }
  function pick(layer) {
    state.chosen = layer;
    map.redraw();
    choose(layer);
  }
  refresh();
  const node = h("div", { class: "blockmap" }, map, depth);
  node.refresh = refresh;
  return node;
}

const scaleOf = (layers, what) => (what.difference ? differenceScale : colourScale)(layers.map(what.of));

function keyOf(layers, what) {
  if (!what.category) return rampKey(scaleOf(layers, what), what.name, (v) => number(v, 3));
  const used = [...new Set(layers.map(what.category.of))].filter((t) => t !== null && t !== undefined);
  return legend(used.map((t) => [t, what.category.colour(t) || "var(--soft)", what.category.meaning(t)]));
}

// Of several layers in one cell the most common category, or the median.
function colouring(layers, what) {
  if (what.category) {
    const most = (cell) => {
      const tally = new Map();
      for (const l of cell) tally.set(what.category.of(l), (tally.get(what.category.of(l)) || 0) + 1);
      return [...tally].sort((a, b) => b[1] - a[1])[0][0];
    };
    return { fill: (cell) => what.category.colour(most(cell)), text: (cell) => String(most(cell) ?? `no ${what.name}`) };
  }
  const scale = scaleOf(layers, what);
  return { fill: (cell) => scale(valueOf(cell, what)), text: (cell) => (what.text && cell.length === 1 ? what.text(cell[0]) : `${what.name} ${number(valueOf(cell, what))}`) };
}

function drawMap(width, layers, grid, state, pick) {
  const left = 118;
  const { blocks, roles } = grid;
  const cell = Math.max(6, Math.min(46, (width - left - 12) / blocks.length));
  const height = roles.length * CELL + 40;
  const { fill, text } = colouring(layers, state.what);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart map", role: "grid", "aria-label": `${state.what.name}: ${plural(roles.length, "role")} of ${plural(blocks.length, "block")}; the table of layers holds all numbers` });
  const every = Math.ceil(26 / cell);
  blocks.forEach((block, k) => {
    if (k % every === 0) svg.append(s("text", { class: "tick", x: left + (k + 0.5) * cell, y: height - 22, "text-anchor": "middle" }, String(block)));
  });
  svg.append(s("text", { class: "axis", x: left + (blocks.length * cell) / 2, y: height - 6, "text-anchor": "middle" }, "block"));
  roles.forEach((role, i) => {
    const line = s("g", { role: "row" });
    line.append(s("text", { class: "name", x: left - 8, y: i * CELL + CELL / 2 + 4, "text-anchor": "end", role: "rowheader" }, role));
    blocks.forEach((block, k) => {
      const mine = grid.at(role, block);
      if (!mine.length) return;
      const on = mine.includes(state.chosen);
      const told = `${mine[0].name}${mine.length > 1 ? ` and ${mine.length - 1} more` : ""}\n${mine.length > 1 && state.what.of ? "median " : ""}${text(mine)}`;
      line.append(s("rect", { class: on ? "cell on" : "cell", role: "gridcell", tabindex: on || (state.chosen === null && i === 0 && k === 0) ? "0" : "-1", "data-role": role, "data-block": String(block), "aria-label": told.replace("\n", ", "), x: left + k * cell + 0.5, y: i * CELL + 1.5, width: Math.max(2, cell - 1), height: CELL - 3, fill: fill(mine) || "var(--none)", tip: told,
        on: { click: () => pick(mine[0]), keydown: (e) => move(e, svg, grid, role, block, mine[0], pick) } }));
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
    const next = [...svg.querySelectorAll(".cell")].find((n) => n.dataset.role === grid.roles[i] && n.dataset.block === String(grid.blocks[k]));
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

function drawDepth(width, grid, what) {
  const { blocks, roles } = grid;
  const value = (role, block) => valueOf(grid.at(role, block), what);
  const all = roles.flatMap((r) => blocks.map((b) => value(r, b))).filter(isNumber);
  if (!all.length) return s("svg", { viewBox: `0 0 ${width} 20`, role: "img", "aria-label": `${what.name}: no values` }, s("text", { x: 8, y: 14, class: "name" }, `${what.name}: no values`));
  const chart = frame({ width, height: 260, label: `${what.name} over depth, one line per role`, x: { domain: [blocks[0], blocks[blocks.length - 1]], ticks: blocks.filter((_, k) => k % Math.ceil(blocks.length / 10) === 0), label: "block" }, y: { domain: padded(all), label: what.name } });
  const at = (block, q) => {
    const own = sorted(roles.map((r) => value(r, block)));
    return own.length ? quantile(own, q) : NaN;
  };
  const band = [...blocks.map((b) => [b, at(b, 0.75)]), ...[...blocks].reverse().map((b) => [b, at(b, 0.25)])].filter(([, v]) => Number.isFinite(v));
  chart.marks.append(s("path", { class: "spread", d: `M${band.map(([x, y]) => `${chart.x(x).toFixed(1)} ${chart.y(y).toFixed(1)}`).join("L")}Z` }));
  for (const [name, q] of [["lower quartile over roles", 0.25], ["upper quartile over roles", 0.75]]) hold(chart, name, blocks.map((b) => [b, at(b, q)]));
  roles.forEach((role, i) => line(chart, blocks.map((b) => [b, value(role, b) ?? NaN]), { stroke: OKABE[i % OKABE.length], "stroke-dasharray": i >= OKABE.length ? "5 3" : null, tip: role }));
  line(chart, blocks.map((b) => [b, at(b, 0.5)]), { class: "line median", stroke: "var(--ink)", "stroke-width": 2.4, tip: "median over roles" });
  return chart.svg;
}

function roleLegend(grid) {
  return legend([...grid.roles.map((r, i) => [r, OKABE[i % OKABE.length], r, "stroke"]), ["median of the roles; shaded: the middle half", "var(--ink)", "line: the median over roles; band: the middle half of them", "stroke"]]);
}
