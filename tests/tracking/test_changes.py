"""Breaks of series: known ones are found and covered, series without any stay quiet, odd runs do no harm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strati.tracking.changes import find_changes


def ar1(rng, n, memory):
    noise = rng.normal(size=n)
    for i in range(1, n):
        noise[i] = memory * noise[i - 1] + np.sqrt(1 - memory**2) * noise[i]
    return noise


@pytest.mark.parametrize("memory", [0.0, 0.5])
def test_false_alarms(memory):
    """Level 0.05 over 120 straight series: at most 14 alarms (a rate of 0.05 exceeds that once in a thousand runs)."""
    steps = np.arange(30) * 50.0
    x = np.log(steps + 50)
    alarms = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        alarms += bool(find_changes(steps, 2 - 0.3 * x + 0.1 * ar1(rng, 30, memory), seed=seed))
    assert alarms <= 14


def test_the_number_of_series_is_paid_for():
    steps = np.arange(20) * 10.0
    alarms = 0
    for seed in range(150):
        alarms += bool(find_changes(steps, np.random.default_rng(seed).normal(size=20), series=50))
    assert alarms <= 3


@pytest.mark.parametrize("memory", [0.0, 0.4])
def test_known_breaks_are_found_and_covered(memory):
    """Of 60 series with one break 54 or more are found; the 95 % interval covers 50 or more of those found."""
    steps = np.arange(40) * 100.0
    x = np.log(steps + 100)
    found = covered = 0
    for seed in range(60):
        rng = np.random.default_rng(1000 + seed)
        place = rng.uniform(600, 2500)
        at = np.log(place + 100)
        y = 1 + 0.2 * x - 2.0 * np.maximum(0, x - at) + 0.05 * ar1(rng, 40, memory)
        changes = find_changes(steps, y, seed=seed)
        if changes:
            found += 1
            covered += any(c.low <= place <= c.high for c in changes)
    assert found >= 54
    assert covered >= 0.85 * found


def test_two_breaks():
    steps = np.arange(60) * 20.0
    x = np.log(steps + 20)
    a, b = np.log(220), np.log(720)
    y = 3 - 3 * np.maximum(0, x - a) + 3 * np.maximum(0, x - b)
    y += np.random.default_rng(3).normal(0, 0.05, 60)
    changes = find_changes(steps, y)
    assert len(changes) == 2
    assert changes[0].low <= 200 <= changes[0].high
    assert changes[1].low <= 700 <= changes[1].high
    assert changes[0].after < -2 < changes[1].after + 0.5


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=0, max_size=30),
    st.integers(0, 100),
)
def test_any_series_is_taken(values, start):
    steps = [start + 10 * i for i in range(len(values))]
    for change in find_changes(steps, values):
        assert change.low <= change.step <= change.high
        assert 0 <= change.pvalue <= 0.05


def test_repeated_steps_and_missing_values():
    steps = [*range(0, 200, 10), *range(100, 400, 10)]
    y = [1.0 if s < 150 else 1 - (s - 150) / 50 for s in steps]
    y[3] = None
    changes = find_changes(steps, y)
    assert changes and any(c.low <= 150 <= c.high for c in changes)


def test_a_constant_series_has_no_break():
    assert find_changes(range(20), [1.0] * 20) == ()
    assert find_changes([0, 1], [1.0, 2.0]) == ()


def test_each_change_has_its_own_pvalue():
    """A plain break and a faint one in one series: the plain one keeps its small p-value, and each is multiplied."""
    steps = np.arange(60) * 20.0
    x = np.log(steps + 20)
    y = 3 - 3 * np.maximum(0, x - np.log(220)) + 3.6 * np.maximum(0, x - np.log(720))
    y += np.random.default_rng(3).normal(0, 0.1, 60)
    changes = find_changes(steps, y)
    assert len(changes) == 2
    assert changes[0].pvalue != changes[1].pvalue
    more = find_changes(steps, y, series=4)
    for one, four in zip(changes, more, strict=True):
        assert four.pvalue == pytest.approx(4 * one.pvalue, rel=0.3)


def test_strongly_correlated_errors_raise_few_alarms():
    """Neighbours correlated by 0.8, level 0.05: at most 7 alarms in 40 series (exceeded once in 600 runs)."""
    steps = np.arange(30) * 50.0
    alarms = sum(bool(find_changes(steps, ar1(np.random.default_rng(seed), 30, 0.8))) for seed in range(40))
    assert alarms <= 7
