"""The likelihood of an arrangement of all units on one time line, and moves of single units that raise it.

Similarities fall with the distance of two blocks. For roles ``a`` and ``b`` at places ``p`` and ``p + d`` the expected
similarity is ``c0 [d = 0] + c+ exp(-(d-1)/l) [d > 0] + c- exp(-(-d-1)/l) [d < 0] - f sqrt(|d|)``, with Gaussian noise.
The coefficients are estimated from the arrangement itself; their prior is the mean and spread over other networks
(:func:`~strati.reassembly.transformer.evidence.default_prior`). A pair of roles without signal gets no weight.

Every arrangement has the same number of pairs of units at each distance, so that the least squares are the same for
all of them, except for the sums of similarities by distance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]
    Ints = NDArray[np.intp]
    Pair = tuple[str, str]

REACH = 1.5
"""Blocks over which similarity falls by a factor of e."""

NOISE = 1e-2
_LOOSE = 0.2
"""Variance added to that of similarities: no similarity is a function of distance alone to better than 0.1, and a pair
of roles whose similarities are all small must not outweigh the others. And to that of likeness to :data:`DEPTH`: no
order by size alone is true to the last piece, however well the sizes fit it."""

_RIDGE = 0.5
"""Entries with which a coefficient is drawn to nought when it is measured: few blocks do not tell the four apart."""

DEPTH = "depth"
"""The role of a block's place itself."""


@dataclass(frozen=True)
class Expected:
    """What a signal is worth on other networks: mean and spread of the shift of true pairs.

    In units of ``sqrt(count - 1)`` standard deviations, which is the most that ``count`` pairs can show.
    """

    mean: float
    spread: float


_UNKNOWN = (Expected(0.0, 0.3),) * 4
"""What is expected of a pair of roles that no network has shown."""


@dataclass(frozen=True)
class Similarity:
    """What is to be arranged.

    Attributes:
        units: Kind of unit to its roles: ``{"qk": ("q", "k"), ...}``; a unit's pieces have one index in every role.
        between: Pair of roles to similarity, units by units; every pair both ways.
        count: Units of each kind.
        together: Pair of kinds to evidence, in nats, that two units are of one block.
        near: Roles whose likeness says something of near blocks only: what is far apart may be alike again.
    """

    units: Mapping[str, tuple[str, ...]]
    between: Mapping[Pair, Matrix]
    count: int
    together: Mapping[Pair, Matrix] = field(default_factory=dict)
    near: frozenset[str] = frozenset()

    def kind(self, role: str) -> str:
        """The kind of unit that a role belongs to."""
        return next(kind for kind, roles in self.units.items() if role in roles)

    def pairs(self) -> list[Pair]:
        """Every pair of roles once."""
        return [(a, b) for a, b in self.between if a <= b]


Coefficients = Mapping[tuple[str, str], tuple[Expected, ...]]
"""Pair of roles to what is expected of ``c0, c+, c-, f``."""


@cache
def basis(count: int) -> Matrix:
    """The four shapes by distance -(count-1) .. count-1: same place, later, earlier, far."""
    apart = np.arange(-(count - 1), count)
    fall = np.exp(-(np.abs(apart) - 1) / REACH)
    far = np.sqrt(np.abs(apart) / max(count - 1, 1))
    return np.stack(
        [(apart == 0) * 1.0, np.where(apart > 0, fall, 0.0), np.where(apart < 0, fall, 0.0), -far]
    )


@dataclass(frozen=True)
class _Entries:
    """A pair of roles' similarities that depend on the arrangement, around their mean, and the shapes likewise."""

    kind_a: str
    kind_b: str
    rows: Ints
    columns: Ints
    values: Matrix
    shapes: Matrix
    gram: Matrix
    either: bool
    noise: float

    def sides(self, places: Mapping[str, Ints], count: int) -> Matrix:
        """The products of the shapes with the similarities at these places."""
        apart = places[self.kind_b][self.columns] - places[self.kind_a][self.rows]
        if self.either:
            apart = np.abs(apart)
        return np.asarray(self.shapes @ np.bincount(apart + count - 1, self.values, 2 * count - 1))


