r"""All units on one time line: which units make a block, and in which order the blocks come.

The likeliest arrangement (:mod:`~strati.reassembly.transformer.timeline`) maximises ``sum <S, f> / sigma^2`` over all
pairs of roles, with ``f`` the expected similarity by distance, estimated again from each arrangement.

Moves: one kind of units assigned anew to all places (Hungarian); insertions, exchanges and reversals of single units
or whole blocks; and random kicks, so that the first hill is not the last. The start of a kind's own chain is its
Fiedler order. Which end comes first is decided in :mod:`~strati.reassembly.transformer.direction`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from strati.core.assignment import assign
from strati.reassembly.transformer.evidence import chain, checked, margins
from strati.reassembly.transformer.timeline import Expected, Similarity, Timeline, reordered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]
    Ints = NDArray[np.intp]
    Pair = tuple[str, str]

_NEAR = 8
_FEW = 16
_ENOUGH = 10
_SURELY = 12.0
"""With more than so many (the second) blocks single units move at most so far (the first); likeness alone tells blocks
only where there are so many (the third); nats by which units must be told to be of one block to be moved as one."""


@dataclass(frozen=True)
class Arrangement:
    """Places of all units, by kind, and the log-likelihood of the similarities given them."""

    places: Mapping[str, Ints]
    fit: float


def arrange(line: Timeline, rng: np.random.Generator) -> list[Arrangement]:
    """Arrangements of the units, likeliest first; different starts that end alike are one.

    Args:
        line: Similarities and what is expected of them.
        rng: For the kicks.
    """
    count = line.similarity.count
    ended: dict[bytes, Arrangement] = {}

    def settle(places: Mapping[str, Ints], rounds: int) -> Arrangement:
        arrangement = _settled(line, places, rounds)
        ended[b"".join(arrangement.places[kind].tobytes() for kind in sorted(places))] = arrangement
        return arrangement

    best = max((settle(start, 4) for start in _starts(line)), key=lambda arrangement: arrangement.fit)
    for _ in range(3):  # a kind of units may lie the wrong way round, or a place too far
        before = best.fit
        for kicked in _shifted(best.places, count):
            trial = settle(kicked, 2)
            best = trial if trial.fit > best.fit else best
        if best.fit <= before or count > _FEW:
            break
    for _ in range(60 if count <= 8 else 16 if count <= _FEW else 2):
        trial = settle(_perturb(best.places, count, rng), 2)
        best = trial if trial.fit > best.fit else best
    return sorted(ended.values(), key=lambda arrangement: -arrangement.fit)


def _settled(
    line: Timeline, places: Mapping[str, Ints], rounds: int, free: Sequence[str] | None = None
) -> Arrangement:
    """Moves while the objective grows, the coefficients estimated again after each round."""
    for _ in range(rounds):
        before = places
        places = _improve(_Tables(line.similarity, line.fit(places)), places, free)
        if all(np.array_equal(at, before[kind]) for kind, at in places.items()):
            break
    return Arrangement(places, line.log_likelihood(places))


def initial_placement(line: Timeline, fixed: str) -> dict[str, Ints]:
    """Places of all kinds of units but one, whose units stand in order already.

    Each kind is first assigned by its likeness to the fixed one alone, as the prior weighs it; then all are moved while
    the objective grows, and the coefficients estimated again; a kind may also be turned round or shifted by a place.
    """
    similarity = line.similarity
    free = [kind for kind in similarity.units if kind != fixed]
    places = {fixed: np.arange(similarity.count)}
    tables = _Tables(similarity, line.expected())
    places |= {kind: assign(tables.others(places, kind)) for kind in free}

    starts = (places, _improve(tables, places, free))
    best = max((_settled(line, start, 4, free) for start in starts), key=lambda arrangement: arrangement.fit)
    for _ in range(3):
        before = best.fit
        for kind in free:
            for kicked in _shifted({kind: best.places[kind]}, similarity.count):
                trial = _settled(line, {**best.places, **kicked}, 1, free)
                best = trial if trial.fit > best.fit else best
        if best.fit <= before:
            break
    return dict(best.places)


class _Tables:
    """The objective as tables: kind by kind, unit by unit, distance by distance."""

    def __init__(self, similarity: Similarity, model: Mapping[Pair, Matrix]) -> None:
        self.kinds = list(similarity.units)
        self.count = n = similarity.count
        many = (n - np.abs(np.arange(-(n - 1), n))).astype(np.float64)
        self.between: dict[Pair, Matrix] = {}
        for kind_a in self.kinds:
            for kind_b in self.kinds:
                table = np.zeros((n, n, 2 * n - 1))
                for a in similarity.units[kind_a]:
                    for b in similarity.units[kind_b]:
                        if (a, b) in model:
                            shape = model[a, b] - (model[a, b] * many).sum() / many.sum()
                            values = similarity.between[a, b]
                            if kind_a == kind_b:
                                values = values * ~np.eye(n, dtype=bool)
                            table += values[:, :, None] * shape
                for way, near in (((kind_a, kind_b), 1), ((kind_b, kind_a), -1)):
                    if way in similarity.together:
                        table[:, :, n - 1] += (
                            similarity.together[way] if near == 1 else similarity.together[way].T
                        )
                self.between[kind_a, kind_b] = table

    def total(self, places: Mapping[str, Ints]) -> float:
        """The objective."""
        n = self.count
        rows, columns = np.arange(n)[:, None], np.arange(n)[None, :]
        value = 0.0
        for kind_a in places:
            for kind_b in places:
                apart = places[kind_b][None, :] - places[kind_a][:, None] + n - 1
                value += float(self.between[kind_a, kind_b][rows, columns, apart].sum())
        return value

    def others(self, places: Mapping[str, Ints], kind: str) -> Matrix:
        """Unit by place: what it would add with all units of other kinds where they are."""
        n = self.count
        gains = np.zeros((n, n))
        units, place = np.arange(n), np.arange(n)
        for other, at in places.items():
            if other != kind:
                apart = at[None, :] - place[:, None] + n - 1  # place, other unit
                gains += 2 * self.between[kind, other][:, units[None, :], apart].sum(axis=2)
        return gains

    def blocks(self, places: Mapping[str, Ints]) -> Matrix:
        """Block by block and distance, for moves of whole blocks: blocks as places have them."""
        at = {kind: np.argsort(places[kind]) for kind in places}
        pair = np.zeros((self.count, self.count, 2 * self.count - 1))
        for kind_a in places:
            for kind_b in places:
                pair += self.between[kind_a, kind_b][np.ix_(at[kind_a], at[kind_b])]
        return pair


def _improve(
    tables: _Tables, places: Mapping[str, Ints], free: Sequence[str] | None = None
) -> dict[str, Ints]:
    """Moves while the objective grows; of some kinds only, or of all and of whole blocks."""
    n = tables.count
    now = dict(places)
    best = tables.total(now)
    for _ in range(30):
        before = best
        for kind in (tables.kinds if len(tables.kinds) > 1 else []) if free is None else free:
            others = tables.others(now, kind)
            trial = now | {kind: assign(others)}
            value = tables.total(trial)
            if value > best + 1e-9:
                now, best = trial, value
            order = _reorder(
                tables.between[kind, kind], others, np.argsort(now[kind]), n if n <= _FEW else _NEAR
            )
            now = now | {kind: np.argsort(order)}
        if free is None:
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
            totals = values(trials)
            top = int(totals.argmax())
            if totals[top] > best + 1e-9:
                order, best = trials[top], float(totals[top])
        if best <= before + 1e-9:
            break
    return order


@cache
def _moves(n: int, place: int, reach: int) -> Ints:
    """The unit at a place inserted elsewhere or exchanged, every reversal from there, every run from there put last."""
    order = np.arange(n)
    remaining = np.delete(order, place)
    orders = [np.insert(remaining, j, place) for j in range(n) if abs(j - place) <= reach]
    for j in range(place + 1, min(n, place + reach + 1)):
        swapped = order.copy()
        swapped[[place, j]] = swapped[[j, place]]
        orders += [swapped, np.concatenate([order[:place], order[place : j + 1][::-1], order[j + 1 :]])]
        # what stands from here to there goes behind what follows: with place 0 a rotation of all
        orders += [np.concatenate([order[:place], order[j:], order[place:j]])]
    return np.stack(orders)


def _starts(line: Timeline) -> list[dict[str, Ints]]:
    """Blocks by likeness alone along their path; each kind along its own; the other kinds assigned to one of these."""
    similarity = line.similarity
    tables = _Tables(similarity, line.expected())
    starts = _blocks_first(similarity)
    chains = {
        kind: path(
            sum(
                (similarity.between[role, role] for role in roles),
                np.zeros((similarity.count, similarity.count)),
            )
        )
        for kind, roles in similarity.units.items()
    }
    for ways in product((1, -1), repeat=len(chains)):  # a chain does not know which end is its first
        turned = zip(chains.items(), ways, strict=True)
        starts.append({kind: np.argsort(chain_order[::way]) for (kind, chain_order), way in turned})
    for first, chain_order in chains.items():
        for order in (chain_order, chain_order[::-1]):
            places = {first: np.argsort(order)}
            while len(places) < len(similarity.units):
                unplaced = [kind for kind in similarity.units if kind not in places]
                scores = {kind: tables.others(places, kind) for kind in unplaced}
                best = {kind: assign(score) for kind, score in scores.items()}
                clear = {k: float(scores[k][np.arange(similarity.count), best[k]].sum()) for k in unplaced}
                kind = max(unplaced, key=lambda k: clear[k])
                places[kind] = best[kind]
            starts.append(places)
    return starts


def joined(
    similarity: Similarity,
    same: Mapping[str, Expected],
    more: Mapping[Pair, Mapping[str, Matrix]],
    rng: np.random.Generator,
) -> Similarity:
    """The same with the evidence that two units are of one block: all that speaks for it, weighed together.

    Args:
        similarity: Similarities.
        same: ``"q-up"`` to the likeness to be expected of two roles' pieces of one block; names of other signals alike.
        more: Pair of kinds to other signals, by name.
        rng: For the shuffled scores that the evidence is compared with.
    """
    kinds = list(similarity.units)
    evidence_tables = {}
    for i, kind_a in enumerate(kinds):
        for kind_b in kinds[i + 1 :]:
            signals = {
                "-".join(sorted((a, b))): similarity.between[a, b]
                for a in similarity.units[kind_a]
                for b in similarity.units[kind_b]
            }
            signals |= more.get((kind_a, kind_b), {})
            if similarity.count < _ENOUGH and not any(name.startswith("heads") for name in signals):
                evidence_tables[kind_a, kind_b] = np.zeros(
                    (similarity.count, similarity.count)
                )  # few blocks show nothing but the time line
                continue
            expected = {name: same[name] for name in signals if name in same}
            evidence_tables[kind_a, kind_b] = checked(signals, expected, rng)
    return replace(similarity, together=evidence_tables)


@dataclass(frozen=True)
class Merged:
    """Units of several kinds that are surely of one block, as one kind.

    Attributes:
        similarity: The similarities of fewer kinds.
        parts: Kind of unit there, to the kinds it is made of, each with the unit that goes with each unit of the new
            kind.
    """

    similarity: Similarity
    parts: Mapping[str, Mapping[str, Ints]]

    def apart(self, places: Mapping[str, Ints]) -> dict[str, Ints]:
        """Places of the units of the first kinds."""
        member_places = {}
        for kind, members in self.parts.items():
            for member, order in members.items():
                member_places[member] = places[kind][np.argsort(order)]
        return member_places


def merged(similarity: Similarity) -> Merged:
    """Kinds whose units are told by strong evidence to be of one block, every one of them, made one kind.

    Moved one by one, such units would hold each other back.
    """
    parts: dict[str, dict[str, Ints]] = {
        kind: {kind: np.arange(similarity.count)} for kind in similarity.units
    }
    home = {kind: kind for kind in similarity.units}
    for (kind_a, kind_b), table in similarity.together.items():
        partner = assign(table)
        sure = (
            similarity.count > 1
            and float(margins(table, np.arange(similarity.count), partner).min()) > _SURELY
        )
        if sure and home[kind_a] != home[kind_b]:
            target, gone = home[kind_a], home[kind_b]
            # unit k of the kept kind goes with these units of `one` and `two`
            at = partner[parts[target][kind_a]]
            back = np.argsort(parts[gone][kind_b])
            for member, order in parts.pop(gone).items():
                parts[target][member] = order[back[at]]
                home[member] = target
    if len(parts) == len(similarity.units):
        return Merged(similarity, parts)
    orders = {member: order for members in parts.values() for member, order in members.items()}
    plain = reordered(similarity, orders)
    units = {kind: tuple(r for m in members for r in similarity.units[m]) for kind, members in parts.items()}
    together: dict[Pair, Matrix] = {}
    for (kind_a, kind_b), table in plain.together.items():
        a, b = home[kind_a], home[kind_b]
        if a != b:
            key, values = ((a, b), table) if (b, a) not in together else ((b, a), table.T)
            together[key] = together[key] + values if key in together else values
    return Merged(Similarity(units, plain.between, similarity.count, together, similarity.near), parts)


def _blocks_first(similarity: Similarity) -> list[dict[str, Ints]]:
    """Units that are alike as one block, then the path of the blocks, both directions."""
    kinds = list(similarity.units)
    tables = {
        (kinds.index(kind_a), kinds.index(kind_b)): table
        for (kind_a, kind_b), table in similarity.together.items()
    }
    groups = chain(tables, similarity.count, len(kinds))
    alike = np.zeros((similarity.count, similarity.count))
    for kind, pieces in zip(kinds, groups, strict=True):
        for role in similarity.units[kind]:
            alike += similarity.between[role, role][np.ix_(pieces, pieces)]
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
    shifted = []
    for kind, at in places.items():
        for new in (count - 1 - at, (at + 1) % count, (at - 1) % count):
            shifted.append({**places, kind: new})
    return shifted


def _perturb(places: Mapping[str, Ints], count: int, rng: np.random.Generator) -> dict[str, Ints]:
    """Some units of one kind exchanged, or two runs of blocks."""
    if count > 3 and rng.integers(3) == 0:
        first, second, third = np.sort(rng.permutation(count - 1)[:3]) + 1
        order = np.arange(count)
        back = np.argsort(
            np.concatenate([order[:first], order[second:third], order[first:second], order[third:]])
        )
        return {other: back[spots] for other, spots in places.items()}
    kind = sorted(places)[int(rng.integers(len(places)))]
    at = places[kind].copy()
    moved = rng.permutation(count)[: max(2, count // 3)]
    at[moved] = at[np.roll(moved, 1)]
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
