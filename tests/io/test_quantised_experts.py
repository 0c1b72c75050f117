"""Experts fused in one tensor, as each scheme stores them: decoded one by one, as the scheme's own package does."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.io.test_quantised import compressed, network, oracle

import strati

STEM = "model.layers.0.mlp.experts.up_proj"


def check(net: strati.Network, expected: np.ndarray, scheme: str, **close: float) -> None:
    """Every expert is a layer with the expected weights, a floor of its own, and the whole tensor is their stack."""
    layers = [layer for layer in net.layers() if layer.expert is not None]
    assert [layer.expert for layer in layers] == list(range(len(expected)))
    for layer, weight in zip(layers, expected, strict=True):
        np.testing.assert_allclose(next(layer.matrices()), weight, **close)
        assert layer.shape == weight.shape
        assert (layer.role, layer.block) == ("mlp.in", 0)
        assert layer.quantisation is not None
        assert layer.quantisation.scheme == scheme
        floor = layer.noise_floor()
        assert floor is not None
        assert floor > 0
    np.testing.assert_allclose(net.read(layers[0].tensor), expected, **close)
    row = strati.scan(net, layers=[layers[1].name.replace("[", "[[]")]).to_dict()["layers"][0]
    assert row["expert"] == 1
    assert row["frobenius_norm"] == pytest.approx(np.linalg.norm(expected[1].astype(np.float64)), rel=1e-3)


def turned(kept: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Another layer of the same scheme: the order of the groups reversed, with their scales and zero points."""
    return {
        "qweight": kept["qweight"]
        .reshape(3, -1, kept["qweight"].shape[1])[::-1]
        .reshape(kept["qweight"].shape),
        "scales": kept["scales"][::-1],
        "qzeros": kept["qzeros"][::-1],
    }


@pytest.mark.parametrize("kind", ["awq", "gptq2", "gptq3", "gptq8"])
def test_awq_and_gptq(tmp_path, kind):
    kept = oracle(kind)
    weight = kept.pop("weight")
    kept.pop("g_idx", None)  # in order: the second expert has its groups the other way round
    other = weight.reshape(64, 3, 32)[:, ::-1].reshape(64, 96)
    second = turned(kept)
    tensors = {f"{STEM}.{name}": np.stack([array, second[name]]) for name, array in kept.items()}
    check(
        network(tmp_path, tensors),
        np.stack([weight, other]),
        kind[:4].rstrip("0123456789"),
        rtol=1e-5,
        atol=1e-6,
    )


def test_gptq_with_an_order_of_its_own_per_expert(tmp_path):
    kept = oracle("gptq4-act")
    weight = kept.pop("weight")
    second = kept | {
        "g_idx": 2 - kept["g_idx"],
        "scales": kept["scales"][::-1],
        "qzeros": kept["qzeros"][::-1],
    }
    tensors = {f"{STEM}.{name}": np.stack([array, second[name]]) for name, array in kept.items()}
    check(network(tmp_path, tensors), np.stack([weight, weight]), "gptq", rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ending", ["_scale", "_scale_inv"])
@pytest.mark.parametrize(
    ("scale", "block"),
    [
        ((), None),
        ((1,), None),
        ((3,), None),
        ((3, 1, 1), None),
        ((3, 70), None),
        ((3, 70, 1), None),
        ((3, 1, 90), None),
        ((3, 3, 3), [32, 32]),
        ((3, 3, 3), None),
    ],
)
def test_float8(tmp_path, ending, scale, block):
    """Scales of one number, per expert, per output, per input, and per block (whose size the settings may not name)."""
    rng = np.random.default_rng(3)
    codes = rng.normal(size=(3, 70, 90)).astype(ml_dtypes.float8_e4m3fn)
    factors = rng.uniform(0.5, 2, size=scale).astype(np.float32)
    if scale == (3, 3, 3):
        rows, cols = block or (24, 30)
        wide = np.repeat(np.repeat(factors, rows, axis=1)[:, :70], cols, axis=2)[:, :, :90]
    else:
        wide = (
            factors.reshape(*scale, *(1,) * (3 - len(scale))) if len(scale) > 1 or scale == (3,) else factors
        )
        wide = wide.reshape(3, 1, 1) if scale == (3,) else wide
    stored = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)
    config = {"quant_method": "fp8"} | ({"weight_block_size": block} if block else {})
    net = network(tmp_path, {STEM: stored, f"{STEM}{ending}": factors}, config)
    check(net, codes.astype(np.float32) * wide, "fp8", rtol=1e-6)


