"""What a plan's network will do: costs added up, checked on combinations that were really measured.

Costs of layers changed together do not just add up. How far they do is measured: random combinations near the plan and
at its budget, and the plan itself, are put into the network. The prediction is the sum times the ratio found there,
with an interval that holds the sampling error and the scatter of that ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from strati.intervene.acting.choose import choose
from strati.intervene.measuring.tally import standard_error

if TYPE_CHECKING:
    from strati.intervene.acting.curves import CostScale, Curve, CurveOption
    from strati.intervene.acting.workshop import Measurement, Workshop
    from strati.types import FloatArray


@dataclass(frozen=True)
class Prediction:
    """A performance and the interval it lies in."""

    performance: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Combination:
    """A choice of one option per layer, what adding up says it costs, and what it did cost."""

    options: tuple[int, ...]
    predicted: float
    measured: float | None = None
    groups: FloatArray | None = None  # costs by groups of examples
    error: float = 0.0  # of the sum


@dataclass(frozen=True)
class Additivity:
    """How measured costs relate to summed ones: ``ratio * summed``, and the scatter of its logarithm around that.

    Where sums are too close to zero to have a ratio (not ``relative``): ``summed + ratio``, and the scatter of that.
    """

    ratio: float
    scatter: float
    relative: bool
    n: int


class Bench:
    """Measures combinations, each once."""

    def __init__(
        self, curves: Sequence[Curve], action: str, scale: CostScale, workshops: Sequence[Workshop]
    ) -> None:
        self.curves, self.action, self.scale = curves, action, scale
        self.workshops = workshops
        self.intact: list[Measurement] = [w.now() for w in workshops]
        self._known: dict[tuple[int, ...], Combination] = {}

    def combination(self, options: Sequence[int]) -> Combination:
        """A combination measured on every network of the study; without networks only added up."""
        key = tuple(options)
        if key not in self._known:
            self._known[key] = self._measured(key)
        return self._known[key]

    def choices(self, options: Sequence[int]) -> dict[str, str]:
        """Layer -> choice."""
        return {c.layer: c.options[o].choice for c, o in zip(self.curves, options, strict=True)}

    def _measured(self, options: tuple[int, ...]) -> Combination:
        summed = added(self.curves, options)
        picked = [c.options[o] for c, o in zip(self.curves, options, strict=True)]
        error = _sampling(picked, 1.0, self.scale, None)
        if not self.workshops:
            return Combination(options, summed, error=error)
        costs, groups = [], []
        for workshop, intact in zip(self.workshops, self.intact, strict=True):
            found = workshop.measure(self.action, self.choices(options))
            own = type(self.scale)(self.scale.name, self.scale.higher_is_better, intact.performance)
            costs.append(own.cost(found.performance) if math.isfinite(found.performance) else math.inf)
            if found.groups is not None and intact.groups is not None:
                groups.append(self.scale.sign() * (found.groups - intact.groups))
        paired = np.mean(groups, axis=0) if len(groups) == len(costs) else None
        return Combination(options, summed, float(np.mean(costs)), paired, error)

    def intact_groups(self) -> FloatArray | None:
        """The intact networks' scores by groups of examples."""
        groups = [m.groups for m in self.intact if m.groups is not None]
        return np.mean(groups, axis=0) if groups and len(groups) == len(self.intact) else None


def added(curves: Sequence[Curve], options: Sequence[int]) -> float:
    """The summed cost of a choice."""
    return float(sum(c.options[o].cost for c, o in zip(curves, options, strict=True)))


def random_choices(
    curves: Sequence[Curve], budget: float, count: int, rng: np.random.Generator
) -> list[tuple[int, ...]]:
    """Different choices near the best one and within the budget: the best under costs multiplied by random factors."""
    sizes = [np.array([o.size for o in c.options]) for c in curves]
    found: dict[tuple[int, ...], None] = {}
    for _ in range(4 * count):
        costs = [np.array([o.careful for o in c.options]) * math.exp(rng.standard_normal()) for c in curves]
        found[choose(costs, sizes, budget).options] = None
        if len(found) == count:
            break
    return list(found)