class Timeline:
    """Similarities and what is expected of them.

    Args:
        similarity: Similarities.
        prior: Coefficients to be expected.
    """

    def __init__(self, similarity: Similarity, prior: Coefficients) -> None:
        self.similarity = similarity
        self.prior = prior
        self.entries = {
            pair: entries
            for pair in similarity.pairs()
            if len((entries := _entries(similarity, pair)).values)
        }
        self._known: dict[Pair, tuple[Matrix, Matrix, Matrix]] = {}
        for pair, entries in self.entries.items():
            means, pulls = self._expected(pair, entries)
            inverse = np.asarray(np.linalg.inv(entries.gram + np.diag(pulls)), dtype=np.float64)
            self._known[pair] = (means, pulls, inverse)

    def _expected(self, pair: Pair, entries: _Entries) -> tuple[Matrix, Matrix]:
        """Mean of the coefficients, and the variance of the similarities over that of the coefficients."""
        expected = self.prior.get(pair, _UNKNOWN)
        means = np.array([coefficient.mean for coefficient in expected])
        spreads = np.array([coefficient.spread for coefficient in expected])
        return means, (float(np.mean(np.square(entries.values))) + entries.noise) / np.square(spreads)

    def log_likelihood(self, places: Mapping[str, Ints], *, of: str | None = None) -> float:
        """Of all similarities, or those of one kind of units; coefficients and variance are each pair of roles' own."""
        total = 0.0
        for (kind_a, kind_b), table in self.similarity.together.items():
            if of is None or of in (kind_a, kind_b):
                at = np.argsort(places[kind_b])[places[kind_a]]
                total += float(table[np.arange(len(table)), at].sum())
        for pair, entries in self.entries.items():
            if of is None or of in (entries.kind_a, entries.kind_b):
                c, variance = self._fitted(pair, places)
                total -= 0.5 * len(entries.values) * float(np.log(variance))
                # the prior, in units of the variance that the pulls were made of
                means, pulls, _ = self._known[pair]
                spread = float(entries.values @ entries.values) / len(entries.values) + entries.noise
                total -= 0.5 * float(pulls @ np.square(c - means)) / spread
        return total

    def _fitted(self, pair: Pair, places: Mapping[str, Ints]) -> tuple[Matrix, float]:
        """The coefficients of a pair of roles at these places, and the variance around them."""
        entries = self.entries[pair]
        means, pulls, inverse = self._known[pair]
        side = entries.sides(places, self.similarity.count)
        c = np.asarray(inverse @ (side + pulls * means))
        sum_of_squares = float(entries.values @ entries.values)
        residual = max(sum_of_squares - 2 * float(c @ side) + float(c @ entries.gram @ c), 0.0)
        return c, residual / len(entries.values) + entries.noise

    def fit(self, places: Mapping[str, Ints]) -> dict[Pair, Matrix]:
        """Expected similarity over its variance, by distance, for each pair of roles: estimated at these places."""
        model: dict[Pair, Matrix] = {}
        for pair, entries in self.entries.items():
            c, variance = self._fitted(pair, places)
            _both_ways(model, pair, c @ entries.shapes / variance)
        return model

    def expected(self) -> dict[Pair, Matrix]:
        """The same before anything is known of the places: the prior's coefficients over the whole variance."""
        model: dict[Pair, Matrix] = {}
        for pair, entries in self.entries.items():
            spread = float(np.mean(np.square(entries.values)))
            _both_ways(model, pair, self._known[pair][0] @ entries.shapes / (spread + entries.noise))
        return model


