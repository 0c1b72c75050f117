"""Jacobians of any differentiable network by backward passes: exactly, or through random probes.

With few output values per datum the probes are unit vectors, and sums of squares of the pulled-back gradients are
exact. With many, random probes ``v`` with ``E[v v^T] = 1`` stand for them: ``E[(v^T J)^T (v^T J)] = J^T J``. How far
such an estimate may be off is told from two halves of the data. Counts and bases use this one estimator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from strati.core.rng import derive

if TYPE_CHECKING:
    from strati.core.results import FloatArray


@dataclass(frozen=True)
class Probes:
    """Which vectors are pulled back.

    Args:
        number: Random probes per datum.
        most: Up to this many output values per datum all of them are taken instead.
        seed: Seed of the random probes.
        law: ``"signs"`` (least variance of the sum) or ``"normal"`` (ranks are generic).

    Examples:
        >>> [tuple(v.shape) for v in Probes(4, most=2).of(torch.zeros(5, 2))]
        [(5, 2), (5, 2)]
        >>> len(list(Probes(4, most=2).of(torch.zeros(5, 3))))
        4
    """

    number: int
    most: int
    seed: int = 0
    law: Literal["signs", "normal"] = "signs"

    def exact(self, target: Tensor) -> bool:
        """Whether all output values of a datum are taken, one by one."""
        return math.prod(target.shape[1:]) <= self.most

    def of(self, target: Tensor, *names: object) -> Iterator[Tensor]:
        """The vectors for a target ``(data, ...)``; random ones from a stream of the given names."""
        if self.exact(target):
            for unit in torch.eye(math.prod(target.shape[1:]), dtype=target.dtype):
                row = unit.to(target.device).reshape(1, *target.shape[1:])
                yield row.expand(target.shape)
            return
        for number in range(self.number):
            yield self.random(tuple(target.shape), target, *names, number) / self.number**0.5

    def random(self, shape: tuple[int, ...], like: Tensor, *names: object) -> Tensor:
        """Random numbers of mean 0 and variance 1, the same for the same names on every device."""
        generator = torch.Generator().manual_seed(derive(self.seed, *names))
        if self.law == "normal":
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        else:
            drawn = torch.randint(0, 2, shape, generator=generator).double() * 2 - 1
        return drawn.to(like.device, like.dtype)


def vector_jacobian_product(
    target: Tensor, tensors: Sequence[Tensor], vectors: Iterator[Tensor]
) -> Iterator[list[Tensor | None]]:
    """``v^T d target / d tensor`` for every vector, ``None`` where a tensor does not matter.

    Examples:
        >>> x = torch.tensor([[1.0, 2.0]], requires_grad=True)
        >>> [g[0].tolist() for g in vector_jacobian_product(x.square(), [x], Probes(1, most=2).of(x))]
        [[[2.0, 0.0]], [[0.0, 4.0]]]
    """
    for vector in vectors:
        yield list(torch.autograd.grad(target, list(tensors), vector, retain_graph=True, allow_unused=True))


@dataclass(frozen=True)
class MatrixEstimate:
    """A matrix and its relative standard error (Frobenius norm); 0 where it is exact up to rounding."""

    value: FloatArray
    error: float = 0.0


class SplitHalfEstimate:
    """Sums over even and odd batches, whose difference tells the error of the whole.

    Examples:
        >>> sums = SplitHalfEstimate()
        >>> sums.add(0, np.eye(2)), sums.add(1, 3 * np.eye(2))
        (None, None)
        >>> sums.result(4).value.tolist(), sums.result(4).error  # the halves differ in size, not in kind
        ([[1.0, 0.0], [0.0, 1.0]], 0.0)
    """

    def __init__(self) -> None:
        self._sums: list[FloatArray | None] = [None, None]

    def add(self, batch: int, value: FloatArray) -> None:
        """Take in a batch's share."""
        before = self._sums[batch % 2]
        self._sums[batch % 2] = value if before is None else before + value

    def result(self, count: float, *, exact: bool = False) -> MatrixEstimate:
        """The sum divided by a number, and its error: each half brought to the size of the whole."""
        first, second = self._sums
        assert first is not None, "no batch"
        total = first if second is None else first + second
        if exact:
            return MatrixEstimate(total / count)
        if second is None:
            return MatrixEstimate(total / count, float("nan"))
        sizes = (np.abs(first).sum(), np.abs(second).sum())
        if min(sizes) <= 0:
            return MatrixEstimate(total / count, float("nan"))
        difference = first / sizes[0] - second / sizes[1]
        error = float(np.linalg.norm(difference) * sum(sizes) / np.linalg.norm(total) / 2)
        return MatrixEstimate(total / count, error)
