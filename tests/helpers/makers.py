"""Small valid files of every format, made anew for each test: the seeds of the bad ones."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ORACLE = Path(__file__).resolve().parents[1] / "network" / "oracle"


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """A few float32 tensors of a two-layer perceptron with a kernel."""
    rng = np.random.default_rng(seed)
    return {
        "fc1.weight": rng.standard_normal((6, 4)).astype(np.float32),
        "fc1.bias": rng.standard_normal(6).astype(np.float32),
        "conv.weight": rng.standard_normal((5, 3, 2, 2)).astype(np.float32),
        "fc2.weight": rng.standard_normal((3, 6)).astype(np.float32),
    }


def safetensors_bytes(
    tensors: dict[str, np.ndarray] | None = None, header: dict[str, Any] | None = None
) -> bytes:
    """A safetensors file by hand, with any header one likes."""
    tensors = arrays() if tensors is None else tensors
    names = {
        "float32": "F32",
        "float64": "F64",
        "float16": "F16",
        "int64": "I64",
        "bool": "BOOL",
        "bfloat16": "BF16",
    }
    table: dict[str, Any] = {}
    data = b""
    for name, array in tensors.items():
        raw = array.tobytes()
        table[name] = {
            "dtype": names[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return with_header(json.dumps(table if header is None else header), data)


def with_header(text: str, data: bytes) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw + data


def npz_bytes(compressed: bool = False) -> bytes:
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **arrays())
    return buffer.getvalue()


def torch_bytes(zipped: bool = True) -> bytes:
    import torch

    buffer = io.BytesIO()
    state = {name: torch.from_numpy(array) for name, array in arrays().items()}
    torch.save(state, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def onnx_bytes() -> bytes:
    from onnx import TensorProto, helper, numpy_helper

    parts = arrays()
    weights = [
        numpy_helper.from_array(parts["fc1.weight"].T.copy(), "onnx::MatMul_7"),
        numpy_helper.from_array(parts["fc1.bias"], "fc1.bias"),
        numpy_helper.from_array(parts["fc2.weight"], "fc2.weight"),
    ]
    nodes = [
        helper.make_node(
            "MatMul", ["x", "onnx::MatMul_7"], ["h"], name="/encoder/layer.0/attention/self/query/MatMul"
        ),
        helper.make_node("Add", ["h", "fc1.bias"], ["a"]),
        helper.make_node("Gemm", ["a", "fc2.weight"], ["y"], name="/fc2/Gemm", transB=1),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3])
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], initializer=weights))
    return bytes(model.SerializeToString())


def gguf_bytes(folder: Path) -> bytes:
    import gguf

    path = folder / "made.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(4)
    writer.add_token_list(["a", "b", "c"])
    rng = np.random.default_rng(0)
    values = rng.standard_normal((8, 64)).astype(np.float32)
    writer.add_tensor("blk.0.attn_q.weight", values)
    writer.add_tensor("blk.0.attn_k.weight", values.astype(np.float16))
    coded = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.ffn_up.weight", coded, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def keras_bytes() -> bytes:
    import h5py

    buffer = io.BytesIO()
    rng = np.random.default_rng(0)
    with h5py.File(buffer, "w") as file:
        root = file.create_group("model_weights")
        root.attrs["layer_names"] = [b"conv2d", b"dense", b"lstm"]
        root["conv2d/conv2d/kernel:0"] = rng.standard_normal((2, 2, 3, 5)).astype(np.float32)
        root["dense/dense/kernel:0"] = rng.standard_normal((4, 6)).astype(np.float32)
        root["dense/dense/bias:0"] = np.zeros(6, np.float32)
        root["lstm/lstm/kernel:0"] = rng.standard_normal((3, 8)).astype(np.float32)
        root["lstm/lstm/recurrent_kernel:0"] = rng.standard_normal((2, 8)).astype(np.float32)
        root.create_dataset("packed/packed/kernel:0", data=np.ones((32, 16), np.float32), compression="gzip")
    return buffer.getvalue()


def quantised_bytes() -> bytes:
    """A safetensors file of one GPTQ layer, as auto-gptq packed it."""
    with np.load(ORACLE / "packed.npz") as kept:
        names = {"int32": "I32", "float32": "F32"}
        table: dict[str, Any] = {}
        data = b""
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            array = kept[f"gptq4.{part}"]
            span = [len(data), len(data) + array.nbytes]
            table[f"fc.{part}"] = {
                "dtype": names[array.dtype.name],
                "shape": list(array.shape),
                "data_offsets": span,
            }
            data += array.tobytes()
    header = json.dumps(table).encode()
    return struct.pack("<Q", len(header)) + header + data


def seeds(folder: Path) -> dict[str, bytes]:
    """One valid file of every kind."""
    makers: dict[str, Callable[[], bytes]] = {
        "a.safetensors": safetensors_bytes,
        "a.npz": npz_bytes,
        "packed.npz": lambda: npz_bytes(compressed=True),
        "zip.pt": torch_bytes,
        "stream.pt": lambda: torch_bytes(zipped=False),
        "a.onnx": onnx_bytes,
        "a.gguf": lambda: gguf_bytes(folder),
        "a.h5": keras_bytes,
        "a.msgpack": lambda: (ORACLE / "flax.msgpack").read_bytes(),
        "gptq.safetensors": quantised_bytes,
    }
    return {name: make() for name, make in makers.items()}
