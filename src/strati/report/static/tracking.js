// A training run: a time line with one row per series, a slider through the steps that moves a layer's spectrum, and one picture per quantity.

import { empty, h, picker, player, s, section, slider } from "./dom.js";
import { abbreviate, isNumber, number, plural } from "./format.js";
import { figure, frame, hold, legend, line, rowName, verticalRule } from "./chart.js";
import { trackMap } from "./differences.js";
import { OKABE, cividis, extent, ordered, padded } from "./scale.js";
import { dataTable } from "./table.js";

const MANY = 12; // lines in one picture, beyond which points are thinned
const POINTS = 160;

export function trackSection(result, id) {
  const steps = result.steps || [];
  const changes = result.changes || [];
  const rows = result.series || [];
  const kinds = [...new Set(rows.map((r) => r.what))];
  const body = section(id, "Training run", `${plural(steps.length, "checkpoint")}, ${plural(changes.length, "change")} found.`);
  if (!kinds.length) {
    body.append(empty("This run holds no series."));
    return body;
  }
  body.append(timeline(result, steps, rows, changes, kinds));
  body.append(h("div", { class: "grid2" }, kinds.map((what) => course(what, rows.filter((r) => r.what === what), steps, changes.filter((c) => c.what === what)))));
  if (changes.length) {
    body.append(dataTable({ title: "Changes", rows: changes, columns: [
      { label: "quantity", left: true, value: (c) => c.what, show: (c) => c.what }, { label: "layer", left: true, value: (c) => c.layer, show: (c) => c.layer ?? "network" },
      { label: "step", value: (c) => c.step }, { label: "from", value: (c) => c.low }, { label: "to", value: (c) => c.high }, { label: "p", value: (c) => c.pvalue }] }));
  }
  const failed = result.failed || [];
  if (failed.length) {
    body.append(dataTable({ title: "Not measured", rows: failed, columns: ["checkpoint", "quantity", "reason"].map((k) => ({ label: k, left: true, value: (f) => f[k], show: (f) => f[k] })) }));
  }
  return body;
}

