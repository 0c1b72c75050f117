"""Blocks of parameters in which the loss is quadratic, the others held fixed.

A layer of a deep linear network is such a block, the last layer of any network under squared errors, and ``w1`` of
``w1^2 w2^4``. They are not declared but found, by differences of the potential.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from strati.core.rng import derive
from strati.landscape.objective import Potential

_MOST_BLOCKS = 12
_PROBES = 3
_TOLERANCE = 1e-8  # of the spread of values on a line, for its third difference to count as zero


def quadratic_blocks(
    potential: Potential, theta: Tensor, sizes: Sequence[int] | None = None
) -> tuple[slice, ...] | None:
    """Consecutive blocks of parameters in each of which the potential is quadratic, the others held fixed.

    Along lines inside a block, through places at a random distance from ``theta``, the third difference of a
    quadratic is zero. ``sizes`` proposes where blocks may end (the parameter tensors of a network); neighbours are
    joined as long as the joined block is quadratic, and without ``sizes`` the ends are searched for.

    Returns:
        The blocks in order, or ``None`` where some parameter is in none, or there are more than a dozen.

    Examples:
        >>> quadratic_blocks(lambda w: (w[0] * w[1] - w[2]) ** 2, torch.ones(3, dtype=torch.float64))
        (slice(0, 1, None), slice(1, 3, None))
        >>> quadratic_blocks(lambda w: (w**4).sum(), torch.zeros(2, dtype=torch.float64)) is None
        True
    """
    if theta.dtype != torch.float64 or not batchable(potential, theta):
        return None
    ends = list(np.cumsum(sizes)) if sizes is not None else list(range(1, theta.numel() + 1))
    probe = _Probe(potential, theta)
    blocks: list[slice] = []
    start = 0
    while start < theta.numel():
        ahead = [int(e) for e in ends if e > start]
        # The longest block from here: quadratic stays quadratic when shortened, so bisect.
        low, high = 0, len(ahead)
        while low < high:
            middle = (low + high + 1) // 2
            if probe.quadratic(range(start, ahead[middle - 1])):
                low = middle
            else:
                high = middle - 1
        if low == 0 or len(blocks) == _MOST_BLOCKS:
            return None
        blocks.append(slice(start, ahead[low - 1]))
        start = blocks[-1].stop
    return tuple(blocks)


def largest_quadratic(potential: Potential, theta: Tensor) -> tuple[int, ...]:
    """The most parameters, of a few, in which together the potential is quadratic; none where there are no such.

    Examples:
        >>> largest_quadratic(lambda w: (w[0] - w[1] * w[2]) ** 2 + w[1] ** 4, torch.zeros(3, dtype=torch.float64))
        (0, 2)
    """
    if theta.dtype != torch.float64 or not batchable(potential, theta):
        return ()
    probe = _Probe(potential, theta)
    best: list[int] = []
    for first in range(theta.numel()):
        members: list[int] = []
        for index in (first, *(i for i in range(theta.numel()) if i != first)):
            if probe.quadratic([*members, index]):
                members.append(index)
            elif not members:
                break
        best = max(best, members, key=len)
    return tuple(sorted(best))


class _Probe:
    """Third differences of a potential along random lines inside a block."""

    def __init__(self, potential: Potential, theta: Tensor) -> None:
        self.potential, self.theta = potential, theta
        self.generator = torch.Generator().manual_seed(derive(0, "quadratic blocks", theta.numel()))
        self.size = max(float(theta.abs().mean()), 0.3)

    def quadratic(self, block: Sequence[int]) -> bool:
        with torch.no_grad():
            return all(self._line(block) for _ in range(_PROBES))

    def _line(self, block: Sequence[int]) -> bool:
        place = self.theta + self._normal(self.theta.numel())
        direction = torch.zeros_like(self.theta)
        direction[list(block)] = self._normal(len(block))
        values = np.array([float(self.potential(place + t * direction)) for t in range(-2, 3)])
        if not np.isfinite(values).all():
            return False
        third = np.abs(np.diff(values, n=3)).max()
        return bool(third <= _TOLERANCE * max(np.ptp(values), 1e-6 * np.abs(values).max(), 1e-280))

    def _normal(self, count: int) -> Tensor:
        return self.size * torch.randn(count, generator=self.generator, dtype=self.theta.dtype).to(self.theta)


def batchable(potential: Potential, theta: Tensor) -> bool:
    """Whether ``torch.func.vmap`` can trace the potential: no branches on values, no writes in place.

    Examples:
        >>> batchable(lambda w: (w**2).sum(), torch.zeros(2))
        True
        >>> batchable(lambda w: w.sum() if float(w.sum()) > 0 else -w.sum(), torch.zeros(2))
        False
    """
    try:
        with torch.no_grad():
            vmap(lambda t: potential(t).reshape(()), randomness="error")(torch.stack([theta, theta]))
    except Exception:  # whatever it is that vmap cannot trace: the answer is no
        return False
    return True
