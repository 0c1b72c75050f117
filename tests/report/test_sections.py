"""Every section of the page, drawn in Chromium from what the real verbs wrote."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strati.report.runs import read_run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def results(real: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {name: read_run(str(path)) for name, path in real.items() if name != "report"}


@pytest.fixture
def page(opened: Callable[..., Any], results: dict[str, dict[str, Any]]) -> Any:
    return opened([result for name, result in results.items() if name != "coded"]).page


def drag(page: Any, selector: str, value: float) -> None:
    page.locator(selector).evaluate(
        "(node, value) => { node.value = value; node.dispatchEvent(new Event('input', { bubbles: true })); }",
        value,
    )


def picture(page: Any, section: str, title: str) -> Any:
    return page.locator(f"#{section} figure", has=page.get_by_role("heading", name=title, exact=True))


def marks(page: Any, section: str, title: str, what: str) -> int:
    node = picture(page, section, title).locator("svg")
    node.scroll_into_view_if_needed()
    return int(node.locator(what).count())


TITLES = {
    "scan": "Layers",
    "compare": "Comparison",
    "audit": "Importance",
    "plan": "Compression plan",
    "degeneracy": "Unused parameters",
}


def test_every_section_is_there_and_in_the_menu(page: Any) -> None:
    sections = [
        "overview",
        "scan",
        "compare",
        "compare-2",
        "audit",  # with the finished study
        "plan",
        "apply",
        "degeneracy",
        "llc",
        "llc-parts",
        "scales",
        "basis",
        "reassemble",
        "inspect",
        "reproduce",
        "sparsify",
        "reassemble-make",
        "estimate",
    ]
    assert page.locator("main > section").evaluate_all("nodes => nodes.map(n => n.id)") == sections
    assert (
        page.locator("#nav a").evaluate_all("nodes => nodes.map(n => n.getAttribute('href').slice(1))")
        == sections
    )
    cards = page.locator("#overview .brief")
    assert cards.evaluate_all("nodes => nodes.map(n => n.getAttribute('href').slice(1))") == sections[1:]
    titles = {section: page.locator(f"#{section} h2").inner_text().split("\n")[0] for section in TITLES}
    assert {section: title.removesuffix("?").strip() for section, title in titles.items()} == TITLES
    drawn = page.locator("main figure:not(details figure)").evaluate_all(
        "nodes => nodes.map(n => n.querySelectorAll('svg').length)"
    )
    assert min(drawn) >= 1  # small multiples have several


def test_axe_finds_no_barrier_in_any_section(page: Any) -> None:
    axe = Path(__file__).resolve().parents[2] / ".venv" / "axe.min.js"
    if not axe.is_file():
        pytest.skip("axe-core is not there; `make test` fetches it where npm can be had")
    page.evaluate(axe.read_text())
    found = page.evaluate("axe.run(document, { runOnly: ['wcag2a', 'wcag2aa'] })")
    barriers = [(v["id"], v["nodes"][0]["html"][:160], len(v["nodes"])) for v in found["violations"]]
    assert barriers == []


def test_strata_show_the_scan(page: Any, results: dict[str, Any]) -> None:
    layers = results["scan"]["layers"]
    assert page.locator("#scan .rows .row").count() == len(layers) == 3
    for row, layer in zip(page.locator("#scan .rows .row").all(), layers, strict=True):
        assert layer["state"].replace("too-small", "too small to tell") in row.text_content()
    reading = " ".join(page.locator("#scan .readout").first.inner_text().split())
    assert f"{layers[0]['alpha']:.2f} ± {layers[0]['alpha_stderr']:.2f}" in reading
    spikes = page.locator("#scan .legend", has_text="random bulk").inner_text()
    assert f"{layers[0]['spikes']} spikes" in spikes


def test_the_refit_begins_at_the_librarys_fit(page: Any, results: dict[str, Any]) -> None:
    """Moving the xmin slider to where it stands refits with the page's own code: the numbers must not move."""
    layer = results["scan"]["layers"][0]
    slider = page.locator("input[data-refit=xmin]")
    names = page.locator(".readout dt").all_inner_texts()
    at = int(slider.input_value())
    drag(page, "input[data-refit=xmin]", at)
    values = dict(zip(names, page.locator(".readout dd").all_inner_texts(), strict=True))
    assert values["α"].split(" ")[0] == f"{layer['alpha']:.2f}"
    assert float(values["KS"]) == pytest.approx(layer["ks_distance"], rel=1e-2)
    assert int(values["tail"]) == layer["tail_size"]
    assert int(values["beyond edge"]) == layer["spikes"]


