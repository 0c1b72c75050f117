"""compressed-tensors: ``weight_packed`` with ``weight_scale`` beside it, integers or E2M1.

Integers are stored with half their range added, in one unbroken stream of bits along the inputs (older files: as many
whole codes as fit a word); zero points likewise along the outputs. E2M1 is two codes to a byte with a float8 scale per
16 inputs over a scale of the whole tensor (nvfp4), or a power of two per 32 (mxfp4). Unpacked float8 and int8 weights
are ``scaled``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.errors import BadInputError
from strati.network.quantised.packed import Decoded, Get, NotThisError, Packed
from strati.network.quantised.rounding import even, uneven
from strati.network.quantised.unpack import FP4, bit_stream, nibbles, powers_of_two, spread, whole_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.network.contents import Tensor

WORDS = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight_global_scale",
)


def find(
    prefix: str,
    parts: Mapping[str, Tensor],
    config: Mapping[str, Any],
    read: Callable[[str], NDArray[Any]],
) -> Packed:
    """The weight behind ``prefix.weight_packed``.

    Raises:
        NotThisError: The shapes do not fit together.
    """
    if "weight_scale" not in parts:
        raise NotThisError("its weight_scale is missing")
    if parts["weight_packed"].dtype in ("uint8", "int8"):
        return _float4(prefix, parts)
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
        raise NotThisError("its weight_shape does not fit its codes")
    bits, dense = _bits(inputs, packed[-1], _told(config))
    whole = ((), (1,), lead, (*lead, 1), shape[:-1])  # one scale of all, of an expert, of an output
    if scale not in whole and scale[:-1] not in (shape[:-1], (*lead, 1)):
        raise NotThisError("its scales do not fit its codes")
    groups = scale[-1] if len(scale) == len(shape) else 1
    index = parts.get("weight_g_idx")
    if inputs % groups or (index is not None and index.shape != (*lead, inputs)):
        raise NotThisError("its groups do not fit its inputs")
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
        values *= factors[:, place]
        return Decoded(values, even(factors[:, place]))

    if zero is not None and zero.shape not in (
        scale,
        (*lead, -(-outputs * bits // 32), groups),
        (*lead, outputs, groups),
    ):
        raise NotThisError("its zero points do not fit its scales")
    return Packed(
        f"{prefix}.weight",
        shape,
        "compressed-tensors",
        bits,
        None if groups == 1 else inputs // groups,
        _members(prefix, parts),
        decode,
    )


def _shape(
    prefix: str, parts: Mapping[str, Tensor], read: Callable[[str], NDArray[Any]]
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Leading axes of a weight, and its outputs and inputs.

    Experts fused in one tensor keep the shape of the stack, of each expert, or the one that all of them share.

    Raises:
        NotThisError: There is no shape, or the experts differ in it.
    """
    lead = parts["weight_packed"].shape[:-2]
    kept = parts.get("weight_shape")
    if kept is None or kept.size not in (2, len(lead) + 2, 2 * prod(lead)):
        raise NotThisError("its weight_shape is missing")
    told = np.asarray(read(f"{prefix}.weight_shape")).astype(np.int64)
    if told.ndim == 1 and told.size == len(lead) + 2:
        sides = told[None]
        lead = tuple(int(side) for side in told[:-2])
    else:
        sides = told.reshape(-1, 2)
    if (sides != sides[0]).any():
        raise NotThisError("its experts are of different shapes")
    return lead, (int(sides[0, -2]), int(sides[0, -1]))


def _float4(prefix: str, parts: Mapping[str, Tensor]) -> Packed:
    packed, scale = parts["weight_packed"].shape, parts["weight_scale"].shape
    shape = (*packed[:-1], 2 * packed[-1])
    if len(packed) < 2 or scale[:-1] != packed[:-1] or not scale[-1] or shape[-1] % scale[-1]:
        raise NotThisError("its scales do not fit its codes")
    group = shape[-1] // scale[-1]
    whole = parts.get("weight_global_scale")
    if whole is None and parts["weight_scale"].dtype.startswith("float8_e4"):
        raise NotThisError("its weight_global_scale is missing")
    if whole is not None and whole.size not in (1, *packed[:1]):
        raise NotThisError("its weight_global_scale is not one number")

    def decode(get: Get) -> Decoded:
        codes = nibbles(get(f"{prefix}.weight_packed").view(np.uint8))
        raw = get(f"{prefix}.weight_scale")
        exponent = raw.dtype == np.uint8 or raw.dtype.name == "float8_e8m0fnu"
        factors = powers_of_two(raw) if exponent else raw.astype(np.float32)
        if whole is not None:
            factors = factors / get(whole.name).astype(np.float32).reshape(-1)[0]
        values = FP4[codes]
        values *= spread(factors, shape[-1])
        return Decoded(values, uneven(codes.reshape(-1, group), FP4, factors))

    scheme = "nvfp4" if whole is not None else "mxfp4"
    return Packed(f"{prefix}.weight", shape, scheme, 4, group, _members(prefix, parts), decode)


def _members(prefix: str, parts: Mapping[str, Tensor]) -> tuple[str, ...]:
    return tuple(f"{prefix}.{word}" for word in WORDS if word in parts)


def _told(config: Mapping[str, Any]) -> set[int]:
    """The bits that the configuration's groups name."""
    groups = config.get("config_groups")
    found = set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
        if type(bits) is int:
            found.add(bits)
    return found


def _bits(inputs: int, words: int, told: set[int]) -> tuple[int, bool]:
    """Bits of a code, and whether codes are one unbroken stream.

    Raises:
        NotThisError: No number of bits, or none that the configuration names, fills the words.
    """
    dense = [bits for bits in range(1, 9) if -(-inputs * bits // 32) == words]
    loose = [bits for bits in range(1, 9) if -(-inputs // (32 // bits)) == words]
    for fitting, unbroken in ((dense, True), (loose, False)):
        known = [bits for bits in fitting if bits in told] if told else fitting
        if len(known) == 1 or (known and not told and 4 in known):
            return (known[0] if len(known) == 1 else 4), unbroken
    raise NotThisError("no number of bits fits its codes and its shape")
