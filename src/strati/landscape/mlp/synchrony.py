"""Synchronised neurons: those that fire on the same data (section 3.2), exactly or nearly.

Exact blocks are found by hashing: every neuron keeps the sum of 128 random bits over the data on which it
fires, so equal sums mean equal patterns (two different patterns collide with probability ``2^-128``), one
pass over the data is enough, and nothing grows with their number. Approximate synchrony uses
``(r_i - r_i') p_i'`` (eq. 20 as printed is not zero for synchronised neurons).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from strati.core.rng import stream


class FiringHash:
    """The firing pattern of every neuron of a layer, hashed while the data stream by.

    Args:
        neurons: Width of the layer.
        seed: Seed of the random words; the blocks do not depend on it.

    Examples:
        >>> patterns = FiringHash(3)
        >>> patterns.add(torch.tensor([[True, False, True], [False, True, False]]))
        >>> patterns.blocks()
        [[0, 2], [1]]
    """

    def __init__(self, neurons: int, seed: int = 0) -> None:
        self._words = stream(seed, "firing")
        self._sums = np.zeros((neurons, 2), dtype=np.uint64)
        self.fired = torch.zeros(neurons, dtype=torch.long)

    def add(self, firing: Tensor) -> None:
        """Take in a batch, ``(data, neurons)`` of truth values."""
        firing = firing.cpu()
        pattern = firing.numpy()
        words = self._words.integers(0, 2**64, size=(pattern.shape[0], 2), dtype=np.uint64)
        self._sums += (
            np.ascontiguousarray(pattern.T).astype(np.uint64) @ words
        )  # sums wrap around, as they should
        self.fired += firing.sum(dim=0)

    def blocks(self) -> list[list[int]]:
        """Neurons grouped by pattern, in order of their first member."""
        return group([(int(a), int(b)) for a, b in self._sums])


def group(keys: list[tuple[int, int]] | list[bytes]) -> list[list[int]]:
    """Indices with equal keys together, in order of first appearance.

    Examples:
        >>> group([b"a", b"b", b"a"])
        [[0, 2], [1]]
    """
    blocks: dict[object, list[int]] = {}
    for index, key in enumerate(keys):
        blocks.setdefault(key, []).append(index)
    return list(blocks.values())


class Asynchrony:
    """Mean of ``((r_i - r_i') p_i')^2`` over the data, for all pairs of ReLU neurons of a layer.

    It is what the loss pays, to leading order, for mixing two neurons that do not quite fire together.

    Examples:
        >>> pairs = Asynchrony(2)
        >>> pairs.add(torch.tensor([[1.0, 2.0], [1.0, -0.2]]))
        >>> [round(v, 6) for v in pairs.matrix().flatten().tolist()]
        [0.0, 0.02, 0.5, 0.0]
    """

    def __init__(self, neurons: int) -> None:
        self._total = torch.zeros(neurons, neurons, dtype=torch.float64)
        self._count = 0

    def add(self, preactivations: Tensor) -> None:
        """Take in a batch of preactivations."""
        p = preactivations.double().cpu()
        r = (p > 0).double()
        square = p.square()
        # (r_i - r_j)^2 = r_i (1 - 2 r_j) + r_j for 0/1 patterns; summed over data against p_j^2
        self._total += r.T @ (square * (1 - 2 * r)) + (r * square).sum(dim=0)[None, :]
        self._count += p.shape[0]

    def matrix(self) -> Tensor:
        """Entry (i, j): the price of replacing the pattern of j by that of i."""
        return self._total.clamp(min=0) / max(1, self._count)


def approximate_blocks(asynchrony: Tensor, epsilon: float) -> list[list[int]]:
    """Group neurons so that each block's total asynchrony stays within a loss scale.

    Neurons are taken in order; each joins the first block in which the sum over ordered pairs of
    ``mean ((r_i - r_i') p_i')^2`` (eq. 20, corrected) stays at most ``epsilon``.

    Args:
        asynchrony: From :meth:`Asynchrony.matrix`.
        epsilon: Loss scale.

    Examples:
        >>> approximate_blocks(torch.tensor([[0.0, 0.1, 9.0], [0.1, 0.0, 9.0], [9.0, 9.0, 0.0]]), 0.5)
        [[0, 1], [2]]
    """
    price = (asynchrony + asynchrony.T).double().numpy()
    size = price.shape[0]
    blocks: list[list[int]] = []
    spent = np.zeros(size)
    joining = np.zeros((size, size))  # entry (block, neuron): what the neuron would add to the block
    for neuron in range(size):
        fits = np.flatnonzero(spent[: len(blocks)] + joining[: len(blocks), neuron] <= epsilon)
        place = int(fits[0]) if fits.size else len(blocks)
        if place == len(blocks):
            blocks.append([])
        blocks[place].append(neuron)
        spent[place] += joining[place, neuron]
        joining[place] += price[neuron]
    return blocks
