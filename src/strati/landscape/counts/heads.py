"""Attention heads: the freedom between a head's value and output matrices, and heads that attend alike.

A head's values can be changed to ``C v`` and its output matrix to ``W_O C^-1``: of this ``s t`` directions
are not free already, with ``s`` the rank of the value vectors and ``t`` that of the Jacobians with respect
to them. Heads with the same attention pattern on all data are one block, as synchronised neurons are
(section 3.2); at a loss scale ``eps`` so are heads whose patterns differ by so little that exchanging them changes what
they read by less than ``eps``. Which layers hold values and outputs is told from the names transformers uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from strati.landscape.counts.ranks import EPS, Factor, rank_range
from strati.landscape.mlp.statistics_pass import approximate_blocks

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
