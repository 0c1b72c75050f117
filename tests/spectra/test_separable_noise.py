"""The law of noise with unequal rows and columns: closed forms, simulation, symmetries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strati.spectra import marchenko_pastur
from strati.spectra.marchenko_pastur import SeparableNoise


@pytest.mark.parametrize("shape", [(100, 100), (400, 100), (1000, 30)])
def test_equal_sizes_are_marchenko_pastur(shape: tuple[int, int]) -> None:
    n, m = shape
    noise = SeparableNoise.from_sizes(np.full(n, m * 0.25), np.ones(m))
    low, high = (n * x for x in marchenko_pastur.edges(n / m, 0.5))
    edge, scale = noise.upper_edge()
    assert edge == pytest.approx(high, rel=1e-9)
    assert noise.lower_edge() == pytest.approx(low, rel=1e-6, abs=1e-9)
    centre, width = marchenko_pastur.centre_and_scale(n, m)
    assert scale == pytest.approx(0.25 * width, rel=0.02) and edge == pytest.approx(0.25 * centre, rel=0.02)
    assert noise.widening(level=0.01) == pytest.approx(1, abs=1e-9)
    assert noise.narrowing() == pytest.approx(1, abs=1e-6)


def test_two_sizes_of_rows_by_the_equation_of_the_edge() -> None:
    """For equal columns z = T - M/s with T = sum a/(1 + a s): its least value, by brute force."""
    rows, m = np.repeat([1.0, 3.0], [100, 50]), 40
    noise = SeparableNoise.from_sizes(rows * m, np.ones(m))
    s = np.linspace(-1 / 3 + 1e-6, -1e-4, 400_001)
    z = 100 / (1 + s) + 50 * 3 / (1 + 3 * s) - m / s
    assert noise.upper_edge()[0] == pytest.approx(z.min(), rel=1e-8)


@pytest.mark.parametrize("sides", ["rows", "columns", "both"])
def test_largest_and_smallest_eigenvalue_of_simulated_noise(sides: str) -> None:
    """40 draws: the mean largest lies within 3 % of the edge plus Tracy-Widom's mean, the smallest within 15 %."""
    rng = np.random.default_rng(0)
    n, m = 300, 120
    a = rng.lognormal(0, 0.3, n) if sides != "columns" else np.ones(n)
    b = rng.lognormal(0, 0.3, m) if sides != "rows" else np.ones(m)
    noise = SeparableNoise.from_sizes(a * b.sum(), b * a.sum())
    ends = []
    for _ in range(40):
        W = rng.normal(size=(n, m)) * np.sqrt(a)[:, None] * np.sqrt(b)
        ends.append(np.linalg.eigvalsh(W.T @ W)[[0, -1]])
    smallest, largest = np.mean(ends, axis=0)
    edge, scale = noise.upper_edge()
    assert largest == pytest.approx(edge + marchenko_pastur.TRACY_WIDOM_MEAN * scale, rel=0.03)
    assert smallest == pytest.approx(noise.lower_edge(), rel=0.15)
    moment = np.sum(np.linalg.eigvalsh(W.T @ W) ** 2)
    assert moment == pytest.approx(noise.second_moment(), rel=0.05)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(20, 300), st.integers(20, 300), st.floats(0.0, 1.0))
def test_symmetry_scale_and_bounds(seed: int, n: int, m: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    n, m = max(n, m), min(n, m)
    a, b = rng.lognormal(0, spread, n), rng.lognormal(0, spread, m)
    noise, turned = SeparableNoise.from_sizes(a * b.sum(), b), SeparableNoise.from_sizes(b * a.sum(), a)
    assert noise.upper_edge()[0] == pytest.approx(turned.upper_edge()[0], rel=1e-3)
    assert noise.second_moment() == pytest.approx(turned.second_moment(), rel=1e-2)
    larger = SeparableNoise.from_sizes(7 * a * b.sum(), b)
    assert larger.upper_edge()[0] == pytest.approx(7 * noise.upper_edge()[0], rel=1e-9)
    assert noise.widening(level=0.01) >= 1 and 0 <= noise.narrowing() <= 1 + 1e-9
