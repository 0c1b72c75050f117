// One layer: its eigenvalue density with both fits, sliders that refit, scree, and every number with its meaning.

import { choice, h, replace, s, slider } from "./dom.js";
import { isNumber, number, plural, shortName, withError } from "./format.js";
import { figure, frame, hold, legend, line, verticalRule } from "./chart.js";
import { term, warning, what } from "./help.js";
import { FAMILIES, METRICS, doubt, errorOf, trust } from "./meanings.js";
import { bulkDensity, fitBulk, fitTail, histogram, tailDensity } from "./refit.js";
import { padded, stateColour, stateName } from "./scale.js";

const BULK = "var(--blue)";
const TAIL = "var(--orange)";
const SPIKE = "var(--red)";
const NULLS = "var(--purple)";

export function layerView(layer) {
  const title = h("header", { class: "layer-head" }, h("p", { class: "eyebrow" }, layer.role, isNumber(layer.block) ? ` · block ${layer.block}` : ""),
    h("h3", { class: "layer-name" }, layer.name),
    h("p", { class: "caption" }, `${layer.rows} × ${layer.cols} · ${plural(layer.parameters || 0, "parameter")}${layer.view && layer.view !== "as stored" ? ` · ${layer.view}` : ""}`),
    layer.state ? h("p", { class: "verdict" }, h("i", { class: "swatch", style: { "--c": stateColour(layer.state) || "var(--soft)" } }), " ", term(layer.state, stateName(layer.state)), layer.phase ? [", spectrum ", term(layer.phase)] : null, ". ", inWords(layer)) : layer.phase ? h("p", { class: "verdict" }, term(layer.phase), ". ", inWords(layer)) : null,
    notices(layer));
  const eigenvalues = layer.eigenvalues;
  const pictures = eigenvalues && eigenvalues.length > 1
    ? spectrumView(layer, Float64Array.from(eigenvalues).sort())
    : h("p", { class: "empty" }, "No eigenvalues in this result. Scan with --eigenvalues (or --html) to see the density, the fits and the scree here.");
  return [title, pictures];
}

// Damage stands out; what only limits some numbers is one line, with the text on a click.
function notices(layer) {
  const flags = layer.warnings || [];
  if (layer.state === "broken" || flags.some((w) => w.code === "noise-like")) return flags.map(warning);
  return flags.length ? h("p", { class: "caption" }, "Mind: ", flags.map((w, i) => [i ? ", " : "", h("span", { tip: w.text }, term(w.code))]), ".") : null;
}

// What the phase says about this layer, from the numbers behind it.
function inWords(layer) {
  const evidence = layer.phase_evidence || {};
  const ratio = evidence.largest_over_edge;
  const strongest = isNumber(ratio) && ratio > 1 ? `; the strongest is ${number(ratio, 2)} times the noise limit` : "";
  const directions = isNumber(layer.spikes) ? plural(layer.spikes, "direction") : "several directions";
  const text = {
    "random-like": "It looks like random weights: no direction stands out from the noise.",
    "bleeding-out": `It looks like random weights, and ${directions} just beyond the noise limit${strongest}.`,
    "bulk+spikes": `It looks like random weights plus ${directions} that were learned${strongest}.`,
    "bulk-decay": `The random part fades into the learned one without a clear edge: about ${directions} beyond the noise limit${strongest}.`,
    "heavy-tailed": `Learned directions of all strengths: ${directions} beyond the noise limit${strongest}.`,
    "rank-collapse": "Part of the directions are no more than rounding: the matrix uses fewer directions than it has.",
  }[layer.phase];
  return h("span", { tip: typeof evidence.reason === "string" ? evidence.reason : typeof layer.phase_evidence === "string" ? layer.phase_evidence : null }, text || "");
}

