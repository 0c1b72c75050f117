"""MXFP4 as gpt-oss stores it: ``X_blocks`` of E2M1 codes and ``X_scales`` of powers of two, a scale per 32 entries.

Blocks are ``(experts, out, in / 32, 16)`` bytes, two codes to a byte, the low bits first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strati.io.quantised.packed import Decoded, Get, Packed, SchemeMismatchError
from strati.io.quantised.rounding_error import uneven
from strati.io.quantised.unpack import FP4, nibbles, powers_of_two

if TYPE_CHECKING:
    from strati.io.raw_checkpoint import Tensor


def find(name: str, blocks: Tensor, scales: Tensor) -> Packed:
    """The weight behind ``name_blocks``.

    Raises:
        SchemeMismatchError: The shapes do not fit together.
    """
    if (
        len(blocks.shape) < 3
        or blocks.shape[:-1] != scales.shape
        or blocks.shape[-1] != 16
        or 0 in blocks.shape
    ):
        raise SchemeMismatchError("its scales do not fit its blocks")
    shape = (*blocks.shape[:-2], 32 * blocks.shape[-2])

    def decode(get: Get) -> Decoded:
        codes = nibbles(get(blocks.name).view(np.uint8))  # ... x groups x 32
        factors = powers_of_two(get(scales.name))
        values = FP4[codes]
        values *= factors[..., None]
        shape = (*codes.shape[:-2], 32 * codes.shape[-2])
        return Decoded(values.reshape(shape), uneven(codes.reshape(-1, 32), FP4, factors).reshape(shape))

    return Packed(name, shape, "mxfp4", 4, 32, (blocks.name, scales.name), decode)
