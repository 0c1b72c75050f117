// A table that sorts by any column, filters by text and saves itself as CSV.

import { h, replace } from "./dom.js";
import { number } from "./format.js";
import { copy, shortly } from "./link.js";
import { saveCsv, tableText } from "./save.js";

// columns: {label, value: row => plain value, show: row => node or text, left, tip}; with `cards`, rows become cards on a phone
export function dataTable({ title, columns, rows, filter, cards, limit = 400 }) {
  const state = { column: null, descending: false, words: "" };
  const body = h("tbody", {});
  const more = h("p", { class: "caption" });
  const heads = columns.map((column, i) => {
    const button = h("button", { type: "button", tip: column.tip, on: { click: () => sort(i) } }, column.label);
    return h("th", { scope: "col", class: column.left ? "left" : null, "aria-sort": "none" }, button);
  });
  function sort(i) {
    state.descending = state.column === i ? !state.descending : false;
    state.column = i;
    heads.forEach((head, k) => head.setAttribute("aria-sort", k !== i ? "none" : state.descending ? "descending" : "ascending"));
    fill();
  }
  function chosen() {
    let list = rows;
    if (state.words) {
      list = list.filter((row) => columns.some((c) => String(c.value(row) ?? "").toLowerCase().includes(state.words)));
    }
    if (state.column !== null) {
      const value = columns[state.column].value;
      list = [...list].sort((a, b) => order(value(a), value(b)) * (state.descending ? -1 : 1) || 0);
      list = [...list.filter((r) => !missing(value(r))), ...list.filter((r) => missing(value(r)))];
    }
    return list;
  }
  function fill() {
    const list = chosen();
    replace(body, list.slice(0, limit).map((row) => h("tr", {}, columns.map((c, i) =>
      h(i === 0 ? "th" : "td", { scope: i === 0 ? "row" : null, class: c.left ? "left" : null, "data-label": cards ? c.label : null }, c.show ? c.show(row) : number(c.value(row)))))));
    more.textContent = list.length > limit ? `The first ${limit} of ${list.length} rows; the CSV has them all.` : "";
    more.hidden = list.length <= limit;
  }
  fill();
  const search = filter ? h("input", { type: "search", placeholder: "Filter", "aria-label": `Filter ${title}`, on: { input: (e) => { state.words = e.target.value.trim().toLowerCase(); fill(); } } }) : null;
  return h("div", { class: "card table-card" },
    h("div", { class: "figcaption" }, h("h3", {}, title), search,
      h("span", { class: "tools" }, h("button", { type: "button", "aria-label": `Save “${title}” as CSV`, on: { click: () => saveCsv(columns, chosen(), title) } }, "CSV"),
        h("button", { type: "button", "aria-label": `Copy the data of “${title}”`, on: { click: async (e) => shortly(e.target, (await copy(tableText(columns, chosen()))) ? "copied" : "failed") } }, "data"))),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, h("table", { class: cards ? "cards" : null }, h("thead", {}, h("tr", {}, heads)), body)), more);
}

function missing(v) {
  return v === null || v === undefined || v === "";
}

export function order(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true });
}
