"""Weights stored as codes and scales: their description, and how codes are unpacked from words and scales spread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.io.checkpoint_file import Hint

if TYPE_CHECKING:
    from numpy.typing import NDArray


Get = Callable[[str], "NDArray[Any]"]
"""Gives one of a packed weight's tensors by its full name; of a stack of experts, one expert's part of it."""


@dataclass(frozen=True)
class Decoded:
    """The values of a quantised weight.

    Attributes:
        values: float32, in the weight's shape (of a stack: of one matrix).
        variance: Mean square of the error that rounding to these codes leaves in each entry: ``step^2 / 12``; of the
            values' shape, or one that numpy broadcasts to it.
    """

    values: NDArray[Any]
    variance: NDArray[Any]


@dataclass(frozen=True)
class Packed:
    """A weight that a file stores as several tensors.

    Attributes:
        name: The weight's name, as it was before it was quantised.
        shape: Its shape, ``(out, in)``, with a leading axis where experts are fused.
        scheme: The scheme: ``gptq``, ``awq``, ``bitsandbytes-nf4``, ``fp8``, ``compressed-tensors``, ...
        bits: Bits per entry, scales left out.
        group: Entries that share a scale along the inputs; ``None`` where a row or the whole tensor does.
        members: The tensors it is made of.
        decode: Makes values of them.
        stacked: Of more than two axes, its tensors have the leading ones too, so that one expert can be decoded alone.
        hint: Information about its layout.
    """

    name: str
    shape: tuple[int, ...]
    scheme: str
    bits: int
    group: int | None
    members: tuple[str, ...]
    decode: Callable[[Get], Decoded]
    stacked: bool = True
    hint: Hint | None = None


def weight_settings(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The settings of weights in the configuration of compressed-tensors, group by group.

    Examples:
        >>> weight_settings({"config_groups": {"group_0": {"weights": {"num_bits": 4}}, "group_1": None}})
        [{'num_bits': 4}]
    """
    groups = config.get("config_groups")
    listed = (
        [g.get("weights") for g in groups.values() if isinstance(g, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    return [weights for weights in listed if isinstance(weights, Mapping)]


def configured_bits(config: Mapping[str, Any]) -> set[int]:
    """The numbers of bits that the configuration's groups name."""
    return {w["num_bits"] for w in weight_settings(config) if type(w.get("num_bits")) is int}


class SchemeMismatchError(Exception):
    """Tensors that look like a scheme's but do not fit together; the message says how."""


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
    powers = np.ldexp(np.float32(1), codes - 127).astype(np.float32)
    return np.where(codes == 255, np.float32(np.nan), powers)


def spread(scales: NDArray[Any], cols: int) -> NDArray[np.float32]:
    """Scales of groups along the last axis, one for each of ``cols`` entries."""
    wide = np.asarray(scales, np.float32)
    groups = wide.shape[-1]
    return np.repeat(wide, -(-cols // groups), axis=-1)[..., :cols]
