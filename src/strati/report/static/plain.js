// Results that are tables: what a file holds (inspect), what was skipped, a paper's numbers beside ours (reproduce), a
// sparser network (sparsify), a puzzle that was made (reassemble --make), what a run would cost, the steps of the tour.

import { h, section, stat } from "./dom.js";
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
  const rows = result.rows || [];
  const off = (r) => (typeof r.paper === "number" && typeof r.ours === "number" && r.paper !== 0 ? (r.ours - r.paper) / Math.abs(r.paper) : null);
  const used = (key) => rows.some((r) => r[key] !== null && r[key] !== undefined);
  const optional = [["error", "error"], ["agrees", "agrees"], ["theory", "theory"], ["before", "measured before"], ["mode", "run"], ["seeds", "seeds"]]
    .filter(([key]) => used(key)).map(([key, label]) => ({ label, value: (r) => r[key] }));
  const how = result.mode ? ` ${result.mode === "quick" ? "Quick run: fewer networks or draws than the paper's." : "Full run."} Seed ${result.seed || 0}.` : "";
  return section(id, result.title || "Paper and ours", `The paper's number beside ours, computed here.${how}`, pictures(result),
    dataTable({ title: result.title || "Reproduction", rows, cards: true, columns: [
      { label: "what", left: true, value: (r) => r.what }, { label: "paper", value: (r) => r.paper }, { label: "ours", value: (r) => r.ours },
      ...optional.slice(0, 2),
      { label: "difference", value: off, show: (r) => (off(r) === null ? "–" : `${off(r) > 0 ? "+" : ""}${number(100 * off(r), 2)} %`) },
      ...optional.slice(2),
      { label: "note", left: true, value: (r) => r.note, show: (r) => h("span", { class: "prose" }, r.note || "") }] }));
}

// Pictures travel in the page, each with a sentence on what to see and its data as a table; a figure whose file was not found is named.
function pictures(result) {
  const held = (result.pictures || []).filter((p) => typeof p.data === "string" && /^[A-Za-z0-9+/=]+$/.test(p.data) && ["png", "svg+xml"].includes(p.kind));
  const shown = held.map((p) => h("div", { class: "card" }, h("h3", {}, p.name), h("img", { class: "picture", alt: told(p.name, result.captions) || p.name, src: `data:image/${p.kind};base64,${p.data}` }),
    told(p.name, result.captions) ? h("p", { class: "caption" }, told(p.name, result.captions)) : null, pictureData(p)));
  // The same picture is kept as PNG and SVG; the page holds one of the two.
  const stem = (file) => basename(file).replace(/\.(png|svg)$/, "");
  const rest = (result.figures || []).filter((f) => !held.some((p) => stem(f) === stem(p.name))).map(basename);
  return [shown.length ? h("div", { class: "grid2" }, shown) : null, rest.length ? h("p", { class: "caption" }, `${plural(rest.length, "figure")} not on this page: ${rest.join(", ")}`) : null];
}

// Of the captions whose key begins the name, the longest key's.
function told(name, captions) {
  const keys = Object.keys(captions && typeof captions === "object" ? captions : {}).filter((key) => name.startsWith(key) && typeof captions[key] === "string");
  return keys.length ? captions[keys.sort((a, b) => b.length - a.length)[0]] : "";
}

function pictureData(picture) {
  const columns = picture.columns, rows = picture.rows;
  if (!Array.isArray(columns) || !Array.isArray(rows) || !rows.every(Array.isArray)) return null;
  const value = (text) => (typeof text === "string" && text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text);
  const rest = Number(picture.lines) > rows.length ? `, the first ${count(rows.length)} of ${count(picture.lines)}` : "";
  return h("details", { class: "fold" }, h("summary", {}, `The data as a table${rest}`),
    dataTable({ title: `Data of ${picture.name}`, rows, columns: columns.map((label, i) => ({ label: String(label), left: i < 2, value: (r) => value(r[i]) })) }));
}

export function sparsifySection(result, id) {
  const layers = result.layers || [];
  return section(id, "Sparser weights", `${count(result.zeros_after)} of ${count(result.weights)} weights are zero, ${count(result.zeros_before)} before; the outputs change by ${number(result.output_change, 2)}.`,
    dataTable({ title: "Zeros by layer", rows: layers, columns: [{ label: "layer", left: true, value: (l) => l.name, show: (l) => l.name }, { label: "weights", value: (l) => l.weights }, { label: "zeros before", value: (l) => l.zeros_before }, { label: "zeros after", value: (l) => l.zeros_after }] }));
}

