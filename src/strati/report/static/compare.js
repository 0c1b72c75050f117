// Networks side by side: what changed in which layer, the loss between them, and their spectra on common axes.

import { choice, empty, fold, h, note, picker, replace, s, section } from "./dom.js";
import { isNumber, networkNames, number, percent, plural, shortName, withError } from "./format.js";
import { blockMap, isTransformer } from "./blockmap.js";
import { dots, errorBar, figure, frame, hold, legend, line, rowFrame, verticalRule } from "./chart.js";
import { meaningOf, term } from "./help.js";
import { doubt, niceName } from "./meanings.js";
import { histogram } from "./refit.js";
import { OKABE, ordered, padded, stateName } from "./scale.js";
import { dataTable, layerColumn, textColumn } from "./table.js";
import { runParts } from "./tracking.js";

const CHANGES = [
  ["relative_change", "relative change", "‖W′ − W‖ / ‖W‖: how far the weights moved.", (v) => percent(v)],
  ["subspace_overlap", "shared leading directions", "How much of the leading directions the layers share; compare it with what chance gives.", (v) => percent(v)],
  ["update_stable_rank", "stable rank of the update", "How many directions the change uses.", (v) => number(v)],
  ["spectral_distance", "spectral distance", "Distance of the spectra in log-eigenvalue.", (v) => number(v)],
];
const UPDATES = { untouched: "#999999", rounding: "#56b4e9", "low-rank": "#0072b2", dense: "#e69f00", undecided: "#cc79a7" };
const ENOUGH = 100; // eigenvalues that a density needs
const last = (value) => (Array.isArray(value) ? value[value.length - 1] : value);
const colourOf = (i, n) => (n <= 4 ? OKABE[i] : ordered(i, n)); // more than four are a series and get colours in order

export function compareSection(result, id) {
  const names = networkNames(result.networks || []);
  const layers = result.layers || [];
  const body = section(id, "Comparison", `${names.join(" and ")}: the same layers, compared.`);
  if (result.related === false) body.append(note("", "No layer resembles its partner more than chance allows: these networks are not related, and their differences say nothing about training."));
  if (result.path) body.append(lossPath(result.path, names));
  if (!layers.length) {
    body.append(empty("These networks share no layer of the same name and shape; there is nothing to compare."));
    return body;
  }
  const metrics = [...new Set(layers.flatMap((l) => Object.keys(l.metrics || {})))].filter((k) => layers.some((l) => (l.metrics[k] || []).some(isNumber)));
  const changes = CHANGES.filter(([k]) => layers.some((l) => isNumber(last(l[k]))));
  const run = result.series && (result.series.layers || []).length;
  const spectra = layers.filter((l) => Array.isArray(l.eigenvalues) && l.eigenvalues.length > 1);
  const laid = spectra.length ? overlay(spectra, names) : null;
  if (run) body.append(...runParts(asRun(result.series)));
  else if (isTransformer(layers)) body.append(changeMap(layers, names, metrics, changes, laid));
  else body.append(h("div", { class: "grid2" }, changes.length ? changeBars(layers, changes) : null, ladder(layers, names, metrics)));
  if (laid) body.append(laid);
  const aligned = [...new Set(layers.map((l) => last(l.aligned)).filter(Boolean))];
  if (aligned.length) body.append(h("p", { class: "caption" }, `Undone before the weights were subtracted: ${aligned.join(", ")} (${plural(layers.filter((l) => last(l.aligned)).length, "layer")}).`));
  body.append(table(layers, names));
  const missing = result.unmatched || [];
  if (missing.length) body.append(fold(`${plural(missing.length, "layer")} without a partner`, dataTable({ title: "Without a partner", rows: missing, columns: Object.keys(missing[0]).map((k) => textColumn(k, k.replaceAll("_", " "))) })));
  const tests = (result.role_differences || []).flat();
  if (tests.length) body.append(roleDifferences(tests));
  return body;
}

// A series of checkpoints as a training run has it.
function asRun(run) {
  const labels = (run.labels || []).map(String);
  const steps = labels.map((label, i) => Number((label.match(/(\d+)\D*$/) || [])[1] ?? i));
  const rows = (run.layers || []).flatMap((l) => Object.entries(l).filter(([, v]) => Array.isArray(v) && v.some(isNumber)).map(([what, values]) => ({ what, layer: l.name, values, stderr: l[`${what}_stderr`] || [] })));
  const states = Object.fromEntries((run.layers || []).map((l) => [l.name, l.phase || l.state || []]));
  return { labels, steps: new Set(steps).size === steps.length ? steps : labels.map((_, i) => i), series: rows.filter((r) => !r.what.endsWith("_stderr")), changes: [], states, layers: run.layers || [] };
}

