"""Increments of Langevin steps against the exact moments of their law."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from strati.landscape.llc.noise import Noise

DRAWS = 1_000_000


@pytest.fixture(scope="module")
def increments() -> np.ndarray:
    values = torch.zeros(4, DRAWS // 4, dtype=torch.float64)
    Noise(7).add(values, 1.0)
    return values.numpy().ravel()


@pytest.mark.parametrize(("power", "exact"), [(1, 0.0), (2, 1.0), (3, 0.0), (4, 2.75)])
def test_moments(increments: np.ndarray, power: int, exact: float) -> None:
    """Within five standard errors: wrong once in two million seeds."""
    error = np.std(increments**power) / np.sqrt(DRAWS)
    assert abs(np.mean(increments**power) - exact) < 5 * error


def test_they_are_the_ones_among_eight_bits(increments: np.ndarray) -> None:
    """A chi-squared test of all 9 values; the seed is fixed, the level 1e-4."""
    counts = np.bincount(np.rint(2**0.5 * increments + 4).astype(int), minlength=9)
    expected = DRAWS * stats.binom.pmf(np.arange(9), 8, 0.5)
    assert stats.chisquare(counts, expected).pvalue > 1e-4


def test_neighbours_and_steps_are_uncorrelated() -> None:
    noise, steps = Noise(1), torch.zeros(400, 1, 501)
    for step in steps:
        noise.add(step, 1.0)
    x = steps[:, 0].numpy()
    for a, b in ((x[:, :-1], x[:, 1:]), (x[:-1], x[1:]), (x[:, :250], x[:, 250:500])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size)


def test_sizes_scales_and_seeds() -> None:
    plain, scaled, other = (torch.zeros(2, 70_001) for _ in range(3))
    scale = torch.linspace(0.5, 2.0, 70_001)
    Noise(3).add(plain, 3.0)
    Noise(3).add(scaled, 3.0, scale)
    Noise(4).add(other, 3.0)
    assert torch.allclose(scaled, plain * scale)
    assert not torch.equal(plain, other)
    again = torch.zeros(2, 70_001)
    Noise(3).add(again, 3.0)
    assert torch.equal(plain, again)
