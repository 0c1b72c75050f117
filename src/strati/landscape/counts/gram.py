"""Gram matrices of activations and Jacobians, and their ranks.

Ranks are decided on the Gram matrix in float64 after balancing it (unit diagonal), so that neither the
units of an input nor the scale of a neuron decides; the threshold lies well above rounding, so the answer
does not change with the machine or the number of threads. Which Gram matrices to take is in ``survey``.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 1e-12
"""An eigenvalue of a balanced Gram matrix below this share of the largest is zero. Rounding leaves about 1e-15;
the rounding of float32 weights (6e-8, squared in a Gram matrix) leaves about 1e-14: both are below."""

SILENT = 1e-28
"""A direction whose mean square is below this share of the largest is what cancellation leaves (1e-16, squared)."""


class Balanced:
    """A Gram matrix brought to unit diagonal, and ranks of it and of its parts by one threshold.

    All ranks taken from one object use the same scale and threshold, so they obey the inequalities that
    exact ranks obey: a part never has a larger rank than the whole.

    Args:
        gram: ``sum_x v(x) v(x)^T``, symmetric, positive semi-definite.
        tolerance: Relative to the largest eigenvalue of the balanced matrix.

    Examples:
        >>> v = torch.tensor([[1.0, 1e6, 1.0], [2.0, -1e6, 2.0], [3.0, 5e6, 3.0]], dtype=torch.float64)
        >>> balanced = Balanced(v.T @ v)  # the third column repeats the first
        >>> balanced.rank, balanced.rank_of([0, 2])
        (2, 1)
    """

    def __init__(self, gram: Tensor, tolerance: float = TOLERANCE) -> None:
        power = gram.diagonal().clamp(min=0)
        top = float(power.max()) if power.numel() else 0.0
        self.live = power > SILENT * top
        self.scale = torch.where(self.live, power.clamp(min=1e-300).rsqrt(), torch.zeros_like(power))
        self.matrix = self.apply(gram)
        self._eigenvalues = _eigenvalues(self.matrix)
        largest = float(self._eigenvalues[-1]) if self._eigenvalues.numel() else 0.0
        self.threshold = tolerance * largest if top > 0 else float("inf")

    @property
    def rank(self) -> int:
        """Rank of the whole matrix."""
        return int((self._eigenvalues > self.threshold).sum())

    def apply(self, gram: Tensor) -> Tensor:
        """Another matrix on this one's scale."""
        return gram * self.scale[:, None] * self.scale[None, :]

    def rank_of(self, members: list[int] | Tensor) -> int:
        """Rank of the principal submatrix of some directions."""
        index = torch.as_tensor(members, dtype=torch.long)
        if index.numel() == 1:
            return int(self.matrix[index[0], index[0]] > self.threshold)
        return int((_eigenvalues(self.matrix[index][:, index]) > self.threshold).sum())

    def rank_on(self, part: Tensor) -> int:
        """Rank of the Gram matrix of some of the data only, a part of the same sum."""
        return int((_eigenvalues(self.apply(part)) > self.threshold).sum())


def rank(gram: Tensor, tolerance: float = TOLERANCE) -> int:
    """Rank of a Gram matrix, independent of the scale of its directions.

    Examples:
        >>> rank(torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=torch.float64))
        1
    """
    return Balanced(gram, tolerance).rank


def added_rank(joint: Tensor, first: int, tolerance: float = TOLERANCE / 10) -> int:
    """How many dimensions some functions on the data add to the span of others.

    Args:
        joint: Gram matrix of ``[A, B]``.
        first: Number of columns of ``A``.
        tolerance: As for :class:`Balanced`, a little stricter: what is missed here is counted as free.

    Returns:
        ``rank([A, B]) - rank(B)``.

    Examples:
        >>> ab = torch.eye(3, dtype=torch.float64)[:, [0, 1, 1, 2]]  # A has two columns, B has two
        >>> added_rank(ab.T @ ab, 2)
        1
    """
    power = joint.diagonal().clamp(min=0)
    size = torch.cat([_largest(power[:first]), _largest(power[first:])]).rsqrt()  # each by its own unit
    balanced = Balanced(joint * size[:, None] * size[None, :], tolerance)
    return balanced.rank - balanced.rank_of(torch.arange(first, joint.shape[0]))


def certified(gram: Tensor, last: Tensor) -> tuple[Tensor, bool]:
    """A Gram matrix of random probes, whose rank is that of all directions or is put above it.

    Every datum's Jacobian is seen through some random probes. Each further probe per datum can add at most as many
    dimensions as the one before (ranks are submodular, and probes are exchangeable), so if the last one added none,
    no other would, and the rank is exact with probability one. If it added some, nothing is known but that silent
    directions are silent: then all others are taken as used, which never overcounts what is free.

    Args:
        gram: Of all probes but the last.
        last: Of the last probe.

    Returns:
        The Gram matrix to use, and whether its rank is exact.

    Examples:
        >>> v = torch.tensor([[1.0, 0, 0], [0, 1, 0]], dtype=torch.float64)
        >>> certified(v.T @ v, v.T @ v)[1], certified(v[:1].T @ v[:1], v.T @ v)[1]
        (True, False)
    """
    whole = gram + last
    if rank(gram) == rank(whole):
        return whole, True
    return torch.diag(whole.diagonal()), False


def fold(activations: Tensor, bias: bool) -> Tensor:
    """Activations with the constant 1 that carries the bias as their last column."""
    if not bias:
        return activations
    return torch.cat([activations, torch.ones_like(activations[:, :1])], dim=1)


def pairs_above(first: Tensor, second: Tensor, threshold: float) -> int:
    """Number of pairs of eigenvalues whose product exceeds a threshold.

    These are the eigenvalues of the factorised Hessian ``G (x) K`` above it: a unit step along such a
    direction of a layer's weights changes the behavioural loss by more than the threshold.

    Examples:
        >>> pairs_above(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.1]), 0.5)
        2
    """
    ordered = second.clamp(min=0).sort().values
    positive = first[first > 0]
    if positive.numel() == 0 or ordered.numel() == 0:
        return 0
    below = torch.searchsorted(ordered, threshold / positive, right=True)
    return int((ordered.numel() - below).sum())


def _largest(power: Tensor) -> Tensor:
    top = float(power.max()) if power.numel() else 0.0
    return torch.full_like(power, top if top > 0 else 1.0)


def _eigenvalues(matrix: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(matrix) if matrix.numel() else matrix.new_zeros(0)
