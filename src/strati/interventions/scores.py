"""Scores added up over batches, kept by example: the performance, and how sure it is.

Examples are rows, images or sequences; tokens of one sequence are not independent, so errors are taken over sequences.
Two changes measured on the same examples are compared example by example, which is far sharper than comparing means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from strati.core.results import FloatArray
    from strati.interventions.tasks import Task

MOST_GROUPS = 64
"""Neighbouring examples are put together until so many groups are left; rows keep one number for each."""


@dataclass(frozen=True)
class Scores:
    """The mean score, and the same by groups of examples.

    Attributes:
        performance: As the task reports it.
        mean: The mean score per target: a share of right answers, or a loss in nats (for perplexity too).
        groups: One pseudo-value per group: their mean is ``mean``, their scatter gives its error.
        stderr: Standard error of ``mean`` over all examples; not defined for fewer than two.
        examples: How many examples were scored.
    """

    performance: float
    mean: float
    groups: FloatArray
    stderr: float | None
    examples: int


def standard_error(groups: Any) -> float | None:
    """Standard error of the mean of independent values; not defined for fewer than two.

    Examples:
        >>> standard_error([1.0, 3.0]), standard_error([1.0])
        (1.0, None)
    """
    values = np.asarray(groups, dtype=float)
    if values.size < 2 or not np.isfinite(values).all():
        return None
    return float(values.std(ddof=1) / math.sqrt(values.size))


class Tally:
    """Adds up the scores of one network on the batches of a task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._sums: list[FloatArray] = []
        self._counts: list[FloatArray] = []

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """A batch."""
        from strati.interventions.tasks import IGNORED

        self._sums.append(self.task.each(logits, targets).cpu().numpy())
        scored = (targets != IGNORED).reshape(len(targets), -1).sum(1)
        self._counts.append(scored.cpu().numpy().astype(float))

    def result(self) -> Scores:
        """The scores of all batches so far."""
        sums = np.concatenate(self._sums) if self._sums else np.zeros(0)
        counts = np.concatenate(self._counts) if self._counts else np.zeros(0)
        total = sum(float(batch.sum()) for batch in self._sums)
        count = int(counts.sum())
        mean = total / max(count, 1)
        return _scores(self.task.finish(total, count), mean, sums, counts)


def scores_of(values: FloatArray) -> Scores:
    """Scores that come one per example, as a user's function may give them.

    Examples:
        >>> scores_of(np.array([1.0, 3.0])).stderr
        1.0
    """
    mean = float(values.mean())
    return _scores(mean, mean, values, np.ones(len(values)))


def _scores(performance: float, mean: float, sums: FloatArray, counts: FloatArray) -> Scores:
    """Groups for comparisons that rows can hold; the error over single examples, with nothing put together."""
    error = standard_error(_groups(sums, counts, mean, max(len(sums), 1)))
    return Scores(performance, mean, _groups(sums, counts, mean, MOST_GROUPS), error, len(sums))


def _groups(sums: FloatArray, counts: FloatArray, mean: float, most: int) -> FloatArray:
    """Pseudo-values of the ratio ``sum / count``: ``R + (s_g - R n_g) G / n``, exact in the mean."""
    if not len(sums) or not counts.sum():
        return np.zeros(0)
    size = -(-len(sums) // most)
    starts = np.arange(0, len(sums), size)
    s, n = np.add.reduceat(sums, starts), np.add.reduceat(counts, starts)
    pseudo_values: FloatArray = mean + (s - mean * n) * (len(starts) / n.sum())
    return pseudo_values
