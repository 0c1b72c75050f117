// Results that are tables: what a file holds (inspect), a paper's numbers beside ours (reproduce), and every result that has
// no section of its own.

import { fold, h, s, section, stat } from "./dom.js";
import { basename, count, isNumber, number, percent, plural, sentence } from "./format.js";
import { figure, rowFrame } from "./chart.js";
import { niceName } from "./meanings.js";
import { dataTable, layerColumn, textColumn } from "./table.js";

export function inspectSection(result, id) {
  const network = result.network || {};
  const layers = result.layers || [];
  const roles = Object.values((result.totals || {}).roles || {}).filter((r) => r.role && isNumber(r.parameters));
  const body = section(id, "File contents", `${count(network.parameters)} parameters, ${plural(layers.length, "weight matrix", "weight matrices")} to analyse.`);
  if (roles.length > 1) body.append(figure({ title: "Parameters by role", wide: true, draw: (width) => {
    const total = roles.reduce((sum, r) => sum + r.parameters, 0);
    const chart = rowFrame({ width, names: roles.map((r) => r.role), label: "Parameters by role", right: 60, x: { domain: [0, Math.max(...roles.map((r) => r.parameters))], label: "parameters" } });
    roles.forEach((r, i) => {
      chart.marks.append(s("rect", { class: "bar strong", x: chart.left, y: chart.y(i) - 8, width: Math.max(1, chart.x(r.parameters) - chart.left), height: 16, tip: `${r.role}\n${number(r.parameters)} parameters` }));
      chart.over.append(s("text", { class: "minor", x: chart.x(r.parameters) + 6, y: chart.y(i), dy: "0.34em" }, percent(r.parameters / total, 2)));
    });
    return chart.svg;
  } }));
  body.append(dataTable({ title: "Weight matrices", rows: layers, columns: [layerColumn((l) => l.name), textColumn("role", "role", "role"), textColumn("kind"), { label: "rows", value: (l) => l.rows }, { label: "cols", value: (l) => l.cols }, { label: "parameters", value: (l) => l.parameters }, textColumn("dtype"), { ...textColumn("view", "view", "view"), value: (l) => (l.view === "as stored" ? null : l.view) }] }));
  const left = result.skipped || [];
  if (left.length) body.append(fold(`${plural(left.length, "tensor")} not analysed, with the reason`, dataTable({ title: "Not analysed", rows: left, columns: [layerColumn((l) => l.name, "name"), textColumn("reason")] })));
  return body;
}

export function reproduceSection(result, id) {
  const rows = result.rows || [];
  const off = (r) => (typeof r.paper === "number" && typeof r.ours === "number" && r.paper !== 0 ? (r.ours - r.paper) / Math.abs(r.paper) : null);
  const used = (key) => rows.some((r) => r[key] !== null && r[key] !== undefined);
  const optional = [["error", "error"], ["agrees", "agrees"], ["theory", "theory"], ["before", "measured before"], ["mode", "run"], ["seeds", "seeds"]]
    .filter(([key]) => used(key)).map(([key, label]) => ({ label, value: (r) => r[key] }));
  const how = result.mode ? ` ${result.mode === "quick" ? "Quick run: fewer networks or draws than the paper's." : "Full run."} Seed ${result.seed || 0}.` : "";
  return section(id, "Reproduction", `The paper's number beside ours, computed here.${how}`, pictures(result),
    dataTable({ title: result.title || "Reproduction", rows, cards: true, columns: [
      textColumn("what"), { label: "paper", value: (r) => r.paper }, { label: "ours", value: (r) => r.ours },
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
  return fold(`The data as a table${rest}`,
    dataTable({ title: `Data of ${picture.name}`, rows, columns: columns.map((label, i) => ({ label: String(label), left: i < 2, value: (r) => value(r[i]) })) }));
}

// A result that has no section of its own: its numbers set large, its lists of records as tables, the rest in a fold.
const TITLES = { estimate: "Cost estimate", demo: "Tour", sparsify: "Sparser weights", shuffle: "Shuffled pieces", "shuffle-transformer": "Shuffled pieces", "reassemble-make": "Shuffled pieces", identify: "Identification", correspond: "Corresponding blocks", explain: "Explanation", report: "Report" };
const HEAD = ["schema", "strati", "summary", "warnings"];

export function otherSection(result, id) {
  const verb = String(result.schema).replace(/^strati\.([a-z-]+)\/\d+$/, "$1");
  const fields = Object.entries(result).filter(([key, v]) => !HEAD.includes(key) && v !== null && v !== undefined);
  const records = fields.filter(([, v]) => Array.isArray(v) && v.length && v.every((row) => row && typeof row === "object" && !Array.isArray(row)));
  const numbers = fields.filter(([, v]) => isNumber(v) || typeof v === "boolean");
  const rest = fields.filter(([key, v]) => !records.some(([k]) => k === key) && !numbers.some(([k]) => k === key) && !(Array.isArray(v) && !v.length));
  const plain = (v) => (typeof v === "object" ? JSON.stringify(v) : v);
  const name = (key) => niceName(key);
  return section(id, TITLES[verb] || sentence(verb.replaceAll("-", " ")), "",
    numbers.length ? h("div", { class: "stats" }, numbers.slice(0, 8).map(([key, v]) => stat(name(key), number(v)))) : null,
    records.map(([key, rows]) => dataTable({ title: sentence(name(key)), rows, columns: [...new Set(rows.flatMap(Object.keys))].map((k, i) => ({ label: name(k), left: i === 0 || rows.some((r) => typeof r[k] === "string"), value: (r) => plain(r[k]), show: (r) => number(plain(r[k])) })) })),
    rest.length || numbers.length > 8 ? fold("Everything else in this result", dataTable({ title: "Fields", rows: [...numbers.slice(8), ...rest].map(([key, v]) => ({ key: name(key), value: plain(v) })), columns: [textColumn("key", "field"), { label: "value", left: true, value: (r) => r.value, show: (r) => h("span", { class: "prose" }, number(r.value)) }] })) : null);
}
