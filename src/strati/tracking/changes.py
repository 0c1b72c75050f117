r"""Where a series over training steps changes its course, how sure that is, and between which steps it happened.

A series is fitted by straight lines that join, in :math:`x = \ln(\text{step} + \text{first spacing})`: :math:`y = a +
b x + \sum_k c_k \max(0, x - \tau_k)`. A break at :math:`\tau` is worth :math:`T = n \ln(\mathrm{RSS}_0 /
\mathrm{RSS}_1)`, the largest over all :math:`\tau`; how large ``T`` gets without any break is simulated for the steps
at hand, with errors that are correlated from step to step (an AR(1) process). How strongly is not known exactly from
few points: the p-value is the mean over all correlations, each weighted by how well it explains that of the residuals
about the richest fit, which is simulated too. Breaks are added, one at a time or two where neither alone is plain,
while their p-values, corrected for the number of series, are below the level; in the end each break is judged again,
given the others, and left out if they explain it. That is the p-value it carries. The interval holds the :math:`\tau`
whose ``T`` is within the chi-squared quantile of the best one, widened for correlated errors and to the checkpoints
on either side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
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
_MEMORIES = (0.0, 0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.96)  # correlations of neighbouring errors
_PAIR = 0.1  # of the level, for two breaks at once
_TRIALS = 60  # simulated series for what the residuals show of them
_QUANTILE = 3.841  # of chi-squared with one degree of freedom, 95 %


@dataclass(frozen=True)
class ChangePoint:
    """A break of a series.

    Attributes:
        step: Where the lines join.
        low: Begin of the 95 % interval for it.
        high: Its end.
        pvalue: Chance that noise alone shows such a break, given the other breaks of the series; corrected for the
            number of series looked at.
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
) -> tuple[ChangePoint, ...]:
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
    grid = _grid(x)
    if grid.size == 0:
        return ()
    memory = _memory(x, y, grid)

    def chance(places: list[float], others: list[float], number: int) -> float:
        gain = x.size * math.log(
            max(_rss(_design(x, others), y), 1e-300) / max(_rss(_design(x, places), y), 1e-300)
        )
        return min(1.0, series * _pvalue(gain, x, others, grid, memory, seed + number))

    def each(places: list[float]) -> list[float]:
        return [chance(places, places[:k] + places[k + 1 :], k) for k in range(len(places))]

    places: list[float] = []
    while len(places) < _MOST and x.size - 2 * len(places) - 4 >= 2:
        trial = _with_one_more(x, y, grid, places)
        if chance(trial, places, len(places)) > level:
            # Down and up again: two breaks may be plain where neither alone is. Both must be, at a stricter level,
            # since there are many more pairs than places.
            if len(places) + 2 > _MOST or x.size - 2 * len(places) - 6 < 2:
                break
            trial = _with_one_more(x, y, grid, trial)
            if chance(trial, places, len(places)) > _PAIR * level or max(each(trial)) > _PAIR * level:
                break
        places = trial
    pvalues: list[float] = []
    while places:
        pvalues = each(places)
        worst = int(np.argmax(pvalues))
        if pvalues[worst] <= level:
            break
        places = _refined(x, y, grid, places[:worst] + places[worst + 1 :])
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


def _with_one_more(x: FloatArray, y: FloatArray, grid: FloatArray, places: list[float]) -> list[float]:
    best = int(np.argmax(_gains(_design(x, places), _hinges(x, grid), y)))
    return _refined(x, y, grid, [*places, float(grid[best])])


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


def _memory(x: FloatArray, y: FloatArray, grid: FloatArray) -> FloatArray:
    """How likely each of the correlations :data:`_MEMORIES` is, given that of the residuals about the richest fit."""
    seen = _correlation(x, y, grid)
    if seen is None:
        return _surely(0)
    mean, spread = _usual_correlations(x.tobytes(), grid.tobytes())
    weight = np.exp(-0.5 * ((seen - mean) / spread) ** 2) / spread
    total = float(weight.sum())
    if total <= 0:  # beyond anything simulated: the nearest
        return _surely(int(np.argmin(np.abs(seen - mean))))
    found: FloatArray = weight / total
    return found


def _surely(place: int) -> FloatArray:
    weight = np.zeros(len(_MEMORIES))
    weight[place] = 1.0
    return weight


def _correlation(x: FloatArray, y: FloatArray, grid: FloatArray) -> float | None:
    """Of neighbouring residuals about the fit with the most breaks, so that no break passes for correlation."""
    places: list[float] = []
    for _ in range(_MOST):
        if x.size < 2 * len(places) + LEAST:
            break
        gains = _gains(_design(x, places), _hinges(x, grid), y)
        places = [*places, float(grid[int(np.argmax(gains))])]
    design = _design(x, _refined(x, y, grid, places))
    left = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    total = float(left @ left)
    return float(left[1:] @ left[:-1]) / total if total > 0 else None


