"""What an ONNX graph does between its layers, as small modules: arithmetic, functions spelled out, reshaping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from strati.network.formats.onnx_graph import Operation

ARITHMETIC: dict[str, Callable[..., Tensor]] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": torch.div,
    "Pow": torch.pow,
    "Min": torch.minimum,
    "Max": torch.maximum,
}
"""Operators of two values, one of which may be a constant."""

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Log": torch.log,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Sqrt": torch.sqrt,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Softplus": functional.softplus,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
    "Relu": torch.relu,
}
"""Operators of one value, number by number."""


class Arithmetic(nn.Module):
    """``x`` with a constant: the normalisation of the inputs, a scale, a shift. Constants are buffers."""

    def __init__(self, operator: str, constant: Tensor, *, reverse: bool) -> None:
        super().__init__()
        self.operator, self.reverse = operator, reverse
        self.register_buffer("constant", constant)

    def forward(self, x: Tensor) -> Tensor:
        """The operation's result."""
        constant: Any = self.constant
        if x.ndim == 2 and constant.ndim > 2 and math.prod(constant.shape[1:]) == x.shape[1]:
            constant = constant.reshape(constant.shape[0], -1)  # rows where the graph has images
        both = (constant, x) if self.reverse else (x, constant)
        return ARITHMETIC[self.operator](*both)


class Elementwise(nn.Module):
    """A function of each number by itself, spelled out as several nodes."""

    def __init__(
        self, operations: list[Operation], first: str, last: str, constants: Mapping[str, float]
    ) -> None:
        super().__init__()
        self.operations, self.first, self.last = operations, first, last
        self.constants = dict(constants)

    def forward(self, x: Tensor) -> Tensor:
        """The function's values."""
        values: dict[str, Tensor] = {self.first: x}
        for node in self.operations:
            given = [
                values[name] if name in values else torch.as_tensor(self.constants[name], dtype=x.dtype)
                for name in node.inputs
            ]
            run = UNARY.get(node.operator) or ARITHMETIC[node.operator]
            values[node.outputs[0]] = run(*given)
        return values[self.last]


class Reshape(nn.Module):
    """The shape a graph asks for; the first axis is the batch, whatever size the export had."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """The reshaped batch."""
        return x.reshape(x.shape[0], *self.shape)
