"""Roles that are not told: from shapes, and from the weights where several roles have one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.assignment import assign
from strati.reassembly.transformer import stream
from strati.reassembly.transformer.pieces import canonical
from strati.reassembly.transformer.role_table import Roles
from strati.reassembly.transformer.units import correlation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Slot
    from strati.reassembly.transformer.calibration import Prior
    from strati.reassembly.transformer.pieces import TransformerPieces

    Floats = NDArray[np.float32]
    Matrix = NDArray[np.float64]

_NORM = "norm"


def guess_roles(pieces: TransformerPieces, prior: Prior) -> Roles:
    """The role of every piece whose file does not tell it."""
    blueprint = pieces.blueprint
    by_shape: dict[tuple[int, ...], list[Slot]] = {}
    for slot in (*blueprint.block, *blueprint.whole):
        by_shape.setdefault(tuple(slot.shape), []).append(slot)
    block: dict[str, Sequence[int]] = {}
    whole: dict[str, int] = {}
    uncertain: list[int] = []
    inside = set(blueprint.block)
    for shape, slots in by_shape.items():
        pool = [n for n, values in sorted(pieces.arrays.items()) if tuple(values.shape) == shape]
        wanted = [(slot, blueprint.blocks if slot in inside else 1) for slot in slots]
        if len(wanted) == 1:
            found = {slots[0].role: pool}
        elif len(shape) == 2 and any(slot in inside for slot in slots):
            found, doubtful = _matrices(pieces, pool, wanted, by_shape)
            uncertain += doubtful
        else:
            found = _vectors(pieces, pool, wanted)
            uncertain += pool
        for slot, count in wanted:
            if slot in inside:
                block[slot.role] = found[slot.role]
            elif count == 1:
                whole[slot.role] = found[slot.role][0]
    return Roles(block, whole, tuple(uncertain))


def _matrices(
    pieces: TransformerPieces,
    pool: Sequence[int],
    wanted: Sequence[tuple[Slot, int]],
    by_shape: Mapping[tuple[int, ...], Sequence[Slot]],
) -> tuple[dict[str, list[int]], list[int]]:
    """Square matrices of one shape: what writes the stream, then units, then q before k and v.

    Which are writers is told by the side on which a Gram matrix looks like the stream's; then q-k and v-out
    units by their
    squared cosines. Of the two readers of a unit pair the one whose partner is a writer is v.
    """
    slots = [slot for slot, _ in wanted]
    count = pieces.blueprint.blocks
    roles = [slot.role for slot in slots]
    extra = [(slot, many) for slot, many in wanted if slot not in pieces.blueprint.block]
    stack = np.stack([np.asarray(pieces.arrays[n], np.float32) for n in pool])
    found: dict[str, list[int]] = {}
    left = list(range(len(pool)))
    if extra:  # a pooler and the like: the matrix that is least like all others
        flat = stream.flat_grams(stack)
        alike = (flat @ flat.T).sum(axis=1)
        for slot, _ in extra:
            odd = min(left, key=lambda k: float(alike[k]))
            found[slot.role] = [pool[odd]]
            left.remove(odd)
        roles = [role for role in roles if role not in found]
    if set(roles) >= {"gate", "up"}:
        return _gate_and_up(pieces, [pool[k] for k in left], found), [pool[k] for k in left]
    if "out" in roles:
        score = _writes(pieces, stack[left], by_shape)
        order = [left[k] for k in np.argsort(-score, kind="stable")]
        found["out"] = sorted(pool[k] for k in order[:count])
        left = sorted(order[count:])
        roles.remove("out")
    if len(roles) == 1:
        found[roles[0]] = [pool[k] for k in left]
        return found, []
    readers = _readers(pieces, [pool[k] for k in left], found.get("out"), roles)
    return found | readers, [n for numbers in readers.values() for n in numbers]


def _writes(
    pieces: TransformerPieces, stack: Floats, by_shape: Mapping[tuple[int, ...], Sequence[Slot]]
) -> Matrix:
    """How much more a matrix's output side looks like the stream than its input side does."""
    blueprint = pieces.blueprint
    sides: list[Floats] = []
    for shape, slots in by_shape.items():
        if len(slots) == 1 and slots[0].role in ("up", "gate", "down", "qkv", "gate_up"):
            for values in pieces.arrays.values():
                if tuple(values.shape) == shape:
                    (matrix, *_) = canonical(values, slots[0], blueprint).values()
                    side = np.asarray(matrix, np.float32)
                    sides.append(side.T if slots[0].role == "down" else side)
    some = stream.directions(blueprint.width)
    known = np.stack([stream.flat_grams(side[None, :, some])[0] for side in sides])
    reference = known.mean(axis=0)
    reads = stream.flat_grams(stack[:, :, some]) @ reference
    writes = stream.flat_grams(stack[:, some].transpose(0, 2, 1)) @ reference
    return np.asarray(writes - reads, dtype=np.float64)


