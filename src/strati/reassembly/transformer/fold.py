"""Scales moved between a norm and the matrices that read through it, undone: only their product means anything.

A network is unchanged when a norm's weight is multiplied and the columns of its readers divided by any scales. Where
that was done, block by block, a reader's column norms run against its own norm's weights far more than training ever
makes them: norms and readers are paired by that, and the weights taken into the readers for what is computed from
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.reassembly.assignment import assign
from strati.reassembly.transformer.units import correlation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.pieces import TransformerPieces

_READERS = {"norm1.weight": ("q", "k", "v", "qkv"), "norm2.weight": ("gate", "up", "gate_up")}
_UNITS = {"q": 1, "k": 1, "v": 1, "up": 1, "out": 0, "down": 0}
"""Matrices whose units have scales of their own, and the axis along which a unit's weights lie."""

_AGAINST = -0.6
"""Mean correlation of log column norms with the log weights of the own norm below which scales were moved."""


def folded(pieces: TransformerPieces, candidates: Mapping[str, Sequence[int]]) -> TransformerPieces:
    """The pieces with norm weights taken into their readers where scales were moved; otherwise as they are.

    Args:
        pieces: All pieces.
        candidates: Slot role to its pieces, one per block, in any order.
    """
    blueprint = pieces.blueprint
    if not blueprint.before or blueprint.blocks < 2:
        return pieces
    arrays = dict(pieces.arrays)
    moved = False
    for norm, readers in _READERS.items():
        numbers = candidates.get(norm, ())
        if not numbers:
            continue
        weights = np.stack([np.asarray(pieces.arrays[n], np.float64) for n in numbers])
        logs = _around(np.log(np.abs(weights) + 1e-12))
        for role in readers:
            slot = blueprint.slot(role)
            if slot is None:
                continue
            along = 1 if slot.transposed else 0
            stack = [np.asarray(pieces.arrays[n], np.float64) for n in candidates[role]]
            sizes = np.stack([np.log(np.linalg.norm(one, axis=along) + 1e-12) for one in stack])
            table = correlation(_around(sizes), logs)
            own = assign(-table)
            if float(table[np.arange(len(own)), own].mean()) < _AGAINST:
                moved = True
                for k, number in enumerate(candidates[role]):
                    scale = weights[own[k]]
                    values = stack[k] * (scale[:, None] if slot.transposed else scale)
                    arrays[number] = values.astype(pieces.arrays[number].dtype)
    if moved:  # then the scales of units are no more to be believed than those of norms
        _level_units(pieces, candidates, arrays)
    return replace(pieces, arrays=arrays)


def _level_units(
    pieces: TransformerPieces, candidates: Mapping[str, Sequence[int]], arrays: dict[int, NDArray[Any]]
) -> None:
    """Rows of q, k, v and up, and columns of out and down, all of one length in a matrix."""
    for role, side in _UNITS.items():
        slot = pieces.blueprint.slot(role)
        if slot is None:
            continue
        axis = side if not slot.transposed else 1 - side
        for number in candidates[role]:
            values = np.asarray(arrays[number], np.float64)
            sizes = np.linalg.norm(values, axis=axis, keepdims=True)
            level = float(np.sqrt(np.square(sizes).mean()))
            arrays[number] = (values / np.maximum(sizes, 1e-30) * level).astype(pieces.arrays[number].dtype)


def _around(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    centred = rows - rows.mean(axis=1, keepdims=True)
    return np.asarray(centred - centred.mean(axis=0)) if len(rows) > 2 else centred
