r"""Where a series over training steps changes its course, how sure that is, and between which steps it happened.

A series is fitted by straight lines that join, in :math:`x = \ln(\text{step} + \text{first spacing})`:
:math:`y = a + b x + \sum_k c_k \max(0, x - \tau_k)`. A break at :math:`\tau` is worth
:math:`T = n \ln(\mathrm{RSS}_0 / \mathrm{RSS}_1)`, the largest over all :math:`\tau`; how large ``T`` gets without
any break is simulated for the steps at hand, with errors as correlated as the residuals (an AR(1) process). Breaks are
added one at a time while their p-value, corrected for the number of series, is below the level. The interval holds the
:math:`\tau` whose ``T`` is within the chi-squared quantile of the best one, widened for correlated errors and to the
checkpoints on either side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strati.rng import stream

if TYPE_CHECKING:
    from strati.types import FloatArray

LEAST = 8
"""Fewer points than this show no break: two lines and their joint leave nothing to judge by."""

SIMULATIONS = 1500
_MOST = 3  # breaks of one series
_EDGE = 2  # points on either side of a break
_GRID = 60  # places where a break is looked for
_TAIL = 0.1  # share of the simulated values whose exponential tail gives smaller p-values
_QUANTILE = 3.841  # of chi-squared with one degree of freedom, 95 %


@dataclass(frozen=True)
class Change:
    """A break of a series.

    Attributes:
        step: Where the lines join.
        low: Begin of the 95 % interval for it.
        high: Its end.
        pvalue: Chance of such a break in a series without any, corrected for the number of series looked at.
        before: Slope before, per unit of ``ln(step + first spacing)``.
        after: Slope after.
    """

    step: float
    low: float
    high: float
    pvalue: float
    before: float
    after: float


def find_changes(
    steps: Sequence[float] | FloatArray,
    values: Sequence[float | None] | FloatArray,
    *,
    level: float = 0.05,
    series: int = 1,
    seed: int = 0,
) -> tuple[Change, ...]:
    """The breaks of one series, in order of their steps.

    Args:
        steps: Training steps, rising; repeated ones (a restarted run) are averaged.
        values: The series; ``None`` and NaN are left out.
        level: Chance of a false alarm over all series.
        series: How many series are looked at together; p-values are multiplied by it (Bonferroni).
        seed: Random seed of the simulation.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> steps = np.arange(0, 4000, 100.0)
        >>> y = np.where(steps < 1500, 1.0, 1.0 - (steps - 1500) / 1000) + rng.normal(0, 0.02, steps.size)
        >>> (found,) = find_changes(steps, y)[:1]
        >>> found.low <= 1500 <= found.high, found.pvalue < 0.05
        (True, True)
    """
    x, y, first = _prepared(steps, values)
    if x.size < LEAST or np.ptp(y) == 0:
        return ()
    places: list[float] = []
    pvalues: list[float] = []
    grid = _grid(x)
    if grid.size == 0:
        return ()
    memory = _memory(x, y, grid)
    for number in range(_MOST):
        base = _design(x, places)
        if x.size - base.shape[1] - 2 < 2:
            break
        gains = _gains(base, _hinges(x, grid), y)
        best = int(np.argmax(gains))
        trial = _refined(x, y, grid, [*places, float(grid[best])])
        gain = x.size * math.log(max(_rss(base, y), 1e-300) / max(_rss(_design(x, trial), y), 1e-300))
        chance = min(1.0, series * _pvalue(gain, x, places, grid, memory, seed + number))
        if chance > level:
            break
        places, pvalues = trial, [*pvalues, chance]
    return _described(x, y, places, pvalues, memory, first)


def _prepared(
    steps: Sequence[float] | FloatArray, values: Sequence[float | None] | FloatArray
) -> tuple[FloatArray, FloatArray, float]:
    """``x``, ``y`` and the first spacing; repeated steps averaged, what is not defined left out."""
    t = np.asarray(steps, float)
    y = np.asarray([np.nan if v is None else v for v in values], float)
    good = np.isfinite(t) & np.isfinite(y)
    t, y = t[good], y[good]
    unique, place = np.unique(t, return_inverse=True)
    if unique.size < 2:
        return unique, y[: unique.size], 1.0
    mean = np.bincount(place, weights=y) / np.bincount(place)
    first = float(unique[1] - unique[0])
    return np.log(unique - min(float(unique[0]), 0.0) + first), mean, first


def _grid(x: FloatArray) -> FloatArray:
    inner = x[_EDGE:-_EDGE] if x.size > 2 * _EDGE else x[:0]
    if inner.size <= 1:
        return inner
    fine = np.sort(np.concatenate([inner, (inner[1:] + inner[:-1]) / 2]))
    return fine if fine.size <= _GRID else fine[np.linspace(0, fine.size - 1, _GRID).astype(int)]


def _hinges(x: FloatArray, places: Sequence[float] | FloatArray) -> FloatArray:
    found: FloatArray = np.maximum(0.0, x[:, None] - np.asarray(places, float)[None, :])
    return found


def _design(x: FloatArray, places: Sequence[float]) -> FloatArray:
    return np.column_stack([np.ones_like(x), x, _hinges(x, sorted(places))])


def _rss(design: FloatArray, y: FloatArray) -> float:
    left = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    return float(left @ left)


def _projected(base: FloatArray, hinges: FloatArray) -> FloatArray:
    """Unit vectors of what each hinge adds to the base; zero where it adds nothing."""
    q: FloatArray = np.linalg.qr(base)[0]
    rest = hinges - q @ (q.T @ hinges)
    length = np.linalg.norm(rest, axis=0)
    ok = length > 1e-9 * (1e-300 + np.linalg.norm(hinges, axis=0))
    return np.where(ok, rest / np.where(ok, length, 1), 0.0)


def _gains(base: FloatArray, hinges: FloatArray, y: FloatArray) -> FloatArray:
    """``n ln(RSS_0 / RSS_1)`` for one more hinge at each place; ``y`` may be several series in columns."""
    q: FloatArray = np.linalg.qr(base)[0]
    left = y - q @ (q.T @ y)
    total = np.sum(left**2, axis=0)
    saved = (_projected(base, hinges).T @ left) ** 2
    share = np.clip(saved / np.where(total > 0, total, 1), 0, 1 - 1e-12)
    found: FloatArray = -base.shape[0] * np.log1p(-share)
    return found


def _refined(x: FloatArray, y: FloatArray, grid: FloatArray, places: list[float]) -> list[float]:
    """Breaks moved one after the other to where they fit best, given the others."""
    for _ in range(4):
        before = list(places)
        for k in range(len(places)):
            others = places[:k] + places[k + 1 :]
            free = grid[np.all(np.abs(grid[:, None] - np.asarray(others)[None, :]) > 1e-12, axis=1)]
            gains = _gains(_design(x, others), _hinges(x, free), y)
            places[k] = float(free[int(np.argmax(gains))])
        if places == before:
            break
    return sorted(places)


def _memory(x: FloatArray, y: FloatArray, grid: FloatArray) -> float:
    """Correlation of neighbouring errors about the richest fit, so that breaks do not pass for it.

    What the fit takes away from it is put back, about ``(p / n) (1 + rho)`` for ``p`` fitted numbers, and a standard
    error on top: taken too small, it makes breaks of slow noise.
    """
    places: list[float] = []
    for _ in range(_MOST):
        if x.size < 2 * len(places) + LEAST:
            break
        gains = _gains(_design(x, places), _hinges(x, grid), y)
        places = _refined(x, y, grid, [*places, float(grid[int(np.argmax(gains))])])
    design = _design(x, places)
    left = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    total = float(left @ left)
    if total <= 0:
        return 0.0
    raw = float(left[1:] @ left[:-1]) / total
    fitted = (design.shape[1] + len(places)) / x.size
    likely = min(max(raw + fitted * (1 + raw), 0.0), 0.95)
    return float(min(likely + math.sqrt((1 - likely**2) / x.size), 0.95))


def _pvalue(
    gain: float, x: FloatArray, places: Sequence[float], grid: FloatArray, memory: float, seed: int
) -> float:
    """Chance that noise alone gains as much by one more break, by simulation; beyond it by its exponential tail."""
    rng = stream(seed, "changes", str(x.size), f"{memory:.3f}")
    noise = rng.normal(size=(x.size, SIMULATIONS))
    for row in range(1, x.size):
        noise[row] = memory * noise[row - 1] + math.sqrt(1 - memory**2) * noise[row]
    base = _design(x, places)
    best = np.sort(_gains(base, _hinges(x, grid), noise).max(axis=0))
    count = int(np.sum(best >= gain))
    top = best[-int(_TAIL * SIMULATIONS) :]
    if count >= 20:
        return (count + 1) / (SIMULATIONS + 1)
    scale = float(np.mean(top - top[0]))
    return float(min(1.0, _TAIL * math.exp(-max(0.0, gain - float(top[0])) / max(scale, 1e-12))))


def _described(
    x: FloatArray,
    y: FloatArray,
    places: list[float],
    pvalues: list[float],
    memory: float,
    first: float,
) -> tuple[Change, ...]:
    if not places:
        return ()
    design = _design(x, places)
    slopes = np.cumsum(np.linalg.lstsq(design, y, rcond=None)[0][1:])
    wide = _QUANTILE * (1 + memory) / (1 - memory)
    fine = np.linspace(x[1], x[-2], 400)
    found = []
    for k, place in enumerate(sorted(places)):
        others = [p for p in places if p != place]
        gains = _gains(_design(x, others), _hinges(x, fine), y)
        own = float(_gains(_design(x, others), _hinges(x, [place]), y)[0])
        inside = fine[gains >= max(own, float(gains.max())) - wide]
        reach = [*inside, place]
        # Between two checkpoints nothing was seen: the interval ends at checkpoints.
        low = float(x[max(int(np.searchsorted(x, min(reach), "right")) - 1, 0)])
        high = float(x[min(int(np.searchsorted(x, max(reach), "left")), x.size - 1)])
        found.append(
            Change(
                _step(place, first),
                _step(low, first),
                _step(high, first),
                max(pvalues),
                float(slopes[k]),
                float(slopes[k + 1]),
            )
        )
    return tuple(found)


def _step(x: float, first: float) -> float:
    return float(round(math.exp(x) - first, 6))
