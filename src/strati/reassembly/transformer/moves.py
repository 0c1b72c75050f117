"""Exchanges of pieces between the places of a network: what is tried where the weights are not sure.

A socket is a place for one piece: a slot of one block, or a slot that is there once. A move gives sockets the pieces of
others of the same shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from strati.reassembly.transformer.layout import slots_of, unit_kinds

if TYPE_CHECKING:
    from strati.reassembly.transformer.blueprint import Blueprint

Socket = tuple[str, int]
"""The slot's role and the number of the block; :data:`ONCE` for a slot that is there once."""

ONCE = -1

_FAR = 12
"""Vectors are exchanged up to so many blocks apart."""


@dataclass(frozen=True)
class Move:
    """Sockets, each with the one whose piece it gets; all others keep theirs."""

    source: Mapping[Socket, Socket]

    @property
    def start(self) -> int:
        """The first block that changes."""
        return min(max(block, 0) for _, block in self.source)

    def inverse(self) -> Move:
        """The move that undoes it."""
        return Move({old: new for new, old in self.source.items()})


def permuted(orders: Mapping[str, Sequence[int]]) -> Move:
    """Role to the old block of each block's new piece, as a move."""
    return Move(
        {
            (role, k): (role, int(old))
            for role, order in orders.items()
            for k, old in enumerate(order)
            if old != k
        }
    )


def exchanged(pairs: Iterable[tuple[Socket, Socket]]) -> Move:
    """Sockets that exchange their pieces, two by two."""
    found: dict[Socket, Socket] = {}
    for one, two in pairs:
        found[one], found[two] = two, one
    return Move(found)


def swap(roles: Sequence[str], i: int, j: int) -> Move:
    """Two blocks exchange their pieces of some roles."""
    return exchanged(((role, i), (role, j)) for role in roles)


def all_moves(blueprint: Blueprint, *, matrices: bool, told: bool) -> Iterator[tuple[bool, list[Move]]]:
    """Kinds of moves, each with whether a move must gain clearly: chains, vectors, roles, the whole, blocks, units.

    Matrices were placed by their weights; while vectors are wrong, many a wrong exchange of matrices gains a little.

    Args:
        blueprint: The architecture.
        matrices: Also of matrices.
        told: Pieces tell their roles: none is exchanged with one of another role.
    """
    n = blueprint.blocks
    if matrices:
        for some in _groups(blueprint):
            yield True, [permuted(dict.fromkeys(some, order)) for order in _turned(n)]
    for slot in blueprint.block:
        if not slot.matrix:
            yield (
                False,
                [swap([slot.role], i, j) for i in range(n) for j in range(i + 1, min(n, i + _FAR))],
            )
    if matrices and not told:
        yield True, _roles(blueprint)
    if not told:
        yield False, _vectors(blueprint)
    if not matrices:
        return
    every = [slot.role for slot in blueprint.block]
    yield True, reversal(blueprint)
    yield True, [swap(every, i, j) for i in range(n) for j in range(i + 1, min(n, i + 3))]
    moves = []
    for i in range(n):
        for j in (*range(max(0, i - 4), i - 1), *range(i + 2, min(n, i + 5))):
            order = list(range(n))
            order.insert(j, order.pop(i))
            moves.append(permuted(dict.fromkeys(every, order)))
    yield True, moves
    for some in _groups(blueprint):
        yield True, [swap(some, i, j) for i in range(n) for j in range(i + 1, min(n, i + 5))]


def reversal(blueprint: Blueprint) -> list[Move]:
    """All blocks in the reverse order, if there are several."""
    every = [slot.role for slot in blueprint.block]
    back = range(blueprint.blocks)[::-1]
    return [permuted(dict.fromkeys(every, back))] if blueprint.blocks > 1 else []


def _groups(blueprint: Blueprint) -> list[list[str]]:
    """Roles that move as one: those of each kind of units, with and without the biases of their matrices."""
    found = []
    for roles in unit_kinds(blueprint).values():
        group = list(slots_of(roles, blueprint))
        biases = [s.role for s in blueprint.block if not s.matrix and s.role.partition(".")[0] in group]
        found += [group, group + biases] if biases else [group]
    return found


def _turned(n: int) -> list[list[int]]:
    """A chain turned round, and a place on or back: a chain knows its own order, not where it lies beside others."""
    order = list(range(n))
    return [order[::-1], order[1:] + order[:1], order[-1:] + order[:-1]] if n > 1 else []


def _roles(blueprint: Blueprint) -> list[Move]:
    """Two matrices of one block and one shape, in one block or in all, with and without their biases."""
    n = blueprint.blocks
    biases = {s.role.partition(".")[0] for s in blueprint.block if s.role.endswith(".bias") and not s.matrix}
    found = []
    for one, two in combinations([slot for slot in blueprint.block if slot.matrix], 2):
        if tuple(one.shape) != tuple(two.shape):
            continue
        for parts in (("",), ("", ".bias")) if {one.role, two.role} <= biases else (("",),):
            blocks = [[((one.role + p, k), (two.role + p, k)) for p in parts] for k in range(n)]
            found += [exchanged(block) for block in blocks]
            if n > 1:
                found.append(exchanged(pair for block in blocks for pair in block))
    whole = [slot for slot in blueprint.whole if len(slot.shape) == 2]
    for one, two in combinations(whole, 2):
        if tuple(one.shape) == tuple(two.shape):
            found.append(exchanged([((one.role, ONCE), (two.role, ONCE))]))
    return found


def _vectors(blueprint: Blueprint) -> list[Move]:
    """Two vectors of one length and different roles, wherever they are."""
    sockets = vector_sockets(blueprint)
    return [
        exchanged([(a, b)])
        for same in sockets.values()
        for a, b in combinations(same, 2)
        if a[0] != b[0] or ONCE in (a[1], b[1])
    ]


def vector_sockets(blueprint: Blueprint) -> dict[tuple[int, ...], list[Socket]]:
    """Shape to all sockets for vectors of that shape."""
    found: dict[tuple[int, ...], list[Socket]] = {}
    for slot in blueprint.block:
        if not slot.matrix:
            found.setdefault(tuple(slot.shape), []).extend((slot.role, k) for k in range(blueprint.blocks))
    for slot in blueprint.whole:
        if len(slot.shape) == 1:
            found.setdefault(tuple(slot.shape), []).append((slot.role, ONCE))
    return found