def _readers(
    pieces: TransformerPieces, pool: Sequence[int], outs: Sequence[int] | None, roles: Sequence[str]
) -> dict[str, list[int]]:
    """q, k and v (or those of them that share a shape): v fits an out, q and k fit each other."""
    stack = np.stack([np.asarray(pieces.arrays[n], np.float32) for n in pool])
    unit = stack / np.maximum(np.linalg.norm(stack, axis=2, keepdims=True), 1e-30)
    count = pieces.blueprint.blocks
    found: dict[str, list[int]] = {}
    left = list(range(len(pool)))
    if "v" in roles and outs is not None and len(roles) > 1:
        columns = np.stack([np.asarray(pieces.arrays[n], np.float32).T for n in outs])
        columns = columns / np.maximum(np.linalg.norm(columns, axis=2, keepdims=True), 1e-30)
        if columns.shape[1] == unit.shape[1]:
            fit = _squared_cosines(columns, unit)
            z = (fit - fit.mean(axis=1, keepdims=True)) / (fit.std(axis=1, keepdims=True) + 1e-30)
            padded = np.zeros((len(pool), len(pool)))
            padded[: len(outs)] = z
            chosen = assign(padded)[: len(outs)]
            found["v"] = sorted(pool[k] for k in chosen)
            left = [k for k in left if k not in set(chosen.tolist())]
    rest = [role for role in roles if role not in found]
    if rest == ["v", "k"] or set(rest) == {"k", "v"}:
        # keys are read with queries, which have another shape here: values spread over the stream more evenly
        order = sorted(left, key=lambda k: _evenness(stack[k]))
        found["k"], found["v"] = (
            sorted(pool[k] for k in order[:count]),
            sorted(pool[k] for k in order[count:]),
        )
        return found
    if len(rest) == 1:
        found[rest[0]] = [pool[k] for k in left]
        return found
    # q and k: two chains of units; each pair's larger one by the norm of its rows is called q
    fit = _squared_cosines(unit[left], unit[left])
    from strati.reassembly.assignment import match

    np.fill_diagonal(fit, 0)
    first, second = match(fit)
    flat = stream.flat_grams(stack[left][:, :, stream.directions(stack.shape[2])])
    flat = flat - flat.mean(axis=0)
    alike = flat @ flat.T
    ones, twos = [int(first[0])], [int(second[0])]
    for a, b in zip(first[1:].tolist(), second[1:].tolist(), strict=True):
        straight = alike[a, ones].mean() + alike[b, twos].mean()
        crossed = alike[a, twos].mean() + alike[b, ones].mean()
        ones.append(a if straight >= crossed else b)
        twos.append(b if straight >= crossed else a)
    larger = np.linalg.norm(stack[[left[k] for k in ones]]) >= np.linalg.norm(stack[[left[k] for k in twos]])
    q, k = (ones, twos) if larger else (twos, ones)
    found["q"] = sorted(pool[left[n]] for n in q)
    found["k"] = sorted(pool[left[n]] for n in k)
    return found


def _gate_and_up(
    pieces: TransformerPieces, pool: Sequence[int], found: dict[str, list[int]]
) -> dict[str, list[int]]:
    """Units of gate and up: up's rows follow down's columns in size, gate's do not."""
    stack = np.stack([np.asarray(pieces.arrays[n], np.float32) for n in pool])
    downs = [n for n, v in pieces.arrays.items() if v.shape == pieces.arrays[pool[0]].shape[::-1]]
    columns = np.stack([np.asarray(pieces.arrays[n], np.float32).T for n in downs])
    sizes = [np.log(np.linalg.norm(side, axis=2) + 1e-30) for side in (stack, columns)]
    fit = correlation(sizes[0] - sizes[0].mean(axis=0), sizes[1] - sizes[1].mean(axis=0))
    best = fit.max(axis=1)
    order = np.argsort(-best, kind="stable")
    found["up"] = sorted(pool[k] for k in order[: pieces.blueprint.blocks])
    found["gate"] = sorted(pool[k] for k in order[pieces.blueprint.blocks :])
    return found


def _vectors(
    pieces: TransformerPieces, pool: Sequence[int], wanted: Sequence[tuple[Slot, int]]
) -> dict[str, list[int]]:
    """Norm weights are those around one; the rest in the order of their sizes, which tells little."""
    mean = {n: float(np.mean(np.asarray(pieces.arrays[n], np.float64))) for n in pool}
    spread = {n: float(np.std(np.asarray(pieces.arrays[n], np.float64))) for n in pool}
    weights = [
        (slot, many) for slot, many in wanted if _NORM in slot.role.lower() and slot.role.endswith("weight")
    ]
    rest = [(slot, many) for slot, many in wanted if (slot, many) not in weights]
    order = sorted(pool, key=lambda n: -(mean[n] / (spread[n] + 0.1)))
    found: dict[str, list[int]] = {}
    for slot, many in (*weights, *rest):
        found[slot.role], order = sorted(order[:many]), order[many:]
    return found


def _squared_cosines(a: Floats, b: Floats) -> Matrix:
    return np.asarray(
        np.square(np.matmul(a.transpose(1, 0, 2), b.transpose(1, 2, 0))).mean(axis=0), dtype=np.float64
    )


def _evenness(matrix: Floats) -> float:
    values = np.linalg.svd(matrix, compute_uv=False) ** 2
    return float(values.sum() / values.max())
