r"""Budgets and actions, and the choice of one option per layer that meets a budget at the least cost.

Sizes are parameters (``truncate``, ``prune``, ``drop``), bits (``quantise``) or ranks (``adapt``); a budget on the loss
turns the question round and asks for the smallest network within it.

The choice is a multiple-choice knapsack. With :math:`x_{lo} \in \{0, 1\}` for option :math:`o` of layer :math:`l`,

.. math:: \min_x \sum_{lo} c_{lo} x_{lo} \quad \text{subject to} \quad \sum_o x_{lo} = 1, \;
          \sum_{lo} s_{lo} x_{lo} \le B .

The Lagrangian dual gives a lower bound and removes options that no optimal choice takes; dynamic programming over
the layers, which keeps the choices that are not dominated in size and cost, finds the best of what is left (Kellerer,
Pferschy and Pisinger 2004, chapter 11). Not ``scipy.optimize.milp``: HiGHS 1.12 writes to standard output, where
``--json -`` must stand alone, and exceeds the budget by its tolerance.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.core.options import nearest
from strati.interventions.edits import rank_of_share, truncated_parameters
from strati.interventions.kinds import EXPERT_KINDS, read_setting

if TYPE_CHECKING:
    from strati.core.results import FloatArray, IntArray

ACTIONS: dict[str, tuple[str, ...]] = {
    "truncate": ("parameters", "rank", "loss"),
    "quantise": ("bits", "loss"),
    "prune": ("parameters", "loss"),
    "drop": ("parameters", "loss"),
    "drop-experts": ("parameters", "loss"),
    "merge-experts": ("parameters", "loss"),
    "adapt": ("rank", "loss"),
}
"""Which budgets each action knows; the first is what it saves."""

KEPT_BITS = 16
"""Bits of a weight that is not rounded: what checkpoints are served in."""


@dataclass(frozen=True)
class Budget:
    """What may be spent: ``parameters`` (a share), ``bits`` and ``rank`` (means), or ``loss`` (a rise)."""

    kind: str
    value: float
    relative: bool = False
    text: str = ""


def read_budget(text: Any, action: str) -> Budget:
    """A budget as the user writes it.

    Raises:
        BadInputError: It is not of that form, out of range, or none of the action's.

    Examples:
        >>> read_budget("parameters=0.8", "truncate").value
        0.8
        >>> read_budget("loss=+2%", "quantise").relative
        True
        >>> read_budget("bits=4", "truncate")
        Traceback (most recent call last):
        strati.core.errors.BadInputError: bits=4: is not a budget for truncate; it takes parameters, rank or loss
    """
    if action not in ACTIONS:
        raise BadInputError(action, f"no such action; {nearest(str(action), ACTIONS)}")
    if isinstance(text, Budget):
        return text
    if isinstance(text, dict) and len(text) == 1:
        ((name, amount),) = text.items()
        text = f"{name}={amount}"
    match = re.fullmatch(r"\s*([a-z]+)\s*=\s*\+?([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*(%?)\s*", str(text))
    if match is None:
        why = "is not a budget; write parameters=0.8, bits=4.0, rank=16, loss=+2% or loss=+0.05"
        raise BadInputError(text, why)
    kind, value, percent = match[1], float(match[2]), match[3] == "%"
    budget_kinds = ACTIONS[action]
    if kind not in budget_kinds:
        raise BadInputError(
            text,
            f"is not a budget for {action}; it takes {', '.join(budget_kinds[:-1])} or {budget_kinds[-1]}",
        )
    if percent:
        value /= 100.0
    if kind == "parameters" and not 0.0 < value <= 1.0:
        raise BadInputError(text, "is a share of the layers' parameters: above 0, at most 1")
    if kind in ("bits", "rank") and value <= 0:
        raise BadInputError(text, f"{kind} has to be above 0")
    return Budget(kind, value, percent, str(text).strip())


@dataclass(frozen=True)
class Shape:
    """What an action needs to know of a layer: its matrix, and how many parameters it has."""

    rows: int
    cols: int
    parameters: int


def full_size(kind: str, shape: Shape) -> float:
    """The size of a layer left as it is, in the budget's unit, summed over its weights where that is a mean."""
    if kind == "bits":
        return float(KEPT_BITS * shape.parameters)
    return float(min(shape.rows, shape.cols) if kind == "rank" else shape.parameters)


def option_size(action: str, kind: str, setting: str | None, shape: Shape, energy_rank: int | None) -> float:
    """The size of a layer under a setting, in the budget's unit."""
    values = read_setting(setting)
    if action == "quantise":
        return float(values["bits"] * shape.parameters + scale_bits(values, shape))
    if action == "prune":
        return shape.parameters * _kept(values)
    if action == "drop":
        return 0.0
    if action in EXPERT_KINDS:
        removed = values["count"] if "count" in values else round(values.get("share", 0.0) * shape.rows)
        return float((shape.rows - (1 if "expert" in values else removed)) * shape.cols)
    if "rank" in values:
        rank = min(int(values["rank"]), shape.rows, shape.cols)
    elif "parameters" in values:
        rank = rank_of_share(shape.rows, shape.cols, float(values["parameters"]))
    elif energy_rank is not None:
        rank = energy_rank
    else:
        raise BadInputError(str(setting), "what this keeps depends on the weights; give the model")
    return float(rank if kind == "rank" else truncated_parameters(shape.rows, shape.cols, rank))


