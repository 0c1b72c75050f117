r"""The choice of one option per layer that meets a budget at the least cost (a multiple-choice knapsack).

With :math:`x_{lo} \in \{0, 1\}` for option :math:`o` of layer :math:`l`,

.. math:: \min_x \sum_{lo} c_{lo} x_{lo} \quad \text{subject to} \quad \sum_o x_{lo} = 1, \;
          \sum_{lo} s_{lo} x_{lo} \le B,

solved as a mixed-integer linear program (HiGHS through :func:`scipy.optimize.milp`). The search is limited by nodes,
not by time, so that the same input gives the same choice on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError

if TYPE_CHECKING:
    from strati.core.results import FloatArray

_MOST_NODES = 20_000
_TOLERANCE = 2e-6
"""Above HiGHS's feasibility tolerance: by this share the budget is cut where its answer exceeds it."""


@dataclass(frozen=True)
class Choice:
    """Which option each layer takes.

    Attributes:
        options: Index of the option of each layer.
        cost: Their summed cost.
        size: Their summed size.
        bound: No choice within the budget costs less than this.
        exact: Whether this one is known to be the best.
    """

    options: tuple[int, ...]
    cost: float
    size: float
    bound: float
    exact: bool


def choose(costs: Sequence[FloatArray], sizes: Sequence[FloatArray], budget: float) -> Choice:
    """The cheapest choice of one option per layer whose sizes add up to at most ``budget``.

    Args:
        costs: Cost of each option, by layer.
        sizes: Size of each option, by layer.
        budget: What the sizes may add up to.

    Raises:
        BadInputError: Even the smallest options are too large.

    Examples:
        >>> costs = [np.array([0.0, 1.0]), np.array([0.0, 5.0])]
        >>> sizes = [np.array([10.0, 4.0]), np.array([10.0, 4.0])]
        >>> choose(costs, sizes, 14.0).options
        (1, 0)
    """
    slack = budget + 1e-9 * max(abs(budget), 1.0)  # sums of floats
    smallest = [int(np.argmin(s)) for s in sizes]
    if _total(sizes, smallest) > slack:
        least = _total(sizes, smallest)
        raise BadInputError(
            "budget", f"cannot be met: the smallest settings add up to {least:g}, not {budget:g}"
        )
    cheapest = [int(np.lexsort((s, c))[0]) for c, s in zip(costs, sizes, strict=True)]
    if _total(sizes, cheapest) <= slack:  # the budget does not bind
        cost = _total(costs, cheapest)
        return Choice(tuple(cheapest), cost, _total(sizes, cheapest), cost, True)
    options, bound, exact = _solve(costs, sizes, slack)
    if (
        options is None or _total(sizes, options) > slack
    ):  # within the solver's tolerance, but not within the budget
        options, _, _ = _solve(costs, sizes, slack - _TOLERANCE * abs(slack))
        exact = False
    if options is None or _total(sizes, options) > slack:
        options = smallest
    cost = _total(costs, options)
    return Choice(tuple(options), cost, _total(sizes, options), min(bound, cost), exact)


def _total(values: Sequence[FloatArray], options: Sequence[int]) -> float:
    return float(sum(v[o] for v, o in zip(values, options, strict=True)))


def _solve(
    costs: Sequence[FloatArray], sizes: Sequence[FloatArray], budget: float
) -> tuple[list[int] | None, float, bool]:
    """The options of the best solution, a lower bound of the cost, and whether the search was completed."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    counts = [len(c) for c in costs]
    cost, size = np.concatenate(costs), np.concatenate(sizes)
    scale = float(np.abs(cost).max()) or 1.0
    unit = abs(budget) or 1.0
    layer = np.repeat(np.arange(len(counts)), counts)
    one_each = csr_array((np.ones(len(cost)), (layer, np.arange(len(cost)))))
    solution: Any = milp(
        cost / scale,
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(csr_array(size[None] / unit), -np.inf, budget / unit),
        ],
        options={"mip_rel_gap": 0.0, "node_limit": _MOST_NODES},
    )
    bound = float(np.sum([c.min() for c in costs]))
    if solution.mip_dual_bound is not None and np.isfinite(solution.mip_dual_bound):
        bound = float(solution.mip_dual_bound) * scale
    if solution.x is None:
        return None, bound, False
    parts = np.split(solution.x, np.cumsum(counts)[:-1])
    return [int(np.argmax(part)) for part in parts], bound, solution.status == 0


def monotone(costs: FloatArray, errors: FloatArray, *, sure: float = 3.0) -> FloatArray:
    """Costs along a curve from the smallest to the largest option, made non-increasing where noise made them rise.

    Neighbours that rise are pooled to their mean, weighted by ``1 / error^2``, as in isotonic regression; a rise of
    more than ``sure`` standard errors is no noise and stays.

    Examples:
        >>> monotone(np.array([3.0, 1.0, 2.0, 0.0]), np.full(4, 1.0)).tolist()
        [3.0, 1.5, 1.5, 0.0]
        >>> monotone(np.array([3.0, 1.0, 2.0, 0.0]), np.full(4, 0.01)).tolist()
        [3.0, 1.0, 2.0, 0.0]
    """
    floor = 1e-12 * max(1.0, float(np.abs(costs).max(initial=0.0)))
    groups: list[list[float]] = []  # mean, weight, members
    for cost, error in zip(costs, np.maximum(errors, floor), strict=True):
        groups.append([float(cost), float(error) ** -2, 1.0])
        while len(groups) > 1:
            (a, wa, na), (b, wb, nb) = groups[-2], groups[-1]
            if b <= a or b - a > sure * np.sqrt(1 / wa + 1 / wb):
                break
            groups[-2:] = [[(a * wa + b * wb) / (wa + wb), wa + wb, na + nb]]
    return np.concatenate([np.full(int(n), mean) for mean, _, n in groups]) if groups else np.zeros(0)
