r"""The choice of one option per layer that meets a budget at the least cost (a multiple-choice knapsack).

Lagrangian first: for a price :math:`\lambda` of size every layer takes its own
:math:`\arg\min_o c_o + \lambda s_o`; the price that just meets the budget gives a choice and, by duality, a bound that
no choice can beat. Then an exact search over Pareto fronts, pruned by that bound, which closes the gap wherever the
fronts stay small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strati.errors import BadInputError

if TYPE_CHECKING:
    from strati.types import FloatArray

_MOST_STATES = 200_000
_STEPS = 200


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
    least = sum(float(s.min()) for s in sizes)
    if least > slack:
        raise BadInputError(
            "budget", f"cannot be met: the smallest settings add up to {least:g}, not {budget:g}"
        )
    price, bound, options = _lagrangian(costs, sizes, slack)
    options = _fill(costs, sizes, slack, options)
    best = _total(costs, options)
    found = _exact(costs, sizes, slack, price, best)
    if found is not None:
        options, exact = found, True
        bound = _total(costs, options)
    else:
        exact = best <= bound + 1e-12 * max(1.0, abs(best))
    return Choice(tuple(options), _total(costs, options), _total(sizes, options), bound, exact)


def _total(values: Sequence[FloatArray], options: Sequence[int]) -> float:
    return float(sum(v[o] for v, o in zip(values, options, strict=True)))


def _lagrangian(
    costs: Sequence[FloatArray], sizes: Sequence[FloatArray], budget: float
) -> tuple[float, float, list[int]]:
    """The price of size, the dual bound, and a choice within the budget."""

    def at(price: float) -> tuple[list[int], float]:
        picked, dual = [], -price * budget
        for c, s in zip(costs, sizes, strict=True):
            value = c + price * s
            low = value.min()
            ties = np.flatnonzero(value <= low + 1e-15 * abs(low))
            picked.append(int(ties[np.argmin(s[ties])]))
            dual += float(low)
        return picked, dual

    options, bound = at(0.0)
    if _total(sizes, options) <= budget:
        return 0.0, bound, options
    low, high = 0.0, 1.0
    while _total(sizes, at(high)[0]) > budget and high < 1e300:
        high *= 4.0
    best = at(high)[0]
    if _total(sizes, best) > budget:  # the prices ran out: take the smallest
        best = [int(np.lexsort((c, s))[0]) for c, s in zip(costs, sizes, strict=True)]
    price = high
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        picked, dual = at(middle)
        if dual > bound:
            bound, price = dual, middle
        if _total(sizes, picked) <= budget:
            high = middle
            if _total(costs, picked) < _total(costs, best):
                best = picked
        else:
            low = middle
    return price, bound, best


def _fill(
    costs: Sequence[FloatArray], sizes: Sequence[FloatArray], budget: float, options: list[int]
) -> list[int]:
    """Spend what is left of the budget: the largest gain that fits, again and again."""
    options = list(options)
    left = budget - _total(sizes, options)
    while True:
        best: tuple[float, int, int] | None = None
        for layer, (c, s) in enumerate(zip(costs, sizes, strict=True)):
            now = options[layer]
            for o in np.flatnonzero((c < c[now]) & (s <= s[now] + left)):
                gain = float(c[now] - c[o])
                if best is None or gain > best[0]:
                    best = (gain, layer, int(o))
        if best is None:
            return options
        _, layer, option = best
        left += float(sizes[layer][options[layer]] - sizes[layer][option])
        options[layer] = option


def _exact(
    costs: Sequence[FloatArray], sizes: Sequence[FloatArray], budget: float, price: float, best: float
) -> list[int] | None:
    """The best choice by merging Pareto fronts layer by layer; ``None`` where they grow too large."""
    count = len(costs)
    rest_size, rest_dual = np.zeros(count + 1), np.zeros(count + 1)
    for i in range(count - 1, -1, -1):
        rest_size[i] = rest_size[i + 1] + sizes[i].min()
        rest_dual[i] = rest_dual[i + 1] + (costs[i] + price * sizes[i]).min()
    size, cost = np.zeros(1), np.zeros(1)
    steps: list[tuple[np.ndarray, np.ndarray]] = []
    tolerance = 1e-12 * max(1.0, abs(best))
    for i in range(count):
        options = len(costs[i])
        s = (size[:, None] + sizes[i][None]).ravel()
        c = (cost[:, None] + costs[i][None]).ravel()
        bound = c + price * s + rest_dual[i + 1] - price * budget
        kept = np.flatnonzero((s + rest_size[i + 1] <= budget) & (bound <= best + tolerance))
        order = kept[np.lexsort((c[kept], s[kept]))]
        if order.size == 0:
            return None
        lowest = np.minimum.accumulate(c[order])
        front = order[np.r_[True, c[order][1:] < lowest[:-1]]]
        if front.size > _MOST_STATES:
            return None
        steps.append((front // options, front % options))
        size, cost = s[front], c[front]
    place = int(np.argmin(cost))
    found = []
    for parents, taken in reversed(steps):
        found.append(int(taken[place]))
        place = int(parents[place])
    return found[::-1]


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
