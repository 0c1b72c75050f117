"""ONNX without the onnx package: values, roles and order from the graph, external data inside the folder only."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from makers import arrays, is_mapped, onnx_bytes
from onnx import TensorProto, helper, numpy_helper

import strati


def model(nodes, weights) -> bytes:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])
    graph = helper.make_graph(nodes, "g", [x], [], initializer=weights)
    return helper.make_model(graph).SerializeToString()


def opened(tmp_path, data: bytes, name: str = "a.onnx"):
    (tmp_path / name).write_bytes(data)
    return strati.open(tmp_path / name)


def test_values_roles_and_orientation(tmp_path):
    net = opened(tmp_path, onnx_bytes())
    first, second = net.layers()
    assert (first.name, first.role.value, first.block) == ("onnx::MatMul_7", "attention.q", 0)
    assert first.shape == (6, 4)  # stored (in, out), seen (out, in)
    assert first.view.endswith("used by encoder/layer.0/attention/self/query")
    np.testing.assert_array_equal(next(first.matrices()), arrays()["fc1.weight"])
    assert (second.name, second.shape, second.view) == ("fc2.weight", (3, 6), "as stored")
    assert is_mapped(net.read("fc2.weight"))


def test_the_loader_agrees_with_the_library_on_every_field_type(tmp_path):
    rng = np.random.default_rng(0)
    values = {
        "raw32": numpy_helper.from_array(rng.standard_normal((3, 2)).astype(np.float32), "raw32"),
        "raw16": numpy_helper.from_array(rng.standard_normal((3, 2)).astype(np.float16), "raw16"),
        "raw64": numpy_helper.from_array(rng.standard_normal((3, 2)), "raw64"),
        "list32": helper.make_tensor("list32", TensorProto.FLOAT, [2, 2], [1.0, 2.0, 3.0, 4.0]),
        "list64": helper.make_tensor("list64", TensorProto.DOUBLE, [2, 2], [1.0, 2.0, 3.0, 4.0]),
        "integers": numpy_helper.from_array(np.arange(4).reshape(2, 2), "integers"),
        "coded": helper.make_tensor(
            "coded", TensorProto.FLOAT16, [2, 2], np.ones(4, np.float16).view(np.uint16), raw=False
        ),
    }
    net = opened(tmp_path, model([], list(values.values())))
    for name in ("raw32", "raw16", "raw64", "list32", "list64"):
        np.testing.assert_array_equal(net.read(name), numpy_helper.to_array(values[name]))
    assert {s.name for s in net.skipped()} == {"integers", "coded"}


def test_order_and_kind_come_from_the_graph(tmp_path):
    rng = np.random.default_rng(0)

    def weight(name, *shape):
        return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)

    nodes = [
        helper.make_node("Gather", ["table", "x"], ["e"], name="/emb/Gather"),
        helper.make_node("Conv", ["e", "kernel"], ["c"]),
        helper.make_node("LSTM", ["c", "w", "r"], ["l"]),
        helper.make_node("Transpose", ["turned"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["l", "t"], ["y"]),
        helper.make_node("Gemm", ["y", "gemm"], ["z"]),
    ]
    weights = [
        weight("gemm", 7, 3),
        weight("turned", 7, 8),
        weight("r", 1, 8, 2),
        weight("w", 1, 8, 5),
        weight("kernel", 5, 4, 3),
        weight("table", 9, 4),
    ]
    net = opened(tmp_path, model(nodes, weights))
    got = [(layer.tensor, layer.kind, layer.shape) for layer in net.layers()]
    assert got == [
        ("table", "embedding", (9, 4)),
        ("kernel", "conv", (5, 4)),
        ("w", "lstm", (8, 5)),
        ("r", "lstm", (8, 2)),
        ("turned", "linear", (7, 8)),
        ("gemm", "linear", (3, 7)),
    ]


def test_weights_inside_branches_and_constants(tmp_path):
    w = numpy_helper.from_array(np.eye(3, dtype=np.float32), "w")
    constant = helper.make_node(
        "Constant", [], ["k"], value=numpy_helper.from_array(np.ones((2, 3), np.float32))
    )
    inner = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["o"])], "then", [], [], initializer=[w]
    )
    branch = helper.make_node("If", ["x"], ["y"], name="choice", then_branch=inner, else_branch=inner)
    net = opened(tmp_path, model([constant, branch], []))
    assert [layer.name for layer in net.layers()] == ["k", "w", "choice[1]/w"]


def external(tmp_path, location: str, length: str = "16", offset: str = "0") -> bytes:
    tensor = TensorProto(
        name="w", dims=[2, 2], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL
    )
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=value)
    return model([], [tensor])


def test_external_data_inside_the_folder(tmp_path):
    (tmp_path / "w.bin").write_bytes(bytes(4) + np.arange(4, dtype=np.float32).tobytes())
    net = opened(tmp_path, external(tmp_path, "w.bin", offset="4"))
    np.testing.assert_array_equal(net.read("w"), [[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("location", "length", "offset"),
    [
        ("../secret", "16", "0"),
        ("/etc/passwd", "16", "0"),
        ("sub/../../secret", "16", "0"),
        ("link", "16", "0"),
        ("folderlink/secret", "16", "0"),
        ("missing.bin", "16", "0"),
        ("", "16", "0"),
        ("w.bin", "17", "0"),
        ("w.bin", "16", "8"),
        ("w.bin", "16", "-1"),
        ("w.bin", "1e3", "0"),
        ("sub", "16", "0"),
    ],
)
def test_external_data_elsewhere_or_lying_is_refused(tmp_path, location, length, offset):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(bytes(16))
    (folder / "w.bin").write_bytes(bytes(16))
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "folderlink").symlink_to(tmp_path)
    with pytest.raises(strati.StratiError) as caught:
        opened(folder, external(folder, location, length, offset))
    assert "\n" not in str(caught.value)


def test_lies_about_size_are_refused(tmp_path):
    tensor = TensorProto(name="w", dims=[2000, 2000], data_type=TensorProto.FLOAT, raw_data=bytes(16))
    for dims in ([2000, 2000], [2**40, 2**40], [-2, -2]):
        tensor.dims[:] = dims
        with pytest.raises(strati.StratiError):
            opened(tmp_path, model([], [tensor]))
    with pytest.raises(strati.StratiError, match="two weights"):
        twice = numpy_helper.from_array(np.eye(2), "w")
        opened(tmp_path, model([], [twice, twice]))


def test_a_bare_graph_holds_no_weights(tmp_path):
    with pytest.raises(strati.StratiError, match="no weights"):
        opened(tmp_path, model([], []))
    assert onnx.__version__
