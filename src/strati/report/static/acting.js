// Acting on a network: a plan's choice for every layer, what applying it gave, and what a check found.

import { empty, h, section, stat } from "./dom.js";
import { basename, isNumber, number, percent, plural, sentence } from "./format.js";
import { planFigures } from "./plan.js";
import { dataTable } from "./table.js";

const range = (v) => (v && isNumber(v.low) && isNumber(v.high) ? `${number(v.low)} to ${number(v.high)}` : "");
const value = (v) => (v && typeof v === "object" ? v.performance : v);

export function planSection(result, id) {
  const layers = result.layers || [];
  const text = (v) => (v === null || v === undefined ? "–" : typeof v === "object" ? JSON.stringify(v) : String(v));
  const about = result.performance;
  const unit = result.size && result.size.unit;
  const cost = (l) => (Array.isArray(l.cost_ci) ? `${number(l.cost)} (${l.cost_ci.map((v) => number(v, 3)).join(" to ")})` : number(l.cost));
  return section(id, "Plan", `${result.action || "change"}, budget ${text(result.budget)}: one choice for each of ${plural(layers.length, "layer")}.`,
    h("div", { class: "stats" }, about && isNumber(about.intact) ? stat(`${about.name}, intact`, number(about.intact)) : null,
      stat(about && about.name ? `${about.name}, predicted` : "predicted", number(value(result.predicted)), range(result.predicted)),
      result.uniform ? stat("same budget, spread evenly", number(value(result.uniform.predicted || result.uniform)), range(result.uniform.predicted || result.uniform)) : null,
      result.additivity && isNumber(result.additivity.measured) ? stat(`mean of ${plural(result.additivity.n, "combination")}, measured`, number(result.additivity.measured), `by adding up: ${number(result.additivity.predicted)}`) : null),
    result.verdict ? h("p", { class: "note" }, sentence(String(result.verdict))) : null,
    dataTable({ title: "Choice for every layer", rows: layers, filter: true, columns: [
      { label: "layer", left: true, value: (l) => l.name, show: (l) => l.name }, { label: "choice", left: true, value: (l) => text(l.choice), show: (l) => text(l.choice) },
      { label: unit ? `saves (${unit})` : "saves", value: (l) => l.saves }, { label: "cost", value: (l) => l.cost, show: cost }] }),
    ...planFigures(result));
}

export function applySection(result, id) {
  const share = (after, before) => (isNumber(after) && isNumber(before) && before > 0 ? `${percent(after / before)} of before` : "");
  const written = Array.isArray(result.written) ? result.written : [result.written].filter((w) => w);
  return section(id, "Plan applied", `Written: ${written.map((w) => basename(String(w))).join(", ") || "nothing"}.`,
    h("div", { class: "stats" }, stat("parameters", number(result.parameters_after), share(result.parameters_after, result.parameters_before)), stat("bytes", number(result.bytes_after), share(result.bytes_after, result.bytes_before)),
      stat("predicted", number(value(result.predicted)), range(result.predicted)), stat("measured", number(value(result.measured)), range(result.measured)),
      isNumber(result.seconds_after) ? stat("forward pass", `${number(result.seconds_after)} s`, `before: ${number(result.seconds_before)} s`) : null));
}

export function checkSection(result, id) {
  const found = result.found || [];
  const body = section(id, "Check", result.passed ? "Passed: no layer shows what was looked for." : `Failed: ${plural(found.length, "finding")}.`);
  if (!found.length) body.append(empty("Nothing was found."));
  else body.append(dataTable({ title: "Findings", rows: found, filter: true, columns: ["layer", "code", "text"].map((key) => ({ label: key, left: true, value: (r) => r[key], show: (r) => r[key] ?? "–" })) }));
  return body;
}
