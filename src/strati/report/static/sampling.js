// Sampled quantities: the learning coefficient with its chains, and effective parameters over scales of the loss.

import { empty, fold, h, s, section, stat } from "./dom.js";
import { isNumber, number, plural, withError } from "./format.js";
import { dots, errorBar, figure, frame, legend, line, rowFrame, verticalRule } from "./chart.js";
import { OKABE, padded } from "./scale.js";
import { dataTable, textColumn } from "./table.js";

const GOOD_RHAT = 1.05;

export function llcSection(result, id) {
  const ends = isNumber(result.estimate) && isNumber(result.stderr) ? `95 % ${number(result.estimate - 1.96 * result.stderr)} to ${number(result.estimate + 1.96 * result.stderr)}` : result.reason;
  const body = section(id, "Learning coefficient", isNumber(result.estimate) ? `Learning coefficient ${withError(result.estimate, result.stderr)} at nβ = ${number(result.nbeta)}, γ = ${number(result.gamma)}.` : `No estimate: ${result.reason || "the chains have not mixed"}.`,
    h("div", { class: "stats" }, stat("learning coefficient", withError(result.estimate, result.stderr), ends),
      isNumber(result.asymptotic) ? stat("limit for large nβ", withError(result.asymptotic, result.asymptotic_stderr)) : null,
      isNumber(result.rhat) ? stat("R-hat", number(result.rhat), result.rhat < GOOD_RHAT ? "chains agree" : "chains do not agree yet") : null, isNumber(result.ess) ? stat("effective draws", number(Math.round(result.ess))) : null));
  const parts = [(result.traces || []).length ? traces(result) : null, (result.ladder || []).length > 1 ? ladder(result) : null].filter(Boolean);
  body.append(parts.length ? h("div", { class: "grid2" }, parts) : empty("This result holds no chains."), fold("Sampling diagnostics", diagnostics(result)));
  return body;
}

// Learning coefficients of layers, heads or groups of data: a dot with its standard error for each, and the table.
export function partsSection(result, id) {
  const rows = result.parts || [];
  const known = rows.filter((r) => isNumber(r.estimate));
  const body = section(id, "Learning coefficient by part", `${plural(rows.length, "part")}, each sampled with the rest of the network held fixed.`);
  if (known.length) body.append(partsChart(known));
  body.append(rows.length ? dataTable({ title: "Parts", rows, columns: [
    textColumn("part"), { label: "learning coefficient", help: "llc", value: (r) => r.estimate, show: (r) => withError(r.estimate, r.stderr) }, { label: "limit", value: (r) => r.asymptotic, show: (r) => withError(r.asymptotic, r.asymptotic_stderr) },
    { label: "R-hat", value: (r) => r.rhat }, { label: "effective draws", value: (r) => r.ess }, { label: "why a value is missing", left: true, value: (r) => r.reason, show: (r) => r.reason || "" }] }) : empty("This result holds no parts."));
  return body;
}

function partsChart(rows) {
  const error = (r) => (isNumber(r.stderr) ? r.stderr : 0);
  return figure({ title: "Learning coefficient by part", wide: true, draw: (width) => {
    const chart = rowFrame({ width, names: rows.map((r) => r.part), step: 26, label: "Learning coefficient of each part", x: { domain: padded([0, ...rows.flatMap((r) => [r.estimate - error(r), r.estimate + error(r)])]), label: "learning coefficient" } });
    rows.forEach((r, i) => line(chart, [[r.estimate - error(r), i], [r.estimate + error(r), i]], { class: "line thin", stroke: OKABE[0] }));
    dots(chart, rows.map((r, i) => ({ x: r.estimate, y: i, colour: OKABE[0], tip: `${r.part}\n${withError(r.estimate, error(r))}` })), 4);
    return chart.svg;
  }, caption: "Bars are one standard error. A smaller value means a part that can be changed in more ways without raising the loss." });
}

export function scalesSection(result, id) {
  const rows = result.scales || [];
  return section(id, "Effective parameters", `How many of ${number(result.parameters)} parameters matter, by the loss that is tolerated.`,
    rows.length ? scales(result) : empty("This result holds no scales."),
    dataTable({ title: "Effective parameters by scale", rows, columns: [["epsilon", "ε"], ["lambda", "λ"], ["stderr", "standard error of λ"], ["effective", "N_eff = 2 λ"], ["nbeta", "nβ"], ["gauss_newton", "λ (Gauss-Newton)"]].map(([key, label]) => ({ label, value: (r) => r[key] })) }));
}

