"""The door: what is no file, what is no network, what is only misnamed; and that torch stays out."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from makers import arrays, is_mapped, safetensors_bytes, with_header

import strati


def refused(path, match: str) -> None:
    with pytest.raises(strati.StratiError, match=match) as caught:
        strati.open(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "named",
    [
        {"x": np.zeros((9, 4)), "y": np.zeros(9, int)},
        {"X_train": np.zeros((9, 4)), "y_train": np.zeros(9), "X_test": np.zeros((2, 4))},
        {"input_ids": np.zeros((3, 8), int), "attention_mask": np.ones((3, 8), int)},
        {"train_images": np.zeros((3, 8, 8)), "train_labels": np.zeros(3, int)},
    ],
)
def test_a_data_file_is_no_model(tmp_path, named):
    np.savez(tmp_path / "data.npz", **named)
    refused(tmp_path / "data.npz", "holds data")


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_token_ids_are_no_model(tmp_path, dtype):
    np.save(tmp_path / "tokens.npy", np.arange(50, dtype=dtype))
    refused(tmp_path / "tokens.npy", "data|token ids")
    np.save(tmp_path / "corpus.npy", np.arange(50, dtype=dtype).reshape(5, 10))
    refused(tmp_path / "corpus.npy", "token ids")


def test_weights_in_numpy_files_are_a_model(tmp_path):
    np.savez(tmp_path / "w.npz", x_proj=np.eye(3), fc1=np.eye(4))
    assert len(strati.open(tmp_path / "w.npz").layers()) == 2
    np.save(tmp_path / "matrix.npy", np.eye(5))
    assert len(strati.open(tmp_path / "matrix.npy").layers()) == 1


def test_what_is_no_regular_file(tmp_path):
    refused(tmp_path / "absent.safetensors", "no such file")
    (tmp_path / "empty.safetensors").touch()
    refused(tmp_path / "empty.safetensors", "empty")
    os.mkfifo(tmp_path / "pipe.safetensors")
    refused(tmp_path / "pipe.safetensors", "pipe")
    refused("/dev/zero", "device")
    refused("/dev/null", "device")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path / "loop", "cannot be opened")
    refused("a\0b", "not a path")
    refused(tmp_path / ("x" * 5000), "cannot be opened")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes())
    (tmp_path / "a.safetensors").chmod(0)
    refused(tmp_path / "a.safetensors", "permission")


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"hello, world, this is a text file", "unsupported format"),
        (bytes(1000), "unsupported format"),
        (b"\x00", "unsupported format"),
        (b"PK\x03\x04" + bytes(100), "zip"),
        (b"cos\nsystem\n(S'ls'\ntR.", "os.system"),
        (b"\x7fELF" + bytes(100), "unsupported format"),
        (b"\x08\x07\x12", "unsupported format"),
    ],
)
@pytest.mark.parametrize("ending", [".bin", "", ".h5"])
def test_what_is_no_network(tmp_path, data, match, ending):
    (tmp_path / f"a{ending}").write_bytes(data)
    refused(tmp_path / f"a{ending}", match)


@pytest.mark.parametrize(
    ("seed", "ending", "kind"),
    [
        ("a.safetensors", ".bin", "safetensors"),
        ("zip.pt", ".safetensors", "torch"),
        ("stream.pt", ".npz", "torch"),
        ("a.npz", ".pt", "npz"),
        ("a.gguf", ".bin", "gguf"),
        ("a.onnx", ".h5", "onnx"),
        ("a.h5", ".onnx", "keras"),
        ("a.h5", ".weights", "keras"),
    ],
)
def test_a_wrong_ending_is_said_and_not_fatal(tmp_path, seeds, seed, ending, kind):
    path = tmp_path / f"a{ending}"
    path.write_bytes(seeds[seed])
    net = strati.open(path)
    assert net.format == kind
    assert [flag.code for flag in net.warnings] == ([] if ending == ".weights" else ["wrong-ending"])


def test_nothing_is_read_before_it_is_asked_for(tmp_path):
    """Opening touches the header's pages only: the weights of a sparse file of 8 GB stay holes."""
    import json
    import struct

    size = 2**33
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**15, 2**16], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "big.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    net = strati.open(path)
    (layer,) = net.layers()
    assert layer.parameters == 2**31
    matrix = next(layer.matrices())
    assert is_mapped(matrix)
    assert matrix[5, 7] == 0


def test_a_network_travels_as_its_path(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes())
    layer = pickle.loads(pickle.dumps(strati.open(path).layers()[0]))
    np.testing.assert_array_equal(next(layer.matrices()).shape, layer.shape)


def test_unknown_names_and_options(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes())
    net = strati.open(path)
    with pytest.raises(strati.StratiError, match="no such tensor"):
        net.read("ghost")
    with pytest.raises(strati.StratiError, match="pool"):
        net.layers(conv="other")
    assert "4 tensors" in repr(net)


@pytest.mark.parametrize("ending", ["safetensors", "npz", "pt", "onnx", "gguf"])
def test_opening_never_imports_torch(tmp_path, seeds, ending):
    seed = "zip.pt" if ending == "pt" else f"a.{ending}"
    path = tmp_path / seed
    path.write_bytes(seeds[seed])
    program = (
        "import sys, strati\n"
        f"net = strati.open({str(path)!r})\n"
        "[m.shape for layer in net.layers() for m in layer.matrices()]\n"
        "print(sorted({'torch', 'transformers', 'onnx', 'h5py', 'pandas', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_import_alone_imports_nothing_heavy():
    program = (
        "import sys, strati; print(sorted({'torch', 'numpy', 'pandas', 'scipy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_reading_costs_no_anonymous_memory(tmp_path):
    """Weights stay file pages: a file of 200 MB is summed within a few MB of the process's own memory."""
    path = tmp_path / "big.safetensors"
    array = np.ones((5000, 10_000), np.float32)
    path.write_bytes(safetensors_bytes({"w": array}))
    program = (
        "import strati\n"
        "def anonymous():\n"
        "    text = open('/proc/self/status').read()\n"
        "    return int(text.split('RssAnon:')[1].split()[0])\n"
        f"net = strati.open({str(path)!r})\n"
        "before = anonymous()\n"
        "total = sum(float(m.sum()) for layer in net.layers() for m in layer.matrices())\n"
        "print(total, anonymous() - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    total, grown = done.stdout.split()
    assert float(total) == array.size
    assert int(grown) < 20_000  # kB
    assert arrays()


@pytest.mark.parametrize("thing", [None, 3, b"model.npz", {"w": 1}, {}, np.ones((2, 2)), ""])
def test_what_is_no_network_in_memory_is_said(thing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(arrays()))
    with pytest.raises(
        strati.StratiError, match=r"is not a network|is one array|holds no tensors|is an empty name"
    ):
        strati.open(thing)


def test_a_name_that_is_no_unicode_is_refused(tmp_path):
    header = '{"a\\ud800": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}'
    (tmp_path / "odd.safetensors").write_bytes(with_header(header, bytes(16)))
    with pytest.raises(strati.StratiError, match=r"the name a\\ud800 is not Unicode text"):
        strati.open(tmp_path / "odd.safetensors")
