r"""How heavy the tail of a matrix's entries is: the exponent :math:`\mu` of :math:`P(|w| > x) \sim x^{-\mu}`.

Random matrices fall into universality classes by this exponent: below 4 the spectrum grows a power-law tail
however large the matrix, above it the Marchenko-Pastur law holds. Just above or below 4, and at the sizes of
real layers, the eigenvalues alone cannot tell: symmetric Pareto entries with ``mu = 4`` and Gaussian ones
give the same bulk and the same largest eigenvalue. The entries can, so they are asked directly.

Three estimators, the most precise that applies. If a pure power law fits the upper half of the entries' sizes, its
maximum-likelihood exponent (Hill 1975). If a generalised Pareto law fits it (a power law with a shifted start),
that law's index ``xi = 1/mu`` (Grimshaw 1993). Otherwise the same index of the upper twentieth. Light-tailed
entries (Gaussian, uniform, Laplace) have an index of zero or less.
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
_BODY, _TOP = 0.5, 0.05  # shares of the entries that the estimators use
_KOLMOGOROV = (
    1.3,
    0.9,
)  # largest KS distance times sqrt(n) at which a law with one or two fitted parameters stands
_LEAST_INDEX = 0.11  # the upper twentieth of Laplace entries gives 0.00, of products of Gaussians 0.03


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

    Examples:
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
    start = sizes.size - int(_BODY * sizes.size)
    body = sizes[start:] / sizes[start]
    logs = np.log(body)
    mean = float(logs.mean())
    if mean <= 0:  # half of the entries share one size: no tail to speak of
        return EntryTail(False, float("nan"), 0)
    root = np.sqrt(body.size)
    if _distance(-np.expm1(-logs / mean)) * root < _KOLMOGOROV[0]:
        return EntryTail(True, 1 / mean, body.size, pure=True)
    start = sizes.size - max(int(_TOP * sizes.size), 50)
    top = sizes[start:] / sizes[start] - 1
    if np.count_nonzero(top) < top.size // 2 or _moment_index(top) < -0.05:  # quantised, or plainly light
        return EntryTail(False, float("nan"), top.size)
    index, slope = _generalised_pareto(body - 1)
    if index > 0 and _distance(1 - (1 + slope * (body - 1)) ** (-1 / index)) * root < _KOLMOGOROV[1]:
        return _verdict(index, body.size)
    return _verdict(_generalised_pareto(top)[0], top.size)


def _verdict(index: float, size: int) -> EntryTail:
    heavy = bool(index > max(_LEAST_INDEX, 1.8 / np.sqrt(size)))  # its standard error is about 1/sqrt(size)
    return EntryTail(heavy, 1 / index if heavy else float("nan"), size)


def _distance(fitted: FloatArray) -> float:
    places = (np.arange(fitted.size) + 0.5) / fitted.size
    return float(np.abs(fitted - places).max())


def _moment_index(excess: FloatArray) -> float:
    """The moment estimator of the index (Dekkers, Einmahl and de Haan 1989): rough, but cheap."""
    logs = np.log1p(excess)
    first, second = float(logs.mean()), float((logs**2).mean())
    return first + 1 - 0.5 / (1 - first**2 / second) if second > first**2 else -1.0


def _generalised_pareto(excess: FloatArray) -> tuple[float, float]:
    """Maximum-likelihood index ``xi`` and slope ``xi/scale``: a profile over the slope, on a grid, then finer."""
    mean, largest = float(excess.mean()), float(excess.max())
    grid = np.concatenate([-np.linspace(0.98, 0.02, 16) / largest, np.geomspace(1e-3, 30, 24) / mean])
    thin = excess[:: max(excess.size // 4096, 1)]
    found, slope = 0.0, 0.0
    for values in (thin, thin, excess):
        index = np.log1p(grid[:, None] * values[None, :]).mean(axis=1)
        best = int(np.argmax(-np.log(np.maximum(index / grid, np.finfo(np.float64).tiny)) - index))
        found, slope = float(index[best]), float(grid[best])
        grid = np.linspace(grid[max(best - 1, 0)], grid[min(best + 1, grid.size - 1)], 9)[1:-1]
        grid = grid[np.abs(grid) > 1e-9 / mean]
    return found, slope


def _thinned(sizes: FloatArray) -> FloatArray:
    """Non-zero sizes, ascending, as evenly spaced quantiles if they are many; the same for any order given."""
    sizes = np.sort(sizes)
    sizes = sizes[np.searchsorted(sizes, 0.0, side="right") :]
    if sizes.size > _RANKS:
        sizes = sizes[((np.arange(_RANKS) + 0.5) * (sizes.size / _RANKS)).astype(np.int64)]
    return sizes.astype(np.float64)
