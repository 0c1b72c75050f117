// One frame with axes for every picture, the marks put into it, and the figure that holds, redraws and exports it.

import { h, s, uid } from "./dom.js";
import { sentence, shortName } from "./format.js";
import { linear, logarithmic } from "./scale.js";
import { addressOf, copy, shortly, slug } from "./link.js";
import { pictureText, savePng, saveSvg } from "./save.js";

// A picture in the page. `draw(width)` returns an <svg>; it is called again when the width changes.
export function figure({ title, caption, draw, controls, wide }) {
  const body = h("div", { class: "figure-body" });
  const tools = h("span", { class: "tools" },
    h("button", { type: "button", "aria-label": `Save “${title}” as SVG`, on: { click: () => saveSvg(body.querySelector("svg"), title) } }, "SVG"),
    h("button", { type: "button", "aria-label": `Save “${title}” as PNG`, on: { click: () => savePng(body.querySelector("svg"), title) } }, "PNG"),
    h("button", { type: "button", "aria-label": `Copy the data of “${title}”`, on: { click: async (e) => shortly(e.target, (await copy(pictureText(body.querySelector("svg")))) ? "copied" : "failed") } }, "data"),
    h("button", { type: "button", "aria-label": `Copy a link to “${title}”`, on: { click: (e) => link(e.target) } }, "link"));
  const node = h("figure", { class: wide ? "card wide" : "card", "data-picture": slug(title) },
    h("figcaption", {}, h("h3", {}, sentence(title)), tools), controls || null, body, caption ? h("p", { class: "caption" }, caption) : null);
  async function link(button) {
    history.replaceState(null, "", addressOf(node.closest("section"), node.dataset.picture));
    shortly(button, (await copy(location.href)) ? "copied" : "in the address");
  }
  let width = 0;
  let pending = false;
  const redraw = () => {
    pending = false;
    if (width <= 40) return;
    const svg = draw(width);
    describe(svg);
    body.replaceChildren(svg);
  };
  new ResizeObserver((entries) => {
    const now = Math.round(entries[0].contentRect.width);
    if (now === width || now <= 40) return;
    width = now;
    if (!pending) {
      pending = true;
      requestAnimationFrame(redraw);
    }
  }).observe(body);
  node.redraw = redraw;
  return node;
}

// What a reader who cannot see the picture is told: its label, and the range of what it shows.
function describe(svg) {
  const values = svg.held ? svg.held.rows.map((r) => r[2]).filter(Number.isFinite) : [];
  if (!values.length || svg.getAttribute("role") !== "img") return;
  const [low, high] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  svg.setAttribute("aria-label", `${svg.getAttribute("aria-label")}; ${values.length} values from ${Number(low.toPrecision(4))} to ${Number(high.toPrecision(4))}`);
}

