// What a check found, grouped by code; and how networks descend from each other, as a tree.

import { fold, h, note, s, section } from "./dom.js";
import { networkNames, number, percent, plural, shorten } from "./format.js";
import { figure, legend } from "./chart.js";
import { meaningOf, term } from "./help.js";
import { OKABE } from "./scale.js";
import { dataTable, layerColumn, textColumn } from "./table.js";

export function checkSection(result, id) {
  const rows = result.found || [];
  const codes = [...new Set(rows.map((r) => r.code))];
  const fails = (code) => !Array.isArray(result.fail_on) || result.fail_on.includes(code);
  const body = section(id, "Integrity", result.passed ? "No damage found." : `${plural(rows.length, "finding")}.`);
  if (!rows.length) body.append(note("good", `No damage found${result.checked ? ` in ${plural(result.checked, "tensor")}` : ""}. Looked for: `, (result.fail_on || []).map((code, i) => [i ? ", " : "", term(code)]), "."));
  for (const code of codes) {
    const mine = rows.filter((r) => r.code === code);
    body.append(h("div", { class: "finding" }, h("h3", { class: "sub" }, term(code), ` · ${plural(mine.length, "finding")}`),
      note(fails(code) ? "bad" : "", `${fails(code) ? "This lets the check fail: " : "This does not let the check fail: "}${meaningOf(code, "code") || mine[0].text}.`),
      dataTable({ title: code, rows: mine, columns: [layerColumn((r) => r.layer ?? "the file", "where"), textColumn("text", "what")] })));
  }
  return body;
}

const pvalue = (p) => (p !== null && p <= 1e-300 ? "< 10⁻³⁰⁰" : number(p, 2));
const KINDS = ["fine-tuned", "lora", "quantised", "merged", "pruned", "partly-retrained", "converted", "identical"];
const kindColour = (kind) => (KINDS.includes(kind) ? OKABE[KINDS.indexOf(kind) % OKABE.length] : "var(--soft)");

export function lineageSection(result, id) {
  const pairs = result.pairs || [];
  const names = nameMap(result);
  const kinds = [...new Set((result.tree || []).map((e) => e.kind))];
  const body = section(id, "Lineage", `${plural(pairs.length, "pair")} of networks compared.`);
  const picture = figure({ title: "Family tree", wide: true, draw: (width) => drawTree(width, result), caption: "An arrow leads from a network to what was made from it; a line without an arrow joins networks whose direction is not known." });
  if (kinds.length) picture.insertBefore(legend(kinds.map((k) => [k, kindColour(k), null, "stroke"])), picture.lastChild);
  body.append(picture, dataTable({ title: "Pairs", rows: pairs, columns: [
    { label: "A", left: true, value: (r) => r.a, show: (r) => h("span", { tip: r.a }, names.get(r.a) || r.a) }, { label: "B", left: true, value: (r) => r.b, show: (r) => h("span", { tip: r.b }, names.get(r.b) || r.b) },
    textColumn("kind", "relation"), { label: "direction", left: true, value: (r) => r.direction, show: (r) => ({ "a-to-b": "A → B", "b-to-a": "B → A" }[r.direction] || "not known") },
    { label: "p-value", value: (r) => r.pvalue, show: (r) => pvalue(r.pvalue) }, { label: "distance", value: (r) => r.distance }, { label: "rank", value: (r) => r.rank }] }));
  const blocks = pairs.flatMap((p) => (p.blocks || []).map((b) => ({ ...b, pair: `${names.get(p.a) || p.a} – ${names.get(p.b) || p.b}` })));
  if (blocks.length) body.append(fold("Blocks that agree", dataTable({ title: "Agreement of blocks", rows: blocks, columns: [textColumn("pair", "networks"), textColumn("a", "block of A"), textColumn("b", "block of B"), { label: "agreement", value: (r) => r.agreement, show: (r) => percent(r.agreement) }, { label: "p-value", value: (r) => r.pvalue, show: (r) => pvalue(r.pvalue) }] })));
  return body;
}

function nameMap(result) {
  const paths = [...new Set([...(result.networks || []), ...(result.pairs || []).flatMap((p) => [p.a, p.b])].map(String))];
  const names = networkNames(paths);
  return new Map(paths.map((p, i) => [p, names[i]]));
}

// Every network has a row; those made from others stand further right.
function drawTree(width, result, small = false) {
  const names = nameMap(result);
  const edges = (result.tree || []).map((e) => ({ ...e, directed: e.directed !== false }));
  const nodes = [...names.keys()];
  const parents = new Map(nodes.map((n) => [n, edges.filter((e) => e.child === n && e.directed).map((e) => e.parent)]));
  const joined = (n) => edges.filter((e) => e.parent === n || e.child === n).map((e) => (e.parent === n ? e.child : e.parent));
  const placed = new Map();
  const visit = (n, depth) => {
    if (placed.has(n)) return;
    placed.set(n, { depth, row: placed.size });
    joined(n).forEach((m) => visit(m, depth + 1));
  };
  [...nodes].sort((a, b) => parents.get(a).length - parents.get(b).length || joined(b).length - joined(a).length).forEach((n) => visit(n, 0));
  const depths = Math.max(...[...placed.values()].map((p) => p.depth), 0) + 1;
  const step = small ? Math.min(26, 76 / nodes.length) : 44;
  const column = width / depths;
  const height = nodes.length * step + (small ? 0 : 8);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, class: small ? "thumb" : "chart", role: small ? null : "img", "aria-hidden": small ? "true" : null, "aria-label": small ? null : `Family tree of ${plural(nodes.length, "network")}` });
  const at = (n) => ({ x: placed.get(n).depth * column + 10, y: (placed.get(n).row + 0.5) * step });
  for (const e of edges) {
    if (!placed.has(e.parent) || !placed.has(e.child)) continue;
    const [a, b] = [at(e.parent), at(e.child)];
    const [from, to] = a.x <= b.x ? [a, b] : [b, a];
    svg.append(s("path", { class: "branch", stroke: kindColour(e.kind), d: `M${from.x} ${from.y + 6}V${to.y - (from.y === to.y ? 0 : 8)}q0 8 8 8H${to.x - 8}`, tip: `${names.get(e.parent)} ${e.directed ? "→" : "–"} ${names.get(e.child)}: ${e.kind}` }));
    if (e.directed) svg.append(s("path", { fill: kindColour(e.kind), d: b.x >= a.x ? `M${b.x - 7} ${b.y}l-8 -4v8z` : `M${b.x} ${b.y + 7}l-4 8h8z` }));
    if (!small && to.x - from.x > 90) svg.append(s("text", { class: "minor", x: (from.x + to.x) / 2, y: to.y - 6, "text-anchor": "middle" }, e.kind));
  }
  for (const n of nodes) {
    const p = at(n);
    svg.append(s("circle", { class: "node", cx: p.x, cy: p.y, r: small ? 4 : 6, fill: "var(--used)", tip: n }), s("text", { class: "name", x: p.x + 12, y: p.y, dy: "0.34em", tip: n }, shorten(names.get(n), Math.max(8, Math.floor((column - 30) / 6.8)))));
  }
  return svg;
}

export const treeOf = (result, width) => ((result.networks || []).length < 12 ? drawTree(width, result, true) : null);
