// Unpack the data, lay out the sections that the results call for, and wire the page's own controls.

import { h, replace, section, tooltips } from "./dom.js";
import { basename, count, number, plural } from "./format.js";
import { follow } from "./link.js";
import { verdictsFor } from "./meanings.js";
import { unpack } from "./unpack.js";
import { phaseBar, strata } from "./strata.js";
import { compareSection, labels } from "./compare.js";
import { rolesSection } from "./roles.js";
import { auditSection, studySection } from "./audit.js";
import { degeneracySection } from "./degeneracy.js";
import { basisSection } from "./basis.js";
import { reassemblySection } from "./reassembly.js";
import { curvatureSection, influenceSection, llcSection, partsSection, scalesSection } from "./sampling.js";
import { applySection, checkSection, planSection } from "./acting.js";
import { trackSection } from "./tracking.js";
import { demoSection, estimateSection, identifySection, inspectSection, lineageSection, madeSection, reproduceSection, shuffleSection, skipped, sparsifySection } from "./plain.js";

const DRAW = {
  study: studySection, audit: auditSection, compare: compareSection, degeneracy: degeneracySection, basis: basisSection,
  "interaction-basis": basisSection, "interaction-graph": basisSection,
  reassemble: reassemblySection, reproduce: reproduceSection, inspect: inspectSection, llc: llcSection, curvature: curvatureSection, influence: influenceSection, scales: scalesSection, track: trackSection,
  plan: planSection, apply: applySection, check: checkSection, sparsify: sparsifySection, "reassemble-make": madeSection,
  "llc-parts": partsSection, estimate: estimateSection, demo: demoSection, shuffle: shuffleSection, "shuffle-transformer": shuffleSection, "reassemble-transformer": shuffleSection, identify: identifySection, correspond: identifySection, lineage: lineageSection,
};
const ORDER = ["check", "scan", "compare", "lineage", "roles", "track", "audit", "study", "plan", "apply", "degeneracy", "llc", "influence", "curvature", "llc-parts", "scales", "basis", "interaction-basis", "interaction-graph", "sparsify", "reassemble", "reassemble-make", "reassemble-transformer", "shuffle", "shuffle-transformer", "identify", "correspond", "inspect", "reproduce", "estimate", "demo"];
const verbOf = (result) => String(result.schema).replace(/^strati\.([a-z-]+)\/\d+$/, "$1");

function scanSection(scan, id, audits) {
  const network = scan.network || {};
  const layers = scan.layers || [];
  const body = section(id, basename(network.path), `${count(network.parameters)} parameters in ${plural(network.tensors || 0, "tensor")}${network.format ? `, ${network.format}` : ""}; ${plural(layers.length, "layer")} analysed, top to bottom as the data flows.`,
    phaseBar(layers), strata(scan, { id, verdicts: verdictsFor(audits, layers) }), skipped(scan.skipped));
  body.dataset.title = "Strata";
  return body;
}

// One section that fails must not take the others with it: it says so in its place.
function attempt(title, id, make) {
  try {
    return make();
  } catch (error) {
    const body = section(id, title, null, h("p", { class: "note" }, `This section could not be drawn: ${error.message}. The JSON holds the numbers.`));
    body.dataset.failed = "1";
    return body;
  }
}

// What a reader must know about a whole result stands right below its heading.
function flagged(body, result) {
  const notes = (result.warnings || []).map((w) => h("p", { class: "note" }, h("b", {}, w.code), " ", w.text));
  if (body.firstElementChild) body.firstElementChild.append(...notes);
  return body;
}

function rolesOf(results) {
  const scans = results.filter((r) => verbOf(r) === "scan").map((r) => ({ name: basename((r.network || {}).path), layers: r.layers || [] }));
  if (scans.length) return scans;
  const compared = results.find((r) => verbOf(r) === "compare");
  if (!compared) return [];
  return labels(compared.networks || []).map((name, i) => ({ name, layers: (compared.layers || []).map((l) => ({ name: l.name, role: l.role, ...Object.fromEntries(Object.entries(l.metrics || {}).map(([k, v]) => [k, v[i]])) })) }));
}

// Learning coefficients at different temperatures or localisations answer different questions.
function settingsNote(results) {
  const held = results.flatMap((r) => (verbOf(r) === "llc" ? [r] : verbOf(r) === "degeneracy" && r.llc ? [r.llc] : verbOf(r) === "track" && r.settings && r.settings.gamma ? [r.settings] : []));
  const kinds = [...new Set(held.map((c) => `nβ ${number(c.nbeta)}, γ ${number(c.gamma)}`))];
  return kinds.length > 1 ? h("p", { class: "note" }, h("b", {}, "different-settings"), ` The learning coefficients on this page cannot be compared: ${kinds.join("; ")}.`) : null;
}

function layout(results) {
  const audits = results.filter((r) => verbOf(r) === "audit");
  const sections = [];
  for (const verb of ORDER) {
    if (verb === "roles") {
      const body = attempt("By role", "roles", () => rolesSection(rolesOf(results)));
      if (body) sections.push(body);
      continue;
    }
    results.filter((r) => verbOf(r) === verb).forEach((result, i) => {
      const id = i ? `${verb}-${i + 1}` : verb;
      sections.push(attempt(verb, id, () => flagged(verb === "scan" ? scanSection(result, id, audits) : DRAW[verb](result, id), result)));
    });
  }
  return sections;
}

function navigation(sections) {
  const titles = sections.map((b) => b.dataset.title);
  const seen = new Map();
  const links = sections.map((b, i) => {
    const again = (seen.get(titles[i]) || 0) + 1;
    seen.set(titles[i], again);
    return h("a", { href: `#${b.id}` }, again > 1 ? `${titles[i]} ${again}` : titles[i]);
  });
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      links.forEach((l) => (l.getAttribute("href") === `#${entry.target.id}` ? l.setAttribute("aria-current", "true") : l.removeAttribute("aria-current")));
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  sections.forEach((b) => watcher.observe(b));
  replace(document.getElementById("nav"), links);
}

function themes() {
  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
}

async function start() {
  themes();
  tooltips();
  const main = document.getElementById("main");
  try {
    const data = await unpack(document.getElementById("data").textContent);
    const sections = layout(data.results);
    const first = sections.length ? sections : [h("p", { class: "empty" }, "No result was given.")];
    const note = settingsNote(data.results);
    replace(main, note ? [note, ...first] : first);
    navigation(sections);
    follow(sections);
    const scan = data.results.find((r) => verbOf(r) === "scan");
    if (scan) document.title = `${basename((scan.network || {}).path)} · strati report`;
    replace(document.getElementById("foot"), h("p", {}, `Made by strati ${data.strati} from ${plural(data.results.length, "result")}. This file is self-contained and makes no network requests.`));
    document.documentElement.dataset.ready = "1";
  } catch (error) {
    replace(main, h("p", { class: "note" }, `The data of this page could not be unpacked: ${error.message}. A current browser is needed (one with DecompressionStream).`));
    document.documentElement.dataset.ready = "failed";
  }
}

start();
