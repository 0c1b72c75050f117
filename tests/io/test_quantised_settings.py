"""What settings decide about quantised weights: group and block sizes, bits, layouts; where they disagree."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from tests.io.test_quantised import names_of, network

import strati


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of every row one after another, lowest bits first, in 32-bit words: the layout that GPTQ publishes."""
    rows, count = codes.shape
    words = np.zeros((rows, -(-count * bits // 32) + 1), np.uint64)
    for i in range(count):
        word, place = divmod(i * bits, 32)
        shifted = codes[:, i].astype(np.uint64) << np.uint64(place)
        words[:, word] |= shifted & np.uint64(0xFFFFFFFF)
        words[:, word + 1] |= shifted >> np.uint64(32)
    return words[:, :-1].astype(np.uint32).view(np.int32)


def gptq(bits: int, group: int, *, second: bool, order: str) -> tuple[dict[str, Any], np.ndarray]:
    """160 inputs and 96 outputs in groups that need not divide them; inputs in order or not, with an index or none."""
    rng = np.random.default_rng(bits + group)
    inputs, outputs = 160, 96
    many = -(-inputs // group)
    place = np.arange(inputs) // group
    if order == "shuffled":
        place = rng.permutation(place)
    codes = rng.integers(0, 2**bits, size=(outputs, inputs))
    zeros = rng.integers(1, 2**bits, size=(many, outputs))
    scales = rng.uniform(0.5, 2, size=(many, outputs)).astype(np.float16)
    tensors = {
        "fc.qweight": np.ascontiguousarray(packed(codes, bits).T),
        "fc.qzeros": packed(zeros if second else zeros - 1, bits),
        "fc.scales": scales,
    }
    if order != "no index":
        tensors["fc.g_idx"] = place.astype(np.int32)
    return tensors, (codes - zeros.T[:, place]) * scales.T.astype(np.float32)[:, place]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [48, 64, 160])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("order", ["no index", "in order", "shuffled"])
def test_gptq_groups_that_do_not_divide_the_inputs(tmp_path, bits, group, second, order):
    tensors, weight = gptq(bits, group, second=second, order=order)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group}
    config |= {"checkpoint_format": "gptq_v2"} if second else {}
    net = network(tmp_path, tensors, config)
    np.testing.assert_allclose(net.read("fc.weight"), weight, rtol=1e-6)
    assert net.layers()[0].quantisation == strati.io.checkpoint_file.Quantisation(
        "gptq", bits, None if group == 160 else group
    )


@pytest.mark.parametrize(
    ("file", "told", "why"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"}, None),
        ("quantize_config.json", {"bits": 8, "group_size": 64}, "its configuration says 8"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64}, "its configuration says awq"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "its configuration says modelopt"),
    ],
)
def test_settings_that_older_packages_keep_in_a_file_of_their_own(tmp_path, file, told, why):
    tensors, weight = gptq(4, 64, second=True, order="in order")
    (tmp_path / file).write_text(json.dumps(told))
    (tmp_path / "config.json").write_text("{}")
    net = network(tmp_path, tensors)
    if why is None:
        np.testing.assert_allclose(net.read("fc.weight"), weight, rtol=1e-6)
    else:
        assert not net.layers()
        assert {s.name for s in net.skipped() if why in s.reason} == set(tensors)


def test_gptq_groups_that_fit_no_setting_are_named(tmp_path):
    tensors, _ = gptq(4, 64, second=False, order="no index")
    for config, why in (
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32},
            "3 groups do not fit 160 inputs in groups of 32",
        ),
        ({"quant_method": "gptq", "bits": 4}, "its inputs do not divide into its groups"),
    ):
        net = network(tmp_path, tensors, config)
        assert names_of(net) == []
        assert all(why in skipped.reason for skipped in net.skipped())


def test_gptq_with_settings_of_their_own_for_some_modules(tmp_path):
    """GPTQModel's ``dynamic``: the bits of the whole are not those of every module."""
    tensors, weight = gptq(8, 48, second=False, order="shuffled")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"fc": {"bits": 8}}}
    np.testing.assert_allclose(network(tmp_path, tensors, config).read("fc.weight"), weight, rtol=1e-6)


@pytest.mark.parametrize("method", ["bitsandbytes", "compressed-tensors", "fp8", "mxfp4", "modelopt", "awq"])
def test_tensors_of_one_scheme_under_the_settings_of_another_are_skipped(tmp_path, method):
    tensors, _ = gptq(4, 32, second=False, order="in order")
    net = network(tmp_path, tensors, {"quant_method": method})
    assert names_of(net) == []
    why = f"stored by gptq, not decoded: its tensors are those of gptq, its configuration says {method}"
    assert {s.name for s in net.skipped() if why in s.reason} == set(tensors)


def test_float8_under_the_settings_of_gptq_is_skipped(tmp_path):
    tensors = {"fc.weight": torch.ones(16, 16).to(torch.float8_e4m3fn), "fc.weight_scale": torch.tensor(1.0)}
    net = network(tmp_path, tensors, {"quant_method": "gptq", "bits": 4})
    assert names_of(net) == []
    assert all("those of fp8, its configuration says gptq" in s.reason for s in net.skipped())