// One colour for each kind of update, shown with the number of layers.
function changeMap(layers, names, metrics, changes, laid) {
  const shift = (key) => (l) => {
    const values = (l.metrics || {})[key] || [];
    return isNumber(values[0]) && isNumber(last(values)) ? last(values) - values[0] : null;
  };
  const states = (l) => ((l.metrics || {}).state || (l.metrics || {}).phase || []);
  const became = (l) => (states(l)[0] === last(states(l)) ? "unchanged" : `${stateName(states(l)[0])} → ${stateName(last(states(l)))}`);
  const kinds = [...new Set(layers.map(became))];
  const choices = [
    ...changes.map(([key, name]) => ({ key, name, of: (l) => last(l[key]) })),
    ...(layers.some((l) => l.update_kind) ? [{ key: "update_kind", name: "kind of update", category: { of: (l) => last(l.update_kind), colour: (k) => UPDATES[k], name: (k) => k, meaning: (k) => meaningOf(k, "code") } }] : []),
    ...(layers.some((l) => states(l).length > 1) ? [{ key: "state", name: "change of state", category: { of: became, colour: (t) => (t === "unchanged" ? "var(--none)" : OKABE[kinds.indexOf(t) % OKABE.length]), name: (t) => t, meaning: (t) => `layers whose state is ${t}` } }] : []),
    ...metrics.filter((m) => layers.some((l) => isNumber(shift(m)(l)))).map((m) => ({ key: m, name: `change of ${niceName(m)}`, difference: true, of: shift(m), doubt: (l) => doubt(m, l) })),
  ];
  const detail = h("div", { class: "opened", "aria-live": "polite" });
  const map = blockMap(layers, { choices, first: choices[0].key, title: "What changed, by block and role", caption: `From ${names[0]} to ${last(names)}. A click shows the layer's numbers and spectra; arrow keys move.`, choose: (layer) => {
    replace(detail, oneLayer(layer, names, metrics, changes));
    if (laid) laid.open(layer);
  } });
  return h("div", {}, map, detail);
}

function oneLayer(layer, names, metrics, changes) {
  const rows = [
    ...changes.map(([key, name, , text]) => ({ name, values: [...Array(names.length - 1).fill(null), last(layer[key])], text })),
    ...metrics.filter((m) => ((layer.metrics || {})[m] || []).some(isNumber)).map((m) => ({ name: niceName(m), values: layer.metrics[m], text: number })),
  ];
  const difference = (r) => (r.values.length > 1 && isNumber(r.values[0]) && isNumber(last(r.values)) ? last(r.values) - r.values[0] : null);
  return dataTable({ title: shortName(layer.name, 60), rows, columns: [
    textColumn("name", "number"), ...names.map((n, i) => ({ label: n, value: (r) => r.values[i], show: (r) => r.text(r.values[i]) })),
    { label: "difference", value: difference, show: (r) => (difference(r) === null ? "–" : `${difference(r) > 0 ? "+" : ""}${number(difference(r))}`) }] });
}

function ladder(layers, names, metrics) {
  const state = { metric: metrics.includes("stable_rank") ? "stable_rank" : metrics[0] };
  const picture = figure({ title: "Layer by layer", wide: true, draw: (width) => {
    const all = layers.flatMap((l) => (l.metrics || {})[state.metric] || []);
    const title = niceName(state.metric);
    const chart = rowFrame({ width, names: layers.map((l) => l.name), step: layers.length > 60 ? 11 : 24, least: 180, label: `${title} of each layer in each network`, x: { domain: padded(all), label: title } });
    layers.forEach((layer, i) => {
      const values = ((layer.metrics || {})[state.metric] || []).map((v, k) => [v, k]).filter(([v]) => isNumber(v));
      const error = (k) => ((layer.metrics || {})[`${state.metric}_stderr`] || [])[k];
      if (values.length > 1) line(chart, values.map(([v]) => [v, i]), { class: "link" });
      dots(chart, values.map(([v, k]) => ({ x: v, y: i, colour: colourOf(k, names.length), tip: `${layer.name}\n${names[k]}: ${withError(v, error(k))}` })), chart.thick > 12 ? 4.2 : 3);
    });
    return chart.svg;
  }, controls: h("div", { class: "controls small" }, picker("Metric", metrics.map((m) => [m, niceName(m)]), state.metric, (v) => { state.metric = v; picture.redraw(); })), caption: "One row per layer in network order; one dot per network, joined." });
  picture.insertBefore(legend(names.map((n, i) => [n, colourOf(i, names.length)])), picture.lastChild);
  return picture;
}

