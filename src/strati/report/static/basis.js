// The interaction graph: a column per layer, a node per direction, edges by strength, modules by colour.

import { choice, empty, fold, h, picker, s, section, slider } from "./dom.js";
import { isNumber, number, percent, plural, shortName } from "./format.js";
import { figure, frame, legend, line, rowFrame } from "./chart.js";
import { OKABE, ordered, padded } from "./scale.js";
import { dataTable } from "./table.js";

const MOST_NODES = 64;
const MOST_EDGES = 1500;

export function basisSection(result, id) {
  const layers = result.layers || [];
  const edges = (result.edges || []).filter((e) => isNumber(e.strength));
  const modules = result.modules || [];
  const body = section(id, "Interactions", `${plural(layers.length, "layer")}, ${plural(edges.length, "edge")}, ${plural(modules.length, "module")}.`);
  if (!layers.length) {
    body.append(empty("This basis has no layer."));
    return body;
  }
  const member = new Map();
  modules.forEach((m, k) => (m.members || []).forEach(([l, d]) => member.set(`${l}:${d}`, { index: k, id: m.id ?? k })));
  const known = layers.filter((l) => l.eigenvalues && l.eigenvalues.length);
  const parts = [known.length ? directions(known) : null, known.length ? spectra(known) : null, (result.ablation || []).length ? ablation(result.ablation) : null].filter(Boolean);
  if (parts.length) body.append(h("div", { class: "grid2" }, parts));
  // A graph of one module is a tangle that says no more than that: it is one click away.
  if (edges.length) body.append(modules.length > 1 ? graph(layers, edges, modules, member) : fold("The graph of all interactions", graph(layers, edges, modules, member)));
  if (modules.length > 1) body.append(moduleTable(edges, modules, member, result.modularity));
  return body;
}

// How many directions of each layer carry nine tenths and 99 % of the effect on the output.
function directions(layers) {
  const needed = (values, share) => {
    const list = Array.from(values).sort((a, b) => b - a);
    const total = list.reduce((sum, v) => sum + v, 0);
    let sum = 0;
    return list.findIndex((v) => { sum += v; return sum >= share * total; }) + 1;
  };
  const rows = layers.map((l) => ({ name: l.name, all: l.eigenvalues.length, most: needed(l.eigenvalues, 0.99), many: needed(l.eigenvalues, 0.9) }));
  const picture = figure({ title: "Directions that matter", wide: true, draw: (width) => {
    const chart = rowFrame({ width, names: rows.map((r) => r.name), step: rows.length > 30 ? 15 : 28, least: 280, label: "Directions that carry the effect on the output", x: { domain: [0, Math.max(...rows.map((r) => r.all))], label: "directions" } });
    rows.forEach((r, i) => {
      const thick = Math.min(22, chart.thick - 3);
      for (const [size, fill] of [[r.all, "var(--none)"], [r.most, "var(--free)"], [r.many, "var(--used)"]]) chart.marks.append(s("rect", { x: chart.left, y: chart.y(i) - thick / 2, width: Math.max(1, chart.x(size) - chart.left), height: thick, fill, tip: `${r.name}\n${r.many} of ${r.all} directions carry 90 %, ${r.most} carry 99 %` }));
    });
    return chart.svg;
  }, caption: "Of the effect of each layer on the output." });
  picture.insertBefore(legend([["carry 90 %", "var(--used)"], ["carry 99 %", "var(--free)"], ["all directions", "var(--none)"]]), picture.lastChild);
  return picture;
}