def test_numbers_carry_the_audits_verdict(page: Any, results: dict[str, Any]) -> None:
    verdict = next(
        v for v in results["audit"]["verdicts"] if v["metric"] == "alpha" and not v["intervention"]
    )
    words = {"use": "correlated", "do-not-use": "did not correlate", "unknown": "too few points"}
    said = page.locator("#scan .numbers [data-metric=alpha] dd").get_attribute("data-tip")
    assert words.get(verdict["recommendation"], "but") in said
    assert "Audited on" in page.locator("#scan .numbers").inner_text()


COPIED = """async () => {
  const copied = [];
  const writeText = async (t) => { copied.push(t); };
  Object.defineProperty(navigator, "clipboard", { value: { writeText }, configurable: true });
  const found = [];
  for (const figure of document.querySelectorAll("figure")) {
    const [svg, png, data, link] = figure.querySelectorAll(".tools button");
    const labels = [svg, png, data, link].map((b) => b.getAttribute("aria-label"));
    if (!figure.querySelector(".figure-body svg")) {
      found.push({ title: labels[0], hidden: true });
      continue;
    }
    data.click();
    link.click();
    await new Promise((r) => setTimeout(r, 0));
    found.push({ title: labels[0], labels, data: copied[0], link: copied[1], section: figure.closest("section").id });
    copied.length = 0;
  }
  return found;
}"""


def test_every_picture_has_its_data_and_a_link(page: Any) -> None:
    found = page.evaluate(COPIED)
    drawn = [figure for figure in found if not figure.get("hidden")]
    assert len(drawn) > 20
    for figure in drawn:
        told = [label.split("“")[0].strip() for label in figure["labels"]]
        assert told == ["Save", "Save", "Copy the data of", "Copy a link to"], figure["title"]
        rows = list(csv.reader(io.StringIO(figure["data"])))
        assert len(rows) > 1, figure["title"]
        assert len({len(row) for row in rows}) == 1, figure["title"]
        assert f"#{figure['section']}" in figure["link"] and "&picture=" in figure["link"], figure["title"]


def test_networks_side_by_side(page: Any) -> None:
    assert marks(page, "compare", "Layer by layer", "circle") >= 4
    assert marks(page, "compare", "What changed", "rect.bar") == 3
    assert marks(page, "compare", "Spectra", "path.line") == 2


def test_a_training_series_moves_with_its_slider(page: Any, results: dict[str, Any]) -> None:
    series = results["series"]["series"]
    shapes = "Shape of the spectra over the checkpoints"
    assert marks(page, "compare-2", shapes, "rect.cell") == 3 * len(series["labels"])
    assert marks(page, "compare-2", "Stable rank", "path.line") == 3
    now = page.locator("#compare-2 .now")
    last = now.inner_text()
    drag(page, "#compare-2 input[data-step]", 0)
    assert now.inner_text() == "Step 0"
    assert now.inner_text() != last
    page.locator("#compare-2 .play").click()
    page.wait_for_function(
        "last => document.querySelector('#compare-2 .now').textContent === last", arg=last, timeout=20000
    )


def test_the_audit_shows_points_map_and_verdicts(page: Any, results: dict[str, Any]) -> None:
    audit = results["audit"]
    scatter = picture(page, "audit", "A metric against performance")
    scatter.get_by_role("combobox", name="Metric").select_option("alpha")
    points = [p for p in audit["points"] if p["metrics"].get("alpha") is not None]
    assert scatter.locator("circle").count() == len(points)
    assert marks(page, "audit", "Accuracy after changing one layer", "rect.verdict") == len(audit["layers"])
    whole = [m for m in audit["metrics"] if m["layer"] is None and m["intervention"] is None]
    pooled = [m for m in whole if m["spearman"] is not None]
    assert marks(page, "audit", "Correlation with performance", "circle") == len(pooled)
    verdicts = [v for v in audit["verdicts"] if v["intervention"] is None]
    for group in page.locator("#audit .verdicts .group").all():
        mine = [v for v in verdicts if v["recommendation"] == group.get_attribute("data-recommendation")]
        assert group.locator("li").count() == len(mine) > 0
    assert page.locator("#audit .verdicts li").count() == len(verdicts)
    layer = audit["points"][0]["layer"]
    scatter.get_by_role("combobox", name="Layer").select_option(layer)
    assert scatter.locator("circle").count() == sum(p["layer"] == layer for p in points)
    assert "Spearman ρ" in scatter.inner_text()


def test_degeneracy_shows_used_free_scales_and_chains(page: Any, results: dict[str, Any]) -> None:
    found = results["degeneracy"]
    assert marks(page, "degeneracy", "Used and free, layer by layer", "rect.used") == len(found["layers"])
    sampled = [row for row in found["scales"] if row["effective"] is not None]
    assert marks(page, "degeneracy", "Effective parameters over scales", "circle") == len(sampled)
    errors = [row for row in sampled if row["stderr"]]
    assert marks(page, "degeneracy", "Effective parameters over scales", "path.error") == len(errors)
    assert marks(page, "degeneracy", "Effective parameters over scales", "path.dashed") == 1
    assert marks(page, "degeneracy", "Chains", "path.thin") == len(found["llc"]["traces"])
    table = page.locator("#degeneracy .table-card", has_text="Sampling diagnostics")
    assert "R-hat" in table.text_content()


