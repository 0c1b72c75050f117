"""Every picture can be saved, copied as data and linked; numbers say how far to trust them, and who says so."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strati

pytestmark = pytest.mark.browser
BLOCKS = 4
PARTS = {
    **{f"self_attn.{k}_proj": (32, 32) for k in ("q", "k", "v", "o")},
    "mlp.up_proj": (64, 32),
    "mlp.down_proj": (32, 64),
}


def transformer(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        f"model.layers.{block}.{name}.weight": rng.standard_normal(shape).astype(np.float32)
        for block in range(BLOCKS)
        for name, shape in PARTS.items()
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    first, last = transformer(0), transformer(1)
    middle = {k: ((first[k] + last[k]) / 2).astype(np.float32) for k in first}
    return [
        strati.scan(last, eigenvalues=True).to_dict(),
        strati.compare(first, last, eigenvalues=True).to_dict(),
        strati.track([first, middle, last], steps=[0, 10, 20]).to_dict(),
    ]


# What the page hands to the clipboard, without one.
CLIPBOARD = """() => {
  window.copied = [];
  Object.defineProperty(navigator, "clipboard", { value: { writeText: async (t) => { window.copied.push(t); } } });
}"""


def copied(page: Any, button: Any) -> str:
    button.click()
    page.wait_for_function("window.copied.length > 0")
    text: str = page.evaluate("window.copied.pop()")
    return text


def test_copied_numbers_are_the_results(opened: Callable[..., Any], results: list[dict[str, Any]]) -> None:
    page = opened([results[0]]).page
    page.evaluate(CLIPBOARD)
    figure = page.locator("#scan .blockmap figure").nth(1)
    rows = list(csv.DictReader(io.StringIO(copied(page, figure.get_by_role("button", name="Copy the data")))))
    shown = {(row["series"], int(row["block"])): float(row["stable rank"]) for row in rows}
    for layer in results[0]["layers"]:
        assert shown[layer["role"], layer["block"]] == pytest.approx(layer["stable_rank"], rel=1e-6)
    of_block = [layer["stable_rank"] for layer in results[0]["layers"] if layer["block"] == 2]
    assert shown["median over roles", 2] == pytest.approx(np.median(of_block), rel=1e-6)
    assert shown["upper quartile over roles", 2] == pytest.approx(np.quantile(of_block, 0.75), rel=1e-6)


def test_an_address_brings_the_choices_back(
    opened: Callable[..., Any], results: list[dict[str, Any]]
) -> None:
    page = opened([results[0]]).page
    page.locator('#scan .map [data-role="mlp.in"][data-block="2"]').click()
    page.get_by_role("combobox", name="Colour by", exact=True).select_option("entropy")
    page.locator("#scan .multiples select").select_option("mlp.out")
    page.locator("#scan .multiples .choice button").nth(1).click()
    page.locator("#scan .detail .choice button").nth(1).click()
    assert "#scan:model.layers.2.mlp.up_proj.weight&" in page.url
    again = page.context.new_page()
    again.goto(page.url)
    again.wait_for_selector("html[data-ready='1']")
    assert "model.layers.2.mlp.up_proj.weight" in again.locator("#scan .detail").inner_text()
    assert again.get_by_role("combobox", name="Colour by", exact=True).input_value() == "entropy"
    assert again.locator("#scan .multiples select").input_value() == "mlp.out"
    pressed = "[aria-pressed=true]"
    assert again.locator(f"#scan .multiples {pressed}").inner_text() == "ridgelines over depth"
    assert again.locator(f"#scan .detail .choice {pressed}").first.inner_text() == "x log"
    assert again.url == page.url


@pytest.mark.parametrize(
    "fragment", ["#scan:%E0%A4%A", "#scan&picture=nothing", "#nowhere:x&a=b", "#scan&role=zzz&x"]
)
def test_odd_addresses_do_no_harm(
    opened: Callable[..., Any], results: list[dict[str, Any]], fragment: str
) -> None:
    page = opened([results[0]]).page
    again = page.context.new_page()
    problems: list[str] = []
    again.on("pageerror", lambda error: problems.append(str(error)))
    again.goto(page.url.split("#")[0] + fragment)
    again.wait_for_selector("html[data-ready='1']")
    assert problems == []


def test_comparisons_and_runs_have_the_same_map(
    opened: Callable[..., Any], results: list[dict[str, Any]]
) -> None:
    page = opened(results[1:]).page
    for section in ("compare", "track"):
        assert page.locator(f"#{section} .map .cell").count() == len(PARTS) * BLOCKS, section
    page.locator("#compare .blockmap select").first.select_option("stable_rank")
    cell = page.locator('#compare .map [data-role="attention.q"][data-block="1"]')
    layer = next(
        entry for entry in results[1]["layers"] if entry["name"] == "model.layers.1.self_attn.q_proj.weight"
    )
    before, after = layer["metrics"]["stable_rank"]
    told = cell.get_attribute("aria-label").replace("−", "-")
    assert float(told.rpartition(" ")[2]) == pytest.approx(after - before, rel=1e-2)
    cell.click()
    assert "1.self_attn.q_proj" in page.locator("#compare .opened").inner_text()
    spectra = page.locator("#compare [data-picture=spectra] select")
    assert spectra.input_value() == str(results[1]["layers"].index(layer))
    page.locator('#track .map [data-role="mlp.out"][data-block="3"]').click()
    spectrum = page.locator("#track [data-picture=spectrum-at-this-step] select")
    assert spectrum.input_value() == "model.layers.3.mlp.down_proj.weight"


def test_small_multiples_share_their_axes_and_open_layers(
    opened: Callable[..., Any], results: list[dict[str, Any]]
) -> None:
    page = opened([results[0]]).page
    page.locator("#scan .multiples select").select_option("attention.v")
    panels = page.locator("#scan .multiples .panel")
    assert panels.count() == BLOCKS
    page.locator("#scan .multiples .choice button").nth(1).click()
    assert page.locator("#scan .multiples .ridge").count() == BLOCKS
    panels.nth(3).focus()
    page.keyboard.press("Enter")
    assert "model.layers.3.self_attn.v_proj.weight" in page.locator("#scan .detail").inner_text()


def test_experts_share_a_cell_with_their_median(
    opened: Callable[..., Any], results: list[dict[str, Any]]
) -> None:
    scan = json.loads(json.dumps(results[0]))
    extra = [
        dict(layer, name=f"{layer['name']}.1", stable_rank=layer["stable_rank"] + 4)
        for layer in scan["layers"]
    ]
    scan["layers"] += extra
    page = opened([scan]).page
    cells = page.locator("#scan .map .cell")
    assert cells.count() == len(PARTS) * BLOCKS
    told = cells.first.get_attribute("aria-label")
    assert "and 1 more" in told
    assert float(told.rpartition(" ")[2]) == pytest.approx(scan["layers"][0]["stable_rank"] + 2, rel=1e-2)


def verdict(metric: str, recommendation: str) -> dict[str, Any]:
    flags = ("invariant", "separates_robust_from_critical", "predicts_performance")
    return {
        "metric": metric,
        **dict.fromkeys(flags, False),
        "tells_reinitialised_from_rerandomised": None,
        "recommendation": recommendation,
        "text": f"{metric}: said (rho 0.1)",
        "intervention": None,
        "n": 12,
    }


def audit(norm: float) -> dict[str, Any]:
    said = {
        "stable_rank": "do-not-use",
        "frobenius_norm": "unknown",
        "alpha": "unknown",
        "mp_sigma": "do-not-use",
    }
    point = {"network": "a", "layer": "fc", "intervention": "intact", "metrics": {"frobenius_norm": norm}}
    return {
        "schema": "strati.audit/1",
        "strati": "0.2.0",
        "study": {"name": "made"},
        "metrics": [],
        "failed": 0,
        "layers": [],
        "verdicts": [verdict(m, r) for m, r in said.items()],
        "points": [{**point, "performance": 1.0, "draw": 0, "type": "linear", "setting": None}],
    }


@pytest.mark.parametrize("own", [True, False])
def test_trust_says_what_an_audit_can_say(opened: Callable[..., Any], own: bool) -> None:
    rng = np.random.default_rng(0)
    heavy = (rng.standard_normal((240, 160)) * rng.pareto(1.5, (240, 160))).astype(np.float32)
    scan = strati.scan({"fc.weight": heavy}).to_dict()
    assert not {"noise-like", "few-eigenvalues"} & {w["code"] for w in scan["layers"][0]["warnings"]}
    norm = scan["layers"][0]["frobenius_norm"] * (1 if own else 1.5)
    page = opened([scan, audit(norm)]).page
    shown = {
        node.get_attribute("data-metric"): (
            node.locator("dd").get_attribute("data-tip"),
            [chip.inner_text() for chip in node.locator(".chip").all()],
        )
        for node in page.locator("#scan .numbers [data-metric]").all()
    }
    # A number that is computed exactly is right; what an audit judges is whether it predicts performance.
    assert "does not predict" in shown["stable_rank"][0] and shown["stable_rank"][1] == []
    assert "cannot tell" in shown["frobenius_norm"][0]
    assert "too few points" in shown["alpha"][0]
    where = "Audited on this network" if own else "Audited on another network"
    assert where in shown["alpha"][0] and "made" in shown["alpha"][0]
    assert where in page.locator("#scan .numbers > .card > .caption").inner_text()


def test_heads_are_a_map_of_blocks_and_heads(
    opened: Callable[..., Any], results: list[dict[str, Any]]
) -> None:
    scan = json.loads(json.dumps(results[0]))
    for block in range(BLOCKS):
        for head in range(3):
            for part in ("QK", "OV"):
                row = dict(scan["layers"][0], name=f"h.{block}.attn[{head}].{part}", block=block)
                scan["layers"].append(
                    row | {"kind": f"head.{part.lower()}", "stable_rank": 1.0 + head + block}
                )
    page = opened([scan]).page
    assert page.locator("#scan .map .cell").count() == len(PARTS) * BLOCKS  # heads are not layers
    for picture in ("qk-where-the-head-looks", "ov-what-the-head-moves"):
        assert page.locator(f"#heads [data-picture={picture}] rect.cell").count() == 3 * BLOCKS
    tip = page.locator("#heads [data-picture=qk-where-the-head-looks] rect.cell").last.get_attribute(
        "data-tip"
    )
    assert tip.startswith(f"block {BLOCKS - 1}, head 2") and "6" in tip
    assert page.locator("#overview .brief[data-verb=heads] svg").count() == 1
