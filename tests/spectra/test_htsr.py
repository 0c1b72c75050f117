"""Numbers of heavy-tailed self-regularisation against direct computations and their laws under noise."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import strati
from strati.report.plots.spectra import alpha_over_xmin
from strati.spectra import htsr
from strati.spectra.layerwise import from_record, to_record
from strati.spectra.marchenko_pastur import upper_edge
from strati.spectra.tail_tests import truncation_pvalue
from strati.spectra.tails import Tail, exponents

Array = NDArray[np.float64]


def noise(rows: int, columns: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(rows, columns))


def product_rule(eigenvalues: Array) -> int:
    """The rule of weightwatcher 0.7.7 (``detX_num``): multiply from the largest until the product is below 1."""
    values = eigenvalues * len(eigenvalues) / eigenvalues.sum()
    for index in range(len(values) - 1, 0, -1):
        if np.prod(values[index:]) < 1.0:
            return len(values) - index
    return len(values)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(3, 60), spread=st.floats(0.1, 3.0))
def test_the_trace_log_condition_is_that_of_the_product(seed: int, size: int, spread: float) -> None:
    values = np.sort(np.exp(spread * np.random.default_rng(seed).normal(size=size)))
    assert htsr.trace_log_size(values) == product_rule(values)


def test_every_number_is_in_the_metrics_only_when_asked_for() -> None:
    W = noise(120, 80) + np.outer(noise(120, 1, 1), noise(1, 80, 2))
    plain, full = strati.spectrum(W).metrics(), strati.spectrum(W, htsr=True).metrics()
    assert set(full) - set(plain) == set(htsr.FIELDS)
    assert {name: full[name] for name in plain} == plain
    values = np.linalg.svd(W, compute_uv=False)[::-1] ** 2
    assert full["erg_gap"] == product_rule(values) - full["tail_size"]
    upper = values[40:]
    assert full["alpha_hill"] == pytest.approx(1 + 40 / np.sum(np.log(upper / values[39])))
    spacings = np.diff(values)
    ratios = [min(a, b) / max(a, b) for a, b in pairwise(spacings)]
    assert full["level_spacing"] == pytest.approx(np.mean(ratios))
    left, _, right = np.linalg.svd(W)
    exact = min(1 / (120 * np.sum(left[:, 0] ** 4)), 1 / (80 * np.sum(right[0] ** 4)))
    assert full["localisation"] == pytest.approx(exact, rel=1e-6)
    blocks = [W[i : i + 40, j : j + 40] for i in (0, 40, 80) for j in (0, 40)]
    hills = []
    for block in blocks:
        squares = np.sort(np.linalg.svd(block, compute_uv=False) ** 2)
        hills.append(1 + 20 / np.sum(np.log(squares[20:] / squares[19])))
    assert full["alpha_farms"] == pytest.approx(np.mean(hills))


def test_a_stored_spectrum_keeps_them() -> None:
    sp = strati.spectrum(noise(60, 40), htsr=True)
    assert from_record(to_record(sp)).to_json() == sp.to_json()


def test_traps_of_gaussian_entries_have_the_level_and_large_entries_are_traps() -> None:
    level = 0.05
    counts = [htsr.traps(noise(100, 60, seed), level=level, seed=seed)[0] for seed in range(60)]
    assert 0.01 < np.mean(counts) < 0.12  # 240 permutations at a level of 0.05
    W = noise(100, 60)
    W.flat[[7, 1500, 4000]] = 60.0
    mean, error, size = htsr.traps(W)
    assert mean == 3.0 and error == 0.0 and size > 3
    edge = W.var() * upper_edge(100, 60, level=0.01)
    permuted = np.random.default_rng(9).permutation(W.ravel()).reshape(W.shape)
    assert np.count_nonzero(np.linalg.svd(permuted, compute_uv=False) ** 2 > edge) == 3


def test_a_learned_direction_is_no_trap() -> None:
    W = noise(100, 60) + 3 * np.outer(noise(100, 1, 1), noise(1, 60, 2)) / 10
    assert strati.spectrum(W).metrics()["spikes"] >= 1 and htsr.traps(W)[0] <= 0.25


def test_the_exponent_of_submatrices_does_not_depend_on_the_aspect_ratio_of_noise() -> None:
    """The exponent of the whole matrix does; that is the bias which the submatrices remove."""
    farms = {ratio: htsr.farms(noise(100 * ratio, 100, ratio)) for ratio in (1, 2, 5)}
    whole = {
        ratio: strati.spectrum(noise(100 * ratio, 100, ratio), htsr=True).metrics()["alpha_hill"]
        for ratio in (1, 5)
    }
    means = [mean for mean, _ in farms.values()]
    assert max(means) - min(means) < 4 * max(error for _, error in farms.values()) < 0.3
    assert whole[5] - whole[1] > 0.5


def test_localisation_of_random_and_of_planted_vectors() -> None:
    pvalues = [htsr.localisation(noise(80, 50, seed), seed=seed)[1] for seed in range(60)]
    assert 0 <= np.mean(np.array(pvalues) < 0.1) < 0.25 and np.mean(pvalues) > 0.35
    W = noise(80, 50)
    W[3] *= 12
    ratio, pvalue = htsr.localisation(W)
    assert ratio == pytest.approx(1 / 80, rel=0.2) and pvalue == 0.001


def test_level_spacings_of_random_matrices_and_of_independent_values() -> None:
    """0.5307 for real random matrices, 2 ln 2 - 1 for independent values (Atas et al. 2013)."""
    random, error = htsr.spacing_ratio(np.linalg.svd(noise(900, 600), compute_uv=False)[::-1] ** 2)
    assert abs(random - 0.5307) < 3 * error < 0.05
    independent, error = htsr.spacing_ratio(np.sort(np.random.default_rng(0).random(3000)))
    assert abs(independent - (2 * np.log(2) - 1)) < 3 * error


def test_a_truncated_tail_is_told_from_a_pure_one() -> None:
    rng = np.random.default_rng(1)
    pure = np.sort((1 - rng.random(3000)) ** (-1 / 1.5))
    cut = pure[rng.random(3000) < np.exp(-pure / 4)]
    fits = []
    for values in (pure, cut):
        alpha = float(exponents(np.log(values))[0])
        tail = Tail(alpha, 0.1, float(values[0]), 0.0, values.size, 0)
        fits.append(htsr.heavy_tail_metrics([], values, tail))
    assert fits[0].tpl_pvalue is not None and fits[1].tpl_pvalue is not None
    assert fits[0].tpl_pvalue > 0.05 > 1e-3 > fits[1].tpl_pvalue
    assert fits[1].tpl_cutoff is not None and 2 < fits[1].tpl_cutoff < 8
    assert fits[1].tpl_alpha == pytest.approx(2.5, abs=0.5)


@pytest.mark.parametrize("alpha", [1.7, 2.5, 4.0])
def test_the_p_value_of_a_truncation_has_its_level_at_every_exponent(alpha: float) -> None:
    """400 pure tails of 80 values: 20 below 0.05 are expected, outside 6 to 38 with a chance of 0.02 %."""
    rng = np.random.default_rng(int(10 * alpha))
    draws = (1 - rng.random((400, 80))) ** (-1 / (alpha - 1))
    below = sum(truncation_pvalue(values) < 0.05 for values in draws)
    assert 6 <= below <= 38
    normal = (1 - rng.random((60, 3000))) ** (-1 / (alpha - 1))  # beyond the simulated sizes
    assert 0.2 < np.mean([truncation_pvalue(values) < 0.5 for values in normal]) < 0.8


def test_alpha_over_xmin_holds_the_chosen_start() -> None:
    sp = strati.spectrum(noise(120, 80) + np.outer(noise(120, 1, 1), noise(1, 80, 2)))
    starts, alphas, errors = alpha_over_xmin(sp.eigenvalues)
    assert sp.tail is not None
    place = int(np.argmin(np.abs(starts - sp.tail.xmin)))
    assert alphas[place] == pytest.approx(sp.tail.alpha) and errors[place] == pytest.approx(
        sp.tail.formal_stderr
    )
    pytest.importorskip("matplotlib")
    axes = sp.plot("alpha").axes[0]
    assert axes.get_xlabel() == "xmin" and axes.get_ylabel() == "alpha"


def test_slices_of_a_kernel_have_no_numbers_of_one_matrix() -> None:
    scan = strati.scan({"conv1.weight": np.random.default_rng(0).normal(size=(16, 12, 3, 3))}, htsr=True)
    (row,) = scan.to_dict()["layers"]
    assert row["traps"] is None and row["alpha_farms"] is None and row["alpha_hill"] is not None
