r"""All units on one time line: which units make a block, and in which order the blocks come.

Similarities on the stream fall with the distance of two blocks. For roles ``a`` and ``b`` at places ``p`` and
``p + d`` the
expected similarity is ``c0 [d = 0] + c+ exp(-(d-1)/l) [d > 0] + c- exp(-(-d-1)/l) [d < 0]``; with Gaussian noise the
likeliest arrangement maximises ``sum <S, f> / sigma^2`` over all pairs of roles. The coefficients begin at
those of other
networks (:mod:`~strati.reassembly.transformer.calibration`) and are then estimated from the arrangement
itself, drawn towards
the former: a pair of roles that shows nothing gets no weight.

Moves: one kind of units assigned anew to all places (Hungarian); insertions, exchanges and reversals of single
units or whole
blocks; and random kicks, so that the first hill is not the last. The start of a kind's own chain is its Fiedler order.
Which end comes first is decided in :mod:`~strati.reassembly.transformer.direction`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.assignment import assign
from strati.reassembly.transformer.evidence import Expected, chain, checked

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]
    Ints = NDArray[np.intp]
    Pair = tuple[str, str]

REACH = 1.5
"""Blocks over which similarity falls by a factor of e."""

NOISE = 1e-4
_PRIOR = 8.0
_NEAR = 8
_FEW = 16
_ENOUGH = 10
"""Variance added to that of similarities; weight of the prior in entries; with more than so many blocks single
units move
at most so far; likeness alone tells blocks only where there are so many."""


@dataclass(frozen=True)
class Similarity:
    """What is to be arranged.

    Attributes:
        units: Kind of unit to its roles: ``{"qk": ("q", "k"), ...}``; a unit's pieces have one index in every role.
        between: Pair of roles to similarity, units by units; every pair both ways.
        count: Units of each kind.
        together: Pair of kinds to evidence, in nats, that two units are of one block (:func:`joined`).
    """

    units: Mapping[str, tuple[str, ...]]
    between: Mapping[Pair, Matrix]
    count: int
    together: Mapping[Pair, Matrix] = field(default_factory=dict)

    def kind(self, role: str) -> str:
        """The kind of unit that a role belongs to."""
        return next(kind for kind, roles in self.units.items() if role in roles)

    def pairs(self) -> list[Pair]:
        """Every pair of roles once."""
        return [(a, b) for a, b in self.between if a <= b]


@dataclass(frozen=True)
class Arrangement:
    """Places of all units, by kind, and the log-likelihood of the similarities given them."""

    places: Mapping[str, Ints]
    fit: float


Coefficients = Mapping[tuple[str, str], tuple[float, float, float, float]]
"""Pair of roles to ``c0, c+, c-``."""


@cache
def basis(count: int) -> Matrix:
    """The three shapes by distance -(count-1) .. count-1: same place, later, earlier."""
    apart = np.arange(-(count - 1), count)
    fall = np.exp(-(np.abs(apart) - 1) / REACH)
    far = np.sqrt(np.abs(apart) / max(count - 1, 1))
    return np.stack(
        [(apart == 0) * 1.0, np.where(apart > 0, fall, 0.0), np.where(apart < 0, fall, 0.0), -far]
    )


def arrange(given: Similarity, prior: Coefficients, rng: np.random.Generator) -> list[Arrangement]:
    """Arrangements of the units, likeliest first; different starts that end alike are one.

    Args:
        given: Similarities.
        prior: Coefficients to be expected.
        rng: For the kicks.
    """
    ended: dict[bytes, Arrangement] = {}

    def settle(places: Mapping[str, Ints], rounds: int) -> Arrangement:
        model = fit(given, places, prior)
        for _ in range(rounds):
            places = _improve(_Tables(given, model), places)
            model = fit(given, places, prior)
        found = Arrangement(places, log_likelihood(given, places, prior))
        ended[b"".join(places[kind].tobytes() for kind in sorted(places))] = found
        return found

    best = max((settle(start, 4) for start in _starts(given, prior)), key=lambda one: one.fit)
    for _ in range(3):  # a kind of units may lie the wrong way round, or a place too far
        before = best.fit
        for kicked in _shifted(best.places, given.count):
            trial = settle(kicked, 2)
            best = trial if trial.fit > best.fit else best
        if best.fit <= before or given.count > _FEW:
            break
    for _ in range(60 if given.count <= 8 else 16 if given.count <= _FEW else 2):
        trial = settle(_kicked(best.places, given.count, rng), 2)
        best = trial if trial.fit > best.fit else best
    return sorted(ended.values(), key=lambda one: -one.fit)


def log_likelihood(
    given: Similarity, places: Mapping[str, Ints], prior: Coefficients, *, of: str | None = None
) -> float:
    """Of all similarities, each pair of roles with its own coefficients and variance; or of those of one kind of units."""
    total = 0.0
    for (one, two), table in given.together.items():
        if of is not None and of not in (one, two):
            continue
        total += float(table[places[one][:, None] == places[two][None, :]].sum())
    for pair in given.pairs():
        if of is not None and of not in (given.kind(pair[0]), given.kind(pair[1])):
            continue
        values, shapes = _entries(given, places, pair)
        if len(values):
            rest = values - _coefficients(values, shapes, prior.get(pair, (0, 0, 0, 0))) @ shapes
            total -= 0.5 * len(values) * float(np.log(np.mean(np.square(rest)) + NOISE))
    return total


def coefficients(
    given: Similarity, places: Mapping[str, Ints]
) -> dict[Pair, tuple[float, float, float, float]]:
    """``c0, c+, c-`` of each pair of roles at given places, by least squares."""
    found = {}
    for pair in given.pairs():
        values, shapes = _entries(given, places, pair)
        if len(values):
            same, later, earlier, far = _coefficients(values, shapes, None)
            found[pair] = (float(same), float(later), float(earlier), float(far))
    return found


def fit(given: Similarity, places: Mapping[str, Ints], prior: Coefficients) -> dict[Pair, Matrix]:
    """Expected similarity over its variance, by distance, for each pair of roles: estimated at these places."""
    found: dict[Pair, Matrix] = {}
    for pair in given.pairs():
        values, shapes = _entries(given, places, pair)
        if len(values):
            c = _coefficients(values, shapes, prior.get(pair, (0, 0, 0, 0)))
            _both_ways(found, pair, c / (float(np.mean(np.square(values - c @ shapes))) + NOISE), given.count)
    return found


def expected(given: Similarity, prior: Coefficients) -> dict[Pair, Matrix]:
    """The same before anything is known of the places: the prior's coefficients over the whole variance."""
    found: dict[Pair, Matrix] = {}
    for pair in given.pairs():
        table = given.between[pair]
        rest = table[~np.eye(len(table), dtype=bool)] if given.kind(pair[0]) == given.kind(pair[1]) else table
        spread = float(np.mean(np.square(rest))) if rest.size else 1.0
        _both_ways(found, pair, np.asarray(prior.get(pair, (0, 0, 0, 0))) / (spread + NOISE), given.count)
    return found


