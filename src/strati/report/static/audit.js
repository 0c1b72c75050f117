// Which metrics to trust: metric against performance, correlations with their intervals, robust and critical layers, verdicts.

import { choice, empty, h, picker, replace, s, section } from "./dom.js";
import { interval, isNumber, number, percent, shorten } from "./format.js";
import { dots, figure, frame, legend, rowName, verticalRule } from "./chart.js";
import { metricOf } from "./meanings.js";
import { OKABE, padded } from "./scale.js";
import { dataTable } from "./table.js";

export const CLASSES = { robust: "#0072b2", mixed: "#c9a400", critical: "#d55e00" };
const nice = (key) => (metricOf(key) || { name: String(key).replaceAll("_", " ") }).name;
const nameOfLayer = (layer) => (layer === null || layer === undefined ? "all layers pooled" : String(layer).startsWith("type:") ? `type ${String(layer).slice(5)}` : String(layer));

const pooled = (list) => (list || []).filter((v) => v.intervention === null || v.intervention === undefined);

export function auditSection(whole, id) {
  const result = { ...whole, metrics: pooled(whole.metrics), verdicts: pooled(whole.verdicts) };
  const body = section(id, "Which metrics to trust", "Layers were changed one at a time. A metric that knows how good a layer is should move with the network's performance.");
  const failed = Array.isArray(result.failed) ? result.failed.length : result.failed;
  if (failed) body.append(h("p", { class: "note" }, `${number(failed)} units of the study failed and are left out.`));
  if ((result.verdicts || []).length) body.append(verdicts(result.verdicts));
  const points = result.points || [];
  const left = [points.length ? scatter(result, points) : null, (result.layers || []).length ? map(result) : null].filter(Boolean);
  const parts = [left.length ? h("div", { class: "stack" }, left) : null, (result.metrics || []).length ? forest(result.metrics) : null].filter(Boolean);
  if (parts.length) body.append(h("div", { class: "grid2" }, parts));
  if ((result.metrics || []).length) body.append(h("details", { class: "fold" }, h("summary", {}, "All correlations"), correlations(whole.metrics)));
  if (body.children.length === 1) body.append(empty("This audit holds no finished unit yet. Run the study to its end and audit again."));
  return body;
}

function verdicts(list) {
  const answer = (key) => ({ label: key[1], tip: key[2], left: true, value: (v) => v[key[0]], show: (v) => mark(v[key[0]]) });
  return dataTable({ title: "Verdicts", rows: list, cards: true, columns: [
    { label: "metric", left: true, value: (v) => v.metric, show: (v) => h("b", {}, nice(v.metric)) },
    { label: "recommendation", left: true, value: (v) => v.recommendation, show: (v) => String(v.recommendation || "–").replaceAll("-", " ") },
    answer(["predicts_performance", "predicts performance", "Correlates with performance over interventions."]),
    answer(["separates_robust_from_critical", "separates robust from critical", "Differs between layers whose loss hurts and layers whose loss does not."]),
    answer(["tells_reinitialised_from_rerandomised", "tells re-init from re-random", "Differs between the layer's own initial weights and fresh ones."]),
    answer(["invariant", "invariant", "Unchanged by transformations that leave the function alone."]),
    { label: "verdict", left: true, value: (v) => v.text, show: (v) => h("span", { class: "prose" }, v.text || "–") }] });
}

function mark(value) {
  if (value === null || value === undefined) return h("span", { class: "mark" }, "–");
  if (typeof value === "boolean") return h("span", { class: value ? "mark yes" : "mark" }, value ? "● yes" : "○ no");
  return h("span", { class: "mark" }, typeof value === "number" ? number(value, 3) : String(value));
}

