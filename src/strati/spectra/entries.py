r"""How heavy the tail of a matrix's entries is: the exponent :math:`\mu` of :math:`P(|w| > x) \sim x^{-\mu}`.

Random matrices fall into universality classes by this exponent: below 4 the spectrum grows a power-law tail
however large the matrix, above it the Marchenko-Pastur law holds. Just above or below 4, and at the sizes of
real layers, the eigenvalues alone cannot tell: symmetric Pareto entries with ``mu = 4`` and Gaussian ones
give the same bulk and the same largest eigenvalue. The entries can, so they are asked directly.

Three estimators, the most precise that applies. If a pure power law fits the upper half of the entries' sizes, its
maximum-likelihood exponent (Hill 1975). If a generalised Pareto law fits it (a power law with a shifted start),
that law's index ``xi = 1/mu`` (Grimshaw 1993). Otherwise the same index of the upper twentieth, if the law fits
there. Light-tailed entries (Gaussian, uniform, Laplace) have an index of zero or less.

Entries on a lattice (weights rounded to fp8 or int4) share few sizes. Each size then stands for the cell that is
rounded to it, and its entries are spread evenly over the cell; where the upper twentieth has only a few cells, no
tail can be told from none, and none is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.spectra.generalised_pareto import fit as fit_generalised_pareto

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray, IntArray

WILD_GAP = 100.0
"""A few weights that are this many times larger than the next one are wild: bits that flipped, or an overflow."""

_MOST_WILD = 8
_RANKS = 1 << 16  # quantiles kept; more would not change a verdict
_FEWEST = 400
_BODY, _TOP = 0.5, 0.05  # shares of the entries that the estimators use
# Largest KS distance times sqrt(n) at which a law with one or two fitted parameters stands; the last where the law
# is a limit that the upper twentieth only comes near.
_KOLMOGOROV = (1.3, 0.9, 1.6)
_SHARED, _LEVELS = (
    0.5,
    8,
)  # fewer sizes than this share of the entries are a lattice; fewer in the top tell nothing
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


@dataclass(frozen=True)
class _Largest:
    """The largest entries of one matrix: sizes, rows, columns, and the matrix's shorter side."""

    sizes: FloatArray
    rows: IntArray
    columns: IntArray
    shorter: int

    def fills_diagonal(self, least: float) -> bool:
        """Whether the entries from ``least`` on are a whole diagonal or permutation, as of an identity with noise."""
        large = self.sizes >= least
        count = int(large.sum())
        sides = (self.rows[large], self.columns[large])
        return count == self.shorter > 1 and all(np.unique(side).size == count for side in sides)


class EntrySizes:
    """The sizes of the entries of one or more matrices of one layer, seen one matrix at a time.

    Entries of large matrices are sorted only if their largest is more than Gaussian entries would show: the
    largest of ``n`` Pareto entries with ``mu < 5`` is far beyond, and a glance at it costs next to nothing.
    """

    def __init__(self) -> None:
        self._kept: list[FloatArray] = []
        self._largest: list[_Largest] = []

    def add(self, matrix: NDArray[Any]) -> None:
        """Look at one matrix of finite weights."""
        if matrix.size == 0:
            return
        plain = matrix if matrix.dtype in (np.float32, np.float64) else matrix.astype(np.float32)
        largest = max(float(plain.max()), -float(plain.min()))
        self._keep_largest(plain, largest)
        if plain.size > _RANKS:
            flat = plain.ravel(order="K")
            with np.errstate(over="ignore", under="ignore"):
                scale = float(np.sqrt(np.dot(flat, flat) / flat.size))
            if not 1e-15 < scale < 1e15:  # squares may have left float32's range
                scale = float(np.sqrt(np.mean(np.square(flat, dtype=np.float64))))
            if not largest > scale * np.sqrt(2 * np.log(flat.size / 1e-3)):
                return
        self._kept.append(_thinned(np.abs(plain).ravel(order="K")))

    def _keep_largest(self, plain: NDArray[Any], largest: float) -> None:
        # A gap below the largest entries needs a median that far below them; only then are entries sorted.
        sample = plain[:: max(plain.shape[0] // 64, 1)]
        if plain.size <= 4 * _MOST_WILD or float(np.median(np.abs(sample))) * WILD_GAP < largest:
            count = min(plain.size, _MOST_WILD + 1)
            flat = np.abs(plain).ravel()
            places = np.argpartition(flat, flat.size - count)[flat.size - count :]
            rows, columns = np.unravel_index(places, plain.shape)
            self._largest.append(_Largest(flat[places].astype(np.float64), rows, columns, min(plain.shape)))

    def wild(self) -> int:
        """Number of entries beyond a gap of :data:`WILD_GAP` below them; 0 if there is no such gap near the top.

        Examples:
            >>> sizes = EntrySizes()
            >>> W = np.random.default_rng(0).normal(size=(40, 40))
            >>> W[3, 4] = 1e20
            >>> sizes.add(W)
            >>> sizes.wild()
            1
        """
        if not self._largest:
            return 0
        top = np.sort(np.concatenate([largest.sizes for largest in self._largest]))[::-1][: _MOST_WILD + 1]
        gaps = np.flatnonzero((top[:-1] > WILD_GAP * top[1:]) & (top[1:] > 0))
        if not gaps.size or any(largest.fills_diagonal(top[gaps[0]]) for largest in self._largest):
            return 0
        return int(gaps[0]) + 1

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
    sizes, coarse = _off_lattice(sizes)
    if coarse:
        return EntryTail(False, float("nan"), 0)
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
    index, slope = fit_generalised_pareto(body - 1)
    if index > 0 and _distance(1 - (1 + slope * (body - 1)) ** (-1 / index)) * root < _KOLMOGOROV[1]:
        return _verdict(index, body.size)
    index, slope = fit_generalised_pareto(top)
    if index > 0 and _distance(1 - (1 + slope * top) ** (-1 / index)) * np.sqrt(top.size) > _KOLMOGOROV[2]:
        return EntryTail(False, float("nan"), top.size)  # a mixture of sizes, as of a diagonal and noise
    return _verdict(index, top.size)


def _off_lattice(sizes: FloatArray) -> tuple[FloatArray, bool]:
    """Sizes that are shared spread over the cells of their lattice; whether the lattice is too coarse for a tail."""
    starts = np.flatnonzero(np.diff(sizes, prepend=-1.0) > 0)
    if starts.size > _SHARED * sizes.size:
        return sizes, False
    levels = sizes[starts]
    if np.count_nonzero(starts >= (1 - _TOP) * sizes.size) < _LEVELS:
        return sizes, True
    middles = (levels[1:] + levels[:-1]) / 2
    ends = np.concatenate(
        [[max(levels[0] - (middles[0] - levels[0]), levels[0] / 2)], middles, [2 * levels[-1] - middles[-1]]]
    )
    counts = np.diff(np.append(starts, sizes.size))
    place = (np.arange(sizes.size) - np.repeat(starts, counts) + 0.5) / np.repeat(counts, counts)
    spread: FloatArray = np.repeat(ends[:-1], counts) + place * np.repeat(np.diff(ends), counts)
    return spread, False


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


def _thinned(sizes: FloatArray) -> FloatArray:
    """Non-zero sizes, ascending, as evenly spaced quantiles if they are many; the same for any order given."""
    sizes = np.sort(sizes)
    sizes = sizes[np.searchsorted(sizes, 0.0, side="right") :]
    if sizes.size > _RANKS:
        sizes = sizes[((np.arange(_RANKS) + 0.5) * (sizes.size / _RANKS)).astype(np.int64)]
    return sizes.astype(np.float64)
