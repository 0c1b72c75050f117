// What changing each layer costs, and which metrics knew it: layers under interventions, verdicts, correlations, points.

import { choice, empty, fold, h, note, picker, replace, s, section } from "./dom.js";
import { inOrder, isNumber, number, percent, plural, shortName, withError } from "./format.js";
import { dots, figure, frame, legend, nameRoom, rowFrame, verticalRule } from "./chart.js";
import { what } from "./help.js";
import { RECOMMENDATIONS, niceName } from "./meanings.js";
import { CLASSES, OKABE, padded } from "./scale.js";
import { dataTable, textColumn } from "./table.js";

const MANY = 60; // points whose dots overlap
const nameOfLayer = (layer) => (layer === null || layer === undefined ? "all layers pooled" : String(layer).startsWith("type:") ? `type ${String(layer).slice(5)}` : shortName(layer));
const rhoOf = (v) => (isNumber(v) ? v.toFixed(2).replace("-", "−") : "–");
const rhoInterval = (ci) => (Array.isArray(ci) && ci.every(isNumber) ? `${rhoOf(ci[0])} to ${rhoOf(ci[1])}` : "–");
const pooled = (list) => (list || []).filter((v) => v.intervention === null || v.intervention === undefined);
const columnOf = (cell) => (cell.setting ? `${cell.intervention} ${cell.setting}` : cell.intervention);

export function auditSection(result, id) {
  const metrics = pooled(result.metrics);
  const verdicts = pooled(result.verdicts);
  const body = section(id, "Importance", "Layers were changed one at a time. A metric that knows how important a layer is should correlate with the network's performance.");
  const failed = Array.isArray(result.failed) ? result.failed.length : result.failed;
  if (failed) body.append(note("", `${plural(failed, "measurement")} of the study failed and ${failed === 1 ? "is" : "are"} left out.`));
  if ((result.layers || []).length) body.append(layerMap(result));
  if (verdicts.length) body.append(verdictCard(verdicts, metrics));
  const points = result.points || [];
  const parts = [metrics.some((m) => isNumber(m.spearman)) ? forest(metrics) : null, points.length ? scatter(result, metrics, points) : null].filter(Boolean);
  if (parts.length) body.append(h("div", { class: "grid2" }, parts));
  if (metrics.length) body.append(fold("All correlations", correlations(result.metrics)));
  if (body.children.length === 1) body.append(empty("This audit holds no finished measurement yet. Run the study to its end and audit again."));
  return body;
}

// One row per layer, one column per intervention and setting, coloured by how well the layer stands it.
function layerMap(result) {
  const cells = result.layers;
  const layers = inOrder([...new Set(cells.map((c) => c.layer))]);
  const columns = [...new Set(cells.map(columnOf))];
  const at = new Map(cells.map((c) => [`${c.layer}\n${columnOf(c)}`, c]));
  const about = result.performance || {};
  const picture = figure({ title: `${about.name || "performance"} after changing one layer`, wide: true, draw: (width) => {
    const left = nameRoom(layers, width);
    const step = layers.length > 40 ? 18 : 22;
    const column = (width - left - 8) / columns.length;
    const tilt = column < 74;
    const top = tilt ? 84 : 28;
    const svg = s("svg", { viewBox: `0 0 ${width} ${layers.length * step + top + 4}`, class: "chart", role: "img", "aria-label": "How well each layer stands each intervention" });
    columns.forEach((v, k) => {
      const x = left + column * (k + 0.5);
      svg.append(s("text", tilt ? { class: "minor", transform: `translate(${x + 4} ${top - 6}) rotate(-60)` } : { class: "label", x, y: 18, "text-anchor": "middle" }, v.replace("=", " ")));
    });
    layers.forEach((layer, i) => {
      const y = top + i * step;
      svg.append(s("text", { class: "name", x: left - 8, y: y + step / 2, dy: "0.32em", "text-anchor": "end", tip: layer }, shortName(layer, Math.floor((left - 12) / 6.7))));
      columns.forEach((v, k) => {
        const cell = at.get(`${layer}\n${v}`);
        if (!cell) return;
        const value = withError(cell.performance_mean, cell.performance_sem);
        svg.append(s("rect", { class: "verdict", x: left + column * k + 1, y: y + 1, width: column - 2, height: step - 2, rx: 3, fill: CLASSES[cell.class] || "var(--none)", tip: `${layer} · ${v}\n${cell.class}: ${about.name || "performance"} ${value}, intact ${number(about.intact)}` }));
        if (column > 40) svg.append(s("text", { class: "cell", x: left + column * (k + 0.5), y: y + step / 2, dy: "0.34em", "text-anchor": "middle", fill: cell.class === "mixed" ? "#1d2025" : "#ffffff" }, column > 110 ? value : number(cell.performance_mean)));
      });
    });
    return svg;
  }, caption: `Intact ${number(about.intact)}, chance ${number(about.chance)}. Robust layers keep their performance, critical ones lose it.` });
  picture.insertBefore(legend(Object.entries(CLASSES)), picture.lastChild);
  return picture;
}

