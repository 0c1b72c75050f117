"""``strati explain``: every code, state, phase, metric and column has a meaning, from one source."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from command import run_strati
from tooling import tool

import strati
from strati.core.display import as_text
from strati.core.errors import BadInputError
from strati.explain import entries, explain
from strati.spectra.summary import COLUMNS
from strati.spectra.verdicts import WRONG, LayerState, Phase


def test_the_texts_are_those_of_the_page() -> None:
    """Run ``python tools/explanations.py`` after a change of docs/codes.md."""
    made = tool("explanations")
    rows = made.entries(made.PAGE.read_text())
    assert json.loads(made.TEXTS.read_text()) == rows


def test_everything_that_a_scan_shows_is_explained() -> None:
    names = {entry.name for entry in entries()}
    assert {str(state) for state in LayerState} | {str(phase) for phase in Phase} <= names
    assert set(WRONG) <= names
    assert {*COLUMNS, "layer", "matrices"} <= names
    scan = strati.scan({"fc.weight": np.random.default_rng(0).normal(size=(60, 50))}, bootstrap=5)
    assert set(scan.to_dict()["layers"][0]) <= names
    headings = {
        "KS": "ks_distance",
        "rank": "hard_rank",
        "stable rank": "stable_rank",
        "quasi null": "quasi_null",
    }
    assert {heading: explain(heading).name for heading in headings} == headings


@pytest.mark.parametrize("name", ["noise-like", "alpha", "bulk+spikes", "random-like", "js_divergence"])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_an_explanation_fits_the_terminal(name: str, width: int) -> None:
    lines = as_text(explain(name).summary(), width=width).splitlines()
    assert lines[0].startswith(f"{name} is a ") and lines[-1].startswith("next: strati ")
    assert max(map(len, lines)) <= width and "`" not in "".join(lines)


def test_a_name_with_two_meanings_gives_both() -> None:
    assert [entry.kind for entry in explain("random-like").entries] == ["state", "phase"]


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(BadInputError, match="noise-like"):
        explain("noise-lik")


def test_the_command() -> None:
    done = run_strati("explain", "zero-rows", "--json", "-")
    assert done.returncode == 0 and json.loads(done.stdout)["entries"][0]["kind"] == "code"
    schema = Path(strati.__file__).parent / "schemas" / "explain-1.json"
    jsonschema.validate(json.loads(done.stdout), json.loads(schema.read_text()))
    listed = run_strati("explain")
    assert listed.returncode == 0 and "rank-collapse" in listed.stdout
    wrong = run_strati("explain", "alfa")
    assert wrong.returncode == 2 and "alpha" in wrong.stderr and wrong.stderr.count("\n") == 1
