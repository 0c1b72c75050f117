"""The pieces of a transformer: numbered tensors with a ``config.json``, read from a folder and checked.

A piece's file holds one tensor, whose name is its role. A tensor of another name gets the only role of its shape.
Missing and duplicate pieces, pieces of another network and values that are not finite are reported here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.core.plugins import require
from strati.io.network import open as open_network
from strati.reassembly.residual.pieces import numbered
from strati.reassembly.transformer.blueprint import Blueprint, Slot, blueprint_of, from_dict

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ENDINGS = (".safetensors", ".npz", ".pt", ".pth")


@dataclass(frozen=True)
class TransformerPieces:
    """The tensors of a transformer without their places.

    Attributes:
        arrays: Piece number to tensor.
        roles: Piece number to role.
        config: ``config.json``.
        blueprint: The architecture.
        where: The name of the pieces in error messages.
        folder: The folder of the pieces, if they were read from one.
    """

    arrays: Mapping[int, NDArray[Any]]
    roles: Mapping[int, str]
    config: Mapping[str, Any]
    blueprint: Blueprint
    where: object = "pieces"
    folder: Path | None = None

    @cached_property
    def candidates(self) -> dict[str, tuple[int, ...]]:
        """Role to its pieces, one per block (or one), in the order of their numbers."""
        by_role: dict[str, list[int]] = {}
        for number, role in sorted(self.roles.items()):
            by_role.setdefault(role, []).append(number)
        return {role: tuple(numbers) for role, numbers in by_role.items()}


def read_transformer(folder: str | Path) -> TransformerPieces:
    """Read the pieces of a shuffled transformer.

    Raises:
        BadInputError: A piece is missing, there twice, not one tensor, or not finite; or ``config.json`` is broken.
    """
    place = Path(folder)
    config = _json(place / "config.json")
    arrays: dict[int, NDArray[Any]] = {}
    names: dict[int, str] = {}
    for number, file in numbered(place, _ENDINGS):
        network = open_network(file)
        if len(network.tensors) != 1:
            raise BadInputError(
                file, f"holds {len(network.tensors)} tensors; a piece of a transformer is one"
            )
        names[number] = network.tensors[0].name
        arrays[number] = network.read(names[number])
        _check_finite(file, arrays[number])
    plan = place / "blueprint.json"
    blueprint = from_dict(_json(plan), plan) if plan.is_file() else from_config(config, place)
    roles = {number: _role(arrays[number], name, blueprint, number, place) for number, name in names.items()}
    pieces = TransformerPieces(arrays, roles, config, blueprint, place, place)
    check(pieces)
    return pieces


def from_config(config: Mapping[str, Any], where: object) -> Blueprint:
    """The blueprint of the network that ``config.json`` describes, built empty by transformers.

    Raises:
        UnsupportedError: transformers does not know the architecture, or it is no transformer.
        MissingExtraError: transformers is not installed.
    """
    from strati.reassembly.transformer.verify import empty_network

    require("transformers", "transformers", "pieces without blueprint.json")
    model = empty_network(config, where)
    shapes = {name: tuple(values.shape) for name, values in model.state_dict().items()}
    tied = bool(config.get("tie_word_embeddings", True)) and "lm_head.weight" in shapes
    if tied:
        shapes.pop("lm_head.weight")
    return blueprint_of(shapes, config, where=where)


def _role(values: NDArray[Any], name: str, blueprint: Blueprint, number: int, where: object) -> str:
    """The tensor's name if it is a role, else the only role of its shape."""
    slots = (*blueprint.block, *blueprint.whole)
    if any(slot.role == name for slot in slots):
        return name
    fitting = sorted({slot.role for slot in slots if tuple(slot.shape) == tuple(values.shape)})
    if len(fitting) > 1:
        listed = ", ".join(fitting[:4])
        raise BadInputError(where, f"piece {number} does not give its role, and its shape fits {listed}")
    return fitting[0] if fitting else name


def check(pieces: TransformerPieces) -> None:
    """Refuse a set of pieces that cannot be this network.

    Raises:
        BadInputError: Names the first piece that is missing, too many or of no fitting shape.
    """
    blueprint = pieces.blueprint
    slots = {slot.role: slot for slot in (*blueprint.block, *blueprint.whole)}
    for number, values in sorted(pieces.arrays.items()):
        slot = slots.get(pieces.roles.get(number, ""))
        if slot is None or tuple(values.shape) != tuple(slot.shape):
            size = "x".join(map(str, values.shape))
            text = f"piece {number} ({size}) fits no place of this network; is it of another one?"
            raise BadInputError(pieces.where, text)
    for slot in slots.values():
        want = blueprint.blocks if slot in blueprint.block else 1
        have = len(pieces.candidates.get(slot.role, ()))
        if have != want:
            why = "missing" if have < want else "there twice, or of another network"
            text = f"needs {want} pieces that are {slot.role}, there are {have}: a piece is {why}"
            raise BadInputError(pieces.where, text)


def canonical(values: NDArray[Any], slot: Slot, blueprint: Blueprint) -> dict[str, NDArray[Any]]:
    """Role to matrix (outputs x inputs) or vector of one piece: fused matrices split, Conv1D transposed."""
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
    """The reverse of :func:`canonical`: the tensor in the layout of its file."""
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
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(path, f"cannot be read as JSON ({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise BadInputError(path, "is not a JSON object")
    return content
