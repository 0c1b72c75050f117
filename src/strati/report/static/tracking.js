// A training run: one picture per quantity, a time line with one row per series, a slider through the steps.

import { empty, fold, h, picker, player, s, section, slider } from "./dom.js";
import { isNumber, number, plural, shorten, shortName, withError } from "./format.js";
import { blockMap, isTransformer } from "./blockmap.js";
import { figure, frame, hold, legend, line, nameRoom, rowName, verticalRule } from "./chart.js";
import { meaningOf } from "./help.js";
import { niceName } from "./meanings.js";
import { OKABE, cividis, extent, ordered, padded, phaseColour, quantile, sorted, stateColour, stateName } from "./scale.js";
import { dataTable, layerColumn, textColumn } from "./table.js";

const MANY = 12; // lines in one picture, beyond which points are thinned
const POINTS = 160;
const FIRST = ["loss", "accuracy", "llc", "stable_rank", "spikes", "spectral_norm", "entropy", "frobenius_norm"];
const STEPS = 4; // checkpoints that a time line needs

const place = (what) => (FIRST.indexOf(what) + FIRST.length + 1) % (FIRST.length + 1);
const isConstant = (rows) => new Set(rows.flatMap((r) => (r.values || []).filter(isNumber))).size <= 1;

export function trackSection(result, id) {
  const steps = result.steps || [];
  const changes = result.changes || [];
  const { kinds, constant } = quantities(result.series || []);
  const body = section(id, "Training run", `${plural(steps.length, "checkpoint")}, ${plural(changes.length, "change point")}.`);
  if (!kinds.length) {
    body.append(empty("This run holds no series that changes."));
    return body;
  }
  body.append(...runParts(result));
  if (constant.length) body.append(h("p", { class: "caption" }, `Constant over the run: ${constant.map(niceName).join(", ")}.`));
  if (changes.length) {
    body.append(dataTable({ title: "Change points", rows: changes, columns: [
      { label: "quantity", left: true, value: (c) => c.what, show: (c) => niceName(c.what) }, layerColumn((c) => c.layer ?? "network"),
      { label: "step", value: (c) => c.step }, { label: "from", value: (c) => c.low }, { label: "to", value: (c) => c.high }, { label: "p", value: (c) => c.pvalue }] }));
  }
  const failed = result.failed || [];
  if (failed.length) body.append(fold(`${plural(failed.length, "measurement")} failed, with the reason`, dataTable({ title: "Not measured", rows: failed, columns: ["checkpoint", "quantity", "reason"].map((k) => textColumn(k)) })));
  return body;
}

// The quantities that change over the run, the ones that answer first in front, and those that do not.
function quantities(rows) {
  const all = [...new Set(rows.map((r) => r.what))].sort((a, b) => place(a) - place(b));
  const of = (what) => rows.filter((r) => r.what === what);
  return { of, kinds: all.filter((what) => !isConstant(of(what))), constant: all.filter((what) => isConstant(of(what))) };
}

// The pictures of a run {steps, series, changes, states, layers}: four quantities, the others behind a fold, the time line.
export function runParts(run) {
  const [steps, changes, rows] = [run.steps || [], run.changes || [], run.series || []];
  const { of, kinds } = quantities(rows);
  if (!kinds.length) return [];
  const pictures = kinds.map((what) => course(what, of(what), steps, changes.filter((c) => c.what === what)));
  return [
    h("div", { class: "grid2" }, pictures.slice(0, 4)),
    ...(pictures.length > 4 ? [fold(`${plural(pictures.length - 4, "more quantity", "more quantities")}: ${kinds.slice(4).map(niceName).join(", ")}`, h("div", { class: "grid2" }, pictures.slice(4)))] : []),
    ...(run.states ? [statesOverTime(run.states, run.labels || steps.map(String))] : []),
    timeline(run, steps, rows, changes, kinds),
  ];
}

