// A transformer as a map: one row per role, one column per block, coloured by whatever is chosen; and the same over
// depth, one line per role, with the median and the spread of all roles. A click opens the layer. Scans, comparisons and
// runs over time share it: they differ in what there is to choose.

import { h, picker, replace, s } from "./dom.js";
import { isNumber, number, plural, withError } from "./format.js";
import { figure, frame, hatched, hold, legend, line, rampKey } from "./chart.js";
import { meaningOf } from "./help.js";
import { METRICS, doubt, errorOf } from "./meanings.js";
import { OKABE, colourScale, differenceScale, padded, phaseColour, quantile, sorted, stateColour, stateName } from "./scale.js";

const HATCHED = "hatched: flagged, not to be compared";
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

// A choice: {key, name, of: layer -> number, error: layer -> its error, doubt: layer -> why it should not be compared,
// difference: true for one that may be below zero}, or with `category` a {of: layer -> text, colour, name, meaning}.
const middle = (values) => (values.some(isNumber) ? quantile(sorted(values), 0.5) : null);
const valueOf = (cell, what) => middle(cell.map(what.of));
const doubtOf = (cell, what) => (cell.length && what.doubt && cell.every((l) => what.doubt(l)) ? what.doubt(cell[0]) : null);

export function scanChoices(layers) {
  const codes = [...new Set(layers.flatMap((l) => (l.warnings || []).map((w) => w.code)))].sort();
  const has = (key) => layers.some((l) => l[key]);
  return [
    ...METRICS.filter((m) => layers.some((l) => isNumber(l[m.key]))).map((m) => ({ key: m.key, name: m.name, label: m.label, of: (l) => l[m.key], error: (l) => errorOf(m.key, l), doubt: (l) => doubt(m.key, l) })),
    ...(has("state") ? [{ key: "state", name: "state", category: { of: (l) => l.state, colour: stateColour, name: stateName, meaning: (v) => meaningOf(v, "state") } }] : []),
    ...(has("phase") ? [{ key: "phase", name: "phase", category: { of: (l) => l.phase, colour: phaseColour, name: (v) => v, meaning: (v) => meaningOf(v, "phase") } }] : []),
    ...codes.map((code) => ({ key: `warning-${code}`, name: `warning: ${code}`, category: { of: (l) => ((l.warnings || []).some((w) => w.code === code) ? code : "not warned"), colour: (v) => (v === code ? "#d55e00" : "var(--none)"), name: (v) => v, meaning: (v) => (v === code ? meaningOf(code, "code") : "all others") } })),
  ];
}

// `choose(layer)` opens a layer; `first` is the key at the start; without `pick` the caller sets the key with `set(key)`.
// `refresh()` draws anew what changed.
export function blockMap(layers, { choices, first, choose, title = "Blocks and roles", caption, pick = true }) {
  const grid = cellsOf(layers);
  const state = { what: choices.find((c) => c.key === first) || choices[0], chosen: null };
  const numbers = choices.filter((c) => c.of);
  const key = h("div", { class: "key" });
  const by = pick ? picker("Colour the map by", choices.map((c) => [c.key, c.name]), state.what.key, set) : null;
  const map = figure({ title, draw: (width) => drawMap(width, layers, grid, state, open), controls: by ? h("div", { class: "controls" }, by) : null, caption });
  map.insertBefore(key, map.querySelector(".figure-body"));
  // What has no number (a state) leaves the lines at the last number that was drawn.
  const depth = figure({ title: "Over depth", draw: (width) => { state.line = state.what.of ? state.what : state.line || choices.find((c) => c.key === first && c.of) || numbers[0]; return drawDepth(width, grid, state.line, pick ? 320 : 262); } });
  depth.append(roleLegend(grid));
  function set(value) {
    state.what = choices.find((c) => c.key === value) || state.what;
    refresh();
  }
  function refresh() {
    replace(key, keyOf(layers, state.what));
    map.redraw();
    depth.redraw();
  }
  function open(layer) {
    state.chosen = layer;
    map.redraw();
    choose(layer);
  }
  refresh();
  return Object.assign(h("div", { class: "blockmap" }, map, depth), { refresh, set });
}

