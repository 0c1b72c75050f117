// Second derivatives of the loss: how their eigenvalues are spread, the largest of them, the parameters that count at each
// scale; and how rows of data influence each other under the posterior near the network.

import { empty, h, s, section, stat } from "./dom.js";
import { isNumber, number, percent, plural, withError } from "./format.js";
import { dots, errorBar, figure, frame, hold, legend, line, rampKey, rowFrame, verticalRule } from "./chart.js";
import { OKABE, differenceScale, padded } from "./scale.js";
import { dataTable } from "./table.js";

const NEGATIVE = "var(--red)";
const POSITIVE = "var(--blue)";
const MOST_ROWS = 12;

export function curvatureSection(result, id) {
  const top = (result.top || []).map((value, i) => ({ rank: i + 1, value, residual: (result.top_residuals || [])[i] }));
  const body = section(id, "Curvature", `Eigenvalues of the ${result.matrix} of the mean loss in ${number(result.parameters)} parameters.`,
    h("div", { class: "stats" }, stat("largest eigenvalue", number((top[0] || {}).value)), stat("trace", withError(result.trace, result.trace_stderr), result.trace_stderr > 0 ? "± one standard error" : "exact"), isNumber(result.negative) ? stat("negative", percent(result.negative), "of the eigenvalues") : null));
  const parts = [(result.density || []).length ? density(result.density) : null, top.length ? largest(top) : null, (result.effective || []).length ? effective(result) : null].filter(Boolean);
  body.append(parts.length ? h("div", { class: "grid2" }, parts) : empty("This result holds no eigenvalues."));
  return body;
}

// The share of eigenvalues at each value, both logarithmic: negative ones to the left of the gap.
function density(rows) {
  const known = rows.filter((r) => isNumber(r.eigenvalue) && r.weight > 0);
  const picture = figure({ title: "Spectral density", wide: true, draw: (width) => {
    const sizes = known.map((r) => Math.abs(r.eigenvalue)).filter((v) => v > 0);
    const most = Math.max(...sizes, 1e-300);
    const least = Math.max(Math.min(...sizes, most), most * 1e-6);
    const decades = Math.max(1, Math.log10(most / least));
    const side = (v) => Math.max(0, Math.log10(Math.max(Math.abs(v), least) / least)) + 0.35;
    const place = (v) => Math.sign(v) * side(v);
    const signs = known.some((r) => r.eigenvalue < 0) ? [-1, 1] : [1];
    const ticks = signs.flatMap((sign) => Array.from({ length: Math.floor(decades) + 1 }, (_, k) => sign * most / 10 ** k)).filter((_, i) => decades < 4 || i % 2 === 0);
    const chart = frame({ width, height: 300, label: "Share of the eigenvalues at each value", x: { domain: [signs[0] * (signs[0] < 0 ? side(most) + 0.3 : 0), side(most) + 0.3], ticks: ticks.map(place), text: (t) => number(Math.sign(t) * least * 10 ** (Math.abs(t) - 0.35), 2), label: "eigenvalue (logarithmic on either side of zero)" }, y: { domain: padded(known.map((r) => r.weight), 0.08, true), log: true, label: "share of the eigenvalues" } });
    for (const r of known) {
      const stroke = r.eigenvalue < 0 ? NEGATIVE : POSITIVE;
      hold(chart, "density", [[r.eigenvalue, r.weight]]);
      chart.marks.append(s("path", { class: "stem", stroke, d: `M${chart.x(place(r.eigenvalue)).toFixed(1)} ${chart.bottom}V${chart.y(r.weight).toFixed(1)}`, tip: `${number(r.eigenvalue)}: ${percent(r.weight)}` }));
      if (isNumber(r.stderr)) errorBar(chart, place(r.eigenvalue), Math.max(r.weight - 2 * r.stderr, 1e-300), r.weight + 2 * r.stderr, { stroke });
    }
    verticalRule(chart, 0, null, {});
    return chart.svg;
  }, caption: "Each line is a node of the quadrature: where eigenvalues lie, and which share of them." });
  picture.insertBefore(legend([["positive", POSITIVE], ["negative", NEGATIVE]]), picture.lastChild);
  return picture;
}