// Axes. x and y: {domain, log, label, ticks: [values], text: v => string, none: true}.
export function frame({ width, height, x, y, margin, label }) {
  const m = { top: 14, right: 16, bottom: x.label ? 46 : 28, left: 56, ...margin };
  const make = (axis, range) => (axis.log ? logarithmic : linear)(axis.domain, range);
  const sx = make(x, [m.left, width - m.right]);
  const sy = make(y, [height - m.bottom, m.top]);
  const clip = uid("clip");
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": label },
    s("defs", {}, s("clipPath", { id: clip },
      s("rect", { x: m.left - 1, y: m.top - 1, width: Math.max(0, width - m.left - m.right + 2), height: Math.max(0, height - m.top - m.bottom + 2) }))));
  const axes = s("g", { class: "axes" });
  const xTicks = x.none ? [] : x.ticks || sx.ticks(Math.max(2, Math.floor((width - m.left - m.right) / 80)));
  const yTicks = y.none ? [] : y.ticks || sy.ticks(Math.max(2, Math.floor((height - m.top - m.bottom) / 44)));
  for (const t of yTicks) {
    axes.append(s("line", { class: "grid", x1: m.left, x2: width - m.right, y1: sy(t), y2: sy(t) }),
      s("text", { x: m.left - 8, y: sy(t), "text-anchor": "end", dy: "0.32em" }, (y.text || sy.text)(t)));
  }
  for (const t of xTicks) {
    const text = (x.text || sx.text)(t);
    const over = sx(t) + 3.4 * text.length - width;
    axes.append(s("line", { class: "tick", x1: sx(t), x2: sx(t), y1: height - m.bottom, y2: height - m.bottom + 4 }),
      s("text", { x: over > 0 ? width - 1 : sx(t), y: height - m.bottom + 17, "text-anchor": over > 0 ? "end" : "middle" }, text));
  }
  axes.append(s("line", { class: "base", x1: m.left, x2: width - m.right, y1: height - m.bottom, y2: height - m.bottom }));
  if (x.label) axes.append(s("text", { class: "label", x: (m.left + width - m.right) / 2, y: height - 6, "text-anchor": "middle" }, x.label));
  if (y.label) axes.append(s("text", { class: "label", transform: `translate(13 ${(m.top + height - m.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, y.label));
  const marks = s("g", { "clip-path": `url(#${clip})` });
  const over = s("g", {});
  svg.append(axes, marks, over);
  svg.held = { x: x.label || "x", y: y.label || "y", rows: [] };
  return { svg, marks, over, x: sx, y: sy, left: m.left, right: width - m.right, top: m.top, bottom: height - m.bottom, width, height };
}

export function pathOf(chart, points) {
  let d = "";
  let pen = "M";
  for (const [px, py] of points) {
    if (!Number.isFinite(px) || !Number.isFinite(py) || (chart.y.log && py <= 0)) {
      pen = "M";
      continue;
    }
    d += `${pen}${chart.x(px).toFixed(1)} ${chart.y(py).toFixed(1)}`;
    pen = "L";
  }
  return d;
}

// Keep numbers of a picture for those who copy them.
export function hold(chart, series, points) {
  for (const [px, py] of points) if (Number.isFinite(px) && Number.isFinite(py)) chart.svg.held.rows.push([series || "", px, py]);
}

export function line(chart, points, attributes) {
  hold(chart, attributes && attributes.tip, points);
  const node = s("path", { class: "line", d: pathOf(chart, points), ...attributes });
  chart.marks.append(node);
  return node;
}

export function verticalRule(chart, at, text, attributes, row = 0, before = false) {
  const px = chart.x(at);
  if (!(px >= chart.left - 1 && px <= chart.right + 1)) return;
  const late = before || px > chart.right - 90;
  chart.over.append(s("line", { class: "rule", x1: px, x2: px, y1: chart.top, y2: chart.bottom, ...attributes }));
  if (text) chart.over.append(s("text", { class: "rule-text", x: px + (late ? -5 : 5), y: chart.top + 10 + 13 * row, "text-anchor": late ? "end" : "start", ...(attributes && attributes.stroke ? { fill: attributes.stroke } : {}) }, text));
}

// The name of a row to the left of the plot; thin rows name every other one.
export function rowName(chart, i, name, step = 20) {
  if (step <= 12 && i % 2) return;
  chart.over.append(s("text", { class: "name", x: chart.left - 8, y: chart.y(i), dy: "0.32em", "text-anchor": "end", tip: name }, shortName(name, Math.floor((chart.left - 12) / 6.7))));
}

// Room for the names of rows.
export function nameRoom(names, width) {
  const longest = Math.max(4, ...names.map((n) => shortName(n, 30).length));
  return Math.round(Math.min(18 + 6.8 * longest, Math.max(90, width * 0.36)));
}

// A frame with one named row for each name; `chart.thick` is the height of a row.
export function rowFrame({ width, names, label, x, step = 22, least = 0, right = 16 }) {
  const height = Math.max(least, names.length * step + (x.label ? 60 : 42));
  const chart = frame({ width, height, margin: { left: nameRoom(names, width), top: 8, right }, label, x, y: { domain: [names.length - 0.5, -0.5], none: true } });
  chart.thick = Math.abs(chart.y(1) - chart.y(0));
  names.forEach((name, i) => rowName(chart, i, name, chart.thick));
  return chart;
}

// Grey stripes for what should not be compared; returns what to fill with.
export function hatched(svg) {
  const id = uid("hatch");
  svg.append(s("defs", {}, s("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    s("rect", { width: 6, height: 6, fill: "var(--none)" }), s("rect", { width: 2, height: 6, fill: "var(--soft)", "fill-opacity": 0.45 }))));
  return `url(#${id})`;
}

export function errorBar(chart, at, low, high, attributes) {
  const px = chart.x(at);
  const a = chart.y(low);
  const b = chart.y(high);
  chart.marks.append(s("path", { class: "error", d: `M${px} ${a}V${b}M${px - 4} ${a}h8M${px - 4} ${b}h8`, ...attributes }));
}

// Dots: SVG while they are few, one bitmap inside the SVG when they are many.
export function dots(chart, points, radius = 3.4) {
  for (const p of points) hold(chart, String(p.tip || "").split("\n")[0], [[p.x, p.y]]);
  if (points.length <= 1200) {
    for (const p of points) {
      chart.marks.append(s("circle", { class: "dot", cx: chart.x(p.x).toFixed(1), cy: chart.y(p.y).toFixed(1), r: p.r || radius, fill: p.colour, tip: p.tip }));
    }
    return;
  }
  const ratio = 2;
  const canvas = h("canvas", { width: chart.width * ratio, height: chart.height * ratio });
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.globalAlpha = 0.55;
  for (const p of points) {
    pen.fillStyle = p.colour;
    pen.beginPath();
    pen.arc(chart.x(p.x), chart.y(p.y), radius * 0.75, 0, 2 * Math.PI);
    pen.fill();
  }
  chart.marks.append(s("image", { href: canvas.toDataURL("image/png"), width: chart.width, height: chart.height }));
}

// A colour key drawn in HTML: [[label, colour, tip], ...].
export function legend(items) {
  return h("ul", { class: "legend" }, items.map(([label, colour, tip, shape]) =>
    h("li", { tip }, h("i", { class: shape || "", style: { "--c": colour } }), label)));
}

// A ramp from low to high for a colour scale.
export function rampKey(scale, text, format) {
  if (scale.low === null) return h("span", { class: "ramp" }, `${text}: no values`);
  const steps = Array.from({ length: 24 }, (_, i) => h("i", { style: { background: scale.map(i / 23) } }));
  return h("span", { class: "ramp" }, h("b", {}, format(scale.low)), h("span", { class: "steps", "aria-hidden": "true" }, steps), h("b", {}, format(scale.high)), ` ${text}`);
}