// One row per layer, one cell per checkpoint, coloured by the shape of the spectrum (or the state of the layer).
function statesOverTime(states, labels) {
  const layers = Object.entries(states).filter(([, list]) => list.some(Boolean));
  const colour = (word) => phaseColour(word) || stateColour(word) || "var(--none)";
  const words = [...new Set(layers.flatMap(([, list]) => list.filter(Boolean)))];
  const picture = figure({ title: "Shape of the spectra over the checkpoints", wide: true, draw: (width) => {
    const step = layers.length > 80 ? 9 : layers.length > 14 ? 18 : 26;
    const last = Math.max(1, labels.length - 1);
    const chart = frame({ width, height: layers.length * step + 60, margin: { left: nameRoom(layers.map(([name]) => name), width), top: 8 }, label: "Shape of the spectrum of each layer at each checkpoint", x: { domain: [-0.5, last + 0.5], ticks: [0, last], text: (t) => shorten(labels[t] ?? "", 18), label: "checkpoint" }, y: { domain: [layers.length - 0.5, -0.5], none: true } });
    const cell = chart.x(1) - chart.x(0);
    layers.forEach(([name, list], i) => {
      rowName(chart, i, name, step);
      list.forEach((word, k) => chart.marks.append(s("rect", { class: "cell", x: chart.x(k) - cell / 2 + 0.5, width: Math.max(1, cell - 1), y: chart.y(i) - step / 2 + 0.5, height: step - 1, fill: colour(word), tip: `${name}\n${labels[k]}: ${stateName(word)}` })));
    });
    return chart.svg;
  } });
  picture.append(legend(words.map((word) => [stateName(word), colour(word), meaningOf(word, "phase", "state")])));
  return picture;
}

// How far each layer's series has moved from the first step to the one that `step()` names.
function trackMap(result, step, choose) {
  const rows = (result.series || []).filter((r) => r.layer !== null);
  const layers = (result.layers || []).filter((l) => rows.some((r) => r.layer === l.name));
  const kinds = [...new Set(rows.map((r) => r.what))].sort((a, b) => place(a) - place(b));
  if (!kinds.length || !isTransformer(layers)) return null;
  const values = new Map(rows.map((r) => [`${r.what} ${r.layer}`, r.values || []]));
  const shift = (what) => (l) => {
    const list = values.get(`${what} ${l.name}`) || [];
    const [a, b] = [list.find(isNumber), list[step()]];
    return isNumber(a) && isNumber(b) ? b - a : null;
  };
  const changes = result.changes || [];
  const choices = kinds.flatMap((what) => [
    { key: what, name: `change of ${niceName(what)} since the first step`, difference: true, of: shift(what) },
    ...(changes.some((c) => c.what === what && c.layer !== null) ? [{ key: `${what}-bend`, name: `step of the first change point of ${niceName(what)}`, of: (l) => {
      const mine = changes.filter((c) => c.what === what && c.layer === l.name).map((c) => c.step);
      return mine.length ? Math.min(...mine) : null;
    } }] : [])]);
  return blockMap(layers, { choices, first: choices[0].key, title: "What the run changed, by block and role", caption: "Follows the step of the slider. A click shows the layer's spectrum at this step.", choose });
}

function timeline(result, steps, rows, changes, kinds) {
  const spectra = (result.spectra || {}).layers || [];
  const first = kinds.find((k) => rows.filter((r) => r.what === k).length > 1) || kinds[0];
  const state = { at: Math.max(0, steps.length - 1), what: first, layer: spectra.length ? spectra[0].layer : null };
  const now = h("p", { class: "caption now", "aria-live": "polite" });
  const strip = figure({ title: "Time line", wide: true, draw: (w) => drawStrip(w, rows.filter((r) => r.what === state.what), steps, changes.filter((c) => c.what === state.what), state),
    controls: h("div", { class: "controls small" }, picker("Quantity", kinds.map((k) => [k, niceName(k)]), state.what, (v) => { state.what = v; go(state.at); })),
    caption: `One row per layer, dark to bright from its smallest to its largest value.${changes.length ? " Red: change points with their 95 % interval." : ""}` });
  const parts = steps.length < STEPS ? [] : [strip];
  let ghost = null;
  if (spectra.length) {
    ghost = figure({ title: "Spectrum at this step", wide: true, draw: (w) => drawSpectrum(w, result.spectra, steps, state),
      controls: h("div", { class: "controls small" }, picker("Layer", spectra.map((l) => [l.layer, shortName(l.layer)]), state.layer, (v) => { state.layer = v; go(state.at); })),
      caption: "Eigenvalues in order, smallest to largest; dashed: the checkpoint before." });
    parts.push(ghost);
  }
  const steady = player(steps.length, 500, (i) => { control.set(i); go(i); });
  const control = slider("Step", { min: 0, max: Math.max(0, steps.length - 1), step: 1, value: state.at, show: (i) => number(steps[i]) }, (i) => { steady.stop(); steady.at(i); go(i); });
  control.querySelector("input").setAttribute("data-step", "1");

  const map = trackMap(result, () => state.at, (layer) => {
    if (!ghost || !spectra.some((l) => l.layer === layer.name)) return;
    state.layer = layer.name;
    ghost.querySelector("select").value = layer.name;
    ghost.redraw();
    ghost.scrollIntoView({ block: "nearest" });
  });

  function go(i) {
    state.at = i;
    if (parts.includes(strip)) strip.redraw();
    if (map) map.refresh();
    if (ghost) ghost.redraw();
    const near = changes.filter((c) => c.low <= steps[i] && steps[i] <= c.high);
    now.textContent = `Step ${number(steps[i])}${near.length ? `: within the interval of ${plural(near.length, "change point")}` : ""}`;
  }
  go(state.at);
  return h("div", { class: "timeline" }, h("div", { class: "controls time" }, steady.button, control), now, map, h("div", { class: "grid2" }, parts));
}