function largest(top) {
  return figure({ title: "Largest eigenvalues", wide: true, draw: (width) => {
    const error = (r) => (isNumber(r.residual) ? r.residual : 0);
    const chart = frame({ width, height: 300, label: "Largest eigenvalues by rank", x: { domain: [0.5, top.length + 0.5], ticks: top.map((r) => r.rank).filter((k) => k % Math.ceil(top.length / 10) === 0 || k === 1), label: "rank" }, y: { domain: padded([0, ...top.flatMap((r) => [r.value - error(r), r.value + error(r)])]), label: "eigenvalue" } });
    for (const r of top) if (error(r)) errorBar(chart, r.rank, r.value - error(r), r.value + error(r), { stroke: OKABE[0] });
    dots(chart, top.map((r) => ({ x: r.rank, y: r.value, colour: r.value < 0 ? OKABE[3] : OKABE[0], tip: `${number(r.rank)}: ${withError(r.value, error(r))}` })), 4.4);
    return chart.svg;
  }, caption: "Bars: an eigenvalue lies within the residual of its eigenvector." });
}

function effective(result) {
  const rows = result.effective.filter((r) => isNumber(r.epsilon) && r.epsilon > 0 && isNumber(r.value)).sort((a, b) => a.epsilon - b.epsilon);
  const error = (r) => (isNumber(r.stderr) ? 2 * r.stderr : 0);
  return figure({ title: "Effective parameters by scale", wide: true, draw: (width) => {
    const chart = frame({ width, height: 300, label: "Effective parameters against epsilon", x: { domain: padded(rows.map((r) => r.epsilon), 0.05, true), log: true, label: "curvature scale ε" }, y: { domain: padded([0, ...rows.map((r) => r.value + error(r))]), label: "Σ h / (h + ε)" } });
    line(chart, rows.map((r) => [r.epsilon, r.value]), { stroke: OKABE[0] });
    for (const r of rows) if (error(r)) errorBar(chart, r.epsilon, Math.max(0, r.value - error(r)), r.value + error(r), { stroke: OKABE[0] });
    dots(chart, rows.map((r) => ({ x: r.epsilon, y: r.value, colour: OKABE[0], tip: `ε ${number(r.epsilon)}\n${withError(r.value, r.stderr)}` })), 4);
    return chart.svg;
  }, caption: `How many of ${number(result.parameters)} parameters have a curvature above the scale; bars are two standard errors.` });
}

// A matrix as a bitmap: orange above zero, purple below.
export function influenceImage(values) {
  const colour = differenceScale(values.flat());
  const canvas = h("canvas", { width: Math.max(1, (values[0] || []).length), height: Math.max(1, values.length) });
  const pen = canvas.getContext("2d");
  values.forEach((row, i) => row.forEach((v, j) => {
    pen.fillStyle = colour(v) || "#888888";
    pen.fillRect(j, i, 1, 1);
  }));
  return canvas.toDataURL("image/png");
}

