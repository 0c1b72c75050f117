// The page's address holds what was chosen: "#scan:encoder.0.weight&colour-by=phase&picture=density". Whatever the
// controls of a section were set to is written there, and set again when such an address is opened.

import { visible } from "./dom.js";

const CONTROLS = "select, input[type=range], input[type=search], .choice";
const layers = new Map(); // section -> the layer that is open in it
let silent = false;

export function slug(text) {
  return String(text).toLowerCase().normalize("NFKD").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "") || "x";
}

// What the address says: {section, layer, picture, set: Map of control -> value}.
export function selection() {
  const [head, ...pairs] = location.hash.slice(1).split("&");
  const [section, layer] = head.split(/:(.*)/s).map(decode);
  const set = new Map(pairs.map((p) => p.split(/=(.*)/s)).filter((p) => p.length > 1).map(([k, v]) => [decode(k), decode(v)]));
  const picture = set.get("picture");
  set.delete("picture");
  return { section, layer, picture, set };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a "%" that encodes nothing
  }
}

// The controls of a section by a name that is the same whenever the page is drawn: their label, numbered where it repeats.
function controlsOf(section) {
  const seen = new Map();
  return [...section.querySelectorAll(CONTROLS)].map((node) => {
    const label = node.getAttribute("aria-label") || (node.labels && node.labels[0] && (node.labels[0].querySelector("span") || node.labels[0]).textContent) || "control";
    const key = slug(label);
    seen.set(key, (seen.get(key) || 0) + 1);
    return [seen.get(key) > 1 ? `${key}-${seen.get(key)}` : key, node];
  });
}

function valueOf(node) {
  if (node.matches(".choice")) return (node.querySelector("[aria-pressed=true]") || { dataset: {} }).dataset.value;
  return node.value;
}

function initialOf(node) {
  if (node.matches(".choice")) return node.dataset.initial;
  if (node.matches("select")) return ([...node.options].find((o) => o.defaultSelected) || node.options[0] || { value: "" }).value;
  return node.defaultValue;
}

// The address of a section as it is now, or of one picture in it.
export function addressOf(section, picture) {
  const parts = [encodeURIComponent(section.id) + (layers.has(section.id) ? `:${encodeURIComponent(layers.get(section.id))}` : "")];
  for (const [key, node] of controlsOf(section)) {
    if (valueOf(node) !== initialOf(node)) parts.push(`${encodeURIComponent(key)}=${encodeURIComponent(valueOf(node))}`);
  }
  if (picture) parts.push(`picture=${encodeURIComponent(picture)}`);
  return `#${parts.join("&")}`;
}

function write(section) {
  if (!silent) history.replaceState(null, "", addressOf(section));
}

// A layer was opened in a section.
export function opened(id, name) {
  layers.set(id, name);
  const section = document.getElementById(id);
  if (section) write(section);
}

// Follow the controls of the sections, and set them as the address says.
export function follow(sections) {
  for (const section of sections) {
    section.addEventListener("change", () => write(section));
    section.addEventListener("click", (event) => { if (event.target.closest(".choice")) write(section); });
  }
  const asked = selection();
  const section = sections.find((b) => b.id === asked.section);
  if (!section) return;
  if (asked.layer) layers.set(section.id, asked.layer);
  silent = true; // setting is not choosing
  for (const [key, value] of asked.set) {
    const found = controlsOf(section).find(([name]) => name === key); // looked up anew: one control may draw others
    if (found) put(found[1], value);
  }
  silent = false;
  const figure = asked.picture ? [...section.querySelectorAll("figure")].find((f) => f.dataset.picture === asked.picture) : null;
  const target = figure || section;
  if (asked.picture || asked.set.size || asked.layer) requestAnimationFrame(() => target.scrollIntoView());
}

function put(node, value) {
  if (node.matches(".choice")) {
    const button = [...node.children].find((b) => b.dataset.value === value);
    if (button) button.click();
    return;
  }
  if (node.matches("select") && ![...node.options].some((o) => o.value === value)) return;
  node.value = value;
  node.dispatchEvent(new Event(node.matches("select") ? "change" : "input", { bubbles: true }));
}

// Text to the clipboard; pages opened from disk may have to go the old way. Resolves to whether it worked.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const worked = document.execCommand("copy");
    area.remove();
    return worked;
  }
}

export function shortly(button, text) {
  const before = button.textContent;
  button.textContent = visible(text);
  setTimeout(() => { button.textContent = before; }, 1400);
}