def test_sampled_results_stand_alone(page: Any, results: dict[str, Any]) -> None:
    assert marks(page, "llc", "Chains", "path.thin") == len(results["llc"]["traces"])
    sampled = [row for row in results["scales"]["scales"] if row["effective"] is not None]
    assert marks(page, "scales", "Effective parameters over scales", "circle") == len(sampled)
    assert page.locator("#scales tbody tr").count() == len(results["scales"]["scales"])


def test_learning_coefficients_of_parts(page: Any, results: dict[str, Any]) -> None:
    parts = results["parts"]["parts"]
    known = [row for row in parts if row["estimate"] is not None]
    assert known
    assert marks(page, "llc-parts", "Learning coefficient by part", "circle") == len(known)
    assert page.locator("#llc-parts tbody tr").count() == len(parts)
    assert all(row["part"] in page.locator("#llc-parts").inner_text() for row in parts)


def test_what_a_run_would_cost(page: Any, results: dict[str, Any]) -> None:
    text = page.locator("#estimate").text_content()
    name, rows, columns = results["estimate"]["largest"]
    assert f'["{name}",{rows},{columns}]' in text
    assert results["estimate"]["summary"][0][-40:] in text
    assert "memory" in text


def test_the_rounding_floor_of_a_quantised_layer_is_drawn(
    opened: Callable[..., Any], results: dict[str, Any]
) -> None:
    """At its place on the axis of eigenvalues; a layer that is not quantised has none."""
    layer = results["coded"]["layers"][0]
    floor, values = layer["quantisation"]["noise_floor"], layer["eigenvalues"]
    assert values[0] < floor < values[-1]
    page = opened([results["coded"], results["scan"]]).page
    text = page.locator("#scan text.rule-text", has_text="rounding floor")
    assert text.count() == 1
    at = float(text.get_attribute("x"))
    rules = text.locator("xpath=..").locator("line.rule")
    places = [float(x) for x in rules.evaluate_all("nodes => nodes.map(n => n.getAttribute('x1'))")]
    assert min(abs(at - place) for place in places) < 6
    assert page.locator("#scan-2 text.rule-text", has_text="rounding floor").count() == 0


def test_plans_and_what_became_of_them(page: Any, results: dict[str, Any]) -> None:
    rows = page.locator("#plan tbody tr")
    assert rows.count() == len(results["plan"]["layers"])
    assert results["plan"]["layers"][0]["name"] in rows.first.inner_text()
    assert results["plan"]["verdict"][1:] in page.locator("#plan .note").inner_text()
    assert "of before" in page.locator("#apply").inner_text()


def test_tables_of_the_smaller_verbs(page: Any, results: dict[str, Any]) -> None:
    assert page.locator("#sparsify .table-card >> nth=0 >> tbody tr").count() == len(
        results["sparsify"]["layers"]
    )
    order = ",".join(map(str, results["made"]["permutation"]))
    assert order in page.locator("#reassemble-make").text_content()


def test_figures_of_a_reproduction_are_in_the_page(page: Any, results: dict[str, Any]) -> None:
    drawn = {Path(name).stem for name in results["reproduce"]["figures"]}  # each as PNG and SVG
    assert drawn
    shown = page.locator("#reproduce img.picture")
    assert shown.count() == len(drawn)
    assert "not on this page" not in page.locator("#reproduce").inner_text()
    assert shown.first.evaluate("node => node.complete && node.naturalWidth > 100")


