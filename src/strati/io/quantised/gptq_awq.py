"""GPTQ and AWQ: a linear map stored as ``qweight``, ``qzeros``, ``scales`` and, with GPTQ, ``g_idx``.

Both have ``W[in, out] = scales[g, out] (code - zero[g, out])`` with ``g = g_idx[in]``, or ``in // group`` where there
is no index. GPTQ packs codes of 2, 3, 4 or 8 bits along the inputs, lowest bits first, in one unbroken stream of bits,
and zero points along the outputs; its first format stores ``zero - 1``, the second (``gptq_v2``) the zero itself. AWQ
packs codes of 4 bits along the outputs, eight neighbouring outputs to a word in an order of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.io.quantised.codes import Decoded, Get, Packed, SchemeMismatchError, bit_stream
from strati.io.quantised.rounding_error import even

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.checkpoint_file import Tensor


BITS = (2, 3, 4, 8)


def gptq(prefix: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> Packed:
    """Describe the GPTQ weight behind ``prefix.qweight``.

    Args:
        prefix: The module's name.
        parts: Its tensors by their last word.
        config: ``quantization_config``, or nothing.

    Raises:
        SchemeMismatchError: The shapes do not fit together, or not what the configuration says.
    """
    words, scales = parts["qweight"].shape, parts["scales"].shape
    lead, (packed, outputs), (groups, columns) = words[:-2], words[-2:], scales[-2:]
    zeros = parts["qzeros"].shape if "qzeros" in parts else None
    index = parts["g_idx"].shape if "g_idx" in parts else None
    if scales[:-2] != lead or columns != outputs or not outputs or not packed or not groups:
        raise SchemeMismatchError("its scales do not fit its codes")
    if zeros is not None:
        bits, remainder = divmod(32 * zeros[-1], outputs)
        if remainder or zeros != (*lead, groups, zeros[-1]):
            raise SchemeMismatchError("its zero points do not fit its scales")
    else:
        bits = config.get("bits") or 4
    inputs, remainder = divmod(32 * packed, bits) if bits in BITS else (0, 1)
    if remainder or (index is not None and index != (*lead, inputs)):
        raise SchemeMismatchError(f"its codes do not fit {bits} bits")
    varied = bool(config.get("dynamic"))  # settings of their own for some modules
    if config.get("bits", bits) != bits and not varied:
        raise SchemeMismatchError(f"its tensors hold {bits} bits, its configuration says {config['bits']}")
    if config.get("checkpoint_format") in ("marlin", "gptq_marlin", "bitblas"):
        raise SchemeMismatchError(f"it is laid out for {config['checkpoint_format']} kernels")
    group = _group(inputs, groups, None if varied else config.get("group_size"), ordered=index is None)
    shift = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    members = tuple(parts[word].name for word in ("qweight", "qzeros", "scales", "g_idx") if word in parts)

    def decode(get: Get) -> Decoded:
        codes = bit_stream(get(f"{prefix}.qweight").T, bits, inputs)  # out x in
        factors = get(f"{prefix}.scales").astype(np.float32).T  # out x groups
        if zeros is None:
            offsets = np.full(factors.shape, 2 ** (bits - 1), np.float32)
        else:
            raw = bit_stream(get(f"{prefix}.qzeros"), bits, outputs).T
            offsets = ((raw.astype(np.int32) + shift) & (2**bits - 1)).astype(np.float32)
        if index is None:
            place = np.arange(inputs) // group
        else:
            place = get(f"{prefix}.g_idx").astype(np.int64)
            if place.min() < 0 or place.max() >= groups:
                raise BadInputError(f"{prefix}.g_idx", "points outside the groups; the file is corrupt")
        values = codes.astype(np.float32)
        values -= offsets[:, place]
        wide = factors[:, place]
        values *= wide
        return Decoded(values, even(wide))

    shared = None if groups == 1 else group
    return Packed(f"{prefix}.weight", (*lead, outputs, inputs), "gptq", bits, shared, members, decode)


def _group(inputs: int, groups: int, configured: object, *, ordered: bool) -> int:
    """Inputs that share a scale: what the configuration says where it fits, else equal parts; the last may be shorter.

    Raises:
        SchemeMismatchError: The inputs are in order, and neither fits.
    """
    if type(configured) is int and configured > 0 and -(-inputs // configured) == groups:
        return configured
    if ordered and type(configured) is int and configured > 0:
        raise SchemeMismatchError(f"its {groups} groups do not fit {inputs} inputs in groups of {configured}")
    if ordered and inputs % groups:
        raise SchemeMismatchError("its inputs do not divide into its groups")
    return -(-inputs // groups)


_PLACE = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where in its word the code of each of eight neighbouring outputs lies."""


WORDS = ("qweight", "qzeros", "scales", "g_idx")


def is_packed(parts: Mapping[str, Tensor]) -> bool:
    """Whether a module's tensors are codes and scales of GPTQ or AWQ."""
    codes, scales = parts.get("qweight"), parts.get("scales")
    if codes is None or scales is None or codes.dtype != "int32":
        return False
    return len(codes.shape) >= 2 and len(scales.shape) == len(codes.shape)


def is_awq(parts: Mapping[str, Tensor]) -> bool:
    """Whether the shapes are AWQ's (eight outputs to a word) rather than GPTQ's."""
    return parts["qweight"].shape[-1] * 8 == parts["scales"].shape[-1]


def awq(prefix: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> Packed:
    """Describe the AWQ weight behind ``prefix.qweight``.

    Raises:
        SchemeMismatchError: The shapes do not fit together, or not what the configuration says.
    """
    words, scales = parts["qweight"].shape, parts["scales"].shape
    lead, (inputs, packed), (groups, outputs) = words[:-2], words[-2:], scales[-2:]
    if config.get("bits", config.get("w_bit", 4)) != 4:
        raise SchemeMismatchError(
            f"its configuration says {config.get('bits', config.get('w_bit'))} bits, AWQ has 4"
        )
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise SchemeMismatchError(f"it is laid out for {config['version']} kernels")
    if scales[:-2] != lead or packed * 8 != outputs or not groups or inputs % groups or not inputs:
        raise SchemeMismatchError("its scales do not fit its codes")
    if "qzeros" in parts and parts["qzeros"].shape != (*lead, groups, packed):
        raise SchemeMismatchError("its zero points do not fit its scales")
    members = tuple(parts[word].name for word in ("qweight", "qzeros", "scales") if word in parts)

    def codes(get: Get, word: str) -> NDArray[np.float32]:
        raw = bit_stream(get(f"{prefix}.{word}"), 4, outputs).reshape(-1, packed, 8)[..., _PLACE]
        return raw.reshape(-1, outputs).T.astype(np.float32)

    def decode(get: Get) -> Decoded:
        factors = get(f"{prefix}.scales").astype(np.float32).T
        offsets = codes(get, "qzeros") if "qzeros" in parts else np.full(factors.shape, 8, np.float32)
        values = codes(get, "qweight")
        values -= np.repeat(offsets, inputs // groups, axis=1)
        wide = np.repeat(factors, inputs // groups, axis=1)
        values *= wide
        return Decoded(values, even(wide))

    return Packed(
        f"{prefix}.weight",
        (*lead, outputs, inputs),
        "awq",
        4,
        None if groups == 1 else inputs // groups,
        members,
        decode,
    )