function changeBars(layers, changes) {
  const state = { change: changes[0] };
  const said = h("p", { class: "caption" }, state.change[2]);
  const picture = figure({ title: "What changed", wide: true, draw: (width) => {
    const [key, title, , text] = state.change;
    const values = layers.map((l) => last(l[key]));
    const chart = rowFrame({ width, names: layers.map((l) => l.name), step: layers.length > 60 ? 11 : 24, least: 180, label: title, x: { domain: [0, padded(values)[1]], label: title, text } });
    const thick = Math.min(22, chart.thick * 0.7);
    layers.forEach((layer, i) => {
      if (!isNumber(values[i])) return;
      hold(chart, layer.name, [[values[i], i]]);
      chart.marks.append(s("rect", { class: "bar strong", x: chart.left, width: Math.max(0.5, chart.x(values[i]) - chart.left), y: chart.y(i) - thick / 2, height: thick, tip: `${layer.name}\n${title}: ${text(values[i])}` }));
      const chance = key === "subspace_overlap" ? last(layer.overlap_by_chance) : null;
      if (isNumber(chance)) chart.marks.append(s("path", { class: "leave", d: `M${chart.x(chance)} ${chart.y(i) - thick * 0.6}v${thick * 1.2}`, tip: `${layer.name}\nby chance: ${text(chance)}` }));
    });
    return chart.svg;
  }, controls: h("div", { class: "controls small" }, picker("Change", changes.map(([k, n]) => [k, n]), state.change[0], (v) => { state.change = changes.find(([k]) => k === v); said.textContent = state.change[2]; picture.redraw(); })) });
  picture.append(said);
  return picture;
}

// The loss on the straight line between the networks, as stored and with the units of the last one renumbered.
function lossPath(path, names) {
  const ways = [["stored", "weights as stored", OKABE[3]], ["aligned", "units aligned", OKABE[0]]].filter(([k]) => path[k] && Array.isArray(path[k].loss));
  const picture = figure({ title: "Loss between the networks", wide: true, draw: (width) => {
    const error = (way, i) => (path[way].stderr || [])[i] || 0;
    const all = ways.flatMap(([k]) => path[k].loss.flatMap((v, i) => [v - 2 * error(k, i), v + 2 * error(k, i)]));
    const chart = frame({ width, height: 260, label: "Loss along the straight line between the networks", x: { domain: [0, 1], label: `from ${names[0]} (0) to ${last(names)} (1)` }, y: { domain: padded(all), label: String(path.loss_name || "loss").replace("_", "-") } });
    for (const [way, label, stroke] of ways) {
      line(chart, path.positions.map((x, i) => [x, path[way].loss[i]]), { stroke, tip: label });
      path.positions.forEach((x, i) => errorBar(chart, x, path[way].loss[i] - 2 * error(way, i), path[way].loss[i] + 2 * error(way, i), { stroke }));
      if (path[way].barrier > 0) verticalRule(chart, path[way].barrier_at, "barrier", { stroke }, way === "stored" ? 0 : 1);
    }
    return chart.svg;
  }, caption: `Bars are two standard errors over ${plural(path.rows, "row")}. ${ways.map(([k, label]) => `Barrier (${label}): ${withError(path[k].barrier, path[k].barrier_stderr)}.`).join(" ")}` });
  picture.insertBefore(legend(ways.map(([, label, colour]) => [label, colour, null, "stroke"])), picture.lastChild);
  return picture;
}