def test_training_runs_and_checks(opened: Callable[..., Any]) -> None:
    """These verbs' results as the interface has them: lines for layers, a rule for each change, one row per finding."""
    head = {"strati": "1"}
    series = [
        {"what": "alpha", "layer": name, "values": [3.0, 2.5, None, 2.0], "stderr": [0.1, 0.1, None, 0.1]}
        for name in ("fc1", "fc2")
    ]
    series.append({"what": "loss", "layer": None, "values": [2.0, 1.0, 0.5, 0.4], "stderr": None})
    change = {"what": "loss", "layer": None, "step": 100, "low": 50, "high": 150, "pvalue": 0.01}
    track = {
        "schema": "strati.track/1",
        "steps": [0, 100, 200, 300],
        "series": series,
        "changes": [change],
    } | head
    found = [{"layer": "fc1", "code": "noise-like", "text": "indistinguishable from random weights"}]
    check = {"schema": "strati.check/1", "found": found, "passed": False} | head
    track["spectra"] = {
        "unit": 100,
        "ranks": [0, 0.5, 1],
        "layers": [
            {"layer": "fc1", "values": [[-100, 0, 50], [-110, 0, 60], None, [-120, 0, 80]]},
            {"layer": "fc2", "values": [[-90, 0, 50], [-90, 0, 55], [-90, 0, 60], [-90, 0, 65]]},
        ],
    }
    steps = [{"title": "scan", "command": "strati scan x", "seconds": 1.5}]
    tour = {"schema": "strati.demo/1", "folder": "out", "report": "out/report.html", "steps": steps} | head
    page = opened([track, check, tour]).page
    assert "strati scan x" in page.locator("#demo tbody tr").first.inner_text()
    assert marks(page, "track", "Tail exponent", "path.line") == 2
    strip = picture(page, "track", "Time line")
    assert strip.locator("image.heat").count() == 1
    assert strip.locator("path.change").count() == 0  # alpha has none
    strip_of = page.locator("#track figure", has_text="Time line")
    strip_of.locator("select").select_option("loss")
    assert strip.locator("path.change").count() == 1
    spectrum_of = page.locator("#track figure", has_text="Spectrum at this step")
    assert spectrum_of.locator("path.here").count() == 1
    before = spectrum_of.locator("path.here").get_attribute("d")
    ghost = spectrum_of.locator("path.ghost").get_attribute("d")
    slide = page.locator("#track input[data-step]")
    slide.evaluate("node => { node.value = 1; node.dispatchEvent(new Event('input')); }")
    assert (
        spectrum_of.locator("path.here").get_attribute("d") == ghost != before
    )  # step 200 holds no spectrum
    assert "within the interval of 1 change point" in page.locator("#track .now").inner_text()
    slide.evaluate("node => { node.value = 2; node.dispatchEvent(new Event('input')); }")
    assert spectrum_of.locator("path.here").count() == 0
    spectrum_of.locator("select").select_option("fc2")
    assert spectrum_of.locator("path.here").count() == 1
    assert marks(page, "track", "Tail exponent", "path.band") == 2
    assert marks(page, "track", "Loss", "path.line") == 1
    assert page.locator("#track tbody tr").count() == 1
    assert page.locator("#check tbody tr").count() == 1


def test_the_interaction_graph_thins_and_picks_modules(page: Any, results: dict[str, Any]) -> None:
    chart = picture(page, "basis", "Directions and their interactions")
    for fold in page.locator("#basis details").all():
        fold.evaluate("node => { node.open = true; }")
    chart.locator("svg").wait_for()
    drag(page, "#basis figure input[type=range]", 25)
    assert chart.locator("path.edge").count() == 25
    assert (
        chart.locator("circle.node").count()
        >= sum(min(64, layer["directions"]) for layer in results["basis"]["layers"]) - 4
    )
    assert marks(page, "basis", "Keeping only the strongest directions", "path.line") == 4


def test_reassembly_plays_to_the_end(page: Any, results: dict[str, Any]) -> None:
    found = results["pieces"]
    scores = picture(page, "reassemble", "Pairing scores")
    after = scores.locator("image").get_attribute("href")
    scores.get_by_role("button", name="as given").click()
    assert scores.locator("image").get_attribute("href") != after
    now = page.locator("#reassemble .now")
    last = now.inner_text()
    drag(page, "#reassemble input[data-stage]", 0)
    assert now.inner_text().startswith(str(found["progression"][0]["stage"]))
    page.locator("#reassemble .play").click()
    page.wait_for_function(
        "last => document.querySelector('#reassemble .now').textContent === last", arg=last, timeout=20000
    )


def test_tables_sort(page: Any) -> None:
    page.locator("#inspect thead button", has_text="parameters").click()
    cells = page.locator("#inspect tbody tr td:nth-child(6)").all_inner_texts()
    numbers = [int(text.replace("\u2009", "")) for text in cells]
    assert numbers == sorted(numbers)
    page.locator("#inspect thead button", has_text="parameters").click()
    assert page.locator("#inspect thead th").nth(5).get_attribute("aria-sort") == "descending"


@pytest.mark.parametrize("width", [1280, 390])
def test_real_results_fit_both_widths(
    opened: Callable[..., Any], results: dict[str, Any], width: int
) -> None:
    page = opened(list(results.values()), width, "dark").page
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_the_page_of_everything_is_small(results: dict[str, Any]) -> None:
    from strati.report.page import build_page

    assert len(build_page(list(results.values())).encode()) < 1.5e6


def test_json_on_disk_and_results_in_memory_give_one_page(
    real: dict[str, Path], results: dict[str, Any]
) -> None:
    from strati.report.page import build_page

    again = json.loads(real["scan"].read_text())
    assert build_page([again]) == build_page([results["scan"]])
