"""ONNX files as modules: what the graph says is run, against onnx's own evaluator and against torch."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import strati
from strati.errors import UnsupportedError
from strati.network.module import as_module

RNG = np.random.default_rng(0)
W1, B1 = RNG.normal(size=(6, 9)).astype("f4"), RNG.normal(size=9).astype("f4")
W2, B2 = RNG.normal(size=(9, 4)).astype("f4"), RNG.normal(size=4).astype("f4")


def saved(path: Path, nodes: list[Any], constants: dict[str, Any], shape: list[Any], opset: int = 20) -> Path:
    """A model of one input ``x`` and one output ``y``."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])]
    weights = [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def agrees(path: Path, x: np.ndarray) -> nn.Module:
    (want,) = ReferenceEvaluator(str(path)).run(None, {"x": x})
    model = as_module(path)
    with torch.no_grad():
        got = model(torch.from_numpy(x)).numpy()
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    return model


def perceptron(
    path: Path, between: list[Any], *, extra: dict[str, Any] | None = None, opset: int = 20
) -> Path:
    """Two linear layers with nodes from ``h`` to ``a`` between them."""
    nodes = [
        helper.make_node("Gemm", ["x", "fc1.weight", "fc1.bias"], ["h"], transB=1),
        *between,
        helper.make_node("Gemm", ["a", "fc2.weight", "fc2.bias"], ["y"], transB=1),
    ]
    constants = {"fc1.weight": W1.T.copy(), "fc1.bias": B1, "fc2.weight": W2.T.copy(), "fc2.bias": B2}
    return saved(path, nodes, constants | (extra or {}), ["n", 6], opset)


ACTIVATIONS = {
    "Relu": ({}, nn.ReLU),
    "Sigmoid": ({}, nn.Sigmoid),
    "Tanh": ({}, nn.Tanh),
    "LeakyRelu": ({"alpha": 0.3}, nn.LeakyReLU),
    "Elu": ({"alpha": 0.7}, nn.ELU),
    "Selu": ({}, nn.SELU),
    "Celu": ({"alpha": 0.5}, nn.CELU),
    "Softplus": ({}, nn.Softplus),
    "Softsign": ({}, nn.Softsign),
    "HardSwish": ({}, nn.Hardswish),
    "Mish": ({}, nn.Mish),
    "Gelu": ({}, nn.GELU),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_the_graph(name: str, tmp_path: Path) -> None:
    options, kind = ACTIVATIONS[name]
    path = perceptron(tmp_path / "m.onnx", [helper.make_node(name, ["h"], ["a"], **options)])
    model = agrees(path, RNG.normal(size=(50, 6)).astype("f4"))
    assert [type(m) for m in model] == [nn.Linear, kind, nn.Linear]
    assert [n for n, m in model.named_modules() if isinstance(m, nn.Linear)] == ["fc1", "fc2"]


def test_gelu_by_tanh_and_clips(tmp_path: Path) -> None:
    x = RNG.normal(size=(50, 6)).astype("f4")
    path = perceptron(tmp_path / "g.onnx", [helper.make_node("Gelu", ["h"], ["a"], approximate="tanh")])
    assert agrees(path, x)[1].approximate == "tanh"
    for low, high, kind in ((0.0, 6.0, nn.ReLU6), (-0.5, 0.7, nn.Hardtanh)):
        ends = {"low": np.float32(low), "high": np.float32(high)}
        path = perceptron(
            tmp_path / "c.onnx", [helper.make_node("Clip", ["h", "low", "high"], ["a"])], extra=ends
        )
        assert isinstance(agrees(path, x)[1], kind)


def test_functions_that_exporters_spell_out_are_recognised(tmp_path: Path) -> None:
    x = RNG.normal(size=(50, 6)).astype("f4")
    numbers = {"root": np.float32(2**0.5), "one": np.float32(1.0), "half": np.float32(0.5)}
    gelu = [
        helper.make_node("Div", ["h", "root"], ["h1"]),
        helper.make_node("Erf", ["h1"], ["h2"]),
        helper.make_node("Add", ["h2", "one"], ["h3"]),
        helper.make_node("Mul", ["h", "h3"], ["h4"]),
        helper.make_node("Mul", ["h4", "half"], ["a"]),
    ]
    assert isinstance(agrees(perceptron(tmp_path / "g.onnx", gelu, extra=numbers), x)[1], nn.GELU)
    silu = [helper.make_node("Sigmoid", ["h"], ["s"]), helper.make_node("Mul", ["h", "s"], ["a"])]
    assert isinstance(agrees(perceptron(tmp_path / "s.onnx", silu), x)[1], nn.SiLU)
    odd = [helper.make_node("Sin", ["h"], ["s"]), helper.make_node("Add", ["h", "s"], ["a"])]
    agrees(perceptron(tmp_path / "o.onnx", odd), x)


@pytest.mark.parametrize("constants", ["one number", "one for each input"])
def test_the_normalisation_of_the_inputs_is_part_of_the_network(constants: str, tmp_path: Path) -> None:
    size = () if constants == "one number" else (6,)
    mean, std = RNG.normal(size=size).astype("f4"), RNG.uniform(1, 3, size=size).astype("f4")
    nodes = [
        helper.make_node("Sub", ["x", "mean"], ["c"]),
        helper.make_node("Div", ["c", "std"], ["n"]),
        helper.make_node("MatMul", ["n", "onnx::MatMul_7"], ["m"], name="/net/0/MatMul"),
        helper.make_node("Add", ["b1", "m"], ["h"]),
        helper.make_node("Sigmoid", ["h"], ["a"]),
        helper.make_node("Gemm", ["a", "w2", "b2"], ["g"], alpha=0.5, beta=2.0),
        helper.make_node("Softmax", ["g"], ["y"], axis=-1),
    ]
    held = {"mean": mean, "std": std, "onnx::MatMul_7": W1, "b1": B1, "w2": W2, "b2": B2}
    path = saved(tmp_path / "m.onnx", nodes, held, ["n", 6])
    model = agrees(path, (5 * RNG.normal(size=(40, 6))).astype("f4"))
    assert sum(isinstance(m, nn.Linear) for m in model.modules()) == 2


def norm(width: int, name: str = "") -> dict[str, Any]:
    """The four vectors of a batch normalisation."""
    made = {f"{name}g": RNG.normal(size=width), f"{name}b": RNG.normal(size=width)}
    made |= {f"{name}m": RNG.normal(size=width), f"{name}v": RNG.uniform(0.5, 2, size=width)}
    return {key: value.astype("f4") for key, value in made.items()}


def test_batch_normalisation_of_rows_sequences_and_images(tmp_path: Path) -> None:
    """Between linear layers, of the inputs, behind one- and two-dimensional convolutions."""
    between = [
        helper.make_node("BatchNormalization", ["h", "g", "b", "m", "v"], ["z"], epsilon=1e-3),
        helper.make_node("Sigmoid", ["z"], ["a"]),
    ]
    rows = RNG.normal(size=(30, 6)).astype("f4")
    agrees(perceptron(tmp_path / "between.onnx", between, extra=norm(9)), rows)
    nodes = [
        helper.make_node("BatchNormalization", ["x", "g", "b", "m", "v"], ["z"]),
        helper.make_node("Gemm", ["z", "w"], ["y"]),
    ]
    weight = RNG.normal(size=(6, 4)).astype("f4")
    agrees(saved(tmp_path / "first.onnx", nodes, norm(6) | {"w": weight}, ["n", 6]), rows)
    for axes in (1, 2):
        nodes = [
            helper.make_node("Conv", ["x", "k"], ["c"], pads=[1] * (2 * axes)),
            helper.make_node("BatchNormalization", ["c", "g", "b", "m", "v"], ["z"]),
            helper.make_node("Relu", ["z"], ["r"]),
            helper.make_node("GlobalAveragePool", ["r"], ["p"]),
            helper.make_node("Flatten", ["p"], ["f"]),
            helper.make_node("Gemm", ["f", "w"], ["y"]),
        ]
        kernel = RNG.normal(size=(6, 2, *[3] * axes)).astype("f4")
        shape = [2, *[7] * axes]
        path = saved(tmp_path / f"{axes}.onnx", nodes, norm(6) | {"w": weight, "k": kernel}, ["n", *shape])
        agrees(path, RNG.normal(size=(5, *shape)).astype("f4"))


def test_constants_and_weights_behind_nodes(tmp_path: Path) -> None:
    """Weights as Constant nodes, transposed in the graph, shapes as lists of numbers, data kept as float_data."""
    nodes = [
        helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(W1.T.copy())),
        helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        helper.make_node(
            "Constant", [], ["to"], value=helper.make_tensor("s", TensorProto.INT64, [2], [-1, 6])
        ),
        helper.make_node("Reshape", ["x", "to"], ["r"]),
        helper.make_node("MatMul", ["r", "wt"], ["h"]),
        helper.make_node("Relu", ["h"], ["a"]),
        helper.make_node("MatMul", ["a", "w2"], ["y"]),
    ]
    path = saved(tmp_path / "m.onnx", nodes, {"w2": W2}, ["n", 2, 3])
    agrees(path, RNG.normal(size=(7, 2, 3)).astype("f4"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [False, True])
def test_exports_of_torch(dynamo: bool, tmp_path: Path) -> None:
    if dynamo:
        pytest.importorskip("onnxscript")
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(1, 4, 3, stride=2, padding=1),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(16, 12),
                nn.GELU(),
                nn.Linear(12, 8, bias=False),
                nn.SiLU(),
                nn.Dropout(),
                nn.Linear(8, 3),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net((x - 0.1307) / 0.3081)

    model = Net().eval()
    model.net[1].running_mean.normal_()
    x = torch.rand(5, 1, 8, 8)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), buffer, dynamo=dynamo, input_names=["x"])
    path = tmp_path / "m.onnx"
    path.write_bytes(buffer.getvalue())
    with torch.no_grad():
        got, want = as_module(path)(x), model(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("between", "extra", "word"),
    [
        ([helper.make_node("Add", ["h", "x"], ["a"])], {}, "branches or joins at"),
        ([helper.make_node("Tan", ["h"], ["a"])], {}, "Tan a is not an operation that can be run here"),
        ([helper.make_node("Softmax", ["h"], ["a"], axis=0)], {}, "not over the last axis"),
        (
            [
                helper.make_node("Cast", ["h"], ["i"], to=TensorProto.INT64),
                helper.make_node("Cast", ["i"], ["a"], to=1),
            ],
            {},
            "rounds to whole numbers",
        ),
        (
            [
                helper.make_node(
                    "BatchNormalization", ["h", "g", "b", "m", "v"], ["a", "c", "d"], training_mode=1
                )
            ],
            norm(9),
            "exported for training",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    between: list[Any], extra: dict[str, Any], word: str, tmp_path: Path
) -> None:
    path = perceptron(tmp_path / "m.onnx", between, extra=extra)
    with pytest.raises(UnsupportedError, match=word) as caught:
        as_module(path)
    assert "\n" not in str(caught.value) and "build the nn.Module yourself" in str(caught.value)


def test_a_study_of_a_sigmoid_network_runs_the_sigmoid(tmp_path: Path) -> None:
    """Performance of the intact network is that of the graph, not of a ReLU network with its weights."""
    path = perceptron(tmp_path / "m.onnx", [helper.make_node("Sigmoid", ["h"], ["a"])])
    x = RNG.normal(size=(80, 6)).astype("f4")
    (scores,) = ReferenceEvaluator(str(path)).run(None, {"x": x})
    np.savez(tmp_path / "d.npz", x=x, y=scores.argmax(1))
    found = strati.study({"network": {"path": str(path)}, "data": {"path": str(tmp_path / "d.npz")}})
    assert found.done == found.units == 4
    assert (found.frame()["intact_performance"] == 1.0).all()
    assert strati.degeneracy(as_module(path), torch.from_numpy(x)).layers[0].name == "fc1"
