"""Scales moved between a norm and the matrices that read through it, undone: only their product means anything.

A network is unchanged when a norm's weight is multiplied and the columns of its readers divided by any scales. Where
that was done, block by block, a reader's column norms run against its own norm's weights far more than training ever
makes them: that pairs norms and readers, and the weights are taken into the readers for what is computed from them. No
role needs to be known; readers of one norm are of one block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.reassembly.transformer.units import correlation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Slot
    from strati.reassembly.transformer.pieces import TransformerPieces

    Matrix = NDArray[np.float64]

_READERS = ("q", "k", "v", "qkv", "gate", "up", "gate_up")
_LEVEL = ("q", "k", "v", "up")
"""What reads through a norm, and what of it has rows whose scales are not fixed by the function."""

_AGAINST = -0.6
_MOST = 0.6
"""Correlation of log column norms with the log weights of a norm below which scales were moved between the two, and the
share of the readers that must show it."""


_CERTAIN = 40.0
"""Nats for or against two pieces of one block whose norms are known."""


@dataclass(frozen=True)
class Folded:
    """Pieces without scales that mean nothing, and each reader's norm where such scales told it."""

    pieces: TransformerPieces
    norm_of: Mapping[int, int] = field(default_factory=dict)


def folded(pieces: TransformerPieces) -> Folded:
    """The pieces with norm weights taken into their readers where scales were moved; otherwise as they are."""
    blueprint = pieces.blueprint
    if not blueprint.before or blueprint.blocks < 2:
        return Folded(pieces)
    vectors = {
        n: np.asarray(v, np.float64)
        for n, v in sorted(pieces.arrays.items())
        if v.shape == (blueprint.width,) and pieces.told.get(n, "norm.weight").endswith("weight")
    }
    readers = _readers(pieces)
    if len(vectors) < 2 or not readers:
        return Folded(pieces)
    numbers = list(vectors)
    logs = np.log(np.abs(np.stack(list(vectors.values()))) + 1e-12)
    logs = logs - logs.mean(axis=1, keepdims=True)
    logs = logs - np.median(logs, axis=0)
    norm_of: dict[int, int] = {}
    expected = 0
    for slot, pool, share in readers:
        sizes = np.stack([np.log(np.linalg.norm(_plain(pieces, n, slot), axis=0) + 1e-12) for n in pool])
        sizes = sizes - sizes.mean(axis=1, keepdims=True)
        table = correlation(sizes - np.median(sizes, axis=0) if len(pool) > 2 else sizes, logs)
        expected += share
        for k, number in enumerate(pool):
            if float(table[k].min()) < _AGAINST:
                norm_of[number] = numbers[int(table[k].argmin())]
    if len(norm_of) < _MOST * expected:
        return Folded(pieces)
    arrays = dict(pieces.arrays)
    for slot, pool, _ in readers:
        for number in pool:
            if number in norm_of:
                scale = vectors[norm_of[number]]
                values = np.asarray(arrays[number], np.float64)
                arrays[number] = _like(
                    values * (scale[:, None] if slot.transposed else scale), arrays[number]
                )
    _level_units(pieces, norm_of, arrays)
    return Folded(replace(pieces, arrays=arrays), norm_of)


def same_norm(bare: Folded, rows: Sequence[int], columns: Sequence[int]) -> Matrix:
    """Nats for or against two pieces of one block by the norms they read through; nought where one is not known."""
    norms = [
        np.array([bare.norm_of.get(n, -1 - side) for n in some]) for side, some in enumerate((rows, columns))
    ]
    both = (norms[0] >= 0)[:, None] & (norms[1] >= 0)[None, :]
    return np.where(both, np.where(norms[0][:, None] == norms[1][None, :], _CERTAIN, -_CERTAIN), 0.0)


def _readers(pieces: TransformerPieces) -> list[tuple[Slot, list[int], int]]:
    """For each shape that readers have: a slot of it, the pieces that may be readers, and how many of them are."""
    blueprint = pieces.blueprint
    found: dict[tuple[int, ...], tuple[Slot, list[int], int]] = {}
    for slot in blueprint.block:
        if not slot.matrix or slot.role not in _READERS:
            continue
        shape = tuple(slot.shape)
        pool = [n for n, v in sorted(pieces.arrays.items()) if tuple(v.shape) == shape]
        pool = [n for n in pool if pieces.told.get(n, slot.role) in _READERS]
        known = found.get(shape)
        found[shape] = (slot, pool, blueprint.blocks + (known[2] if known else 0))
    return list(found.values())


def _plain(pieces: TransformerPieces, number: int, slot: Slot) -> Matrix:
    values = np.asarray(pieces.arrays[number], np.float64)
    return values.T if slot.transposed else values


def _level_units(
    pieces: TransformerPieces, norm_of: Mapping[int, int], arrays: dict[int, NDArray[Any]]
) -> None:
    """Rows of q, k, v and up, and columns of out and down, all of one length in a matrix.

    Where roles are not told, rows of all that reads through a norm, and columns of other matrices of a block.
    """
    shapes = {tuple(slot.shape): slot for slot in pieces.blueprint.block if slot.matrix}
    whole = {tuple(slot.shape) for slot in pieces.blueprint.whole}
    for number, held in pieces.arrays.items():
        slot = shapes.get(tuple(held.shape))
        role = pieces.told.get(number)
        if slot is None or (tuple(held.shape) in whole and number not in norm_of):
            continue
        if role in _LEVEL or (role is None and number in norm_of and slot.role not in ("qkv", "gate_up")):
            axis = 1
        elif role in ("out", "down") or (role is None and number not in norm_of):
            axis = 0
        else:
            continue
        values = np.asarray(arrays[number], np.float64)
        sizes = np.linalg.norm(values, axis=1 - axis if slot.transposed else axis, keepdims=True)
        level = float(np.sqrt(np.square(sizes).mean()))
        arrays[number] = _like(values / np.maximum(sizes, 1e-30) * level, held)


def _like(values: Matrix, held: NDArray[Any]) -> NDArray[Any]:
    return values.astype(held.dtype)
