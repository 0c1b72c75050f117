"""compressed-tensors: ``weight_packed`` with ``weight_scale`` beside it, integers, E2M1 or E2M3.

Integers are stored with half their range added, in one unbroken stream of bits along the inputs (older files: as many
whole codes as fit a word); zero points likewise along the outputs. E2M1 is two codes to a byte with a float8 scale per
16 inputs over a scale of the whole tensor (nvfp4), or a power of two per 32 (mxfp4); E2M3 is four codes to three bytes
(mxfp6). Unpacked float8 and int8 weights are ``scaled``. gpt-oss stores mxfp4 as ``X_blocks`` of shape
``(experts, out, in / 32, 16)``, two codes to a byte with the low bits first, and ``X_scales`` of powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.io.quantised.codes import (
    FP4,
    FP6,
    Decoded,
    Get,
    Packed,
    SchemeMismatchError,
    bit_stream,
    configured_bits,
    nibbles,
    octet_stream,
    powers_of_two,
    spread,
    whole_words,
)
from strati.io.quantised.rounding_error import even, uneven

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.checkpoint_file import Tensor


WORDS = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight_global_scale",
)
MODELOPT = ("weight", "weight_scale", "weight_scale_2")
SPARSE = ("compressed", "bitmask", "shape", "row_offsets", "meta")


def refuse_sparse() -> Packed:
    """Weights with many zeros as compressed-tensors keeps them are not decoded.

    Raises:
        SchemeMismatchError: Always.
    """
    raise SchemeMismatchError("it is kept as a mask of bits and what is not zero")


def find(
    prefix: str,
    parts: Mapping[str, Tensor],
    config: Mapping[str, Any],
    read: Callable[[str], NDArray[Any]],
) -> Packed:
    """The weight behind ``prefix.weight_packed``.

    Raises:
        SchemeMismatchError: The shapes do not fit together.
    """
    if "weight_scale" not in parts:
        raise SchemeMismatchError("its weight_scale is missing")
    if parts["weight_packed"].dtype in ("uint8", "int8"):
        if "weight_global_scale" not in parts and parts["weight_scale"].dtype.startswith("float8_e4"):
            raise SchemeMismatchError("its weight_global_scale is missing")
        return small_floats(prefix, parts, WORDS, configured_bits(config))
    return _integers(prefix, parts, config, read)


def _integers(
    prefix: str,
    parts: Mapping[str, Tensor],
    config: Mapping[str, Any],
    read: Callable[[str], NDArray[Any]],
) -> Packed:
    packed, scale = parts["weight_packed"].shape, parts["weight_scale"].shape
    lead, (outputs, inputs) = _shape(prefix, parts, read)
    shape = (*lead, outputs, inputs)
    if min(shape) < 1 or packed[:-1] != shape[:-1]:
        raise SchemeMismatchError("its weight_shape does not fit its codes")
    bits, dense = _bits(inputs, packed[-1], configured_bits(config))
    shared_scales = ((), (1,), lead, (*lead, 1), shape[:-1])  # one scale of all, of an expert, of an output
    if scale not in shared_scales and scale[:-1] not in (shape[:-1], (*lead, 1)):
        raise SchemeMismatchError("its scales do not fit its codes")
    groups = scale[-1] if len(scale) == len(shape) else 1
    index = parts.get("weight_g_idx")
    if inputs % groups or (index is not None and index.shape != (*lead, inputs)):
        raise SchemeMismatchError("its groups do not fit its inputs")
    zero = parts.get("weight_zero_point")
    half = 2 ** (bits - 1)

    def zeros(get: Get) -> NDArray[np.float32] | None:
        if zero is None:
            return None
        raw = get(zero.name)
        if zero.dtype == "int32" and zero.shape[-2:] != (outputs, groups):
            codes: NDArray[np.float32] = bit_stream(raw.T, bits, outputs).T.astype(np.float32)
            return codes - np.float32(half)
        plain: NDArray[np.float32] = raw.astype(np.float32)
        return plain

    def decode(get: Get) -> Decoded:
        unpack = bit_stream if dense else whole_words
        values = unpack(get(f"{prefix}.weight_packed"), bits, inputs).astype(np.float32) - half
        factors = get(f"{prefix}.weight_scale").astype(np.float32)
        offsets = zeros(get)
        factors = factors.reshape(-1, groups) if factors.ndim < 2 else factors
        if index is None:
            place = np.arange(inputs) // (inputs // groups)
        else:
            place = get(index.name).astype(np.int64)
            place = np.zeros_like(place) if place.max() < 0 else place  # -1: not used
            if place.min() < 0 or place.max() >= groups:
                raise BadInputError(index.name, "points outside the groups; the file is corrupt")
        if offsets is not None:
            offsets = np.broadcast_to(
                offsets.reshape(-1, groups) if offsets.ndim < 2 else offsets, factors.shape
            )
            values -= offsets[:, place]
        wide = factors[:, place]
        values *= wide
        return Decoded(values, even(wide))

    if zero is not None and zero.shape not in (
        scale,
        (*lead, -(-outputs * bits // 32), groups),
        (*lead, outputs, groups),
    ):
        raise SchemeMismatchError("its zero points do not fit its scales")
    return Packed(
        f"{prefix}.weight",
        shape,
        "compressed-tensors",
        bits,
        None if groups == 1 else inputs // groups,
        tuple(parts[word].name for word in WORDS if word in parts),
        decode,
    )


def _shape(
    prefix: str, parts: Mapping[str, Tensor], read: Callable[[str], NDArray[Any]]
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Leading axes of a weight, and its outputs and inputs.

    Experts fused in one tensor keep the shape of the stack, of each expert, or the one that all of them share.

    Raises:
        SchemeMismatchError: There is no shape, or the experts differ in it.
    """
    lead = parts["weight_packed"].shape[:-2]
    shape_tensor = parts.get("weight_shape")
    if shape_tensor is None or shape_tensor.size not in (2, len(lead) + 2, 2 * prod(lead)):
        raise SchemeMismatchError("its weight_shape is missing")
    stored_shape = np.asarray(read(f"{prefix}.weight_shape")).astype(np.int64)
    if stored_shape.ndim == 1 and stored_shape.size == len(lead) + 2:
        sides = stored_shape[None]
        lead = tuple(int(side) for side in stored_shape[:-2])
    else:
        sides = stored_shape.reshape(-1, 2)
    if (sides != sides[0]).any():
        raise SchemeMismatchError("its experts are of different shapes")
    return lead, (int(sides[0, -2]), int(sides[0, -1]))


