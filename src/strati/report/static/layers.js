// The layers of a scanned network: a bar of states, a map of blocks, a list of layers as thick as their parameters, and
// one layer in detail. One control colours the map and the list.

import { fold, h, picker, replace, section } from "./dom.js";
import { basename, count, isNumber, number, percent, plural, shortName } from "./format.js";
import { METRICS } from "./meanings.js";
import { STATES, stateColour, stateName } from "./scale.js";
import { dataTable, layerColumn, order, textColumn } from "./table.js";
import { meaningOf, term, what } from "./help.js";
import { layerNumbers, layerView } from "./layer.js";
import { blockMap, isTransformer, keyOf, scaleOf, scanChoices, textOf } from "./blockmap.js";
import { opened, selection } from "./link.js";
import { multiples } from "./multiples.js";

const THIN = 32;
const THICK = 64;
const FEW = 8; // layers that need no filters

export const isHead = (layer) => String(layer.kind || "").startsWith("head.");

export function layersSection(scan, id, verdicts) {
  const layers = (scan.layers || []).filter((l) => !isHead(l)).map((layer, index) => ({ ...layer, index }));
  const network = scan.network || {};
  const about = `${count(network.parameters)} parameters in ${plural(network.tensors || 0, "tensor")}; ${plural(layers.length, "matrix", "matrices")} analysed.`;
  const body = section(id, "Layers", about);
  if (!layers.length) {
    body.append(h("p", { class: "empty" }, "This network has no weight matrix to analyse; the skipped tensors are listed below."));
  } else {
    body.append(stateBar(layers), survey(layers, { id, verdicts }));
    body.append(fold("All numbers of all layers", numbersTable(scan, layers)));
  }
  const left = scan.skipped || [];
  if (left.length) body.append(fold(`${plural(left.length, "tensor")} not analysed, with the reason`, dataTable({ title: "Not analysed", rows: left, columns: [layerColumn((l) => l.name, "name"), textColumn("reason")] })));
  return body;
}

// The largest layer that nothing is wrong with: learned (or without a warning), inside the network; of equal ones that with the fewest warnings.
export function firstLayer(layers) {
  const ranks = { learned: 0, "random-like": 2, "too-small": 2, broken: 3 };
  const rank = (l) => ranks[l.state] ?? ((l.warnings || []).length ? 1 : 0);
  const outside = (l) => (l.role === "embedding" || l.role === "head" ? 1 : 0);
  return [...layers].sort((a, b) => rank(a) - rank(b) || outside(a) - outside(b) || (b.parameters || 0) - (a.parameters || 0) || (a.warnings || []).length - (b.warnings || []).length || a.index - b.index)[0];
}

function stateBar(layers) {
  const total = layers.reduce((sum, l) => sum + (l.parameters || 0), 0) || 1;
  const parts = STATES.map((state) => ({ ...state, layers: layers.filter((l) => l.state === state.key) })).filter((p) => p.layers.length)
    .map((p) => ({ ...p, share: p.layers.reduce((sum, l) => sum + (l.parameters || 0), 0) / total }));
  if (!parts.length) return null;
  return h("div", { class: "states" },
    h("div", { class: "state-bar", role: "img", "aria-label": `Share of the parameters by state: ${parts.map((p) => `${p.name} ${percent(p.share)}`).join(", ")}` }, parts.map((p) => h("i", { style: { "--c": p.colour, "flex-grow": String(Math.max(p.share, 0.004)) }, tip: `${p.name}: ${plural(p.layers.length, "layer")}, ${percent(p.share)} of the parameters\n${meaningOf(p.key, "state")}` }))),
    h("ul", { class: "legend" }, parts.map((p) => h("li", {}, h("i", { style: { "--c": p.colour } }), term(p.key, p.name), h("span", {}, `${plural(p.layers.length, "layer")}, ${percent(p.share)} of the parameters`)))));
}

