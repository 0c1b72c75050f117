// Pictures as SVG, PNG or the numbers in them, tables as CSV, made from what is on the page.

import { h, visible } from "./dom.js";

const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linecap",
  "stroke-linejoin", "opacity", "font-family", "font-size", "font-weight", "font-style", "text-anchor", "dominant-baseline", "display"];

// A copy that looks the same without the page's style sheet.
export function standalone(svg) {
  const copy = svg.cloneNode(true);
  const originals = [svg, ...svg.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((node, i) => {
    const style = getComputedStyle(originals[i]);
    for (const name of STYLES) {
      const value = style.getPropertyValue(name);
      if (value && !(value.startsWith("url(") && !node.hasAttribute(name))) node.setAttribute(name, value);
    }
    for (const name of ["class", "style", "tabindex", "data-tip"]) node.removeAttribute(name);
  });
  const box = svg.viewBox.baseVal;
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", box.width);
  copy.setAttribute("height", box.height);
  const back = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  back.setAttribute("width", box.width);
  back.setAttribute("height", box.height);
  back.setAttribute("fill", getComputedStyle(document.body).getPropertyValue("--card").trim() || "#ffffff");
  copy.prepend(back);
  return new XMLSerializer().serializeToString(copy);
}

export function saveSvg(svg, name) {
  save(new Blob([standalone(svg)], { type: "image/svg+xml" }), `${fileName(name)}.svg`);
}

export async function savePng(svg, name) {
  const box = svg.viewBox.baseVal;
  const url = URL.createObjectURL(new Blob([standalone(svg)], { type: "image/svg+xml" }));
  const image = new Image();
  image.src = url;
  await image.decode();
  const canvas = h("canvas", { width: 2 * box.width, height: 2 * box.height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(url);
  const blob = await new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
  save(blob, `${fileName(name)}.png`);
}

export function saveCsv(columns, rows, name) {
  save(new Blob([tableText(columns, rows)], { type: "text/csv" }), `${fileName(name)}.csv`);
}

export function tableText(columns, rows) {
  return csv([columns.map((c) => c.label), ...rows.map((row) => columns.map((c) => (c.csv ? c.csv(row) : c.value(row))))]);
}

function csv(lines) {
  return `${lines.map((l) => l.map(cell).join(",")).join("\r\n")}\r\n`;
}

// The numbers of a picture: what its marks recorded while it was drawn (series, x, y), else what their notes say.
export function pictureText(svg) {
  const held = svg.held;
  if (held && held.rows.length) return csv([["series", held.x, held.y], ...held.rows]);
  const told = [...svg.querySelectorAll("[data-tip]")].map((n) => n.dataset.tip.split("\n"));
  return csv([["mark", "value"], ...told.map((t) => [t[0], t.slice(1).join("; ")])]);
}

// Text that a spreadsheet would take for a formula is quoted with an apostrophe: names come from strangers.
function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number" || typeof value === "boolean") return String(value);
  let text = visible(Array.isArray(value) ? value.join(" ") : value);
  if (/^[=+\-@\t]/.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}

function fileName(name) {
  return `strati-${String(name).toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "picture"}`;
}

function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
