"""The map of a transformer: blocks and roles, by mouse and keyboard, linked by the address; no barrier for axe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strati

pytestmark = pytest.mark.browser

AXE = Path(__file__).resolve().parents[2] / ".venv" / "axe.min.js"
BLOCKS = 5


@pytest.fixture(scope="module")
def scan() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {
        **{f"self_attn.{k}_proj": (32, 32) for k in ("q", "k", "v", "o")},
        "mlp.gate_proj": (64, 32),
        "mlp.up_proj": (64, 32),
        "mlp.down_proj": (32, 64),
    }
    tensors = {
        f"model.layers.{block}.{name}.weight": rng.standard_normal(shape).astype(np.float32)
        for block in range(BLOCKS)
        for name, shape in shapes.items()
    }
    return strati.scan(tensors).to_dict()


def test_every_matrix_is_a_cell(opened: Callable[..., Any], scan: dict[str, Any]) -> None:
    page = opened([scan]).page
    assert page.locator("#scan .map .cell").count() == len(scan["layers"]) == 7 * BLOCKS
    roles = page.locator("#scan .map [role=rowheader]").all_text_contents()
    assert roles == [
        "attention.q",
        "attention.k",
        "attention.v",
        "attention.out",
        "mlp.in",
        "mlp.gate",
        "mlp.out",
    ]
    assert page.locator("#scan .blockmap path.line").count() == 8  # seven roles and their median


def test_a_click_opens_the_layer_and_the_address_links_to_it(
    opened: Callable[..., Any], scan: dict[str, Any]
) -> None:
    page = opened([scan]).page
    page.locator('#scan .map [data-role="mlp.in"][data-block="3"]').click()
    name = "model.layers.3.mlp.up_proj.weight"
    assert name in page.locator("#scan .detail").inner_text()
    assert page.url.endswith(f"#scan:{name}")
    again = page.context.new_page()
    again.goto(page.url)
    again.wait_for_selector("html[data-ready='1']")
    assert name in again.locator("#scan .detail").inner_text()


def test_the_map_is_used_by_keyboard(opened: Callable[..., Any], scan: dict[str, Any]) -> None:
    page = opened([scan]).page
    page.locator("#scan .map .cell").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    assert "model.layers.2.self_attn.k_proj.weight" in page.locator("#scan .detail").inner_text()


def test_the_map_is_coloured_by_what_is_asked(opened: Callable[..., Any], scan: dict[str, Any]) -> None:
    page = opened([scan]).page
    fills = "nodes => new Set(nodes.map(n => n.getAttribute('fill'))).size"
    cells = page.locator("#scan .map .cell")
    assert cells.evaluate_all(fills) > 5
    page.get_by_role("combobox", name="Colour by", exact=True).select_option("phase")
    phases = {layer["phase"] for layer in scan["layers"]}
    assert cells.evaluate_all(fills) == len(phases)


def test_a_network_without_blocks_keeps_its_strata(opened: Callable[..., Any]) -> None:
    rng = np.random.default_rng(1)
    plain = strati.scan({f"{i}.weight": rng.standard_normal((40, 40)).astype(np.float32) for i in range(4)})
    assert opened([plain.to_dict()]).page.locator(".blockmap").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_barrier(opened: Callable[..., Any], scan: dict[str, Any], scheme: str) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not there; `make test` fetches it where npm can be had")
    page = opened([scan], scheme=scheme).page
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, { runOnly: ['wcag2a', 'wcag2aa'] })")
    barriers = [(v["id"], v["nodes"][0]["html"][:120], len(v["nodes"])) for v in found["violations"]]
    assert barriers == []
