r"""Biases and norm weights go with their matrices, on the same time line.

What is known of a vector: its entries and their logarithms, which follow those of the blocks near it and, unit by unit
or along the stream, the norms and sums of the rows or columns it works with; and its size, which grows or falls along
the network. Each is a likeness that falls with the distance of two blocks, as for matrices
(:mod:`~strati.reassembly.transformer.arrange`); the matrices stay where they are, and the vectors of all roles are
arranged beside them. What each likeness is worth is measured on networks whose answer is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.transformer.arrange import initial_placement
from strati.reassembly.transformer.evidence import READERS, correlation, levelled
from strati.reassembly.transformer.pieces import canonical
from strati.reassembly.transformer.timeline import (
    DEPTH,
    Coefficients,
    Similarity,
    Timeline,
    climb,
    place_margins,
    reordered,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Blueprint, Slot
    from strati.reassembly.transformer.pieces import TransformerPieces

    Floats = NDArray[np.float32]
    Matrix = NDArray[np.float64]

MATRICES = "matrices"
"""The kind of unit that stands for all matrices of a block, which are in their places."""

POST = "post-norm "
"""What the names of features begin with where norms stand after the blocks."""

_PARTNERS = {
    "q": ("k",), "k": ("q",), "v": ("out",), "gate": ("up", "down"), "up": ("down", "gate"), "out": (), "down": (),
}  # fmt: skip
"""Whose rows or columns work with a role's rows."""


@dataclass(frozen=True)
class PlacedVector:
    """A vector role's pieces block by block, and the margin of each in nats."""

    numbers: tuple[int, ...]
    margins: tuple[float, ...]


def place_vectors(
    pieces: TransformerPieces,
    candidates: Mapping[str, Sequence[int]],
    stacked: Mapping[str, Floats],
    prior: Coefficients,
    fixed: Mapping[str, Sequence[int]] | None = None,
) -> tuple[dict[str, PlacedVector], float]:
    """Assign the vectors of every role to the blocks; and how likely all of it is, up to a constant.

    Args:
        pieces: All pieces.
        candidates: Vector role to its pieces, one per block, in any order.
        stacked: Role to matrices, in network order.
        prior: Pair of features to the coefficients to be expected.
        fixed: Vector role to its pieces in network order, where that is known.
    """
    blueprint = pieces.blueprint
    count = blueprint.blocks
    placed = {
        role: PlacedVector(tuple(numbers), (float("inf"),) * count) for role, numbers in (fixed or {}).items()
    }
    slots = [slot for slot in blueprint.block if not slot.matrix and slot.role not in placed]
    if not slots:
        return placed, 0.0
    values = {slot.role: read(pieces, slot, candidates[slot.role]) for slot in slots}
    similar = alongside(values, stacked, blueprint)
    free = [kind for kind in similar.units if kind != MATRICES]
    line = Timeline(similar, prior)
    places = climb(line, initial_placement(line, MATRICES), free)
    orders = {kind: np.argsort(at) for kind, at in places.items()}
    held = place_margins(Timeline(reordered(similar, orders), prior), free) if count > 1 else {}
    placed |= {
        kind: PlacedVector(
            tuple(candidates[kind][k] for k in orders[kind]), held.get(kind, (float("inf"),) * count)
        )
        for kind in free
    }
    return placed, line.log_likelihood(places)


def read(pieces: TransformerPieces, slot: Slot, numbers: Sequence[int]) -> dict[str, Matrix]:
    """The vectors of a slot, pieces by entries; fused ones cut into their roles."""
    rows: dict[str, list[Matrix]] = {}
    for number in numbers:
        for role, part in canonical(pieces.arrays[number], slot, pieces.blueprint).items():
            rows.setdefault(role, []).append(np.asarray(part, dtype=np.float64))
    return {role: np.stack(parts) for role, parts in rows.items()}


