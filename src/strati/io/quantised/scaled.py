"""Weights of a small type times a scale: float8 (``weight_scale``, ``weight_scale_inv``) and int8.

The scale is one number, one per output, one per group of inputs, or one per block of both; which it is follows from
its shape. All schemes multiply, whatever the name says: ``W = code scale``, integers less
their zero point.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.io.quantised.codes import (
    Decoded,
    Get,
    Packed,
    SchemeMismatchError,
    configured_bits,
    powers_of_two,
    weight_settings,
)
from strati.io.quantised.rounding_error import even, floats

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.checkpoint_file import Tensor

SCALES = ("_scale", "_scale_inv", "_scales")
"""Suffixes that the name of a scale adds to that of its weight."""


def find(
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    scheme: str,
    config: Mapping[str, Any],
) -> Packed:
    """A weight of float8 or int8 with its scale.

    Args:
        weight: The codes.
        scale: The scale; ``None`` for a float8 weight without one.
        zero: Zero points of integers, in the scale's shape.
        scheme: The scheme.
        config: ``quantization_config``, or nothing; its ``weight_block_size`` decides where blocks are cut.

    Raises:
        SchemeMismatchError: The scale's shape fits no way of sharing it.
    """
    block = layout(weight.shape, (1,) if scale is None else scale.shape, config)
    if zero is not None and scale is not None and zero.shape != scale.shape:
        raise SchemeMismatchError("its zero points do not fit its scales")

    def decode(get: Get) -> Decoded:
        codes = get(weight.name)
        factors = np.ones(1, np.float32) if scale is None else _number(get(scale.name))
        wide = broadcast(factors, codes.shape, block)
        values = codes.astype(np.float32)
        if zero is not None:
            values -= broadcast(get(zero.name).astype(np.float32), codes.shape, block)
        values *= wide
        variance = floats(codes, wide) if weight.dtype.startswith("float8") else even(wide)
        return Decoded(values, variance)

    members = tuple(tensor.name for tensor in (weight, scale, zero) if tensor is not None)
    group = block[1] if block is not None and block[1] != weight.shape[-1] else None
    configured = configured_bits(config) if weight.dtype == "int8" else set()
    bits = configured.pop() if len(configured) == 1 else 8
    return Packed(weight.name, weight.shape, scheme, bits if 1 <= bits <= 8 else 8, group, members, decode)


def layout(
    weight: tuple[int, ...], scale: tuple[int, ...], config: Mapping[str, Any]
) -> tuple[int, int] | None:
    """Rows and columns of the block that shares a scale; ``None`` where numpy's broadcasting says it all.

    Raises:
        SchemeMismatchError: The scale's shape fits no way of sharing it.
    """
    if int(np.prod(scale)) == 1 or _broadcasts(weight, scale):
        return None
    if scale in (weight[:1], weight[:-1]) or scale == (*weight[:-2], weight[-2]):
        return (1, weight[-1])
    sizes = _blocks(config)
    if len(scale) == len(weight) >= 2 and scale[:-2] == weight[:-2] and all(scale):
        exact = tuple(-(-side // parts) for side, parts in zip(weight[-2:], scale[-2:], strict=True))
        for rows, cols in [*sizes, (128, 128), exact]:
            if (-(-weight[-2] // rows), -(-weight[-1] // cols)) == scale[-2:]:
                return (rows, cols)
    raise SchemeMismatchError(f"its scales of shape {scale} do not fit its codes of shape {weight}")


def _blocks(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The block sizes that a configuration names."""
    candidates = [
        config.get("weight_block_size"),
        *(w.get("block_structure") for w in weight_settings(config)),
    ]
    sizes = []
    for size in candidates:
        if isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size):
            sizes.append((size[0], size[1]))
    return sizes


def broadcast(
    factors: NDArray[Any], shape: tuple[int, ...], block: tuple[int, int] | None
) -> NDArray[np.float32]:
    """A scale in a form that multiplies the codes of ``shape``."""
    if factors.size == 1:
        return factors.reshape(()).astype(np.float32)
    if block is None:
        return factors.astype(np.float32)
    rows, cols = block
    if (rows, cols) == (1, shape[-1]):
        return factors.reshape(*shape[:-1], 1).astype(np.float32)
    tall = np.repeat(factors.astype(np.float32), rows, axis=-2)[..., : shape[-2], :]
    return np.repeat(tall, cols, axis=-1)[..., : shape[-1]]


def _broadcasts(weight: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    return len(scale) == len(weight) and all(b in (1, a) for a, b in zip(weight, scale, strict=True))


def _number(scale: NDArray[Any]) -> NDArray[Any]:
    """A scale as numbers: E8M0 exponents, kept as bytes or in their own type, are powers of two."""
    if scale.dtype == np.uint8 or scale.dtype.name == "float8_e8m0fnu":
        return powers_of_two(scale)
    return scale.astype(np.float32)