def stack(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{STEM}.{name}": torch.stack([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel", "tensor"])
@pytest.mark.parametrize("shape", ["each", "whole", "first"])
def test_compressed_integers(tmp_path, bits, symmetric, strategy, shape):
    """``weight_shape`` is kept per expert, as that of the whole stack, or as the one that all share."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor

    scheme, config = compressed(bits, symmetric, strategy)
    torch.manual_seed(bits)
    parts, expected = [], []
    for _ in range(3):
        weight = torch.randn(48, 96)
        groups = {
            "group": weight.reshape(48, 3, 32),
            "channel": weight[:, None],
            "tensor": weight.reshape(1, 1, -1),
        }
        low, high = groups[strategy].amin(-1), groups[strategy].amax(-1)
        if symmetric:
            state = {"weight_scale": groups[strategy].abs().amax(-1) / (2 ** (bits - 1) - 0.5)}
        else:
            scale = (high - low) / (2**bits - 1)
            zero = torch.round(-(2 ** (bits - 1)) - low / scale).to(torch.int8)
            state = {"weight_scale": scale, "weight_zero_point": zero}
        if strategy == "tensor":
            state = {name: value.reshape(1) for name, value in state.items()}
        packed = PackedQuantizationCompressor.compress({"weight": weight} | state, scheme)
        expected.append(PackedQuantizationCompressor.decompress(packed, scheme)["weight"].numpy())
        parts.append(packed)
    tensors = stack(parts)
    if shape != "each":
        tensors[f"{STEM}.weight_shape"] = torch.tensor([3, 48, 96] if shape == "whole" else [48, 96])
    check(network(tmp_path, tensors, config), np.stack(expected), "compressed-tensors", rtol=1e-5, atol=1e-6)


def float4(kind: str) -> tuple[Any, Any, Any]:
    import compressed_tensors.compressors as compressors
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    if kind == "nvfp4":
        scheme, config = compressed(4, True, "tensor_group", "float")
        return compressors.NVFP4PackedCompressor, scheme, config
    args = QuantizationArgs(
        num_bits=4, symmetric=True, strategy="group", group_size=32, type="float", scale_dtype=torch.uint8
    )
    config = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}}},
    }
    return compressors.MXFP4PackedCompressor, QuantizationScheme(targets=["Linear"], weights=args), config


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("fused", [False, True])
def test_compressed_float4(tmp_path, kind, fused):
    """Also the ``mxfp4-pack`` format of one weight alone."""
    pytest.importorskip("compressed_tensors")
    compressor, scheme, config = float4(kind)
    torch.manual_seed(0)
    parts, expected = [], []
    for i in range(3 if fused else 1):
        weight = (1 + i) * torch.randn(48, 64)
        if kind == "nvfp4":
            whole = torch.tensor([448.0 * 6 / weight.abs().max()])
            scale = (whole * weight.reshape(48, 4, 16).abs().amax(-1) / 6).to(torch.float8_e4m3fn).float()
            state = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
        else:
            largest = weight.reshape(48, 2, 32).abs().amax(-1)
            state = {"weight": weight, "weight_scale": torch.exp2(torch.floor(torch.log2(largest)) - 2)}
        packed = compressor.compress(state, scheme)
        if kind == "nvfp4":
            packed["weight_scale"] = packed["weight_scale"].to(torch.float8_e4m3fn)
        expected.append(compressor.decompress(dict(packed), scheme)["weight"].float().numpy())
        parts.append(packed)
    close = {"rtol": 1e-2, "atol": 1e-6}  # the package computes in bfloat16
    if fused:
        check(network(tmp_path, stack(parts), config), np.stack(expected), kind, **close)
    else:
        net = network(tmp_path, {f"fc.{name}": value for name, value in parts[0].items()}, config)
        assert net.layers()[0].quantisation == strati.io.checkpoint_file.Quantisation(
            kind, 4, 16 if kind == "nvfp4" else 32
        )
        np.testing.assert_allclose(net.read("fc.weight"), expected[0], **close)


def test_compressed_float8(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import FloatQuantizationCompressor

    scheme, config = compressed(8, True, "channel", "float")
    parts, expected = [], []
    for i in range(3):
        weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(i))
        state = {"weight": weight, "weight_scale": weight.abs().amax(1, keepdim=True) / 448}
        packed = FloatQuantizationCompressor.compress(state, scheme)
        expected.append(
            FloatQuantizationCompressor.decompress(dict(packed), scheme)["weight"].float().numpy()
        )
        parts.append(packed)
    net = network(tmp_path, stack(parts), config)
    check(net, np.stack(expected), "compressed-tensors", rtol=1e-6)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes(tmp_path, kind, nested):
    """bitsandbytes flattens whatever it is given: a stack of experts is one stream of codes."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0))
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
    tensors = {STEM: codes}
    tensors |= {f"{STEM}.{name}": value for name, value in state.as_dict(packed=True).items()}
    net = network(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    check(net, functional.dequantize_4bit(codes, state).numpy(), f"bitsandbytes-{kind}", rtol=1e-5, atol=1e-6)


def test_bitsandbytes_eight_bits(tmp_path):
    weight = torch.randn(3, 32, 48, generator=torch.Generator().manual_seed(1))
    scale = weight.abs().amax(-1)
    codes = torch.round(weight * 127 / scale[..., None]).to(torch.int8)
    net = network(tmp_path, {f"{STEM}.weight": codes, f"{STEM}.SCB": scale})
    check(net, (codes * scale[..., None] / 127).numpy(), "bitsandbytes-int8", rtol=1e-6)