// Places on the axis: checkpoints side by side, so that early ones are not crowded.
function placeOf(steps, value) {
  if (value <= steps[0]) return 0;
  for (let i = 1; i < steps.length; i += 1) {
    if (steps[i] >= value) return steps[i] === steps[i - 1] ? i : i - 1 + (value - steps[i - 1]) / (steps[i] - steps[i - 1]);
  }
  return steps.length - 1;
}

function drawStrip(width, rows, steps, changes, state) {
  const step = rows.length > 60 ? 9 : rows.length > 14 ? 18 : 26;
  const left = nameRoom(rows.map((r) => r.layer ?? "network"), width);
  const last = Math.max(1, steps.length - 1);
  const ticks = [...new Set([0, Math.floor(last / 3), Math.floor((2 * last) / 3), last])];
  const chart = frame({ width, height: rows.length * step + 60, margin: { left, top: 8 }, label: `${niceName(state.what)} of every layer over the steps, with its changes`, x: { domain: [-0.5, last + 0.5], ticks, text: (t) => number(steps[t] ?? 0), label: "step" }, y: { domain: [rows.length - 0.5, -0.5], none: true } });
  chart.marks.append(heat(chart, rows, steps, step));
  const places = new Map(rows.map((r, i) => [r.layer, i]));
  rows.forEach((r, i) => rowName(chart, i, r.layer ?? "network", step));
  changes.forEach((c) => {
    const i = places.get(c.layer);
    if (i === undefined) return;
    const y = chart.y(i);
    const [a, at, b] = [c.low, c.step, c.high].map((v) => chart.x(placeOf(steps, v)));
    chart.over.append(s("path", { class: "change", stroke: "var(--red)", "stroke-width": 2, fill: "none", d: `M${a.toFixed(1)} ${y}H${b.toFixed(1)}M${at.toFixed(1)} ${y - step / 2 + 1}v${step - 2}`, tip: `${c.layer ?? "network"}: ${niceName(c.what)} changes at step ${number(c.step)}\n95 % interval ${number(c.low)} to ${number(c.high)}, p ${number(c.pvalue)}` }));
  });
  verticalRule(chart, state.at, null, {});
  return chart.svg;
}

// All cells as one bitmap: 100 layers of 500 checkpoints would be 50,000 elements.
function heat(chart, rows, steps, step) {
  const count = steps.length;
  const canvas = h("canvas", { width: Math.max(1, count), height: Math.max(1, rows.length) });
  const pen = canvas.getContext("2d");
  rows.forEach((row, i) => {
    const range = extent(row.values || []);
    if (!range) return;
    (row.values || []).forEach((v, k) => {
      if (!isNumber(v)) return;
      hold(chart, row.layer ?? "network", [[steps[k], v]]);
      pen.fillStyle = cividis(range[1] > range[0] ? (v - range[0]) / (range[1] - range[0]) : 0.5);
      pen.fillRect(k, i, 1, 1);
    });
  });
  const [a, b] = [chart.x(-0.5), chart.x(Math.max(count, 1) - 0.5)];
  return s("image", { class: "heat", href: canvas.toDataURL("image/png"), x: a, y: chart.y(-0.5), width: Math.max(1, b - a), height: rows.length * step, preserveAspectRatio: "none", style: { "image-rendering": "pixelated" } });
}

