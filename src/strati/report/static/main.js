// Unpack the data, lay out the overview and the sections that the results call for, and wire the page's own controls.

import { h, note, replace, section } from "./dom.js";
import { basename, learnNames, number, plural, sentence } from "./format.js";
import { learnTexts, tooltips, warning, what } from "./help.js";
import { follow } from "./link.js";
import { learnMetrics, verdictsFor } from "./meanings.js";
import { unpack } from "./unpack.js";
import { overview } from "./overview.js";
import { isHead, layersSection } from "./layers.js";
import { headsSection } from "./heads.js";
import { checkSection, lineageSection } from "./integrity.js";
import { compareSection } from "./compare.js";
import { auditSection, studySection } from "./audit.js";
import { degeneracySection } from "./degeneracy.js";
import { basisSection } from "./basis.js";
import { reassemblySection, transformerSection } from "./reassembly.js";
import { llcSection, partsSection, scalesSection } from "./sampling.js";
import { curvatureSection, influenceSection } from "./curvature.js";
import { applySection, planSection } from "./plan.js";
import { trackSection } from "./tracking.js";
import { inspectSection, otherSection, reproduceSection } from "./plain.js";

// What draws each result, in the order of the page. What is not named here is drawn as tables.
const DRAW = {
  check: checkSection, scan: (r, id, audits) => layersSection(r, id, verdictsFor(audits, r.layers || [])), compare: compareSection, lineage: lineageSection, track: trackSection,
  audit: auditSection, study: studySection, plan: planSection, apply: applySection, degeneracy: degeneracySection,
  llc: llcSection, "llc-parts": partsSection, scales: scalesSection, curvature: curvatureSection, influence: influenceSection,
  basis: basisSection, "interaction-basis": basisSection, "interaction-graph": basisSection, reassemble: reassemblySection, "reassemble-transformer": transformerSection,
  inspect: inspectSection, reproduce: reproduceSection,
};
const verbOf = (result) => String(result.schema).replace(/^strati\.([a-z-]+)\/\d+$/, "$1");

// One section that fails must not take the others with it: it says so in its place.
function attempt(title, id, make) {
  try {
    return make();
  } catch (error) {
    const body = section(id, title, null, note("", `This section could not be drawn: ${error.message}. The JSON holds the numbers.`));
    body.dataset.failed = "1";
    return body;
  }
}

// The networks that a result is about, by the names of their files.
function subjectOf(result) {
  const paths = [result.network, ...(Array.isArray(result.networks) ? result.networks : []), result.model, result.path].flatMap((n) => (typeof n === "string" ? [n] : n && typeof n === "object" ? [n.label || n.name || n.path].filter((v) => typeof v === "string") : []));
  return [...new Set(paths.map(basename))].filter((name) => name !== "model").slice(0, 4).join(" · ");
}

// Above every section what it is about; below its title the sentence and the number of the result, then its warnings.
function headed(body, result) {
  const head = body.firstElementChild;
  const subject = subjectOf(result);
  const [answer, detail] = Array.isArray(result.summary) ? result.summary : [];
  if (subject) head.prepend(h("p", { class: "subject" }, subject));
  head.querySelector("h2").append(what(verbOf(result), body.dataset.title) || "");
  if (answer) head.querySelector(".lead").textContent = sentence(answer);
  if (detail) head.append(h("p", { class: "caption" }, sentence(detail)));
  head.append(...(result.warnings || []).map(warning));
  return body;
}

// Learning coefficients at different temperatures or localisations answer different questions.
function settingsNote(results) {
  const coefficients = results.flatMap((r) => (verbOf(r) === "llc" ? [r] : verbOf(r) === "degeneracy" && r.llc ? [r.llc] : verbOf(r) === "track" && r.settings && r.settings.gamma ? [r.settings] : []));
  const kinds = [...new Set(coefficients.map((c) => `nβ ${number(c.nbeta)}, γ ${number(c.gamma)}`))];
  return kinds.length > 1 ? warning({ code: "different-settings", text: `The learning coefficients on this page cannot be compared: ${kinds.join("; ")}.` }) : null;
}