function spectrumView(layer, values) {
  const positive = values.filter((v) => v > 0);
  if (positive.length < 2) return h("p", { class: "empty" }, "All eigenvalues but one are zero: there is no density to draw.");
  const state = { logX: positive[positive.length - 1] / positive[Math.floor(positive.length / 4)] > 20, logY: false, xmin: layer.xmin, sigma: layer.mp_sigma };
  const hasTail = isNumber(layer.xmin) && layer.xmin > 0;
  const hasBulk = isNumber(layer.mp_sigma) && layer.mp_sigma > 0;
  // The edge for spikes grows with sigma squared; the result's own edge gives the ratio.
  const edge = layer.phase_evidence && layer.phase_evidence.tracy_widom_edge;
  const ratio = hasBulk && isNumber(edge) ? edge / layer.mp_sigma ** 2 : null;
  const readout = h("dl", { class: "readout", "aria-live": "polite" });
  const fits = () => ({ tail: hasTail ? fitTail(values, state.xmin) : null, bulk: hasBulk ? fitBulk(values, layer.rows, layer.cols, state.sigma, ratio) : null });
  const moved = () => (hasTail && state.xmin !== layer.xmin) || (hasBulk && state.sigma !== layer.mp_sigma);
  const density = figure({ title: "Eigenvalue density", wide: true, draw: (width) => drawDensity(width, layer, values, state, fits(), moved()),
    controls: h("div", { class: "controls small" },
      choice("Horizontal axis", [["linear", "x linear"], ["log", "x log"]], state.logX ? "log" : "linear", (v) => { state.logX = v === "log"; update(); }),
      choice("Vertical axis", [["linear", "y linear"], ["log", "y log"]], "linear", (v) => { state.logY = v === "log"; update(); })) });
  const scree = figure({ title: "Scree", draw: (width) => drawScree(width, values, state, fits()), caption: "Eigenvalues by rank, largest first." });

  function update() {
    density.redraw();
    scree.redraw();
    const { tail, bulk } = fits();
    // At the fit its own error, which includes the choice of xmin; beside it that of a tail which begins there.
    const error = state.xmin === layer.xmin && isNumber(layer.alpha_stderr) ? layer.alpha_stderr : tail && tail.stderr;
    replace(readout, ...(tail ? [pair("α", tail.alpha, error), pair("KS", tail.ks), pair("tail", tail.size), pair("xmin", tail.xmin)] : []),
      ...(bulk ? [pair("σ", bulk.sigma), pair("λ₋", bulk.minus), pair("λ₊", bulk.plus), pair("beyond edge", moved() || !isNumber(layer.spikes) ? bulk.above : layer.spikes), pair("soft rank", bulk.softRank)] : []));
  }

  const sliders = h("div", { class: "controls refit" });
  if (hasTail) {
    // One step of the slider is one eigenvalue: every xmin the fit could have chosen.
    const last = positive.length - 3;
    const nearest = (x) => positive.findIndex((v) => v >= x * (1 - 1e-6));
    const control = slider("xmin", { min: 0, max: Math.max(1, last), step: 1, value: Math.max(0, nearest(layer.xmin)), show: (i) => number(positive[Math.min(i, positive.length - 1)], 3) }, (i) => { state.xmin = positive[i]; update(); });
    control.querySelector("input").setAttribute("data-refit", "xmin");
    sliders.append(control);
    sliders.resetXmin = () => control.set(Math.max(0, nearest(layer.xmin)));
  }
  if (hasBulk) {
    const control = slider("σ", { min: -100, max: 100, step: 1, value: 0, show: (i) => number(layer.mp_sigma * 2 ** (i / 100), 3) }, (i) => { state.sigma = layer.mp_sigma * 2 ** (i / 100); update(); });
    control.querySelector("input").setAttribute("data-refit", "sigma");
    sliders.append(control);
    sliders.resetSigma = () => control.set(0);
  }
  if (hasTail || hasBulk) {
    sliders.append(h("button", { type: "button", class: "plain", on: { click: () => {
      state.xmin = layer.xmin;
      state.sigma = layer.mp_sigma;
      if (sliders.resetXmin) sliders.resetXmin();
      if (sliders.resetSigma) sliders.resetSigma();
      update();
    } } }, "Back to the fit"));
  }
  update();
  const items = [["eigenvalues", "var(--bar)"]];
  if (hasBulk) items.push(["random bulk", BULK, "Marchenko-Pastur law", "stroke"]);
  if (hasTail) items.push([doubt("alpha", layer) ? "power-law tail, unreliable here" : "power-law tail", TAIL, "maximum likelihood above xmin", "stroke"]);
  if (layer.spikes) items.push([plural(layer.spikes, "spike"), SPIKE, "beyond the Tracy-Widom edge", "rug"]);
  if (layer.quasi_null) items.push([`${layer.quasi_null} quasi-null`, NULLS, "significantly below the bulk", "rug"]);
  density.insertBefore(legend(items), density.lastChild);
  density.append(sliders, readout);
  return h("div", { class: "spectrum" }, density, scree);
}

