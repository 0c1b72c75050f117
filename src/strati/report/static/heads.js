// Attention heads: one cell per head and block, for the circuit that decides where to look (QK) and for what it moves (OV).

import { empty, h, picker, replace, s, section } from "./dom.js";
import { isNumber, number, plural } from "./format.js";
import { figure, hatched } from "./chart.js";
import { keyOf, scaleOf, scanChoices, textOf } from "./blockmap.js";
import { dataTable, layerColumn, textColumn } from "./table.js";

const CIRCUITS = [["head.qk", "QK", "where the head looks"], ["head.ov", "OV", "what the head moves"]];
const headOf = (layer) => Number((String(layer.name).match(/\[(\d+)\]/) || [])[1] ?? layer.head ?? NaN);

function gridOf(layers) {
  const known = layers.filter((l) => isNumber(l.block) && isNumber(headOf(l)));
  const sorted = (values) => [...new Set(values)].sort((a, b) => a - b);
  return { blocks: sorted(known.map((l) => l.block)), heads: sorted(known.map(headOf)), at: (kind, block, head) => known.find((l) => l.kind === kind && l.block === block && headOf(l) === head) };
}

export function headsSection(scan, id) {
  const layers = (scan.layers || []).filter((l) => String(l.kind || "").startsWith("head."));
  const grid = gridOf(layers);
  const body = section(id, "Heads", `${plural(grid.blocks.length * grid.heads.length, "attention head")} in ${plural(grid.blocks.length, "block")}: the stable rank of a head's circuits says how many directions it uses.`);
  if (!grid.heads.length) {
    body.append(empty("The heads of this result have no block or number."));
    return body;
  }
  const choices = scanChoices(layers);
  const state = { what: choices.find((c) => c.key === "stable_rank") || choices[0] };
  const key = h("div", { class: "key" }, keyOf(layers, state.what));
  const pictures = CIRCUITS.filter(([kind]) => layers.some((l) => l.kind === kind)).map(([kind, name, does]) => figure({ title: `${name}: ${does}`, draw: (width) => draw(width, layers, grid, kind, state.what) }));
  body.append(h("div", { class: "controls" }, picker("Colour by", choices.map((c) => [c.key, c.name]), state.what.key, (v) => { state.what = choices.find((c) => c.key === v); replace(key, keyOf(layers, state.what)); pictures.forEach((p) => p.redraw()); }), key),
    h("div", { class: "grid2" }, pictures),
    dataTable({ title: "Heads", rows: layers, columns: [layerColumn((l) => l.name, "head"), { label: "block", value: (l) => l.block }, textColumn("state", "state", "state"), { label: "stable rank", help: "stable_rank", value: (l) => l.stable_rank }, { label: "spikes", help: "spikes", value: (l) => l.spikes }, { label: "spectral norm", help: "spectral_norm", value: (l) => l.spectral_norm }] }));
  return body;
}

function draw(width, layers, grid, kind, what) {
  const left = 52;
  const step = Math.max(16, Math.min(34, 280 / grid.heads.length));
  const cell = Math.max(8, Math.min(90, (width - left - 4) / grid.blocks.length));
  const height = grid.heads.length * step + 40;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart map", role: "img", "aria-label": `${what.name} of every head; the table holds all numbers` });
  const stripes = hatched(svg);
  const scale = what.category ? null : scaleOf(layers, what);
  grid.heads.forEach((head, i) => {
    if (step > 18 || i % 2 === 0) svg.append(s("text", { class: "name", x: left - 8, y: i * step + step / 2 + 4, "text-anchor": "end" }, `head ${head}`));
    grid.blocks.forEach((block, k) => {
      const layer = grid.at(kind, block, head);
      if (!layer) return;
      const doubtful = what.doubt && what.doubt(layer);
      const fill = doubtful ? stripes : what.category ? what.category.colour(what.category.of(layer)) : scale(what.of(layer));
      svg.append(s("rect", { class: "cell", x: left + k * cell + 0.5, y: i * step + 1, width: Math.max(2, cell - 1), height: step - 2, fill: fill || "var(--none)", tip: `block ${block}, head ${head}\n${what.name} ${textOf(layer, what)}${doubtful ? `\nunreliable: ${doubtful}` : ""}` }));
    });
  });
  const every = Math.ceil(26 / cell);
  grid.blocks.forEach((block, k) => { if (k % every === 0) svg.append(s("text", { class: "tick", x: left + (k + 0.5) * cell, y: height - 22, "text-anchor": "middle" }, number(block))); });
  svg.append(s("text", { class: "axis", x: left + (grid.blocks.length * cell) / 2, y: height - 6, "text-anchor": "middle" }, "block"));
  return svg;
}

// The small picture of the overview: QK heads.
export function headGrid(scan) {
  const layers = (scan.layers || []).filter((l) => String(l.kind || "").startsWith("head."));
  const what = scanChoices(layers).find((c) => c.key === "stable_rank");
  const svg = draw(300, layers, gridOf(layers), "head.qk", what);
  svg.setAttribute("class", "thumb");
  svg.setAttribute("aria-hidden", "true");
  return svg;
}
