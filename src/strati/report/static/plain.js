// Results that are tables: what a file holds (inspect), what was skipped, a paper's numbers beside ours (reproduce).

import { h, section } from "./dom.js";
import { basename, count, number, plural } from "./format.js";
import { dataTable } from "./table.js";

export function inspectSection(result, id) {
  const network = result.network || {};
  const layers = result.layers || [];
  const text = (key, label) => ({ label: label || key, left: true, value: (l) => l[key] });
  return section(id, "What the file holds", `${basename(network.path)}: ${count(network.parameters)} parameters, ${plural(layers.length, "weight matrix").replace("matrixs", "matrices")} to analyse.`,
    dataTable({ title: "Layers found", filter: true, rows: layers, columns: [text("name"), text("role"), text("kind"), { label: "rows", value: (l) => l.rows }, { label: "cols", value: (l) => l.cols }, { label: "parameters", value: (l) => l.parameters }, text("dtype"), text("view")] }),
    skipped(result.skipped));
}

export function skipped(list) {
  if (!list || !list.length) return null;
  return h("details", { class: "fold" }, h("summary", {}, `${plural(list.length, "tensor")} skipped, with the reason`),
    dataTable({ title: "Skipped", filter: true, rows: list, columns: [{ label: "name", left: true, value: (l) => l.name }, { label: "reason", left: true, value: (l) => l.reason }] }));
}

export function reproduceSection(result, id) {
  const off = (r) => (typeof r.paper === "number" && typeof r.ours === "number" && r.paper !== 0 ? (r.ours - r.paper) / Math.abs(r.paper) : null);
  return section(id, result.title || "Paper and ours", "The paper's number beside ours, computed here.",
    dataTable({ title: result.title || "Reproduction", rows: result.rows || [], cards: true, columns: [
      { label: "what", left: true, value: (r) => r.what }, { label: "paper", value: (r) => r.paper }, { label: "ours", value: (r) => r.ours },
      { label: "difference", value: off, show: (r) => (off(r) === null ? "–" : `${off(r) > 0 ? "+" : ""}${number(100 * off(r), 2)} %`) },
      { label: "note", left: true, value: (r) => r.note, show: (r) => h("span", { class: "prose" }, r.note || "") }] }));
}