function pair(name, value, error) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, withError(value, error)));
}

function drawDensity(width, layer, values, state, { tail, bulk }, moved) {
  const positive = values.filter((v) => v > 0);
  const top = positive[positive.length - 1];
  const domain = state.logX ? padded(positive, 0.03, true) : [0, top * 1.03];
  const bins = Math.max(12, Math.min(90, Math.round(width / 8), Math.round(2 * Math.sqrt(values.length) + 4)));
  const bars = histogram(values, domain, bins, state.logX);
  // Densities are per unit of the axis: on a logarithmic axis, per decade.
  const jacobian = (x) => (state.logX ? x * Math.LN10 : 1);
  const overlay = (from, to, f) => {
    const points = [];
    for (let i = 0; i <= 160; i += 1) {
      const x = state.logX ? from * (to / from) ** (i / 160) : from + (to - from) * (i / 160);
      points.push([x, f(x) * jacobian(x)]);
    }
    return points;
  };
  const spikes = moved && bulk ? bulk.above : layer.spikes || 0;
  const nulls = layer.quasi_null || 0;
  const share = bulk ? Math.max(0, values.length - spikes - nulls) / values.length : 0;
  const bulkCurve = bulk ? overlay(Math.max(bulk.minus, state.logX ? domain[0] : top * 1e-6), bulk.plus, (x) => share * bulkDensity(bulk, x)) : [];
  const tailCurve = tail && tail.alpha ? overlay(tail.xmin, top, (x) => tailDensity(tail, values.length, x)) : [];
  const peak = Math.max(...bars.map((b) => b.density));
  const least = Math.min(...bars.filter((b) => b.density > 0).map((b) => b.density));
  const curves = Math.max(0, ...bulkCurve.map((p) => p[1]).filter(Number.isFinite), ...tailCurve.map((p) => p[1]));
  const yDomain = state.logY ? [least / 2, Math.max(peak, Math.min(curves, 3 * peak)) * 1.6] : [0, Math.max(peak, Math.min(curves, 1.6 * peak)) * 1.12];
  const chart = frame({ width, height: Math.max(250, Math.min(330, width * 0.52)), label: `Eigenvalue density of ${shortName(layer.name)}`,
    x: { domain, log: state.logX, label: "eigenvalue λ" }, y: { domain: yDomain, log: state.logY, label: state.logX ? "density per decade" : "density" } });
  for (const b of bars) {
    if (!b.count) continue;
    const x = chart.x(b.from);
    const y = chart.y(b.density);
    hold(chart, "eigenvalues", [[(b.from + b.to) / 2, b.density]]);
    chart.marks.append(s("rect", { class: "bar", x: x + 0.4, y, width: Math.max(0.6, chart.x(b.to) - x - 0.8), height: Math.max(0, chart.bottom - y), tip: `${number(b.from, 3)} to ${number(b.to, 3)}: ${b.count}` }));
  }
  if (bulk) {
    line(chart, bulkCurve, { stroke: BULK, tip: "random bulk" });
    verticalRule(chart, bulk.minus, "λ₋", { stroke: BULK });
    verticalRule(chart, bulk.plus, "λ₊", { stroke: BULK }, 0, true);
  }
  if (tail && tail.alpha) {
    line(chart, tailCurve, { class: doubt("alpha", layer) ? "line dashed" : "line", stroke: TAIL, tip: "power-law tail" });
    verticalRule(chart, tail.xmin, "xmin", { stroke: TAIL }, 1);
  }
  const floor = layer.quantisation && layer.quantisation.noise_floor;
  if (isNumber(floor) && floor > domain[0] && floor < domain[1]) verticalRule(chart, floor, "rounding floor", { stroke: NULLS }, 2);
  rug(chart, spikes ? values.slice(-spikes) : [], SPIKE);
  rug(chart, positive.slice(0, Math.max(0, nulls - (values.length - positive.length))), NULLS);
  const zeros = values.length - positive.length;
  if (state.logX && zeros) chart.over.append(s("text", { class: "rule-text", x: chart.left + 4, y: chart.bottom - 8 }, `${zeros} at zero, not on this axis`));
  return chart.svg;
}

