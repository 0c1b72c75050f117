"""Diagnostics against arviz on chains that mix, drift, alternate and disagree."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from strati.landscape.llc.traces import ess, rhat, standard_error


@pytest.fixture(scope="module")
def arviz():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("arviz")


def chains(kind: str, seed: int, shape: tuple[int, int]) -> np.ndarray:
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=shape)
    if kind == "independent":
        return noise
    if kind == "gamma":
        return rng.gamma(0.5, size=shape)
    rho = {"slow": 0.95, "alternating": -0.6, "apart": 0.5}[kind]
    out = np.empty(shape)
    out[:, 0] = noise[:, 0]
    for i in range(1, shape[1]):
        out[:, i] = rho * out[:, i - 1] + noise[:, i]
    return out + (np.arange(shape[0])[:, None] if kind == "apart" else 0)


@pytest.mark.parametrize("kind", ["independent", "gamma", "slow", "alternating", "apart"])
@pytest.mark.parametrize("shape", [(4, 200), (2, 501), (16, 64)])
def test_agrees_with_arviz(arviz, kind, shape):
    trace = chains(kind, 3, shape)
    assert rhat(trace) == pytest.approx(float(arviz.rhat(trace)), rel=1e-6)
    # Where correlations never die out within the trace, arviz drops one more pair than Geyer's rule asks for.
    tolerance = 0.02 if rhat(trace) < 1.1 else 0.15
    assert ess(trace) == pytest.approx(float(arviz.ess(trace)), rel=tolerance)
    assert ess(trace, rank=False) == pytest.approx(float(arviz.ess(trace, method="mean")), rel=tolerance)


def test_stuck_chains_are_not_called_mixed():
    stuck = np.repeat(np.arange(4.0)[:, None], 50, axis=1)
    assert rhat(stuck) == np.inf
    assert rhat(np.full((4, 50), np.nan)) is None
    assert ess(np.zeros((4, 3))) is None


def test_standard_error_of_autocorrelated_chains():
    """AR(1) with rho = 0.9: the error of the mean is sqrt((1 + rho)/(1 - rho)) = 4.36 times the naive one."""
    rng = np.random.default_rng(0)
    trace = np.empty((8, 5000))
    trace[:, 0] = rng.normal(size=8) / np.sqrt(1 - 0.81)
    for i in range(1, 5000):
        trace[:, i] = 0.9 * trace[:, i - 1] + rng.normal(size=8)
    expected = 10.0 / np.sqrt(8 * 5000)
    assert standard_error(trace) == pytest.approx(expected, rel=0.35)