function timeline(result, steps, rows, changes, kinds) {
  const spectra = (result.spectra || {}).layers || [];
  const first = kinds.find((k) => rows.some((r) => r.what === k && r.layer !== null)) || kinds[0];
  const state = { at: Math.max(0, steps.length - 1), what: first, layer: spectra.length ? spectra[0].layer : null };
  const now = h("p", { class: "caption now", "aria-live": "polite" });
  const strip = figure({ title: "Time line", wide: true, draw: (w) => drawStrip(w, rows.filter((r) => r.what === state.what), steps, changes.filter((c) => c.what === state.what), state),
    controls: h("div", { class: "controls small" }, picker("Quantity", kinds, state.what, (v) => { state.what = v; go(state.at); })),
    caption: "One row per series, dark to bright from its smallest to its largest value. Red: where its course changes, with the 95 % interval." });
  const parts = [strip];
  let ghost = null;
  if (spectra.length) {
    ghost = figure({ title: "Spectrum at this step", wide: true, draw: (w) => drawSpectrum(w, result.spectra, steps, state),
      controls: h("div", { class: "controls small" }, picker("Layer", spectra.map((l) => l.layer), state.layer, (v) => { state.layer = v; go(state.at); })),
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
    strip.redraw();
    if (map) map.refresh();
    if (ghost) ghost.redraw();
    const near = changes.filter((c) => c.low <= steps[i] && steps[i] <= c.high);
    now.textContent = `step ${number(steps[i])}: ${near.length ? `within the interval of ${plural(near.length, "change")}` : "no change here"}`;
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
  const left = Math.min(190, width * 0.34);
  const last = Math.max(1, steps.length - 1);
  const ticks = [...new Set([0, Math.floor(last / 3), Math.floor((2 * last) / 3), last])];
  const chart = frame({ width, height: rows.length * step + 60, margin: { left, top: 8 }, label: `${state.what} of every layer over the steps, with its changes`, x: { domain: [-0.5, last + 0.5], ticks, text: (t) => number(steps[t] ?? 0), label: "step" }, y: { domain: [rows.length - 0.5, -0.5], none: true } });
  chart.marks.append(heat(chart, rows, steps, step));
  const places = new Map(rows.map((r, i) => [r.layer, i]));
  rows.forEach((r, i) => rowName(chart, i, r.layer ?? "network", step));
  changes.forEach((c) => {
    const i = places.get(c.layer);
    if (i === undefined) return;
    const y = chart.y(i);
    const [a, at, b] = [c.low, c.step, c.high].map((v) => chart.x(placeOf(steps, v)));
    chart.over.append(s("path", { class: "change", stroke: "var(--red)", "stroke-width": 2, fill: "none", d: `M${a.toFixed(1)} ${y}H${b.toFixed(1)}M${at.toFixed(1)} ${y - step / 2 + 1}v${step - 2}`, tip: `${c.layer ?? "network"}: ${c.what} changes at step ${number(c.step)}\n95 % interval ${number(c.low)} to ${number(c.high)}, p ${number(c.pvalue)}` }));
  });
  verticalRule(chart, state.at, number(steps[state.at] ?? 0), {});
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
  const chart = frame({ width, height: 300, label: `Spectrum of ${held.layer} at step ${steps[state.at]}`, x: { domain: [0, 1], label: "share of the eigenvalues below" }, y: { domain: padded(all, 0.06, true), log: true, label: "eigenvalue" } });
  const [here, last] = [at(state.at), at(before)];
  if (last) line(chart, last, { class: "line ghost", stroke: "var(--soft)", "stroke-dasharray": "4 3", tip: `step ${number(steps[before])}` });
  if (here) line(chart, here, { class: "line here", stroke: OKABE[0], tip: `step ${number(steps[state.at])}` });
  else chart.over.append(s("text", { x: chart.left + 12, y: chart.top + 18 }, "not measured at this step"));
  return chart.svg;
}

function course(what, rows, steps, changes) {
  const colour = (i) => (rows.length === 1 ? OKABE[0] : ordered(i, rows.length));
  const error = (row, k) => ((row.stderr || [])[k] ?? 0);
  const every = rows.length > MANY ? Math.max(1, Math.ceil(steps.length / POINTS)) : 1;
  const picture = figure({ title: String(what), wide: true, draw: (width) => {
    const all = rows.flatMap((r) => (r.values || []).flatMap((v, k) => (isNumber(v) ? [v - error(r, k), v + error(r, k)] : [])));
    const chart = frame({ width, height: 300, label: `${what} over training steps`, x: { domain: steps.length > 1 ? [Math.min(...steps), Math.max(...steps)] : [0, 1], label: "step" }, y: { domain: padded(all), label: String(what) } });
    if (rows.length <= 4) changes.forEach((c) => chart.marks.append(s("rect", { class: "interval", x: chart.x(c.low), width: Math.max(1, chart.x(c.high) - chart.x(c.low)), y: chart.top, height: chart.bottom - chart.top, fill: "var(--red)", opacity: 0.12 })));
    changes.slice(0, 40).forEach((c) => verticalRule(chart, c.step, null, {}));
    rows.forEach((row, i) => {
      if (rows.length <= 4) band(chart, row, steps, colour(i));
      line(chart, (row.values || []).map((v, k) => [steps[k], v ?? NaN]).filter((_, k) => k % every === 0 || k === steps.length - 1), { stroke: colour(i), tip: `${row.layer ?? "network"}` });
    });
    return chart.svg;
  }, caption: changes.length ? `Vertical lines: changes (${changes.map((c) => `step ${number(c.step)}`).slice(0, 4).join(", ")}).` : "No change found." });
  if (rows.length > 1 && rows.length <= MANY) picture.insertBefore(legend(rows.map((r, i) => [abbreviate(r.layer ?? "network", 30), colour(i), r.layer ?? "network", "stroke"])), picture.lastChild);
  return picture;
}

// Twice the standard error on either side.
function band(chart, row, steps, colour) {
  const known = (row.values || []).map((v, k) => [steps[k], v, (row.stderr || [])[k]]).filter(([, v, e]) => isNumber(v) && isNumber(e) && e > 0);
  if (known.length < 2) return;
  const edge = (points, sign) => points.map(([x, v, e]) => `${chart.x(x).toFixed(1)} ${chart.y(v + sign * 2 * e).toFixed(1)}`);
  chart.marks.append(s("path", { class: "band", d: `M${[...edge(known, 1), ...edge([...known].reverse(), -1)].join("L")}Z`, fill: colour, opacity: 0.18 }));
}