function graph(layers, edges, modules, member) {
  const order = edges.map((e) => Math.abs(e.strength)).sort((a, b) => b - a);
  const strongest = order[0] || 1;
  const start = Math.min(edges.length, Math.max(60, layers.length * 40));
  const state = { keep: start, module: "" };
  const colour = (l, d) => {
    const at = member.get(`${l}:${d}`);
    return at ? OKABE[at.index % OKABE.length] : null;
  };
  const picture = figure({ title: "Directions and their interactions", wide: true, draw: (width) => {
    const count = layers.map((l, i) => Math.max(directionsOf(l), ...edges.filter((e) => e.layer === i).map((e) => e.source + 1), ...edges.filter((e) => e.layer === i - 1).map((e) => e.target + 1), 1));
    const rows = Math.min(MOST_NODES, Math.max(...count));
    const height = Math.max(260, Math.min(720, rows * 15)) + 60;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": "Interaction graph" });
    const x = (l) => 34 + (layers.length > 1 ? (l / (layers.length - 1)) * (width - 68) : (width - 68) / 2);
    const y = (l, d) => 40 + ((d + 0.5) / Math.min(count[l], MOST_NODES)) * (height - 60);
    const kept = [...edges].sort((a, b) => Math.abs(b.strength) - Math.abs(a.strength)).slice(0, Math.min(state.keep, MOST_EDGES))
      .filter((e) => e.source < MOST_NODES && e.target < MOST_NODES && e.layer + 1 < layers.length).reverse();
    const alive = (l, d) => state.module === "" || String((member.get(`${l}:${d}`) || {}).index) === state.module;
    const touched = new Set();
    for (const e of kept) {
      const on = alive(e.layer, e.source) && alive(e.layer + 1, e.target);
      const same = colour(e.layer, e.source) && colour(e.layer, e.source) === colour(e.layer + 1, e.target);
      const share = Math.sqrt(Math.abs(e.strength) / strongest);
      if (on) touched.add(`${e.layer}:${e.source}`).add(`${e.layer + 1}:${e.target}`);
      const [x1, y1, x2, y2] = [x(e.layer), y(e.layer, e.source), x(e.layer + 1), y(e.layer + 1, e.target)];
      const middle = (x1 + x2) / 2;
      svg.append(s("path", { class: "edge", d: `M${x1.toFixed(1)} ${y1.toFixed(1)}C${middle.toFixed(1)} ${y1.toFixed(1)} ${middle.toFixed(1)} ${y2.toFixed(1)} ${x2.toFixed(1)} ${y2.toFixed(1)}`, stroke: same ? colour(e.layer, e.source) : "var(--soft)", "stroke-width": (0.4 + 3.6 * share).toFixed(2), "stroke-opacity": on ? (0.16 + 0.6 * share).toFixed(2) : 0.03, tip: `${e.source} → ${e.target}: ${number(e.strength, 3)}` }));
    }
    layers.forEach((layer, l) => {
      const anchor = l === 0 ? "start" : l === layers.length - 1 ? "end" : "middle";
      svg.append(s("text", { class: "name", x: l === 0 ? 6 : l === layers.length - 1 ? width - 6 : x(l), y: 18, "text-anchor": anchor, tip: layer.name }, shortName(layer.name, Math.max(7, Math.floor(width / layers.length / 8)))));
      for (let d = 0; d < Math.min(count[l], MOST_NODES); d += 1) {
        const on = alive(l, d);
        svg.append(s("circle", { class: "node", cx: x(l), cy: y(l, d), r: touched.has(`${l}:${d}`) ? 4.6 : 2.6, fill: colour(l, d) || "var(--soft)", opacity: on ? 1 : 0.15, tip: `${layer.name}\ndirection ${d}${member.has(`${l}:${d}`) ? `\nmodule ${member.get(`${l}:${d}`).id}` : ""}` }));
      }
      if (count[l] > MOST_NODES) svg.append(s("text", { class: "minor", x: x(l), y: height - 4, "text-anchor": anchor }, `+${count[l] - MOST_NODES} more`));
    });
    return svg;
  }, controls: h("div", { class: "controls small" },
    slider("Edges shown", { min: 1, max: Math.min(edges.length, MOST_EDGES), step: 1, value: start, show: (k) => `${k} of ${edges.length}` }, (k) => { state.keep = k; picture.redraw(); }),
    modules.length ? picker("Module", [["", "all"], ...modules.map((m, k) => [String(k), `module ${m.id ?? k}`])], "", (v) => { state.module = v; picture.redraw(); }) : null),
  caption: "Directions from strongest (top) to weakest; line width is the strength of the interaction. Coloured lines stay inside a module." });
  if (modules.length) picture.insertBefore(legend(modules.slice(0, 16).map((m, k) => [`module ${m.id ?? k}`, OKABE[k % OKABE.length]])), picture.lastChild);
  return picture;
}

function directionsOf(layer) {
  if (isNumber(layer.directions)) return layer.directions;
  return Array.isArray(layer.directions) ? layer.directions.length : (layer.eigenvalues || []).length;
}

