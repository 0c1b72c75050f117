"""A plan and what became of it, drawn in Chromium: strata, frontier and small multiples hold the plan's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import real_results

from strati.report.runs import read_run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("plan")
    places = {name: home / f"{name}.json" for name in ("plan", "apply")}
    real_results.acting(places)
    return {name: read_run(str(Path(path))) for name, path in places.items()}


@pytest.fixture
def page(opened: Callable[..., Any], results: dict[str, Any]) -> Any:
    return opened(list(results.values())).page


def figure(page: Any, title: str) -> Any:
    found = page.locator("#plan figure", has=page.get_by_role("heading", name=title, exact=True))
    found.scroll_into_view_if_needed()
    found.locator("svg").first.wait_for()
    return found


WIDTHS = "nodes => nodes.map((n) => n.width.baseVal.value)"


def test_strata_are_as_long_as_what_stays(page: Any, results: dict[str, Any]) -> None:
    strata = figure(page, "What stays of each layer")
    drawn = strata.locator("rect.kept").evaluate_all(WIDTHS)
    whole = strata.locator("rect[fill='var(--none)']").evaluate_all(WIDTHS)
    for curve, length, most in zip(results["plan"]["curves"], drawn, whole, strict=True):
        sizes = {p["choice"]: p["size"] for p in curve["points"]}
        assert abs(length / most - sizes[curve["choice"]] / max(sizes.values())) < 0.01


def test_the_frontier_has_all_ways_to_spend_the_budget(page: Any, results: dict[str, Any]) -> None:
    frontier = figure(page, "Budget against performance")
    first = results["plan"]["frontier"][0]
    assert {"plan", "uniform", "alpha", "stable_rank"} <= set(first)
    assert frontier.locator("path.line").count() == 4
    assert frontier.locator("circle.measured").count() == 2
    words = frontier.locator(".legend").inner_text()
    assert all(word in words for word in ("plan", "uniform allocation", "by alpha", "by stable rank"))


def test_every_layer_has_a_panel_with_every_setting(page: Any, results: dict[str, Any]) -> None:
    curves = results["plan"]["curves"]
    panels = figure(page, "Cost of each setting, layer by layer")
    assert panels.locator("svg svg").count() == len(curves)
    assert panels.locator("circle").count() == sum(len(c["points"]) for c in curves)
    assert panels.locator("circle.chosen").count() == len(curves)
    inside = panels.locator("svg").first.bounding_box()
    for box in panels.locator("svg svg").evaluate_all(
        "nodes => nodes.map((n) => n.getBoundingClientRect().right)"
    ):
        assert box <= inside["x"] + inside["width"] + 1


def test_the_verdict_stands_above_the_table(page: Any, results: dict[str, Any]) -> None:
    assert results["plan"]["verdict"][1:] in page.locator("#plan .note").inner_text()
    assert "of before" in page.locator("#apply").inner_text()


@pytest.mark.parametrize(("width", "scheme"), [(420, "light"), (1280, "dark")])
def test_narrow_and_dark(
    opened: Callable[..., Any], results: dict[str, Any], width: int, scheme: str
) -> None:
    page = opened(list(results.values()), width=width, scheme=scheme).page
    figure(page, "Cost of each setting, layer by layer")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
