"""bitsandbytes: 4 bits by a table of sixteen values (nf4, fp4), and 8 bits with a scale per output.

4 bits: the weight's entries, row by row, two to a byte, the first in the high bits; each block of ``blocksize``
entries is multiplied by its ``absmax``. Nested, ``absmax`` is a code itself: ``nested_quant_map[code] nested_absmax +
offset``. Table, block size and shape are in tensors next to the weight. 8 bits: ``W = code SCB / 127``, a scale
per row (of every expert, where they are fused).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.io.quantised.codes import Decoded, Get, Packed, SchemeMismatchError, nibbles
from strati.io.quantised.rounding_error import even, uneven

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.checkpoint_file import Tensor

STATE = "quant_state.bitsandbytes__"
BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
MAX_STATE = 100_000


def find_4bit(name: str, parts: Mapping[str, Tensor], read: Callable[[str], NDArray[Any]]) -> Packed:
    """Describe the weight ``name``, whose ``quant_state`` is in another tensor.

    Args:
        name: The weight's name.
        parts: The weight itself (``""``) and the tensors named behind it.
        read: Reads a tensor; the state is a few hundred bytes of JSON.

    Raises:
        SchemeMismatchError: The state is not what bitsandbytes writes, or does not fit the tensors.
    """
    word = next(key for key in parts if key.startswith(STATE))
    kind = word.removeprefix(STATE)
    state = _state(parts[word], read)
    shape, block = state.get("shape"), state.get("blocksize")
    if not isinstance(shape, list) or not _naturals(shape) or type(block) is not int or block < 1:
        raise SchemeMismatchError("its quant_state has no usable shape and block size")
    if kind not in ("nf4", "fp4"):
        raise SchemeMismatchError(f"its codes are of the kind {kind}")
    count = prod(shape)
    blocks = -(-count // block)
    nested = "nested_absmax" in parts
    missing = [key for key in BESIDE[: 4 if nested else 2] if key not in parts]
    if missing:
        raise SchemeMismatchError(f"its {missing[0]} is missing")
    if parts[""].size != -(-count // 2) or parts["absmax"].size != blocks or parts["quant_map"].size != 16:
        raise SchemeMismatchError("its codes and scales do not fit its shape")
    inner, offset = state.get("nested_blocksize", 1), state.get("nested_offset", 0.0)
    if type(inner) is not int or inner < 1:
        raise SchemeMismatchError("its quant_state has no usable nested block size")
    if nested and (
        parts["nested_absmax"].size != -(-blocks // inner)
        or parts["nested_quant_map"].size != 256
        or not isinstance(offset, int | float)
    ):
        raise SchemeMismatchError("its nested scales do not fit its scales")

    def scales(get: Get) -> NDArray[np.float32]:
        raw = get(f"{name}.absmax").ravel()
        if not nested:
            return raw.astype(np.float32)
        table = get(f"{name}.nested_quant_map").ravel().astype(np.float32)
        outer = np.repeat(get(f"{name}.nested_absmax").ravel().astype(np.float32), inner)[:blocks]
        return table[raw.astype(np.uint8)] * outer + np.float32(offset)

    def decode(get: Get) -> Decoded:
        book = get(f"{name}.quant_map").ravel().astype(np.float32)
        codes = nibbles(get(name).ravel().view(np.uint8), high_first=True)[:count]
        padded = np.zeros(blocks * block, np.uint8)
        padded[:count] = codes
        rows, factors = padded.reshape(blocks, block), scales(get)
        values = book[rows]
        values *= factors[:, None]
        variance = uneven(rows, book, factors)
        return Decoded(values.ravel()[:count].reshape(shape), variance.ravel()[:count].reshape(shape))

    members = tuple(tensor.name for tensor in parts.values())
    return Packed(name, tuple(shape), f"bitsandbytes-{kind}", 4, block, members, decode, stacked=False)


def find_8bit(
    name: str, weight: Tensor, scale: Tensor, layout: Tensor | None, read: Callable[[str], NDArray[Any]]
) -> Packed:
    """Describe the int8 weight ``name``, whose scales are in ``SCB``.

    Args:
        name: The weight's name.
        weight: Its codes.
        scale: A scale per output.
        layout: ``weight_format``, where the file has it: 0 for rows, others for tiles of some GPU.
        read: Reads that number.

    Raises:
        SchemeMismatchError: The scales do not fit the weight, or its codes lie in tiles.
    """
    if layout is not None and (layout.size != 1 or int(np.ravel(read(layout.name))[0]) != 0):
        raise SchemeMismatchError("its weight_format is not 0: its codes lie in the order of a GPU's tiles")
    if len(weight.shape) < 2 or scale.shape != weight.shape[:-1]:
        raise SchemeMismatchError("its scales (SCB) do not fit its codes")

    members = (name, scale.name) if layout is None else (name, scale.name, layout.name)

    def decode(get: Get) -> Decoded:
        factors = get(scale.name).astype(np.float32) / np.float32(127)
        values = get(name).astype(np.float32)
        values *= factors[:, None]
        return Decoded(values, even(factors)[:, None])

    return Packed(name, weight.shape, "bitsandbytes-int8", 8, None, members, decode)


def _state(tensor: Tensor, read: Callable[[str], NDArray[Any]]) -> dict[str, Any]:
    if tensor.dtype != "uint8" or tensor.size > MAX_STATE:
        raise SchemeMismatchError("its quant_state is not a short text")
    try:
        state = json.loads(read(tensor.name).tobytes().decode("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise BadInputError(tensor.name, "is not the JSON text it should be; the file is corrupt") from None
    if not isinstance(state, dict):
        raise SchemeMismatchError("its quant_state is not a table")
    return state


def _naturals(shape: list[Any]) -> bool:
    return 0 < len(shape) <= 8 and all(type(side) is int and side > 0 for side in shape)
