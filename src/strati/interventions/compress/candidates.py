"""The choices to measure: the best by added costs, variants of it, random ones near it, and uniform allocation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.interventions.compress.budget import Budget, Choice, choose, target_size
from strati.interventions.compress.predict import Combination, added, difference, random_choices

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.interventions.compress.costs import Curve
    from strati.interventions.compress.predict import Combination
    from strati.interventions.evaluator import Evaluator
    from strati.interventions.study_config import CostScale

_CLOSE = 0.98
"""A spread of one setting that uses so much of the budget needs no mixing."""
_ROUNDS = 8
_CORRECTIONS = 2
_SURE = 0.95
_POWERS = (1.0, 0.75, 0.5)
"""Exponents on the costs: below one the plan avoids many small harms less than few large ones, which add up worse."""


Measure = Callable[[tuple[int, ...]], Combination]


class Candidates:
    """Choices for one budget, on the curves of one study."""

    def __init__(
        self, curves: Sequence[Curve], scale: CostScale, budget: Budget, kind: str, rng: np.random.Generator
    ) -> None:
        self.curves, self.scale, self.kind, self.rng = curves, scale, kind, rng
        self.costs = [np.array([o.cost_upper for o in c.options]) for c in curves]
        self.sizes = [np.array([o.size for o in c.options]) for c in curves]
        self.loss = budget.kind == "loss"
        self._named = f"{budget.kind}={budget.value:g}"  # the setting that says just what the budget says
        if self.loss:
            self.allowed = scale.allowed(budget.value, budget.relative)
            turned = _checked(self.sizes, self.costs, self.allowed, budget)
            self.budget, self.exact = turned.cost, turned.exact
            self._plan = turned.options
        else:
            self.budget = target_size(budget, [c.shape for c in curves])
            choice = _checked(self.costs, self.sizes, self.budget, budget)
            self._plan, self.exact = choice.options, choice.exact

    def plans(self) -> list[tuple[int, ...]]:
        """The best choice by added costs, and the best by powers of them."""
        plans = {self._plan: None}
        if not self.loss:
            for power in _POWERS[1:]:
                costs = [np.sign(c) * np.abs(c) ** power for c in self.costs]
                plans[choose(costs, self.sizes, self.budget).options] = None
        return list(plans)

    def meet_loss(self, measure: Measure) -> None:
        """Tighten or loosen the added cost until the measured one just stays within the loss."""
        best: Choice | None = None
        low, high, allowed = 0.0, math.inf, self.allowed
        for _ in range(_ROUNDS):
            choice = choose(self.sizes, self.costs, allowed)
            cost = measure(choice.options).measured
            if cost is None:
                return
            if cost <= self.allowed:
                best = choice if best is None or choice.cost < best.cost else best
                low = allowed
            else:
                high = allowed
            if high == math.inf:
                allowed *= 1.5
            elif low == 0.0:
                allowed *= max(0.1, min(0.8, self.allowed / cost)) if math.isfinite(cost) else 0.1
            else:
                allowed = 0.5 * (low + high)
        if best is None:  # whatever is changed costs more than is allowed
            self._plan = tuple(len(s) - 1 for s in self.sizes)
            self.budget, self.exact = sum(float(s[-1]) for s in self.sizes), False
        else:
            self._plan, self.budget, self.exact = best.options, best.cost, False

    def uniform_within_loss(self, measure: Measure) -> tuple[int, ...]:
        """The smallest even spread that stays within the loss, measured where that is possible."""
        shares = sorted({float(x) / float(s[-1]) for s in self.sizes for x in s if s[-1] > 0})
        spreads = [tuple(_largest(s, share * float(s[-1])) for s in self.sizes) for share in shares]
        spreads = list(dict.fromkeys(spreads))
        low, high = 0, len(spreads) - 1  # the last one keeps everything
        while low < high:
            middle = (low + high) // 2
            combination = measure(spreads[middle])
            cost = combination.predicted if combination.measured is None else combination.measured
            low, high = (low, middle) if cost <= self.allowed else (middle + 1, high)
        return spreads[low]

    def random(self, count: int) -> list[tuple[int, ...]]:
        """Random choices near the best one, within the budget."""
        return random_choices(self.curves, self.budget, count, self.rng)

    def uniform(self, draws: int) -> list[tuple[int, ...]]:
        """The even spread: every layer the same share of its size; mixed at random where no setting has that share.

        With no draws it is the largest setting that fits, the same for all layers.
        """
        share = self.budget / sum(float(s[-1]) for s in self.sizes)
        lower = [_largest(s, self._allowance(i, share)) for i, s in enumerate(self.sizes)]
        used = sum(float(s[o]) for s, o in zip(self.sizes, lower, strict=True))
        named = all(
            c.options[o].choice.partition(",")[0] == self._named
            for c, o in zip(self.curves, lower, strict=True)
        )
        if (
            named
            or draws == 0
            or used >= _CLOSE * self.budget
            or all(o + 1 >= len(s) for s, o in zip(self.sizes, lower, strict=True))
        ):
            return [tuple(lower)]
        return list(dict.fromkeys(self._mixed(lower, used) for _ in range(draws)))

    def corrected(self, measure: Measure, tried: Sequence[Combination]) -> list[Combination]:
        """The best choices by costs corrected for what the measured combinations say of layers changed together."""
        combinations, corrections = list(tried), list[Combination]()
        if self.loss:  # met by measuring, not by adding
            return corrections
        for _ in range(_CORRECTIONS):
            weights = layer_weights(self.curves, combinations)
            if weights is None:
                break
            costs = [w * c for w, c in zip(weights, self.costs, strict=True)]
            combination = measure(choose(costs, self.sizes, self.budget).options)
            if any(combination is c for c in combinations):  # nothing new to learn from
                break
            combinations.append(combination)
            corrections.append(combination)
        return corrections

    def best(self, tried: Sequence[Combination], even: Sequence[Combination]) -> tuple[Combination, bool]:
        """The plan, and whether it is the even spread for want of anything better.

        Of the choices measured the one that cost least; without measurements the best by adding.

        Where nothing beats the even spread beyond the error, it is the even spread (of several draws the one that cost
        least). The least of many noisy numbers looks better than it is, so the error is that of as many comparisons as
        there were choices.
        """
        measured_choices = [c for c in tried if c.measured is not None and math.isfinite(c.measured)]
        if not measured_choices or self.loss:
            return tried[0], len(even) == 1 and tried[0].options == even[0].options
        best = min(measured_choices, key=_measured)
        fitting = [c for c in even if self._fits(c.options)]
        if len(fitting) == len(even):
            gain = difference(best, even, 1 - (1 - _SURE) / len(measured_choices))
            unsure = gain["low"] if gain["low"] is not None else gain["gain"]
            if unsure is not None and unsure <= 0:
                return min(even, key=_measured), True
        return best, False

    def pick(self, combinations: Sequence[Combination]) -> Callable[[Any], Any]:
        """Which of some combinations is chosen when their costs are the columns of an array: the rule of the plan.

        The cheapest; for a budget on the loss the smallest within it, and else the largest.
        """
        if not self.loss:
            return lambda costs: costs.argmin(0)
        sizes = np.array([self.size(c.options) for c in combinations if c.groups is not None])
        allowed, largest = self.allowed, sizes.max(initial=0.0) + 1.0

        def smallest(costs: Any) -> Any:
            within = np.where(costs <= allowed, sizes[:, None], largest)
            return np.where(within.min(0) < largest, within.argmin(0), sizes.argmax())

        return smallest

    def size(self, options: Sequence[int]) -> float:
        """The summed size of a choice."""
        return float(sum(s[o] for s, o in zip(self.sizes, options, strict=True)))

    def frontier(
        self, metrics: Mapping[str, Mapping[str, float]] | None = None, points: int = 13
    ) -> Iterator[dict[str, Any]]:
        """Added cost over budgets, for the page: plan, even spread, and spread by metrics of the layers.

        By alpha, layers of small alpha keep more; by stable rank, layers of large stable rank do. Budgets lie closer
        together where they are small: that is where curves bend.
        """
        full = sum(float(s[-1]) for s in self.sizes)
        least = sum(float(s.min()) for s in self.sizes)
        for size in least + (full - least) * np.linspace(0.0, 1.0, points) ** 2:
            choice = choose(self.costs, self.sizes, float(size))
            share = float(size) / full
            even = [_largest(s, share * float(s[-1])) for s in self.sizes]
            yield {
                "size": float(size),
                "plan": self.scale.performance(added(self.curves, choice.options)),
                "uniform": self.scale.performance(added(self.curves, even)),
                **{n: self._spread(n, values, float(size)) for n, values in (metrics or {}).items()},
            }

    def _spread(self, name: str, values: Mapping[str, float], size: float) -> float:
        """Performance, by adding, of shares between 0.7 and 1.3 of one level, linear in a metric."""
        raw = np.array([values[c.layer] for c in self.curves])
        span = float(raw.max() - raw.min()) or 1.0
        weight = (raw - raw.min()) / span
        weight = 0.7 + 0.6 * (1 - weight if name == "alpha" else weight)
        low, high, best = 0.0, 2.0, [0] * len(self.sizes)
        for _ in range(40):
            level = 0.5 * (low + high)
            picked = [
                _largest(s, min(level * w, 1.0) * float(s[-1]))
                for s, w in zip(self.sizes, weight, strict=True)
            ]
            fits = sum(float(s[o]) for s, o in zip(self.sizes, picked, strict=True)) <= size * (1 + 1e-9)
            low, high, best = (level, high, picked) if fits else (low, level, best)
        return self.scale.performance(added(self.curves, best))

    def _allowance(self, layer: int, share: float) -> float:
        if self.kind == "rank":  # the same rank everywhere
            return self.budget / len(self.sizes)
        return share * float(self.sizes[layer][-1])

    def _mixed(self, lower: list[int], used: float) -> tuple[int, ...]:
        """Random layers take the next larger setting until the budget is spent."""
        picked = list(lower)
        left = self.budget - used
        for layer in self.rng.permutation(len(picked)):
            s, now = self.sizes[layer], picked[layer]
            larger = np.flatnonzero(s > s[now])
            if larger.size and s[larger[0]] - s[now] <= left + 1e-9 * self.budget:
                left -= float(s[larger[0]] - s[now])
                picked[layer] = int(larger[0])
        return tuple(picked)

    def _fits(self, options: Sequence[int]) -> bool:
        return self.size(options) <= self.budget * (1 + 1e-9)


def contiguous_runs(
    candidates: Candidates, evaluators: Sequence[Evaluator], action: str
) -> list[tuple[int, ...]]:
    """The run of neighbouring blocks that turns its input least and whose removal meets the budget (2403.17887)."""
    if action != "drop" or candidates.loss or len(evaluators) != 1:
        return []
    from strati.interventions.blocks import BlockInfluence

    inputs, names = evaluators[0].score_inputs, [curve.layer for curve in candidates.curves]
    if inputs is None:
        return []
    keep = [len(curve.options) - 1 for curve in candidates.curves]
    runs: list[tuple[float, tuple[int, ...]]] = []
    for first, name in enumerate(names):
        target = evaluators[0].target(name)
        for last in range(first, min(first + len(target.members), len(names))):
            dropped = (*keep[:first], *[0] * (last + 1 - first), *keep[last + 1 :])
            if names[last] in target.members and candidates.size(dropped) <= candidates.budget * (1 + 1e-9):
                influence = BlockInfluence(evaluators[0].model, inputs.batches, target)
                runs.append((influence.angular_distance(names[last]), dropped))
                break
    return [min(runs)[1]] if runs else []


def _measured(combination: Combination) -> float:
    return math.inf if combination.measured is None else combination.measured


def _largest(sizes: Any, most: float) -> int:
    """The largest option of at most a size; the smallest where none is."""
    fitting = np.flatnonzero(sizes <= most * (1 + 1e-9) + 1e-9)
    return int(fitting[-1]) if fitting.size else 0


def _checked(costs: Sequence[Any], sizes: Sequence[Any], most: float, budget: Budget) -> Choice:
    least = sum(float(s.min()) for s in sizes)
    try:
        return choose(costs, sizes, most)
    except BadInputError:
        unit = (
            most / budget.value if budget.value > 0 else 1.0
        )  # the budget's own: a share, mean bits, a mean rank
        why = f"cannot be met: the smallest settings come to {budget.kind}={least / unit:.4g}"
        raise BadInputError(
            f"budget {budget.text}", f"{why}; allow more, or study stronger settings"
        ) from None


_SCATTER = 0.1
"""Relative error that a sum of weighted costs is allowed to have."""
_LEAST = 0.1
"""No layer's weight falls below this share of the common ratio: a harm seen alone is not explained away."""


