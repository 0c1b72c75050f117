"""The state of a layer: learned, random-like, too small to tell, broken."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import strati
from strati.core.rng import stream
from strati.spectra.spectrum import spectrum
from strati.spectra.verdicts import LayerState


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    drawn: np.ndarray = stream(seed, "state", *shape).normal(size=shape).astype(np.float32)
    return drawn


def with_signal(W: np.ndarray, strength: float = 4.0) -> np.ndarray:
    n, m = W.shape
    rng = stream(1, "signal", n, m)
    left, right = rng.normal(size=n), rng.normal(size=m)
    size = strength * (np.sqrt(n) + np.sqrt(m)) * W.std() / np.linalg.norm(left) / np.linalg.norm(right)
    return W + (size * np.outer(left, right)).astype(W.dtype)


@pytest.mark.parametrize("shape", [(50, 50), (64, 256), (300, 60)])
def test_noise_that_is_large_enough_is_random_like(shape: tuple[int, int]) -> None:
    sp = spectrum(noise(*shape))
    assert sp.state == LayerState.RANDOM_LIKE
    assert "noise-like" in {flag.code for flag in sp.warnings}


@pytest.mark.parametrize("shape", [(49, 49), (10, 64), (300, 20), (1, 40), (5, 5)])
def test_small_noise_is_too_small_to_tell(shape: tuple[int, int]) -> None:
    sp = spectrum(noise(*shape))
    assert sp.state == LayerState.TOO_SMALL
    assert "noise-like" not in {flag.code for flag in sp.warnings}


@pytest.mark.parametrize("shape", [(20, 64), (64, 64), (200, 100)])
def test_signal_beyond_noise_is_learned_at_any_size(shape: tuple[int, int]) -> None:
    assert spectrum(with_signal(noise(*shape))).state == LayerState.LEARNED


def test_what_is_wrong_is_broken() -> None:
    W = with_signal(noise(80, 60))
    changes = {"not-finite": np.nan, "wild-entry": 1e15}
    for code, value in changes.items():
        damaged = W.copy()
        damaged[3, 5] = value
        sp = spectrum(damaged)
        assert sp.state == LayerState.BROKEN and code in {flag.code for flag in sp.warnings}
    damaged = W.copy()
    damaged[7] = 0
    assert spectrum(damaged).state == LayerState.BROKEN
    assert spectrum(np.ones((60, 60))).state == LayerState.BROKEN
    assert spectrum(np.zeros((60, 60))).state == LayerState.BROKEN
    low_rank = noise(80, 20) @ noise(20, 60)
    assert spectrum(low_rank).state == LayerState.BROKEN


def test_padding_rows_do_not_break_an_embedding() -> None:
    table = with_signal(noise(200, 60))
    table[0] = 0
    scan = strati.scan({"wte.weight": table, "h.0.mlp.fc_in.weight": table.copy()})
    states = {item.layer.name: item.state for item in scan}
    assert states == {"wte.weight": LayerState.LEARNED, "h.0.mlp.fc_in.weight": LayerState.BROKEN}
    assert [row["state"] for row in scan.to_dict()["layers"]] == ["learned", "broken"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("count", [1, 3])
def test_wild_entries_are_counted(dtype: type, count: int) -> None:
    W = noise(70, 300)
    W.flat[:count] = 3e4
    (flag,) = [flag for flag in spectrum(W.astype(dtype)).warnings if flag.code == "wild-entry"]
    assert flag.text.startswith("one" if count == 1 else str(count))


def test_heavy_or_regular_entries_are_not_wild() -> None:
    """100 draws of Pareto entries with mu = 2 (a gap of 100 has a chance of 1e-4 each), and an identity with noise."""
    codes = [
        flag.code
        for number in range(100)
        for flag in spectrum(stream(2, "pareto", number).pareto(2.0, (60, 60)) + 1).warnings
    ]
    codes += [flag.code for flag in spectrum(np.eye(60) + 1e-3 * noise(60, 60)).warnings]
    assert "wild-entry" not in codes


@pytest.mark.parametrize("side", [2, 4, 8])
@pytest.mark.parametrize("kind", ["identity", "permutation", "wide", "kernel"])
def test_an_identity_with_noise_is_not_wild(side: int, kind: str) -> None:
    rng = stream(3, kind, side)
    weights = 1e-3 * rng.normal(
        size=(side, side, 3) if kind == "kernel" else (side, side + 3 * (kind == "wide"))
    )
    diagonal = np.eye(*weights.shape[:2])
    if kind == "kernel":
        weights[:, :, 1] += diagonal
    else:
        weights += diagonal[rng.permutation(side)] if kind == "permutation" else diagonal
    row = strati.scan({"conv.weight": weights.astype(np.float32)}).layers[0].row()
    assert "wild-entry" not in {flag.code for flag in row["warnings"]}
    weights.flat[1] = 1e4
    row = strati.scan({"conv.weight": weights.astype(np.float32)}).layers[0].row()
    assert "wild-entry" in {flag.code for flag in row["warnings"]}
