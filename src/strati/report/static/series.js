// A training run: phases as a fence diagram (layers by time) and a metric's course, with a slider through time.

import { h, picker, player, s, slider } from "./dom.js";
import { abbreviate, isNumber, number, shorten } from "./format.js";
import { figure, frame, legend, line, rowName, verticalRule } from "./chart.js";
import { PHASES, ordered, padded, phaseColour } from "./scale.js";

const COURSES = [["alpha", "tail exponent α"], ["stable_rank", "stable rank"], ["hard_rank", "hard rank"], ["quasi_null", "quasi-null"], ["spikes", "spikes"], ["entropy", "entropy"], ["mp_sigma", "bulk σ"], ["relative_change", "relative change"]];

export function series(run) {
  const labels = (run.labels || []).map(String);
  const layers = run.layers || [];
  const courses = COURSES.filter(([k]) => layers.some((l) => (l[k] || []).some(isNumber)));
  const state = { at: labels.length - 1, metric: courses.length ? courses[0][0] : "alpha" };
  const now = h("p", { class: "caption now", "aria-live": "polite" });
  const fence = figure({ title: "Phases through training", wide: true, draw: (w) => drawFence(w, layers, labels, state.at), caption: "Each row is a layer, each column a checkpoint; a small mark shows where a layer leaves the random-like phase." });
  const used = PHASES.filter((p) => layers.some((l) => (l.phase || []).includes(p.key)));
  fence.insertBefore(legend(used.map((p) => [p.key, p.colour, p.meaning])), fence.lastChild);
  const course = figure({ title: "Course of a metric", wide: true, draw: (w) => drawCourse(w, layers, labels, state), controls: h("div", { class: "controls small" }, picker("Metric", courses, state.metric, (v) => { state.metric = v; go(state.at); })) });
  if (layers.length <= 12) course.append(legend(layers.map((l, i) => [abbreviate(l.name, 30), ordered(i, layers.length), l.name, "stroke"])));
  const steps = player(labels.length, 600, (i) => { control.set(i); go(i); });
  const control = slider("Checkpoint", { min: 0, max: Math.max(0, labels.length - 1), step: 1, value: state.at, show: (i) => labels[i] ?? "" }, (i) => { steps.stop(); steps.at(i); go(i); });
  control.querySelector("input").setAttribute("data-time", "1");

  function go(i) {
    state.at = i;
    fence.redraw();
    course.redraw();
    const tally = PHASES.map((p) => [p.key, layers.filter((l) => (l.phase || [])[i] === p.key).length]).filter(([, n]) => n);
    now.textContent = `${labels[i] ?? ""}: ${tally.map(([k, n]) => `${n} ${k}`).join(", ") || "no phases"}`;
  }
  go(state.at);
  return h("div", { class: "series" }, h("h3", { class: "sub" }, "Training series"), h("div", { class: "controls time" }, steps.button, control), now, h("div", { class: "grid2" }, fence, course));
}

function drawFence(width, layers, labels, at) {
  const step = layers.length > 80 ? 9 : layers.length > 14 ? 20 : 28;
  const left = Math.min(190, width * 0.34);
  const ticks = [...new Set([0, Math.floor((labels.length - 1) / 2), labels.length - 1])];
  const chart = frame({ width, height: layers.length * step + 62, margin: { left, top: 8 }, label: "Phase of each layer at each checkpoint", x: { domain: [-0.5, labels.length - 0.5], ticks, text: (t) => shorten(labels[t] ?? "", 18), label: "checkpoint" }, y: { domain: [layers.length - 0.5, -0.5], none: true } });
  const cell = chart.x(1) - chart.x(0);
  layers.forEach((layer, i) => {
    rowName(chart, i, layer.name, step);
    (layer.phase || []).forEach((phase, t) => chart.marks.append(s("rect", { x: chart.x(t) - cell / 2 + 0.5, width: Math.max(1, cell - 1), y: chart.y(i) - step / 2 + 0.5, height: step - 1, fill: phaseColour(phase) || "var(--none)", opacity: t <= at ? 1 : 0.28, tip: `${layer.name}\n${labels[t]}: ${phase ?? "–"}` })));
    if (isNumber(layer.leaves_random_like)) chart.marks.append(s("path", { class: "leave", d: `M${chart.x(layer.leaves_random_like) - cell / 2} ${chart.y(i) - step / 2}v${step}` }));
  });
  verticalRule(chart, at, null, {});
  return chart.svg;
}

function drawCourse(width, layers, labels, state) {
  const key = state.metric;
  const values = layers.flatMap((l) => l[key] || []);
  const ticks = [...new Set([0, Math.floor((labels.length - 1) / 2), labels.length - 1])];
  const chart = frame({ width, height: 320, label: "Course through training", x: { domain: [0, Math.max(1, labels.length - 1)], ticks, text: (t) => shorten(labels[t] ?? "", 18), label: "checkpoint" }, y: { domain: padded(values), label: (COURSES.find(([k]) => k === key) || ["", key])[1] } });
  layers.forEach((layer, i) => {
    const colour = ordered(i, layers.length);
    const points = (layer[key] || []).map((v, t) => [t, v]);
    line(chart, points, { stroke: colour, tip: layer.name });
    const here = points[state.at];
    if (here && isNumber(here[1])) chart.marks.append(s("circle", { class: "dot", cx: chart.x(here[0]), cy: chart.y(here[1]), r: 4, fill: colour, tip: `${layer.name}\n${labels[state.at]}: ${number(here[1])}` }));
  });
  verticalRule(chart, state.at, labels[state.at], {});
  return chart.svg;
}