function survey(layers, context) {
  const choices = scanChoices(layers);
  const choiceOf = (key) => choices.find((c) => c.key === key);
  const first = choiceOf("stable_rank") || choiceOf("state") || choices[0];
  const largest = Math.max(...layers.map((l) => l.parameters || 0)) || 1;
  const height = (l) => Math.round(THIN + (THICK - THIN) * Math.sqrt((l.parameters || 0) / largest));
  const state = { what: first, sort: "index", down: false, role: "", state: "", flag: "", words: "", chosen: firstLayer(layers).index };
  const detail = h("div", { class: "detail", "aria-live": "polite" });
  const numbers = h("div", { class: "numbers" });
  const list = h("div", { class: "rows", role: "listbox", tabindex: "0", "aria-label": "Layers in order; arrow keys move, Enter shows the layer" });
  const key = h("div", { class: "key" });
  const tally = h("p", { class: "tally", "aria-live": "polite" });
  let shown = [];

  function row(layer, scale) {
    const reason = state.what.doubt ? state.what.doubt(layer) : null;
    const fill = state.what.category ? state.what.category.colour(state.what.category.of(layer)) : scale(state.what.of(layer));
    const notes = (layer.warnings || []).map((w) => `${w.code}: ${w.text}`).join("\n");
    return h("div", { class: "row", role: "option", id: `${context.id}-row-${layer.index}`, "aria-selected": String(layer.index === state.chosen), style: { "--h": `${height(layer)}px`, "--most": `${2 * height(layer)}px`, "flex-grow": String(height(layer)) }, on: { click: () => choose(layer.index) } },
      h("span", { class: reason ? "bed hatch" : "bed", style: { "background-color": reason ? "var(--none)" : fill || "var(--none)" } }),
      h("span", { class: "who" }, h("b", { tip: layer.name }, shortName(layer.name, 28)), h("small", {}, layer.role, " · ", `${layer.rows}×${layer.cols}`)),
      h("span", { class: reason ? "value doubtful" : "value", tip: reason ? `unreliable: ${reason}` : null }, state.what.category ? "" : textOf(layer, state.what)),
      h("span", { class: "state" }, h("i", { style: { "--c": stateColour(layer.state) || "var(--soft)" } }), layer.state ? stateName(layer.state) : layer.phase || "–"),
      h("span", { class: "flags" }, reason || layer.state === "broken" ? h("span", { class: layer.state === "broken" ? "flag bad" : "flag", tip: notes }, layer.state === "broken" ? "!" : "⚑") : null));
  }

  function render() {
    const flags = (l) => (l.warnings || []).map((w) => w.code);
    shown = layers.filter((l) => (!state.role || l.role === state.role) && (!state.state || l.state === state.state) && (!state.flag || flags(l).includes(state.flag))
      && (!state.words || `${l.name} ${l.role} ${l.phase} ${l.state} ${l.kind}`.toLowerCase().includes(state.words)));
    const by = state.sort === "metric" ? state.what.of || state.what.category.of : (l) => l[state.sort];
    const has = (l) => by(l) !== null && by(l) !== undefined;
    shown = [...shown.filter(has).sort((a, b) => order(by(a), by(b)) * (state.down ? -1 : 1)), ...shown.filter((l) => !has(l))];
    const scale = state.what.category ? null : scaleOf(layers, state.what);
    replace(list, shown.length ? shown.map((l) => row(l, scale)) : h("p", { class: "empty" }, "No layer matches; loosen the filters."));
    tally.textContent = shown.length === layers.length ? plural(layers.length, "layer") : `${shown.length} of ${plural(layers.length, "layer")}`;
    replace(key, map ? null : keyOf(layers, state.what));
    for (const b of heads.querySelectorAll("[data-sort]")) b.parentElement.setAttribute("aria-sort", b.dataset.sort !== state.sort ? "none" : state.down ? "descending" : "ascending");
    const label = state.what.category ? "" : state.what.label;
    replace(metricHead, h("button", { type: "button", "data-sort": "metric", hidden: !label, on: { click: () => sortBy("metric") } }, label || "metric"), label ? what(state.what.key, state.what.name) : null);
    mark();
  }

  function mark() {
    for (const node of list.querySelectorAll(".row")) node.setAttribute("aria-selected", String(node.id === `${context.id}-row-${state.chosen}`));
    list.setAttribute("aria-activedescendant", `${context.id}-row-${state.chosen}`);
  }

  function show() {
    replace(detail, layerView(layers[state.chosen]));
    replace(numbers, layerNumbers(layers[state.chosen], context.verdicts));
  }

  function choose(index, scroll) {
    state.chosen = index;
    mark();
    const node = document.getElementById(`${context.id}-row-${index}`);
    if (node && scroll) list.scrollTop = node.offsetTop - list.clientHeight / 2;
    show();
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

  function sortBy(field) {
    state.down = state.sort === field ? !state.down : false;
    state.sort = field;
    render();
  }

  const head = (field, label, classes, help) => h("span", { role: "columnheader", class: classes, "aria-sort": "none" }, h("button", { type: "button", "data-sort": field, on: { click: () => sortBy(field) } }, label), help ? what(help, label) : null);
  const metricHead = h("span", { role: "columnheader", class: "value", "aria-sort": "none" });
  const heads = h("div", { class: "row heads", role: "row" }, head("index", "№", "bed"), head("name", "layer", "who"), metricHead, head("state", "state", "state", "state"));
  const unique = (values) => [...new Set(values.filter(Boolean))].sort();
  const filter = (label, field, options) => picker(label, [["", "all"], ...options], "", (v) => { state[field] = v; render(); });
  const map = isTransformer(layers) ? blockMap(layers, { choices, first: first.key, pick: false, choose: (layer) => choose(layer.index, true), caption: "Every weight matrix of every block. A click opens the layer below; arrow keys move." }) : null;
  const controls = h("div", { class: "controls" },
    picker("Colour by", choices.map((c) => [c.key, c.name]), first.key, (v) => { state.what = choiceOf(v); if (map) map.set(v); render(); }),
    picker("Order", [["index", "network"], ["name", "name"], ["parameters", "parameters"], ["metric", "colour"], ["role", "role"], ["state", "state"]], "index", (v) => { state.sort = v; state.down = false; render(); }),
    layers.length > FEW ? [
      h("label", { class: "control search" }, h("span", {}, "Search"), h("input", { type: "search", placeholder: "name, role, state", on: { input: (e) => { state.words = e.target.value.trim().toLowerCase(); render(); } } })),
      filter("Role", "role", unique(layers.map((l) => l.role))), filter("State", "state", unique(layers.map((l) => l.state)).map((v) => [v, stateName(v)])),
      filter("Warning", "flag", unique(layers.flatMap((l) => (l.warnings || []).map((w) => w.code))))] : null);
  list.addEventListener("keydown", move);
  const asked = selection();
  const linked = asked.section === context.id && asked.layer ? layers.find((l) => l.name === asked.layer) : undefined;
  state.chosen = linked ? linked.index : state.chosen;
  render();
  show();
  const few = layers.length <= FEW; // then the numbers stand below the list, beside the pictures
  const rows = h("div", { class: "list card" }, h("div", { role: "table", "aria-label": "Sort the layers by" }, heads), list);
  const node = h("div", { class: "strata" }, controls, map, h("div", { class: "under" }, key, tally),
    h("div", { class: few ? "survey few" : "survey" }, few ? h("div", {}, rows, numbers) : rows, detail), few ? null : numbers, multiples(layers, (layer) => choose(layer.index, true)));
  requestAnimationFrame(() => { const chosen = document.getElementById(`${context.id}-row-${state.chosen}`); if (chosen) list.scrollTop = chosen.offsetTop - list.clientHeight / 2; });
  return node;
}

function numbersTable(scan, layers) {
  const metrics = METRICS.filter((m) => layers.some((l) => isNumber(l[m.key])));
  return dataTable({ title: `Layers of ${basename((scan.network || {}).path)}`, rows: layers, columns: [
    layerColumn((l) => l.name), textColumn("role", "role", "role"), textColumn("state", "state", "state"), textColumn("kind"), { label: "rows", value: (l) => l.rows }, { label: "cols", value: (l) => l.cols },
    ...metrics.filter((m) => m.key !== "parameters").map((m) => ({ label: m.label, tip: m.name, help: m.key, value: (l) => l[m.key], show: (l) => (m.key === "alpha" ? textOf(l, { of: () => l.alpha, error: () => l.alpha_stderr }) : number(l[m.key])) })),
    { label: "parameters", value: (l) => l.parameters }, textColumn("phase", "phase", "phase"), { label: "warnings", left: true, value: (l) => (l.warnings || []).map((w) => w.code).join(" ") }, textColumn("view", "view", "view")] });
}