def scale_bits(values: dict[str, Any], shape: Shape) -> int:
    """Bits of a grouped layer's scales (16 each) and zero points (as many as a weight has; none if symmetric).

    One scale for a whole row is not counted: it adds 0.01 to 0.1 bits per weight in all layers alike.

    Examples:
        >>> scale_bits({"bits": 4, "group": 32}, Shape(10, 64, 640)) / 640
        0.625
    """
    if int(values.get("group", shape.cols)) >= shape.cols:
        return 0
    groups = shape.rows * -(-shape.cols // int(values["group"]))
    return groups * (16 if values.get("symmetric") else 16 + int(values["bits"]))


def target_size(budget: Budget, shapes: list[Shape]) -> float:
    """What the sizes of all layers may add up to."""
    if budget.kind == "bits":
        return budget.value * sum(s.parameters for s in shapes)
    if budget.kind == "rank":
        return budget.value * len(shapes)
    return budget.value * sum(s.parameters for s in shapes)


def _kept(values: dict[str, Any]) -> float:
    if "pattern" in values:
        n, m = (int(v) for v in str(values["pattern"]).split(":"))
        return n / m
    return 1.0 - float(values["share"])


_MOST_STATES = 20_000
"""Partial choices kept from one layer to the next; beyond, the least promising are left out."""


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
    options, bound, exact = _search(costs, sizes, slack)
    return Choice(tuple(options), _total(costs, options), _total(sizes, options), bound, exact)


def _total(values: Sequence[FloatArray], options: Sequence[int]) -> float:
    return float(sum(v[o] for v, o in zip(values, options, strict=True)))


def _search(
    costs: Sequence[FloatArray], sizes: Sequence[FloatArray], budget: float
) -> tuple[list[int], float, bool]:
    """The best choice, a lower bound of its cost, and whether it is known to be the best."""
    price, bound, options = _dual(costs, sizes, budget)
    best = _improved(options, costs, sizes, budget)
    # What an option costs beyond the dual bound: no choice with it can cost less than bound + extra.
    extras = [c + price * s - (c + price * s).min() for c, s in zip(costs, sizes, strict=True)]
    gap = _total(costs, best) - bound
    left = float(sum(s.min() for s in sizes))
    size, cost, extra = np.zeros(1), np.zeros(1), np.zeros(1)
    steps: list[tuple[IntArray, IntArray]] = []
    exact = True
    for c, s, e in zip(costs, sizes, extras, strict=True):
        left -= float(s.min())
        size, cost, extra = ((a[:, None] + b).ravel() for a, b in ((size, s), (cost, c), (extra, e)))
        states = np.flatnonzero((extra < gap) & (size + left <= budget))
        states = states[np.lexsort((cost[states], size[states]))]
        falling = cost[states] < np.minimum.accumulate(np.concatenate([[np.inf], cost[states]]))[:-1]
        states = states[falling]
        if len(states) > _MOST_STATES:
            states, exact = states[np.sort(np.argsort(extra[states], kind="stable")[:_MOST_STATES])], False
        steps.append((states // len(c), states % len(c)))
        size, cost, extra = size[states], cost[states], extra[states]
    if len(cost):
        place, reversed_options = int(np.argmin(cost)), list[int]()
        if cost[place] < _total(costs, best):
            for before, option in reversed(steps):
                reversed_options.append(int(option[place]))
                place = int(before[place])
            best = reversed_options[::-1]
    return best, _total(costs, best) if exact else bound, exact


def _dual(
    costs: Sequence[FloatArray], sizes: Sequence[FloatArray], budget: float
) -> tuple[float, float, list[int]]:
    """The price of size at which the cheapest options just fit, the bound it gives, and those options."""

    def relaxed(price: float) -> tuple[list[int], float]:
        options = [int(np.lexsort((s, c + price * s))[0]) for c, s in zip(costs, sizes, strict=True)]
        return options, _total(sizes, options) - budget

    low, high = 0.0, 1.0
    while relaxed(high)[1] > 0:
        high *= 4.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if relaxed(middle)[1] <= 0 else (middle, high)
    options, excess = relaxed(high)
    return high, _total(costs, options) + high * excess, options


def _improved(
    options: list[int], costs: Sequence[FloatArray], sizes: Sequence[FloatArray], budget: float
) -> list[int]:
    """A choice that fits, changed one layer at a time while that costs less and still fits."""
    options = list(options)
    while True:
        remaining = budget - _total(sizes, options)
        gains = [
            np.where(s - s[o] <= remaining, c[o] - c, 0.0)
            for c, s, o in zip(costs, sizes, options, strict=True)
        ]
        layer = int(np.argmax([g.max() for g in gains]))
        if not gains[layer].max() > 0:
            return options
        options[layer] = int(np.argmax(gains[layer]))


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
