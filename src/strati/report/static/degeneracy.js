// Parameters that the data leave unused, layer by layer; the learning coefficient and N_eff over scales where they were sampled.

import { fold, h, s, section, stat } from "./dom.js";
import { count, isNumber, number, percent, shortName, withError } from "./format.js";
import { figure, frame, legend, nameRoom } from "./chart.js";
import { diagnostics, scales, traces } from "./sampling.js";
import { dataTable, layerColumn } from "./table.js";

const SOURCES = [
  ["free_from_activations", "dead or dependent activations", "#56b4e9"],
  ["free_from_jacobians", "dependent gradients", "#009e73"],
  ["free_from_firing", "neurons that never switch", "#e69f00"],
  ["free_from_synchrony", "synchronised neurons", "#cc79a7"],
];

// Directions that are free only because there are fewer outputs than parameters say nothing about the network: the
// headline is what its structure leaves free, as the bars have it.
export function degeneracySection(result, id) {
  const layers = result.layers || [];
  const few = result.free_from_few_data || 0;
  const structural = isNumber(result.free) ? result.free - few : null;
  const share = result.parameters ? structural / result.parameters : null;
  const body = section(id, "Unused parameters", `${count(structural)} of ${count(result.parameters)} parameters are free on these data.`);
  if (isNumber(result.parameters)) {
    body.append(h("div", { class: "stats" }, stat("parameters", number(result.parameters)), stat("free by structure", number(structural), percent(share)),
      few > 0 ? stat("not decided", number(few), "too few rows to count them") : stat(result.method === "exact" ? "used" : "used at most", number(result.effective)),
      result.llc ? stat("learning coefficient", withError(result.llc.estimate, result.llc.stderr), isNumber(result.llc.estimate) ? `nβ ${number(result.llc.nbeta)}, γ ${number(result.llc.gamma)}` : result.llc.reason) : null,
      result.llc && isNumber(result.llc.asymptotic) ? stat("its limit for large nβ", withError(result.llc.asymptotic, result.llc.asymptotic_stderr)) : null));
  }
  if (layers.length) body.append(usedAndFree(layers));
  const parts = [(result.scales || []).length ? scales(result) : null, result.llc && (result.llc.traces || []).length ? traces(result.llc) : null].filter(Boolean);
  if (parts.length) body.append(h("div", { class: "grid2" }, parts));
  if (result.llc) body.append(fold("Sampling diagnostics", diagnostics(result.llc)));
  if (layers.length) body.append(fold("Counts of every layer", table(layers)));
  return body;
}

function usedAndFree(layers) {
  const total = (l) => (isNumber(l.parameters) ? l.parameters : (isNumber(l.inputs) && isNumber(l.outputs) ? l.inputs * l.outputs : (l.free || 0)));
  const picture = figure({ title: "Used and free, layer by layer", wide: true, draw: (width) => {
    const sources = SOURCES.filter(([key]) => layers.some((l) => l[key] > 0));
    const step = 34 + 5 * sources.length;
    const left = Math.max(96, nameRoom(layers.map((l) => l.name), width));
    const chart = frame({ width, height: layers.length * step + 58, margin: { left, top: 8, right: 20 }, label: "Parameters used and free in each layer", x: { domain: [0, Math.max(...layers.map(total), 1)], label: "parameters" }, y: { domain: [layers.length - 0.5, -0.5], none: true } });
    layers.forEach((layer, i) => {
      const y = chart.y(i);
      const free = Math.min(layer.free || 0, total(layer));
      const used = total(layer) - free;
      chart.over.append(s("text", { class: "name", x: left - 10, y: y - 6, "text-anchor": "end", tip: layer.name }, shortName(layer.name, Math.floor(left / 7))),
        s("text", { class: "minor", x: left - 10, y: y + 9, "text-anchor": "end" }, `${percent(total(layer) ? free / total(layer) : null)} free`));
      chart.marks.append(s("rect", { class: "used", x: chart.left, y: y - 18, width: Math.max(0, chart.x(used) - chart.left), height: 18, tip: `${layer.name}\nused ${number(used)}` }),
        s("rect", { class: "free", x: chart.x(used), y: y - 18, width: Math.max(0, chart.x(used + free) - chart.x(used)), height: 18, tip: `${layer.name}\nfree ${number(free)}` }));
      sources.forEach(([key, label, fill], k) => {
        if (!isNumber(layer[key])) return;
        chart.marks.append(s("rect", { x: chart.left, y: y + 2 + 5 * k, width: Math.max(layer[key] > 0 ? 1 : 0, chart.x(layer[key]) - chart.left), height: 4, fill, tip: `${layer.name}\n${label}: ${number(layer[key])}` }));
      });
    });
    return chart.svg;
  }, caption: "Thick bars: used and free, nothing counted twice. Thin bars: what makes parameters free; these may overlap." });
  picture.insertBefore(legend([["used", "var(--used)"], ["free", "var(--free)"], ...SOURCES.filter(([key]) => layers.some((l) => l[key] > 0)).map(([, l, c]) => [l, c])]), picture.lastChild);
  return picture;
}

function table(layers) {
  const keys = [["inputs", "inputs"], ["outputs", "outputs"], ["activation_rank", "activation rank"], ["jacobian_rank", "Jacobian rank"], ["synchronised_blocks", "synchronised blocks"], ["dead", "dead neurons"], ...SOURCES.map(([k]) => [k, k.replaceAll("_", " ")]), ["free", "free"]];
  const plain = (v) => (Array.isArray(v) ? v.length : v);
  return dataTable({ title: "Degeneracy by layer", rows: layers, columns: [layerColumn((l) => l.name), ...keys.map(([key, label]) => ({ label, help: key, value: (l) => plain(l[key]) }))] });
}
