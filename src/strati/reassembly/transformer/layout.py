"""Pieces as stacked matrices by role, and the two ends of the stream: embedding and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.reassembly.transformer.pieces import canonical

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Blueprint
    from strati.reassembly.transformer.pieces import TransformerPieces

    Floats = NDArray[np.float32]

UNITS = {"qk": ("q", "k"), "vo": ("v", "out"), "mlp": ("gate", "up", "down")}
"""Roles that share hidden units, by the unit's name; a fused qkv makes one unit of all attention."""


def stacks(pieces: TransformerPieces, numbers: Mapping[str, Sequence[int]]) -> dict[str, Floats]:
    """Matrices outputs by inputs, (pieces, rows, columns), by role; fused pieces cut into their roles.

    Args:
        pieces: All of them.
        numbers: Slot role to piece numbers, in the order of the stack.
    """
    found: dict[str, list[Floats]] = {}
    for slot in pieces.blueprint.block:
        if slot.matrix:
            for number in numbers[slot.role]:
                for role, part in canonical(pieces.arrays[number], slot, pieces.blueprint).items():
                    found.setdefault(role, []).append(np.asarray(part, dtype=np.float32))
    return {role: np.stack(parts) for role, parts in found.items()}


def unit_kinds(blueprint: Blueprint) -> dict[str, tuple[str, ...]]:
    """The units of this architecture: each with the (cut) roles it is made of."""
    roles = {slot.role for slot in blueprint.block if slot.matrix}
    if "qkv" in roles:
        kinds: dict[str, tuple[str, ...]] = {"attention": ("q", "k", "v", "out")}
    else:
        kinds = {"qk": UNITS["qk"], "vo": UNITS["vo"]}
    kinds["mlp"] = tuple(r for r in UNITS["mlp"] if r in roles or "gate_up" in roles)
    return kinds


def slots_of(kind_roles: Sequence[str], blueprint: Blueprint) -> tuple[str, ...]:
    """The slots (pieces) that hold a unit's roles."""
    fused = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
    found: list[str] = []
    for role in kind_roles:
        slot = role if blueprint.slot(role) is not None else fused[role]
        if slot not in found:
            found.append(slot)
    return tuple(found)


def end_tables(pieces: TransformerPieces, whole: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    """What writes the stream first and reads it last, as rows by width, where the network has such pieces."""
    width = pieces.blueprint.width
    found: dict[str, NDArray[Any]] = {}
    for name, number in whole.items():
        values = pieces.arrays[number]
        lower = name.lower()
        if name == "embedding":
            found["embedding"] = values
        elif name == "head":
            found["head"] = values
        elif "patch" in lower and values.ndim == 4:
            found.setdefault("embedding", values.reshape(len(values), -1).T)
        elif "pos" in lower and values.ndim >= 2 and values.shape[-1] == width:
            found.setdefault("embedding", values.reshape(-1, width))
    if pieces.blueprint.tied and "embedding" in found:
        found.setdefault("head", found["embedding"])
    return {
        end: np.asarray(t, np.float32)
        for end, t in found.items()
        if t.ndim == 2 and t.shape[1] == width and len(t) > 1
    }
