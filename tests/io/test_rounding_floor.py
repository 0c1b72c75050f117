"""The floor of a quantised layer is what random errors of its own steps give, however unequal these are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.io.test_quantised import network
from tests.io.test_quantised_settings import packed

import strati
from strati.io.quantised.rounding_error import noise_floor


def unequal(seed: int) -> np.ndarray:
    """Rows and columns of very different size, as trained layers have them."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.lognormal(0, 1.2, size=(320, 1)), rng.lognormal(0, 0.6, size=(1, 256))
    return (rng.normal(size=(320, 256)) * rows * columns).astype(np.float32)


def stored(weight: np.ndarray, scheme: str) -> dict[str, object]:
    """The weight to the nearest code."""
    rows, columns = weight.shape
    if scheme == "int8":
        scale = np.abs(weight).max(axis=1, keepdims=True) / 127
        return {"fc.weight": np.round(weight / scale).astype(np.int8), "fc.weight_scale": scale}
    if scheme == "fp8":
        scale = np.abs(weight).max() / 448
        return {
            "fc.weight": torch.from_numpy(weight / scale).to(torch.float8_e4m3fn),
            "fc.weight_scale": np.float32([scale]),
        }
    if scheme == "nf4":
        functional = pytest.importorskip("bitsandbytes.functional")
        codes, state = functional.quantize_4bit(torch.from_numpy(weight), blocksize=64, quant_type="nf4")
        beside = {f"fc.weight.{name}": value for name, value in state.as_dict(packed=True).items()}
        return {"fc.weight": codes} | beside
    groups = weight.reshape(rows, -1, 32)
    low, high = groups.min(axis=2), groups.max(axis=2)
    scale = ((high - low) / 15).astype(np.float16).astype(np.float32)
    zero = np.clip(np.round(-low / scale), 1, 15)
    codes = np.clip(np.round(groups / scale[..., None]) + zero[..., None], 0, 15).reshape(rows, columns)
    return {
        "fc.qweight": np.ascontiguousarray(packed(codes, 4).T),
        "fc.qzeros": packed(zero.T - 1, 4),
        "fc.scales": scale.T.astype(np.float16).copy(),
    }


@pytest.mark.parametrize("scheme", ["int8", "fp8", "nf4", "gptq"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_floor_of_unequal_steps_is_the_real_errors_largest_eigenvalue(
    tmp_path: Path, scheme: str, seed: int
) -> None:
    """Within a quarter (nf4 a third: the largest entry of a block has no error).

    The edge of equal steps is a third of it or less for all but groups of 32.
    """
    weight = unequal(seed)
    net = network(tmp_path, stored(weight, scheme))
    (layer,) = net.layers()
    error = weight.astype(np.float64) - next(layer.matrices())
    largest = np.linalg.norm(error, 2) ** 2
    assert layer.noise_floor() == pytest.approx(largest, rel=0.33 if scheme == "nf4" else 0.25)
    assert layer.rounding().error == pytest.approx(np.square(error).mean(), rel=0.25)
    equal = layer.rounding().error * (np.sqrt(320) + np.sqrt(256)) ** 2
    assert equal < 0.67 * layer.noise_floor()


def test_equal_steps_give_the_marchenko_pastur_edge() -> None:
    for rows, columns in ((500, 100), (90, 1000), (300, 300)):
        edge = 0.04 * (np.sqrt(rows) + np.sqrt(columns)) ** 2
        assert noise_floor(np.full((rows, columns), 0.04)) == pytest.approx(edge, rel=0.05)


@pytest.mark.parametrize("kind", ["one row", "one column"])
def test_one_coarse_row_or_column_is_the_floor(kind: str) -> None:
    variance = np.full((200, 150), 1e-6)
    variance[(3, slice(None)) if kind == "one row" else (slice(None), 3)] = 1.0
    assert noise_floor(variance) == pytest.approx(variance.sum(), rel=0.02)


def test_degenerate_variances() -> None:
    assert noise_floor(np.zeros((300, 250), np.float32)) == 0
    assert noise_floor(np.zeros((0, 5), np.float32)) == 0
    assert noise_floor(np.full((3, 3), np.nan, np.float32)) == 0
    assert 0.3 < noise_floor(np.ones((1, 1))) < 3


def test_parts_of_a_fused_layer_have_floors_of_their_own(tmp_path: Path) -> None:
    """The key rows are coarser than the others."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(192, 64)) * np.repeat([1.0, 10.0, 0.1], 64)[:, None]
    scale = (np.abs(weight).max(axis=1, keepdims=True) / 127).astype(np.float32)
    codes = np.round(weight / scale).astype(np.int8)
    net = network(tmp_path, {"h.0.attn.qkv.weight": codes, "h.0.attn.qkv.weight_scale": scale})
    q, k, v = (layer.noise_floor() for layer in net.layers(split_qkv=True))
    (whole,) = (layer.noise_floor() for layer in net.layers())
    assert k == pytest.approx(100 * q, rel=0.2) and q == pytest.approx(100 * v, rel=0.2)
    assert whole == pytest.approx(k, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minilm", "stories15m"])
def test_the_floor_on_a_real_network(tmp_path: Path, name: str) -> None:
    """Every layer but the vocabulary, 8 bits with a scale per output: within 30 % of the real error's."""
    from strati_reproductions.zoo.fetch import path

    tensors: dict[str, object] = {}
    weights = {}
    for layer in strati.open(path(name)).layers():
        if max(layer.shape) < 5000:
            weight = next(layer.matrices()).astype(np.float32)
            scale = np.maximum(np.abs(weight).max(axis=1, keepdims=True), 1e-12) / 127
            key = f"{layer.name.replace('[', '.').replace(']', '')}.weight"
            weights[key] = weight
            tensors |= {key: np.round(weight / scale).astype(np.int8), f"{key}_scale": scale}
    net = network(tmp_path, tensors)
    assert len(net.layers()) == len(weights)
    for layer in net.layers():
        error = weights[layer.name].astype(np.float64) - next(layer.matrices())
        assert layer.noise_floor() == pytest.approx(np.linalg.norm(error, 2) ** 2, rel=0.3), layer.name
