// A training run: one picture per quantity over the steps, layers as lines, and where it changes.

import { empty, h, section } from "./dom.js";
import { abbreviate, isNumber, number, plural } from "./format.js";
import { errorBar, figure, frame, legend, line, verticalRule } from "./chart.js";
import { OKABE, ordered, padded } from "./scale.js";
import { dataTable } from "./table.js";

export function trackSection(result, id) {
  const steps = result.steps || [];
  const changes = result.changes || [];
  const kinds = [...new Set((result.series || []).map((r) => r.what))];
  const body = section(id, "Training run", `${plural(steps.length, "checkpoint")}, ${plural(changes.length, "change")} found.`);
  if (!kinds.length) body.append(empty("This run holds no series."));
  else body.append(h("div", { class: "grid2" }, kinds.map((what) => course(what, result.series.filter((r) => r.what === what), steps, changes.filter((c) => c.what === what)))));
  if (changes.length) {
    body.append(dataTable({ title: "Changes", rows: changes, columns: [
      { label: "quantity", left: true, value: (c) => c.what, show: (c) => c.what }, { label: "layer", left: true, value: (c) => c.layer, show: (c) => c.layer ?? "network" },
      { label: "step", value: (c) => c.step }, { label: "from", value: (c) => c.low }, { label: "to", value: (c) => c.high }, { label: "p", value: (c) => c.pvalue }] }));
  }
  return body;
}

function course(what, rows, steps, changes) {
  const colour = (i) => (rows.length === 1 ? OKABE[0] : ordered(i, rows.length));
  const error = (row, k) => ((row.stderr || [])[k] ?? 0);
  const picture = figure({ title: String(what), wide: true, draw: (width) => {
    const all = rows.flatMap((r) => (r.values || []).flatMap((v, k) => (isNumber(v) ? [v - error(r, k), v + error(r, k)] : [])));
    const chart = frame({ width, height: 300, label: `${what} over training steps`, x: { domain: steps.length > 1 ? [Math.min(...steps), Math.max(...steps)] : [0, 1], label: "step" }, y: { domain: padded(all), label: String(what) } });
    changes.forEach((c) => verticalRule(chart, c.step, null, {}));
    rows.forEach((row, i) => {
      line(chart, (row.values || []).map((v, k) => [steps[k], v ?? NaN]), { stroke: colour(i), tip: `${row.layer ?? "network"}` });
      if (rows.length <= 4) (row.values || []).forEach((v, k) => isNumber(v) && error(row, k) > 0 && errorBar(chart, steps[k], v - error(row, k), v + error(row, k), { stroke: colour(i) }));
    });
    return chart.svg;
  }, caption: changes.length ? `Vertical lines: changes (${changes.map((c) => `step ${number(c.step)}`).slice(0, 4).join(", ")}).` : "No change found." });
  if (rows.length > 1 && rows.length <= 12) picture.insertBefore(legend(rows.map((r, i) => [abbreviate(r.layer ?? "network", 30), colour(i), r.layer ?? "network", "stroke"])), picture.lastChild);
  return picture;
}