function scatter(result, points) {
  const metrics = [...new Set(points.flatMap((p) => Object.keys(p.metrics || {})))];
  const layers = [...new Set(points.map((p) => p.layer))];
  const interventions = [...new Set(points.map((p) => p.intervention))];
  const state = { metric: metrics.includes("alpha") ? "alpha" : metrics[0], layer: "", by: "intervention" };
  const measure = result.performance || {};
  const key = h("div", {});
  const said = h("p", { class: "caption", "aria-live": "polite" });
  const picture = figure({ title: "Metric against performance", wide: true, draw: (width) => {
    const mine = points.filter((p) => (!state.layer || p.layer === state.layer) && isNumber(p.performance) && isNumber((p.metrics || {})[state.metric]));
    const colourOf = state.by === "layer" ? (p) => OKABE[layers.indexOf(p.layer) % OKABE.length] : (p) => OKABE[interventions.indexOf(p.intervention) % OKABE.length];
    const chart = frame({ width, height: 340, label: `${nice(state.metric)} against performance`, x: { domain: padded(mine.map((p) => p.metrics[state.metric])), label: nice(state.metric) }, y: { domain: padded([...mine.map((p) => p.performance), measure.intact, measure.chance].filter(isNumber)), label: measure.name || "performance" } });
    for (const [value, text] of [[measure.intact, "intact"], [measure.chance, "chance"]]) {
      if (!isNumber(value)) continue;
      chart.over.append(s("line", { class: "rule", x1: chart.left, x2: chart.right, y1: chart.y(value), y2: chart.y(value) }), s("text", { class: "rule-text", x: chart.right - 4, y: chart.y(value) - 5, "text-anchor": "end" }, text));
    }
    dots(chart, mine.map((p) => ({ x: p.metrics[state.metric], y: p.performance, colour: colourOf(p), tip: `${p.layer} · ${p.intervention}\n${p.network ?? ""} draw ${p.draw ?? "–"}\n${nice(state.metric)} ${number(p.metrics[state.metric])}\n${measure.name || "performance"} ${number(p.performance)}` })));
    if (!mine.length) chart.over.append(s("text", { class: "rule-text", x: chart.left + 12, y: chart.top + 20 }, "no finite value of this metric here"));
    return chart.svg;
  }, controls: h("div", { class: "controls small" },
    picker("Metric", metrics.map((m) => [m, nice(m)]), state.metric, (v) => { state.metric = v; update(); }),
    picker("Layer", [["", "all layers"], ...layers.map((l) => [l, shorten(l, 40)])], "", (v) => { state.layer = v; update(); }),
    choice("Colour by", [["intervention", "by intervention"], ["layer", "by layer"]], "intervention", (v) => { state.by = v; update(); })) });
  function update() {
    const names = state.by === "layer" ? layers : interventions;
    replace(key, legend(names.slice(0, 16).map((n, i) => [String(n), OKABE[i % OKABE.length]])));
    const row = (result.metrics || []).find((m) => m.metric === state.metric && (state.layer ? m.layer === state.layer : m.layer === null));
    said.textContent = row ? `Spearman ρ ${number(row.spearman, 3)} ${interval(row.spearman_ci)}, Kendall τ ${number(row.kendall, 3)} ${interval(row.kendall_ci)}, RMSE ${number(row.rmse, 3)}, n = ${row.n}` : "No correlation was computed for this choice.";
    picture.redraw();
  }
  picture.append(key, said);
  update();
  return picture;
}

function forest(metrics) {
  const layers = [...new Set(metrics.map((m) => m.layer))];
  const state = { layer: layers.includes(null) ? null : layers[0], what: "spearman" };
  const picture = figure({ title: "Correlation with performance", wide: true, draw: (width) => {
    const rows = metrics.filter((m) => m.layer === state.layer).sort((a, b) => Math.abs(b[state.what] ?? 0) - Math.abs(a[state.what] ?? 0));
    const left = Math.min(180, width * 0.36);
    const step = 24;
    const chart = frame({ width, height: rows.length * step + 62, margin: { left, top: 8 }, label: "Correlation of each metric with performance", x: { domain: [-1, 1], ticks: [-1, -0.5, 0, 0.5, 1], label: state.what === "spearman" ? "Spearman ρ with 95 % interval" : "Kendall τ with 95 % interval" }, y: { domain: [rows.length - 0.5, -0.5], none: true } });
    verticalRule(chart, 0, null, {});
    rows.forEach((row, i) => {
      rowName(chart, i, nice(row.metric));
      const ci = row[`${state.what}_ci`];
      if (Array.isArray(ci) && ci.every(isNumber)) chart.marks.append(s("line", { class: "ci", x1: chart.x(ci[0]), x2: chart.x(ci[1]), y1: chart.y(i), y2: chart.y(i) }));
      const clear = Array.isArray(ci) && ci.every(isNumber) && (ci[0] > 0 || ci[1] < 0);
      if (isNumber(row[state.what])) dots(chart, [{ x: row[state.what], y: i, colour: clear ? "#d55e00" : "#888888", tip: `${nice(row.metric)}: ${number(row[state.what], 3)} ${interval(ci)}, n = ${row.n}` }], 4.6);
    });
    return chart.svg;
  }, controls: h("div", { class: "controls small" },
    picker("Layer", layers.map((l, i) => [String(i), nameOfLayer(l)]), String(layers.indexOf(state.layer)), (v) => { state.layer = layers[Number(v)]; picture.redraw(); }),
    choice("Coefficient", [["spearman", "Spearman"], ["kendall", "Kendall"]], "spearman", (v) => { state.what = v; picture.redraw(); })),
  caption: "Strongest first. Orange dots have an interval that excludes zero." });
  return picture;
}