def coefficients(
    similarity: Similarity, places: Mapping[str, Ints]
) -> dict[Pair, tuple[float, float, float, float]]:
    """``c0, c+, c-, f`` of each pair of roles at given places, by least squares."""
    fitted = {}
    for pair in similarity.pairs():
        entries = _entries(similarity, pair)
        if len(entries.values):
            side = entries.sides(places, similarity.count)
            same, later, earlier, far = np.linalg.solve(entries.gram + _RIDGE * np.eye(4), side).tolist()
            fitted[pair] = (same, later, earlier, far)
    return fitted


def reordered(similarity: Similarity, orders: Mapping[str, Ints]) -> Similarity:
    """The same with the units of each kind in another order."""
    between = {
        (a, b): table[np.ix_(orders[similarity.kind(a)], orders[similarity.kind(b)])]
        for (a, b), table in similarity.between.items()
    }
    together = {
        (kind_a, kind_b): table[np.ix_(orders[kind_a], orders[kind_b])]
        for (kind_a, kind_b), table in similarity.together.items()
    }
    return Similarity(similarity.units, between, similarity.count, together, similarity.near)


def _both_ways(model: dict[Pair, Matrix], pair: Pair, shape: Matrix) -> None:
    model[pair] = shape
    model[pair[::-1]] = model[pair][::-1]


def _entries(similarity: Similarity, pair: Pair) -> _Entries:
    a, b = pair
    kind_a, kind_b = similarity.kind(a), similarity.kind(b)
    count = similarity.count
    included: NDArray[np.bool_] = np.ones((count, count), dtype=bool)
    if kind_a == kind_b:  # a unit's own pieces: together already
        included = ~np.eye(count, dtype=bool) if a != b else np.triu(included, 1)
    rows, columns = np.nonzero(included)
    values = np.asarray(similarity.between[pair][included], dtype=np.float64)
    values = values - values.mean() if len(values) else values
    apart = columns - rows  # units at their own numbers: any arrangement has these distances
    if a == b:  # no direction in a role's likeness to itself
        apart = np.abs(apart)
    many = np.bincount(apart + count - 1, minlength=2 * count - 1).astype(np.float64)
    shapes = basis(count)
    if similarity.near & {a, b}:
        shapes = shapes * np.array([1.0, 1.0, 1.0, 0.0])[:, None]
    shapes = shapes - (shapes @ many / max(many.sum(), 1.0))[:, None]
    noise = _LOOSE if a.endswith(DEPTH) or b.endswith(DEPTH) else NOISE
    return _Entries(kind_a, kind_b, rows, columns, values, shapes, (shapes * many) @ shapes.T, a == b, noise)


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
            for order in _orders(line.similarity.count):
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
    similarity = line.similarity
    count = similarity.count
    places = {kind: np.arange(count) for kind in similarity.units}
    back = (np.arange(count)[::-1], np.roll(np.arange(count), 1), np.roll(np.arange(count), -1))
    margins = {}
    for kind in similarity.units if free is None else free:
        least = np.full(count, np.inf)
        base = line.log_likelihood(places, of=kind)
        for order in (*_orders(count), *back) if len(similarity.units) > 1 and count > 1 else ():
            cost = base - line.log_likelihood(places | {kind: order}, of=kind)
            moved = order != np.arange(count)
            least[moved] = np.minimum(least[moved], cost)
        margins[kind] = tuple(least.tolist())
    return margins


@cache
def _orders(count: int) -> tuple[Ints, ...]:
    """New places of ``count`` units: two exchanged, or one put a few places away and those between moved up."""
    reach = count if count <= _ALL else 2
    orders = []
    for i in range(count):
        for j in range(i + 1, min(count, i + reach + 1)):
            exchanged = np.arange(count)
            exchanged[[i, j]] = j, i
            orders.append(exchanged)
            if count <= _ALL and 1 < j - i <= _NEAR:
                remaining = np.delete(np.arange(count), i)
                forward = np.insert(remaining, j, i)
                orders += [forward, np.argsort(forward)]
    return tuple(orders)
