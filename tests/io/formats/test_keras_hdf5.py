"""Keras' HDF5: kernels turned the right way, nothing outside the file is ever read."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from makers import is_mapped

import strati


def test_kinds_order_and_orientation(tmp_path, seeds):
    (tmp_path / "a.h5").write_bytes(seeds["a.h5"])
    net = strati.open(tmp_path / "a.h5")
    got = [(layer.name.split("/")[-1], layer.kind, layer.shape, layer.count) for layer in net.layers()]
    assert got == [
        ("kernel:0", "conv", (5, 3), 4),
        ("kernel:0", "linear", (6, 4), 1),
        ("kernel:0", "lstm", (8, 3), 1),
        ("recurrent_kernel:0", "lstm", (8, 2), 1),
        ("kernel:0", "linear", (16, 32), 1),
    ]
    with h5py.File(tmp_path / "a.h5") as file:
        kernel = file["model_weights/conv2d/conv2d/kernel:0"][()]
    slices = list(net.layers()[0].matrices())
    np.testing.assert_array_equal(slices[1], kernel[0, 1].T)
    flat = next(net.layers(conv="flatten")[0].matrices())
    assert flat.shape == (5, 12)
    np.testing.assert_allclose(np.sort(flat.ravel()), np.sort(kernel.ravel()))
    assert is_mapped(net.read("dense/dense/kernel:0"))
    assert net.read("packed/packed/kernel:0").sum() == 32 * 16  # compressed in chunks


def test_weights_only_files_of_keras_3(tmp_path):
    with h5py.File(tmp_path / "a.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.ones((4, 6), np.float32)
        file["layers/dense/vars/1"] = np.ones(6, np.float32)
        file["layers/embedding/vars/0"] = np.ones((9, 4), np.float32)
        file["layers/lstm/cell/vars/0"] = np.ones((4, 8), np.float32)
        file["layers/lstm/cell/vars/1"] = np.ones((2, 8), np.float32)
        file["layers/multi_head_attention/query_dense/vars/0"] = np.ones((6, 2, 3), np.float32)
        file["layers/multi_head_attention/output_dense/vars/0"] = np.ones((2, 3, 5), np.float32)
        file["optimizer/vars/0"] = np.ones((4, 6), np.float32)
    net = strati.open(tmp_path / "a.weights.h5")
    shapes = {layer.name.split("/", 1)[1]: (layer.kind, layer.shape) for layer in net.layers()}
    assert shapes == {
        "dense/vars/0": ("linear", (6, 4)),
        "embedding/vars/0": ("embedding", (9, 4)),
        "lstm/cell/vars/0": ("lstm", (8, 4)),
        "lstm/cell/vars/1": ("lstm", (8, 2)),
        "multi_head_attention/query_dense/vars/0": ("linear", (6, 6)),
        "multi_head_attention/output_dense/vars/0": ("linear", (5, 6)),
    }
    assert [flag.code for flag in net.warnings] == ["left-aside"]


def test_nothing_outside_the_file_is_read(tmp_path):
    secret = tmp_path / "secret.bin"
    secret.write_bytes(b"\x01" * 64)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["w"] = np.ones((2, 2))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["dense/kernel"] = np.ones((2, 3), np.float32)
        file["soft"] = h5py.SoftLink("/dense/kernel")
        file["external_link"] = h5py.ExternalLink("other.h5", "/w")
        file["hard"] = file["dense/kernel"]
        file.create_dataset("external", (4, 4), "f4", external=[(str(secret), 0, 64)])
        layout = h5py.VirtualLayout((2, 2), "f8")
        layout[:] = h5py.VirtualSource("other.h5", "w", (2, 2))
        file.create_virtual_dataset("virtual", layout)
        file["text"] = "hello"
        file.create_dataset("never_written", (1_000_000, 1_000_000), "f4", chunks=(1000, 1000))
        loop = file.create_group("loop")
        loop["again"] = loop
    net = strati.open(tmp_path / "a.h5")
    assert [layer.name for layer in net.layers()] == ["dense/kernel"]
    reasons = {s.name: s.reason for s in net.skipped()}
    assert set(reasons) == {
        "soft",
        "external_link",
        "hard",
        "external",
        "virtual",
        "text",
        "never_written",
        "loop/again",
    }


def test_a_file_that_only_points_elsewhere_is_refused(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["w"] = np.ones((2, 2))
    for name, link in (("soft", h5py.SoftLink("/b")), ("outer", h5py.ExternalLink("other.h5", "/w"))):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["w"] = link
        with pytest.raises(strati.StratiError, match="in other files, which are not opened"):
            strati.open(tmp_path / f"{name}.h5")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("w", (4, 4), "f4", external=[(str(tmp_path / "other.h5"), 0, 64)])
    with pytest.raises(strati.StratiError, match="in other files, which are not opened"):
        strati.open(tmp_path / "data.h5")


def test_a_bomb_is_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("w", data=np.zeros((3000, 2000)), compression="gzip", chunks=(1000, 2000))
    with pytest.raises(strati.StratiError, match="bomb"):
        strati.open(tmp_path / "a.h5")


@pytest.mark.parametrize("cut", [8, 9, 100, 800, -100])
def test_truncated(tmp_path, seeds, cut):
    (tmp_path / "a.h5").write_bytes(seeds["a.h5"][:cut])
    with pytest.raises(strati.StratiError) as caught:
        strati.open(tmp_path / "a.h5")
    assert "\n" not in str(caught.value)


def test_no_weights(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("model_weights")
    with pytest.raises(strati.StratiError, match="no weights"):
        strati.open(tmp_path / "a.h5")