def alongside(
    values: Mapping[str, Mapping[str, Matrix]], stacked: Mapping[str, Floats], blueprint: Blueprint
) -> Similarity:
    """All likenesses of vectors with each other and with the matrices of the blocks.

    Args:
        values: Slot to role to vectors, pieces by entries.
        stacked: Role to matrices, in network order.
        blueprint: The architecture.
    """
    count = blueprint.blocks
    features: dict[str, Matrix] = {}
    units: dict[str, tuple[str, ...]] = {}
    between: dict[tuple[str, str], Matrix] = {}
    followed: set[str] = set()

    def put(a: str, b: str, table: Matrix) -> None:
        between[a, b], between[b, a] = table, table.T

    for slot, parts in values.items():
        names: list[str] = []
        for role, rows in parts.items():
            size = np.sqrt(np.square(rows).mean(axis=1))
            features |= features_of(role, rows)
            for name in (role, f"log {role}"):
                put(name, name, correlation(features[name], features[name]))
            rank = np.argsort(np.argsort(size)).astype(np.float64)
            apart = np.abs(np.arange(count)[None, :] - rank[:, None])
            put(f"size {role}", DEPTH, -np.sqrt(apart / max(count - 1, 1)))
            followed.add(DEPTH)
            for name, reference in references(role, rows.shape[1], stacked).items():
                feature = role if name.startswith("sum") else f"log {role}"
                put(feature, name, correlation(features[feature], reference))
                followed.add(name)
            names += [role, f"log {role}", f"size {role}"]
        units[slot] = tuple(names)
    for feature_a, feature_b in _akin([role for parts in values.values() for role in parts]):
        if features[feature_a].shape == features[feature_b].shape:
            put(feature_a, feature_b, correlation(features[feature_a], features[feature_b]))
    units[MATRICES] = tuple(sorted(followed))
    # norms of the first and the last blocks may be alike again
    near = frozenset(name for name in features if name.endswith("weight"))
    similar = Similarity(units, between, count, near=near)
    return similar if blueprint.before else _renamed(similar)


def _renamed(similar: Similarity) -> Similarity:
    """Features of a network whose norms stand after the blocks under other names: they follow other rules."""
    return Similarity(
        {kind: tuple(POST + role for role in roles) for kind, roles in similar.units.items()},
        {(POST + a, POST + b): table for (a, b), table in similar.between.items()},
        similar.count,
        near=frozenset(POST + role for role in similar.near),
    )


def features_of(role: str, rows: Matrix) -> dict[str, Matrix]:
    """Vectors (pieces by entries) and the logarithms of their entries, free of size and of what all have."""
    size = np.sqrt(np.square(rows).mean(axis=1, keepdims=True))
    logs = np.log(np.abs(rows) + 1e-3 * size + 1e-12)
    return {
        role: _around(rows / np.maximum(size, 1e-12)),
        f"log {role}": _around(logs - logs.mean(axis=1, keepdims=True)),
    }


def _akin(roles: Sequence[str]) -> list[tuple[str, str]]:
    """Features of different roles that lie on the stream: norm weights with each other, and what is added to it."""
    weights = [f"log {role}" for role in roles if "norm" in role and role.endswith("weight")]
    added = [
        role
        for role in roles
        if role in ("out.bias", "down.bias") or ("norm" in role and role.endswith("bias"))
    ]
    return [(a, b) for group in (weights, added) for k, a in enumerate(group) for b in group[k + 1 :]]


def references(role: str, size: int, stacked: Mapping[str, Floats]) -> dict[str, Matrix]:
    """What a vector of this role may follow, places by entries, by name."""
    base, _, kind = role.partition(".")
    by_name: dict[str, Matrix] = {}
    if base in stacked and kind and base not in ("out", "down"):  # a bias over hidden units
        by_name[f"rows {base}"] = _around(levelled(np.log(_norms(stacked[base], 2))))
        by_name[f"sum {base}"] = _around(stacked[base].sum(axis=2).astype(np.float64))
        for partner in _PARTNERS[base]:
            if partner in stacked:
                axis = 1 if partner in ("out", "down") else 2
                table = levelled(np.log(_norms(stacked[partner], axis)))
                if table.shape[1] == size:
                    by_name[f"units {partner}"] = _around(table)
        return by_name
    for other, stack in stacked.items():  # a vector over the stream
        reads = other in READERS
        table = levelled(np.log(_norms(stack, 1 if reads else 2)))
        if table.shape[1] == size:
            by_name[f"stream {other}"] = _around(table)
        if not reads and other == base:
            by_name[f"sum {other}"] = _around(stack.sum(axis=2).astype(np.float64))
    return by_name


def _around(rows: Matrix) -> Matrix:
    return np.asarray(rows - rows.mean(axis=0)) if len(rows) > 2 else rows


def _norms(stack: Floats, axis: int) -> Matrix:
    return np.asarray(np.maximum(np.linalg.norm(stack, axis=axis).astype(np.float64), 1e-12))
