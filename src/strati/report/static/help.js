// What a code, state, phase, metric, column or section means: a floating note under the pointer, a dialog on a click.
// The texts are those of `strati explain`; they travel in the page.

import { h, replace } from "./dom.js";

const texts = new Map();
const KINDS = { code: "Warning", state: "State of a layer", phase: "Shape of a spectrum", metric: "Number", column: "Column", result: "Section" };
const key = (name) => String(name).toLowerCase().replace(/[_ ]/g, "-");
const plain = (text) => String(text || "").replace(/\[([^\]]*)\]\([^)]*\)/g, "$1").replaceAll("`", "");

// Rows of explanations.json: {name, kind, meaning, action, reliability, label, title, family}.
export function learnTexts(rows) {
  for (const row of rows) texts.set(key(row.name), [...(texts.get(key(row.name)) || []), row]);
}

// The entry of a name; of the kinds given, the first that there is.
export function explained(name, ...kinds) {
  const entries = texts.get(key(name)) || [];
  return kinds.map((kind) => entries.find((e) => e.kind === kind)).find(Boolean) || entries[0] || null;
}

export function meaningOf(name, ...kinds) {
  const entry = explained(name, ...kinds);
  return entry ? plain(entry.meaning) : "";
}

let dialog = null;

function open(name, title) {
  const entries = texts.get(key(name)) || [];
  const part = (label, text) => (text ? h("p", {}, h("b", {}, label), " ", plain(text)) : null);
  if (!dialog) {
    dialog = h("dialog", { class: "explain", "aria-labelledby": "explain-title", on: { click: (e) => { if (e.target === dialog) dialog.close(); } } });
    document.body.append(dialog);
  }
  replace(dialog, h("div", {}, h("h2", { id: "explain-title" }, title),
    entries.map((e) => [entries.length > 1 || e.kind !== "result" ? h("p", { class: "eyebrow" }, KINDS[e.kind] || e.kind) : null, h("p", {}, plain(e.meaning)), part("What to do:", e.action), part("How reliable:", e.reliability)]),
    h("p", { class: "caption" }, "In a terminal: ", h("code", {}, `strati explain ${entries[0].name}`)),
    h("button", { type: "button", class: "plain", on: { click: () => dialog.close() } }, "Close")));
  dialog.showModal();
}

// A small question mark that explains a name; nothing where there is no text.
export function what(name, title = name) {
  if (!texts.has(key(name))) return null;
  return h("button", { type: "button", class: "what", "aria-label": `What is ${title}?`, tip: meaningOf(name), on: { click: (e) => { e.stopPropagation(); open(name, title); } } }, "?");
}

// A word that explains itself on a click; plain text where there is no text.
export function term(name, text = name) {
  if (!texts.has(key(name))) return h("span", {}, text);
  return h("button", { type: "button", class: "term", tip: meaningOf(name), on: { click: (e) => { e.stopPropagation(); open(name, text); } } }, text);
}

// A warning of a result or of a layer: its code explains itself.
export function warning(flag) {
  return h("p", { class: "note" }, term(flag.code), " ", flag.text);
}

// One floating note for everything that carries data-tip.
export function tooltips() {
  const floating = h("div", { class: "tip", role: "tooltip", hidden: true });
  document.body.append(floating);
  const show = (target, x, y) => {
    floating.textContent = target.dataset.tip;
    floating.hidden = false;
    const box = floating.getBoundingClientRect();
    floating.style.setProperty("left", `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 8))}px`);
    floating.style.setProperty("top", `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`);
  };
  document.addEventListener("pointermove", (event) => {
    const target = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
    if (target) show(target, event.clientX, event.clientY);
    else floating.hidden = true;
  });
  document.addEventListener("focusin", (event) => {
    const target = event.target.closest ? event.target.closest("[data-tip]") : null;
    if (!target || !target.matches(":focus-visible")) { floating.hidden = true; return; }
    const box = target.getBoundingClientRect();
    show(target, box.left, box.bottom - 10);
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") floating.hidden = true; });
}