function rug(chart, values, stroke) {
  if (!values.length) return;
  let d = "";
  for (const v of values) d += `M${chart.x(v).toFixed(1)} ${chart.bottom + 1}v-11`;
  chart.over.append(s("path", { d, stroke, class: "rug" }));
}

function drawScree(width, values, state, { tail, bulk }) {
  const positive = values.filter((v) => v > 0).reverse();
  const chart = frame({ width, height: 220, label: "Scree", x: { domain: [1, positive.length], log: positive.length > 40, label: "rank" }, y: { domain: padded(positive, 0.05, true), log: true, label: "λ" } });
  if (bulk) {
    const band = [Math.min(chart.bottom, chart.y(Math.max(bulk.minus, chart.y.domain[0]))), Math.max(chart.top, chart.y(bulk.plus))];
    chart.marks.prepend(s("rect", { class: "band", x: chart.left, width: chart.right - chart.left, y: band[1], height: Math.max(0, band[0] - band[1]), fill: BULK, tip: "between the edges of the random bulk" }));
  }
  line(chart, Array.from(positive, (v, i) => [i + 1, v]), { stroke: "var(--ink)", tip: "eigenvalues" });
  if (tail) {
    const points = Array.from(positive.slice(0, tail.size), (v, i) => [i + 1, v]);
    line(chart, points, { stroke: TAIL, tip: "power-law tail" });
  }
  return chart.svg;
}

// Every number with its error, a word on how far to trust it, and what it is on a click.
export function layerNumbers(layer, verdicts) {
  const rows = METRICS.filter((m) => isNumber(layer[m.key]) && m.key !== "alpha_stderr").map((m) => ({ ...m, value: layer[m.key], doubt: doubt(m.key, layer), trust: trust(m, layer, verdicts) }));
  const origins = [...new Set([...verdicts.values()].map((v) => v.from.text))];
  const caption = verdicts.size
    ? `${origins.join(" ")}${[...verdicts.values()].some((v) => !v.from.same) ? " What was found on other networks carries over by analogy only." : ""}`
    : "No study is part of this page. Add one (strati report scan.json STUDY-FOLDER) to see here which numbers predict performance.";
  return h("div", { class: "card" }, h("h3", {}, `Numbers of ${shortName(layer.name, 60)}`),
    FAMILIES.map(([family, title]) => {
      const mine = rows.filter((r) => r.family === family);
      const reason = mine.length && mine.every((r) => r.doubt) ? mine[0].doubt : null;
      const chip = (r) => (r.doubt && !reason ? ["low", "unreliable here", r.trust.text] : r.trust.level === "yes" || r.trust.level === "low" ? [r.trust.level, r.trust.chip, r.trust.text] : null);
      const fact = (r, c) => h("div", { class: r.doubt ? "doubtful" : null, "data-metric": r.key }, h("dt", {}, r.name, what(r.key, r.name)),
        h("dd", { tip: r.trust.text }, h("b", {}, withError(r.value, errorOf(r.key, layer))), c ? h("span", { class: `chip ${c[0]}`, tip: c[2] }, c[1]) : null));
      return mine.length ? [h("h4", {}, title, reason ? [": unreliable here (", term(reason), ")"] : null), h("dl", { class: "facts" }, mine.map((r) => fact(r, reason ? null : chip(r))))] : null;
    }), h("p", { class: "caption" }, caption));
}
