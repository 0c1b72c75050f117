"""How sure each unit's place is: what the likeliest other places of it, all else left alone, would cost.

:func:`climb` first takes every such move that the likelihood prefers, so that no margin is negative;
:func:`place_margins` then gives each unit the cost of its cheapest move. Similarities are not independent of each
other, so these nats are worth less than nats; :data:`SURE_PLACE` is set by networks whose answer is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.transformer.timeline import Timeline

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.intp]

SURE_PLACE = 5.0
"""Nats by which a unit's place must be better than every other: of the 29 networks that ``strati reproduce
dropped-transformer`` has, each solved with a prior of the others, 24 have no wrong piece above it."""

_ALL = 16
_NEAR = 3
"""Up to so many blocks every exchange is tried, and every unit put so far away; with more, exchanges two blocks apart:
what is wrong in a long chain is wrong among neighbours, and each trial costs more."""


def climb(line: Timeline, places: Mapping[str, Ints], free: Sequence[str] | None = None) -> dict[str, Ints]:
    """Single units, of some kinds or all, exchanged or put elsewhere while the likelihood of all similarities grows."""
    now = dict(places)
    gained = len(now) > 1
    while gained:
        gained = False
        for kind in now if free is None else free:
            base = line.log_likelihood(now, of=kind)
            for order in _orders(line.given.count):
                trial = now | {kind: order[now[kind]]}
                value = line.log_likelihood(trial, of=kind)
                if value > base + 1e-6:
                    now, base, gained = trial, value, True
    return now


def place_margins(line: Timeline, free: Sequence[str] | None = None) -> dict[str, tuple[float, ...]]:
    """Kind of unit (some, or all) to the cost of each unit's cheapest move, units in network order.

    Beside moves of single units, the whole kind turned round or shifted by a place: a chain knows its own order, but
    where and which way round it lies is known from others only.
    """
    given = line.given
    count = given.count
    places = {kind: np.arange(count) for kind in given.units}
    back = (np.arange(count)[::-1], np.roll(np.arange(count), 1), np.roll(np.arange(count), -1))
    found = {}
    for kind in given.units if free is None else free:
        least = np.full(count, np.inf)
        base = line.log_likelihood(places, of=kind)
        for order in (*_orders(count), *back) if len(given.units) > 1 and count > 1 else ():
            cost = base - line.log_likelihood(places | {kind: order}, of=kind)
            moved = order != np.arange(count)
            least[moved] = np.minimum(least[moved], cost)
        found[kind] = tuple(least.tolist())
    return found


@cache
def _orders(count: int) -> tuple[Ints, ...]:
    """New places of ``count`` units: two exchanged, or one put a few places away and those between moved up."""
    reach = count if count <= _ALL else 2
    found = []
    for i in range(count):
        for j in range(i + 1, min(count, i + reach + 1)):
            exchanged = np.arange(count)
            exchanged[[i, j]] = j, i
            found.append(exchanged)
            if count <= _ALL and 1 < j - i <= _NEAR:
                rest = np.delete(np.arange(count), i)
                forward = np.insert(rest, j, i)
                found += [forward, np.argsort(forward)]
    return tuple(found)
