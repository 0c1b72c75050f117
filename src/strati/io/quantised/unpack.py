"""Codes out of the words they are packed into, and scales spread over the entries they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The sixteen values of E2M1, in the order of their codes."""


FP6 = np.concatenate(
    [
        sign * np.array([*np.arange(8) / 8, *np.outer([1, 2, 4], 1 + np.arange(8) / 8).ravel()])
        for sign in (1, -1)
    ]
).astype(np.float32)
"""The 64 values of E2M3, in the order of their codes."""


def bit_stream(words: NDArray[Any], bits: int, count: int) -> NDArray[np.uint8]:
    """Codes of ``bits`` bits out of 32-bit words along the last axis, lowest bits first, without padding.

    Args:
        words: Integers of 32 bits.
        bits: Bits of a code, 1 to 8.
        count: How many codes to take from each row.

    Examples:
        >>> bit_stream(np.array([[0b111_110_101_100]], np.int32), 3, 4).tolist()
        [[4, 5, 6, 7]]
    """
    flat = np.ascontiguousarray(words).view(np.uint32).astype("<u4", copy=False)
    octets = flat.view(np.uint8).reshape(*words.shape[:-1], -1)
    if bits == 8:
        return octets[..., :count]
    if bits == 4:
        return nibbles(octets)[..., :count]
    return octet_stream(octets, bits)[..., :count]


def octet_stream(octets: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """As many codes of ``bits`` bits as the bytes of the last axis hold, lowest bits first, without padding.

    Examples:
        >>> octet_stream(np.array([0b10_000001, 0b0011_0000, 0b000100_00], np.uint8), 6).tolist()
        [1, 2, 3, 4]
    """
    stream = np.unpackbits(octets, axis=-1, bitorder="little")
    count = stream.shape[-1] // bits
    parts = stream[..., : count * bits].reshape(*octets.shape[:-1], count, bits)
    return np.packbits(parts, axis=-1, bitorder="little")[..., 0]


def whole_words(words: NDArray[Any], bits: int, count: int) -> NDArray[np.uint8]:
    """Codes out of 32-bit words along the last axis, ``32 // bits`` to a word, what is left of a word unused."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return codes.astype(np.uint8).reshape(*words.shape[:-1], -1)[..., :count]


def nibbles(octets: NDArray[np.uint8], *, high_first: bool = False) -> NDArray[np.uint8]:
    """Two codes of four bits out of each byte of the last axis.

    Examples:
        >>> nibbles(np.array([0x21, 0x43], np.uint8)).tolist()
        [1, 2, 3, 4]
    """
    pair = (octets >> 4, octets & 15) if high_first else (octets & 15, octets >> 4)
    return np.stack(pair, axis=-1).reshape(*octets.shape[:-1], -1)


def powers_of_two(exponents: NDArray[Any]) -> NDArray[np.float32]:
    """E8M0 scales: ``2^(e - 127)``; 255 is not a number."""
    codes = exponents.view(np.uint8).astype(np.int32)
    found = np.ldexp(np.float32(1), codes - 127).astype(np.float32)
    return np.where(codes == 255, np.float32(np.nan), found)


def spread(scales: NDArray[Any], cols: int) -> NDArray[np.float32]:
    """Scales of groups along the last axis, one for each of ``cols`` entries."""
    wide = np.asarray(scales, np.float32)
    groups = wide.shape[-1]
    return np.repeat(wide, -(-cols // groups), axis=-1)[..., :cols]
