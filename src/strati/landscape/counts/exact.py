"""The exact count: rank of the Hessian of the behavioural loss, layer by layer, where that is affordable.

At its minimum the Hessian is ``2/n J^T J`` with ``J`` the Jacobian of all outputs on all data with
respect to all parameters (eq. 10 with its factor 2). Its rank is found from ``J^T J`` or, with few data,
from ``J J^T``, whichever is smaller. Freedom shared by several layers is told apart by adding layers one
at a time, the last one first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from strati.landscape.behaviour import FlatModel, run
from strati.landscape.chain import Chain
from strati.landscape.counts.gram import TOLERANCE, Balanced, fold
from strati.landscape.counts.jacobians import backward
from strati.landscape.counts.survey import batches

MOST_DIMENSIONS = 2000
MOST_FLOPS = 1.5e11
"""Largest matrix whose eigenvalues are taken, and most multiplications to form it: some seconds on a core."""

MOST_ENTRIES = 100_000_000
"""Entries of the Jacobian, which is kept whole where it has fewer rows than columns."""

Rows = Callable[[], Iterator[Tensor]]
"""Batches of rows of the Jacobian, ``(values, parameters)``, the last layer's parameters first."""


@dataclass(frozen=True)
class ExactRanks:
    """Rank of the Hessian restricted to the last layer, the last two, and so on.

    Attributes:
        ranks: One per layer, in the order of the layers: ``ranks[l]`` is of layers ``l`` and later.
        eigenvalues: Of ``J^T J / n`` over all layers, ascending, those not zero.
    """

    ranks: tuple[int, ...]
    eigenvalues: Tensor

    def free(self, sizes: list[int]) -> list[int]:
        """Free directions per layer, each counted once: what the layer's parameters do not add to the rank."""
        after = [*self.ranks[1:], 0]
        return [n - (r - a) for n, r, a in zip(sizes, self.ranks, after, strict=True)]


def affordable(parameters: int, values: int) -> bool:
    """Whether the exact rank can be had in some seconds.

    Args:
        parameters: Number of parameters.
        values: Number of data times number of outputs.
    """
    smaller, larger = min(parameters, values), max(parameters, values)
    fits = parameters <= values or smaller * larger <= MOST_ENTRIES
    return fits and smaller <= MOST_DIMENSIONS and 2.0 * larger * smaller**2 <= MOST_FLOPS


def exact_ranks(rows: Rows, sizes: list[int], values: int, data: int) -> ExactRanks:
    """Ranks of the Hessian by layers.

    Args:
        rows: Gives the Jacobian in batches, columns ordered from the last layer to the first.
        sizes: Number of parameters of each layer, first layer first.
        values: Number of data times number of outputs.
        data: Number of data.
    """
    widths = sizes[::-1]
    edges = torch.tensor([0, *widths]).cumsum(0).tolist()
    if edges[-1] <= values:
        gram = torch.zeros(edges[-1], edges[-1], dtype=torch.float64)
        for part in rows():
            gram += part.T @ part
        balanced = Balanced(gram)
        ranks = [balanced.rank_of(torch.arange(end)) for end in edges[1:-1]] + [balanced.rank]
    else:
        jacobian = torch.cat(list(rows()))  # fewer rows than parameters: at most as large as the square above
        gram = jacobian @ jacobian.T
        whole = Balanced(gram)
        ranks = [whole.rank_on(jacobian[:, :end] @ jacobian[:, :end].T) for end in edges[1:-1]] + [whole.rank]
    spectrum = torch.linalg.eigvalsh(gram / data)
    kept = spectrum[spectrum > TOLERANCE * spectrum[-1].clamp(min=0)]
    return ExactRanks(tuple(ranks[::-1]), kept)


def chain_rows(chain: Chain, x: Tensor) -> Rows:
    """The Jacobian of a chain from its layers' activations and Jacobians (eq. 11)."""

    def rows() -> Iterator[Tensor]:
        with torch.no_grad():
            for batch in batches(chain, x):
                for small in torch.split(
                    batch, max(1, 20_000_000 // (chain.parameters * chain.widths[-1] + 1))
                ):
                    yield _chain_jacobian(chain, small)

    return rows


def module_rows(model: nn.Module, x: Any, parts: list[list[str]]) -> tuple[Rows, int, int]:
    """The Jacobian of any module by automatic differentiation.

    Args:
        model: The network.
        x: Data, rows first.
        parts: Names of the parameters of each layer, first layer first; every parameter in one of them.

    Returns:
        Its batches, the number of values (data times outputs) and the number of data.
    """
    flat = FlatModel(model, dtype=torch.float64)
    inputs = flat.inputs(x)
    if not isinstance(inputs, Tensor):
        raise TypeError("one tensor of data is needed")
    with torch.no_grad():
        outputs = run(flat, flat.theta, inputs[:1])[0].numel()
    where = dict(zip(flat.names, torch.split(torch.arange(flat.size), list(flat.sizes)), strict=True))
    columns = torch.cat([where[name] for part in parts[::-1] for name in part])

    def single(theta: Tensor, row: Tensor) -> Tensor:
        return flat(theta, row[None])[0].reshape(-1)

    def rows() -> Iterator[Tensor]:
        for batch in torch.split(inputs, max(1, 10_000_000 // (flat.size * outputs + 1))):
            jacobian = vmap(jacrev(single), in_dims=(None, 0))(flat.theta, batch).detach()
            yield jacobian.reshape(-1, flat.size)[:, columns]

    return rows, outputs * int(inputs.shape[0]), int(inputs.shape[0])


def _chain_jacobian(chain: Chain, batch: Tensor) -> Tensor:
    activations, preactivations = chain.forward(batch)
    slopes = [s.activation.derivative(p) for s, p in zip(chain.stages, preactivations, strict=True)]
    blocks = []
    for index, jacobian in backward(chain, slopes, torch.diag_embed(slopes[-1])):
        stage = chain.stages[index]
        f = fold(activations[index], stage.bias is not None)
        product = jacobian[:, :, :, None] * f[:, None, None, :]
        blocks.append(product.reshape(product.shape[0] * product.shape[1], -1))
    return torch.cat(blocks, dim=1)
