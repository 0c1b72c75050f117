"""A layer with a matrix while data pass through it: factors of what it reads and of what is heard of it.

Linear layers, embeddings (linear on one-hot inputs) and convolutions (linear on patches, each position one more datum,
groups apart). How the data get here is in ``module_counts``.

The values of an attention head can be changed to ``C v`` and its output matrix to ``W_O C^-1``: of this ``s t``
directions are not free already, with ``s`` the rank of the value vectors and ``t`` that of the Jacobians with respect
to them. Heads with the same attention pattern on all data are one block, as synchronised neurons are (section 3.2); at
a loss scale ``eps`` so are heads whose patterns differ by so little that exchanging them changes what they read by
less than ``eps``. Which layers hold values and outputs follows from the names that transformers uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from strati.landscape.counts.ranks import EPS, Factor, certified, fold, rank_range
from strati.landscape.mlp.statistics_pass import approximate_blocks

MOST_WIDTH = 4096
"""Factors of more columns are not kept; the full rank is assumed, which never overcounts."""

Convolution = nn.Conv1d | nn.Conv2d


@dataclass
class LayerStatistics:
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

    def add_jacobian(self, gradient: Tensor, *, last: bool) -> None:
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


def watch(name: str, module: nn.Module, *, whole: bool) -> LayerStatistics:
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
        watched = LayerStatistics(name, module, int(weight.shape[0]), int(weight.shape[1]), tokens=tokens)
    else:
        outputs, inputs = weight.T.shape if type(module).__name__ == "Conv1D" else weight.flatten(1).shape
        groups = int(module.groups) if isinstance(module, Convolution) else 1
        watched = LayerStatistics(name, module, int(inputs) + bias, int(outputs), groups)
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


SAME = 1e-10
"""Attention patterns that differ by less (mean squared, relative to their own) are the same: float32 rounding."""

_VALUES = {
    "v_proj": ("o_proj", "out_proj", "dense"),
    "value": (),
    "v_lin": ("out_lin",),
    "c_attn": ("c_proj",),
}


@dataclass
class HeadWeights:
    """One attention layer while the data stream by.

    Attributes:
        name: The module that computes attention.
        values: The layer whose outputs are the value vectors.
        start: Where they start in that layer's outputs (fused projections).
        heads: Number of heads of values.
        width: Width of one head.
        shared: Query heads per head of values.
        distance: Sum over data of the squared differences between the heads' patterns.
        seen: Number of patterns summed.
        price: Sum over data of ``||(A_i - A_j) V_j||^2``: what head ``j`` reads with the pattern of head ``i`` instead.
        read: Number of positions in that sum.
    """

    name: str
    values: str
    start: int
    heads: int
    width: int
    shared: int
    distance: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    seen: int = 0
    price: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    read: int = 0

    def add(self, output: Any, values: Tensor | None = None) -> None:
        """Take in the patterns ``(data, heads, positions, positions)`` an attention module returns, if it does.

        Args:
            output: What the module returns.
            values: The outputs of the value layer on the same data, for the price of near synchrony.
        """
        patterns = (
            [p for p in output if isinstance(p, Tensor) and p.ndim == 4] if isinstance(output, tuple) else []
        )
        if self.shared != 1 or not patterns or patterns[0].shape[1] != self.heads:
            return
        flat = patterns[0].detach().double().transpose(0, 1).reshape(self.heads, -1)
        products = flat @ flat.T
        power = products.diagonal()
        distance = (power[:, None] + power[None, :] - 2 * products).clamp(min=0)
        scale = (power[:, None] + power[None, :]) / 2
        share = distance / scale.clamp(min=1e-300)
        self.distance = share if self.seen == 0 else self.distance + share
        self.seen += 1
        if values is not None and values.ndim == 3:
            self._charge(patterns[0].detach().double(), values.detach().double())

    def _charge(self, patterns: Tensor, values: Tensor) -> None:
        """Add to the price of exchanging patterns."""
        head_values = values[..., self.start : self.start + self.heads * self.width]
        # data, heads, positions, width
        head_values = head_values.reshape(*head_values.shape[:2], self.heads, self.width).transpose(1, 2)
        if head_values.shape[2] != patterns.shape[3]:
            return
        charged = [
            ((patterns[:, i : i + 1] - patterns) @ head_values).square().sum(dim=(0, 2, 3))
            for i in range(self.heads)
        ]
        total = torch.stack(charged)
        self.price = total if self.read == 0 else self.price + total
        self.read += patterns.shape[0] * patterns.shape[2]

    def blocks(self) -> list[list[int]]:
        """Heads that attend alike on all data; each head alone where patterns are not shown."""
        blocks: list[list[int]] = []
        for head in range(self.heads):
            for block in blocks:
                if self.seen and float(self.distance[head, block].max()) <= SAME * self.seen:
                    block.append(head)
                    break
            else:
                blocks.append([head])
        return blocks

    def blocks_within(self, epsilon: float) -> list[list[int]] | None:
        """Heads that attend alike up to a loss scale (eq. 20 for heads); ``None`` where patterns are not shown."""
        return approximate_blocks(self.price / self.read, epsilon) if self.read else None

    def rows(self, block: list[int]) -> Tensor:
        """The outputs of the value layer that belong to some heads."""
        return torch.cat([self.start + h * self.width + torch.arange(self.width) for h in block])


def find_attention(model: nn.Module, shapes: dict[str, tuple[int, int]]) -> list[HeadWeights]:
    """The attention layers of a transformers model whose values and heads are known by name.

    Args:
        model: The network; its ``config`` gives the number of heads.
        shapes: ``(outputs, inputs)`` of each linear layer by name.
    """
    config = getattr(model, "config", None)
    queries = _first_number(config, ("num_attention_heads", "n_head", "n_heads"))
    if queries is None:
        return []
    layers = []
    for name, (outputs, inputs) in shapes.items():
        parent, _, leaf = name.rpartition(".")
        if leaf not in _VALUES or not parent:
            continue
        fused = leaf == "c_attn"
        if fused and outputs != 3 * inputs:
            continue
        total = outputs // 3 if fused else outputs
        heads = _first_number(config, ("num_key_value_heads",)) or queries
        if fused or total % heads or queries % heads:
            heads = queries
        if total % heads == 0:
            layers.append(
                HeadWeights(parent, name, 2 * total if fused else 0, heads, total // heads, queries // heads)
            )
    return layers


def value_used(
    attention: HeadWeights,
    weight: Tensor,
    activations: Factor,
    jacobians: Factor,
    blocks: list[list[int]] | None = None,
) -> tuple[int, int, tuple[tuple[int, ...], ...]]:
    """What the value layer adds to the rank of the Hessian, and its free directions of synchrony.

    Args:
        attention: The layer's heads.
        weight: The layer's matrix with the bias as last column, ``(outputs, inputs)``.
        activations: Factor of its inputs.
        jacobians: Factor of the Jacobians with respect to its outputs.
        blocks: Heads that attend alike; exactly alike by default.

    Returns:
        An upper bound of what its values use beside the output layer, ``sum_a s_a t_a``, and the blocks of
        two or more heads that attend alike.
    """
    activation_rank = activations.range().high
    blocks = attention.blocks() if blocks is None else blocks
    head_ranks = [_own(activations, weight[attention.rows(b)]) for b in blocks]
    thick = [jacobians.range(attention.rows(b).tolist()) for b in blocks]
    outside = torch.ones(weight.shape[0], dtype=torch.bool)
    outside[torch.cat([attention.rows(b) for b in blocks])] = False
    outside_rank = jacobians.range(outside.nonzero().flatten().tolist()).high if bool(outside.any()) else 0
    used = activation_rank * outside_rank + sum(
        t.high * (activation_rank - min(s, activation_rank)) for s, t in zip(head_ranks, thick, strict=True)
    )
    synchrony = sum(s * t.low for s, t in zip(head_ranks, thick, strict=True))
    return used, synchrony, tuple(tuple(b) for b in blocks if len(b) > 1)


def _own(activations: Factor, weight: Tensor) -> int:
    """Rank of some heads' value vectors on the data, what is certain of it."""
    values = activations.matrix @ weight.T
    size = torch.linalg.vector_norm(values, dim=0).clamp(min=1e-300)
    most = torch.linalg.vector_norm(activations.matrix) * torch.linalg.vector_norm(weight, dim=1)
    return rank_range(values, 8 * EPS * most / size + float(activations.noise.max())).low


def _first_number(config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
