"""The table and the claims on small networks: their rows are what they say, and unseen data stay unseen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from strati import embedded
from strati.interventions.tasks import StudyData
from strati.io.to_module import as_module
from strati_reproductions.acting import claims, subjects, table
from strati_reproductions.registry import ENTRIES, reproduce
from strati_reproductions.trained.networks import Transformer


def digits(folder: Path, quick: bool, seed: int) -> subjects.ActingCase:
    with np.load(embedded.path("digits.npz")) as file:
        x = next(file[k] for k in ("x_test", "x") if k in file.files).astype(np.float32)
        y = next(file[k] for k in ("y_test", "y") if k in file.files)
    x = x.reshape(len(x), -1)
    data = StudyData("rows", 10, x[:0], None, x, y)
    model = as_module(embedded.path("digits-mlp.safetensors"))
    return subjects.ActingCase(
        "digits",
        model,
        subjects._part(data, 0, 120),
        subjects._part(data, 120, 300),
        ("*",),
        60,
        "small",
        False,
        x[300:],
    )


def words(folder: Path, quick: bool, seed: int) -> subjects.ActingCase:
    torch.manual_seed(0)
    tokens = np.random.default_rng(0).integers(0, 30, (16, 9))
    data = StudyData("tokens", 30, tokens[:0], None, tokens, None)
    model = Transformer(30, 16, 4, 2, 16).eval()
    parts = subjects._part(data, 0, 8), subjects._part(data, 8, 16)
    return subjects.ActingCase("words", model, *parts, ("blocks.*",), 8, "small", True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CASES", {"fcn-mnist": digits, "stories15m": words})
    monkeypatch.setattr(table, "QUICK", ("fcn-mnist",))


def test_the_table_compares_plan_and_even_spread_on_unseen_data(tmp_path: Path) -> None:
    found = reproduce("acting", quick=True, folder=tmp_path)
    cells = [r for r in found.rows if r.key == "cell"]
    assert len(cells) == 6
    for field, what in (("even", "than the even spread"), ("plain", "than the plan of plain edits")):
        verdicts = [r.facts[field] for r in cells]
        assert set(verdicts) <= {"better", "worse", "no difference"}
        better = next(r for r in found.rows if f"is better {what}" in r.what)
        assert better.ours == f"{verdicts.count('better')} of 6"
    assert all(r.facts["even"] != "worse" for r in cells)
    # a cell by hand: the even spread of GPTQ at 4 bits, on the other images
    case, study = table.studied("fcn-mnist", tmp_path / "acting", True, 0, lambda _: None, aware=True)
    even = dict.fromkeys(study.origin.layers, "bits=4,group=32,method=gptq")
    expected = table.evaluator_of(case, study).measure("quantise", even).performance
    assert cells[3].facts["even_loss"] == pytest.approx(expected, abs=1e-6)
    assert abs(expected - table.whole(case, study)) > 1e-4
    assert study.failed == 0


def test_claims_are_put_beside_what_was_measured(tmp_path: Path) -> None:
    found = claims.claims(quick=True, seed=0, folder=tmp_path / "acting-claims", tick=lambda _: None)
    text = " ".join(r.what for r in found.rows)
    for name in ("LASER, digits", "rank choice, digits", "ShortGPT, words"):
        assert name in text
    assert {"acting", "acting-claims"} <= set(ENTRIES)