@pytest.mark.parametrize("layout", [0, 1, 2, 3])
def test_int8_in_the_order_of_a_gpus_tiles_is_not_read_as_rows(tmp_path, layout):
    codes = torch.arange(64, dtype=torch.int8).reshape(8, 8)
    tensors = {
        "fc.weight": codes,
        "fc.SCB": torch.ones(8),
        "fc.weight_format": torch.tensor(layout, dtype=torch.uint8),
    }
    net = network(tmp_path, tensors)
    assert names_of(net) == (["fc.weight"] if layout == 0 else [])
    if layout:
        assert "weight_format is not 0" in net.skipped()[0].reason


# compressed-tensors, by its own compressors


def arguments(**options: Any) -> tuple[Any, dict[str, Any]]:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    args = quantization.QuantizationArgs(**options)
    groups = {"group_0": {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}}
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    return scheme, {"quant_method": "compressed-tensors", "config_groups": groups}


def block_scales(weight: torch.Tensor, rows: int, columns: int, top: float) -> torch.Tensor:
    parts = [[cell.abs().max() for cell in band.split(columns, 1)] for band in weight.split(rows, 0)]
    return torch.stack([torch.stack(band) for band in parts]) / top


@pytest.mark.parametrize(("kind", "bits"), [("float", 8), ("int", 8), ("int", 4)])
@pytest.mark.parametrize("shape", [(56, 120), (130, 200)])
def test_blocks_of_the_size_that_the_settings_name(tmp_path, kind, bits, shape):
    """Blocks of 32 x 48 do not fill these matrices; codes of 4 bits are stored in bytes here."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    scheme, config = arguments(
        num_bits=bits, symmetric=True, strategy="block", type=kind, block_structure=[32, 48]
    )
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(bits))
    scale = block_scales(weight, 32, 48, 448 if kind == "float" else 2 ** (bits - 1) - 0.5)
    compressor = {
        "float": compressors.FloatQuantizationCompressor,
        "int": compressors.IntQuantizationCompressor,
    }[kind]
    state = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    expected = compressor.decompress(dict(state), scheme)["weight"].float().numpy()
    net = network(tmp_path, {f"fc.{name}": value for name, value in state.items()}, config)
    np.testing.assert_allclose(net.read("fc.weight"), expected, rtol=1e-5, atol=1e-6)
    assert net.layers()[0].quantisation.bits == bits


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("shape", [(40, 64), (24, 96)])
def test_microscaling_floats(tmp_path, bits, configured, shape):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    kinds = {4: "MXFP4PackedCompressor", 6: "MXFP6PackedCompressor", 8: "MXFP8QuantizationCompressor"}
    if not hasattr(compressors, kinds[bits]):
        pytest.skip(f"compressed-tensors without {kinds[bits]}")
    compressor = getattr(compressors, kinds[bits])
    scheme, config = arguments(
        num_bits=bits, symmetric=True, strategy="group", group_size=32, type="float", scale_dtype=torch.uint8
    )
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(bits))
    top = weight.reshape(shape[0], -1, 32).abs().amax(-1) / {4: 6, 6: 7.5, 8: 448}[bits]
    state = compressor.compress(
        {"weight": weight, "weight_scale": torch.exp2(torch.ceil(torch.log2(top)))}, scheme
    )
    expected = compressor.decompress(dict(state), scheme)["weight"].float().numpy()
    net = network(tmp_path, {f"fc.{n}": v for n, v in state.items()}, config if configured else None)
    np.testing.assert_allclose(net.read("fc.weight"), expected, rtol=1e-2)  # the package computes in bfloat16
    assert (net.layers()[0].quantisation.bits, net.layers()[0].quantisation.group) == (bits, 32)
    error = np.square(weight.numpy() - net.read("fc.weight")).mean()
    assert net.layers()[0].rounding().error == pytest.approx(error, rel=0.4)


def test_modelopt_nvfp4(tmp_path):
    """Two codes to a byte, a float8 scale per 16 inputs and one of the whole tensor, all multiplied."""
    rng = np.random.default_rng(0)
    book = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    codes = rng.integers(0, 16, size=(20, 64))
    scale = torch.rand(20, 4, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    tensors = {
        "fc.weight": (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8),
        "fc.weight_scale": scale,
        "fc.weight_scale_2": torch.tensor(0.013),
        "fc.input_scale": torch.tensor(0.1),
    }
    net = network(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    expected = book[codes] * np.repeat(scale.float().numpy(), 16, axis=1) * np.float32(0.013)
    np.testing.assert_allclose(net.read("fc.weight"), expected, rtol=1e-6)
    assert names_of(net) == ["fc.weight"]


@pytest.mark.parametrize(
    "tensors",
    [
        {"compressed": torch.ones(16, 16), "bitmask": torch.ones(16, 4, dtype=torch.uint8)},
        {"weight_packed": torch.ones(16, 8, dtype=torch.int32), "scale_packed": torch.ones(2, 16)},
    ],
)
def test_sparse_layouts_are_named_and_hold_no_layer(tmp_path, tensors):
    net = network(
        tmp_path, {f"fc.{n}": t for n, t in tensors.items()}, {"quant_method": "compressed-tensors"}
    )
    assert names_of(net) == []
    assert "stored by compressed-tensors, not decoded" in " ".join(s.reason for s in net.skipped())
