r"""Tests of whether the tail is a power law: goodness of fit, and comparison with rival laws.

The p-value is Clauset's semi-parametric bootstrap: samples that follow the data below :math:`x_\min` and the
fitted power law above it are fitted anew, :math:`x_\min` included; ``p`` is the share whose distance exceeds the
data's. Below 0.1 the power law is implausible. Rivals on :math:`[x_\min, \infty)` are compared by Vuong's
normalised log-likelihood ratio: positive favours the power law, and ``p`` is the chance of a ratio as far from
zero if both were equally close. The truncated power law contains the power law and has a test of its own
(:func:`truncation_pvalue`). Samples are drawn from the seed alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.rng import stream
from strati.spectra.tails import Tail, fit_tail

if TYPE_CHECKING:
    from strati.core.results import FloatArray

_SIMULATED = 2000  # values up to which the law of the truncation statistic is simulated
_TRUNCATION_DRAWS = 1999


@dataclass(frozen=True)
class Goodness:
    """What the bootstrap and the rivals say of a tail.

    Attributes:
        pvalue: Share of synthetic samples that fit worse than the data.
        samples: Number of them.
        alternatives: Rival -> ``{"ratio", "pvalue", "parameters"}``; ``ratio`` is positive where the power law
            fits better.
    """

    pvalue: float
    samples: int
    alternatives: dict[str, dict[str, Any]]


def judge_tail(values: FloatArray, tail: Tail, *, samples: int = 100, seed: int = 0) -> Goodness:
    """Test a fitted tail.

    Args:
        values: The ascending positive eigenvalues that the tail was fitted to.
        tail: Its fit.
        samples: Bootstrap samples; the p-value's error is about ``0.5/sqrt(samples)``.
        seed: Seed of the bootstrap.

    Examples:
        >>> x = np.sort(np.random.default_rng(0).pareto(1.5, size=300) + 1)
        >>> verdict = judge_tail(x, fit_tail(x), samples=50)
        >>> verdict.pvalue > 0.1, sorted(verdict.alternatives)
        (True, ['exponential', 'lognormal', 'stretched_exponential', 'truncated_power_law'])
    """
    rng = stream(seed, "bootstrap")
    body, share = values[: tail.start], tail.size / values.size
    worse = 0
    for _ in range(samples):
        count = int(rng.binomial(values.size, share)) if body.size else values.size
        drawn = tail.xmin * (1 - rng.random(count)) ** (-1 / (tail.alpha - 1))
        if count < values.size:
            drawn = np.concatenate([rng.choice(body, values.size - count), drawn])
        fitted = fit_tail(np.sort(drawn), error=False)
        worse += fitted is not None and fitted.ks_distance >= tail.ks_distance
    return Goodness(worse / samples, samples, compare_laws(values[tail.start :], tail))


def compare_laws(x: FloatArray, tail: Tail) -> dict[str, dict[str, Any]]:
    """Fit each rival to the tail by maximum likelihood and compare it with the power law.

    Args:
        x: The eigenvalues in the tail, ascending.
        tail: The power law fitted to them.
    """
    from scipy.special import erfc

    y = x / tail.xmin
    power = np.log(tail.alpha - 1) - tail.alpha * np.log(y)
    comparisons: dict[str, dict[str, Any]] = {}
    for name, fit in _RIVALS.items():
        rival = fit(y, tail.alpha)
        if rival is None:
            comparisons[name] = {"ratio": None, "pvalue": None, "parameters": None}
            continue
        logs, parameters = rival
        difference = power - logs
        total, spread = float(difference.sum()), float(difference.std())
        if name == "truncated_power_law":
            pvalue = truncation_pvalue(y)
        else:
            pvalue = float(erfc(abs(total) / (np.sqrt(2 * y.size) * spread))) if spread > 0 else 1.0
        ratio = total / (np.sqrt(y.size) * spread) if spread > 0 else 0.0
        comparisons[name] = {"ratio": float(ratio), "pvalue": pvalue, "parameters": parameters}
    return comparisons


def truncation_pvalue(y: FloatArray) -> float:
    r"""Chance that a pure power law has so light an end: the p-value of a truncation.

    The logarithms of a power law are exponential, so :math:`T = \frac1n \sum (\ln y_i / \overline{\ln y})^3` has a law
    that does not depend on the exponent; a cut-off makes it smaller. The likelihood ratio of the truncated law has no
    such law: for exponents up to 3 the variance of its score is infinite. Beyond 2,000 values T is normal with mean 6
    and variance 360 / n.

    Args:
        y: Values over the start of the tail, 1 or more.
    """
    logs = np.log(y)
    mean = float(logs.mean())
    if not mean > 0:
        return 1.0
    statistic = float(np.mean((logs / mean) ** 3))
    if y.size > _SIMULATED:
        from scipy.stats import norm

        return float(norm.cdf((statistic - 6) / np.sqrt(360 / y.size)))
    null = _truncation_null(y.size)
    return (1 + int(np.searchsorted(null, statistic, side="right"))) / (null.size + 1)


@lru_cache(maxsize=64)
def _truncation_null(size: int) -> FloatArray:
    """The statistic of exponential samples, ascending."""
    draws = stream(0, "truncation", str(size)).exponential(size=(_TRUNCATION_DRAWS, size))
    return np.sort(np.mean((draws / draws.mean(axis=1, keepdims=True)) ** 3, axis=1))


def _exponential(y: FloatArray, _: float) -> tuple[FloatArray, dict[str, float]] | None:
    mean = float(np.mean(y - 1))
    if mean <= 0:
        return None
    return -np.log(mean) - (y - 1) / mean, {"rate": 1 / mean}


def _stretched(y: FloatArray, _: float) -> tuple[FloatArray, dict[str, float]] | None:
    """Density ``b r y^(b-1) exp(-r (y^b - 1))`` on ``y >= 1``; for given ``b`` the best ``r`` is explicit."""
    logs = np.log(y)

    def likelihood(shape: float) -> FloatArray:
        grown = np.expm1(shape * logs)
        rate = 1 / grown.mean()
        dense: FloatArray = np.log(shape * rate) + (shape - 1) * logs - rate * grown
        return dense

    shape = _best(lambda s: float(likelihood(np.exp(s)).sum()), np.log(1e-3), np.log(20.0))
    if shape is None:
        return None
    shape = float(np.exp(shape))
    return likelihood(shape), {"shape": shape, "rate": float(1 / np.expm1(shape * logs).mean())}


def _truncated(y: FloatArray, alpha: float) -> tuple[FloatArray, dict[str, float]] | None:
    """Density proportional to ``y^-a exp(-r y)`` on ``y >= 1``; the constant by quadrature in ``ln y``."""
    from scipy.optimize import minimize

    logs = np.log(y)
    grid = np.linspace(0, 60, 2401)
    weights = np.where(np.arange(grid.size) % 2, 4.0, 2.0) * grid[1] / 3  # Simpson's rule
    weights[[0, -1]] /= 2

    def likelihood(a: float, r: float) -> FloatArray:
        exponent = (1 - a) * grid - r * np.exp(np.minimum(grid, 700.0))
        top = exponent.max()
        constant = top + np.log(np.sum(weights * np.exp(exponent - top)))
        dense: FloatArray = -a * logs - r * y - constant
        return dense

    def loss(p: FloatArray) -> float:
        if not 1 < p[0] < 100:
            return 1e12
        return -float(likelihood(p[0], float(np.exp(np.clip(p[1], -60, 10)))).sum())

    starts = [
        (alpha, -20.0),
        (max(alpha - 1, 1.1), float(np.log(1 / y[-1]))),
        (1.1, float(np.log(1 / np.mean(y)))),
    ]
    fits = [
        minimize(loss, np.array(s), method="Nelder-Mead", options={"xatol": 1e-5, "fatol": 1e-7})
        for s in starts
    ]
    best = min(fits, key=lambda f: float(f.fun))
    a, r = float(best.x[0]), float(np.exp(np.clip(best.x[1], -60, 10)))
    return likelihood(a, r), {"alpha": a, "rate": r}


def _lognormal(y: FloatArray, _: float) -> tuple[FloatArray, dict[str, float]] | None:
    """Normal law of ``ln y`` cut off below 0."""
    from scipy.optimize import minimize
    from scipy.special import log_ndtr

    logs = np.log(y)
    if float(logs.std()) <= 0:
        return None

    def likelihood(mean: float, width: float) -> FloatArray:
        dense: FloatArray = (
            -logs
            - np.log(width)
            - 0.5 * np.log(2 * np.pi)
            - 0.5 * ((logs - mean) / width) ** 2
            - log_ndtr(mean / width)
        )
        return dense

    scale = float(logs.std())

    def loss(p: FloatArray) -> float:
        # A very negative mean with a wide law imitates the power law ever better: bounded, as it is no other law.
        if not -200 * scale < p[0] < 200 * scale or abs(p[1]) > 20:
            return 1e12
        return -float(likelihood(float(p[0]), scale * float(np.exp(p[1]))).sum())

    starts = [(float(logs.mean()), 0.0), (-3 * scale, 0.7)]
    fits = [
        minimize(loss, np.array(s), method="Nelder-Mead", options={"xatol": 1e-5, "fatol": 1e-7})
        for s in starts
    ]
    best = min(fits, key=lambda f: float(f.fun))
    mean, width = float(best.x[0]), scale * float(np.exp(best.x[1]))
    return likelihood(mean, width), {"mean": mean, "width": width}


def _best(value: Callable[[float], float], low: float, high: float) -> float | None:
    """Where a smooth function is largest: the best of a grid, then golden section around it."""
    from scipy.optimize import minimize_scalar

    grid = np.linspace(low, high, 24)
    with np.errstate(over="ignore", invalid="ignore"):
        scores = np.array([value(float(g)) for g in grid])
        scores = np.where(np.isfinite(scores), scores, -np.inf)
        best = int(np.argmax(scores))
        if not np.isfinite(scores[best]):
            return None
        around = (float(grid[max(best - 1, 0)]), float(grid[min(best + 1, grid.size - 1)]))
        return float(minimize_scalar(lambda s: -value(s), bounds=around, method="bounded").x)


_RIVALS: dict[str, Callable[[FloatArray, float], tuple[FloatArray, dict[str, float]] | None]] = {
    "truncated_power_law": _truncated,
    "lognormal": _lognormal,
    "exponential": _exponential,
    "stretched_exponential": _stretched,
}