def small_floats(
    prefix: str, parts: Mapping[str, Tensor], words: tuple[str, ...], configured: set[int]
) -> Packed:
    """A weight of E2M1 or E2M3 codes, unbroken, with a scale per 16 or 32 inputs and perhaps one of the whole tensor.

    Args:
        prefix: The module's name.
        parts: Its tensors by their last word.
        words: The words of its tensors: codes first, then scales; the scale of the whole tensor last. That of
            compressed-tensors divides, that of NVIDIA's modelopt multiplies.
        configured: The numbers of bits that the configuration names, if any.

    Raises:
        SchemeMismatchError: The shapes do not fit together.
    """
    codes, scale, tensor_scale = parts[words[0]], parts[words[1]], parts.get(words[-1])
    packed, scales = codes.shape, scale.shape
    if len(packed) < 2 or scales[:-1] != packed[:-1] or 0 in packed or not scales[-1]:
        raise SchemeMismatchError("its scales do not fit its codes")
    bits = next((b for b in (4, 6) if 8 * packed[-1] in (b * 16 * scales[-1], b * 32 * scales[-1])), 0)
    if not bits or (configured and bits not in configured):
        raise SchemeMismatchError("its scales do not fit codes of 4 or 6 bits")
    shape = (*packed[:-1], 8 * packed[-1] // bits)
    group = shape[-1] // scales[-1]
    if tensor_scale is not None and tensor_scale.size not in (1, *packed[:1]):
        raise SchemeMismatchError("its scale of the whole tensor is not one number")
    book, divided = FP4 if bits == 4 else FP6, words[-1] == "weight_global_scale"

    def decode(get: Get) -> Decoded:
        octets = get(codes.name).view(np.uint8)
        indices = nibbles(octets) if bits == 4 else octet_stream(octets, bits)
        raw = get(scale.name)
        exponent = raw.dtype == np.uint8 or raw.dtype.name == "float8_e8m0fnu"
        factors = powers_of_two(raw) if exponent else raw.astype(np.float32)
        if tensor_scale is not None:
            factor = get(tensor_scale.name).astype(np.float32).reshape(-1)[0]
            factors = factors / factor if divided else factors * factor
        values = book[indices]
        values *= spread(factors, shape[-1])
        return Decoded(values, uneven(indices.reshape(-1, group), book, factors).reshape(values.shape))

    scheme = "nvfp4" if tensor_scale is not None else f"mxfp{bits}"
    members = tuple(parts[word].name for word in words if word in parts)
    return Packed(f"{prefix}.weight", shape, scheme, bits, group, members, decode)


def _bits(inputs: int, words: int, configured: set[int]) -> tuple[int, bool]:
    """Bits of a code, and whether codes are one unbroken stream.

    Raises:
        SchemeMismatchError: No number of bits, or none that the configuration names, fills the words.
    """
    dense = [bits for bits in range(1, 9) if -(-inputs * bits // 32) == words]
    loose = [bits for bits in range(1, 9) if -(-inputs // (32 // bits)) == words]
    for fitting, unbroken in ((dense, True), (loose, False)):
        possible = [bits for bits in fitting if bits in configured] if configured else fitting
        if len(possible) == 1 or (possible and not configured and 4 in possible):
            return (possible[0] if len(possible) == 1 else 4), unbroken
    raise SchemeMismatchError("no number of bits fits its codes and its shape")


def mxfp4_blocks(name: str, blocks: Tensor, scales: Tensor) -> Packed:
    """Describe the weight behind ``name_blocks``, as gpt-oss stores it.

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
