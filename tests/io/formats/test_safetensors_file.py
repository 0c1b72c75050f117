"""safetensors: what is honest is mapped, what lies is refused in one line."""

from __future__ import annotations

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import array_shapes, arrays
from makers import arrays as small
from makers import is_mapped, safetensors_bytes, with_header
from safetensors.numpy import save, save_file

import strati


def written(tmp_path, data: bytes, name: str = "a.safetensors"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


def test_reads_what_the_library_wrote(tmp_path):
    save_file(small(), tmp_path / "a.safetensors", metadata={"format": "pt"})
    net = strati.open(tmp_path / "a.safetensors")
    assert net.format == "safetensors"
    for name, array in small().items():
        got = net.read(name)
        assert is_mapped(got)
        assert not got.flags.writeable
        np.testing.assert_array_equal(got, array)
    assert net.parameters == sum(a.size for a in small().values())


@pytest.mark.parametrize(
    "dtype",
    ["float16", "float32", "float64", "int8", "int64", "bool", "uint8", ml_dtypes.bfloat16, "float8_e4m3fn"],
)
def test_dtypes(tmp_path, dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype) if dtype == "float8_e4m3fn" else dtype)
    array = np.arange(12).reshape(3, 4).astype(kind)
    codes = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "bool": "BOOL"}
    code = codes.get(kind.name) or f"{kind.name[0].upper()}{8 * kind.itemsize}"
    header = {"w": {"dtype": code, "shape": [3, 4], "data_offsets": [0, array.nbytes]}}
    net = strati.open(written(tmp_path, with_header(json.dumps(header), array.tobytes())))
    assert net["w"].dtype == kind.name
    np.testing.assert_array_equal(net.read("w").astype(float), array.astype(float))
    analysed = kind.name in ("float16", "float32", "float64", "bfloat16", "float8_e4m3fn")
    assert bool(net.layers()) == analysed
    assert bool(net.skipped()) != analysed


@settings(max_examples=30, deadline=None)
@given(arrays(np.float32, array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)))
def test_any_shape_agrees_with_the_library(tmp_path_factory, array):
    path = tmp_path_factory.mktemp("s") / "a.safetensors"
    path.write_bytes(save({"w": array, "v": np.ones(3, np.float32)}))
    net = strati.open(path)
    np.testing.assert_array_equal(net.read("w"), array)
    named = {layer.tensor for layer in net.layers()} | {s.name for s in net.skipped()}
    assert named == {"w", "v"}


def entry(shape=(2, 2), offsets=(0, 16), dtype="F32", **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


DATA = bytes(16)
LIES = {
    "not even a length": b"abc",
    "length beyond the file": struct.pack("<Q", 1000) + b"{}",
    "length of an exabyte": struct.pack("<Q", 2**60) + b"{" + DATA,
    "header that is no JSON": with_header("{nonsense", DATA),
    "header that is no table": struct.pack("<Q", 2) + b"{]" + DATA,
    "header with NaN for a shape": with_header(
        '{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}', DATA
    ),
    "nested without end": with_header('{"w":' + "[" * 50_000 + "]" * 50_000 + "}", DATA),
    "number of 5000 digits": with_header(
        '{"w":{"dtype":"F32","shape":[' + "9" * 5000 + '],"data_offsets":[0,16]}}', DATA
    ),
    "not UTF-8": struct.pack("<Q", 5) + b'{"\xff"}' + DATA,
    "same name twice": with_header(f'{{"w":{json.dumps(entry())},"w":{json.dumps(entry())}}}', DATA),
    "shape of booleans": with_header('{"w":{"dtype":"F32","shape":[true,4],"data_offsets":[0,16]}}', DATA),
    "shape of floats": with_header('{"w":{"dtype":"F32","shape":[2.0,2],"data_offsets":[0,16]}}', DATA),
    "negative shape": with_header(json.dumps({"w": entry(shape=(-2, -2))}), DATA),
    "shape too large": with_header(json.dumps({"w": entry(shape=(200, 2))}), DATA),
    "shape that overflows": with_header(json.dumps({"w": entry(shape=(2**32, 2**32, 2**60))}), DATA),
    "offsets beyond the file": with_header(json.dumps({"w": entry((2, 20), (0, 160))}), DATA),
    "offsets reversed": with_header(json.dumps({"w": entry(offsets=(16, 0))}), DATA),
    "negative offset": with_header(json.dumps({"w": entry(offsets=(-16, 0))}), DATA),
    "overlap": with_header(json.dumps({"a": entry(), "b": entry((2,), (8, 16))}), DATA),
    "hole": with_header(json.dumps({"a": entry((2,), (0, 8)), "b": entry((2,), (12, 20))}), bytes(20)),
    "bytes behind the last": with_header(json.dumps({"w": entry()}), bytes(20)),
    "unknown dtype": with_header(json.dumps({"w": entry(dtype="F33")}), DATA),
    "dtype that is no text": with_header(json.dumps({"w": entry(dtype=7)}), DATA),
    "field too many": with_header(json.dumps({"w": entry(more=1)}), DATA),
    "entry that is no table": with_header(json.dumps({"w": [1]}), DATA),
    "metadata that is no table": with_header(json.dumps({"__metadata__": {"a": 1}, "w": entry()}), DATA),
    "forty dimensions": with_header(json.dumps({"w": entry((1,) * 40, (0, 4))}), bytes(4)),
    "truncated data": safetensors_bytes()[:-5],
    "truncated header": safetensors_bytes()[:40],
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused_in_one_line(tmp_path, lie):
    with pytest.raises(strati.StratiError) as caught:
        strati.open(written(tmp_path, LIES[lie]))
    assert "\n" not in str(caught.value)
    assert "a.safetensors" in str(caught.value)


def test_a_header_of_a_million_brackets_is_refused_before_it_is_parsed(tmp_path):
    text = '{"w":[' + "[]," * 700_000 + "[]]}"
    with pytest.raises(strati.StratiError, match="probably corrupt"):
        strati.open(written(tmp_path, with_header(text, b"")))


def test_names_with_control_characters_are_kept_and_escaped_in_messages(tmp_path):
    name = "w\x1b[31m\u202e\n"
    path = written(tmp_path, safetensors_bytes({name: np.ones((2, 2), np.float32)}))
    net = strati.open(path)
    assert net.layers()[0].name == name
    with pytest.raises(strati.StratiError) as caught:
        net.read("x\x1b")
    assert "\x1b" not in str(caught.value)


def test_ten_thousand_tiny_tensors(tmp_path):
    table = {f"layer.{i}.weight": np.full((2, 2), i, np.float32) for i in range(10_000)}
    net = strati.open(written(tmp_path, safetensors_bytes(table)))
    assert len(net.layers()) == 10_000
    assert net.layers()[1234].name == "layer.1234.weight"
    assert next(net.layers()[1234].matrices())[0, 0] == 1234


def test_packed_types_are_listed_and_not_read(tmp_path):
    header = {"w": entry((4, 4), (0, 8), "F4")}
    net = strati.open(written(tmp_path, with_header(json.dumps(header), bytes(8))))
    assert "float4_e2m1fn" in net.skipped()[0].reason
    with pytest.raises(strati.StratiError):
        net.read("w")
