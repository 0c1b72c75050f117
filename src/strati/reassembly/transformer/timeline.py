r"""How likely an arrangement of all units on one time line is.

Similarities fall with the distance of two blocks. For roles ``a`` and ``b`` at places ``p`` and ``p + d`` the expected
similarity is ``c0 [d = 0] + c+ exp(-(d-1)/l) [d > 0] + c- exp(-(-d-1)/l) [d < 0] - f sqrt(|d|)``, with Gaussian noise.
The coefficients are estimated from the arrangement itself, with those of other networks, mean and spread, as prior
(:mod:`~strati.reassembly.transformer.calibration`): a pair of roles that shows nothing gets no weight, and one that
shows the opposite of what it shows elsewhere speaks against the arrangement.

Every arrangement has the same number of pairs of units at each distance. So the least squares are the same for all of
them, but for the sums of similarities by distance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.transformer.evidence import Expected

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

    one: str
    two: str
    rows: Ints
    columns: Ints
    values: Matrix
    shapes: Matrix
    gram: Matrix
    either: bool
    noise: float

    def sides(self, places: Mapping[str, Ints], count: int) -> Matrix:
        """The products of the shapes with the similarities at these places."""
        apart = places[self.two][self.columns] - places[self.one][self.rows]
        if self.either:
            apart = np.abs(apart)
        return np.asarray(self.shapes @ np.bincount(apart + count - 1, self.values, 2 * count - 1))


class Timeline:
    """Similarities and what is expected of them.

    Args:
        given: Similarities.
        prior: Coefficients to be expected.
    """

    def __init__(self, given: Similarity, prior: Coefficients) -> None:
        self.given = given
        self.prior = prior
        self.entries = {pair: found for pair in given.pairs() if len((found := _entries(given, pair)).values)}
        self._known: dict[Pair, tuple[Matrix, Matrix, Matrix]] = {}
        for pair, own in self.entries.items():
            means, pulls = self._expected(pair, own)
            inverse = np.asarray(np.linalg.inv(own.gram + np.diag(pulls)), dtype=np.float64)
            self._known[pair] = (means, pulls, inverse)

    def _expected(self, pair: Pair, own: _Entries) -> tuple[Matrix, Matrix]:
        """Mean of the coefficients, and the variance of the similarities over that of the coefficients."""
        known = self.prior.get(pair, _UNKNOWN)
        means = np.array([one.mean for one in known])
        spreads = np.array([one.spread for one in known])
        return means, (float(np.mean(np.square(own.values))) + own.noise) / np.square(spreads)

    def log_likelihood(self, places: Mapping[str, Ints], *, of: str | None = None) -> float:
        """Of all similarities, or those of one kind of units; coefficients and variance are each pair of roles' own."""
        total = 0.0
        for (one, two), table in self.given.together.items():
            if of is None or of in (one, two):
                at = np.argsort(places[two])[places[one]]
                total += float(table[np.arange(len(table)), at].sum())
        for pair, own in self.entries.items():
            if of is None or of in (own.one, own.two):
                means, pulls, inverse = self._known[pair]
                side = own.sides(places, self.given.count)
                c = inverse @ (side + pulls * means)
                many = len(own.values)
                whole = float(own.values @ own.values)
                rest = max(whole - 2 * float(c @ side) + float(c @ own.gram @ c), 0.0)
                total -= 0.5 * many * float(np.log(rest / many + own.noise))
                # the prior, in units of the variance that the pulls were made of
                total -= 0.5 * float(pulls @ np.square(c - means)) / (whole / many + own.noise)
        return total

    def fit(self, places: Mapping[str, Ints]) -> dict[Pair, Matrix]:
        """Expected similarity over its variance, by distance, for each pair of roles: estimated at these places."""
        found: dict[Pair, Matrix] = {}
        for pair, own in self.entries.items():
            means, pulls, inverse = self._known[pair]
            side = own.sides(places, self.given.count)
            c = inverse @ (side + pulls * means)
            rest = float(own.values @ own.values) - 2 * float(c @ side) + float(c @ own.gram @ c)
            _both_ways(found, pair, c @ own.shapes / (max(rest, 0.0) / len(own.values) + own.noise))
        return found

    def expected(self) -> dict[Pair, Matrix]:
        """The same before anything is known of the places: the prior's coefficients over the whole variance."""
        found: dict[Pair, Matrix] = {}
        for pair, own in self.entries.items():
            spread = float(np.mean(np.square(own.values)))
            _both_ways(found, pair, self._known[pair][0] @ own.shapes / (spread + own.noise))
        return found


def coefficients(
    given: Similarity, places: Mapping[str, Ints]
) -> dict[Pair, tuple[float, float, float, float]]:
    """``c0, c+, c-, f`` of each pair of roles at given places, by least squares."""
    found = {}
    for pair in given.pairs():
        own = _entries(given, pair)
        if len(own.values):
            side = own.sides(places, given.count)
            same, later, earlier, far = np.linalg.solve(own.gram + _RIDGE * np.eye(4), side).tolist()
            found[pair] = (same, later, earlier, far)
    return found


def reordered(given: Similarity, orders: Mapping[str, Ints]) -> Similarity:
    """The same with the units of each kind in another order."""
    between = {
        (a, b): table[np.ix_(orders[given.kind(a)], orders[given.kind(b)])]
        for (a, b), table in given.between.items()
    }
    together = {
        (one, two): table[np.ix_(orders[one], orders[two])] for (one, two), table in given.together.items()
    }
    return Similarity(given.units, between, given.count, together, given.near)


def _both_ways(found: dict[Pair, Matrix], pair: Pair, shape: Matrix) -> None:
    found[pair] = shape
    found[pair[::-1]] = found[pair][::-1]


def _entries(given: Similarity, pair: Pair) -> _Entries:
    a, b = pair
    one, two = given.kind(a), given.kind(b)
    count = given.count
    kept: NDArray[np.bool_] = np.ones((count, count), dtype=bool)
    if one == two:  # a unit's own pieces: together already
        kept = ~np.eye(count, dtype=bool) if a != b else np.triu(kept, 1)
    rows, columns = np.nonzero(kept)
    values = np.asarray(given.between[pair][kept], dtype=np.float64)
    values = values - values.mean() if len(values) else values
    apart = columns - rows  # units at their own numbers: any arrangement has these distances
    if a == b:  # no direction in a role's likeness to itself
        apart = np.abs(apart)
    many = np.bincount(apart + count - 1, minlength=2 * count - 1).astype(np.float64)
    shapes = basis(count)
    if given.near & {a, b}:
        shapes = shapes * np.array([1.0, 1.0, 1.0, 0.0])[:, None]
    shapes = shapes - (shapes @ many / max(many.sum(), 1.0))[:, None]
    noise = _LOOSE if a.endswith(DEPTH) or b.endswith(DEPTH) else NOISE
    return _Entries(one, two, rows, columns, values, shapes, (shapes * many) @ shapes.T, a == b, noise)
