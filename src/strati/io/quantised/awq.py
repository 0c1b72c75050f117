"""AWQ ("gemm" layout): ``qweight``, ``qzeros``, ``scales`` of a linear map, 4 bits.

Codes are packed along the outputs, eight to a word, in the order 0 2 4 6 1 3 5 7;
``W[in, out] = scales[g, out] (code - zero[g, out])`` with ``g = in // group``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.io.quantised.packed import Decoded, Get, Packed, SchemeMismatchError
from strati.io.quantised.rounding_error import even
from strati.io.quantised.unpack import bit_stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.raw_checkpoint import Tensor

_PLACE = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where in its word the code of each of eight neighbouring outputs lies."""


def fits(parts: Mapping[str, Tensor]) -> bool:
    """Whether the shapes are AWQ's (eight outputs to a word) rather than GPTQ's."""
    return parts["qweight"].shape[-1] * 8 == parts["scales"].shape[-1]


def find(prefix: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> Packed:
    """The weight behind ``prefix.qweight``.

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
