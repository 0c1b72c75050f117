"""Noise for Langevin steps, several times cheaper than normal numbers.

An Euler step of Langevin dynamics is right to first order in the step, and to that order any independent increments
with the normal's first three moments do (Kloeden and Platen 1992, section 14.1, the simplified weak Euler scheme).
Here they are the number of ones among 8 random bits, centred and scaled: mean 0, variance 1, third moment 0, fourth
moment 2.75 instead of 3, at most 2.83 in size. Quadratic directions cannot tell: their stationary variance depends on
the increments' variance alone.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_BLOCK = 1 << 16
_DEVIATION = math.sqrt(2.0)  # of the number of ones among 8 bits


class Noise:
    """A stream of increments, the same for the same seed.

    Examples:
        >>> values = torch.zeros(1, 100_000)
        >>> Noise(0).add(values, 2.0)
        >>> round(float(values.std()), 1), float(values.abs().max()) <= 8
        (2.0, True)
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.SFC64(seed)
        self._left = torch.empty(0, dtype=torch.int8)
        self._room = np.empty(0, np.uint8)

    def add(self, values: Tensor, size: float, scale: Tensor | None = None) -> None:
        """Add increments of standard deviation ``size`` (times ``scale`` per column) to ``(..., d)`` in place."""
        ones = self._take(values.numel()).view(values.shape).to(values.device)
        if scale is None:
            values.add_(ones, alpha=size / _DEVIATION)
        else:
            values.addcmul_(ones.to(values.dtype), scale, value=size / _DEVIATION)

    def _take(self, count: int) -> Tensor:
        if len(self._left) < count:  # what is left is dropped: many small steps share the cost of one call
            self._left = self._ones(max(count, _BLOCK))
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    def _ones(self, count: int) -> Tensor:
        """The number of ones among 8 bits, less 4: standard deviation ``sqrt(2)``."""
        words = self._bits.random_raw(-(-count // 8))
        if (
            len(self._room) < count
        ):  # written over again and again: a new one each time costs more than counting
            self._room = np.empty(count, np.uint8)
        ones = np.bitwise_count(words.view(np.uint8)[:count], out=self._room[:count])  # many bytes at a time
        ones -= 4  # wraps below zero, which is what the signed view reads
        return torch.from_numpy(ones.view(np.int8))