function map(result) {
  const cells = result.layers;
  const layers = [...new Set(cells.map((c) => c.layer))];
  const interventions = [...new Set(cells.map((c) => c.intervention))];
  const name = (result.performance || {}).name || "performance";
  const picture = figure({ title: "Robust and critical layers", wide: true, draw: (width) => {
    const left = Math.min(200, width * 0.34, 24 + 7 * Math.max(...layers.map((l) => String(l).length)));
    const step = layers.length > 40 ? 18 : 32;
    const height = layers.length * step + 40;
    const column = (width - left - 8) / interventions.length;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": "Class of each layer under each intervention" });
    interventions.forEach((v, k) => svg.append(s("text", { class: "label", x: left + column * (k + 0.5), y: 18, "text-anchor": "middle" }, shorten(v, Math.floor(column / 7)))));
    layers.forEach((layer, i) => {
      const y = 30 + i * step;
      svg.append(s("text", { class: "name", x: left - 10, y: y + step / 2, dy: "0.32em", "text-anchor": "end", tip: layer }, shorten(layer, Math.floor(left / 6.8))));
      interventions.forEach((v, k) => {
        const cell = cells.find((c) => c.layer === layer && c.intervention === v);
        if (!cell) return;
        const said = `${number(cell.performance_mean, 3)}${isNumber(cell.performance_sem) ? ` ± ${number(cell.performance_sem, 2)}` : ""}`;
        svg.append(s("rect", { x: left + column * k + 2, y: y + 2, width: column - 4, height: step - 4, rx: 4, fill: CLASSES[cell.class] || "var(--none)", tip: `${layer} · ${v}\n${cell.class}\n${name} ${said}` }));
        if (step > 20) svg.append(s("text", { class: "cell", x: left + column * (k + 0.5), y: y + step / 2, dy: "0.34em", "text-anchor": "middle", fill: cell.class === "mixed" ? "#1d2025" : "#ffffff" }, column > 150 ? `${cell.class} · ${said}` : number(cell.performance_mean, 3)));
      });
    });
    return svg;
  }, caption: `${name} after the intervention, mean ± standard error. Intact ${number((result.performance || {}).intact, 3)}, chance ${number((result.performance || {}).chance, 3)}.` });
  picture.insertBefore(legend(Object.entries(CLASSES)), picture.lastChild);
  return picture;
}

function correlations(metrics) {
  return dataTable({ title: "Correlations", filter: true, rows: metrics, columns: [
    { label: "metric", left: true, value: (m) => m.metric, show: (m) => nice(m.metric) }, { label: "layer", left: true, value: (m) => m.layer ?? "all", show: (m) => nameOfLayer(m.layer) },
    { label: "intervention", left: true, value: (m) => m.intervention ?? "all" },
    { label: "Spearman ρ", value: (m) => m.spearman }, { label: "interval", value: (m) => (m.spearman_ci || [])[0], csv: (m) => m.spearman_ci, show: (m) => interval(m.spearman_ci) },
    { label: "Kendall τ", value: (m) => m.kendall }, { label: "interval", value: (m) => (m.kendall_ci || [])[0], csv: (m) => m.kendall_ci, show: (m) => interval(m.kendall_ci) },
    { label: "RMSE", value: (m) => m.rmse }, { label: "n", value: (m) => m.n }] });
}

export function studySection(result, id) {
  const count = (v) => (Array.isArray(v) ? v.length : v);
  const units = count(result.units) || 0;
  const done = count(result.done) || 0;
  const failed = count(result.failed) || 0;
  return section(id, "Study", `${number(done)} of ${number(units)} units are done${failed ? `, ${number(failed)} failed` : ""}.`,
    h("div", { class: "phase-bar", role: "img", "aria-label": `${percent(units ? done / units : 0)} done` },
      h("i", { style: { "--c": CLASSES.robust, "flex-grow": String(done) } }), h("i", { style: { "--c": CLASSES.critical, "flex-grow": String(failed) } }), h("i", { style: { "--c": "var(--line)", "flex-grow": String(Math.max(0, units - done - failed)) } })),
    result.store ? h("p", { class: "caption" }, "Store: ", h("code", {}, result.store)) : null,
    done < units ? h("p", { class: "caption" }, "Run the same command again to resume where it stopped.") : null);
}
