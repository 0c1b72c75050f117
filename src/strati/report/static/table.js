// A table that sorts by any column, filters by text and saves itself as CSV. Columns without a value are left out.

import { h, replace } from "./dom.js";
import { number, plural, shortName } from "./format.js";
import { what } from "./help.js";
import { copy, shortly } from "./link.js";
import { saveCsv, tableText } from "./save.js";

const FIRST = 12; // rows at the start
const FILTERED = 20; // tables of more rows have a filter

// columns: {label, value: row => plain value, show: row => node or text, csv, left, tip, help: name of an explanation}
export function dataTable({ title, columns: all, rows, cards, first = FIRST }) {
  const columns = all.filter((c, i) => i === 0 || rows.some((row) => !missing(c.value(row))));
  const state = { column: null, descending: false, words: "", open: rows.length <= first + 3 };
  const body = h("tbody", {});
  const more = h("button", { type: "button", class: "plain more", on: { click: () => { state.open = !state.open; fill(); } } });
  const heads = columns.map((column, i) => {
    const button = h("button", { type: "button", tip: column.tip, on: { click: () => sort(i) } }, column.label);
    return h("th", { scope: "col", class: column.left ? "left" : null, "aria-sort": "none" }, button, column.help ? what(column.help, column.label) : null);
  });
  function sort(i) {
    state.descending = state.column === i ? !state.descending : false;
    state.column = i;
    heads.forEach((head, k) => head.setAttribute("aria-sort", k !== i ? "none" : state.descending ? "descending" : "ascending"));
    fill();
  }
  function selected() {
    let list = rows;
    if (state.words) list = list.filter((row) => columns.some((c) => String(c.value(row) ?? "").toLowerCase().includes(state.words)));
    if (state.column === null) return list;
    const value = columns[state.column].value;
    list = [...list].sort((a, b) => order(value(a), value(b)) * (state.descending ? -1 : 1) || 0);
    return [...list.filter((r) => !missing(value(r))), ...list.filter((r) => missing(value(r)))];
  }
  function fill() {
    const list = selected();
    const shown = state.open ? list.slice(0, 2000) : list.slice(0, first);
    replace(body, shown.map((row) => h("tr", {}, columns.map((c, i) =>
      h(i === 0 ? "th" : "td", { scope: i === 0 ? "row" : null, class: c.left ? "left" : null, "data-label": cards ? c.label : null }, c.show ? c.show(row) : number(c.value(row)))))));
    more.textContent = state.open ? "Show fewer" : `Show all ${plural(list.length, "row")}`;
    more.hidden = list.length <= first + 3;
  }
  fill();
  const search = rows.length > FILTERED ? h("input", { type: "search", placeholder: "Filter", "aria-label": `Filter ${title}`, on: { input: (e) => { state.words = e.target.value.trim().toLowerCase(); fill(); } } }) : null;
  return h("div", { class: "card table-card" },
    h("div", { class: "figcaption" }, h("h3", {}, title), search,
      h("span", { class: "tools" }, h("button", { type: "button", "aria-label": `Save “${title}” as CSV`, on: { click: () => saveCsv(columns, selected(), title) } }, "CSV"),
        h("button", { type: "button", "aria-label": `Copy the data of “${title}”`, on: { click: async (e) => shortly(e.target, (await copy(tableText(columns, selected()))) ? "copied" : "failed") } }, "data"))),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, h("table", { class: cards ? "cards" : null }, h("thead", {}, h("tr", {}, heads)), body)), more);
}

// A column of names of layers: short, with the whole name in its note and in the CSV.
export function layerColumn(value, label = "layer") {
  return { label, left: true, value, show: (row) => h("span", { tip: value(row) }, shortName(value(row))) };
}

export function textColumn(key, label = key, help = null) {
  return { label, left: true, help, value: (row) => row[key], show: (row) => String(row[key] ?? "–") };
}

function missing(v) {
  return v === null || v === undefined || v === "" || (Array.isArray(v) && !v.length);
}

export function order(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true });
}
