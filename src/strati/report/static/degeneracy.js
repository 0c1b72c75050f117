// How much is free: parameters used and free per layer, N_eff over scales, and the chains behind the learning coefficient.

import { empty, h, s, section, stat } from "./dom.js";
import { count, isNumber, number, percent, sentence, shorten } from "./format.js";
import { dots, errorBar, figure, frame, legend, line, verticalRule } from "./chart.js";
import { OKABE, padded } from "./scale.js";
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

function scales(result) {
  const rows = [...result.scales].filter((r) => isNumber(r.epsilon) && r.epsilon > 0).sort((a, b) => a.epsilon - b.epsilon);
  const value = (r) => (isNumber(r.effective) ? r.effective : isNumber(r.lambda) ? 2 * r.lambda : null);
  const newton = (r) => (isNumber(r.gauss_newton) ? 2 * r.gauss_newton : NaN);
  const error = (r) => (isNumber(r.stderr) ? 2 * r.stderr : 0);
  const picture = figure({ title: "Effective parameters over scales", wide: true, draw: (width) => {
    const all = rows.flatMap((r) => [value(r) + error(r), value(r) - error(r), newton(r)]).filter(isNumber);
    const chart = frame({ width, height: 320, label: "Effective parameter count against epsilon", x: { domain: padded(rows.map((r) => r.epsilon), 0.05, true), log: true, label: "tolerated loss ε" }, y: { domain: [Math.max(0, Math.min(...all, Infinity) * 0.9) || 0, padded(all)[1]], label: "N_eff(ε) = 2 λ(ε)" } });
    line(chart, rows.map((r) => [r.epsilon, newton(r)]), { class: "line dashed", stroke: OKABE[1] });
    line(chart, rows.map((r) => [r.epsilon, value(r) ?? NaN]), { stroke: OKABE[0] });
    for (const r of rows) {
      if (!isNumber(value(r))) continue;
      if (error(r)) errorBar(chart, r.epsilon, value(r) - error(r), value(r) + error(r), { stroke: OKABE[0] });
      dots(chart, [{ x: r.epsilon, y: value(r), colour: OKABE[0], tip: `ε ${number(r.epsilon, 3)}\nN_eff ${number(value(r))} ± ${number(error(r), 2)}\nλ ${number(r.lambda)}` }], 4);
    }
    return chart.svg;
  }, caption: "The coarser the tolerance, the fewer parameters matter. Bars are one standard error of N_eff." });
  const items = [["sampled", OKABE[0], null, "stroke"]];
  if (rows.some((r) => isNumber(r.gauss_newton))) items.push(["Gauss-Newton", OKABE[1], "quadratic approximation", "stroke"]);
  picture.insertBefore(legend(items), picture.lastChild);
  return picture;
}

function traces(llc) {
  const chains = llc.traces.filter((t) => Array.isArray(t) && t.length);
  const picture = figure({ title: "Chains", wide: true, draw: (width) => {
    const length = Math.max(...chains.map((t) => t.length), 2);
    const chart = frame({ width, height: 320, label: "Trace of each chain", x: { domain: [0, length - 1], label: "draw (thinned)" }, y: { domain: padded(chains.flat()), label: "nβ (L − L*)" } });
    chains.forEach((trace, i) => line(chart, trace.map((v, k) => [k, v ?? NaN]), { class: "line thin", stroke: OKABE[i % OKABE.length], tip: `chain ${i + 1}` }));
    if (isNumber(llc.estimate)) {
      chart.over.append(s("line", { class: "rule", x1: chart.left, x2: chart.right, y1: chart.y(llc.estimate), y2: chart.y(llc.estimate) }), s("text", { class: "rule-text", x: chart.right - 4, y: chart.y(llc.estimate) - 6, "text-anchor": "end" }, `λ̂ = ${number(llc.estimate)}`));
    }
    verticalRule(chart, 0, null, {});
    return chart.svg;
  }, caption: "Chains that mix overlap and show no drift. A chain that goes its own way means: do not trust the estimate." });
  picture.insertBefore(legend(chains.map((_, i) => [`chain ${i + 1}`, OKABE[i % OKABE.length], null, "stroke"])), picture.lastChild);
  return picture;
}

function diagnostics(llc) {
  const good = { rhat: (v) => v < 1.05, ess: (v) => v > 100 };
  const rows = [
    ["estimate", "λ̂ at β = 1/ln n (WBIC)"], ["stderr", "standard error"], ["asymptotic", "slope over temperatures"], ["asymptotic_stderr", "its standard error"],
    ["rhat", "R̂: chains agree if below about 1.05"], ["ess", "effective sample size: independent draws behind the estimate"], ["chains", "chains"], ["draws", "draws per chain"],
    ["nbeta", "n β: inverse temperature"], ["gamma", "γ: strength that keeps the chain near the network"], ["reason", "why a value is missing"],
  ].filter(([k]) => llc[k] !== null && llc[k] !== undefined).map(([key, meaning]) => ({ key, meaning, value: llc[key] }));
  return dataTable({ title: "Sampling diagnostics", rows, columns: [
    { label: "quantity", left: true, value: (r) => r.key }, { label: "value", value: (r) => r.value, show: (r) => [number(r.value), good[r.key] && isNumber(r.value) ? h("span", { class: good[r.key](r.value) ? "mark yes" : "mark no" }, good[r.key](r.value) ? " ● fine" : " ○ poor") : null] },
    { label: "meaning", left: true, value: (r) => r.meaning }] });
}

function table(layers) {
  const keys = [["inputs", "inputs"], ["outputs", "outputs"], ["activation_rank", "activation rank"], ["jacobian_rank", "Jacobian rank"], ["synchronised_blocks", "synchronised blocks"], ...SOURCES.map(([k]) => [k, k.replaceAll("_", " ")]), ["free", "free"]];
  const plain = (v) => (Array.isArray(v) ? v.length : v);
  return dataTable({ title: "Degeneracy by layer", rows: layers, columns: [{ label: "layer", left: true, value: (l) => l.name }, ...keys.map(([key, label]) => ({ label, value: (l) => plain(l[key]) }))] });
}
