r"""How performances become costs that add up, and intervals that stay within what a measure can take.

A cost is what is lost: loss gained, accuracy gone, and for perplexity the rise of its logarithm, because these add up
over layers. Intervals are formed on a *link* scale on which the measure has no bound, :math:`g(s) = \ln s` for a loss,
:math:`g(s) = \ln\frac{s}{1-s}` for an accuracy, and transformed back, so that no end of an interval is a loss below
zero or an accuracy above one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from strati.core.errors import BadInputError
from strati.interventions.study_config import HIGHER, LOWER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strati.interventions.study import Study

UNIT = HIGHER - {"bleu", "r2", "reward", "rouge"}
"""Measures between 0 and 1, of which more is better."""

_STEEPEST = 50.0
"""Largest distance on the link scale: exp(50) is beyond any performance."""
_LEAST_SHARE = 1e-3
"""A loss is not predicted below this share of the intact one."""


@dataclass(frozen=True)
class CostScale:
    """How performances become costs and back.

    Attributes:
        name: The measure of performance.
        higher_is_better: Whether more of it is better.
        intact: The performance of the intact network.
        bounded: Whether the measure has the bounds that its name implies; a user's "loss" may lie below zero.
        examples: Examples that the performance is a mean over, where that is recorded.
        chance: The performance of guessing, where it is known.
    """

    name: str
    higher_is_better: bool
    intact: float
    bounded: bool = True
    examples: int | None = None
    chance: float | None = None

    def cost(self, performance: float) -> float:
        """What is lost against the intact network."""
        lost = self._score(performance) - self._score(self.intact)
        return -lost if self.higher_is_better else lost

    def performance(self, cost: float) -> float:
        """The performance at a cost, within the bounds of the measure."""
        score = self._score(self.intact) + (-cost if self.higher_is_better else cost)
        return self._performance(min(max(score, self._least), self._most))

    def attainable(self, cost: float) -> float:
        r"""A cost that a prediction may have: one below zero leaves the performance short of the best there is.

        At a distance :math:`d` of the intact score from the best one, the cost :math:`c < 0` becomes
        :math:`-d (1 - e^{c/d})`.

        Examples:
            >>> scale = CostScale("loss", False, 0.01)
            >>> scale.attainable(0.02), round(scale.performance(scale.attainable(-0.02)), 4)
            (0.02, 0.0014)
        """
        best = self._most if self.higher_is_better else self._least
        distance = abs(best - self._score(self.intact))
        if cost >= 0 or not math.isfinite(distance):
            return cost
        return distance * math.expm1(cost / distance) if distance > 0 else 0.0

    def allowed(self, share_or_amount: float, relative: bool) -> float:
        """The cost that a budget on the loss allows; a share is one of the intact (mean) loss."""
        return share_or_amount * abs(self._score(self.intact)) if relative else share_or_amount

    def sign(self) -> float:
        """Costs of scores: minus one where more is better."""
        return -1.0 if self.higher_is_better else 1.0

    def interval(
        self, cost: float, error: float, quantile: float, model: tuple[float, float] = (0.0, 0.0)
    ) -> tuple[float, float]:
        """The interval of the performance at a cost.

        Args:
            cost: The cost.
            error: Standard error of the score, from sampling examples.
            quantile: How many standard errors the interval extends to either side.
            model: Costs by which the true one may be less and more, for reasons other than sampling.

        Returns:
            The lower and the upper end, both within the measure's bounds and around ``performance(cost)``.

        Examples:
            >>> low, high = CostScale("loss", False, 0.01).interval(0.0, 0.02, 1.96)
            >>> 0.0 < low < 0.01 < high
            True
            >>> low, high = CostScale("accuracy", True, 1.0, examples=300).interval(0.0, 0.0, 1.96)
            >>> round(low, 3), high
            (0.984, 1.0)
        """
        centre = self.performance(cost)
        score = self._inside(self._score(centre))
        below, above = self._sampling(score, quantile * error, quantile)
        less, more = (
            self._inside(self._score(self.performance(c))) for c in (cost - model[0], cost + model[1])
        )
        low, high = sorted((less, more))
        down = math.hypot(below, self._link(score) - self._link(low))
        up = math.hypot(above, self._link(high) - self._link(score))
        ends = [
            self._unlink(self._link(score) + step) for step in (-min(down, _STEEPEST), min(up, _STEEPEST))
        ]
        if self.name == "perplexity":
            ends = [self._performance(end) for end in ends]
        return min(ends[0], centre), max(ends[1], centre)

    def _sampling(self, score: float, half: float, quantile: float) -> tuple[float, float]:
        """Distances on the link scale that correspond to the sampling error."""
        if (
            self._most == 1.0
        ):  # Wilson's interval, with the number of independent examples that the error implies
            spread = score * (1.0 - score)
            squared = max(quantile**2 / (self.examples or 64), half**2 / spread)
            squared = min(squared, quantile**2)  # no fewer than one example
            middle = (score + squared / 2) / (1 + squared)
            width = math.sqrt(spread * squared + squared**2 / 4) / (1 + squared)
            ends = max(middle - width, 1e-12), min(middle + width, 1 - 1e-12)
            at = self._link(score)
            return max(at - self._link(ends[0]), 0.0), max(self._link(ends[1]) - at, 0.0)
        if self._least == 0.0:
            return half / score, math.hypot(half / score, math.log1p(self._unseen(score, quantile) / score))
        return half, half

    def _unseen(self, score: float, quantile: float) -> float:
        """The loss that examples could add which a sample with next to no loss did not happen to contain.

        Where no example of :math:`n` fails, up to :math:`q^2/(n + q^2)` of new ones may (Wilson), each at the loss of a
        guess. That counts as far as the sample may hold no such example: by :math:`e^{-n s/c}` at a mean loss of
        :math:`s` and a guess's loss of :math:`c`.
        """
        if self.chance is None or self.examples is None:
            return 0.0
        guess = self._score(self.chance)
        share = quantile**2 / (self.examples + quantile**2)
        return share * guess * math.exp(-self.examples * score / guess) if guess > 0 else 0.0

    @property
    def _least(self) -> float:
        """The lower bound of scores."""
        bounded = self.name in UNIT or self.name in LOWER
        return 0.0 if self.bounded and bounded else -math.inf

    @property
    def _most(self) -> float:
        """The upper bound of scores."""
        return 1.0 if self.bounded and self.name in UNIT else math.inf

    def _inside(self, score: float) -> float:
        """A score strictly inside the bounds."""
        if self._most == 1.0:
            margin = 0.5 / (self.examples or 64)
            return min(max(score, margin), 1.0 - margin)
        if self._least == 0.0:
            return max(score, _LEAST_SHARE * self._score(self.intact), 1e-12)
        return score

    def _link(self, score: float) -> float:
        if self._most == 1.0:
            return math.log(score) - math.log1p(-score)
        return math.log(score) if self._least == 0.0 else score

    def _unlink(self, linked: float) -> float:
        if self._most == 1.0:
            return 1.0 / (1.0 + math.exp(-linked))
        return math.exp(linked) if self._least == 0.0 else linked

    def _score(self, performance: float) -> float:
        """What is additive: the logarithm of a perplexity, any other performance itself."""
        return math.log(performance) if self.name == "perplexity" else performance

    def _performance(self, score: float) -> float:
        return math.exp(min(score, 700.0)) if self.name == "perplexity" else score


def scale_of(study: Study) -> CostScale:
    """The scale of a study's performances, its networks taken together.

    Raises:
        BadInputError: No row was measured.
    """
    rows = [row for row in study.rows if row["status"] == "done"]
    intact = {row["network"]: float(row["intact_performance"]) for row in rows}
    if not intact:
        raise BadInputError(study.name, "no point of the study was measured; nothing to plan from")
    mean = float(np.mean(list(intact.values())))
    about = study.performance
    scale = CostScale(str(about["name"]), bool(about["higher_is_better"]), mean, chance=about.get("chance"))
    return replace(scale, bounded=_within(scale, (float(row["performance"]) for row in rows)))


def _within(scale: CostScale, performances: Iterable[float]) -> bool:
    """Whether every performance measured is one that the measure's name allows."""
    least = 1.0 if scale.name == "perplexity" else 0.0
    most = 1.0 if scale.name in UNIT else math.inf
    return all(least <= p <= most for p in (*performances, scale.intact) if math.isfinite(p))
