// Networks side by side: the same layers of two or more networks, metric by metric.

import { choice, empty, h, picker, replace, s, section } from "./dom.js";
import { basename, isNumber, number, sentence, shorten } from "./format.js";
import { dots, figure, frame, hold, legend, line, rowName } from "./chart.js";
import { compareMap } from "./differences.js";
import { metricOf } from "./meanings.js";
import { histogram } from "./refit.js";
import { OKABE, ordered, padded } from "./scale.js";
import { dataTable } from "./table.js";
import { series } from "./series.js";

const CHANGES = [
  ["relative_change", "relative change", "‖W′ − W‖ / ‖W‖: how far the weights moved."],
  ["spectral_distance", "spectral distance", "How far the spectrum moved."],
  ["update_stable_rank", "stable rank of the update", "How many directions the change uses."],
  ["subspace_overlap", "subspace overlap", "How much of the leading directions is shared; 1 is all."],
];

export function compareSection(result, id) {
  const names = labels(result.networks || []);
  const layers = result.layers || [];
  const body = section(id, "Side by side", sentence(result.summary_text) || `${names.join(", ")}: the same layers, compared.`);
  if (!layers.length) {
    body.append(empty("These networks share no layer of the same name and shape; there is nothing to put side by side."));
    return body;
  }
  const metrics = [...new Set(layers.flatMap((l) => Object.keys(l.metrics || {})))].filter((k) => layers.some((l) => (l.metrics[k] || []).some(isNumber)));
  const state = { metric: metrics.includes("alpha") ? "alpha" : metrics[0] };
  const nameOf = (k) => (metricOf(k) || { name: k.replaceAll("_", " ") }).name;
  const key = legend(names.map((n, i) => [n, colourOf(i, names.length)]));
  const ladder = figure({ title: "Layer by layer", wide: true, draw: (w) => drawLadder(w, layers, names, state.metric, nameOf(state.metric)), caption: "One row per layer in network order; one dot per network, joined." });
  ladder.insertBefore(key, ladder.lastChild);
  const moved = CHANGES.filter(([k]) => layers.some((l) => isNumber(numberOf(l[k]))));
  const change = { key: moved.length ? moved[0][0] : null };
  const bars = moved.length ? figure({ title: "What changed", wide: true, draw: (w) => drawBars(w, layers, change.key, nameOf(change.key)), controls: h("div", { class: "controls small" }, choice("Change", moved.map(([k, n]) => [k, n]), change.key, (v) => { change.key = v; bars.redraw(); note.textContent = meaning(); })) }) : null;
  const meaning = () => (moved.find(([k]) => k === change.key) || ["", "", ""])[2];
  const note = h("p", { class: "caption" }, meaning());
  if (bars) bars.append(note);
  const spectra = layers.filter((l) => Array.isArray(l.eigenvalues) && l.eigenvalues.length > 1);
  const laid = spectra.length ? overlay(spectra, names) : null;
  const map = names.length > 1 ? compareMap(layers, names, metrics, moved, (layer) => { if (laid) laid.open(layer); }) : null;
  if (map) body.append(map);
  body.append(h("div", { class: "controls" }, picker("Metric", metrics.map((m) => [m, nameOf(m)]), state.metric, (v) => { state.metric = v; ladder.redraw(); })),
    h("div", { class: "grid2" }, ladder, bars || false));
  if (laid) body.append(laid);
  if (result.series && (result.series.layers || []).length) body.append(series(result.series));
  body.append(table(layers, names, metrics, moved));
  if ((result.role_differences || []).length) body.append(roleDifferences(result.role_differences));
  return body;
}

// Networks may share a file name; then the folder tells them apart.
export function labels(networks) {
  const paths = networks.map((n) => (typeof n === "string" ? n : n.label || n.name || n.path || ""));
  const short = paths.map(basename);
  return paths.map((p, i) => (short.indexOf(short[i]) === short.lastIndexOf(short[i]) ? short[i] : String(p).split(/[\\/]/).slice(-2).join("/")));
}

// Two to four networks are categories; more are a series and get colours in order.
function colourOf(i, n) {
  return n <= 4 ? OKABE[i] : ordered(i, n);
}

// Against several networks a change is a list, one per later network; the last one is the whole way.
function numberOf(value) {
  return Array.isArray(value) ? value[value.length - 1] : value;
}

function drawLadder(width, layers, names, metric, title) {
  const step = layers.length > 60 ? 11 : 20;
  const left = Math.min(230, width * 0.36);
  const all = layers.flatMap((l) => (l.metrics || {})[metric] || []);
  const chart = frame({ width, height: layers.length * step + 66, margin: { left, top: 10 }, label: `${title} of each layer in each network`, x: { domain: padded(all), label: title }, y: { domain: [layers.length - 0.5, -0.5], none: true } });
  layers.forEach((layer, i) => {
    const values = ((layer.metrics || {})[metric] || []).map((v, k) => [v, k]).filter(([v]) => isNumber(v));
    rowName(chart, i, layer.name, step);
    if (values.length > 1) line(chart, values.map(([v]) => [v, i]), { class: "link" });
    dots(chart, values.map(([v, k]) => ({ x: v, y: i, colour: colourOf(k, names.length), tip: `${layer.name}\n${names[k]}: ${number(v)}` })), step > 12 ? 4.2 : 3);
  });
  return chart.svg;
}

