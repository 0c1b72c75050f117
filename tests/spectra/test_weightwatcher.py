"""The same numbers as weightwatcher 0.7.7 where it is right, and other ones where it is wrong."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from strati.spectra.spectrum import spectrum

ORACLE = Path(__file__).parent / "oracle"
RECORD = json.loads((ORACLE / "weightwatcher.json").read_text())

_spec = importlib.util.spec_from_file_location("oracle_cases", ORACLE / "cases.py")
assert _spec is not None and _spec.loader is not None
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)


@pytest.mark.parametrize("name", list(RECORD["cases"]))
def test_same_numbers(name: str) -> None:
    theirs = RECORD["cases"][name]
    ours = spectrum(cases.make(name)).metrics()
    assert ours["tail_size"] == theirs["num_pl_spikes"]
    assert ours["alpha"] == pytest.approx(theirs["alpha"], rel=1e-6)
    assert ours["xmin"] == pytest.approx(theirs["xmin"], rel=1e-6)
    assert ours["ks_distance"] == pytest.approx(theirs["D"], rel=1e-6)
    assert ours["stable_rank"] == pytest.approx(theirs["stable_rank"], rel=1e-6)
    assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=1e-6)
    assert ours["frobenius_norm"] ** 2 == pytest.approx(theirs["norm"], rel=1e-6)
    assert ours["spectral_norm"] ** 2 == pytest.approx(theirs["spectral_norm"], rel=1e-6)


def test_scale_does_not_matter_where_an_absolute_threshold_fails() -> None:
    """weightwatcher drops eigenvalues below 1e-5: at a small scale it has nothing left to fit."""
    assert RECORD["scaled-by-1e-4"] == {"alpha": -1.0, "warning": "over-trained"}
    W = cases.make("gaussian-300x100")
    for scale in (1e-4, 1e-18, 1e15):
        assert spectrum(W * np.float32(scale)).metrics()["alpha"] == pytest.approx(
            spectrum(W).metrics()["alpha"], rel=1e-5
        )


def test_rank_tolerance_is_of_the_dtype_that_the_weights_came_in() -> None:
    """In float32 the null directions carry rounding noise; float64's tolerance would count them (300, not 200)."""
    rng = np.random.default_rng(0)
    W = (rng.normal(size=(300, 200)) @ rng.normal(size=(200, 300))).astype(np.float32)
    assert spectrum(W).metrics()["hard_rank"] == 200
    assert spectrum(W.astype(np.float64), dtype="float32").metrics()["hard_rank"] == 200
    assert spectrum(W.astype(np.float64)).metrics()["hard_rank"] == 300
