"""Change points: kinks are found and covered, smooth curves and correlated noise raise few alarms."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from strati.tracking.change_points import find_changes

Curve = Callable[[np.ndarray], np.ndarray]

SMOOTH: dict[str, Curve] = {
    "constant rate": lambda v: v,
    "square root": np.sqrt,
    "power law": lambda v: (v + 0.02) ** -0.5,
    "exponential": lambda v: np.exp(-v / 0.2),
    "two exponentials": lambda v: 0.6 * np.exp(-v / 0.03) + 0.4 * np.exp(-v / 0.5),
    "logistic": lambda v: 1 / (1 + np.exp(-(v - 0.4) / 0.1)),
    "logarithm": lambda v: np.log1p(50 * v),
    "arctangent": lambda v: np.arctan(8 * (v - 0.3)),
}
EVEN = np.arange(60) * 50.0
LOGARITHMIC = np.append(0.0, np.geomspace(1, 10_000, 39))


def ar1(rng: np.random.Generator, n: int, memory: float) -> np.ndarray:
    noise = rng.normal(size=n)
    for i in range(1, n):
        noise[i] = memory * noise[i - 1] + np.sqrt(1 - memory**2) * noise[i]
    return noise


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_curves_raise_few_alarms(name: str) -> None:
    """Level 0.05, 60 points, 2 % noise: at most 2 alarms in 6 series (a rate of 0.05 exceeds that once in 450 runs)."""
    curve = SMOOTH[name](EVEN / EVEN[-1])
    noise = [0.02 * np.ptp(curve) * np.random.default_rng(seed).normal(size=EVEN.size) for seed in range(6)]
    assert sum(bool(find_changes(EVEN, curve + errors)) for errors in noise) <= 2


@pytest.mark.parametrize("kind", ["random walk", "AR(0.9)", "noise that grows tenfold"])
def test_correlated_and_unequal_noise_raises_few_alarms(kind: str) -> None:
    """Level 0.05: at most 3 alarms in 12 series of 30 points (a rate of 0.05 exceeds that once in 450 runs)."""
    steps = EVEN[:30]
    alarms = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        normal = rng.normal(size=steps.size)
        noise = {
            "random walk": np.cumsum(normal),
            "AR(0.9)": ar1(rng, steps.size, 0.9),
            "noise that grows tenfold": normal * np.geomspace(1, 10, steps.size),
        }[kind]
        alarms += bool(find_changes(steps, noise))
    assert alarms <= 3


def test_pvalues_are_corrected_for_the_number_of_series() -> None:
    steps = EVEN[:20]
    alarms = 0
    for seed in range(40):
        alarms += bool(find_changes(steps, np.random.default_rng(seed).normal(size=20), series=50))
    assert alarms <= 1


@pytest.mark.parametrize("memory", [0.0, pytest.param(0.4, marks=pytest.mark.slow)])
def test_kinks_are_found_and_covered(memory: float) -> None:
    """Of 12 series with one kink 10 or more are found; the 95 % interval covers all but two of those."""
    x = np.log(LOGARITHMIC + 1)
    detected = covered = 0
    for seed in range(12):
        rng = np.random.default_rng(1000 + seed)
        at = rng.uniform(3, 6)
        y = 1 + 0.2 * x - 1.0 * np.maximum(0, x - at) + 0.1 * ar1(rng, x.size, memory)
        changes = find_changes(LOGARITHMIC, y, seed=seed)
        detected += bool(changes)
        covered += any(c.low <= np.exp(at) - 1 <= c.high for c in changes)
    assert detected >= 10
    assert covered >= detected - 2


def test_two_kinks() -> None:
    steps = np.arange(60) * 20.0
    x = np.log(steps + 20)
    first, second = np.log(220), np.log(720)
    y = 3 - 3 * np.maximum(0, x - first) + 3 * np.maximum(0, x - second)
    y += np.random.default_rng(3).normal(0, 0.03, 60)
    changes = find_changes(steps, y)
    assert len(changes) == 2
    assert changes[0].low <= 200 <= changes[0].high
    assert changes[1].low <= 700 <= changes[1].high
    assert changes[0].after < -2 < changes[1].after + 0.5


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.floats(-1e300, 1e300)), min_size=0, max_size=16),
    st.integers(0, 100),
)
def test_any_series_is_accepted(values: list[float | None], start: int) -> None:
    steps = [start + 10 * i for i in range(len(values))]
    for change in find_changes(steps, values):
        assert change.low <= change.step <= change.high
        assert 0 <= change.pvalue <= 0.05


def test_repeated_steps_and_missing_values() -> None:
    steps = [*range(0, 200, 10), *range(100, 400, 10)]
    y: list[float | None] = [1.0 if s < 150 else 1 - (s - 150) / 50 for s in steps]
    y[3] = None
    changes = find_changes(steps, y)
    assert changes and any(c.low <= 150 <= c.high for c in changes)


def test_a_constant_or_short_series_has_no_change() -> None:
    assert find_changes(range(20), [1.0] * 20) == ()
    assert find_changes([0, 1], [1.0, 2.0]) == ()


def test_a_long_series_is_averaged_and_its_kink_is_found() -> None:
    steps = np.arange(1000.0)
    y = np.maximum(0, steps - 400) / 100 + np.random.default_rng(0).normal(0, 0.1, 1000)
    changes = find_changes(steps, y)
    assert any(c.low <= 400 <= c.high and c.high - c.low < 200 for c in changes)


def test_slopes_are_those_of_the_series() -> None:
    """Slopes are per unit of ln(step + first spacing), in the units of the series."""
    x = np.log(LOGARITHMIC + 1)
    y = 100 * (0.2 * x - 1.2 * np.maximum(0, x - 5)) + np.random.default_rng(0).normal(0, 2, x.size)
    (change,) = find_changes(LOGARITHMIC, y)
    assert change.before == pytest.approx(20, rel=0.2)
    assert change.after == pytest.approx(-100, rel=0.1)


def test_a_turn_is_found_in_twenty_points() -> None:
    """A slope that turns from -0.5 to 0.5 per ln(step), noise 0.1: found in more than 85 % of calibrated runs."""
    steps = np.append(0.0, np.geomspace(1, 10_000, 19))
    x = np.log(steps + 1)
    curve = -0.5 * x + np.maximum(0, x - 4.6)
    noise = [0.1 * np.random.default_rng([5, seed]).normal(size=20) for seed in range(10)]
    assert sum(bool(find_changes(steps, curve + errors)) for errors in noise) >= 7


def test_losses_of_real_trainings_raise_no_alarm() -> None:
    """Six networks on digits: their losses fall by a factor of ten and more, but without a kink."""
    x, y = load_digits(return_X_y=True)
    alarms = 0
    for solver, rate in (("adam", 1e-3), ("sgd", 0.05)):
        for seed in range(3):
            network = MLPClassifier(
                (20,), solver=solver, learning_rate_init=rate, max_iter=60, random_state=seed, tol=0.0
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                losses = network.fit(x[:600] / 16, y[:600]).loss_curve_
            alarms += bool(find_changes(range(len(losses)), losses))
    assert alarms == 0
