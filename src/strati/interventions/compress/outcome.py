"""What a plan compares: the quantity of its costs, and its outcome against uniform allocation."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Quantity(StrEnum):
    """What the costs of a plan are."""

    MEASURED = "measured"
    UPDATE = "measured-update"
    """What truncating the update since the base network loses, measured."""
    GRADIENT = "guess-gradient"
    """The share of the gradient's energy beyond a rank; no fine-tuned network was measured."""


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
