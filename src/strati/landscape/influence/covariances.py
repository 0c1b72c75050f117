"""Covariances of losses over chains of draws, from running sums, with errors by the method of batch means.

Each chain is cut into batches of consecutive draws. Of every batch the mean product ``P_b`` enters running sums, the
means and second moments of each column are kept. The covariance is ``mean P - A B`` plus the covariance of the means
``A`` and ``B`` (which makes it unbiased), and its error is the spread over batches of its influence function
``P_b - A b_b - B a_b``, which follows from these sums. Memory grows with the number of entries and of batches, not of
draws.
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


class BatchMoments:
    """Means of functions of columns over batches of consecutive draws of each chain.

    Args:
        length: Draws per batch.
        functions: Of the draws; by default themselves and their squares.
    """

    def __init__(
        self, length: int, functions: Sequence[Callable[[Tensor], Tensor]] = (torch.clone, torch.square)
    ) -> None:
        self.length, self._functions = length, functions
        self._waiting: dict[int, list[Tensor]] = {}
        self._means: list[dict[int, list[Tensor]]] = [{} for _ in functions]

    def add(self, first: int, values: Tensor) -> tuple[Tensor, list[Tensor]] | None:
        """Count a draw ``(chains, columns)`` of the chains from number ``first`` on.

        Returns:
            Where it completes a batch, its draws ``(draws, chains, columns)`` and the means of the functions.
        """
        waiting = self._waiting.setdefault(first, [])
        waiting.append(values)
        if len(waiting) < self.length:
            return None
        draws = torch.stack(waiting)
        waiting.clear()
        means = [function(draws).mean(0) for function in self._functions]
        for batches, mean in zip(self._means, means, strict=True):
            batches.setdefault(first, []).append(mean)
        return draws, means

    def stacked(self) -> list[FloatArray]:
        """The means of each function as ``(batches, chains, columns)``."""
        return [_stacked(batches) for batches in self._means]


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
        self.kernel, self.batches = kernel, 0
        self.left, self.right = BatchMoments(length), BatchMoments(length)
        self._sums: list[Tensor] = []

    def add(self, first: int, left: Tensor, right: Tensor) -> None:
        """Count a draw of the chains from number ``first`` on: ``(chains, q)`` and ``(chains, n)``."""
        batch_a, batch_b = self.left.add(first, left), self.right.add(first, right)
        if batch_a is None or batch_b is None:
            return
        a, b = batch_a[0], batch_b[0]
        moments = [*batch_a[1], *batch_b[1]]
        for chain in range(a.shape[1]):
            product = a[:, chain].T @ b[:, chain] / len(a)
            mean_a, square_a, mean_b, square_b = (moment[chain] for moment in moments)
            factors = [product, mean_a[:, None], mean_b[None]]
            factors += [square_a[:, None], square_b[None]] if self.kernel else []
            if not self._sums:
                self._sums = [torch.zeros_like(product) for _ in range(1 + len(factors))]
            self._sums[0] += product
            for total, factor in zip(self._sums[1:], factors, strict=True):
                total.addcmul_(product, factor.expand_as(product))
            self.batches += 1

    def covariances(self) -> Entries:
        """``Cov(left_i, right_j)``, or with ``kernel`` the correlations, and their standard errors."""
        (mean_a, square_a), (mean_b, square_b) = self.left.stacked(), self.right.stacked()
        correlated = correlation_of_batches(mean_b)
        count = self.batches
        a, b, va, vb = (x.reshape(count, -1) for x in (mean_a, mean_b, square_a, square_b))
        sums = [total.cpu().numpy() / count for total in self._sums]
        product = sums[0]
        centre_a, centre_b = a.mean(0)[:, None], b.mean(0)[None]
        values = product - centre_a * centre_b + (a - a.mean(0)).T @ (b - b.mean(0)) / (count * (count - 1))
        weights: list[FloatArray | float] = [1.0, -centre_b, -centre_a]
        if self.kernel:
            spread_a = np.sqrt(_variances(a, va))[:, None]
            spread_b = np.sqrt(_variances(b, vb))[None]
            scale = np.where(spread_a * spread_b > 0, spread_a * spread_b, np.nan)
            values = values / scale
            of_a, of_b = -values / (2 * spread_a**2), -values / (2 * spread_b**2)
            weights = [w / scale for w in weights]
            weights = [
                weights[0],
                weights[1] - 2 * centre_a * of_a,
                weights[2] - 2 * centre_b * of_b,
                of_a,
                of_b,
            ]
        sides = [(a, None), (None, b), (va, None), (None, vb)][: len(weights) - 1]
        variance = _quadratic_form(product, sums[1:], sides, weights)
        error = np.sqrt(np.clip(variance, 0, None) / (count - 1)) * correlated
        return Entries(values, error)


@dataclass(frozen=True)
class Entries:
    """Values with their standard errors, of one shape."""

    values: FloatArray
    stderr: FloatArray


def _quadratic_form(
    product: FloatArray,
    sums: Sequence[FloatArray],
    sides: Sequence[tuple[FloatArray | None, FloatArray | None]],
    weights: Sequence[FloatArray | float],
) -> FloatArray:
    """The variance over batches of ``w_0 P_b + sum_k w_k f_k``, with ``f_k`` of a left or of a right column."""
    variance: FloatArray = weights[0] * weights[0] * (sums[0] - product**2)
    for k, (left, right) in enumerate(sides):
        mean = left.mean(0)[:, None] if left is not None else right.mean(0)[None]  # type: ignore[union-attr]
        variance = variance + 2 * weights[0] * weights[k + 1] * (sums[k + 1] - product * mean)
        for m, (other_left, other_right) in enumerate(sides):
            if left is not None and other_left is not None:
                both = _centred_mean(left, other_left)[:, None]
            elif right is not None and other_right is not None:
                both = _centred_mean(right, other_right)[None]
            elif left is not None and other_right is not None:
                both = _centred(left).T @ _centred(other_right) / len(left)
            else:
                continue  # the same pair the other way round
            twice = 2 if left is not None and other_right is not None else 1
            variance = variance + twice * weights[k + 1] * weights[m + 1] * both
    return variance


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


def _variances(means: FloatArray, squares: FloatArray) -> FloatArray:
    """Unbiased variances of columns."""
    count = len(means)
    plain = squares.mean(0) - means.mean(0) ** 2 + means.var(0, ddof=1) / count
    return np.asarray(np.clip(plain, 0, None))


def _centred(columns: FloatArray) -> FloatArray:
    return np.asarray(columns - columns.mean(0))


def _centred_mean(left: FloatArray, right: FloatArray) -> FloatArray:
    return np.asarray((_centred(left) * _centred(right)).mean(0))


def _stacked(parts: dict[int, list[Tensor]]) -> FloatArray:
    fewest = min((len(batches) for batches in parts.values()), default=0)
    columns = [torch.stack(parts[first][:fewest], dim=0) for first in sorted(parts)]
    stacked: FloatArray = torch.cat(columns, dim=1).double().cpu().numpy()
    return stacked
