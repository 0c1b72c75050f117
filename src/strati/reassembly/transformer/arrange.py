r"""All units on one time line: which units make a block, and in which order the blocks come.

The likeliest arrangement (:mod:`~strati.reassembly.transformer.timeline`) maximises ``sum <S, f> / sigma^2`` over all
pairs of roles, with ``f`` the expected similarity by distance, estimated again from each arrangement.

Moves: one kind of units assigned anew to all places (Hungarian); insertions, exchanges and reversals of single units or
whole blocks; and random kicks, so that the first hill is not the last. The start of a kind's own chain is its Fiedler
order. Which end comes first is decided in :mod:`~strati.reassembly.transformer.direction`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.assignment import assign
from strati.reassembly.transformer.evidence import Expected, chain, checked, margins
from strati.reassembly.transformer.timeline import Similarity, Timeline, reordered

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
    ended: dict[bytes, Arrangement] = {}
    count = line.given.count

    def settle(places: Mapping[str, Ints], rounds: int) -> Arrangement:
        for _ in range(rounds):
            before = places
            places = _improve(_Tables(line.given, line.fit(places)), places)
            if all(np.array_equal(at, before[kind]) for kind, at in places.items()):
                break
        found = Arrangement(places, line.log_likelihood(places))
        ended[b"".join(places[kind].tobytes() for kind in sorted(places))] = found
        return found

    best = max((settle(start, 4) for start in _starts(line)), key=lambda one: one.fit)
    for _ in range(3):  # a kind of units may lie the wrong way round, or a place too far
        before = best.fit
        for kicked in _shifted(best.places, count):
            trial = settle(kicked, 2)
            best = trial if trial.fit > best.fit else best
        if best.fit <= before or count > _FEW:
            break
    for _ in range(60 if count <= 8 else 16 if count <= _FEW else 2):
        trial = settle(_kicked(best.places, count, rng), 2)
        best = trial if trial.fit > best.fit else best
    return sorted(ended.values(), key=lambda one: -one.fit)


def beside(line: Timeline, fixed: str) -> dict[str, Ints]:
    """Places of all kinds of units but one, whose units stand in order already.

    Each kind is first assigned by its likeness to the fixed one alone, as the prior weighs it; then all are moved while
    the objective grows, and the coefficients estimated again; a kind may also be turned round or shifted by a place.
    """
    given = line.given
    free = [kind for kind in given.units if kind != fixed]
    places = {fixed: np.arange(given.count)}
    tables = _Tables(given, line.expected())
    places |= {kind: assign(tables.others(places, kind)) for kind in free}

    def settle(places: Mapping[str, Ints], rounds: int) -> tuple[float, Mapping[str, Ints]]:
        for _ in range(rounds):
            before = places
            places = _improve(_Tables(given, line.fit(places)), places, free)
            if all(np.array_equal(at, before[kind]) for kind, at in places.items()):
                break
        return line.log_likelihood(places), places

    best = max(settle(places, 4), settle(_improve(tables, places, free), 4), key=lambda one: one[0])
    for _ in range(3):
        before = best[0]
        for kind in free:
            for kicked in _shifted({kind: best[1][kind]}, given.count):
                trial = settle({**best[1], **kicked}, 1)
                best = trial if trial[0] > best[0] else best
        if best[0] <= before:
            break
    return dict(best[1])


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


def _starts(line: Timeline) -> list[dict[str, Ints]]:
    """Blocks by likeness alone along their path; each kind along its own; the other kinds assigned to one of these."""
    given = line.given
    tables = _Tables(given, line.expected())
    starts = _blocks_first(given)
    chains = {
        kind: path(sum((given.between[role, role] for role in roles), np.zeros((given.count, given.count))))
        for kind, roles in given.units.items()
    }
    for ways in product((1, -1), repeat=len(chains)):  # a chain does not know which end is its first
        turned = zip(chains.items(), ways, strict=True)
        starts.append({kind: np.argsort(own[::way]) for (kind, own), way in turned})
    for first, own in chains.items():
        for order in (own, own[::-1]):
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


@dataclass(frozen=True)
class Merged:
    """Units of several kinds that are surely of one block, as one kind.

    Attributes:
        given: The similarities of fewer kinds.
        parts: Kind of unit there, to the kinds it is made of, each with the unit that goes with each unit of the new
            kind.
    """

    given: Similarity
    parts: Mapping[str, Mapping[str, Ints]]

    def apart(self, places: Mapping[str, Ints]) -> dict[str, Ints]:
        """Places of the units of the first kinds."""
        found = {}
        for kind, members in self.parts.items():
            for member, order in members.items():
                found[member] = places[kind][np.argsort(order)]
        return found


def merged(given: Similarity) -> Merged:
    """Kinds whose units are told by strong evidence to be of one block, every one of them, made one kind.

    Moved one by one, such units would hold each other back.
    """
    parts: dict[str, dict[str, Ints]] = {kind: {kind: np.arange(given.count)} for kind in given.units}
    home = {kind: kind for kind in given.units}
    for (one, two), table in given.together.items():
        partner = assign(table)
        sure = given.count > 1 and float(margins(table, np.arange(given.count), partner).min()) > _SURELY
        if sure and home[one] != home[two]:
            kept, gone = home[one], home[two]
            # unit k of the kept kind goes with these units of `one` and `two`
            at = partner[parts[kept][one]]
            back = np.argsort(parts[gone][two])
            for member, order in parts.pop(gone).items():
                parts[kept][member] = order[back[at]]
                home[member] = kept
    if len(parts) == len(given.units):
        return Merged(given, parts)
    orders = {member: order for members in parts.values() for member, order in members.items()}
    plain = reordered(given, orders)
    units = {kind: tuple(r for m in members for r in given.units[m]) for kind, members in parts.items()}
    together: dict[Pair, Matrix] = {}
    for (one, two), table in plain.together.items():
        a, b = home[one], home[two]
        if a != b:
            key, values = ((a, b), table) if (b, a) not in together else ((b, a), table.T)
            together[key] = together[key] + values if key in together else values
    return Merged(Similarity(units, plain.between, given.count, together, given.near), parts)


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
