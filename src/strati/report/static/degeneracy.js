// How much is free: parameters used and free per layer; the learning coefficient and N_eff over scales where they were sampled.

import { empty, h, s, section, stat } from "./dom.js";
import { count, isNumber, number, percent, sentence, shorten } from "./format.js";
import { figure, frame, legend } from "./chart.js";
import { diagnostics, scales, traces } from "./sampling.js";
import { dataTable } from "./table.js";

const SOURCES = [
  ["free_from_activations", "dead or dependent activations", "#56b4e9"],
  ["free_from_jacobians", "dependent gradients", "#009e73"],
  ["free_from_firing", "neurons that never switch", "#e69f00"],
  ["free_from_synchrony", "synchronised neurons", "#cc79a7"],
];

export function degeneracySection(result, id) {
  const layers = result.layers || [];
  const share = result.parameters ? result.free / result.parameters : null;
  const body = section(id, "How much is free", sentence(result.sentence) || `${count(result.effective)} of ${count(result.parameters)} parameters are needed on these data; ${percent(share)} are free.`);
  if (isNumber(result.parameters)) {
    body.append(h("div", { class: "stats" }, stat("parameters", number(result.parameters)), stat("free", number(result.free), percent(share)), stat("effective", number(result.effective)),
      result.llc ? stat("λ̂ (WBIC)", number(result.llc.estimate, 4), isNumber(result.llc.stderr) ? `± ${number(result.llc.stderr, 2)}` : result.llc.reason) : null,
      result.llc && isNumber(result.llc.asymptotic) ? stat("λ̂ (asymptotic)", number(result.llc.asymptotic, 4), isNumber(result.llc.asymptotic_stderr) ? `± ${number(result.llc.asymptotic_stderr, 2)}` : "") : null));
  }
  if (layers.length) body.append(usedAndFree(layers));
  const parts = [];
  if ((result.scales || []).length) parts.push(scales(result));
  if (result.llc && (result.llc.traces || []).length) parts.push(traces(result.llc));
  if (parts.length) body.append(h("div", { class: "grid2" }, parts));
  else body.append(empty("No learning coefficient in this result. Run degeneracy with --llc or --scales to see the effective parameter count over scales and the chains."));
  if (result.llc) body.append(diagnostics(result.llc));
  if (layers.length) body.append(h("details", { class: "fold" }, h("summary", {}, "Counts of every layer"), table(layers)));
  return body;
}

function usedAndFree(layers) {
  const total = (l) => (isNumber(l.parameters) ? l.parameters : (isNumber(l.inputs) && isNumber(l.outputs) ? l.inputs * l.outputs : (l.free || 0)));
  const picture = figure({ title: "Used and free, layer by layer", wide: true, draw: (width) => {
    const step = 54;
    const left = Math.min(190, width * 0.32);
    const chart = frame({ width, height: layers.length * step + 58, margin: { left, top: 8, right: 20 }, label: "Parameters used and free in each layer", x: { domain: [0, Math.max(...layers.map(total), 1)], label: "parameters" }, y: { domain: [layers.length - 0.5, -0.5], none: true } });
    layers.forEach((layer, i) => {
      const y = chart.y(i);
      const free = Math.min(layer.free || 0, total(layer));
      const used = total(layer) - free;
      chart.over.append(s("text", { class: "name", x: left - 10, y: y - 6, "text-anchor": "end", tip: layer.name }, shorten(layer.name, Math.floor(left / 7))),
        s("text", { class: "minor", x: left - 10, y: y + 9, "text-anchor": "end" }, `${percent(total(layer) ? free / total(layer) : null)} free`));
      chart.marks.append(s("rect", { class: "used", x: chart.left, y: y - 18, width: Math.max(0, chart.x(used) - chart.left), height: 18, tip: `${layer.name}\nused ${number(used)}` }),
        s("rect", { class: "free", x: chart.x(used), y: y - 18, width: Math.max(0, chart.x(used + free) - chart.x(used)), height: 18, tip: `${layer.name}\nfree ${number(free)}` }));
      SOURCES.forEach(([key, label, fill], k) => {
        if (!isNumber(layer[key])) return;
        chart.marks.append(s("rect", { x: chart.left, y: y + 2 + 5 * k, width: Math.max(layer[key] > 0 ? 1 : 0, chart.x(layer[key]) - chart.left), height: 4, fill, tip: `${layer.name}\n${label}: ${number(layer[key])}` }));
      });
    });
    return chart.svg;
  }, caption: "Thick bars: used and free, nothing counted twice. Thin bars: where the freedom comes from; these may overlap." });
  picture.insertBefore(legend([["used", "var(--used)"], ["free", "var(--free)"], ...SOURCES.map(([, l, c]) => [l, c])]), picture.lastChild);
  return picture;
}

function table(layers) {
  const keys = [["inputs", "inputs"], ["outputs", "outputs"], ["activation_rank", "activation rank"], ["jacobian_rank", "Jacobian rank"], ["synchronised_blocks", "synchronised blocks"], ...SOURCES.map(([k]) => [k, k.replaceAll("_", " ")]), ["free", "free"]];
  const plain = (v) => (Array.isArray(v) ? v.length : v);
  return dataTable({ title: "Degeneracy by layer", rows: layers, columns: [{ label: "layer", left: true, value: (l) => l.name }, ...keys.map(([key, label]) => ({ label, value: (l) => plain(l[key]) }))] });
}
