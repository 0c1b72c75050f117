r"""Biases and norm weights go with their matrices.

A vector over hidden units (a bias of q, k, v, gate or up) is compared, unit by unit, with the norms of the
rows it belongs to,
of the rows or columns they work with, and with sums of rows; a vector over the stream (norm weights and
biases, biases of out
and down) with the norms of all matrices along the stream, at its place and around it. The signals are weighed
as on other
networks; norms change little from block to block, so that their own path counts too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.assignment import assign
from strati.reassembly.transformer.arrange import path
from strati.reassembly.transformer.evidence import Expected, expected_evidence, margins
from strati.reassembly.transformer.pieces import canonical
from strati.reassembly.transformer.stream import READERS
from strati.reassembly.transformer.units import correlation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Slot
    from strati.reassembly.transformer.pieces import TransformerPieces

    Floats = NDArray[np.float32]
    Matrix = NDArray[np.float64]

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
    known: Mapping[str, Mapping[str, Expected]],
) -> dict[str, PlacedVector]:
    """Assign the vectors of every role to the blocks.

    Args:
        pieces: All pieces.
        candidates: Vector role to its pieces, one per block, in any order.
        stacked: Role to matrices, in network order.
        known: Vector role to signal to what it is worth elsewhere.
    """
    placed: dict[str, PlacedVector] = {}
    for slot in pieces.blueprint.block:
        if slot.matrix:
            continue
        values = read(pieces, slot, candidates[slot.role])
        table = expected_evidence(
            signals(slot.role, values, stacked), known.get(slot.role, {})
        ).T  # place by piece
        if len(values) == 1 and len(table) > 3 and slot.role.partition(".")[0] not in _PARTNERS:
            table = table + _along(next(iter(values.values())), table)
        chosen = assign(table)
        held = margins(table, np.arange(len(chosen)), chosen)
        numbers = tuple(candidates[slot.role][k] for k in chosen)
        placed[slot.role] = PlacedVector(numbers, tuple(held.tolist()))
    return placed


def _along(rows: Matrix, table: Matrix) -> Matrix:
    """More evidence for norms, which change little from block to block: the place on their own path.

    The path has no direction; the table tells it. How much it counts is the correlation of both places.
    """
    around = _around(rows)
    order = path(correlation(around, around))
    on_path = np.argsort(order)
    told = np.argsort(assign(table))
    agreement = float(np.corrcoef(on_path, told)[0, 1])
    at = on_path if agreement >= 0 else len(order) - 1 - on_path
    apart = np.abs(np.arange(len(order))[:, None] - at[None, :])
    return np.asarray(-2.0 * max(0.0, abs(agreement) - 0.3) * np.minimum(apart, 4))


def read(pieces: TransformerPieces, slot: Slot, numbers: Sequence[int]) -> dict[str, Matrix]:
    """The vectors of a slot, pieces by entries; fused ones cut into their roles."""
    rows: dict[str, list[Matrix]] = {}
    for number in numbers:
        for role, part in canonical(pieces.arrays[number], slot, pieces.blueprint).items():
            rows.setdefault(role, []).append(np.asarray(part, dtype=np.float64))
    return {role: np.stack(parts) for role, parts in rows.items()}


def signals(slot_role: str, values: Mapping[str, Matrix], stacked: Mapping[str, Floats]) -> dict[str, Matrix]:
    """Scores of every vector (rows) with every place (columns), by signal.

    Args:
        slot_role: The slot's role, which may be fused.
        values: Role to vectors, pieces by entries.
        stacked: Role to matrices, in network order.
    """
    found: dict[str, Matrix] = {}
    for role, rows in values.items():
        around = _around(rows)
        logs = _around(np.log(np.abs(rows) + 1e-12))
        for name, reference in _references(role, rows.shape[1], stacked).items():
            label = f"{role} {name}" if role != slot_role else name
            found[label] = correlation(around, reference)
            if "sum" not in name:
                found[f"log {label}"] = correlation(logs, reference)
    return found


def _references(role: str, size: int, stacked: Mapping[str, Floats]) -> dict[str, Matrix]:
    """What a vector of this role may follow, places by entries, by name."""
    base, _, kind = role.partition(".")
    found: dict[str, Matrix] = {}
    if base in stacked and kind and base not in ("out", "down"):  # a bias over hidden units
        found["rows"] = _around(np.log(_norms(stacked[base], 2)))
        found["sum"] = _around(stacked[base].sum(axis=2).astype(np.float64))
        for partner in _PARTNERS[base]:
            if partner in stacked:
                axis = 1 if partner in ("out", "down") else 2
                table = np.log(_norms(stacked[partner], axis))
                if table.shape[1] == size:
                    found[f"partner {partner}"] = _around(table)
        return found
    for other, stack in stacked.items():  # a vector over the stream
        reads = other in READERS
        table = np.log(_norms(stack, 1 if reads else 2))
        if table.shape[1] == size:
            found[f"norms {other}"] = _around(table)
            found[f"near {other}"] = _around(_neighbours(table))
        if not reads and other == base:
            found["sum"] = _around(stack.sum(axis=2).astype(np.float64))
    return found


def _neighbours(table: Matrix) -> Matrix:
    """For each place the mean of the places before and after it."""
    padded = np.concatenate([table[:1], table, table[-1:]])
    return np.asarray((padded[:-2] + padded[2:]) / 2)


def _around(rows: Matrix) -> Matrix:
    return np.asarray(rows - rows.mean(axis=0)) if len(rows) > 2 else rows


def _norms(stack: Floats, axis: int) -> Matrix:
    return np.asarray(np.maximum(np.linalg.norm(stack, axis=axis).astype(np.float64), 1e-12))
