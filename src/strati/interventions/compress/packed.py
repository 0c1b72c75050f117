"""Quantised layers as packed integers, in the layout of compressed-tensors, which transformers and vLLM load.

A weight is :math:`s (q - z)` with one scale :math:`s` and zero point :math:`z` per output and group of inputs. The
codes :math:`q` are a stream of bits in words of 32. Codes of 3 bits are stored in 4, those of 5 to 7 bits in 8, because
readers do not agree on how such codes continue from one word to the next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.interventions.compress.exports import WeightScheme, config_groups
from strati.interventions.quantise_prune import Grid, gptq_grids

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.interventions.edits import LayerEdits

_WORDS = 32
_CONTAINERS = {1: 2, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}
_METHODS = (None, "gptq")


@dataclass(frozen=True)
class PackedLayer:
    """The codes of a layer with their scales and zero points, one of each per output and group."""

    codes: NDArray[np.int64]
    step: NDArray[np.float64]
    zero: NDArray[np.int64]
    scheme: WeightScheme

    @property
    def values(self) -> NDArray[np.float64]:
        """The weights that the codes stand for."""
        size = self.codes.shape[1] // self.step.shape[1]
        wide = (np.repeat(part, size, axis=1) for part in (self.step, self.zero))
        step, zero = wide
        weights: NDArray[np.float64] = step * (self.codes - zero)
        return weights

    def tensors(self, layer: str, dtype: Any) -> dict[str, NDArray[Any]]:
        """The tensors of the layer as compressed-tensors names them."""
        bits = self.scheme.bits
        half = (
            2 ** (bits - 1) if self.scheme.symmetric else 0
        )  # symmetric codes are signed, the others are not
        parts: dict[str, NDArray[Any]] = {
            f"{layer}.weight_packed": pack(self.codes + half, bits),
            f"{layer}.weight_scale": self.step.astype(dtype),
            f"{layer}.weight_shape": np.array(self.codes.shape, np.int64),
        }
        if not self.scheme.symmetric:
            parts[f"{layer}.weight_zero_point"] = np.ascontiguousarray(pack(self.zero.T, bits).T)
        return parts


def packed_layer(edits: LayerEdits, setting: Mapping[str, Any]) -> PackedLayer | None:
    """A layer quantised by a setting, as codes; ``None`` for a layer that only fits as floating-point numbers.

    Raises:
        BadInputError: The method's levels are not integers times a scale.
    """
    method, bits = setting.get("method"), int(setting["bits"])
    if method not in _METHODS:
        raise BadInputError(
            "packed", f"takes plain and gptq quantisation, not {method}: its levels are no grid"
        )
    rows, cols = edits.matrix.shape
    group, symmetric = min(int(setting.get("group", cols)), cols), bool(setting.get("symmetric", False))
    if edits.target.kind != "linear" or bits not in _CONTAINERS or cols % group:
        return None
    if method == "gptq":
        values, grids = gptq_grids(edits.matrix, edits.covariance.matrix, bits, group, symmetric)
        step = np.concatenate([grid.step for grid in grids], axis=1)
        zero = np.concatenate([grid.zero for grid in grids], axis=1)
    else:
        weights = np.asarray(edits.matrix, np.float64).reshape(rows, -1, group)
        grid = Grid.of(weights, bits, symmetric)
        values, step, zero = grid.nearest(weights).reshape(rows, cols), grid.step[..., 0], grid.zero[..., 0]
    wide = np.repeat(step, group, axis=1), np.repeat(zero, group, axis=1)
    codes = np.rint(values / wide[0] + wide[1]).astype(np.int64)
    scheme = WeightScheme(_CONTAINERS[bits], group if group < cols else None, symmetric)
    return PackedLayer(codes, step, zero.astype(np.int64), scheme)


def pack(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Rows of codes as streams of bits in 32-bit words, the first code in the lowest bits.

    Examples:
        >>> pack(np.array([[1, 2, 3, 15]]), 4).tolist()
        [[62241]]
    """
    per_word = _WORDS // bits
    rows, cols = codes.shape
    padded = np.zeros((rows, -(-cols // per_word) * per_word), np.uint32)
    padded[:, :cols] = codes
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    words: NDArray[np.uint32] = np.bitwise_or.reduce(padded.reshape(rows, -1, per_word) << shifts, axis=-1)
    return words.view(np.int32)


def write_config(folder: Path, layers: Mapping[str, PackedLayer]) -> None:
    """Say in ``config.json`` how the layers are packed."""
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": config_groups({name: layer.scheme for name, layer in layers.items()}),
        "ignore": [],
    }
    path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