function drawSpectrum(width, spectra, steps, state) {
  const held = spectra.layers.find((l) => l.layer === state.layer) || spectra.layers[0];
  const at = (i) => (i >= 0 && held.values[i] ? held.values[i].map((v, k) => [spectra.ranks[k], 10 ** (v / spectra.unit)]) : null);
  let before = state.at - 1;
  while (before >= 0 && !held.values[before]) before -= 1;
  const all = held.values.flatMap((v) => (v ? [v[0], v[v.length - 1]] : [])).map((v) => 10 ** (v / spectra.unit));
  const chart = frame({ width, height: 300, label: `Spectrum of ${shortName(held.layer)} at step ${steps[state.at]}`, x: { domain: [0, 1], label: "share of the eigenvalues below" }, y: { domain: padded(all, 0.06, true), log: true, label: "eigenvalue" } });
  const [here, last] = [at(state.at), at(before)];
  if (last) line(chart, last, { class: "line ghost", stroke: "var(--soft)", "stroke-dasharray": "4 3", tip: `step ${number(steps[before])}` });
  if (here) line(chart, here, { class: "line here", stroke: OKABE[0], tip: `step ${number(steps[state.at])}` });
  else chart.over.append(s("text", { x: chart.left + 12, y: chart.top + 18 }, "not measured at this step"));
  return chart.svg;
}

function course(what, rows, steps, changes) {
  const name = niceName(what);
  const colour = (i) => (rows.length === 1 ? OKABE[0] : ordered(i, rows.length));
  const error = (row, k) => ((row.stderr || [])[k] ?? 0);
  const every = rows.length > MANY ? Math.max(1, Math.ceil(steps.length / POINTS)) : 1;
  const picture = figure({ title: name, wide: true, draw: (width) => {
    // Errors may stretch the axis by half of what the values span, no more.
    const values = sorted(rows.flatMap((r) => r.values || []));
    const [low, high] = [quantile(values, 0.005), quantile(values, 0.995)];
    const air = (high - low || Math.abs(high) || 1) * 0.5;
    const ends = rows.length <= 4 ? rows.flatMap((r) => (r.values || []).flatMap((v, k) => (isNumber(v) ? [v - 2 * error(r, k), v + 2 * error(r, k)] : []))) : [];
    const chart = frame({ width, height: 280, label: `${name} over training steps`, x: { domain: steps.length > 1 ? [Math.min(...steps), Math.max(...steps)] : [0, 1], label: "step" }, y: { domain: padded([low, high, ...ends.map((v) => Math.max(low - air, Math.min(high + air, v)))]), label: name } });
    if (rows.length <= 4) changes.forEach((c) => chart.marks.append(s("rect", { class: "interval", x: chart.x(c.low), width: Math.max(1, chart.x(c.high) - chart.x(c.low)), y: chart.top, height: chart.bottom - chart.top, fill: "var(--red)", opacity: 0.12 })));
    changes.slice(0, 40).forEach((c) => verticalRule(chart, c.step, null, {}));
    rows.forEach((row, i) => {
      if (rows.length <= 4) band(chart, row, steps, colour(i));
      line(chart, (row.values || []).map((v, k) => [steps[k], v ?? NaN]).filter((_, k) => k % every === 0 || k === steps.length - 1), { class: rows.length > MANY ? "line thin" : "line", stroke: colour(i), tip: `${row.layer ?? "network"}` });
      const lone = (row.values || []).filter(isNumber).length === 1 ? (row.values || []).findIndex(isNumber) : -1;
      if (lone >= 0) chart.marks.append(s("circle", { class: "dot", cx: chart.x(steps[lone]), cy: chart.y(row.values[lone]), r: 4, fill: colour(i), tip: `step ${number(steps[lone])}: ${withError(row.values[lone], error(row, lone))}` }));
    });
    return chart.svg;
  }, caption: changes.length ? `Vertical lines: change points (${changes.map((c) => `step ${number(c.step)}`).slice(0, 4).join(", ")}).` : rows.length > MANY ? "One line per layer, from the first (dark) to the last (bright)." : null });
  if (rows.length > 1 && rows.length <= MANY) picture.insertBefore(legend(rows.map((r, i) => [shortName(r.layer ?? "network", 30), colour(i), r.layer ?? "network", "stroke"])), changes.length ? picture.lastChild : null);
  return picture;
}

// Twice the standard error on either side.
function band(chart, row, steps, colour) {
  const known = (row.values || []).map((v, k) => [steps[k], v, (row.stderr || [])[k]]).filter(([, v, e]) => isNumber(v) && isNumber(e) && e > 0);
  if (known.length < 2) return;
  const edge = (points, sign) => points.map(([x, v, e]) => `${chart.x(x).toFixed(1)} ${chart.y(v + sign * 2 * e).toFixed(1)}`);
  chart.marks.append(s("path", { class: "band", d: `M${[...edge(known, 1), ...edge([...known].reverse(), -1)].join("L")}Z`, fill: colour, opacity: 0.18 }));
}