def additivity(combinations: Sequence[Combination]) -> Additivity:
    """Ratio and scatter of measured against summed costs.

    Examples:
        >>> pairs = [Combination((i,), 1.0 + i, 2.0 * (1.0 + i)) for i in range(3)]
        >>> additivity(pairs).ratio, additivity(pairs).scatter
        (2.0, 0.0)
    """
    known = [c for c in combinations if c.measured is not None and math.isfinite(c.measured)]
    if not known:
        return Additivity(1.0, 0.0, True, 0)
    p = np.array([c.predicted for c in known])
    m = np.array([float(c.measured or 0.0) for c in known])
    n = len(known)
    clear = p > 2.0 * np.array([c.error for c in known])  # sums that noise may have made have no ratio
    if (p > 0).all() and (m > 0).all() and clear.all():
        ratios = np.log(m / p)
        ratio, scatter = math.exp(float(ratios.mean())), float(ratios.std(ddof=1)) if n > 1 else 0.0
        return Additivity(ratio, scatter, True, n)
    off = m - p
    return Additivity(float(off.mean()), float(off.std(ddof=1)) if n > 1 else abs(float(off[0])), False, n)


def predict(
    chosen: Sequence[CurveOption],
    scale: CostScale,
    found: Additivity,
    intact: FloatArray | None,
    level: float,
) -> Prediction:
    """Performance of a choice with its interval, from summed costs."""
    summed = sum(o.cost for o in chosen)
    cost = found.ratio * summed if found.relative else summed + (found.ratio if found.n else 0.0)
    half = float(stats.norm.ppf(0.5 + level / 2)) * _sampling(
        chosen, found.ratio if found.relative else 1.0, scale, intact
    )
    low = high = 0.0
    if found.n > 1:
        wide = float(stats.t.ppf(0.5 + level / 2, found.n - 1)) * math.sqrt(1 + 1 / found.n) * found.scatter
        if found.relative:
            low, high = cost * (1 - math.exp(-wide)), cost * (math.exp(min(wide, 50.0)) - 1)
        else:
            low = high = wide
    return interval(scale, cost, math.hypot(half, low), math.hypot(half, high))


def interval(scale: CostScale, cost: float, low: float, high: float) -> Prediction:
    """A cost with its errors to either side as performances."""
    ends = sorted((scale.performance(cost - low), scale.performance(cost + high)))
    return Prediction(scale.performance(cost), ends[0], ends[1])


def observed(
    combination: Combination, scale: CostScale, intact: FloatArray | None, level: float
) -> Prediction:
    """The measured performance of a combination, with its sampling error."""
    if combination.measured is None:
        return Prediction(None, None, None)
    z = float(stats.norm.ppf(0.5 + level / 2))
    error = None
    if combination.groups is not None and intact is not None:
        error = standard_error(scale.sign() * intact + combination.groups)
    half = z * (error or 0.0)
    return interval(scale, combination.measured, half, half)


def _sampling(
    chosen: Sequence[CurveOption], ratio: float, scale: CostScale, intact: FloatArray | None
) -> float:
    """Standard error of the summed costs and of the intact performance, over groups of examples."""
    groups = [o.groups for o in chosen if o.groups is not None]
    same = len(groups) == len(chosen) and len({len(g) for g in groups}) == 1
    if same and (intact is None or len(intact) == len(groups[0])):
        base = 0.0 if intact is None else scale.sign() * intact
        return standard_error(base + ratio * np.sum(groups, axis=0)) or 0.0
    return ratio * math.sqrt(sum(o.error**2 for o in chosen))


def difference(better: Combination, worse: Sequence[Combination], level: float) -> Mapping[str, float | None]:
    """How much less the first costs than the mean of the others, example by example, and its interval.

    The interval is Student's, of as many values as there are groups of examples.

    Examples:
        >>> one = Combination((0,), 0.0, 1.0, np.array([1.0, 1.0, 1.0]))
        >>> two = Combination((1,), 0.0, 2.0, np.array([1.5, 2.0, 2.5]))
        >>> found = difference(one, [two], 0.95)
        >>> round(found["gain"], 3), round(found["low"], 3)
        (1.0, -0.242)
    """
    measured = [w.measured for w in worse if w.measured is not None]
    if better.measured is None or not measured:
        return {"gain": None, "low": None, "high": None}
    gain = float(np.mean(measured)) - better.measured
    error = None
    if better.groups is not None and all(w.groups is not None for w in worse):
        error = standard_error(np.mean([w.groups for w in worse], axis=0) - better.groups)  # type: ignore[arg-type]
    if error is None:
        return {"gain": gain, "low": None, "high": None}
    assert better.groups is not None
    half = float(stats.t.ppf(0.5 + level / 2, len(better.groups) - 1)) * error
    return {"gain": gain, "low": gain - half, "high": gain + half}
