"""The chain of blocks the right way round, with what stands at its ends and the vectors beside its matrices.

The signs of :mod:`~strati.reassembly.transformer.direction`, how likely the similarities are in either direction, and
how likely the vectors are beside the matrices in either: norms and biases grow or fall along a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.transformer.asymmetry import ends_of, odds_of
from strati.reassembly.transformer.direction import Direction, direction, signs
from strati.reassembly.transformer.layout import end_tables
from strati.reassembly.transformer.matrices import Placed, turned
from strati.reassembly.transformer.timeline import Timeline
from strati.reassembly.transformer.vector_roles import vector_roles
from strati.reassembly.transformer.vectors import PlacedVector, place_vectors

if TYPE_CHECKING:
    from strati.reassembly.transformer.calibration import Prior
    from strati.reassembly.transformer.fold import Folded
    from strati.reassembly.transformer.role_table import Roles

_FIT, _VECTORS = 0.5, 0.25
"""Weight of what the similarities of matrices, and of vectors, prefer, beside the signs: they are not independent."""
_MOST = 4.0
"""Nats that vectors may add at most: where they are placed badly either way, one way may look much better by chance (in
one of 29 networks by 62 nats, the wrong way)."""


@dataclass(frozen=True)
class Oriented:
    """Everything in its place.

    Attributes:
        placed: The matrices, first block first.
        bodies: Vector role to its pieces.
        whole: Name to the piece that is there once.
        way: How sure the direction is, and what told it.
    """

    placed: Placed
    bodies: Mapping[str, PlacedVector]
    whole: Mapping[str, int]
    way: Direction


def oriented(bare: Folded, placed: Placed, roles: Roles, prior: Prior) -> Oriented:
    """Decide the direction and what stands at the ends, and place the vectors."""
    ways = [placed, turned(placed)]
    sides = [_vectors(bare, one, roles, prior) for one in ways]
    by_vectors = sides[0].fit - sides[1].fit
    whole, way = _directed(bare, placed, roles, prior, by_vectors)
    side = 0 if way.log_odds >= 0 else 1
    found = replace(way, log_odds=abs(way.log_odds))
    return Oriented(ways[side], sides[side].bodies, {**whole, **sides[side].whole}, found)


@dataclass(frozen=True)
class _Beside:
    bodies: Mapping[str, PlacedVector]
    whole: Mapping[str, int]
    fit: float


def _vectors(bare: Folded, placed: Placed, roles: Roles, prior: Prior) -> _Beside:
    pieces = bare.pieces
    fixed = _norms_told(bare, placed)
    once: Mapping[str, int] = {}
    candidates: Mapping[str, Sequence[int]] = {
        s.role: roles.block[s.role] for s in pieces.blueprint.block if not s.matrix and s.role in roles.block
    }
    if any(n not in pieces.told for n in pieces.arrays):
        candidates, once = vector_roles(pieces, placed.stacked, prior.coefficients, fixed)
    bodies, fit = place_vectors(pieces, candidates, placed.stacked, prior.coefficients, fixed)
    return _Beside(bodies, once, fit)


def _norms_told(bare: Folded, placed: Placed) -> dict[str, list[int]]:
    """Norm weights in network order, where moved scales told each reader's."""
    found: dict[str, list[int]] = {}
    for norm, readers in (
        ("norm1.weight", ("q", "k", "v", "qkv")),
        ("norm2.weight", ("gate", "up", "gate_up")),
    ):
        slots = [placed.numbers[role] for role in readers if role in placed.numbers]
        if bare.norm_of and slots and bare.pieces.blueprint.slot(norm) is not None:
            votes = [[bare.norm_of.get(slot[k], -1) for slot in slots] for k in range(placed.given.count)]
            chosen = [max(set(some), key=some.count) for some in votes]
            if -1 not in chosen and len(set(chosen)) == len(chosen):
                found[norm] = chosen
    if len({n for numbers in found.values() for n in numbers}) < sum(map(len, found.values())):
        return {}
    return found


def said_by_vectors(difference: float) -> float:
    """Nats for the direction from how much better vectors fit one way than the other: a weight of it, and limited.

    Examples:
        >>> said_by_vectors(2.0), said_by_vectors(-248.0)
        (0.5, -4.0)
    """
    return min(_MOST, max(-_MOST, _VECTORS * difference))


def _directed(
    bare: Folded, placed: Placed, roles: Roles, prior: Prior, by_vectors: float
) -> tuple[Mapping[str, int], Direction]:
    """What stands at the ends, and the odds that the chain lies as it should."""
    pieces = bare.pieces
    ways = [roles.whole]
    if ("embedding", "head") in roles.twins:
        swapped = {"embedding": roles.whole["head"], "head": roles.whole["embedding"]}
        ways.append({**roles.whole, **swapped})
    count = placed.given.count
    ahead = {kind: np.arange(count) for kind in placed.given.units}
    behind = {kind: at[::-1] for kind, at in ahead.items()}
    line = Timeline(placed.given, prior.coefficients)
    more = {
        "what reads the stream after what writes it": _FIT
        * (line.log_likelihood(ahead) - line.log_likelihood(behind)),
        "sizes of norms and biases": said_by_vectors(by_vectors),
    }
    best: tuple[float, Mapping[str, int], Direction] | None = None
    for whole in ways:
        tables = end_tables(pieces, whole)
        found = direction(signs(placed.stacked, placed.given, tables, pieces.blueprint), prior.signs, more)
        total = abs(found.log_odds)
        if len(ways) > 1:
            ends = ends_of(tables["embedding"], tables["head"], placed.stacked)
            total += odds_of(ends, prior.twins, "embedding over head:")
        if best is None or total > best[0]:
            best = (total, whole, replace(found, lead=np.inf if best is None else total - best[0]))
        else:
            best = (*best[:2], replace(best[2], lead=best[0] - total))
    assert best is not None  # there is one way at least
    return best[1], best[2]
