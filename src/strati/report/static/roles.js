// Distributions by role: every layer a dot, every role a row, every network a colour.

import { h, picker, s, section } from "./dom.js";
import { isNumber, number } from "./format.js";
import { dots, figure, frame, legend, rowName } from "./chart.js";
import { METRICS } from "./meanings.js";
import { OKABE, padded, quantile, sorted } from "./scale.js";

// networks: [{name, layers}] from scans, or gathered from a comparison.
export function rolesSection(networks) {
  const layers = networks.flatMap((n, k) => n.layers.map((l) => ({ ...l, network: k })));
  const roles = [...new Set(layers.map((l) => l.role).filter(Boolean))];
  const metrics = METRICS.filter((m) => layers.some((l) => isNumber(l[m.key])));
  if (layers.length < 2 || !roles.length || !metrics.length) return null;
  const state = { metric: metrics[0].key, log: false };
  const picture = figure({ title: "Metric by role", wide: true, draw: (w) => draw(w, layers, roles, networks, state), caption: "Each dot is a layer; the line is the middle half, the stroke across it the median." });
  const body = section("roles", "By role", "Do layers of one role look alike? Attention and feed-forward layers often differ more than early and late ones.",
    h("div", { class: "controls" }, picker("Metric", metrics.map((m) => [m.key, m.name]), state.metric, (v) => { state.metric = v; picture.redraw(); })), picture);
  if (networks.length > 1) picture.insertBefore(legend(networks.map((n, i) => [n.name, OKABE[i % OKABE.length]])), picture.lastChild);
  return body;
}

function draw(width, layers, roles, networks, state) {
  const metric = METRICS.find((m) => m.key === state.metric);
  const step = 26 + 14 * (networks.length - 1);
  const left = Math.min(120, width * 0.28);
  const values = layers.map((l) => l[metric.key]);
  const range = sorted(values);
  const log = range.length > 0 && range[0] > 0 && range[range.length - 1] / range[0] > 300;
  const chart = frame({ width, height: roles.length * step + 64, margin: { left, top: 10 }, label: `${metric.name} by role`, x: { domain: padded(values, 0.05, log), log, label: metric.name }, y: { domain: [roles.length - 0.5, -0.5], none: true } });
  roles.forEach((role, i) => {
    rowName(chart, i, role);
    if (i) chart.marks.append(s("line", { class: "grid", x1: chart.left, x2: chart.right, y1: chart.y(i - 0.5), y2: chart.y(i - 0.5) }));
    networks.forEach((_, k) => {
      const mine = layers.filter((l) => l.role === role && l.network === k && isNumber(l[metric.key]));
      const lane = i + (networks.length > 1 ? (k - (networks.length - 1) / 2) * (0.7 / networks.length) : 0);
      const colour = networks.length > 1 ? OKABE[k % OKABE.length] : "var(--blue)";
      const row = sorted(mine.map((l) => l[metric.key]));
      if (row.length > 2) {
        const y = chart.y(lane);
        chart.marks.append(s("line", { class: "box", stroke: colour, x1: chart.x(quantile(row, 0.25)), x2: chart.x(quantile(row, 0.75)), y1: y, y2: y }),
          s("line", { class: "median", stroke: colour, x1: chart.x(quantile(row, 0.5)), x2: chart.x(quantile(row, 0.5)), y1: y - 8, y2: y + 8 }));
      }
      dots(chart, mine.map((l, j) => ({ x: l[metric.key], y: lane + ((j * 0.618) % 1 - 0.5) * (0.36 / networks.length), colour: networks.length > 1 ? colour : "#0072b2", tip: `${l.name}\n${metric.name}: ${number(l[metric.key])}` })), 3.2);
    });
  });
  return chart.svg;
}
