"""Correlations of weighted points against scipy on the points written out, and the bootstrap's coverage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from strati.interventions.audit.correlations import (
    estimate,
    kendall,
    linear_rmse,
    resamples,
    roc_area,
    spearman,
)


@st.composite
def weighted_points(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = draw(st.integers(3, 30))
    values = st.integers(-4, 4) if draw(st.booleans()) else st.floats(-1e3, 1e3)
    lists = [draw(st.lists(values, min_size=n, max_size=n)) for _ in range(2)]
    counts = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n).filter(lambda c: sum(c) > 2))
    return np.array(lists[0], float), np.array(lists[1], float), np.array(counts, float)


@settings(max_examples=150, deadline=None)
@given(weighted_points())
def test_weighted_statistics_equal_those_of_the_points_written_out(points: tuple[np.ndarray, ...]) -> None:
    x, y, counts = points
    a, b = np.repeat(x, counts.astype(int)), np.repeat(y, counts.astype(int))
    weights = counts[None]
    if np.ptp(a) < 1e-6 or np.ptp(b) < 1e-6:
        return
    assert spearman(x, y, weights)[0] == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-9)
    assert kendall(x, y, weights)[0] == pytest.approx(stats.kendalltau(a, b).statistic, abs=1e-6)
    fit = np.polyval(np.polyfit(a, b, 1), a)
    want = np.sqrt(np.mean((b - fit) ** 2))
    assert linear_rmse(x, y, weights)[0] == pytest.approx(want, rel=1e-5, abs=1e-6 * (1 + np.abs(b).max()))


@settings(max_examples=100, deadline=None)
@given(weighted_points(), st.randoms(use_true_random=False))
def test_roc_area_is_the_mann_whitney_statistic(points: tuple[np.ndarray, ...], chance: object) -> None:
    x, _, counts = points
    label = np.array([chance.random() < 0.5 for _ in x], float)  # type: ignore[attr-defined]
    every = np.repeat(np.stack([x, label]), counts.astype(int), axis=1)
    up, down = every[0][every[1] == 1], every[0][every[1] == 0]
    area = roc_area(x, label, counts[None])[0]
    if len(up) == 0 or len(down) == 0:
        assert np.isnan(area)
    else:
        assert area == pytest.approx(stats.mannwhitneyu(up, down).statistic / (len(up) * len(down)))


def test_a_constant_has_no_correlation() -> None:
    x, y = np.full(5, 0.1), np.arange(5.0)
    ones = np.ones((3, 5))
    assert np.isnan(spearman(x, y, ones)).all() and np.isnan(kendall(x, y, ones)).all()
    assert estimate(spearman(x, y, ones)).value is None


def test_large_samples_are_cut_into_blocks_without_a_difference() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 1300))
    assert kendall(x, y, np.ones((1, 1300)))[0] == pytest.approx(stats.kendalltau(x, y).statistic, abs=1e-6)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    # bivariate normal with r = 0.6: rho_S = 6/pi asin(r/2); 95 % intervals of 200 samples of 60 points.
    # A binomial(200, 0.93) is below 172 with probability under 0.0005.
    truth = 6 / np.pi * np.arcsin(0.3)
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        x = rng.standard_normal(60)
        y = 0.6 * x + 0.8 * rng.standard_normal(60)
        weights = np.vstack([np.ones((1, 60)), resamples(range(60), 300, rng)])
        found = estimate(spearman(x, y, weights))
        assert found.interval is not None
        covered += found.interval[0] <= truth <= found.interval[1]
    assert covered >= 172


def test_clusters_are_drawn_whole() -> None:
    drawn = resamples(["a", "b", "a", "c"], 200, np.random.default_rng(0))
    assert (drawn[:, 0] == drawn[:, 2]).all()
    assert (drawn[:, [0, 1, 3]].sum(1) == 3).all()