def _both_ways(found: dict[Pair, Matrix], pair: Pair, weights: Matrix, count: int) -> None:
    found[pair] = weights @ basis(count)
    found[pair[::-1]] = found[pair][::-1]


def _entries(given: Similarity, places: Mapping[str, Ints], pair: Pair) -> tuple[Matrix, Matrix]:
    """The similarities of a pair of roles and the three shapes at these places, around their means."""
    a, b = pair
    one, two = given.kind(a), given.kind(b)
    table = given.between[pair]
    kept: NDArray[np.bool_] = np.ones(table.shape, dtype=bool)
    if one == two:  # a unit's own pieces: together already
        kept = ~np.eye(len(table), dtype=bool) if a != b else np.triu(kept, 1)
    apart = (places[two][None, :] - places[one][:, None])[kept] + given.count - 1
    if a == b:  # no direction in a role's likeness to itself
        apart = np.abs(apart - given.count + 1) + given.count - 1
    values, shapes = table[kept], basis(given.count)[:, apart]
    if not len(values):
        return values, shapes
    return values - values.mean(), shapes - shapes.mean(axis=1, keepdims=True)


def _coefficients(values: Matrix, shapes: Matrix, prior: tuple[float, float, float, float] | None) -> Matrix:
    gram, side = shapes @ shapes.T, shapes @ values
    pull = np.full(len(shapes), 1e-6)
    if prior is not None:
        pull += _PRIOR * float(np.trace(gram)) / len(values)
        side = side + pull * np.asarray(prior)
    return np.asarray(np.linalg.solve(gram + np.diag(pull), side), dtype=np.float64)


