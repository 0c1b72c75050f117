// The map of blocks and roles for what differs: between networks laid side by side, and between two steps of a run.

import { h, replace } from "./dom.js";
import { isNumber, number } from "./format.js";
import { blockMap, isTransformer } from "./blockmap.js";
import { metricOf } from "./meanings.js";
import { dataTable } from "./table.js";

const nameOf = (key) => (metricOf(key) || { name: String(key).replaceAll("_", " ") }).name;
const lastOf = (value) => (Array.isArray(value) ? value[value.length - 1] : value);
const KINDS = { untouched: "#999999", rounding: "#56b4e9", "low-rank": "#0072b2", dense: "#e69f00", undecided: "#cc79a7" };

// changes: [[key, name, meaning]] of numbers that a layer has as a whole. Nothing where the networks are no transformers.
export function compareMap(layers, names, metrics, changes, choose) {
  if (!isTransformer(layers)) return null;
  const shift = (key) => (l) => {
    const own = (l.metrics || {})[key] || [];
    const [a, b] = [own[0], own[own.length - 1]];
    return isNumber(a) && isNumber(b) ? b - a : null;
  };
  const phases = (l) => (l.metrics || {}).phase || [];
  const choices = [
    ...changes.map(([key, name]) => ({ key, name, of: (l) => lastOf(l[key]) })),
    ...(layers.some((l) => l.update_kind) ? [{ key: "update_kind", name: "kind of update", category: { of: (l) => lastOf(l.update_kind), colour: (k) => KINDS[k], meaning: (k) => `layers whose update is ${k}` } }] : []),
    ...(layers.some((l) => phases(l).length > 1) ? [{ key: "phase", name: "phase changed", category: { of: (l) => (phases(l)[0] === lastOf(phases(l)) ? "same phase" : "other phase"), colour: (t) => (t === "other phase" ? "#d55e00" : "var(--none)"), meaning: (t) => (t === "other phase" ? "the phase of the last network is another" : "the phase did not change") } }] : []),
    ...metrics.filter((m) => layers.some((l) => isNumber(shift(m)(l)))).map((m) => ({ key: m, name: `change of ${nameOf(m)}`, difference: true, of: shift(m) })),
  ];
  if (!choices.some((c) => c.of)) return null;
  const shown = h("div", { class: "opened", "aria-live": "polite" });
  const map = blockMap(layers, { choices, first: choices[0].key, title: "What differs, by block and role", caption: `From ${names[0]} to ${names[names.length - 1]}. A click shows the layer's numbers and spectra; arrow keys move.`, choose: (layer) => {
    replace(shown, one(layer, names, metrics, changes));
    choose(layer);
  } });
  return h("div", {}, map, shown);
}

function one(layer, names, metrics, changes) {
  const rows = [
    ...metrics.filter((m) => ((layer.metrics || {})[m] || []).some(isNumber)).map((m) => ({ name: nameOf(m), values: layer.metrics[m] })),
    ...changes.map(([key, name]) => ({ name, values: [...Array(names.length - 1).fill(null), lastOf(layer[key])] })),
  ];
  const difference = (r) => (r.values.length > 1 && isNumber(r.values[0]) && isNumber(lastOf(r.values)) ? lastOf(r.values) - r.values[0] : null);
  return dataTable({ title: layer.name, rows, columns: [
    { label: "number", left: true, value: (r) => r.name, show: (r) => r.name },
    ...names.map((n, i) => ({ label: n, value: (r) => r.values[i] })),
    { label: "difference", value: difference, show: (r) => (difference(r) === null ? "–" : `${difference(r) > 0 ? "+" : ""}${number(difference(r), 3)}`) }] });
}

// A run over time: how far each layer's series has moved from the first step to the one that `step()` names.
export function trackMap(result, step, choose) {
  const rows = (result.series || []).filter((r) => r.layer !== null);
  const layers = (result.layers || []).filter((l) => rows.some((r) => r.layer === l.name));
  const kinds = [...new Set(rows.map((r) => r.what))];
  if (!kinds.length || !isTransformer(layers)) return null;
  const series = new Map(rows.map((r) => [`${r.what} ${r.layer}`, r.values || []]));
  const shift = (what) => (l) => {
    const values = series.get(`${what} ${l.name}`) || [];
    const [a, b] = [values.find(isNumber), values[step()]];
    return isNumber(a) && isNumber(b) ? b - a : null;
  };
  const changes = result.changes || [];
  const choices = kinds.flatMap((what) => [
    { key: what, name: `change of ${nameOf(what)} since the first step`, difference: true, of: shift(what) },
    ...(changes.some((c) => c.what === what && c.layer !== null) ? [{ key: `${what}-bend`, name: `step at which ${nameOf(what)} bends first`, of: (l) => {
      const own = changes.filter((c) => c.what === what && c.layer === l.name).map((c) => c.step);
      return own.length ? Math.min(...own) : null;
    } }] : [])]);
  return blockMap(layers, { choices, first: choices[0].key, title: "What the run changed, by block and role", caption: "Follows the step chosen above. A click shows the layer's spectrum at this step.", choose });
}
