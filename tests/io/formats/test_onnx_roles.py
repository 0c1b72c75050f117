"""Roles from the shape of an ONNX graph: exports of real vision transformers whose names were taken away."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import strati

WIDTH, HEADS, HIDDEN, CLASSES, BLOCKS = 16, 2, 24, 5, 3


class Attention(torch.nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.a = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH * (3 if fused else 1)) for _ in range(1 if fused else 3)
        )
        self.z = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.a[0](x).chunk(3, -1) if self.fused else [layer(x) for layer in self.a]
        q, k, v = (p.reshape(*x.shape[:2], HEADS, -1).transpose(1, 2) for p in parts)
        scores = (q @ k.transpose(-2, -1)) / (WIDTH // HEADS) ** 0.5
        mixed = scores.softmax(-1) @ v
        return self.z(mixed.transpose(1, 2).reshape(x.shape))


class Mlp(torch.nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.a, self.c = torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Linear(HIDDEN, WIDTH)
        self.b = torch.nn.Linear(WIDTH, HIDDEN) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.b is not None:
            return self.c(torch.nn.functional.silu(self.a(x)) * self.b(x))
        return self.c(torch.nn.functional.gelu(self.a(x)))


class ViT(torch.nn.Module):
    """A vision transformer whose modules are called by letters."""

    def __init__(self, fused: bool, gated: bool) -> None:
        super().__init__()
        self.p = torch.nn.Conv2d(3, WIDTH, 4, 4)
        self.e = torch.nn.Parameter(torch.randn(1, 4, WIDTH))
        self.m = torch.nn.ModuleList(
            torch.nn.ModuleList(
                [torch.nn.LayerNorm(WIDTH), Attention(fused), torch.nn.LayerNorm(WIDTH), Mlp(gated)]
            )
            for _ in range(BLOCKS)
        )
        self.y = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.p(x).flatten(2).transpose(1, 2) + self.e
        for first, attention, second, mlp in self.m:
            x = x + attention(first(x))
            x = x + mlp(second(x))
        return self.y(x.mean(1))


def nameless(path) -> None:
    """Take every telling name out of an ONNX file."""
    model = onnx.load(path)
    new = {tensor.name: f"val_{i}" for i, tensor in enumerate(model.graph.initializer)}
    for tensor in model.graph.initializer:
        tensor.name = new[tensor.name]
    for i, node in enumerate(model.graph.node):
        node.name = f"node_{node.op_type}_{i}"
        node.input[:] = [new.get(value, value) for value in node.input]
    onnx.save(model, path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_vision_transformer_without_names(tmp_path, fused, gated):
    torch.manual_seed(0)
    model = ViT(fused, gated).eval()
    path = tmp_path / "vit.onnx"
    torch.onnx.export(model, (torch.randn(1, 3, 8, 8),), str(path), dynamo=False)
    nameless(path)
    net = strati.open(path)
    attention = ["attention.qkv"] if fused else ["attention.q", "attention.k", "attention.v"]
    mlp = ["mlp.gate", "mlp.in", "mlp.out"] if gated else ["mlp.in", "mlp.out"]
    block = [*attention, "attention.out", *mlp]
    roles = [layer.role.value for layer in net.layers()]
    assert roles == ["conv", "embedding", *block * BLOCKS, "head"]
    blocks = [layer.block for layer in net.layers()]
    assert blocks == [None, None, *(b for b in range(BLOCKS) for _ in block), None]
    values = {layer.role.value: next(layer.matrices()) for layer in net.layers() if layer.block == BLOCKS - 1}
    last = model.m[BLOCKS - 1]
    np.testing.assert_array_equal(values["attention.out"], last[1].z.weight.detach().numpy())
    np.testing.assert_array_equal(values["mlp.out"], last[3].c.weight.detach().numpy())
    if not fused:
        np.testing.assert_array_equal(values["attention.k"], last[1].a[1].weight.detach().numpy())
    if gated:
        np.testing.assert_array_equal(values["mlp.gate"], last[3].a.weight.detach().numpy())


def test_a_constant_added_to_the_scores_is_a_mask(tmp_path):
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.standard_normal((4, 4)).astype(np.float32), name)
        for name in ("val_1", "val_2", "val_3", "val_4")
    ]
    weights.append(numpy_helper.from_array(np.tril(np.ones((1, 3, 3), np.float32)), "val_5"))
    nodes = [
        helper.make_node("MatMul", ["n", "val_1"], ["q"]),
        helper.make_node("MatMul", ["n", "val_2"], ["k"]),
        helper.make_node("MatMul", ["n", "val_3"], ["v"]),
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Add", ["s", "val_5"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["a"]),
        helper.make_node("MatMul", ["a", "v"], ["m"]),
        helper.make_node("MatMul", ["m", "val_4"], ["o"]),
    ]
    nodes.insert(0, helper.make_node("Relu", ["x"], ["n"]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 4])
    (tmp_path / "a.onnx").write_bytes(
        helper.make_model(helper.make_graph(nodes, "g", [x], [], initializer=weights)).SerializeToString()
    )
    net = strati.open(tmp_path / "a.onnx")
    roles = {layer.name: layer.role.value for layer in net.layers()}
    assert roles == {
        "val_1": "attention.q",
        "val_2": "attention.k",
        "val_3": "attention.v",
        "val_4": "attention.out",
    }
    assert [s.reason for s in net.skipped()] == ["a mask, not a weight"]


@pytest.mark.filterwarnings("ignore")
def test_a_plain_network_gets_no_roles_from_its_graph(tmp_path):
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Softmax(-1)
    )
    torch.onnx.export(model, (torch.randn(1, 4),), str(tmp_path / "a.onnx"), dynamo=False)
    nameless(tmp_path / "a.onnx")
    assert [layer.role.value for layer in strati.open(tmp_path / "a.onnx").layers()] == ["linear", "linear"]