// Layers in doubt do not stretch the scale.
export function scaleOf(layers, what) {
  const sure = what.doubt ? layers.filter((l) => !what.doubt(l)) : layers;
  return (what.difference ? differenceScale : colourScale)((sure.length ? sure : layers).map(what.of));
}

export function keyOf(layers, what) {
  if (!what.category) return [rampKey(scaleOf(layers, what), what.name, (v) => number(v)), what.doubt && layers.some(what.doubt) ? h("span", { class: "ramp" }, h("i", { class: "hatch" }), HATCHED) : null];
  const used = [...new Set(layers.map(what.category.of))].filter((t) => t !== null && t !== undefined);
  return legend(used.map((t) => [what.category.name(t), what.category.colour(t) || "var(--soft)", what.category.meaning(t)]));
}

export function textOf(layer, what) {
  if (what.category) return String(what.category.name(what.category.of(layer)) ?? "–");
  return what.error ? withError(what.of(layer), what.error(layer)) : number(what.of(layer));
}

// Of several layers in one cell the most common category, or the median.
function colouring(layers, what) {
  if (what.category) {
    const most = (cell) => {
      const tally = new Map();
      for (const l of cell) tally.set(what.category.of(l), (tally.get(what.category.of(l)) || 0) + 1);
      return [...tally].sort((a, b) => b[1] - a[1])[0][0];
    };
    return { fill: (cell) => what.category.colour(most(cell)), text: (cell) => String(what.category.name(most(cell)) ?? `no ${what.name}`) };
  }
  const scale = scaleOf(layers, what);
  return { fill: (cell) => scale(valueOf(cell, what)), text: (cell) => `${what.name} ${cell.length === 1 ? textOf(cell[0], what) : number(valueOf(cell, what))}` };
}

function drawMap(width, layers, grid, state, open) {
  const left = 108;
  const { blocks, roles } = grid;
  const cell = Math.max(6, Math.min(110, (width - left - 4) / blocks.length));
  const CELL = Math.max(22, Math.min(34, 236 / roles.length));
  const height = roles.length * CELL + 40;
  const { fill, text } = colouring(layers, state.what);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart map", role: "grid", "aria-label": `${state.what.name}: ${plural(roles.length, "role")} of ${plural(blocks.length, "block")}; the table of layers holds all numbers` });
  const stripes = hatched(svg);
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
      const reason = doubtOf(mine, state.what);
      const told = `${mine[0].name}${mine.length > 1 ? ` and ${mine.length - 1} more` : ""}\n${mine.length > 1 && state.what.of ? "median " : ""}${text(mine)}${reason ? `\nunreliable: ${reason}` : ""}`;
      line.append(s("rect", { class: on ? "cell on" : "cell", role: "gridcell", tabindex: on || (state.chosen === null && i === 0 && k === 0) ? "0" : "-1", "data-role": role, "data-block": String(block), "aria-label": told.replaceAll("\n", ", "), x: left + k * cell + 0.5, y: i * CELL + 1.5, width: Math.max(2, cell - 1), height: CELL - 3, fill: reason ? stripes : fill(mine) || "var(--none)", tip: told,
        on: { click: () => open(mine[0]), keydown: (e) => move(e, svg, grid, role, block, mine[0], open) } }));
    });
    svg.append(line);
  });
  return svg;
}

// Arrow keys go to the neighbour that there is; Enter and space open the layer.
function move(event, svg, grid, role, block, layer, open) {
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    open(layer);
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

function drawDepth(width, grid, what, height) {
  const { blocks, roles } = grid;
  const value = (role, block) => {
    const mine = grid.at(role, block);
    return doubtOf(mine, what) ? null : valueOf(mine, what);
  };
  const all = roles.flatMap((r) => blocks.map((b) => value(r, b))).filter(isNumber);
  if (!all.length) return s("svg", { viewBox: `0 0 ${width} 20`, role: "img", "aria-label": `${what.name}: no values` }, s("text", { x: 8, y: 14, class: "name" }, `${what.name}: no value that can be compared`));
  const chart = frame({ width, height, label: `${what.name} over depth, one line per role`, x: { domain: [blocks[0], blocks[blocks.length - 1]], ticks: blocks.filter((_, k) => k % Math.ceil(blocks.length / 10) === 0), label: "block" }, y: { domain: padded(all), label: what.name } });
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
