"""Quantised weights decoded as the schemes' own packages decode them, and what cannot be decoded named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import strati
from strati.io.quantised import rounding_error as rounding
from strati.io.quantised.codes import bit_stream, whole_words

ORACLE = Path(__file__).parent / "oracle" / "packed.npz"


def network(folder: Path, tensors: dict[str, Any], config: dict[str, Any] | None = None) -> strati.Network:
    folder.mkdir(exist_ok=True)
    save_file({k: torch.as_tensor(v).contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return strati.open(folder)


def oracle(kind: str) -> dict[str, np.ndarray]:
    with np.load(ORACLE) as kept:
        return {name.split(".")[1]: kept[name] for name in kept.files if name.split(".")[0] == kind}


def names_of(net: strati.Network) -> list[str]:
    return [layer.name for layer in net.layers()]


# GPTQ and AWQ, packed by auto-gptq and autoawq (oracle/make_packed.py)


@pytest.mark.parametrize("kind", ["gptq2", "gptq3", "gptq4", "gptq8", "gptq4-act", "awq"])
@pytest.mark.parametrize("configured", [True, False])
def test_gptq_and_awq_as_their_packages_unpack_them(tmp_path, kind, configured):
    kept = oracle(kind)
    weight = kept.pop("weight")
    bits = 4 if kind == "awq" else int(kind[4])
    method = "awq" if kind == "awq" else "gptq"
    config = {"quant_method": method, "bits": bits, "group_size": 32} if configured else None
    tensors = {f"model.layers.0.mlp.up_proj.{name}": array for name, array in kept.items()}
    net = network(tmp_path, tensors | {"model.layers.0.mlp.up_proj.bias": np.zeros(64, np.float32)}, config)
    (layer,) = net.layers()
    assert (layer.name, layer.shape, str(layer.role)) == (
        "model.layers.0.mlp.up_proj.weight",
        (64, 96),
        "mlp.in",
    )
    np.testing.assert_allclose(next(layer.matrices()), weight, rtol=1e-6, atol=1e-7)
    assert (layer.quantisation.scheme, layer.quantisation.bits, layer.quantisation.group) == (
        method,
        bits,
        32,
    )
    reasons = {s.name.rsplit(".", 1)[1]: s.reason for s in net.skipped()}
    assert set(reasons) == {*kept, "bias"}
    assert all("decoded there" in reasons[name] for name in kept)


def test_both_conventions_of_gptq_zero_points(tmp_path):
    kept = oracle("gptq4")
    weight = kept.pop("weight")
    tensors = {f"fc.{name}": array for name, array in kept.items()}
    second = network(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"})
    steps = np.repeat(kept["scales"].T, 32, axis=1)
    np.testing.assert_allclose(second.read("fc.weight"), weight + steps, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"quant_method": "gptq", "bits": 8}, "its tensors hold 4 bits, its configuration says 8"),
        ({"quant_method": "awq", "bits": 4}, "its tensors are those of gptq, its configuration says awq"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "laid out for marlin kernels"),
        ({"quant_method": "hqq"}, "quantised by hqq, a scheme that is not decoded"),
    ],
)
def test_what_disagrees_is_skipped_with_the_schemes_name(tmp_path, config, why):
    kept = oracle("gptq4")
    del kept["weight"]
    net = network(tmp_path, {f"fc.{n}": a for n, a in kept.items()} | {"head.weight": np.eye(8, 4)}, config)
    assert names_of(net) == ["head.weight"]
    assert {s.name for s in net.skipped() if why in s.reason} == {f"fc.{name}" for name in kept}


def test_group_index_outside_the_groups_is_one_line(tmp_path):
    kept = oracle("gptq4")
    del kept["weight"]
    kept["g_idx"] = kept["g_idx"] + 7
    net = network(tmp_path, {f"fc.{name}": array for name, array in kept.items()})
    with pytest.raises(strati.StratiError, match=r"fc.g_idx: points outside the groups"):
        net.read("fc.weight")


# bitsandbytes, by its own functions on the CPU


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(64, 128), (40, 50)])
def test_bitsandbytes_four_bits(tmp_path, kind, nested, shape):
    """Not of 64 x 96: there bitsandbytes 0.50.2 on the CPU gives back other values than it stored."""
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    weight = torch.randn(shape)
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
    tensors = {"layers.0.fc.weight": codes}
    tensors |= {f"layers.0.fc.weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    net = network(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert names_of(net) == ["layers.0.fc.weight"]
    expected = functional.dequantize_4bit(codes, state).numpy()
    np.testing.assert_allclose(net.read("layers.0.fc.weight"), expected, rtol=1e-5, atol=1e-6)
    assert net.layers()[0].quantisation.scheme == f"bitsandbytes-{kind}"


def test_bitsandbytes_eight_bits(tmp_path):
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
    scale = weight.abs().max(dim=1).values
    codes = torch.round(weight * 127 / scale[:, None]).to(torch.int8)
    net = network(
        tmp_path,
        {"fc.weight": codes, "fc.SCB": scale, "fc.weight_format": torch.tensor(0, dtype=torch.uint8)},
    )
    np.testing.assert_allclose(net.read("fc.weight"), (codes * scale[:, None] / 127).numpy(), rtol=1e-6)
    assert names_of(net) == ["fc.weight"]


# float8 with scales of every shape


@pytest.mark.parametrize("ending", ["_scale", "_scale_inv"])
@pytest.mark.parametrize(
    ("scale", "block"),
    [((), None), ((1,), None), ((200, 1), None), ((200,), None), ((2, 3), [128, 128]), ((4, 5), [64, 64])],
)
def test_float8_scales(tmp_path, ending, scale, block):
    rng = np.random.default_rng(3)
    codes = rng.normal(size=(200, 300)).astype(ml_dtypes.float8_e4m3fn)
    factors = rng.uniform(0.5, 2, size=scale).astype(np.float32)
    if block is None:
        wide = factors.reshape(-1, 1) if factors.size > 1 else factors
    else:
        wide = np.kron(factors, np.ones(block))[:200, :300]
    stored = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)
    config = {"quant_method": "fp8"} | ({"weight_block_size": block} if block else {})
    net = network(tmp_path, {"fc.weight": stored, f"fc.weight{ending}": factors}, config)
    np.testing.assert_allclose(net.read("fc.weight"), codes.astype(np.float32) * wide, rtol=1e-6)
    assert names_of(net) == ["fc.weight"]
    assert net.parameters == 200 * 300


def test_float8_scale_that_fits_nothing_is_named(tmp_path):
    stored = torch.zeros(20, 30, dtype=torch.float8_e4m3fn)
    net = network(tmp_path, {"fc.weight": stored, "fc.weight_scale": torch.ones(7)})
    assert net.layers() == ()
    assert {s.reason for s in net.skipped()} == {
        "fc.weight: stored by fp8, not decoded: its scales of shape (7,) do not fit its codes of shape (20, 30)"
    }


# compressed-tensors, by its own compressors


def compressed(bits: int, symmetric: bool, strategy: str, kind: str = "int") -> tuple[Any, dict[str, Any]]:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    group = {"group": 32, "tensor_group": 16}.get(strategy)
    args = QuantizationArgs(
        num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=group, type=kind
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": bits, "type": kind, "group_size": group}}},
    }
    return scheme, config


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_compressed_tensors_packed_integers(tmp_path, bits, symmetric, strategy):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor

    scheme, config = compressed(bits, symmetric, strategy)
    torch.manual_seed(bits)
    weight = torch.randn(48, 96)
    groups = weight.reshape(48, -1, 32 if strategy == "group" else 96)
    low, high = groups.amin(-1), groups.amax(-1)
    if symmetric:
        scale, zero = groups.abs().amax(-1) / (2 ** (bits - 1) - 0.5), None
    else:
        scale = (high - low) / (2**bits - 1)
        zero = torch.round(-(2 ** (bits - 1)) - low / scale).to(torch.int8)
    state = {"weight": weight, "weight_scale": scale} | ({} if zero is None else {"weight_zero_point": zero})
    packed = PackedQuantizationCompressor.compress(state, scheme)
    expected = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    net = network(tmp_path, {f"fc.{name}": value for name, value in packed.items()}, config)
    np.testing.assert_allclose(net.read("fc.weight"), expected.numpy(), rtol=1e-5, atol=1e-6)
    assert names_of(net) == ["fc.weight"]
    assert net.layers()[0].quantisation.bits == bits


def test_compressed_tensors_nvfp4(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import NVFP4PackedCompressor

    scheme, config = compressed(4, True, "tensor_group", "float")
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    whole = torch.tensor([448.0 * 6 / weight.abs().max()])
    scale = (whole * weight.reshape(32, 4, 16).abs().amax(-1) / 6).to(torch.float8_e4m3fn).to(torch.float32)
    packed = NVFP4PackedCompressor.compress(
        {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}, scheme
    )
    packed["weight_scale"] = packed["weight_scale"].to(torch.float8_e4m3fn)
    net = network(tmp_path, {f"fc.{name}": value for name, value in packed.items()}, config)
    got = net.read("fc.weight")
    assert net.layers()[0].quantisation == strati.io.checkpoint_file.Quantisation("nvfp4", 4, 16)
    expected = NVFP4PackedCompressor.decompress(packed, scheme)["weight"].float().numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-6)  # the package computes in bfloat16


def test_compressed_tensors_plain_int8(tmp_path):
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, size=(20, 64)).astype(np.int8)
    scale = rng.uniform(0.01, 0.02, size=(20, 1)).astype(np.float32)
    config = {"quant_method": "compressed-tensors"}
    net = network(tmp_path, {"fc.weight": codes, "fc.weight_scale": scale}, config)
    np.testing.assert_allclose(net.read("fc.weight"), codes * scale, rtol=1e-6)


# MXFP4 and stacks of experts


def test_mxfp4_experts_as_transformers_unpacks_them(tmp_path):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    rng = np.random.default_rng(5)
    blocks = torch.from_numpy(rng.integers(0, 256, size=(3, 8, 2, 16)).astype(np.uint8))
    scales = torch.from_numpy(rng.integers(120, 130, size=(3, 8, 2)).astype(np.uint8))
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    stem = "model.layers.4.mlp.experts.gate_up_proj"
    net = network(
        tmp_path,
        {f"{stem}_blocks": blocks, f"{stem}_scales": scales, f"{stem}_bias": torch.randn(3, 8)},
        {"quant_method": "mxfp4"},
    )
    assert net[stem].shape == (3, 8, 64)
    for layer in net.layers():
        got = next(layer.matrices())
        np.testing.assert_array_equal(got, expected[layer.expert].T.numpy())
    assert [(layer.name, layer.expert, layer.block) for layer in net.layers()] == [
        (f"{stem}[{i}]", i, 4) for i in range(3)
    ]
    assert {s.name: s.reason for s in net.skipped()}[f"{stem}_bias"] == "a bias"
    np.testing.assert_array_equal(net.read(stem)[1], next(net.layers()[1].matrices()))


def test_gptq_experts_fused_in_one_tensor(tmp_path):
    kept = oracle("gptq4")
    weight = kept.pop("weight")
    tensors = {f"layers.0.mlp.experts.up_proj.{n}": np.stack([a, a[..., ::1]]) for n, a in kept.items()}
    net = network(tmp_path, tensors)
    assert [layer.expert for layer in net.layers()] == [0, 1]
    for layer in net.layers():
        np.testing.assert_allclose(next(layer.matrices()), weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.mixer.A_log",
        "blk.0.ssm_a",
        "layers.0.self_attn.key_decay",
        "blocks.0.att.time_faaaa",
        "layers.0.mlp.experts.down_proj_bias",
        "fc.scales",
        "fc.weight_scale_inv",
        "fc.qzeros",
        "fc.g_idx",
        "fc.weight.absmax",
        "fc.input_scale",
    ],
)
def test_companions_are_never_layers(tmp_path, name):
    net = network(tmp_path, {name: torch.randn(16, 16), "fc.weight": torch.randn(8, 8)})
    assert names_of(net) == ["fc.weight"]


# the floor


@pytest.mark.parametrize("bits", [4, 8])
def test_the_floor_is_the_edge_of_what_rounding_did(tmp_path, bits):
    """The floor lies within 10 % of the largest eigenvalue of the real rounding error."""
    rng = np.random.default_rng(bits)
    weight = rng.normal(size=(256, 512)).astype(np.float32)
    scale = np.abs(weight).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
    codes = np.round(weight / scale).astype(np.int8)
    net = network(tmp_path, {"fc.weight": codes, "fc.weight_scale": scale})
    error = weight - net.read("fc.weight")
    largest = np.linalg.norm(error.astype(np.float64), 2) ** 2
    assert net.layers()[0].noise_floor() == pytest.approx(largest, rel=0.1)


def test_the_floor_of_float8_and_nf4(tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    rng = np.random.default_rng(9)
    weight = rng.normal(size=(256, 512)).astype(np.float32)
    stored = torch.from_numpy(weight).to(torch.float8_e4m3fn)
    codes, state = functional.quantize_4bit(torch.from_numpy(weight), blocksize=64, quant_type="nf4")
    tensors = {"a.weight": stored, "b.weight": codes}
    tensors |= {f"b.weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    net = network(tmp_path, tensors)
    for layer in net.layers():
        error = weight.astype(np.float64) - next(layer.matrices())
        assert layer.noise_floor() == pytest.approx(np.linalg.norm(error, 2) ** 2, rel=0.25), layer.name


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0"])
def test_the_floor_of_gguf(kind):
    gguf = pytest.importorskip("gguf")
    from strati.io.formats.gguf_file import _rounding

    weight = np.random.default_rng(2).normal(size=(128, 256)).astype(np.float32)
    number = getattr(gguf.GGMLQuantizationType, kind)
    decoded = gguf.quants.dequantize(gguf.quants.quantize(weight, number), number).reshape(weight.shape)
    error = float(np.mean((weight - decoded).astype(np.float64) ** 2))
    found = _rounding(decoded, kind.lower())
    assert found.shape == weight.shape
    assert found.mean() == pytest.approx(error, rel=0.2)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_streams_of_bits_are_undone(bits, count, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, size=(3, count)).astype(np.uint8)
    flat = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits].reshape(3, -1)
    padded = np.zeros((3, -(-flat.shape[1] // 32) * 32), np.uint8)
    padded[:, : flat.shape[1]] = flat
    words = np.packbits(padded, axis=-1, bitorder="little").view("<i4")
    np.testing.assert_array_equal(bit_stream(words, bits, count), codes)
    per_word = 32 // bits
    loose = np.zeros((3, -(-count // per_word)), np.uint32)
    for i in range(count):
        loose[:, i // per_word] |= codes[:, i].astype(np.uint32) << np.uint32(bits * (i % per_word))
    np.testing.assert_array_equal(whole_words(loose.view(np.int32), bits, count), codes)


def test_uneven_cells_of_an_even_book_are_even():
    book = np.arange(16, dtype=np.float32)
    codes = np.random.default_rng(0).integers(0, 16, size=(10, 32))
    scales = np.full(10, 0.5, np.float32)
    expected = np.broadcast_to(rounding.even(scales)[:, None], codes.shape)
    np.testing.assert_allclose(rounding.uneven(codes, book, scales), expected, rtol=1e-6)