function ladder(result) {
  const rungs = [...result.ladder].filter((r) => isNumber(r.nbeta) && isNumber(r.lambda)).sort((a, b) => a.nbeta - b.nbeta);
  return figure({ title: "Learning coefficient over temperatures", wide: true, draw: (width) => {
    const error = (r) => (isNumber(r.stderr) ? r.stderr : 0);
    const chart = frame({ width, height: 320, label: "Learning coefficient at each temperature", x: { domain: padded(rungs.map((r) => r.nbeta), 0.05, true), log: true, label: "nβ (colder to the right)" }, y: { domain: padded(rungs.flatMap((r) => [r.lambda - error(r), r.lambda + error(r)])), label: "learning coefficient" } });
    line(chart, rungs.map((r) => [r.nbeta, r.lambda]), { stroke: OKABE[0] });
    for (const r of rungs) errorBar(chart, r.nbeta, r.lambda - error(r), r.lambda + error(r), { stroke: OKABE[0] });
    dots(chart, rungs.map((r) => ({ x: r.nbeta, y: r.lambda, colour: OKABE[0], tip: `nβ ${number(r.nbeta, 3)}\n${withError(r.lambda, error(r))}` })), 4);
    return chart.svg;
  }, caption: "Values that level off to the right show the limit; values that still rise do not." });
}

export function scales(result) {
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

export function traces(llc) {
  const chains = llc.traces.filter((t) => Array.isArray(t) && t.length);
  const picture = figure({ title: "Chains", wide: true, draw: (width) => {
    const length = Math.max(...chains.map((t) => t.length), 2);
    const chart = frame({ width, height: 320, label: "Trace of each chain", x: { domain: [0, length - 1], label: "draw (thinned)" }, y: { domain: padded(chains.flat()), label: "nβ (L − L*)" } });
    chains.forEach((trace, i) => line(chart, trace.map((v, k) => [k, v ?? NaN]), { class: "line thin", stroke: OKABE[i % OKABE.length], tip: `chain ${i + 1}` }));
    if (isNumber(llc.estimate)) {
      chart.over.append(s("line", { class: "rule", x1: chart.left, x2: chart.right, y1: chart.y(llc.estimate), y2: chart.y(llc.estimate) }), s("text", { class: "rule-text", x: chart.right - 4, y: chart.y(llc.estimate) - 6, "text-anchor": "end" }, `estimate ${number(llc.estimate)}`));
    }
    verticalRule(chart, 0, null, {});
    return chart.svg;
  }, caption: "Chains that mix overlap and show no drift. A chain that goes its own way means: do not trust the estimate." });
  picture.insertBefore(legend(chains.map((_, i) => [`chain ${i + 1}`, OKABE[i % OKABE.length], null, "stroke"])), picture.lastChild);
  return picture;
}

export function diagnostics(llc) {
  const good = { rhat: (v) => v < GOOD_RHAT, ess: (v) => v > 100 };
  const rows = [
    ["estimate", "learning coefficient at this temperature"], ["stderr", "its standard error"], ["asymptotic", "its limit for large nβ"], ["asymptotic_stderr", "standard error of the limit"],
    ["rhat", "R-hat: chains agree if below about 1.05"], ["ess", "effective sample size: independent draws behind the estimate"], ["chains", "chains"], ["draws", "draws per chain"],
    ["nbeta", "nβ: inverse temperature"], ["gamma", "γ: strength of the pull towards the network"], ["reason", "why a value is missing, or what was corrected"],
    ...Object.keys(llc.settings || {}).filter((k) => !(k in llc)).map((k) => [k, "setting of the sampler"]),
  ].map(([key, meaning]) => ({ key, meaning, value: llc[key] ?? (llc.settings || {})[key] })).filter((r) => r.value !== null && r.value !== undefined);
  return dataTable({ title: "Sampling diagnostics", rows, first: 20, columns: [
    textColumn("key", "quantity"), { label: "value", value: (r) => r.value, show: (r) => [number(r.value), good[r.key] && isNumber(r.value) ? h("span", { class: good[r.key](r.value) ? "mark yes" : "mark no" }, good[r.key](r.value) ? " ● fine" : " ○ poor") : null] },
    textColumn("meaning")] });
}
