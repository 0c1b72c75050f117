"""A layer with a matrix while data pass through it: factors of what it reads and of what is heard of it.

Linear layers, embeddings (linear on one-hot inputs) and convolutions (linear on patches, each position one more datum,
groups apart). How the data get here is in ``module_counts``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from strati.landscape.counts.ranks import Factor, certified, fold

MOST_WIDTH = 4096
"""Factors of more columns are not kept; the full rank is assumed, which never overcounts."""

Convolution = nn.Conv1d | nn.Conv2d


@dataclass
class Watched:
    """One layer while the data stream by.

    Attributes:
        name: The layer's name.
        module: The layer.
        inputs: Columns of its matrix (of one group), the bias among them.
        outputs: Rows of its matrix, of all groups.
        groups: Independent parts, 1 but for grouped convolutions.
        activations: Per group the factor of what it reads; empty where that is too wide, or tokens.
        jacobians: Per group the factor of the Jacobians with respect to its outputs.
        last_probe: Of the last random probe, likewise.
        tokens: Of an embedding, which were met.
        uses: Number of rows read.
    """

    name: str
    module: nn.Module
    inputs: int
    outputs: int
    groups: int = 1
    activations: list[Factor] = field(default_factory=list)
    jacobians: list[Factor] = field(default_factory=list)
    last_probe: list[Factor] = field(default_factory=list)
    tokens: Tensor | None = None
    uses: int = 0

    @property
    def bias(self) -> bool:
        """Whether the layer has one."""
        return getattr(self.module, "bias", None) is not None

    @property
    def decided(self) -> bool:
        """Whether all ranks are certain."""
        return all(f.range().decided for f in (*self.activations, *self.jacobians))

    def ranks(self) -> list[tuple[int, int]]:
        """Per group upper bounds of the ranks of inputs and Jacobians; all there is where too wide to know."""
        most = min(self.inputs, self.uses) if self.tokens is None else int(self.tokens.sum())
        activation_ranks = [min(most, f.range().high) for f in self.activations] or [most] * self.groups
        heard = [f.range().high for f in self.jacobians] or [self.outputs // self.groups] * self.groups
        return list(zip(activation_ranks, heard, strict=True))

    def rows_in(self, value: Tensor) -> list[Tensor]:
        """What goes in as rows, one list entry per group; of tokens none."""
        if self.tokens is not None:
            return []
        if isinstance(self.module, Convolution):
            return [fold(rows, self.bias) for rows in patches(self.module, value.detach())]
        return [fold(value.detach().reshape(-1, value.shape[-1]).double(), self.bias)]

    def rows_out(self, value: Tensor) -> list[Tensor]:
        """Gradients with respect to what comes out as rows, per group."""
        if isinstance(self.module, Convolution):
            value = value.flatten(2).movedim(1, -1)
        rows = value.reshape(-1, value.shape[-1]).double()
        return list(rows.chunk(self.groups, dim=1))

    def take(self, value: Tensor) -> None:
        """Take in the inputs of one use."""
        if self.tokens is not None:
            self.tokens[value.reshape(-1)] = True
            self.uses += value.numel()
            return
        parts = self.rows_in(value)
        self.uses += parts[0].shape[0]
        for factor, rows in zip(self.activations, parts, strict=False):
            factor.add(rows)

    def hear(self, gradient: Tensor, *, last: bool) -> None:
        """Take in what one probe (the last, or another) says of the outputs."""
        if not self.jacobians:
            return
        if last and not self.last_probe:
            self.last_probe = [Factor(f.columns, like=f.matrix) for f in self.jacobians]
        for factor, rows in zip(
            self.last_probe if last else self.jacobians, self.rows_out(gradient), strict=True
        ):
            factor.add(rows)

    def settle(self) -> bool:
        """Put the probes together; whether they tell the ranks."""
        if not self.last_probe:
            return True
        factors = [
            certified(probes, last) for probes, last in zip(self.jacobians, self.last_probe, strict=True)
        ]
        self.jacobians, self.last_probe = [factor for factor, _ in factors], []
        return all(certain for _, certain in factors)

    def matrix(self) -> Tensor:
        """The layer's matrix with its bias as last column, ``(outputs, inputs)``."""
        weight: Tensor = self.module.weight.detach().double()  # type: ignore[operator]
        weight = weight.T if type(self.module).__name__ == "Conv1D" else weight.flatten(1)
        if not self.bias:
            return weight
        bias: Tensor = self.module.bias.detach().double()  # type: ignore[operator]
        return torch.cat([weight, bias[:, None]], 1)


def watch(name: str, module: nn.Module, *, whole: bool) -> Watched:
    """A layer ready to be watched.

    Args:
        name: Its name.
        module: The layer.
        whole: Keep all data's share in the factors (for counts at a loss scale).
    """
    weight: Tensor = module.weight  # type: ignore[assignment]
    bias = int(getattr(module, "bias", None) is not None)
    if isinstance(module, nn.Embedding):
        tokens = torch.zeros(weight.shape[0], dtype=torch.bool, device=weight.device)
        watched = Watched(name, module, int(weight.shape[0]), int(weight.shape[1]), tokens=tokens)
    else:
        outputs, inputs = weight.T.shape if type(module).__name__ == "Conv1D" else weight.flatten(1).shape
        groups = int(module.groups) if isinstance(module, Convolution) else 1
        watched = Watched(name, module, int(inputs) + bias, int(outputs), groups)
        if watched.inputs <= MOST_WIDTH + 1:
            watched.activations = [Factor(watched.inputs, whole=whole, like=weight) for _ in range(groups)]
    each = watched.outputs // watched.groups
    if each <= MOST_WIDTH + 1:
        watched.jacobians = [Factor(each, whole=whole, like=weight) for _ in range(watched.groups)]
    return watched


def patches(module: Convolution, value: Tensor) -> list[Tensor]:
    """What a convolution reads, ``(data x positions, channels x kernel)`` per group, in the order of its weights.

    Examples:
        >>> layer = nn.Conv2d(2, 3, 3, padding=1, stride=2, bias=False).double()
        >>> x = torch.randn(4, 2, 6, 6, dtype=torch.float64)
        >>> (rows,) = patches(layer, x)
        >>> wanted = layer(x).flatten(2).movedim(1, -1).reshape(-1, 3)
        >>> bool(torch.allclose(rows @ layer.weight.flatten(1).T, wanted))
        True
    """
    value = value.double()
    mode = module.padding_mode if module.padding_mode != "zeros" else "constant"
    value = functional.pad(value, module._reversed_padding_repeated_twice, mode=mode)
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    if isinstance(module, nn.Conv1d):
        value = value[:, :, None]
        kernel, stride, dilation = (1, *kernel), (1, *stride), (1, *dilation)
    parts = value.chunk(module.groups, dim=1)
    unfolded = [functional.unfold(p, kernel, dilation=dilation, stride=stride) for p in parts]
    return [u.movedim(1, -1).reshape(-1, u.shape[1]) for u in unfolded]
