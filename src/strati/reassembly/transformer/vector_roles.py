"""Roles of vectors that are not told: norm weights from biases by their values, the rest by the matrices they follow.

Once the matrices stand, a vector's likeness to the norms and sums of every block's rows and columns, weighed as on
other networks, is evidence for each role and block it may belong to; the best assignment of all vectors of one length
to all their places gives the roles. It is a first guess: what it says is listed as uncertain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.assignment import assign
from strati.reassembly.transformer.timeline import Coefficients, basis
from strati.reassembly.transformer.units import correlation
from strati.reassembly.transformer.vectors import POST, features_of, references

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Slot
    from strati.reassembly.transformer.pieces import TransformerPieces

    Floats = NDArray[np.float32]
    Matrix = NDArray[np.float64]

_WRONG = -1e3
"""Evidence that a norm weight is a bias, or the other way round."""


def vector_roles(
    pieces: TransformerPieces,
    stacked: Mapping[str, Floats],
    known: Coefficients,
    fixed: Mapping[str, Sequence[int]],
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Slot to its vectors, one per block, and name to the vector that is there once.

    Args:
        pieces: All pieces; those of one length are told apart here.
        stacked: Role to matrices, in network order.
        known: Pair of features to the coefficients to be expected.
        fixed: Slot to its vectors, where they are known already.
    """
    blueprint = pieces.blueprint
    inside = set(blueprint.block)
    groups: dict[tuple[int, ...], list[Slot]] = {}
    for slot in (*blueprint.block, *blueprint.whole):
        if len(slot.shape) == 1 and slot.role not in fixed:
            groups.setdefault(tuple(slot.shape), []).append(slot)
    taken = {n for numbers in fixed.values() for n in numbers}
    block = {role: list(numbers) for role, numbers in fixed.items()}
    whole: dict[str, int] = {}
    for shape, slots in groups.items():
        pool = [n for n, v in sorted(pieces.arrays.items()) if tuple(v.shape) == shape and n not in taken]
        places = [(slot, k) for slot in slots for k in range(blueprint.blocks if slot in inside else 1)]
        rows = np.stack([np.asarray(pieces.arrays[n], np.float64) for n in pool])
        table = np.concatenate(
            [
                _evidence(rows, slot, stacked, known, blueprint.before)
                if slot in inside
                else np.zeros((len(pool), 1))  # nothing is known of what is there once
                for slot in slots
            ],
            axis=1,
        )
        weight = np.array([_is_weight(slot) for slot, _ in places])
        table = table + np.where(_weights(rows, int(weight.sum()))[:, None] == weight[None, :], 0.0, _WRONG)
        for (slot, _), number in zip(
            places, np.asarray(pool)[np.argsort(assign(table))].tolist(), strict=True
        ):
            if slot in inside:
                block.setdefault(slot.role, []).append(number)
            else:
                whole[slot.role] = number
    return block, whole


def _is_weight(slot: Slot) -> bool:
    return slot.role.endswith("weight")


def _weights(rows: Matrix, count: int) -> NDArray[np.bool_]:
    """Which vectors are norm weights: those whose entries lie off nought, for their spread."""
    score = rows.mean(axis=1) / (rows.std(axis=1) + 0.1 * np.abs(rows).max(axis=1) + 1e-12)
    found: NDArray[np.bool_] = np.zeros(len(rows), dtype=bool)
    found[np.argsort(-score, kind="stable")[:count]] = True
    return found


def _evidence(
    rows: Matrix, slot: Slot, stacked: Mapping[str, Floats], known: Coefficients, before: bool
) -> Matrix:
    """Vectors by blocks: how well each would follow the matrices there."""
    count = len(next(iter(stacked.values())))
    total = np.zeros((len(rows), count))
    apart = np.arange(count)[None, :] - np.arange(count)[:, None] + count - 1  # place, other place
    features = features_of(slot.role, rows)
    for name, reference in references(slot.role, rows.shape[1], stacked).items():
        feature = slot.role if name.startswith("sum") else f"log {slot.role}"
        pair = (feature, name) if feature <= name else (name, feature)
        ours = pair if before else (POST + pair[0], POST + pair[1])
        if ours not in known:
            continue
        alike = correlation(features[feature], reference)
        shape = np.array([one.mean for one in known[ours]]) @ basis(count)
        if pair != (feature, name):
            shape = shape[::-1]
        total += alike @ shape[apart].T / (float(np.var(alike)) + 1e-4)
    return total
