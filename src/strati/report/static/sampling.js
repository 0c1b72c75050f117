// Sampled quantities: the learning coefficient with its chains, and effective parameters over scales of the loss.

import { empty, h, s, section, stat } from "./dom.js";
import { isNumber, number, plural } from "./format.js";
import { dots, errorBar, figure, frame, legend, line, rowName, verticalRule } from "./chart.js";
import { OKABE, padded } from "./scale.js";
import { dataTable } from "./table.js";

export function llcSection(result, id) {
  const error = (value) => (isNumber(value) ? `± ${number(value, 2)}` : result.reason);
  const body = section(id, "Learning coefficient", isNumber(result.estimate) ? `λ̂ = ${number(result.estimate)} ${error(result.stderr)} at nβ = ${number(result.nbeta)}, γ = ${number(result.gamma)}.` : `No estimate: ${result.reason || "the chains have not converged"}.`,
    h("div", { class: "stats" }, stat("λ̂", number(result.estimate, 4), error(result.stderr)),
      isNumber(result.asymptotic) ? stat("λ̂ (limit)", number(result.asymptotic, 4), error(result.asymptotic_stderr)) : null,
      stat("R̂", number(result.rhat, 4), "below 1.05 is fine"), stat("effective draws", number(result.ess, 3))));
  const parts = [];
  if ((result.traces || []).length) parts.push(traces(result));
  if ((result.ladder || []).length > 1) parts.push(ladder(result));
  body.append(parts.length ? h("div", { class: "grid2" }, parts) : empty("This result holds no chains."), diagnostics(result));
  return body;
}

// Eigenvalues of the loss's second derivatives: the largest ones, the trace, and how many parameters count at each scale.
export function curvatureSection(result, id) {
  const top = (result.top || []).map((value, i) => ({ rank: i + 1, value, residual: (result.top_residuals || [])[i] }));
  const error = result.trace_stderr > 0 ? `± ${number(result.trace_stderr, 2)}` : "exact";
  return section(id, "Curvature", `Eigenvalues of the ${result.matrix} of the mean loss in ${number(result.parameters)} parameters.`,
    h("div", { class: "stats" }, stat("largest eigenvalue", number((top[0] || {}).value, 4)), stat("trace", number(result.trace, 4), error), stat("negative", isNumber(result.negative) ? `${number(100 * result.negative, 3)} %` : "", "of the eigenvalues")),
    top.length ? dataTable({ title: "Top eigenvalues", rows: top, columns: [["rank", "rank"], ["value", "eigenvalue"], ["residual", "residual"]].map(([key, label]) => ({ label, value: (r) => r[key] })) }) : empty("This result holds no eigenvalues."),
    dataTable({ title: "Effective parameters by scale", rows: result.effective || [], columns: [["epsilon", "ε"], ["value", "N_eff"], ["stderr", "standard error"]].map(([key, label]) => ({ label, value: (r) => r[key] })) }));
}

// Covariances of the losses of rows: each line's own value and its strongest column.
export function influenceSection(result, id) {
  const labels = result.labels || [], columns = result.rows || [];
  const square = result.kind !== "susceptibility" && labels.length === columns.length && labels.every((label, i) => label === columns[i]);
  const rows = labels.map((label, i) => {
    const values = (result.values || [])[i] || [];
    const others = values.map((value, j) => [value, j]).filter(([value, j]) => isNumber(value) && !(square && j === i));
    const best = others.reduce((a, b) => (a === null || Math.abs(b[0]) > Math.abs(a[0]) ? b : a), null);
    return { label, own: square ? values[i] : null, column: best && columns[best[1]], value: best && best[0], error: best && result.stderr[i][best[1]] };
  });
  const own = square ? [["own", "own value"]] : [];
  return section(id, "Influence", result.reason ? `Some entries have no value: ${result.reason}.` : `${result.kind}: ${plural(labels.length, "line")} by ${plural(columns.length, "column")}.`,
    h("div", { class: "stats" }, stat("WAIC", number(result.waic, 4), isNumber(result.waic_stderr) ? `± ${number(result.waic_stderr, 2)}` : ""),
      stat("singular fluctuation", number(result.fluctuation, 4), isNumber(result.fluctuation_stderr) ? `± ${number(result.fluctuation_stderr, 2)}` : "")),
    rows.length ? dataTable({ title: "Strongest entries", rows, filter: true, columns: [
      { label: result.kind === "susceptibility" ? "part" : "row", left: true, value: (r) => r.label, show: (r) => String(r.label) }, ...own.map(([key, label]) => ({ label, value: (r) => r[key] })),
      { label: "strongest row", left: true, value: (r) => r.column, show: (r) => (r.column === null ? "" : String(r.column)) },
      ...[["value", "value"], ["error", "standard error"]].map(([key, label]) => ({ label, value: (r) => r[key] }))] }) : empty("This result holds no entries."));
}

// Learning coefficients of layers, heads or groups of data: a dot with its standard error for each, and the table.
export function partsSection(result, id) {
  const rows = result.parts || [];
  const known = rows.filter((r) => isNumber(r.estimate));
  const body = section(id, "Learning coefficients by part", `${plural(rows.length, "part")}, each sampled with the rest of the network held fixed.`);
  if (known.length) body.append(partsChart(known));
  body.append(rows.length ? dataTable({ title: "Parts", rows, filter: true, columns: [
    { label: "part", left: true, value: (r) => r.part, show: (r) => r.part }, ...[["estimate", "λ̂"], ["stderr", "standard error"], ["asymptotic", "λ̂ (limit)"], ["rhat", "R̂"], ["ess", "effective draws"]].map(([key, label]) => ({ label, value: (r) => r[key] })),
    { label: "why a value is missing", left: true, value: (r) => r.reason, show: (r) => r.reason || "" }] }) : empty("This result holds no parts."));
  return body;
}

