"""The docs' page of reproductions: made from full runs alone, true to its stored tables, and open about old ones."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tooling

from strati.papers import registry
from strati.papers.claims import CLAIMS
from strati.papers.registry import ENTRIES, sources

HOME = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(HOME)
    return tooling.tool("reproduce_all")


@pytest.fixture
def table() -> dict[str, Any]:
    row = {"what": "share with alpha in [2, 6]", "paper": None, "ours": 0.17, "note": ""}
    name = "alpha-of-random-layers"
    return {
        "title": "Alphas",
        "mode": "full",
        "seed": 0,
        "sources": sources(name),
        "rows": [row],
        "figures": [],
    }


def test_the_page_is_what_its_tables_give(tool: ModuleType) -> None:
    assert tool.check() == 0
    assert all(found["mode"] == "full" for found in tool.stored().values())


def test_quick_results_do_not_go_in(tool: ModuleType, table: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="quick results"):
        tool.page({"alpha-of-random-layers": table | {"mode": "quick"}})


def test_a_table_older_than_its_code_says_so(tool: ModuleType, table: dict[str, Any]) -> None:
    fresh = tool.page({"alpha-of-random-layers": table})
    assert tool.STALE not in fresh
    assert tool.STALE in tool.page({"alpha-of-random-layers": table | {"sources": "0" * 16}})


def test_claims_follow_the_rows(tool: ModuleType, table: dict[str, Any]) -> None:
    assert "[held](#alpha-of-random-layers)" in tool.page({"alpha-of-random-layers": table})
    other = copy.deepcopy(table)
    other["rows"][0]["ours"] = 0.0
    assert "[not held](#alpha-of-random-layers)" in tool.page({"alpha-of-random-layers": other})


def test_claims_name_entries_that_there_are() -> None:
    assert all(claim.entry in ENTRIES for claim in CLAIMS if claim.entry is not None)
    assert {claim.paper for claim in CLAIMS} == {
        "robust-and-critical-layers",
        "top-down-eigenspectra",
        "degeneracy-in-the-loss-landscape",
        "dropped-neural-net",
    }


def test_the_checksum_sees_code_and_not_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "made.py"

    class Found:
        origin = str(file)

    monkeypatch.setattr(registry, "find_spec", lambda name: Found if name.endswith("phases") else None)
    sums = []
    for text in ('"""A."""\nx = 1\n', '"""B."""\n# why\nx = 1\n', '"""A."""\nx = 2\n'):
        file.write_text(text)
        sums.append(sources("phases"))
    assert sums[0] == sums[1] != sums[2]