function spectra(layers) {
  const shown = layers;
  const picture = figure({ title: "Importance of directions", wide: true, draw: (width) => {
    const values = shown.map((l) => Array.from(l.eigenvalues).filter((v) => v > 0).sort((a, b) => b - a));
    const top = Math.max(...values.map((v) => v[0] || 0), 1e-300);
    const domain = padded(values.flat().filter((v) => v > top * 1e-16), 0.05, true);
    const chart = frame({ width, height: 280, label: "Eigenvalues of each layer's basis", x: { domain: [1, Math.max(2, ...values.map((v) => v.length))], log: true, label: "direction" }, y: { domain, log: true, label: "eigenvalue" } });
    values.forEach((list, i) => line(chart, list.map((v, k) => [k + 1, v]), { stroke: ordered(i, shown.length), tip: shown[i].name }));
    return chart.svg;
  } });
  picture.append(legend(shown.slice(0, 12).map((l, i) => [shortName(l.name, 26), ordered(i, shown.length), l.name, "stroke"])));
  return picture;
}

// Only the strongest directions of a layer are kept: a good basis needs few.
function ablation(rows) {
  const measures = ["accuracy", "loss", "performance", "value", "mse"].filter((k) => rows.some((r) => isNumber(r[k])));
  const layers = [...new Set(rows.map((r) => r.layer ?? ""))];
  const kinds = [...new Set(rows.map((r) => r.kind ?? r.basis ?? ""))];
  const state = { layer: layers[0], measure: measures[0] };
  const picture = figure({ title: "Keeping only the strongest directions", wide: true, draw: (width) => {
    const mine = rows.filter((r) => (r.layer ?? "") === state.layer);
    const chart = frame({ width, height: 280, label: "Performance when only some directions are kept", x: { domain: padded(mine.map((r) => r.kept), 0.03), label: "directions kept" }, y: { domain: padded(mine.map((r) => r[state.measure])), label: state.measure } });
    kinds.forEach((kind, i) => line(chart, mine.filter((r) => (r.kind ?? r.basis ?? "") === kind).map((r) => [r.kept, r[state.measure] ?? NaN]), { stroke: OKABE[i % OKABE.length], tip: String(kind) }));
    return chart.svg;
  }, controls: h("div", { class: "controls small" },
    layers.length > 1 ? picker("Layer", layers.map((l, i) => [String(i), shortName(l)]), "0", (v) => { state.layer = layers[Number(v)]; picture.redraw(); }) : null,
    measures.length > 1 ? choice("Measure", measures.map((m) => [m, m]), state.measure, (v) => { state.measure = v; picture.redraw(); }) : null) });
  picture.append(legend(kinds.map((k, i) => [String(k), OKABE[i % OKABE.length], null, "stroke"])));
  return picture;
}

function moduleTable(edges, modules, member, modularity) {
  const ends = (e) => [member.get(`${e.layer}:${e.source}`), member.get(`${e.layer + 1}:${e.target}`)];
  const sum = (list) => list.reduce((total, e) => total + Math.abs(e.strength), 0);
  const rows = modules.map((m, k) => {
    const inside = edges.filter((e) => ends(e).every((v) => v && v.index === k));
    const touching = edges.filter((e) => ends(e).some((v) => v && v.index === k));
    return { id: m.id ?? k, colour: OKABE[k % OKABE.length], size: (m.members || []).length, spans: new Set((m.members || []).map(([l]) => l)).size, inside: sum(touching) ? sum(inside) / sum(touching) : null };
  });
  const share = modularity && modularity.total > 0 ? modularity.between / modularity.total : null;
  const chance = modularity && isNumber(modularity.shuffled) ? `, ${number(modularity.shuffled, 2)} with shuffled edges` : "";
  return h("div", {}, dataTable({ title: "Modules", rows, columns: [
    { label: "module", left: true, value: (r) => r.id, show: (r) => [h("i", { class: "swatch", style: { "--c": r.colour } }), ` ${r.id}`] }, { label: "directions", value: (r) => r.size }, { label: "layers", value: (r) => r.spans },
    { label: "interaction kept inside", value: (r) => r.inside, show: (r) => percent(r.inside) }] }),
  isNumber(share) ? h("p", { class: "caption" }, `${percent(share)} of the interaction lies between modules; modularity ${number(modularity.quality, 2)}${chance}.`) : null);
}
