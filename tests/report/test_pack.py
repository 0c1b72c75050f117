from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strati.report.pack import MOST_KEPT, kept_ranks, pack


def undo(text: str) -> tuple[Any, np.ndarray]:
    """The document and the words of its spectra, by the layout that the module's docstring states."""
    raw = zlib.decompress(base64.b64decode(text))
    (length,) = struct.unpack("<I", raw[:4])
    planes = np.frombuffer(raw[4 + length :], np.uint8).reshape(4, -1)
    return json.loads(raw[4 : 4 + length]), np.ascontiguousarray(planes.T).view("<u4").ravel()


def expand(packed: dict[str, Any], words: np.ndarray) -> np.ndarray:
    start, kept, size, scale = packed["$spectrum"]
    bits = np.cumsum(words[start : start + kept].astype(np.uint64)).astype(np.uint32)
    values = bits.view(np.float32).astype(float) * scale
    if kept == size:
        return values
    ranks = np.cumsum(words[start + kept : start + 2 * kept].astype(np.int64))
    assert values[0] > 0
    return np.exp(np.interp(np.arange(size), ranks, np.log(values)))


def through(values: np.ndarray, **owner: Any) -> np.ndarray:
    document, words = undo(pack({"layers": [{"eigenvalues": values.tolist()} | owner]}))
    return expand(document["layers"][0]["eigenvalues"], words)


def alpha(values: np.ndarray, xmin: float) -> float:
    tail = values[values >= xmin * (1 - 1e-6)]
    return float(1 + len(tail) / np.log(tail / xmin).sum())


@given(st.lists(st.floats(0, 1e30), min_size=16, max_size=200), st.floats(-30, 30))
@settings(max_examples=60, deadline=None)
def test_small_spectra_come_back_whole(values: list[float], exponent: float) -> None:
    wanted = np.sort(np.array(values) * 10.0**exponent)
    found = through(wanted)
    assert len(found) == len(wanted)
    # Float32 relative to the largest eigenvalue: 24 bits, and nothing below 1e-45 of it.
    assert np.allclose(found, wanted, rtol=1e-7, atol=wanted[-1] * 2e-45)


@pytest.mark.parametrize("heavy", [1.2, 2.0, 4.0])
def test_large_spectra_keep_edges_spikes_and_tail(heavy: float) -> None:
    rng = np.random.default_rng(1)
    bulk = np.linalg.svd(rng.normal(size=(600, 500)), compute_uv=False) ** 2
    values = np.sort(
        np.concatenate(
            [
                *(bulk * np.exp(rng.normal(0, 0.02, 500)) for _ in range(16)),
                1300 * (1 + rng.pareto(heavy, 300)),
            ]
        )
    )
    minus, plus, xmin = float(bulk.min()), float(bulk.max()), float(values[-300])
    found = through(values, mp_lambda_minus=minus, mp_lambda_plus=plus, xmin=xmin)
    assert len(found) == len(values) == 8300
    assert (np.diff(found) >= 0).all()
    start = int(np.searchsorted(values, xmin))
    # The largest and the smallest are exact, and so is everything around an edge.
    for part in (
        slice(None, 60),
        slice(-120, None),
        slice(start - 30, start + 30),
    ):
        assert np.allclose(found[part], values[part], rtol=1e-6)
    # No rank is further from its place than the spacing of the kept quantiles.
    shift = np.abs(np.searchsorted(values, found) - np.arange(len(values)))
    assert shift.max() <= 2 * len(values) / (MOST_KEPT / 4)
    assert alpha(found, xmin) == pytest.approx(alpha(values, xmin), rel=2e-3)
    assert found.sum() == pytest.approx(values.sum(), rel=1e-3)


@given(st.integers(17, 5000), st.integers(128, 1024), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_ranks_fit_the_budget_and_keep_both_ends(size: int, most: int, seed: int) -> None:
    values = np.sort(np.random.default_rng(seed).pareto(0.7, size))
    ranks = kept_ranks(values, most, [float(values[size // 2]), float(values[size // 3])])
    assert len(ranks) <= most or len(ranks) == size
    assert ranks[0] == 0
    assert ranks[-1] == size - 1
    assert (np.diff(ranks) > 0).all()


def test_many_spectra_share_a_budget() -> None:
    values = np.sort(np.random.default_rng(0).pareto(2.0, 1000)).tolist()
    document, _ = undo(pack({"layers": [{"eigenvalues": values}] * 800}))
    kept = [row["eigenvalues"]["$spectrum"][1] for row in document["layers"]]
    assert max(kept) <= 500


def test_everything_else_is_untouched_but_for_the_eighth_digit() -> None:
    given = {
        "a": [1, 2.5, None, True, "é<"],
        "eigenvalues": None,
        "b": {"eigenvalues": [0.5, 1.0]},
        "c": 0.123456789012,
    }
    found, words = undo(pack(given))
    assert found["c"] == 0.1234568
    assert {k: v for k, v in found.items() if k != "c"} == {k: v for k, v in given.items() if k != "c"}
    assert words.size == 0


def test_zero_spectra_stay_zero() -> None:
    assert (through(np.zeros(40)) == 0).all()
