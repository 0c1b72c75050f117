"""When something happens in a training: the step with an interval, over seeds, and which of two comes first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Event(NamedTuple):
    """The step at which something happens, and the steps between which it does."""

    step: float
    low: float
    high: float


def halfway(
    steps: Sequence[float], values: Sequence[float], errors: Sequence[float] | None = None
) -> Event | None:
    """When a curve has gone half of its way from its largest value before to its last one.

    The interval runs from the last checkpoint that is surely above half to the first that is surely below: by two
    errors where there are any, and always by the checkpoints on either side.

    Examples:
        >>> halfway([0, 1, 2, 3, 4], [4.0, 4.0, 3.0, 1.0, 0.0])
        Event(step=3.0, low=2.0, high=3.0)
        >>> halfway([0, 1, 2, 3, 4], [4.0, 4.0, 2.2, 1.8, 0.0], [0.2] * 5)
        Event(step=3.0, low=1.0, high=4.0)
        >>> halfway([0, 1, 2], [1.0, 2.0, 3.0]) is None
        True
    """
    curve, where = np.asarray(values, float), np.asarray(steps, float)
    error = np.zeros_like(curve) if errors is None else np.asarray(errors, float)
    good = np.isfinite(curve)
    curve, where, error = curve[good], where[good], error[good]
    if curve.size < 2:
        return None
    top = int(np.argmax(curve))
    half = (curve[top] + curve[-1]) / 2
    below = np.flatnonzero(curve[top:] <= half)
    if not below.size or not curve[top] > curve[-1]:
        return None
    at = top + int(below[0])
    above = np.flatnonzero(curve[top:at] - 2 * error[top:at] > half)
    surely = np.flatnonzero(curve[at:] + 2 * error[at:] <= half)
    low = top + int(above[-1]) if above.size else top
    high = at + int(surely[0]) if surely.size else curve.size - 1
    return Event(float(where[at]), float(where[low]), float(where[high]))


def first_of(steps: Sequence[float], happened: Sequence[bool]) -> Event | None:
    """The first checkpoint at which something has happened, and the one before.

    Examples:
        >>> first_of([0, 10, 20], [False, False, True])
        Event(step=20.0, low=10.0, high=20.0)
    """
    place = next((k for k, has_happened in enumerate(happened) if has_happened), None)
    if place is None:
        return None
    return Event(float(steps[place]), float(steps[max(0, place - 1)]), float(steps[place]))


def mean_step(found: Sequence[Event | None]) -> tuple[float, float, float] | None:
    """Geometric mean over seeds with its 95 % t-interval; ``None`` below two seeds.

    Examples:
        >>> mean, low, high = mean_step([Event(90, 0, 0), Event(100, 0, 0), Event(111, 0, 0)])
        >>> round(mean), low < 90, high > 111
        (100, True, True)
    """
    return _interval([math.log(e.step) for e in found if e is not None and e.step > 0])


def ratio(first: Sequence[Event | None], second: Sequence[Event | None]) -> tuple[float, float, float] | None:
    """Geometric mean over seeds of the first event's step over the second's, with its 95 % t-interval."""
    return _interval(
        [
            math.log(a.step / b.step)
            for a, b in zip(first, second, strict=True)
            if a is not None and b is not None and a.step > 0 and b.step > 0
        ]
    )


def _interval(logs: list[float]) -> tuple[float, float, float] | None:
    from scipy.stats import t

    if len(logs) < 2:
        return None
    mean = float(np.mean(logs))
    half = float(t.ppf(0.975, len(logs) - 1) * np.std(logs, ddof=1) / math.sqrt(len(logs)))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)