// A finished study and its audit are one section: what changing a layer costs, and which metrics knew it.
function merged(results) {
  const study = results.find((r) => verbOf(r) === "study" && r.done >= r.units && !r.failed);
  const audit = results.find((r) => verbOf(r) === "audit");
  if (!study || !audit || !Array.isArray(study.summary) || !Array.isArray(audit.summary)) return results;
  return results.filter((r) => r !== study).map((r) => (r === audit ? { ...audit, summary: [study.summary[0], `${study.summary[1] || ""} ${audit.summary[0] || ""}`.trim()] } : r));
}

function layout(results) {
  const audits = results.filter((r) => verbOf(r) === "audit");
  const verbs = [...new Set([...Object.keys(DRAW), ...results.map(verbOf)])];
  const parts = [];
  for (const verb of verbs) {
    results.filter((r) => verbOf(r) === verb).forEach((result, i) => {
      const id = i ? `${verb}-${i + 1}` : verb;
      const draw = DRAW[verb] || otherSection;
      const only = verb === "scan" && (result.layers || []).length && (result.layers || []).every(isHead);
      if (!only) parts.push({ result, verb, body: attempt(verb, id, () => headed(draw(result, id, audits), result)) });
      if (verb === "scan" && (result.layers || []).some(isHead)) parts.push({ result, verb: "heads", body: attempt("Heads", i ? `heads-${i + 1}` : "heads", () => headsSection(result, i ? `heads-${i + 1}` : "heads")) });
    });
  }
  return parts;
}

// Links in a row where they fit, behind a button where they do not.
function navigation(parts) {
  const titles = parts.map((p) => p.body.dataset.title);
  const menu = document.getElementById("menu");
  const nav = document.getElementById("nav");
  const links = parts.map((p, i) => h("a", { href: `#${p.body.id}` }, titles.indexOf(titles[i]) < i ? `${titles[i]} ${titles.slice(0, i + 1).filter((t) => t === titles[i]).length}` : titles[i]));
  const row = replace(document.getElementById("links"), links);
  const open = (yes) => { nav.classList.toggle("open", yes); menu.setAttribute("aria-expanded", String(yes)); };
  menu.addEventListener("click", () => open(!nav.classList.contains("open")));
  row.addEventListener("click", () => open(false));
  document.addEventListener("keydown", (e) => { if (e.key === "Escape") open(false); });
  const fit = () => {
    nav.classList.remove("narrow");
    nav.classList.toggle("narrow", row.scrollWidth > row.clientWidth + 1);
  };
  new ResizeObserver(fit).observe(document.querySelector(".masthead"));
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      links.forEach((l) => (l.getAttribute("href") === `#${entry.target.id}` ? l.setAttribute("aria-current", "true") : l.removeAttribute("aria-current")));
      const current = links.find((l) => l.hasAttribute("aria-current"));
      menu.textContent = current ? current.textContent : "Sections";
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  parts.forEach((p) => watcher.observe(p.body));
}

function themes() {
  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
}

// Names of layers wherever a result holds them; results with many of them first, so that all sections shorten alike.
function namesIn(result) {
  const lists = [result.layers, result.found, result.series, result.curves, (result.series || {}).layers].filter(Array.isArray);
  return lists.flat().map((row) => row && (row.name || row.layer)).filter((name) => typeof name === "string");
}

async function start() {
  themes();
  tooltips();
  const main = document.getElementById("main");
  try {
    const data = await unpack(document.getElementById("data").textContent);
    learnTexts(data.explanations || []);
    learnMetrics(data.explanations || []);
    data.results.map(namesIn).sort((a, b) => b.length - a.length).forEach(learnNames);
    const drawn = layout(merged(data.results));
    const subjects = [...new Set(data.results.filter((r) => ["scan", "check", "inspect"].includes(verbOf(r))).map(subjectOf).filter(Boolean))];
    const title = subjects.length === 1 ? subjects[0] : "Report";
    const top = { body: overview(title, drawn, settingsNote(data.results)), verb: "overview" };
    const parts = [top, ...drawn];
    replace(main, parts.map((p) => p.body));
    navigation(parts);
    follow(parts.map((p) => p.body));
    document.title = `${title} · strati report`;
    replace(document.getElementById("foot"), h("p", {}, `Made by strati ${data.strati} from ${plural(data.results.length, "result")}. This file is self-contained and makes no network requests.`));
    document.documentElement.dataset.ready = "1";
  } catch (error) {
    replace(main, note("", `The data of this page could not be unpacked: ${error.message}. A current browser is needed (one with DecompressionStream).`));
    document.documentElement.dataset.ready = "failed";
  }
}

start();
