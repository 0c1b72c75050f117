"""The pieces of a transformer: numbered tensors, read from a folder, with its ``config.json``; and how they are cut.

A piece's file holds one tensor; the tensor's name is its role where roles are told, ``piece`` where they are
not. Whatever
is wrong with the set (missing, twice, of another network, not finite) is said here, before any work is done.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.errors import BadInputError
from strati.network.open import open as open_network
from strati.reassembly.pieces import numbered
from strati.reassembly.transformer.blueprint import Blueprint, Slot, from_config, from_dict

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ENDINGS = (".safetensors", ".npz", ".pt", ".pth")

UNTOLD = "piece"
"""The tensor's name in a file that does not tell the role."""


@dataclass(frozen=True)
class TransformerPieces:
    """What is left of a transformer.

    Attributes:
        arrays: Piece number to tensor.
        told: Piece number to role, where it is told.
        config: ``config.json``.
        blueprint: The architecture.
        where: What errors are about.
        folder: Where the pieces lie, if they do.
    """

    arrays: Mapping[int, NDArray[Any]]
    told: Mapping[int, str]
    config: Mapping[str, Any]
    blueprint: Blueprint
    where: object = "pieces"
    folder: Path | None = None

    @cached_property
    def candidates(self) -> dict[str, tuple[int, ...]]:
        """Role to the pieces that may have it: those told so, or those of its shape."""
        return _candidates(self)


def is_transformer(folder: Path) -> bool:
    """Whether a folder holds the pieces of a transformer: there is a ``config.json`` beside them."""
    return (folder / "config.json").is_file()


def read_transformer(folder: str | Path) -> TransformerPieces:
    """Read the pieces of a dropped transformer.

    Raises:
        BadInputError: A piece is missing, there twice, not one tensor, or not finite; or ``config.json`` is broken.
    """
    place = Path(folder)
    config = _json(place / "config.json")
    arrays: dict[int, NDArray[Any]] = {}
    told: dict[int, str] = {}
    for number, file in numbered(place, _ENDINGS):
        network = open_network(file)
        if len(network.tensors) != 1:
            raise BadInputError(
                file, f"holds {len(network.tensors)} tensors; a piece of a transformer is one"
            )
        name = network.tensors[0].name
        arrays[number] = network.read(name)
        if name != UNTOLD:
            told[number] = name
        _check_finite(file, arrays[number])
    plan = place / "blueprint.json"
    blueprint = from_dict(_json(plan), plan) if plan.is_file() else from_config(config, place)
    found = TransformerPieces(arrays, told, config, blueprint, place, place)
    check(found)
    return found


def check(pieces: TransformerPieces) -> None:
    """Refuse a set of pieces that cannot be this network.

    Raises:
        BadInputError: Names the first piece that is missing, too many or of no fitting shape.
    """
    blueprint = pieces.blueprint
    want = Counter(tuple(slot.shape) for slot in blueprint.whole)
    for slot in blueprint.block:
        want[tuple(slot.shape)] += blueprint.blocks
    have = Counter(tuple(values.shape) for values in pieces.arrays.values())
    if have != want:
        raise BadInputError(pieces.where, _why_not(pieces, want, have))
    known = {slot.role for slot in (*blueprint.block, *blueprint.whole)}
    for number, role in pieces.told.items():
        if role not in known:
            raise BadInputError(
                pieces.where, f"piece {number} is a {role!r}, which config.json's network does not have"
            )
    for slot in blueprint.block:
        told = [n for n, role in pieces.told.items() if role == slot.role]
        if told and len(told) != blueprint.blocks:
            raise BadInputError(
                pieces.where, f"{len(told)} pieces are {slot.role}, the network has {blueprint.blocks} blocks"
            )


