// Pieces put in order: the score matrix before and after matching, the order as it emerges, playable; blocks of a transformer.

import { choice, empty, fold, h, player, s, section, slider, stat } from "./dom.js";
import { isNumber, number, plural } from "./format.js";
import { dots, figure, frame, line, rampKey } from "./chart.js";
import { colourScale, padded, viridis } from "./scale.js";
import { dataTable, textColumn } from "./table.js";

export function reassemblySection(result, id) {
  const pairing = result.pairing || {};
  const body = section(id, "Reassembly", result.exact ? "The order reproduces the outputs exactly." : "The order is the best that was found; it does not reproduce the outputs exactly.");
  body.append(h("div", { class: "stats" },
    stat("mean squared error", number(result.mse, 2)), isNumber(pairing.matched_min) ? stat("lowest score of a pair", number(pairing.matched_min)) : null, isNumber(pairing.unmatched_max) ? stat("highest score of another", number(pairing.unmatched_max), pairing.separated ? "pairs stand apart" : result.exact ? "the data decided, not the weights" : "pairs do not stand apart") : null,
    result.seconds ? stat("seconds to solve", number(result.seconds.solve, 2)) : null));
  const parts = [];
  if ((result.score_matrix || []).length) parts.push(scores(result));
  const stages = (result.progression || []).filter((p) => Array.isArray(p.order));
  if (stages.length) parts.push(progression(stages, course(result, stages)));
  body.append(parts.length ? h("div", { class: "grid2" }, parts) : empty("This result holds neither the score matrix nor the order's progression."));
  body.append(rounds(result));
  if ((result.permutation || []).length) body.append(fold("The permutation", h("p", { class: "permutation" }, result.permutation.join(", "))));
  return body;
}

// A transformer: which piece is which matrix of which block, and how clearly.
export function transformerSection(result, id) {
  const blocks = result.blocks || [];
  const roles = [...new Set(blocks.flatMap(Object.keys))];
  const unsure = new Set(result.uncertain || []);
  const order = result.order || {};
  const pieces = blocks.map((block, number) => ({ number, ...block }));
  const body = section(id, "Reassembly", `${plural(blocks.length, "block")} put in order.`,
    h("div", { class: "stats" }, result.exact === true ? stat("outputs", "agree exactly") : null, isNumber(result.loss) ? stat("loss", number(result.loss)) : null, isNumber(order.margin) ? stat("margin of the order", number(order.margin)) : null,
      order.direction_by ? stat("direction by", String(order.direction_by).replaceAll("-", " ")) : null, stat("uncertain pieces", number(unsure.size))),
    dataTable({ title: "Pieces of each block", rows: pieces, columns: [{ label: "block", value: (r) => r.number }, ...roles.map((role) => ({ label: role, value: (r) => r[role], show: (r) => (unsure.has(r[role]) ? h("span", { class: "doubtful", tip: "uncertain" }, `${number(r[role])} ?`) : number(r[role])) }))] }));
  if ((result.pairs || []).length) body.append(fold("How clearly pieces belong together", dataTable({ title: "Pairs", rows: result.pairs, columns: [textColumn("a", "piece"), textColumn("b", "its partner"), textColumn("right_by", "by"), { label: "margin", value: (r) => r.margin }] })));
  return body;
}

// Rows and columns in the order of the solution put every matched pair on the diagonal.
function matched(result) {
  const permutation = result.permutation || [];
  const rows = [];
  const columns = [];
  for (let i = 0; i + 1 < permutation.length; i += 2) {
    const r = (result.in_pieces || []).indexOf(permutation[i]);
    const c = (result.out_pieces || []).indexOf(permutation[i + 1]);
    if (r >= 0 && c >= 0) {
      rows.push(r);
      columns.push(c);
    }
  }
  return { rows, columns };
}

function scores(result) {
  const matrix = result.score_matrix;
  const after = matched(result);
  const plain = { rows: matrix.map((_, i) => i), columns: (matrix[0] || []).map((_, i) => i) };
  const state = { view: after.rows.length ? "after" : "before" };
  const colour = colourScale(matrix.flat(), viridis);
  const nameOf = (list, i) => (list && list[i] !== undefined ? list[i] : i);
  const picture = figure({ title: "Pairing scores", wide: true, draw: (width) => {
    const order = state.view === "after" ? after : plain;
    const size = Math.min(width - 30, 460);
    const cell = size / Math.max(order.rows.length, order.columns.length, 1);
    const canvas = h("canvas", { width: order.columns.length, height: order.rows.length });
    const pen = canvas.getContext("2d");
    order.rows.forEach((r, i) => order.columns.forEach((c, j) => {
      pen.fillStyle = colour(matrix[r][c]) || "#888888";
      pen.fillRect(j, i, 1, 1);
    }));
    const svg = s("svg", { viewBox: `0 0 ${width} ${size + 40}`, class: "chart", role: "img", "aria-label": "Score of every pair of pieces" });
    svg.append(s("image", { class: "pixels", href: canvas.toDataURL("image/png"), x: 26, y: 4, width: cell * order.columns.length, height: cell * order.rows.length, preserveAspectRatio: "none" }),
      s("text", { class: "label", x: 26 + size / 2, y: size + 24, "text-anchor": "middle" }, "second matrices (out)"), s("text", { class: "label", transform: `translate(14 ${size / 2}) rotate(-90)`, "text-anchor": "middle" }, "first matrices (in)"));
    const hit = s("rect", { x: 26, y: 4, width: cell * order.columns.length, height: cell * order.rows.length, fill: "transparent", tip: " " });
    hit.addEventListener("pointermove", (event) => {
      const box = hit.getBoundingClientRect();
      const j = Math.min(order.columns.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * order.columns.length)));
      const i = Math.min(order.rows.length - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * order.rows.length)));
      hit.dataset.tip = `in ${nameOf(result.in_pieces, order.rows[i])}, out ${nameOf(result.out_pieces, order.columns[j])}: ${number(matrix[order.rows[i]][order.columns[j]])}`;
    });
    svg.append(hit);
    return svg;
  }, controls: h("div", { class: "controls small" }, choice("Order of rows and columns", [["before", "as given"], ["after", "matched and ordered"]], state.view, (v) => { state.view = v; picture.redraw(); })),
  caption: "In the right order the bright cells are the diagonal: each first matrix with its own second one." });
  picture.insertBefore(rampKey(colour, "score", (v) => number(v, 3)), picture.lastChild);
  return picture;
}

