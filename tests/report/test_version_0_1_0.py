"""What strati 0.1.0 wrote (its own files, kept here) is drawn and read, or refused by name with what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import strati
from strati.report.page import build_page
from strati.report.runs import read_run

OLD = Path(__file__).parent / "version_0_1_0"
FILES = sorted(OLD.glob("*.json"))


def test_they_are_what_it_wrote() -> None:
    assert {path.stem for path in FILES} >= {"scan", "compare", "inspect", "study", "audit", "degeneracy"}
    assert {json.loads(path.read_text())["strati"] for path in FILES} == {"0.1.0"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_results_make_a_page(path: Path) -> None:
    assert "<script" in build_page([read_run(str(path))])


@pytest.mark.browser
def test_the_page_draws_all_of_them(opened: Callable[..., Any]) -> None:
    """``opened`` also asserts that no section failed and nothing was said on the console."""
    page = opened([read_run(str(path)) for path in FILES]).page
    shown = page.locator("main > section").evaluate_all("nodes => nodes.map(n => n.id)")
    assert {path.stem for path in FILES} <= set(shown)


def test_its_study_is_read_and_audited_but_not_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    shutil.copytree(OLD / "study", folder)
    found = strati.load_study(folder)
    told = json.loads((OLD / "study.json").read_text())
    assert (found.units, found.done, found.failed) == (told["units"], told["done"], told["failed"])
    assert set(found.frame()["intervention"]) == {"intact", "reinitialise", "rerandomise"}
    old = {(r["layer"], r["intervention"]): r for r in json.loads((OLD / "audit.json").read_text())["layers"]}
    for row in strati.audit(folder).layers:
        was = old[row.layer, row.intervention]
        assert row.performance_mean == pytest.approx(was["performance_mean"], rel=1e-9)
    with pytest.raises(strati.BadInputError, match=r"0\.1\.0, which can be read .* but not resumed"):
        strati.study("fcn-digits", out=folder)
