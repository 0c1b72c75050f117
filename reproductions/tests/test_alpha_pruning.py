"""Exponents with a start near the peak, windows of one shape, and shares of blocks."""

from __future__ import annotations

import numpy as np
import pytest

from strati_reproductions.acting.alpha_pruning import (
    block_shares,
    eigenvalues_of,
    median_exponent,
    peak_exponent,
    window_eigenvalues,
)


@pytest.mark.parametrize("exponent", [2.0, 3.0, 4.5])
def test_the_exponent_of_a_pareto_sample(exponent: float) -> None:
    x = np.random.default_rng(1).pareto(exponent - 1, 20_000) + 1.0
    # standard error (exponent - 1) / sqrt(n): 2 to 3 percent of a tail that the search for the start makes shorter
    assert peak_exponent(x) == pytest.approx(exponent, rel=0.06)


def test_windows_take_the_shape_out_of_the_exponent() -> None:
    rng = np.random.default_rng(0)
    shapes = [(128, 128), (128, 256), (128, 512), (128, 1024)]
    plain, pooled = [], []
    for shape in shapes:
        matrices = [rng.standard_normal(shape) for _ in range(6)]
        plain.append(np.mean([median_exponent(eigenvalues_of(m)) for m in matrices]))
        pooled.append(np.mean([median_exponent(window_eigenvalues(m)) for m in matrices]))
    assert max(plain) / min(plain) > 1.5  # noise of different shapes has different exponents
    assert max(pooled) / min(pooled) < 1.1


def test_shares_have_the_mean_asked_for_and_one_value_per_block() -> None:
    exponents = {"0.q": 2.0, "0.k": 4.0, "1.q": 5.0, "1.k": 7.0, "2.q": 3.0}
    blocks = {name: name[0] for name in exponents}
    sizes = {"0.q": 10, "0.k": 30, "1.q": 20, "1.k": 20, "2.q": 40}
    shares = block_shares(exponents, blocks, sizes, 0.5)
    assert shares["0.q"] == shares["0.k"] < shares["1.q"]
    assert sum(shares[n] * sizes[n] for n in sizes) == pytest.approx(0.5 * sum(sizes.values()))
    assert shares["1.q"] / shares["0.q"] == pytest.approx(1.3 / 0.7)