// Metrics by what the audit recommends: those it can judge with their correlation, the others counted.
function verdictCard(verdicts, metrics) {
  const rho = (v) => metrics.find((m) => m.metric === v.metric && m.layer === null) || {};
  const groups = Object.entries(RECOMMENDATIONS).map(([key, [level, label, text]]) => ({ key, level, label, text, list: verdicts.filter((v) => (v.recommendation || "unknown") === key) })).filter((g) => g.list.length);
  const strength = (v) => Math.abs(rho(v).spearman ?? 0);
  return h("div", { class: "card verdicts" }, h("h3", {}, "Which metrics predict the damage", what("audit", "an audit")),
    groups.map((g) => h("div", { class: "group", "data-recommendation": g.key }, h("p", {}, h("b", { class: `chip ${g.level}` }, `${g.label} · ${g.list.length}`), " ", h("span", { class: "meaning" }, g.text)),
      h("ul", { class: "chips" }, [...g.list].sort((a, b) => strength(b) - strength(a)).map((v) => h("li", { tip: v.text }, niceName(v.metric), isNumber(rho(v).spearman) && g.key !== "unknown" ? h("small", {}, ` ρ ${rhoOf(rho(v).spearman)} (${rhoInterval(rho(v).spearman_ci)})`) : null))))));
}

function scatter(result, correlated, points) {
  const metrics = [...new Set(points.flatMap((p) => Object.keys(p.metrics || {})))].filter((m) => points.some((p) => isNumber((p.metrics || {})[m])));
  const best = [...correlated].filter((m) => m.layer === null && isNumber(m.spearman)).sort((a, b) => Math.abs(b.spearman) - Math.abs(a.spearman))[0];
  const layers = [...new Set(points.map((p) => p.layer))];
  const interventions = [...new Set(points.map((p) => p.intervention))];
  const state = { metric: best && metrics.includes(best.metric) ? best.metric : metrics[0], layer: "", by: "intervention" };
  const measure = result.performance || {};
  const log = ["perplexity", "loss"].includes(measure.name);
  const key = h("div", {});
  const said = h("p", { class: "caption", "aria-live": "polite" });
  const picture = figure({ title: "A metric against performance", wide: true, draw: (width) => {
    const mine = points.filter((p) => (!state.layer || p.layer === state.layer) && isNumber(p.performance) && isNumber((p.metrics || {})[state.metric]));
    const colour = (p) => OKABE[(state.by === "layer" ? layers.indexOf(p.layer) : interventions.indexOf(p.intervention)) % OKABE.length];
    const chart = frame({ width, height: width > 420 ? Math.max(340, Math.min(560, correlated.filter((m) => m.layer === null).length * 22)) : 300, label: `${niceName(state.metric)} against performance`, x: { domain: padded(mine.map((p) => p.metrics[state.metric])), label: niceName(state.metric) }, y: { domain: padded([...mine.map((p) => p.performance), measure.intact, measure.chance].filter(isNumber), 0.06, log), log, label: measure.name || "performance" } });
    for (const [value, text] of [[measure.intact, "intact"], [measure.chance, "chance"]]) {
      if (!isNumber(value)) continue;
      chart.over.append(s("line", { class: "rule", x1: chart.left, x2: chart.right, y1: chart.y(value), y2: chart.y(value) }), s("text", { class: "rule-text", x: chart.right - 4, y: chart.y(value) - 5, "text-anchor": "end" }, text));
    }
    dots(chart, mine.map((p) => ({ x: p.metrics[state.metric], y: p.performance, colour: colour(p), tip: `${p.layer} · ${columnOf(p)}\n${niceName(state.metric)} ${number(p.metrics[state.metric])}\n${measure.name || "performance"} ${number(p.performance)}` })), mine.length > MANY ? 2.8 : 3.6);
    if (!mine.length) chart.over.append(s("text", { class: "rule-text", x: chart.left + 12, y: chart.top + 20 }, "no finite value of this metric here"));
    return chart.svg;
  }, controls: h("div", { class: "controls small" },
    picker("Metric", metrics.map((m) => [m, niceName(m)]), state.metric, (v) => { state.metric = v; update(); }),
    picker("Layer", [["", "all layers"], ...layers.map((l) => [l, shortName(l)])], "", (v) => { state.layer = v; update(); }),
    layers.length <= OKABE.length ? choice("Colour by", [["intervention", "by intervention"], ["layer", "by layer"]], "intervention", (v) => { state.by = v; update(); }) : null) });
  function update() {
    const names = state.by === "layer" ? layers.map((l) => shortName(l)) : interventions;
    replace(key, legend(names.slice(0, 16).map((n, i) => [String(n), OKABE[i % OKABE.length]])));
    const row = correlated.find((m) => m.metric === state.metric && (state.layer ? m.layer === state.layer : m.layer === null));
    said.textContent = row && isNumber(row.spearman) ? `Spearman ρ ${rhoOf(row.spearman)} (95 % ${rhoInterval(row.spearman_ci)}), Kendall τ ${rhoOf(row.kendall)} (${rhoInterval(row.kendall_ci)}), n = ${row.n}` : "No correlation was computed for this choice.";
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
    const rows = metrics.filter((m) => m.layer === state.layer && isNumber(m[state.what])).sort((a, b) => Math.abs(b[state.what]) - Math.abs(a[state.what]));
    const chart = rowFrame({ width, names: rows.map((r) => niceName(r.metric)), label: "Correlation of each metric with performance", x: { domain: [-1, 1], ticks: [-1, -0.5, 0, 0.5, 1], label: state.what === "spearman" ? "Spearman ρ with 95 % interval" : "Kendall τ with 95 % interval" } });
    verticalRule(chart, 0, null, {});
    rows.forEach((row, i) => {
      const ci = row[`${state.what}_ci`];
      const known = Array.isArray(ci) && ci.every(isNumber);
      const clear = known && (ci[0] > 0 || ci[1] < 0);
      if (known) chart.marks.append(s("line", { class: "ci", x1: chart.x(ci[0]), x2: chart.x(ci[1]), y1: chart.y(i), y2: chart.y(i) }));
      dots(chart, [{ x: row[state.what], y: i, colour: clear ? OKABE[0] : "#888888", tip: `${niceName(row.metric)}: ${rhoOf(row[state.what])} (${rhoInterval(ci)}), n = ${row.n}` }], 4.6);
    });
    return chart.svg;
  }, controls: h("div", { class: "controls small" },
    picker("Layer", layers.map((l, i) => [String(i), nameOfLayer(l)]), String(layers.indexOf(state.layer)), (v) => { state.layer = layers[Number(v)]; picture.redraw(); }),
    choice("Coefficient", [["spearman", "Spearman"], ["kendall", "Kendall"]], "spearman", (v) => { state.what = v; picture.redraw(); })),
  caption: "Strongest first. Blue dots have an interval that excludes zero." });
  return picture;
}

