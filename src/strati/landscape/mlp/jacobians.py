"""Jacobians of a chain's outputs with respect to the preactivations of each layer, batch by batch.

With few outputs all of them are taken (exact); with many, random combinations of outputs (probes) whose
Gram matrix has the same expectation. Whether it also has the same rank is told by ``ranks.certified``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from strati.landscape.mlp.sequential import Chain

MOST_OUTPUTS = 64
"""Up to this many outputs Jacobians are exact; above, this many random probes per datum are taken."""


def output_directions(slopes: Tensor, generator: torch.Generator, most: int) -> Tensor:
    """Rows ``v`` of ``v^T df/dp`` at the last layer, ``(batch, directions, outputs)``.

    The unit vectors where there are at most ``most`` outputs, else Gaussian probes with
    ``E[v v^T] = 1``.
    """
    batch, outputs = slopes.shape
    if outputs <= most:
        units: Tensor = torch.diag_embed(slopes)
        return units
    probes = torch.randn(batch, most, outputs, generator=generator, dtype=torch.float64) / most**0.5
    directions: Tensor = probes.to(slopes) * slopes.unsqueeze(1)
    return directions


def backward(chain: Chain, slopes: list[Tensor], last: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The Jacobians ``d out / d p`` from the last layer to the first, eq. 16 read from right to left.

    Args:
        chain: The network.
        slopes: Derivative of each stage's nonlinearity at its preactivations.
        last: What :func:`output_directions` gives for the last stage.

    Yields:
        Index of the stage and ``(batch, directions, outputs of the stage)``.

    Examples:
        >>> from torch import nn
        >>> from strati.landscape.mlp.sequential import as_chain
        >>> chain = as_chain(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
        >>> slopes = [torch.ones(5, 3), torch.ones(5, 1)]
        >>> [tuple(j.shape) for _, j in backward(chain, slopes, torch.ones(5, 1, 1))]
        [(5, 1, 1), (5, 1, 3)]
    """
    jacobian = last
    for index in range(len(chain.stages) - 1, -1, -1):
        yield index, jacobian
        if index > 0:
            jacobian = (jacobian @ chain.stages[index].weight) * slopes[index - 1].unsqueeze(1)