class _Tables:
    """The objective as tables: kind by kind, unit by unit, distance by distance."""

    def __init__(self, given: Similarity, model: Mapping[Pair, Matrix]) -> None:
        self.kinds = list(given.units)
        self.count = n = given.count
        many = (n - np.abs(np.arange(-(n - 1), n))).astype(np.float64)
        self.between: dict[Pair, Matrix] = {}
        for one in self.kinds:
            for two in self.kinds:
                table = np.zeros((n, n, 2 * n - 1))
                for a in given.units[one]:
                    for b in given.units[two]:
                        if (a, b) in model:
                            shape = model[a, b] - (model[a, b] * many).sum() / many.sum()
                            values = given.between[a, b]
                            if one == two:
                                values = values * ~np.eye(n, dtype=bool)
                            table += values[:, :, None] * shape
                for way, near in (((one, two), 1), ((two, one), -1)):
                    if way in given.together:
                        table[:, :, n - 1] += given.together[way] if near == 1 else given.together[way].T
                self.between[one, two] = table

    def total(self, places: Mapping[str, Ints]) -> float:
        """The objective."""
        n = self.count
        rows, columns = np.arange(n)[:, None], np.arange(n)[None, :]
        value = 0.0
        for one in places:
            for two in places:
                apart = places[two][None, :] - places[one][:, None] + n - 1
                value += float(self.between[one, two][rows, columns, apart].sum())
        return value

    def others(self, places: Mapping[str, Ints], kind: str) -> Matrix:
        """Unit by place: what it would add with all units of other kinds where they are."""
        n = self.count
        found = np.zeros((n, n))
        units, place = np.arange(n), np.arange(n)
        for other, at in places.items():
            if other != kind:
                apart = at[None, :] - place[:, None] + n - 1  # place, other unit
                found += 2 * self.between[kind, other][:, units[None, :], apart].sum(axis=2)
        return found

    def blocks(self, places: Mapping[str, Ints]) -> Matrix:
        """Block by block and distance, for moves of whole blocks: blocks as places have them."""
        at = {kind: np.argsort(places[kind]) for kind in places}
        pair = np.zeros((self.count, self.count, 2 * self.count - 1))
        for one in places:
            for two in places:
                pair += self.between[one, two][np.ix_(at[one], at[two])]
        return pair


def _improve(tables: _Tables, places: Mapping[str, Ints]) -> dict[str, Ints]:
    """Moves while the objective grows."""
    n = tables.count
    now = dict(places)
    best = tables.total(now)
    for _ in range(30):
        before = best
        for kind in tables.kinds if len(tables.kinds) > 1 else []:
            others = tables.others(now, kind)
            trial = now | {kind: assign(others)}
            value = tables.total(trial)
            if value > best + 1e-9:
                now, best = trial, value
            order = _reorder(
                tables.between[kind, kind], others, np.argsort(now[kind]), n if n <= _FEW else _NEAR
            )
            now = now | {kind: np.argsort(order)}
        moved = _reorder(tables.blocks(now), np.zeros((n, n)), np.arange(n), n)
        back = np.argsort(moved)
        now = {kind: back[at] for kind, at in now.items()}
        best = tables.total(now)
        if best <= before + 1e-9:
            break
    return now


def _reorder(pair: Matrix, single: Matrix, order: Ints, reach: int) -> Ints:
    """Insertions, exchanges and reversals of an order (unit at each place) while the sum grows."""
    n = len(order)
    places = np.arange(n)
    steps = places[None, :] - places[:, None] + n - 1

    def values(orders: Ints) -> Matrix:
        both = pair[orders[:, :, None], orders[:, None, :], steps].sum(axis=(1, 2))
        return np.asarray(both + single[orders, places].sum(axis=1))

    best = float(values(order[None])[0])
    for _ in range(100):
        before = best
        for place in range(n):
            trials = order[_moves(n, place, reach)]
            found = values(trials)
            top = int(found.argmax())
            if found[top] > best + 1e-9:
                order, best = trials[top], float(found[top])
        if best <= before + 1e-9:
            break
    return order


@cache
def _moves(n: int, place: int, reach: int) -> Ints:
    """The unit at a place inserted elsewhere or exchanged, every reversal from there, every run from there put last."""
    order = np.arange(n)
    rest = np.delete(order, place)
    found = [np.insert(rest, j, place) for j in range(n) if abs(j - place) <= reach]
    for j in range(place + 1, min(n, place + reach + 1)):
        swapped = order.copy()
        swapped[[place, j]] = swapped[[j, place]]
        found += [swapped, np.concatenate([order[:place], order[place : j + 1][::-1], order[j + 1 :]])]
        # what stands from here to there goes behind what follows: with place 0 a rotation of all
        found += [np.concatenate([order[:place], order[j:], order[place:j]])]
    return np.stack(found)


def _starts(given: Similarity, prior: Coefficients) -> list[dict[str, Ints]]:
    """Blocks by likeness alone along their path; and from each kind's own path the other kinds assigned to it."""
    tables = _Tables(given, expected(given, prior))
    starts = _blocks_first(given)
    for first, roles in given.units.items():
        alike = sum((given.between[role, role] for role in roles), np.zeros((given.count, given.count)))
        chain = path(alike)
        for order in (chain, chain[::-1]):
            places = {first: np.argsort(order)}
            while len(places) < len(given.units):
                rest = [kind for kind in given.units if kind not in places]
                scores = {kind: tables.others(places, kind) for kind in rest}
                best = {kind: assign(score) for kind, score in scores.items()}
                clear = {k: float(scores[k][np.arange(given.count), best[k]].sum()) for k in rest}
                kind = max(rest, key=lambda k: clear[k])
                places[kind] = best[kind]
            starts.append(places)
    return starts


