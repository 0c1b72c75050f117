// The overview of a scanned network: one stratum per layer, thick by parameters, coloured by a metric.

import { h, picker, replace, s } from "./dom.js";
import { abbreviate, basename, count, isNumber, number, plural } from "./format.js";
import { figure, rampKey } from "./chart.js";
import { METRICS, TEXTURES, metricOf, texture } from "./meanings.js";
import { PHASES, colourScale, phaseColour } from "./scale.js";
import { dataTable, order } from "./table.js";
import { layerView } from "./layer.js";
import { blockMap, isTransformer, scanChoices } from "./blockmap.js";
import { opened, selection } from "./link.js";
import { multiples } from "./multiples.js";

const THIN = 30;
const THICK = 78;
const COLUMN = 440;
const MOST = 3;

// Row heights: between THIN and THICK by the square root of the share of the largest layer; few layers grow to fill a column.
function thicknesses(layers) {
  const largest = Math.max(...layers.map((l) => l.parameters || 0)) || 1;
  const heights = layers.map((l) => THIN + (THICK - THIN) * Math.sqrt((l.parameters || 0) / largest));
  const grow = Math.min(MOST, Math.max(1, COLUMN / heights.reduce((sum, x) => sum + x, 0)));
  return heights.map((x) => Math.round(x * grow));
}