@lru_cache(maxsize=64)
def _usual_correlations(x: bytes, grid: bytes) -> tuple[FloatArray, FloatArray]:
    """Mean and standard deviation of that correlation, by simulation, for each of :data:`_MEMORIES`."""
    at, places = np.frombuffer(x), np.frombuffer(grid)
    rng = stream(0, "correlations", str(at.size))
    mean, spread = [], []
    for memory in _MEMORIES:
        noise = _correlated(rng.normal(size=(at.size, _TRIALS)), memory)
        found = [_correlation(at, noise[:, k], places) or 0.0 for k in range(_TRIALS)]
        mean.append(np.mean(found))
        spread.append(np.std(found) + 1e-6)
    return np.array(mean), np.array(spread)


def _correlated(noise: FloatArray, memory: float) -> FloatArray:
    """Independent normal numbers, in place as an AR(1) process down the rows."""
    for row in range(1, len(noise)):
        noise[row] = memory * noise[row - 1] + math.sqrt(1 - memory**2) * noise[row]
    return noise


_UNLIKELY = 1e-5
"""A correlation less likely than this is not simulated."""


def _pvalue(
    gain: float,
    x: FloatArray,
    places: Sequence[float],
    grid: FloatArray,
    memory: FloatArray,
    seed: int,
) -> float:
    """Chance that noise alone gains as much by one more break, over the correlations that are likely."""
    total = 0.0
    for weight, value in zip(memory, _MEMORIES, strict=True):
        if weight < _UNLIKELY:
            total += float(weight)  # counted as if it explained all
        else:
            total += float(weight) * _chance(gain, x, places, grid, value, seed)
    return min(1.0, total)


def _chance(
    gain: float, x: FloatArray, places: Sequence[float], grid: FloatArray, memory: float, seed: int
) -> float:
    """The same for one correlation, by simulation; beyond it by its exponential tail."""
    best = _largest_gains(x.tobytes(), tuple(places), grid.tobytes(), memory, seed)
    count = int(np.sum(best >= gain))
    top = best[-int(_TAIL * SIMULATIONS) :]
    if count >= 20:
        return (count + 1) / (SIMULATIONS + 1)
    scale = float(np.mean(top - top[0]))
    return float(min(1.0, _TAIL * math.exp(-max(0.0, gain - float(top[0])) / max(scale, 1e-12))))


@lru_cache(maxsize=512)
def _largest_gains(x: bytes, places: tuple[float, ...], grid: bytes, memory: float, seed: int) -> FloatArray:
    """Sorted gains of the best break in simulated noise; kept, as the series of a run share their steps."""
    at = np.frombuffer(x)
    noise = _noise(at.size, memory, seed)
    found: FloatArray = np.sort(
        _gains(_design(at, places), _hinges(at, np.frombuffer(grid)), noise).max(axis=0)
    )
    return found


@lru_cache(maxsize=16)
def _noise(size: int, memory: float, seed: int) -> FloatArray:
    rng = stream(seed, "changes", str(size), f"{memory:.3f}")
    return _correlated(rng.normal(size=(size, SIMULATIONS)), memory)


def _described(
    x: FloatArray,
    y: FloatArray,
    places: list[float],
    pvalues: list[float],
    memory: FloatArray,
    first: float,
) -> tuple[ChangePoint, ...]:
    if not places:
        return ()
    design = _design(x, places)
    slopes = np.cumsum(np.linalg.lstsq(design, y, rcond=None)[0][1:])
    usual = float(memory @ _MEMORIES)
    wide = _QUANTILE * (1 + usual) / (1 - usual)
    fine = np.linspace(x[1], x[-2], 400)
    found = []
    for k, place in enumerate(places):  # in order, as their p-values are
        others = [p for p in places if p != place]
        gains = _gains(_design(x, others), _hinges(x, fine), y)
        own = float(_gains(_design(x, others), _hinges(x, [place]), y)[0])
        inside = fine[gains >= max(own, float(gains.max())) - wide]
        reach = [*inside, place]
        # Between two checkpoints nothing was seen: the interval ends at checkpoints.
        low = float(x[max(int(np.searchsorted(x, min(reach), "right")) - 1, 0)])
        high = float(x[min(int(np.searchsorted(x, max(reach), "left")), x.size - 1)])
        found.append(
            ChangePoint(
                _step(place, first),
                _step(low, first),
                _step(high, first),
                pvalues[k],
                float(slopes[k]),
                float(slopes[k + 1]),
            )
        )
    return tuple(found)


def _step(x: float, first: float) -> float:
    return float(round(math.exp(x) - first, 6))