def joined(
    given: Similarity,
    same: Mapping[str, Expected],
    more: Mapping[Pair, Mapping[str, Matrix]],
    rng: np.random.Generator,
) -> Similarity:
    """The same with the evidence that two units are of one block: all that speaks for it, weighed together.

    Args:
        given: Similarities.
        same: ``"q-up"`` to the likeness to be expected of two roles' pieces of one block; names of other signals alike.
        more: Pair of kinds to other signals, by name.
        rng: For the shuffled scores that the evidence is compared with.
    """
    kinds = list(given.units)
    found = {}
    for i, one in enumerate(kinds):
        for two in kinds[i + 1 :]:
            signals = {
                "-".join(sorted((a, b))): given.between[a, b]
                for a in given.units[one]
                for b in given.units[two]
            }
            signals |= more.get((one, two), {})
            if given.count < _ENOUGH and not any(name.startswith("heads") for name in signals):
                found[one, two] = np.zeros(
                    (given.count, given.count)
                )  # few blocks show nothing but the time line
                continue
            known = {name: same[name] for name in signals if name in same}
            found[one, two] = checked(signals, known, rng)
    return replace(given, together=found)


def _blocks_first(given: Similarity) -> list[dict[str, Ints]]:
    """Units that are alike as one block, then the path of the blocks, both directions."""
    kinds = list(given.units)
    tables = {(kinds.index(one), kinds.index(two)): table for (one, two), table in given.together.items()}
    groups = chain(tables, given.count, len(kinds))
    alike = np.zeros((given.count, given.count))
    for kind, pieces in zip(kinds, groups, strict=True):
        for role in given.units[kind]:
            alike += given.between[role, role][np.ix_(pieces, pieces)]
    order = path(alike)
    return [
        {kind: np.argsort(pieces[way]) for kind, pieces in zip(kinds, groups, strict=True)}
        for way in (order, order[::-1])
    ]


def path(similarity: Matrix) -> Ints:
    """The order of a chain: neighbours weigh 1, second neighbours 1/2; Fiedler order, then moves while the sum grows.

    Examples:
        >>> place = np.array([2, 0, 3, 1, 4])
        >>> found = path(np.exp(-np.abs(place[:, None] - place[None, :]) / 2.0))
        >>> place[found].tolist() in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0])
        True
    """
    n = len(similarity)
    weight = np.zeros(2 * n - 1)
    for apart, value in ((1, 1.0), (2, 0.5)):
        if apart < n:
            weight[[n - 1 + apart, n - 1 - apart]] = value
    table = similarity[:, :, None] * weight
    return _reorder(table, np.zeros((n, n)), fiedler(similarity), n)


def _shifted(places: Mapping[str, Ints], count: int) -> list[dict[str, Ints]]:
    """Each kind of units turned round, or a place on or back."""
    found = []
    for kind, at in places.items():
        for new in (count - 1 - at, (at + 1) % count, (at - 1) % count):
            found.append({**places, kind: new})
    return found


def _kicked(places: Mapping[str, Ints], count: int, rng: np.random.Generator) -> dict[str, Ints]:
    """Some units of one kind exchanged, or two runs of blocks."""
    if count > 3 and rng.integers(3) == 0:
        one, two, three = np.sort(rng.permutation(count - 1)[:3]) + 1
        order = np.arange(count)
        back = np.argsort(np.concatenate([order[:one], order[two:three], order[one:two], order[three:]]))
        return {other: back[spots] for other, spots in places.items()}
    kind = sorted(places)[int(rng.integers(len(places)))]
    at = places[kind].copy()
    some = rng.permutation(count)[: max(2, count // 3)]
    at[some] = at[np.roll(some, 1)]
    return {**places, kind: at}


def fiedler(similarity: Matrix) -> Ints:
    """The order of a chain by the second eigenvector of the Laplacian of its similarities.

    Examples:
        >>> place = np.array([2, 0, 3, 1])
        >>> found = fiedler(np.exp(-np.abs(place[:, None] - place[None, :]) / 2.0))
        >>> place[found].tolist() in ([0, 1, 2, 3], [3, 2, 1, 0])
        True
    """
    if len(similarity) < 3:
        return np.arange(len(similarity))
    weight = similarity - similarity.min()
    np.fill_diagonal(weight, 0)
    laplacian = np.diag(weight.sum(axis=1)) - weight
    return np.argsort(np.linalg.eigh(laplacian)[1][:, 1], kind="stable")
