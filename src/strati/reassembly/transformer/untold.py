"""Roles that are not told: from shapes, and from the weights where several roles have one shape.

What writes the stream and what reads it is told by the side on which heads are seen
(:mod:`~strati.reassembly.transformer.sides`); then units: a value fits an out, a query a key, head by head and row by
row, so that the pairing of all of attention's matrices tells v from the others. Which of a pair is q and which k, gate
or up, is left to :mod:`~strati.reassembly.transformer.asymmetry`, once the blocks are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.assignment import match
from strati.reassembly.transformer import sides, stream, units
from strati.reassembly.transformer.evidence import Expected, expected_evidence
from strati.reassembly.transformer.fold import same_norm
from strati.reassembly.transformer.pieces import canonical
from strati.reassembly.transformer.role_table import Roles

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Slot
    from strati.reassembly.transformer.calibration import Prior
    from strati.reassembly.transformer.fold import Folded
    from strati.reassembly.transformer.pieces import TransformerPieces

    Floats = NDArray[np.float32]
    Matrix = NDArray[np.float64]
    Pools = dict[frozenset[str], list[int]]

_ATTENTION = frozenset({"q", "k", "v", "out"})
_MLP = frozenset({"gate", "up", "down"})
_NEVER = -1e6
"""Evidence for what cannot be."""

_CLEAR = 0.5
"""How far the least sure writer must lie above the first reader, in typical differences, for both to be told apart."""

_SURE_VALUE = 6.0
"""Nats that exchanging a value with another reader must cost for both to be sure."""


def guess_roles(bare: Folded, prior: Prior) -> Roles:
    """The role of every piece whose file does not tell it."""
    pieces = bare.pieces
    blueprint = pieces.blueprint
    by_shape: dict[tuple[int, ...], list[Slot]] = {}
    for slot in (*blueprint.block, *blueprint.whole):
        by_shape.setdefault(tuple(slot.shape), []).append(slot)
    inside = set(blueprint.block)
    block: dict[str, Sequence[int]] = {}
    whole: dict[str, int] = {}
    uncertain: list[int] = []
    pools: Pools = {}
    for shape, slots in by_shape.items():
        pool = [n for n, values in sorted(pieces.arrays.items()) if tuple(values.shape) == shape]
        names = frozenset(slot.role for slot in slots if slot in inside)
        once = [slot.role for slot in slots if slot not in inside]
        if len(shape) == 2 and names:
            pools |= _divided(pieces, pool, names, once, whole, uncertain)
        elif len(slots) == 1 and names:
            block[slots[0].role] = pool
        elif len(slots) == 1:
            whole[slots[0].role] = pool[0]
        elif len(shape) == 1:  # told apart when the matrices stand
            uncertain += pool
        else:  # the two ends are told apart by likeness to the blocks, tables of positions and the like not at all
            whole |= dict(zip(once, pool, strict=True))
            uncertain += [] if set(once) == {"embedding", "head"} else pool
    twins = _paired(bare, pools, prior, uncertain)
    if (
        "embedding" in whole
        and "head" in whole
        and pieces.arrays[whole["embedding"]].shape == (pieces.arrays[whole["head"]].shape)
    ):
        twins += (("embedding", "head"),)
    block |= {role: pool for names, pool in pools.items() for role in names if len(names) == 1}
    return Roles(block, whole, tuple(uncertain), twins)


def _divided(
    pieces: TransformerPieces,
    pool: Sequence[int],
    names: frozenset[str],
    once: Sequence[str],
    whole: dict[str, int],
    uncertain: list[int],
) -> Pools:
    """Matrices of one shape by what the weights tell of each alone: of attention or not, writing or reading."""
    blueprint = pieces.blueprint
    count = blueprint.blocks
    if len(names) == 1 and not once:
        return {names: list(pool)}
    stack = _stack(pieces, pool, next(slot for slot in blueprint.block if slot.role in names))
    left = list(range(len(pool)))
    attention, other = names & _ATTENTION, names & _MLP
    square = stack.shape[1] == stack.shape[2]
    found: Pools = {}
    if (other or once) and attention and square and blueprint.heads > 1:
        known = sides.attending(stack, blueprint.heads)
        order = sorted(left, key=lambda k: -float(known[k]))
        inner, left = sorted(order[: len(attention) * count]), sorted(order[len(attention) * count :])
    else:
        inner = left if attention else []
        left = [] if attention else left
    for role in once:  # a pooler and the like: least like all others on either side
        rest = left or inner
        sums = _alike(stack[rest])
        odd = rest[int(np.argmin(sums))]
        whole[role] = pool[odd]
        uncertain.append(pool[odd])
        rest.remove(odd)
    reference = _reference(pieces)
    for some, members, writer in ((attention, inner, "out"), (other, left, "down")):
        if writer in some and len(some) > 1:
            heads = blueprint.heads if writer == "out" else 1
            score = sides.writing(stack[members], heads, reference)
            order = [members[k] for k in np.argsort(-score, kind="stable")]
            ranked = np.sort(score)[::-1]
            if ranked[count - 1] - ranked[count] < _CLEAR:
                uncertain += [pool[k] for k in order[count - 1 : count + 1]]
            found[frozenset({writer})] = sorted(pool[k] for k in order[:count])
            members, some = sorted(order[count:]), some - {writer}
        if some:
            found[some] = [pool[k] for k in members]
    return found


def _stack(pieces: TransformerPieces, pool: Sequence[int], slot: Slot) -> Floats:
    turned = [np.asarray(pieces.arrays[n], np.float32) for n in pool]
    return np.stack([one.T if slot.transposed else one for one in turned])


def _alike(stack: Floats) -> Matrix:
    flat = stream.flat_grams(stack[:, :, stream.directions(stack.shape[2])])
    return np.asarray((flat @ flat.T).sum(axis=1), dtype=np.float64)


def _reference(pieces: TransformerPieces) -> Floats | None:
    """The mean Gram matrix on the stream of matrices whose side on it is told by their shape."""
    blueprint = pieces.blueprint
    shapes = [tuple(slot.shape) for slot in (*blueprint.block, *blueprint.whole)]
    some = stream.directions(blueprint.width)
    total: Floats | None = None
    for slot in blueprint.block:
        alone = shapes.count(tuple(slot.shape)) == 1 or slot.role in ("gate", "up")
        if (
            not alone
            or slot.role not in ("up", "gate", "down", "qkv", "gate_up")
            or slot.shape[0] == slot.shape[1]
        ):
            continue
        for values in pieces.arrays.values():
            if tuple(values.shape) == tuple(slot.shape):
                (matrix, *_) = canonical(values, slot, blueprint).values()
                side = np.asarray(matrix, np.float32)
                gram = stream.flat_grams((side.T if slot.role == "down" else side)[None, :, some])[0]
                total = gram if total is None else total + gram
    return None if total is None else total / max(float(np.linalg.norm(total)), 1e-30)


def _paired(bare: Folded, pools: Pools, prior: Prior, uncertain: list[int]) -> tuple[tuple[str, str], ...]:
    """Pools of several roles divided by pairing all matrices that share units; twins that stay open are returned.

    Twins (q and k, gate and up of one shape) come out pair by pair in one order: which of the two is which is not told.
    """
    open_ = []
    if any({"v", "k"} <= names or {"v", "q"} <= names for names in pools):
        _values(bare, pools, prior, uncertain)
    for twins in (("q", "k"), ("gate", "up")):
        names = frozenset(twins)
        if names in pools:
            pool = pools.pop(names)
            table = _fits(bare, pool, pool, twins, prior)
            np.fill_diagonal(table, _NEVER)
            first, second = match(table)
            pools[frozenset({twins[0]})] = [pool[k] for k in first]
            pools[frozenset({twins[1]})] = [pool[k] for k in second]
            open_.append(twins)
    return tuple(open_)


def _values(bare: Folded, pools: Pools, prior: Prior, uncertain: list[int]) -> None:
    """Which of several readers are values: all of attention in pairs, v with out and q with k, best in sum."""
    count = bare.pieces.blueprint.blocks
    names = next(some for some in pools if "v" in some and len(some) > 1)
    pool = pools.pop(names)
    outs = pools[frozenset({"out"})]
    queries = [] if "q" in names else pools[frozenset({"q"})]
    keys = [] if "k" in names else pools[frozenset({"k"})]
    nodes = [*outs, *queries, *keys, *pool]
    table = np.full((len(nodes), len(nodes)), _NEVER)
    inside = slice(len(nodes) - len(pool), len(nodes))
    table[: len(outs), inside] = _fits(bare, outs, pool, ("out", "v"), prior)
    for told, pair, start in ((queries, ("q", "k"), len(outs)), (keys, ("k", "q"), len(outs))):
        if told:
            table[start : start + count, inside] = _fits(bare, told, pool, pair, prior)
    if names >= {"q", "k"}:
        table[inside, inside] = _fits(bare, pool, pool, ("q", "k"), prior)
    np.fill_diagonal(table, _NEVER)
    table = np.maximum(table, table.T)
    first, second = match(table)
    partner = {
        int(a): int(b)
        for one, two in ((first, second), (second, first))
        for a, b in zip(one, two, strict=True)
    }
    values = {partner[k] for k in range(len(outs))}
    uncertain += [nodes[k] for k in _doubtful_values(table, partner, len(outs))]
    found = [nodes[k] for k in sorted(values) if k >= len(nodes) - len(pool)]
    pools[frozenset({"v"})] = found
    pools[names - {"v"}] = [n for n in pool if n not in set(found)]


def _doubtful_values(table: Matrix, partner: Mapping[int, int], outs: int) -> list[int]:
    """Values, and readers that may be values instead of them: exchanging the two would cost little."""
    found: set[int] = set()
    others = [k for k in partner if k >= outs and partner[k] >= outs]
    for out in range(outs):
        value = partner[out]
        for other in others:
            left = partner[other]
            cost = table[out, value] + table[other, left] - table[out, other] - table[value, left]
            if cost < _SURE_VALUE:
                found |= {value, other}
    return sorted(found)


def _fits(
    bare: Folded,
    rows: Sequence[int],
    columns: Sequence[int],
    roles: tuple[str, str],
    prior: Prior,
) -> Matrix:
    """Evidence that two pieces share units as these roles do, from what the signals are worth elsewhere."""
    pieces = bare.pieces
    blueprint = pieces.blueprint
    a, b = roles
    stacked = {}
    for role, some in ((a, rows), (b, columns)):
        slot = blueprint.slot(role)
        assert slot is not None  # its pieces are at hand
        stacked[role] = _stack(pieces, some, slot)
    found = units.signals(
        stacked, a, b, heads=blueprint.heads, groups=blueprint.groups, rotary=blueprint.rotary
    )
    if {a, b} <= _ATTENTION:
        found["heads"] = units.shared_heads(stacked, a, b, heads=blueprint.heads, groups=blueprint.groups)
    known: Mapping[str, Expected] = prior.shifts.get(f"{a}-{b}") or prior.shifts.get(f"{b}-{a}", {})
    return expected_evidence(found, known, blueprint.blocks) + same_norm(bare, rows, columns)