function correlations(metrics) {
  return dataTable({ title: "Correlations", rows: metrics, columns: [
    { label: "metric", left: true, value: (m) => m.metric, show: (m) => niceName(m.metric) }, { label: "layer", left: true, value: (m) => m.layer ?? "all", show: (m) => nameOfLayer(m.layer) },
    { label: "intervention", left: true, value: (m) => m.intervention ?? "all" },
    { label: "Spearman ρ", value: (m) => m.spearman, show: (m) => rhoOf(m.spearman) }, { label: "95 % interval", value: (m) => (m.spearman_ci || [])[0], csv: (m) => m.spearman_ci, show: (m) => rhoInterval(m.spearman_ci) },
    { label: "Kendall τ", value: (m) => m.kendall, show: (m) => rhoOf(m.kendall) }, { label: "95 % interval of τ", value: (m) => (m.kendall_ci || [])[0], csv: (m) => m.kendall_ci, show: (m) => rhoInterval(m.kendall_ci) },
    { label: "RMSE", value: (m) => m.rmse }, { label: "n", value: (m) => m.n }] });
}

export function studySection(result, id) {
  const size = (v) => (Array.isArray(v) ? v.length : v) || 0;
  const [units, done, failed] = [size(result.units), size(result.done), size(result.failed)];
  return section(id, "Study", `${number(done)} of ${plural(units, "measurement")} done${failed ? `, ${number(failed)} failed` : ""}.`,
    h("div", { class: "state-bar", role: "img", "aria-label": `${percent(units ? done / units : 0)} done` },
      h("i", { style: { "--c": CLASSES.robust, "flex-grow": String(done) } }), h("i", { style: { "--c": CLASSES.critical, "flex-grow": String(failed) } }), h("i", { style: { "--c": "var(--line)", "flex-grow": String(Math.max(0, units - done - failed)) } })),
    (result.failures || []).length ? dataTable({ title: "Why measurements failed", rows: result.failures, columns: [textColumn("reason"), { label: "count", value: (r) => r.count }] }) : null,
    result.store ? h("p", { class: "caption" }, `Stored in ${result.store}.${done < units ? " Run the same command again to resume." : ""}`) : null);
}