export function strata(scan, context) {
  const layers = (scan.layers || []).map((layer, index) => ({ ...layer, index }));
  if (!layers.length) return h("p", { class: "empty" }, "This network has no weight matrix to analyse; the skipped tensors are listed below.");
  const heights = thicknesses(layers);
  const available = METRICS.filter((m) => layers.some((l) => isNumber(l[m.key])));
  // An ending that every name shares (".weight") tells nothing; the full name is in the tooltip and the detail.
  const ending = layers.length > 1 && layers.every((l) => String(l.name).endsWith(".weight")) ? ".weight".length : 0;
  const shortName = (name) => (ending ? String(name).slice(0, -ending) : name);
  const state = { metric: available.some((m) => m.key === "alpha") ? "alpha" : (available[0] || METRICS[0]).key, sort: "index", down: false, role: "", phase: "", flag: "", words: "", chosen: layers[0].index };
  const detail = h("div", { class: "detail", "aria-live": "polite" });
  const list = h("div", { class: "rows", role: "listbox", tabindex: "0", "aria-label": "Layers in order; arrow keys move, Enter shows the layer" });
  const key = h("div", { class: "key" });
  const tally = h("p", { class: "tally", "aria-live": "polite" });
  let colour = () => null;
  let shown = [];

  const core = figure({ title: "Core", draw: (width) => drawCore(width) });
  core.classList.add("core");

  function drawCore(width) {
    const height = 560;
    const total = layers.reduce((sum, l) => sum + (l.parameters || 0), 0) || 1;
    const floor = Math.min(3, (0.5 * height) / layers.length);
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": "The network as a drill core: thickness is the true share of parameters" });
    let y = 4;
    const room = height - 8 - floor * layers.length;
    const wave = (i, at) => (i === 0 || i === layers.length ? 0 : 1.6 * Math.sin(i * 2.4 + at * 6.28));
    const edge = (i, base, back) => Array.from({ length: 9 }, (_, k) => (back ? 8 - k : k) / 8).map((t) => `${(4 + t * (width - 8)).toFixed(1)} ${(base + wave(i, t)).toFixed(1)}`);
    layers.forEach((layer, i) => {
      const thick = floor + (room * (layer.parameters || 0)) / total;
      svg.append(s("path", { d: `M${[...edge(i, y, false), ...edge(i + 1, y + thick, true)].join("L")}Z`, fill: colour(layer[state.metric]) || "var(--none)", class: layer.index === state.chosen ? "bed on" : "bed", tip: `${layer.name}\n${count(layer.parameters)} parameters`, on: { click: () => choose(layer.index, true) } }));
      y += thick;
    });
    return svg;
  }

  function row(layer) {
    const warnings = layer.warnings || [];
    const value = layer[state.metric];
    return h("div", { class: "row", role: "option", id: `${context.id}-row-${layer.index}`, "aria-selected": String(layer.index === state.chosen), style: { "--h": `${heights[layer.index]}px` }, on: { click: () => choose(layer.index) } },
      h("span", { class: `bed t-${texture(layer.role)}`, style: { "background-color": colour(value) || "var(--none)" } }),
      h("span", { class: "who" }, h("b", { tip: layer.name }, abbreviate(shortName(layer.name), 25)), h("small", {}, layer.role, " · ", `${layer.rows}×${layer.cols}`)),
      h("span", { class: "value" }, number(value)),
      h("span", { class: "phase" }, layer.phase ? h("i", { style: { "--c": phaseColour(layer.phase) || "var(--soft)" } }) : null, layer.phase || "–"),
      h("span", { class: "flags" }, warnings.length ? h("span", { class: "flag", tip: warnings.map((w) => `${w.code}: ${w.text}`).join("\n") }, "⚑", warnings.length > 1 ? h("small", {}, warnings.length) : null) : null));
  }

  function select() {
    shown = layers.filter((l) => (!state.role || l.role === state.role) && (!state.phase || l.phase === state.phase)
      && (!state.flag || (state.flag === "any" ? (l.warnings || []).length : state.flag === "none" ? !(l.warnings || []).length : (l.warnings || []).some((w) => w.code === state.flag)))
      && (!state.words || `${l.name} ${l.role} ${l.phase} ${l.kind}`.toLowerCase().includes(state.words)));
    const by = state.sort === "metric" ? state.metric : state.sort;
    const has = (l) => l[by] !== null && l[by] !== undefined;
    shown = [...shown.filter(has).sort((a, b) => order(a[by], b[by]) * (state.down ? -1 : 1)), ...shown.filter((l) => !has(l))];
  }

  function render() {
    select();
    colour = colourScale(layers.map((l) => l[state.metric]));
    replace(list, shown.length ? shown.map(row) : h("p", { class: "empty" }, "No layer matches; loosen the filters."));
    tally.textContent = shown.length === layers.length ? `${layers.length} layers` : `${shown.length} of ${layers.length} layers`;
    const metric = metricOf(state.metric);
    replace(key, rampKey(colour, metric.name, (v) => number(v, 3)));
    for (const b of heads.querySelectorAll("button")) b.parentElement.setAttribute("aria-sort", b.dataset.sort !== state.sort ? "none" : state.down ? "descending" : "ascending");
    heads.querySelector("[data-sort=metric]").textContent = metric.label;
    core.redraw();
    mark();
  }

  function mark() {
    for (const node of list.querySelectorAll(".row")) node.setAttribute("aria-selected", String(node.id === `${context.id}-row-${state.chosen}`));
    list.setAttribute("aria-activedescendant", `${context.id}-row-${state.chosen}`);
  }

  function choose(index, scroll) {
    state.chosen = index;
    mark();
    core.redraw();
    const node = document.getElementById(`${context.id}-row-${index}`);
    if (node && scroll) list.scrollTop = node.offsetTop - list.clientHeight / 2;
    replace(detail, layerView(layers[index], context));
    opened(context.id, layers[index].name); // the address links to this layer
  }

  function move(event) {
    const at = shown.findIndex((l) => l.index === state.chosen);
    const target = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + 10, PageUp: at - 10, Home: 0, End: shown.length - 1 }[event.key];
    if (event.key === "Enter") detail.scrollIntoView({ block: "nearest" });
    if (target === undefined || !shown.length) return;
    event.preventDefault();
    const next = shown[Math.max(0, Math.min(shown.length - 1, target))].index;
    choose(next);
    const node = document.getElementById(`${context.id}-row-${next}`);
    if (node.offsetTop < list.scrollTop || node.offsetTop + node.offsetHeight > list.scrollTop + list.clientHeight) list.scrollTop = node.offsetTop - list.clientHeight / 2;
  }

  function sortBy(what) {
    state.down = state.sort === what ? !state.down : false;
    state.sort = what;
    render();
  }

  const head = (what, label, classes) => h("span", { role: "columnheader", class: classes, "aria-sort": "none" }, h("button", { type: "button", "data-sort": what, on: { click: () => sortBy(what) } }, label));
  const heads = h("div", { class: "row heads", role: "row" }, head("index", "№", "bed"), head("name", "layer", "who"), head("metric", "α", "value"), head("phase", "phase", "phase"), h("span", { class: "flags" }));
  const unique = (values) => [...new Set(values.filter(Boolean))].sort();
  const codes = unique(layers.flatMap((l) => (l.warnings || []).map((w) => w.code)));
  const controls = h("div", { class: "controls" },
    h("label", { class: "control search" }, h("span", {}, "Search"), h("input", { type: "search", placeholder: "name, role, phase", on: { input: (e) => { state.words = e.target.value.trim().toLowerCase(); render(); } } })),
    picker("Colour by", available.map((m) => [m.key, m.name]), state.metric, (v) => { state.metric = v; render(); }),
    picker("Order", [["index", "network"], ["name", "name"], ["parameters", "parameters"], ["metric", "metric"], ["role", "role"], ["phase", "phase"]], "index", (v) => { state.sort = v; state.down = false; render(); }),
    picker("Role", [["", "all"], ...unique(layers.map((l) => l.role)).map((r) => [r, r])], "", (v) => { state.role = v; render(); }),
    picker("Phase", [["", "all"], ...unique(layers.map((l) => l.phase)).map((p) => [p, p])], "", (v) => { state.phase = v; render(); }),
    picker("Flags", [["", "all"], ["none", "none"], ["any", "any"], ...codes.map((c) => [c, c])], "", (v) => { state.flag = v; render(); }));
  list.addEventListener("keydown", move);
  const asked = selection();
  const linked = asked.section === context.id && asked.layer ? layers.find((l) => l.name === asked.layer) : undefined;
  state.chosen = linked ? linked.index : state.chosen;
  render();
  replace(detail, layerView(layers[state.chosen], context));
  const families = new Set(layers.map((l) => texture(l.role)));
  const textures = h("ul", { class: "legend textures" }, TEXTURES.filter(([k]) => families.has(k)).map(([k, label]) => h("li", {}, h("i", { class: `t-${k}` }), label)));
  const map = isTransformer(layers) ? blockMap(layers, { choices: scanChoices(layers), first: state.metric, choose: (layer) => choose(layer.index, true), caption: "Every weight matrix of every block. A click opens the layer below; arrow keys move." }) : null;
  return h("div", { class: "strata" }, map, controls, h("div", { class: "under" }, key, textures, tally),
    h("div", { class: "survey" }, core, h("div", { class: "list card" }, h("div", { role: "table", "aria-label": "Sort the layers by" }, heads), list), detail), multiples(layers, (layer) => choose(layer.index, true)), numbersTable(scan, layers));
}