function drawBars(width, layers, key, title) {
  const step = layers.length > 60 ? 11 : 20;
  const left = Math.min(230, width * 0.36);
  const values = layers.map((l) => numberOf(l[key]));
  const chart = frame({ width, height: layers.length * step + 66, margin: { left, top: 10 }, label: title, x: { domain: [0, padded(values)[1]], label: title }, y: { domain: [layers.length - 0.5, -0.5], none: true } });
  layers.forEach((layer, i) => {
    rowName(chart, i, layer.name, step);
    if (!isNumber(values[i])) return;
    hold(chart, layer.name, [[values[i], i]]);
    chart.marks.append(s("rect", { class: "bar strong", x: chart.left, width: Math.max(0.5, chart.x(values[i]) - chart.left), y: chart.y(i) - step * 0.34, height: step * 0.68, tip: `${layer.name}\n${title}: ${number(values[i])}` }));
  });
  return chart.svg;
}

function overlay(layers, names) {
  const state = { layer: 0, log: true };
  const picture = figure({ title: "Spectra overlaid", wide: true, draw: (width) => {
    const layer = layers[state.layer];
    const spectra = layer.eigenvalues.map((e) => (e ? Array.from(e).filter((v) => v > 0) : []));
    const domain = state.log ? padded(spectra.flat(), 0.03, true) : [0, padded(spectra.flat())[1]];
    const curves = spectra.map((e) => (e.length ? histogram(e, domain, 50, state.log) : []));
    const chart = frame({ width, height: 280, label: `Spectra of ${layer.name}`, x: { domain, log: state.log, label: "eigenvalue λ" }, y: { domain: [0, 1.1 * Math.max(...curves.flat().map((b) => b.density), 1e-12)], label: state.log ? "density per decade" : "density" } });
    curves.forEach((bars, k) => line(chart, bars.flatMap((b) => [[b.from, b.density], [b.to, b.density]]), { stroke: colourOf(k, names.length), tip: names[k] }));
    return chart.svg;
  }, controls: h("div", { class: "controls small" },
    picker("Layer", layers.map((l, i) => [String(i), shorten(l.name, 48)]), "0", (v) => { state.layer = Number(v); picture.redraw(); }),
    choice("Axis", [["log", "log"], ["linear", "linear"]], "log", (v) => { state.log = v === "log"; picture.redraw(); })) });
  picture.append(legend(names.map((n, i) => [n, colourOf(i, names.length), null, "stroke"])));
  picture.open = (layer) => {
    if (!layers.includes(layer)) return;
    state.layer = layers.indexOf(layer);
    picture.querySelector("select").value = String(state.layer);
    picture.redraw();
  };
  return picture;
}

function table(layers, names, metrics, moved) {
  const holder = h("div", {});
  const fill = (metric) => replace(holder, dataTable({ title: "Layers compared", filter: true, rows: layers, columns: [
    { label: "layer", left: true, value: (l) => l.name }, { label: "role", left: true, value: (l) => l.role },
    ...names.map((n, i) => ({ label: n, value: (l) => ((l.metrics || {})[metric] || [])[i] })),
    ...moved.map(([k, label, tip]) => ({ label, tip, value: (l) => numberOf(l[k]) }))] }));
  fill(metrics.includes("alpha") ? "alpha" : metrics[0]);
  return h("details", { class: "fold" }, h("summary", {}, "The numbers compared"),
    h("div", { class: "controls" }, picker("Metric", metrics.map((m) => [m, (metricOf(m) || { name: m.replaceAll("_", " ") }).name]), metrics.includes("alpha") ? "alpha" : metrics[0], fill)), holder);
}

function roleDifferences(rows) {
  const list = (v) => (Array.isArray(v) ? v.map((x) => number(x, 3)).join(", ") : number(v));
  return h("details", { class: "fold" }, h("summary", {}, "Do roles differ? Rank tests"), dataTable({ title: "Differences between roles", filter: true, rows, columns: [
    { label: "comparison", left: true, value: (r) => r.comparison }, { label: "metric", left: true, value: (r) => r.metric, show: (r) => (metricOf(r.metric) || { name: String(r.metric).replaceAll("_", " ") }).name },
    { label: "layers", value: (r) => (r.n || [])[0], csv: (r) => r.n, show: (r) => list(r.n) }, { label: "medians", value: (r) => (r.medians || [])[0], csv: (r) => r.medians, show: (r) => list(r.medians) },
    { label: "effect", tip: "Cliff's delta, −1 to 1", value: (r) => r.effect }, { label: "p", tip: "Mann-Whitney, Holm-corrected", value: (r) => r.pvalue }] }));
}