// Densities where there are many eigenvalues, shares below otherwise: a density of 60 eigenvalues is a row of single steps.
function overlay(layers, names) {
  const state = { layer: layers[0], log: true };
  const picture = figure({ title: "Spectra", wide: true, draw: (width) => {
    const spectra = state.layer.eigenvalues.map((e) => (e ? Array.from(e).filter((v) => v > 0).sort((a, b) => a - b) : []));
    const domain = state.log ? padded(spectra.flat(), 0.03, true) : [0, padded(spectra.flat())[1]];
    const few = Math.min(...spectra.filter((e) => e.length).map((e) => e.length)) < ENOUGH;
    const bars = few ? [] : spectra.map((e) => (e.length ? histogram(e, domain, Math.min(50, Math.round(2 * Math.sqrt(e.length))), state.log) : []));
    const chart = frame({ width, height: 280, label: `Spectra of ${shortName(state.layer.name)}`, x: { domain, log: state.log, label: "eigenvalue λ" }, y: few ? { domain: [0, 1.02], label: "share of the eigenvalues below λ" } : { domain: [0, 1.1 * Math.max(...bars.flat().map((b) => b.density), 1e-12)], label: state.log ? "density per decade" : "density" } });
    spectra.forEach((e, k) => line(chart, few ? e.map((v, i) => [v, (i + 0.5) / e.length]) : bars[k].flatMap((b) => [[b.from, b.density], [b.to, b.density]]), { stroke: colourOf(k, names.length), tip: names[k] }));
    return chart.svg;
  }, controls: h("div", { class: "controls small" },
    picker("Layer", layers.map((l, i) => [String(i), shortName(l.name, 48)]), "0", (v) => { state.layer = layers[Number(v)]; picture.redraw(); }),
    choice("Axis", [["log", "log"], ["linear", "linear"]], "log", (v) => { state.log = v === "log"; picture.redraw(); })) });
  picture.append(legend(names.map((n, i) => [n, colourOf(i, names.length), null, "stroke"])));
  picture.open = (layer) => {
    if (!layers.includes(layer)) return;
    state.layer = layer;
    picture.querySelector("select").value = String(layers.indexOf(layer));
    picture.redraw();
  };
  return picture;
}

function table(layers, names) {
  const states = (l) => ((l.metrics || {}).state || []).map(stateName);
  const mixture = (l) => (l.mixture && Array.isArray(l.mixture.weights) ? l.mixture.weights.map((w, i) => withError(w, (l.mixture.stderr || [])[i])).join(", ") : null);
  return dataTable({ title: "Layers compared", rows: layers, columns: [
    layerColumn((l) => l.name), textColumn("role", "role", "role"),
    { label: "changed", help: "relative_change", value: (l) => last(l.relative_change), show: (l) => percent(last(l.relative_change)) },
    { label: "update", help: "update_kind", left: true, value: (l) => last(l.update_kind), show: (l) => (last(l.update_kind) ? term(last(l.update_kind)) : "–") },
    { label: "rank of update", help: "update_rank", value: (l) => last(l.update_rank) },
    { label: "shared directions", help: "subspace_overlap", value: (l) => last(l.subspace_overlap), show: (l) => (isNumber(last(l.subspace_overlap)) ? `${percent(last(l.subspace_overlap), 2)}${isNumber(last(l.overlap_by_chance)) ? ` (chance ${percent(last(l.overlap_by_chance), 2)})` : ""}` : "–") },
    { label: names.length > 1 ? "state" : "", left: true, help: "state", value: (l) => [...new Set(states(l))].join(" → "), show: (l) => [...new Set(states(l))].join(" → ") || "–" },
    { label: "aligned", left: true, value: (l) => last(l.aligned), show: (l) => last(l.aligned) || "–" },
    { label: "weights in the merge", left: true, value: mixture, show: (l) => mixture(l) || "–" },
    { label: "new warnings", left: true, value: (l) => (l.new_warnings || []).join(" "), show: (l) => (l.new_warnings || []).map((c) => [term(c), " "]) }] });
}

function roleDifferences(rows) {
  const list = (v) => (Array.isArray(v) ? v.map((x) => number(x)).join(", ") : number(v));
  return fold("Do roles differ? Rank tests", dataTable({ title: "Differences between roles", rows, columns: [
    textColumn("comparison"), { label: "metric", left: true, value: (r) => r.metric, show: (r) => niceName(r.metric) },
    { label: "layers", value: (r) => (r.n || [])[0], csv: (r) => r.n, show: (r) => list(r.n) }, { label: "medians", value: (r) => (r.medians || [])[0], csv: (r) => r.medians, show: (r) => list(r.medians) },
    { label: "effect", tip: "Cliff's delta, −1 to 1", value: (r) => r.effect }, { label: "p", tip: "Mann-Whitney, Holm-corrected", value: (r) => r.pvalue }] }));
}
