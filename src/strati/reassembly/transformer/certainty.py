"""How sure each unit's place is: what the likeliest other places of it, all else left alone, would cost.

:func:`climb` first takes every such move that the likelihood prefers, so that no margin is negative;
:func:`place_margins` then gives each unit the cost of its cheapest move. Similarities are not independent of each other, so these
nats are worth less than nats: :data:`SURE_PLACE` is what 99 of 100 pieces need on networks whose answer is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.transformer.arrange import Coefficients, Similarity, log_likelihood

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.intp]

SURE_PLACE = 20.0
"""Nats by which a unit's place must be better than every other: at this margin more than 99 of 100 matrices were right
on the networks that ``strati reproduce dropped-transformer`` trains, each solved with a prior of the others."""

_ALL = 16
_NEAR = 3
"""Up to so many blocks every exchange is tried, with more of them those so near."""


def climb(given: Similarity, places: Mapping[str, Ints], prior: Coefficients) -> dict[str, Ints]:
    """Single units exchanged or put elsewhere while the likelihood of all similarities grows."""
    now = dict(places)
    gained = len(now) > 1
    while gained:
        gained = False
        for kind in now:
            base = log_likelihood(given, now, prior, of=kind)
            for order in _orders(given.count):
                trial = now | {kind: order[now[kind]]}
                value = log_likelihood(given, trial, prior, of=kind)
                if value > base + 1e-6:
                    now, base, gained = trial, value, True
    return now


def place_margins(given: Similarity, prior: Coefficients) -> dict[str, tuple[float, ...]]:
    """Kind of unit to the cost of each unit's cheapest move, units in network order."""
    places = {kind: np.arange(given.count) for kind in given.units}
    found = {}
    for kind in given.units:
        least = np.full(given.count, np.inf)
        base = log_likelihood(given, places, prior, of=kind)
        for order in _orders(given.count) if len(given.units) > 1 else ():
            cost = base - log_likelihood(given, places | {kind: order}, prior, of=kind)
            moved = order != np.arange(given.count)
            least[moved] = np.minimum(least[moved], cost)
        found[kind] = tuple(least.tolist())
    return found


@cache
def _orders(count: int) -> tuple[Ints, ...]:
    """New places of ``count`` units: two exchanged, or one put a few places away and those between moved up."""
    reach = count if count <= _ALL else _NEAR
    found = []
    for i in range(count):
        for j in range(i + 1, min(count, i + reach + 1)):
            exchanged = np.arange(count)
            exchanged[[i, j]] = j, i
            found.append(exchanged)
            if 1 < j - i <= _NEAR:
                rest = np.delete(np.arange(count), i)
                forward = np.insert(rest, j, i)
                found += [forward, np.argsort(forward)]
    return tuple(found)