// The error on its way down: the seed, every round of repair, the end; or the stages, where there are no rounds.
function course(result, stages) {
  const rounds = (result.rounds || []).map((r) => ({ label: `round ${r.round}`, mse: r.mse }));
  const seed = result.seed_order || {};
  if (rounds.length < 2) return stages.map((p) => ({ label: String(p.stage), mse: p.mse }));
  return [...(isNumber(seed.mse) ? [{ label: "seed", mse: seed.mse }] : []), ...rounds, ...(isNumber(result.mse) ? [{ label: "end", mse: result.mse }] : [])];
}

function progression(stages, path) {
  const size = Math.max(...stages.map((p) => p.order.length));
  const state = { at: stages.length - 1 };
  const now = h("p", { class: "caption now", "aria-live": "polite" });
  const picture = figure({ title: "The order as it emerges", wide: true, draw: (width) => drawStages(width, stages, size, state.at), caption: "Each column is a stage, each band a block, coloured by its final place: in the end the colours run smoothly from top to bottom." });
  const errors = figure({ title: "Error on the way", wide: true, draw: (width) => {
    const positive = path.map((p) => p.mse).filter((v) => isNumber(v) && v > 0);
    const chart = frame({ width, height: 190, label: "Mean squared error on the way", x: { domain: [0, Math.max(1, path.length - 1)], ticks: [...new Set([0, path.length - 1])], text: (t) => path[t].label, label: "repair" }, y: { domain: padded(positive, 0.08, true), log: true, label: "mean squared error" } });
    line(chart, path.map((p, i) => [i, p.mse ?? NaN]), { stroke: "var(--blue)" });
    dots(chart, path.map((p, i) => ({ x: i, y: p.mse, colour: "#0072b2", tip: `${p.label}: ${number(p.mse)}` })).filter((p) => p.y > 0));
    return chart.svg;
  } });
  const steps = player(stages.length, Math.max(120, Math.min(900, 9000 / stages.length)), (i) => { control.set(i); go(i); });
  const control = slider("Stage", { min: 0, max: stages.length - 1, step: 1, value: state.at, show: (i) => String(stages[i].stage) }, (i) => { steps.stop(); steps.at(i); go(i); });
  control.querySelector("input").setAttribute("data-stage", "1");
  function go(i) {
    state.at = i;
    picture.redraw();
    const placed = stages[i].order.filter((place, k) => place === k).length;
    now.textContent = `${stages[i].stage}: ${placed} of ${plural(stages[i].order.length, "block")} in place, mean squared error ${number(stages[i].mse, 2)}`;
  }
  picture.insertBefore(h("div", { class: "controls small time" }, steps.button, control), picture.querySelector(".figure-body"));
  picture.append(now);
  go(state.at);
  return h("div", { class: "stack" }, picture, errors);
}

// All stages small on the left, the present one large on the right.
function drawStages(width, stages, size, at) {
  const height = Math.max(240, Math.min(460, size * 9));
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": "Order of the blocks at each stage" });
  const wide = Math.min(150, width * 0.34);
  const small = (width - wide - 24) / stages.length;
  const band = height / size;
  const colour = (place) => viridis(size > 1 ? place / (size - 1) : 0.5);
  stages.forEach((stage, k) => stage.order.forEach((place, i) => {
    svg.append(s("rect", { x: k * small, y: i * band, width: Math.max(0.5, small - (small > 8 ? 3 : 0)), height: band + 0.3, fill: colour(place), opacity: k <= at ? 1 : 0.22 }));
  }));
  svg.append(s("rect", { class: "here", x: at * small - 1, y: 0.5, width: Math.max(2, small - 1), height: height - 1 }));
  const left = width - wide;
  stages[at].order.forEach((place, i) => {
    svg.append(s("rect", { x: left, y: i * band, width: wide, height: Math.max(0.5, band - 0.8), fill: colour(place), tip: `position ${i}: block that belongs at ${place}` }));
    if (band > 11) svg.append(s("text", { class: "cell", x: left + 8, y: (i + 0.5) * band, dy: "0.34em", fill: place / size > 0.6 ? "#1d2025" : "#ffffff" }, place));
  });
  return svg;
}

function rounds(result) {
  const rows = result.rounds || [];
  const seed = result.seed_order || {};
  if (!rows.length && !seed.method) return h("span", {});
  return dataTable({ title: "Rounds of repair", rows: [...(seed.method ? [{ round: `seed: ${seed.method}`, swaps: null, mse: seed.mse }] : []), ...rows], columns: [
    textColumn("round"), { label: "swaps", value: (r) => r.swaps }, { label: "mean squared error", value: (r) => r.mse }] });
}