function numbersTable(scan, layers) {
  const metrics = METRICS.filter((m) => layers.some((l) => isNumber(l[m.key])));
  const text = (key, label) => ({ label, left: true, value: (l) => l[key] });
  return h("details", { class: "fold" }, h("summary", {}, "All numbers of all layers"),
    dataTable({ title: `Layers of ${basename((scan.network || {}).path)}`, filter: true, rows: layers, columns: [
      text("name", "layer"), text("role", "role"), text("kind", "kind"), { label: "rows", value: (l) => l.rows }, { label: "cols", value: (l) => l.cols },
      ...metrics.filter((m) => m.key !== "parameters").map((m) => ({ label: m.label, tip: `${m.name}: ${m.meaning}`, value: (l) => l[m.key] })),
      { label: "parameters", value: (l) => l.parameters }, text("phase", "phase"), { label: "flags", left: true, value: (l) => (l.warnings || []).map((w) => w.code).join(" ") }, text("view", "view")] }));
}

// The sentence and the bar above the strata: how much of the network is in which phase.
export function phaseBar(layers) {
  const total = layers.reduce((sum, l) => sum + (l.parameters || 0), 0) || 1;
  const parts = PHASES.map((p) => ({ ...p, layers: layers.filter((l) => l.phase === p.key) })).filter((p) => p.layers.length)
    .map((p) => ({ ...p, share: p.layers.reduce((sum, l) => sum + (l.parameters || 0), 0) / total }));
  return h("div", { class: "phases" },
    h("div", { class: "phase-bar", role: "img", "aria-label": "Share of parameters by phase" }, parts.map((p) => h("i", { style: { "--c": p.colour, "flex-grow": String(Math.max(p.share, 0.004)) }, tip: `${p.key}: ${plural(p.layers.length, "layer")}, ${number(100 * p.share, 3)} % of the parameters\n${p.meaning}` }))),
    h("ul", { class: "legend" }, parts.map((p) => h("li", { tip: p.meaning }, h("i", { style: { "--c": p.colour } }), h("b", {}, p.layers.length), ` ${p.key}`))));
}
