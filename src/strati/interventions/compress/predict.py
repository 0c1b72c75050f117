"""What a plan's network will do on new data.

Where the plan can be put into the network, the prediction is what was measured, corrected for choosing the best of
several noisy measurements, with the sampling error of two samples. Otherwise costs of single layers are added up. They
do not just add up: the sum is multiplied by the ratio of measured to summed costs of combinations that were measured,
and the scatter of that ratio is part of the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from strati.interventions.compress.budget import choose
from strati.interventions.tasks import standard_error

if TYPE_CHECKING:
    from strati.core.results import FloatArray, IntArray
    from strati.interventions.compress.costs import Curve, CurveOption
    from strati.interventions.evaluator import Evaluator
    from strati.interventions.study_config import CostScale
    from strati.interventions.tasks import Measurement


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
    """How measured costs relate to summed ones.

    Where sums are clear of noise (``relative``): ``ratio * summed``, with the scatter of the logarithm of that ratio.
    Otherwise: ``summed + offset``, with the scatter of the offset. ``freedom`` are the scatter's degrees of freedom.
    """

    ratio: float
    offset: float
    scatter: float
    relative: bool
    n: int
    freedom: int


class CombinationEvaluator:
    """Measures combinations, each once."""

    def __init__(
        self,
        curves: Sequence[Curve],
        action: str,
        scale: CostScale,
        evaluators: Sequence[Evaluator],
    ) -> None:
        self.curves, self.action = curves, action
        self.evaluators = evaluators
        self.intact: list[Measurement] = [w.now() for w in evaluators]
        self.scale = replace(scale, examples=self.intact[0].examples if self.intact else None)
        self._known: dict[tuple[int, ...], Combination] = {}

    def combination(self, options: Sequence[int]) -> Combination:
        """A combination measured on every network of the study; without networks only added up."""
        key = tuple(options)
        if key not in self._known:
            self._known[key] = self._measured(key)
        return self._known[key]

    @property
    def known(self) -> list[Combination]:
        """Every combination measured so far."""
        return list(self._known.values())

    def choices(self, options: Sequence[int]) -> dict[str, str]:
        """Layer -> choice."""
        return {c.layer: c.options[o].choice for c, o in zip(self.curves, options, strict=True)}

    def _measured(self, options: tuple[int, ...]) -> Combination:
        summed = added(self.curves, options)
        picked = [c.options[o] for c, o in zip(self.curves, options, strict=True)]
        error = sampling_error(picked, 1.0, self.scale, None) or 0.0
        if not self.evaluators:
            return Combination(options, summed, error=error)
        costs, groups = [], []
        for evaluator, intact in zip(self.evaluators, self.intact, strict=True):
            measurement = evaluator.measure(self.action, self.choices(options))
            network_scale = replace(self.scale, intact=intact.performance)
            costs.append(
                network_scale.cost(measurement.performance)
                if math.isfinite(measurement.performance)
                else math.inf
            )
            if measurement.groups is not None and intact.groups is not None:
                groups.append(self.scale.sign() * (measurement.groups - intact.groups))
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
    choices: dict[tuple[int, ...], None] = {}
    for _ in range(4 * count):
        costs = [
            np.array([o.cost_upper for o in c.options]) * math.exp(rng.standard_normal()) for c in curves
        ]
        choices[choose(costs, sizes, budget).options] = None
        if len(choices) == count:
            break
    return list(choices)


def additivity(combinations: Sequence[Combination], summed: float, error: float) -> Additivity:
    r"""How the costs of combinations like a plan relate to their sums.

    A sum above twice its error is clear of noise. A plan with a clear sum is related to combinations with clear sums,
    by the mean of :math:`\ln(m/s)`; any other plan to the others, by the mean of :math:`m - s`. With few combinations
    the scatter is shrunk towards a prior of ``_PRIOR_FREEDOM`` degrees of freedom.

    Args:
        combinations: Measured combinations other than the plan.
        summed: The plan's summed cost.
        error: Its standard error.

    Examples:
        >>> pairs = [Combination((i,), 1.0 + i, 2.0 * (1.0 + i)) for i in range(3)]
        >>> round(additivity(pairs, 1.0, 0.0).ratio, 6)
        2.0
    """
    measured = [c for c in combinations if c.measured is not None and math.isfinite(c.measured)]
    relative = _clear(summed, error)
    alike = [c for c in measured if _clear(c.predicted, c.error) == relative]
    if relative:
        ratios = [
            math.log(max(float(c.measured or 0.0), _LEAST_RATIO * c.predicted) / c.predicted) for c in alike
        ]
        mean, scatter, freedom = _shrunk(ratios, _PRIOR_SCATTER)
        return Additivity(math.exp(mean), 0.0, scatter, True, len(alike), freedom)
    mean, scatter, freedom = _shrunk([float(c.measured or 0.0) - c.predicted for c in alike], error)
    return Additivity(1.0, mean, scatter, False, len(alike), freedom)


_LEAST_RATIO = 0.05
"""A combination counts as costing at least this share of its sum: a cost below zero has no logarithm."""
_PRIOR_SCATTER = 0.35
"""Scatter of ln(measured / summed) that is assumed before anything was measured: half to twice the sum, roughly."""
_PRIOR_FREEDOM = 4


def _clear(summed: float, error: float) -> bool:
    return summed > 0 and summed > 2.0 * error


def _shrunk(deviations: Sequence[float], prior: float) -> tuple[float, float, int]:
    """Mean, scatter and degrees of freedom, the scatter pooled with a prior one."""
    n = len(deviations)
    mean = float(np.mean(deviations)) if n else 0.0
    squares = float(np.sum((np.asarray(deviations) - mean) ** 2)) if n else 0.0
    freedom = max(n - 1, 0) + _PRIOR_FREEDOM
    return mean, math.sqrt((squares + _PRIOR_FREEDOM * prior**2) / freedom), freedom


def predict(
    chosen: Sequence[CurveOption],
    scale: CostScale,
    relation: Additivity,
    intact: FloatArray | None,
    confidence: float,
) -> Prediction:
    """Performance of a choice on new data of the same size, with its interval, from summed costs.

    The interval holds the scatter of measured around summed costs, and the sampling error of the calibration data
    twice: once for the data that costs were measured on, once for those that the prediction is held against.
    """
    summed = sum(o.cost for o in chosen)
    cost = scale.attainable(relation.ratio * summed + relation.offset)
    wide = float(stats.t.ppf(0.5 + confidence / 2, relation.freedom)) * relation.scatter
    wide *= math.sqrt(1 + 1 / max(relation.n, 1))
    model = wide, wide
    if relation.relative:
        model = cost * -math.expm1(-wide), cost * math.expm1(min(wide, 50.0))
    error = sampling_error(chosen, relation.ratio, scale, intact)
    if error is None:
        return Prediction(scale.performance(cost), None, None)
    return _interval(scale, cost, error, intact, confidence, model=model, new_data=True)


def observed(
    combination: Combination,
    scale: CostScale,
    intact: FloatArray | None,
    confidence: float,
    *,
    optimism: float | None = None,
) -> Prediction:
    """The measured performance of a combination, with the interval of its sampling error where that is defined.

    With ``optimism``, the prediction for as many new data: the cost is higher by that much (:func:`selection_bias`),
    and both samples have an error.
    """
    if combination.measured is None or not math.isfinite(combination.measured):
        return Prediction(None, None, None)
    cost = combination.measured + (optimism or 0.0)
    error = None
    if combination.groups is not None and intact is not None:
        error = standard_error(scale.sign() * intact + combination.groups)
    if error is None:
        return Prediction(scale.performance(cost), None, None)
    return _interval(scale, cost, error, intact, confidence, new_data=optimism is not None)


def selection_bias(
    chosen: Combination,
    candidates: Sequence[Combination],
    pick: Callable[[FloatArray], IntArray],
    intact: FloatArray | None,
    rng: np.random.Generator,
) -> float:
    """How much better the chosen one of several measured combinations seems to be than it is.

    The least of many noisy costs is partly luck. The bootstrap draws the groups of examples anew and chooses again;
    where it chooses the same combination, that one's cost there is compared with its cost on all examples (after Efron
    and Tibshirani 1993, section 17.6). Where all are equally good this finds about half of the bias.

    Args:
        chosen: The combination that was chosen.
        candidates: The combinations chosen from.
        pick: The index of the chosen one in every column of costs, (candidates, resamples).
        intact: What the intact network costs by groups of examples; the choice may depend on it.
        rng: The random stream.

    Examples:
        >>> noise = np.random.default_rng(0).standard_normal((20, 64))
        >>> equal = [Combination((i,), 0.0, float(g.mean()), g) for i, g in enumerate(noise)]
        >>> best = min(equal, key=lambda c: c.measured)
        >>> least = lambda costs: costs.argmin(0)
        >>> selection_bias(best, equal, least, None, np.random.default_rng(0)) > 0.05
        True
        >>> selection_bias(best, [best], least, None, np.random.default_rng(0))
        0.0
    """
    pool = [c for c in candidates if c.groups is not None]
    place = next((i for i, c in enumerate(pool) if c is chosen), None)
    if place is None or len(pool) < 2 or len({len(c.groups) for c in pool if c.groups is not None}) != 1:
        return 0.0
    costs = np.stack([c.groups for c in pool if c.groups is not None])
    count = costs.shape[1]
    drawn = rng.multinomial(count, np.full(count, 1.0 / count), size=_RESAMPLES).T / count
    again = pick(costs @ drawn) == place
    scores = costs[place] if intact is None or len(intact) != count else costs[place] + intact
    return max(float(scores.mean() - (scores @ drawn[:, again]).mean()), 0.0) if again.any() else 0.0


_RESAMPLES = 2000


def _interval(
    scale: CostScale,
    cost: float,
    error: float,
    groups: FloatArray | None,
    confidence: float,
    *,
    model: tuple[float, float] = (0.0, 0.0),
    new_data: bool = False,
) -> Prediction:
    freedom = math.inf if groups is None else max(len(groups) - 1, 1)
    quantile = float(stats.t.ppf(0.5 + confidence / 2, freedom))
    if new_data:
        quantile *= math.sqrt(2.0)
    return Prediction(scale.performance(cost), *scale.interval(cost, error, quantile, model))


def sampling_error(
    chosen: Sequence[CurveOption], ratio: float, scale: CostScale, intact: FloatArray | None
) -> float | None:
    """Standard error of the summed costs and of the intact performance; ``None`` where one of them has none."""
    groups = [o.groups for o in chosen if o.groups is not None]
    same = len(groups) == len(chosen) and len({len(g) for g in groups}) == 1
    if same and (intact is None or len(intact) == len(groups[0])):
        base = 0.0 if intact is None else scale.sign() * intact
        return standard_error(base + ratio * np.sum(groups, axis=0))
    errors = [o.error for o in chosen if o.error is not None]
    return ratio * math.sqrt(sum(e**2 for e in errors)) if len(errors) == len(chosen) else None


def difference(
    better: Combination, worse: Sequence[Combination], confidence: float
) -> Mapping[str, float | None]:
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
    half = float(stats.t.ppf(0.5 + confidence / 2, len(better.groups) - 1)) * error
    return {"gain": gain, "low": gain - half, "high": gain + half}


class PlanOutcome(StrEnum):
    """How a plan compares with uniform allocation at the same budget."""

    BETTER = "better"
    NOT_BETTER = "not-better"
    UNIFORM = "uniform"
    """The plan is uniform allocation: no choice was better beyond its error."""
    NO_ERROR = "no-error"
    """Both were measured, but the error of the difference is not defined."""
    NOT_MEASURED = "not-measured"
    SMALLER = "smaller"
    NOT_SMALLER = "not-smaller"
    GUESS = "guess"


def outcome_of(gain: Mapping[str, float | None], fell_back: bool) -> PlanOutcome:
    """The outcome of a plan from its gain over uniform allocation and the gain's interval."""
    if fell_back:
        return PlanOutcome.UNIFORM
    if gain["gain"] is None:
        return PlanOutcome.NOT_MEASURED
    if gain["low"] is None:
        return PlanOutcome.NO_ERROR
    return PlanOutcome.BETTER if gain["low"] > 0 else PlanOutcome.NOT_BETTER