function partsChart(rows) {
  const error = (r) => (isNumber(r.stderr) ? r.stderr : 0);
  return figure({ title: "λ̂ by part", wide: true, draw: (width) => {
    const names = Math.min(240, width * 0.35);
    const chart = frame({ width, height: 56 + 26 * rows.length, margin: { left: names }, label: "Learning coefficient of each part", x: { domain: padded([0, ...rows.flatMap((r) => [r.estimate - error(r), r.estimate + error(r)])]), label: "λ̂" }, y: { domain: [rows.length - 0.5, -0.5], none: true } });
    rows.forEach((r, i) => {
      rowName(chart, i, r.part);
      line(chart, [[r.estimate - error(r), i], [r.estimate + error(r), i]], { class: "line thin", stroke: OKABE[0] });
    });
    dots(chart, rows.map((r, i) => ({ x: r.estimate, y: i, colour: OKABE[0], tip: `${r.part}\nλ̂ ${number(r.estimate)} ± ${number(error(r), 2)}` })), 4);
    return chart.svg;
  }, caption: "Bars are one standard error. A smaller λ̂ means a part that can be changed in more ways without raising the loss." });
}

export function scalesSection(result, id) {
  const rows = result.scales || [];
  return section(id, "Effective parameters", `How many of ${number(result.parameters)} parameters matter, by the loss that is tolerated.`,
    rows.length ? scales(result) : empty("This result holds no scales."),
    dataTable({ title: "Effective parameters by scale", rows, columns: [["epsilon", "ε"], ["lambda", "λ"], ["stderr", "standard error of λ"], ["effective", "N_eff = 2 λ"], ["nbeta", "nβ"], ["gauss_newton", "λ (Gauss-Newton)"]].map(([key, label]) => ({ label, value: (r) => r[key] })) }));
}

function ladder(result) {
  const rungs = [...result.ladder].filter((r) => isNumber(r.nbeta) && isNumber(r.lambda)).sort((a, b) => a.nbeta - b.nbeta);
  return figure({ title: "λ̂ over temperatures", wide: true, draw: (width) => {
    const error = (r) => (isNumber(r.stderr) ? r.stderr : 0);
    const chart = frame({ width, height: 320, label: "Learning coefficient at each temperature", x: { domain: padded(rungs.map((r) => r.nbeta), 0.05, true), log: true, label: "nβ (colder to the right)" }, y: { domain: padded(rungs.flatMap((r) => [r.lambda - error(r), r.lambda + error(r)])), label: "λ̂" } });
    line(chart, rungs.map((r) => [r.nbeta, r.lambda]), { stroke: OKABE[0] });
    for (const r of rungs) errorBar(chart, r.nbeta, r.lambda - error(r), r.lambda + error(r), { stroke: OKABE[0] });
    dots(chart, rungs.map((r) => ({ x: r.nbeta, y: r.lambda, colour: OKABE[0], tip: `nβ ${number(r.nbeta, 3)}\nλ̂ ${number(r.lambda)} ± ${number(error(r), 2)}` })), 4);
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
      chart.over.append(s("line", { class: "rule", x1: chart.left, x2: chart.right, y1: chart.y(llc.estimate), y2: chart.y(llc.estimate) }), s("text", { class: "rule-text", x: chart.right - 4, y: chart.y(llc.estimate) - 6, "text-anchor": "end" }, `λ̂ = ${number(llc.estimate)}`));
    }
    verticalRule(chart, 0, null, {});
    return chart.svg;
  }, caption: "Chains that mix overlap and show no drift. A chain that goes its own way means: do not trust the estimate." });
  picture.insertBefore(legend(chains.map((_, i) => [`chain ${i + 1}`, OKABE[i % OKABE.length], null, "stroke"])), picture.lastChild);
  return picture;
}

export function diagnostics(llc) {
  const good = { rhat: (v) => v < 1.05, ess: (v) => v > 100 };
  const rows = [
    ["estimate", "λ̂ at β = 1/ln n (WBIC)"], ["stderr", "standard error"], ["asymptotic", "slope over temperatures"], ["asymptotic_stderr", "its standard error"],
    ["rhat", "R̂: chains agree if below about 1.05"], ["ess", "effective sample size: independent draws behind the estimate"], ["chains", "chains"], ["draws", "draws per chain"],
    ["nbeta", "n β: inverse temperature"], ["gamma", "γ: strength that keeps the chain near the network"], ["reason", "why a value is missing"],
  ].filter(([k]) => llc[k] !== null && llc[k] !== undefined).map(([key, meaning]) => ({ key, meaning, value: llc[key] }));
  return dataTable({ title: "Sampling diagnostics", rows, columns: [
    { label: "quantity", left: true, value: (r) => r.key }, { label: "value", value: (r) => r.value, show: (r) => [number(r.value), good[r.key] && isNumber(r.value) ? h("span", { class: good[r.key](r.value) ? "mark yes" : "mark no" }, good[r.key](r.value) ? " ● fine" : " ○ poor") : null] },
    { label: "meaning", left: true, value: (r) => r.meaning }] });
}