def layer_weights(curves: Sequence[Curve], combinations: Sequence[Combination]) -> FloatArray | None:
    """What each layer's costs have to be multiplied by; ``None`` where the combinations cannot tell.

    Examples:
        >>> from strati.interventions.compress.budget import Shape
        >>> from strati.interventions.compress.costs import Curve, CurveOption
        >>> from strati.interventions.compress.predict import Combination
        >>> options = (CurveOption("bits=2", 2.0, 1.0, 0.0), CurveOption("keep", 16.0, 0.0, 0.0))
        >>> curves = [Curve(name, "linear", Shape(1, 1, 1), options) for name in "ab"]
        >>> seen = [Combination((0, 1), 1.0, 3.0), Combination((1, 0), 1.0, 1.0), Combination((0, 0), 2.0, 4.0)]
        >>> [round(float(w), 1) for w in layer_weights(curves, seen)]
        [3.0, 1.0]
    """
    measured_combinations = [
        c for c in combinations if c.measured is not None and math.isfinite(c.measured) and c.measured > 0
    ]
    measured_combinations = list(
        {
            c.options: c for c in measured_combinations if c.predicted > 2.0 * c.error and c.predicted > 0
        }.values()
    )
    if len(measured_combinations) < 2 or len(curves) < 2:
        return None
    alone = np.array(
        [[c.options[o].cost for c, o in zip(curves, k.options, strict=True)] for k in measured_combinations]
    )
    measured = np.array([float(k.measured or 0.0) for k in measured_combinations])
    ratio = math.exp(float(np.mean(np.log(measured / alone.sum(1)))))
    scaled = alone * ratio / (_SCATTER * measured[:, None])
    off = (measured - ratio * alone.sum(1)) / (_SCATTER * measured)
    # w = r (1 + d), d by ridge regression; as many equations as combinations, which are fewer than layers.
    d = scaled.T @ np.linalg.solve(scaled @ scaled.T + np.eye(len(measured_combinations)), off)
    weights: FloatArray = ratio * np.maximum(1.0 + d, _LEAST)
    return weights
