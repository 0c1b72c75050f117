"""Small valid files of every format, made anew for each test: the seeds of the bad ones."""

from __future__ import annotations

import io
import json
import mmap
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ORACLE = Path(__file__).resolve().parents[1] / "io" / "oracle"


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


def schemes_bytes() -> bytes:
    """A safetensors file with a layer of each further scheme: nf4, int8, compressed-tensors, MXFP4 experts."""
    from safetensors.numpy import save

    rng = np.random.default_rng(0)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [8, 16]}
    table = {
        "a.weight": rng.integers(0, 256, (64, 1), np.uint8),
        "a.weight.absmax": rng.random(2, np.float32),
        "a.weight.quant_map": np.linspace(-1, 1, 16, dtype=np.float32),
        "a.weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
        "b.weight": rng.integers(-128, 128, (6, 8), np.int8),
        "b.SCB": rng.random(6, np.float32),
        "c.weight_packed": rng.integers(-(2**31), 2**31, (4, 2), np.int32),
        "c.weight_scale": rng.random((4, 2), np.float32),
        "c.weight_shape": np.array([4, 16]),
        "mlp.experts.down_proj_blocks": rng.integers(0, 256, (2, 4, 1, 16), np.uint8),
        "mlp.experts.down_proj_scales": rng.integers(120, 130, (2, 4, 1), np.uint8),
    }
    return save(table)


def adapter_bytes() -> bytes:
    """The factors of a LoRA of two layers."""
    rng = np.random.default_rng(0)
    return safetensors_bytes(
        {
            f"base_model.model.layers.{i}.{name}_proj.lora_{part}.weight": rng.standard_normal(
                shape, np.float32
            )
            for i, name in enumerate("qv")
            for part, shape in (("A", (2, 6)), ("B", (4, 2)))
        }
    )


FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Callable[[], bytes]]]] = {
    "adapter_config.json": (
        {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "alpha_pattern": {".*q_proj": 8}, "use_rslora": False},
        {"adapter_model.safetensors": adapter_bytes},
    ),
    "model.safetensors.index.json": (
        {"weight_map": dict.fromkeys(arrays(), "model-00001-of-00001.safetensors")},
        {"model-00001-of-00001.safetensors": safetensors_bytes},
    ),
    "model_index.json": (
        {"_class_name": "P", "unet": ["diffusers", "U"], "vae": ["diffusers", "V"]},
        {"unet/model.safetensors": safetensors_bytes, "vae/model.safetensors": safetensors_bytes},
    ),
    "config.json": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}},
        {"model.safetensors": quantised_bytes},
    ),
}
"""Tables that say what a folder is: a valid one, and the files that belong beside it."""


@cache
def _beside(table: str) -> dict[str, bytes]:
    return {name: make() for name, make in FOLDERS[table][1].items()}


def folder_around(table: str, folder: Path) -> None:
    """Write the files that belong beside a table."""
    for name, data in _beside(table).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


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
        "a.keras": lambda: (ORACLE / "lambda.keras").read_bytes(),
        "gptq.safetensors": quantised_bytes,
        "schemes.safetensors": schemes_bytes,
    }
    files = {name: make() for name, make in makers.items()}
    return files | {name: json.dumps(table).encode() for name, (table, _) in FOLDERS.items()}


def is_mapped(array: np.ndarray) -> bool:
    """Whether an array's values are pages of a file, not memory of the process."""
    base: Any = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return isinstance(base, mmap.mmap)