export function madeSection(result, id) {
  const recipe = Object.entries(result.recipe || {}).map(([key, value]) => ({ key, value }));
  return section(id, "A dropped network", `${basename(result.folder)}: ${plural((result.permutation || []).length, "piece")}, training error ${number(result.loss, 3)}.`,
    dataTable({ title: "How it was made", rows: recipe, columns: [{ label: "setting", left: true, value: (r) => r.key, show: (r) => r.key }, { label: "value", value: (r) => r.value, show: (r) => (typeof r.value === "number" ? number(r.value) : String(r.value)) }] }),
    h("p", { class: "caption" }, `Right order: ${(result.permutation || []).join(", ")}`));
}

// A shuffled network's answer: the pieces of each block, or of a residual network their order.
export function shuffleSection(result, id) {
  const verb = String(result.schema).replace(/^strati\.([a-z-]+)\/\d+$/, "$1");
  const rows = (result.blocks || []).flatMap((block, number) => Object.entries(block).map(([role, piece]) => ({ number, role, piece })));
  const order = (result.permutation || []).map((piece, number) => ({ number, role: "", piece }));
  const title = verb === "reassemble-transformer" ? "A reassembled transformer" : "A shuffled network";
  return section(id, title, `${plural(rows.length + order.length, "piece")} with their places.`,
    dataTable({ title: "Which piece is what", filter: true, rows: [...rows, ...order], columns: [{ label: "block", value: (r) => r.number }, { label: "role", left: true, value: (r) => r.role }, { label: "piece", value: (r) => r.piece }] }));
}

export function identifySection(result, id) {
  const candidates = (result.candidates || []).map((c) => ({ ...c, label: c.name }));
  const blocks = (result.correspond || []).map((c) => ({ label: `block ${c.block}`, role: `block ${c.partner}`, likeness: c.likeness }));
  const title = candidates.length ? `${result.piece}: ${result.sure ? "" : "not clearly "}${result.name}` : "Blocks that correspond";
  return section(id, "Which layer is this?", title,
    dataTable({ title: "Likeness", rows: [...candidates, ...blocks], columns: [{ label: "layer", left: true, value: (r) => r.label }, { label: "role or partner", left: true, value: (r) => r.role }, { label: "cosine", value: (r) => r.likeness }] }));
}

export function lineageSection(result, id) {
  const pairs = result.pairs || [];
  return section(id, "Lineage", `${pairs.length} pairs of networks compared.`,
    dataTable({ title: "Relations", rows: pairs, columns: [{ label: "A", left: true, value: (r) => r.a }, { label: "B", left: true, value: (r) => r.b }, { label: "relation", left: true, value: (r) => r.kind }, { label: "p-value", value: (r) => r.pvalue }] }));
}

export function estimateSection(result, id) {
  const largest = result.largest || [];
  const seconds = result.seconds;
  const time = seconds < 60 ? `${number(seconds, 2)} s` : seconds < 3600 ? `${number(seconds / 60, 2)} minutes` : seconds < 86400 ? `${number(seconds / 3600, 2)} hours` : `${number(seconds / 86400, 2)} days`;
  return section(id, "What it would cost", `${basename(result.path)}: about ${time} on the machine that made this estimate, ${number(result.workers)} at once.`,
    h("div", { class: "stats" }, stat("matrices", count(result.matrices)), stat("to read", `${number(result.bytes / 1e9, 3)} GB`), stat("operations", number(result.flops, 3)), stat("memory at most", `${number(result.memory / 1e9, 3)} GB`),
      largest.length ? stat("largest layer", `${largest[1]} × ${largest[2]}`, largest[0]) : null));
}

export function demoSection(result, id) {
  return section(id, "The tour", `${plural((result.steps || []).length, "step")}, results in ${basename(result.folder)}.`,
    dataTable({ title: "Steps", rows: result.steps || [], columns: [{ label: "step", left: true, value: (r) => r.title, show: (r) => r.title }, { label: "command", left: true, value: (r) => r.command, show: (r) => r.command }, { label: "seconds", value: (r) => r.seconds }] }));
}
