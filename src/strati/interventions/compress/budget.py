"""Budgets and actions: what may be spent, and what an option of a layer costs of it.

Sizes are parameters (``truncate``, ``prune``, ``drop``), bits (``quantise``) or ranks (``adapt``); a budget on the loss
turns the question round and asks for the smallest network within it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from strati.core.errors import BadInputError
from strati.core.options import nearest
from strati.interventions.edits import rank_of_share, truncated_parameters
from strati.interventions.kinds import EXPERT_KINDS, read_setting

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
