"""GGUF: header by ourselves, values as the gguf library gives them."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from makers import is_mapped

import strati


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def made(
    tensors=(("w", (4, 2), 0, 0),), data=bytes(32), pairs=b"", n_pairs=0, count=None, version=3
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors) if count is None else count, n_pairs) + pairs
    for name, dims, kind, offset in tensors:
        head += text(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d) for d in dims)
        head += struct.pack("<IQ", kind, offset)
    return head + bytes(-len(head) % 32) + data


def opened(tmp_path, data: bytes):
    (tmp_path / "a.gguf").write_bytes(data)
    return strati.open(tmp_path / "a.gguf")


def test_values_agree_with_the_library(tmp_path, seeds):
    net = opened(tmp_path, seeds["a.gguf"])
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    for tensor in reader.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        got = net.read(tensor.name)
        np.testing.assert_array_equal(got.astype(np.float32), expected.reshape(got.shape))
    layers = {layer.name: layer for layer in net.layers()}
    assert layers["blk.0.attn_q.weight"].role.value == "attention.q"
    assert is_mapped(net.read("blk.0.attn_q.weight"))
    up = layers["blk.0.ffn_up.weight"]
    assert (up.quantised, up.dtype, up.role.value, up.block) == (True, "q8_0", "mlp.in", 0)
    assert net.config["num_attention_heads"] == 4
    assert net.parameters == 3 * 8 * 64


@pytest.mark.parametrize(
    "kind",
    [t for t in gguf.GGMLQuantizationType if t.name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16")],
)
def test_block_sizes_are_the_librarys(tmp_path, kind):
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    coded = gguf.quants.quantize(values, kind)
    net = opened(tmp_path, made([("w", (64, 4), int(kind), 0)], coded.tobytes()))
    np.testing.assert_array_equal(
        net.read("w").astype(np.float32), gguf.quants.dequantize(coded, kind).reshape(4, 64)
    )


def test_the_table_of_codes_is_the_librarys():
    from strati.io.formats.gguf_file import _CODED

    for number, (name, block, size) in _CODED.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name.lower() == name
        assert gguf.constants.GGML_QUANT_SIZES[kind] == (block, size)


def test_the_hand_made_one_opens(tmp_path):
    assert opened(tmp_path, made()).read("w").shape == (2, 4)


BAD = {
    "magic only": b"GGUF",
    "version 1": made(version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64),
    "billions of tensors": made(count=2**40),
    "more tensors than there are": made(count=50),
    "billions of settings": made(n_pairs=2**40),
    "setting of unknown type": made(pairs=text("k") + struct.pack("<I", 99), n_pairs=1),
    "setting twice": made(pairs=(text("k") + struct.pack("<IB", 0, 1)) * 2, n_pairs=2),
    "list of billions": made(pairs=text("k") + struct.pack("<IIQ", 9, 8, 2**40), n_pairs=1),
    "list of a million absent texts": made(pairs=text("k") + struct.pack("<IIQ", 9, 8, 10**6), n_pairs=1),
    "lists in lists": made(pairs=text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 40, n_pairs=1),
    "text of an exabyte": made(pairs=struct.pack("<Q", 2**60), n_pairs=1),
    "alignment zero": made(pairs=text("general.alignment") + struct.pack("<II", 4, 0), n_pairs=1),
    "alignment three": made(pairs=text("general.alignment") + struct.pack("<II", 4, 3), n_pairs=1),
    "alignment as text": made(pairs=text("general.alignment") + struct.pack("<I", 8) + text("32"), n_pairs=1),
    "shape beyond the file": made([("w", (400, 2), 0, 0)]),
    "shape that overflows": made([("w", (2**40, 2**40), 0, 0)]),
    "offset beyond the file": made([("w", (4, 2), 0, 2**62)]),
    "offset not aligned": made([("w", (2,), 0, 8)]),
    "overlap": made([("a", (4, 2), 0, 0), ("b", (4, 2), 0, 0)]),
    "same name twice": made([("w", (4, 2), 0, 0), ("w", (4, 2), 0, 32)], bytes(64)),
    "unknown type": made([("w", (4, 2), 77, 0)]),
    "rows no multiple of the block": made([("w", (31, 1), 8, 0)], bytes(64)),
    "hundred dimensions": made([("w", (1,) * 100, 0, 0)]),
    "name that is no UTF-8": made().replace(text("w"), struct.pack("<Q", 1) + b"\xff"),
}


@pytest.mark.parametrize("case", BAD)
def test_lies_are_refused_in_one_line(tmp_path, case):
    with pytest.raises(strati.StratiError) as caught:
        opened(tmp_path, BAD[case])
    assert "\n" not in str(caught.value)
