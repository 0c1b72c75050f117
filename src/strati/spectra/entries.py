r"""How heavy the tail of a matrix's entries is: the exponent :math:`\mu` of :math:`P(|w| > x) \sim x^{-\mu}`.

Random matrices fall into universality classes by this exponent: below 4 the spectrum grows a power-law tail
however large the matrix, above it the Marchenko-Pastur law holds. Just above or below 4, and at the sizes of
real layers, the eigenvalues alone cannot tell: symmetric Pareto entries with ``mu = 4`` and Gaussian ones
give the same bulk and the same largest eigenvalue. The entries can, so they are asked directly.

Two estimators. If a pure power law fits the whole upper part, its maximum-likelihood exponent (Hill 1975).
Otherwise the extreme-value index ``xi = 1/mu`` of the upper twentieth, the mean of the moment estimator
(Dekkers, Einmahl and de Haan 1989) and the maximum-likelihood index of the generalised Pareto law (Grimshaw
1993), whose finite-size errors have opposite signs. Light-tailed entries (Gaussian, uniform, Laplace) have
``xi`` of zero or less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.types import FloatArray

_RANKS = 1 << 16  # quantiles kept; more would not change a verdict
_FEWEST = 400
_BODY, _TOP = 0.5, 0.05  # shares of the entries used for the pure power law and for the extreme-value index
_KOLMOGOROV = (
    1.3  # KS distance times sqrt(n); 99 % of pure power laws stay below it (their exponent is fitted)
)
_LEAST_INDEX = (
    0.13  # Laplace entries give about 0.02, products of Gaussians 0.05, Student-t with mu = 6 about 0.11
)


@dataclass(frozen=True)
class EntryTail:
    """The tail of the entries' distribution.

    Attributes:
        heavy: Whether the entries have a power-law tail.
        mu: Its exponent; NaN if there is none.
        size: Number of entries it was estimated from; 0 when there were too few to tell.
        pure: A pure power law fits the whole upper half.
    """

    heavy: bool
    mu: float
    size: int
    pure: bool = False


class EntrySizes:
    """The sizes of the entries of one or more matrices of one layer, seen one matrix at a time.

    Entries of large matrices are sorted only if their largest is more than Gaussian entries would show: the
    largest of ``n`` Pareto entries with ``mu < 5`` is far beyond, and a glance at it costs next to nothing.
    """

    def __init__(self) -> None:
        self._kept: list[FloatArray] = []

    def add(self, matrix: NDArray[Any]) -> None:
        """Look at one matrix of finite weights."""
        if matrix.size == 0:
            return
        plain = matrix if matrix.dtype in (np.float32, np.float64) else matrix.astype(np.float32)
        if plain.size > _RANKS:
            largest = max(float(plain.max()), -float(plain.min()))
            flat = plain.ravel(order="K")
            with np.errstate(over="ignore", under="ignore"):
                scale = float(np.sqrt(np.dot(flat, flat) / flat.size))
            if not 1e-15 < scale < 1e15:  # squares may have left float32's range
                scale = float(np.sqrt(np.mean(np.square(flat, dtype=np.float64))))
            if not largest > scale * np.sqrt(2 * np.log(flat.size / 1e-3)):
                return
        self._kept.append(_thinned(np.abs(plain).ravel(order="K")))

    def tail(self) -> EntryTail:
        """The verdict over all matrices seen."""
        sizes = np.sort(np.concatenate(self._kept)) if self._kept else np.empty(0)
        return _judge(_thinned(sizes)) if sizes.size >= _FEWEST else EntryTail(False, float("nan"), 0)


def entry_tail(matrix: NDArray[Any]) -> EntryTail:
    """Estimate the exponent of the tail of a matrix's entries.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> entry_tail(rng.normal(size=(100, 100))).heavy
        False
        >>> round(entry_tail(rng.pareto(3.0, size=(200, 200)) + 1).mu, 1)
        3.0
    """
    sizes = EntrySizes()
    sizes.add(matrix)
    return sizes.tail()


def _judge(sizes: FloatArray) -> EntryTail:
    body = np.log(sizes[-int(_BODY * sizes.size) :])
    body -= body[0]
    mean = float(body.mean())
    if mean <= 0:  # half of the entries share one size: no tail to speak of
        return EntryTail(False, float("nan"), 0)
    places = (np.arange(body.size) + 0.5) / body.size
    distance = float(np.abs(-np.expm1(-body / mean) - places).max())
    if distance * np.sqrt(body.size) < _KOLMOGOROV:
        return EntryTail(True, 1 / mean, body.size, pure=True)
    index, size = _extreme_value_index(sizes)
    heavy = bool(index - 1 / np.sqrt(size) > 0 and index > _LEAST_INDEX)
    return EntryTail(heavy, 1 / index if heavy else float("nan"), size)


def _thinned(sizes: FloatArray) -> FloatArray:
    """Non-zero sizes, ascending, as evenly spaced quantiles if they are many; the same for any order given."""
    sizes = np.sort(sizes)
    sizes = sizes[np.searchsorted(sizes, 0.0, side="right") :]
    if sizes.size > _RANKS:
        sizes = sizes[((np.arange(_RANKS) + 0.5) * (sizes.size / _RANKS)).astype(np.int64)]
    return sizes.astype(np.float64)


def _extreme_value_index(sizes: FloatArray) -> tuple[float, int]:
    size = max(int(_TOP * sizes.size), 50)
    threshold = sizes[-size - 1]
    excess = sizes[-size:] - threshold
    if excess.mean() <= 0 or np.count_nonzero(excess) < size // 2:  # few distinct values: quantised weights
        return -1.0, size
    logs = np.log1p(excess / threshold)
    first, second = float(logs.mean()), float((logs**2).mean())
    moments = first + 1 - 0.5 / (1 - first**2 / second)
    return (moments + _generalised_pareto(excess)) / 2, size


def _generalised_pareto(excess: FloatArray) -> float:
    """Maximum-likelihood index: a profile over one parameter, on a grid and then finer around its best."""
    mean, largest = float(excess.mean()), float(excess.max())
    grid = np.concatenate([-np.linspace(0.98, 0.02, 16) / largest, np.geomspace(1e-3, 30, 24) / mean])
    for _ in range(2):
        index = np.log1p(grid[:, None] * excess[None, :]).mean(axis=1)
        ratio = np.maximum(index / grid, np.finfo(np.float64).tiny)
        best = int(np.argmax(-np.log(ratio) - index))
        found = float(index[best])
        grid = np.linspace(grid[max(best - 1, 0)], grid[min(best + 1, grid.size - 1)], 14)[1:-1]
        grid = grid[grid != 0]
    return found