export function influenceSection(result, id) {
  const values = (result.values || []).filter(Array.isArray);
  const rows = Array.isArray(result.rows) ? result.rows : [];
  const nameOf = (i) => String(typeof rows[i] === "object" && rows[i] ? rows[i].name ?? rows[i].part ?? i : rows[i] ?? i);
  const body = section(id, "Influence", values.length ? `${String(result.kind || "influence")} of ${plural(values.length, "row")} on ${plural((values[0] || []).length, "row")}.` : result.reason || "No estimate.",
    h("div", { class: "stats" }, isNumber(result.waic) ? stat("WAIC", number(result.waic)) : null, isNumber(result.fluctuation) ? stat("functional variance", number(result.fluctuation)) : null));
  if (!values.length) {
    body.append(empty(result.reason || "This result holds no matrix."));
    return body;
  }
  const errors = (result.stderr || []).filter(Array.isArray);
  const mean = (i) => values[i].reduce((sum, v, j) => sum + (j === i && values.length === values[i].length ? 0 : v || 0), 0) / Math.max(1, values[i].length - 1);
  const error = (i) => (errors[i] ? Math.sqrt(errors[i].reduce((sum, v) => sum + (v || 0) ** 2, 0)) / Math.max(1, errors[i].length - 1) : null);
  const ranked = values.map((_, i) => ({ name: nameOf(i), index: i, value: mean(i), stderr: error(i) })).sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const colour = differenceScale(values.flat());
  const matrix = figure({ title: "Matrix", wide: true, draw: (width) => {
    const [high, wide] = [values.length, values[0].length];
    const cell = Math.min((width - 8) / wide, 460 / high);
    const svg = s("svg", { viewBox: `0 0 ${width} ${cell * high + 8}`, class: "chart", role: "img", "aria-label": "Influence of every row on every row" });
    const box = { x: (width - cell * wide) / 2, y: 4, width: cell * wide, height: cell * high };
    const hit = s("rect", { ...box, fill: "transparent", tip: " " });
    hit.addEventListener("pointermove", (event) => {
      const at = hit.getBoundingClientRect();
      const [i, j] = [Math.min(high - 1, Math.max(0, Math.floor(((event.clientY - at.top) / at.height) * high))), Math.min(wide - 1, Math.max(0, Math.floor(((event.clientX - at.left) / at.width) * wide)))];
      hit.dataset.tip = `${nameOf(i)}, ${nameOf(j)}: ${withError(values[i][j], (errors[i] || [])[j])}`;
    });
    svg.append(s("image", { class: "pixels", href: influenceImage(values), ...box, preserveAspectRatio: "none" }), hit);
    svg.held = { x: "column", y: "value", rows: values.flatMap((row, i) => row.map((v, j) => [nameOf(i), j, v])) };
    return svg;
  }, caption: "Covariance of the losses of two rows near the network: orange rows help each other, purple ones compete." });
  matrix.insertBefore(rampKey(colour, "covariance", (v) => number(v)), matrix.lastChild);
  const first = ranked.slice(0, MOST_ROWS);
  const strongest = figure({ title: "Most influential rows", wide: true, draw: (width) => {
    const spread = (r) => 2 * (r.stderr || 0);
    const chart = rowFrame({ width, names: first.map((r) => r.name), step: 24, label: "Mean influence of the strongest rows", x: { domain: padded([0, ...first.flatMap((r) => [r.value - spread(r), r.value + spread(r)])]), label: "mean influence on the other rows" } });
    verticalRule(chart, 0, null, {});
    first.forEach((r, i) => line(chart, [[r.value - spread(r), i], [r.value + spread(r), i]], { class: "line thin", stroke: OKABE[0] }));
    dots(chart, first.map((r, i) => ({ x: r.value, y: i, colour: Math.abs(r.value) > spread(r) ? OKABE[0] : "#888888", tip: `${r.name}: ${withError(r.value, r.stderr)}` })), 4.4);
    return chart.svg;
  }, caption: "Bars are two standard errors; grey rows cannot be told from zero." });
  body.append(h("div", { class: "grid2" }, matrix, strongest), dataTable({ title: "Influence of every row", rows: ranked, columns: [{ label: "row", left: true, value: (r) => r.name, show: (r) => r.name }, { label: "mean influence", value: (r) => r.value, show: (r) => withError(r.value, r.stderr) }, { label: "its own variance", value: (r) => (values.length === values[0].length ? values[r.index][r.index] : null) }] }));
  return body;
}
