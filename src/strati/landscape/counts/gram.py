"""Small helpers on activations and the eigenvalues of Gram matrices; ranks are in ``ranks``."""

from __future__ import annotations

import torch
from torch import Tensor


def fold(activations: Tensor, bias: bool) -> Tensor:
    """Activations with the constant 1 that carries the bias as their last column."""
    if not bias:
        return activations
    return torch.cat([activations, activations.new_ones(len(activations), 1)], dim=1)


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
