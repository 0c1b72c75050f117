"""Covariances of losses over chains of draws, from running sums, with errors by the method of batch means.

Each chain is cut into batches of consecutive draws. Of every batch the mean product ``P_b``, the means and the second
moments of the columns enter running sums of their products. The covariance is ``mean P - A B`` plus the covariance of
the means ``A`` and ``B`` (which makes it unbiased), and its error is the spread over batches of its influence function
``P_b - A b_b - B a_b``, which follows from these sums. Memory grows with the number of entries, not of draws: means of
columns are kept for a bounded number of batches, which are joined in pairs when there are more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from strati.core.results import FloatArray

FEWEST_BATCHES = 8
"""Of all chains together: fewer give no error."""

_MOST_CORRELATED = 0.9  # neighbouring batches
_KEPT_NUMBERS = 1 << 24  # of one function of all columns, over the batches that are kept
_WAITING_NUMBERS = 1 << 22  # of draws that wait for a matrix product
_FEW_COLUMNS = 256  # of which all batches are kept, for the correlation of neighbours


class BatchMoments:
    """Means of functions of columns over batches of consecutive draws of each chain.

    When the means of all batches are more numbers than may be kept, neighbouring batches are joined.

    Args:
        length: Draws per batch, at first.
        functions: Of the draws; by default themselves and their squares.
        most: Numbers that are kept of one function; at least four batches are.
    """

    def __init__(
        self,
        length: int,
        functions: Sequence[Callable[[Tensor], Tensor]] = (torch.clone, torch.square),
        *,
        most: int = _KEPT_NUMBERS,
    ) -> None:
        self.length, self._functions, self._most = length, functions, most
        self._sums: dict[int, list[Tensor]] = {}
        self._counts: dict[int, int] = {}
        self._batches: dict[int, list[list[Tensor]]] = {}
        self._lengths: dict[int, int] = {}

    def add(self, first: int, values: Tensor) -> None:
        """Count a draw ``(chains, columns)`` of the chains from number ``first`` on."""
        sums = [function(values) for function in self._functions]
        if first in self._sums:
            sums = [total.add_(new) for total, new in zip(self._sums[first], sums, strict=True)]
        self._sums[first] = sums
        self._counts[first] = self._counts.get(first, 0) + 1
        length = self._lengths.setdefault(first, self.length)
        if self._counts[first] < length:
            return
        del self._counts[first], self._sums[first]
        batches = self._batches.setdefault(first, [])
        batches.append([total.div_(length) for total in sums])
        if len(batches) >= max(4, self._most // values.numel() // 2 * 2):
            self._join(first)

    def _join(self, first: int) -> None:
        batches = self._batches[first]
        pairs = zip(batches[::2], batches[1::2], strict=False)
        self._batches[first] = [
            [(a + b).div_(2) for a, b in zip(early, late, strict=True)] for early, late in pairs
        ]
        self._lengths[first] *= 2

    def stacked(self) -> list[FloatArray]:
        """The means of each function as ``(batches, chains, columns)``; chains are brought to one length of batches."""
        longest = max(self._lengths.values(), default=self.length)
        for first in self._batches:
            while self._lengths[first] < longest:
                self._join(first)
        self.length = longest
        fewest = min((len(batches) for batches in self._batches.values()), default=0)
        stacked = []
        for number in range(len(self._functions)):
            chains = [
                torch.stack([batch[number] for batch in self._batches[first][:fewest]])
                for first in sorted(self._batches)
            ]
            stacked.append(torch.cat(chains, dim=1).double().cpu().numpy())
        return stacked


class Covariances:
    """Running sums of products of left and right columns.

    Args:
        length: Draws per batch.
        kernel: Whether correlations are estimated, too.

    Examples:
        >>> sums = Covariances(25, kernel=False)
        >>> draws = torch.randn(100, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> draws[..., 1] += draws[..., 0]
        >>> for values in draws:
        ...     sums.add(0, values, values)
        >>> entries = sums.covariances()
        >>> bool(np.abs(entries.values - [[1, 1, 0], [1, 2, 0], [0, 0, 1]]).max() < 4 * entries.stderr.max())
        True
    """

    def __init__(self, length: int, *, kernel: bool) -> None:
        self.length, self.kernel, self.batches = length, kernel, 0
        self.left, self.right = BatchMoments(length), BatchMoments(length)
        self._few = BatchMoments(length, [torch.clone], most=1 << 40)
        self._waiting: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._open: dict[int, tuple[int, list[Tensor]]] = {}
        self._means: list[Tensor] = []
        self._pairs: dict[tuple[int, int], Tensor] = {}

    def add(self, first: int, left: Tensor, right: Tensor) -> None:
        """Count a draw of the chains from number ``first`` on: ``(chains, q)`` and ``(chains, n)``."""
        self.left.add(first, left)
        self.right.add(first, right)
        self._few.add(first, right[:, :: -(-right.shape[1] // _FEW_COLUMNS)])
        waiting = self._waiting.setdefault(first, [])
        waiting.append((left, right))
        draws, sums = self._open.get(first, (0, []))
        complete = draws + len(waiting) == self.length
        if not complete and len(waiting) * right.numel() < _WAITING_NUMBERS:
            return
        a, b = (torch.stack([pair[side] for pair in waiting], dim=1) for side in (0, 1))
        new = [torch.einsum("cdi,cdj->cij", a, b), a.sum(1)[:, :, None], b.sum(1)[:, None]]
        new += [a.square().sum(1)[:, :, None], b.square().sum(1)[:, None]] if self.kernel else []
        sums = [total.add_(part) for total, part in zip(sums, new, strict=True)] if sums else new
        self._open[first] = (draws + len(waiting), sums)
        waiting.clear()
        if complete:
            del self._open[first]
            for chain in range(len(left)):
                self._count([total[chain] / self.length for total in sums])

    def _count(self, means: list[Tensor]) -> None:
        """Count one batch of one chain: mean product, means and, for correlations, mean squares of the columns."""
        self.batches += 1
        self._means = self._means or [torch.zeros_like(mean) for mean in means]
        for number, mean in enumerate(means):
            self._means[number] += mean
            for other in range(number, len(means)):
                product = mean * means[other]
                if (number, other) in self._pairs:
                    self._pairs[number, other] += product
                else:
                    self._pairs[number, other] = product

    def _covariance(self, first: int, second: int) -> FloatArray:
        """Over batches, of two of the means that :meth:`_count` takes."""
        product = self._pairs[first, second] / self.batches
        product -= self._means[first] * self._means[second] / self.batches**2
        matrix: FloatArray = product.cpu().numpy()
        return matrix

    def covariances(self) -> Entries:
        """``Cov(left_i, right_j)``, or with ``kernel`` the correlations, and their standard errors."""
        count = self.batches
        product, a, b, *squares = (total.cpu().numpy() / count for total in self._means)
        values = product - a * b + self._covariance(1, 2) / (count - 1)
        weights: list[FloatArray | float] = [1.0, -b, -a]
        if self.kernel:
            var_a, var_b = (
                np.clip(square - mean**2 + self._covariance(k, k) / (count - 1), 0, None)
                for k, square, mean in zip((1, 2), squares, (a, b), strict=True)
            )
            scale = np.where(var_a * var_b > 0, np.sqrt(var_a * var_b), np.nan)
            values = values / scale
            of_a, of_b = -values / (2 * var_a), -values / (2 * var_b)
            plain = [weight / scale for weight in weights]
            weights = [plain[0], plain[1] - 2 * a * of_a, plain[2] - 2 * b * of_b, of_a, of_b]
        variance = np.zeros_like(values)
        for first, second in self._pairs:
            twice = 1 if first == second else 2
            variance += twice * weights[first] * weights[second] * self._covariance(first, second)
        correlated = correlation_of_batches(self._few.stacked()[0])
        return Entries(values, np.sqrt(np.clip(variance, 0, None) / (count - 1)) * correlated)


@dataclass(frozen=True)
class Entries:
    """Values with their standard errors, of one shape."""

    values: FloatArray
    stderr: FloatArray


def correlation_of_batches(means: FloatArray) -> float:
    """The factor on errors for what neighbouring batches of a chain have in common, from all columns.

    ``sqrt((1 + r) / (1 - r))`` with ``r`` the mean correlation of the means of neighbouring batches.
    """
    if len(means) < 2:
        return 1.0
    centred = means - means.mean((0, 1))
    variance = (centred**2).mean((0, 1))
    moving = variance > 0
    if not moving.any():
        return 1.0
    lagged = (centred[1:] * centred[:-1]).mean((0, 1))
    r = float(np.clip((lagged[moving] / variance[moving]).mean(), 0, _MOST_CORRELATED))
    return math.sqrt((1 + r) / (1 - r))


def split_rhat(moments: BatchMoments) -> FloatArray:
    """Split R-hat of every column, without ranks."""
    means, squares = moments.stacked()
    half = len(means) // 2
    halves = [(slice(0, half), half), (slice(len(means) - half, None), half)] if half else [(slice(None), 1)]
    mean = np.concatenate([means[part].mean(0) for part, _ in halves])
    within = np.concatenate([squares[part].mean(0) for part, _ in halves]) - mean**2
    draws = moments.length * halves[0][1]
    inside = np.clip(within.mean(0), 0, None) * draws / max(draws - 1, 1)
    between = mean.var(0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(inside > 0, between / inside, np.where(between > 0, np.inf, 0.0))
    rhat: FloatArray = np.sqrt((draws - 1) / draws + ratio)
    return rhat
