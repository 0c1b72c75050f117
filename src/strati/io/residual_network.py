"""Residual networks as ``strati reassemble --out`` writes them, rebuilt: ``x + out(act(inp(x)))``, then ``last``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from strati.io.network import Network

_NAME = re.compile(r"(blocks\.\d+\.(inp|out)|last)\.(weight|bias)")


def is_residual(network: Network) -> bool:
    """Whether a checkpoint holds just the tensors of such a network."""
    names = [tensor.name for tensor in network.tensors]
    return any(name.startswith("blocks.") for name in names) and all(_NAME.fullmatch(name) for name in names)


def residual_module(network: Network, activation: nn.Module) -> nn.Module:
    """The network of a checkpoint for which :func:`is_residual` holds, in evaluation mode."""
    from torch import nn  # only here: opening a checkpoint must not import torch

    class Block(nn.Module):
        """``x + out(act(inp(x)))``."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.inp = _linear(network, f"{name}.inp")
            self.activation = activation
            self.out = _linear(network, f"{name}.out")

        def forward(self, x: Tensor) -> Tensor:
            """The stream with the block's contribution added."""
            output: Tensor = x + self.out(self.activation(self.inp(x)))
            return output

    count = 1 + max(int(t.name.split(".")[1]) for t in network.tensors if t.name.startswith("blocks."))
    model = nn.Sequential()
    model.add_module("blocks", nn.Sequential(*(Block(f"blocks.{i}") for i in range(count))))
    model.add_module("last", _linear(network, "last"))
    return model.eval()


def _linear(network: Network, name: str) -> nn.Linear:
    from torch import from_numpy, nn

    weight = from_numpy(network.read(f"{name}.weight").copy())
    biased = any(tensor.name == f"{name}.bias" for tensor in network.tensors)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=biased, dtype=weight.dtype)
    linear.weight.data.copy_(weight)
    if biased:
        linear.bias.data.copy_(from_numpy(network.read(f"{name}.bias").copy()))
    return linear