def _why_not(
    pieces: TransformerPieces, want: Counter[tuple[int, ...]], have: Counter[tuple[int, ...]]
) -> str:
    strange = next((n for n, v in sorted(pieces.arrays.items()) if tuple(v.shape) not in want), None)
    twin = _twin(pieces)
    if strange is not None:
        size = "x".join(map(str, pieces.arrays[strange].shape))
        return f"piece {strange} ({size}) fits no place of this network; is it of another one?"
    for shape, count in sorted(want.items(), reverse=True):
        if have[shape] != count:
            sides = "x".join(map(str, shape))
            text = f"needs {count} pieces of {sides}, there are {have[shape]}"
            if have[shape] > count and twin is not None:
                return f"{text}: piece {twin[1]} is piece {twin[0]} again; remove one"
            return f"{text}: a piece is {'missing' if have[shape] < count else 'too many, or of another network'}"
    return "the pieces do not make up this network"


def _twin(pieces: TransformerPieces) -> tuple[int, int] | None:
    seen: dict[bytes, int] = {}
    for number, values in sorted(pieces.arrays.items()):
        key = str(values.shape).encode() + np.ascontiguousarray(values).tobytes()
        if key in seen:
            return seen[key], number
        seen[key] = number
    return None


def _candidates(pieces: TransformerPieces) -> dict[str, tuple[int, ...]]:
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for number, values in sorted(pieces.arrays.items()):
        by_shape.setdefault(tuple(values.shape), []).append(number)
    found = {}
    for slot in (*pieces.blueprint.block, *pieces.blueprint.whole):
        told = tuple(n for n in by_shape[tuple(slot.shape)] if pieces.told.get(n) == slot.role)
        open_ = tuple(n for n in by_shape[tuple(slot.shape)] if n not in pieces.told)
        found[slot.role] = told or open_
    return found


def canonical(values: NDArray[Any], slot: Slot, blueprint: Blueprint) -> dict[str, NDArray[Any]]:
    """A piece as matrices outputs by inputs (or vectors) by role: fused ones cut, Conv1D turned."""
    matrix = values.T if slot.transposed else values
    base, _, kind = slot.role.partition(".")
    suffix = f".{kind}" if kind else ""
    if base == "qkv":
        return {
            f"{role}{suffix}": part for role, part in zip("qkv", _cut_qkv(matrix, blueprint), strict=True)
        }
    if base == "gate_up":
        half = len(matrix) // 2
        return {f"gate{suffix}": matrix[:half], f"up{suffix}": matrix[half:]}
    return {slot.role: matrix}


def stored(parts: Mapping[str, NDArray[Any]], slot: Slot, blueprint: Blueprint) -> NDArray[Any]:
    """The reverse of :func:`canonical`: the tensor as its file keeps it."""
    base, _, kind = slot.role.partition(".")
    suffix = f".{kind}" if kind else ""
    if base == "qkv":
        matrix = _join_qkv([parts[f"{role}{suffix}"] for role in "qkv"], blueprint)
    elif base == "gate_up":
        matrix = np.concatenate([parts[f"gate{suffix}"], parts[f"up{suffix}"]])
    else:
        matrix = parts[slot.role]
    return np.ascontiguousarray(matrix.T if slot.transposed else matrix)


def _cut_qkv(matrix: NDArray[Any], blueprint: Blueprint) -> list[NDArray[Any]]:
    heads, groups = blueprint.heads, blueprint.groups
    if blueprint.by_head:
        each = matrix.reshape(heads, 3, -1, *matrix.shape[1:])
        return [each[:, k].reshape(-1, *matrix.shape[1:]) for k in range(3)]
    wide = len(matrix) // (heads + 2 * groups)
    return np.split(matrix, [heads * wide, (heads + groups) * wide])


def _join_qkv(parts: list[NDArray[Any]], blueprint: Blueprint) -> NDArray[Any]:
    if blueprint.by_head:
        cut = [part.reshape(blueprint.heads, -1, *part.shape[1:]) for part in parts]
        joined = np.stack(cut, axis=1)
        return joined.reshape(-1, *parts[0].shape[1:])
    return np.concatenate(parts)


def _check_finite(what: object, values: NDArray[Any]) -> None:
    if values.dtype.kind not in "fV" or values.size == 0:
        raise BadInputError(what, f"holds {values.dtype}, not weights")
    if not bool(np.isfinite(values).all()):
        raise BadInputError(what, "holds NaN or infinite values")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(path, f"cannot be read as JSON ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise BadInputError(path, "is not a JSON object")
    return found
