r"""Power-law tails: of the eigenvalues (exponent alpha) and of the entries (exponent mu).

**Eigenvalues**, :math:`p(\lambda) \sim \lambda^{-\alpha}` for :math:`\lambda \ge x_\min`: continuous maximum likelihood
with the :math:`x_\min` of least Kolmogorov-Smirnov distance (Clauset, Shalizi and Newman 2009). Every eigenvalue is a
candidate: the exponents of all of them come from one cumulative sum of logarithms, and a lower bound on each distance
leaves few to be worked out in full. As in weightwatcher the distance uses the left limits ``k/n`` of the empirical
distribution. Other laws and goodness of fit are in :mod:`strati.spectra.tail_tests`.

The error of alpha is an upper bound. The formula :math:`(\alpha - 1)/\sqrt n` takes :math:`x_\min` as known, which it
is not. It has three parts, of which the first two come from one bootstrap:

* the eigenvalues are resampled, the start is chosen anew by the least Kolmogorov-Smirnov distance (over starts spaced
  evenly in the logarithm of the tail's size), and the exponents' root mean square distance from ``alpha`` is taken;
* it is never less than the formula's error;
* a power law that is still steepening at :math:`x_\min` follows a generalised Pareto law there, of which the pure power
  law is a case; where that law's index, less its standard error, is smaller than :math:`1/(\alpha - 1)`, the two
  exponents' difference is added in quadrature as a systematic error (up to one and a half times ``alpha - 1``);
  likewise where the index, and half its standard error, is larger.

How often ``alpha +- 1.96 stderr`` covers the true exponent: ``python tools/calibrate_spectra.py coverage``. Laws that
steepen more slowly than a generalised Pareto law are not covered; where the upper quarter of the values shows one
(:func:`is_gradual`), a warning says so.

**Entries**, :math:`P(|w| > x) \sim x^{-\mu}`: random matrices fall into universality classes by this exponent. Below 4
the spectrum grows a power-law tail however large the matrix, above it the Marchenko-Pastur law holds. Just above or
below 4, and at the sizes of real layers, the eigenvalues alone cannot tell: symmetric Pareto entries with ``mu = 4``
and Gaussian ones give the same bulk and the same largest eigenvalue. The entries can, so they are looked at directly,
by the most precise estimator that applies. If a pure power law fits the upper half of the entries' sizes, its
maximum-likelihood exponent (Hill 1975). If a generalised Pareto law fits it (a power law with a shifted start), that
law's index ``xi = 1/mu`` (Grimshaw 1993). Otherwise the same index of the upper twentieth, if the law fits there.
Light-tailed entries (Gaussian, uniform, Laplace) have an index of zero or less. Entries on a lattice (weights rounded
to fp8 or int4) share few sizes. Each size then stands for the cell that is rounded to it, and its entries are spread
evenly over the cell; where the upper twentieth has only a few cells, no tail can be told from none, and none is
reported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray, IntArray

FEWEST = 10
"""Fewer eigenvalues than this are not fitted at all."""

WILD_GAP = 100.0
"""A few weights that are this many times larger than the next one are wild: bits that flipped, or an overflow."""

_BLOCK = 1 << 17  # elements of one block of pairs: fits the second-level cache
_PROBES = np.array(
    [[0.02, 0.06, 0.1, 0.15, 0.2, 0.27, 0.34, 0.42, 0.5, 0.58, 0.66, 0.74, 0.82, 0.9, 0.96, 0.9999]]
)
_SAMPLES, _STARTS, _PLACES = 24, 28, 16
_LEAST_TAIL = 8
_BELOW, _ABOVE = 1.0, 0.5  # standard errors by which the index may be smaller or larger than it was found
_STEEPEST = 2.5  # the systematic error makes alpha - 1 at most this many times larger
_QUARTER, _FEWEST_UPPER = 4, 20
_STEEPENS = 3.0  # standard errors
_MOST_WILD = 8
_QUANTILES = 1 << 16  # of the entries' sizes; more would not change a verdict
_FEWEST_ENTRIES = 400
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
class Tail:
    """A fitted tail.

    Attributes:
        alpha: The exponent.
        stderr: An upper bound on its standard error, the choice of ``xmin`` and a gradual start included
            (:func:`start_stderr`); 1.1 to 9 times the real spread where the tail starts sharply.
        xmin: Where the tail starts; itself an eigenvalue.
        ks_distance: Kolmogorov-Smirnov distance of the tail from the fit.
        size: Number ``n`` of eigenvalues in the tail.
        start: Index of ``xmin`` among the eigenvalues fitted.
        formal_stderr: ``(alpha - 1)/sqrt(n)``, the error if ``xmin`` were known.
        gradual: The values steepen beyond chance from below ``xmin`` on; the tail has no clear start.
    """

    alpha: float
    stderr: float
    xmin: float
    ks_distance: float
    size: int
    start: int
    formal_stderr: float = float("nan")
    gradual: bool = False


def fit_tail(eigenvalues: FloatArray, *, error: bool = True) -> Tail | None:
    r"""Fit a power law to the upper end of ascending positive values.

    .. math:: \alpha = 1 + n \Big/ \sum_{\lambda_i \ge x_\min} \ln(\lambda_i / x_\min)

    Args:
        eigenvalues: Ascending and positive; leave out what is zero to working precision.
        error: Work out the standard error; without it ``stderr`` is the formal one.

    Returns:
        The fit, or ``None`` when there are fewer than :data:`FEWEST` values or they are all equal.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> x = np.sort((1 - rng.random(4000)) ** (-1 / 1.5))
        >>> tail = fit_tail(x)
        >>> bool(abs(tail.alpha - 2.5) < 3 * tail.stderr)
        True
    """
    if eigenvalues.size < FEWEST:
        return None
    logs = np.log(eigenvalues) - np.log(eigenvalues[-1])
    alphas = exponents(logs)
    best, distance = _best_start(logs, alphas)
    if best < 0:
        return None
    size = eigenvalues.size - best
    formal = float((alphas[best] - 1) / np.sqrt(size))
    tail = Tail(float(alphas[best]), formal, float(eigenvalues[best]), distance, size, best, formal)
    if not error:
        return tail
    return replace(tail, stderr=start_stderr(eigenvalues, tail), gradual=is_gradual(eigenvalues, tail))


def exponents(logs: FloatArray) -> FloatArray:
    """The maximum-likelihood exponent for each candidate start but the last, from ascending logarithms.

    A candidate whose tail is a single repeated value has no exponent: NaN.
    """
    counts = np.arange(logs.size, 0, -1.0)
    sums = np.cumsum(logs[::-1])[::-1] - counts * logs
    sums, counts = sums[:-1], counts[:-1]
    spread = logs[-1] - logs[:-1]
    usable = spread > 64 * np.finfo(np.float64).eps
    return np.where(usable, 1 + counts / np.where(usable, sums, 1.0), np.nan)


def _best_start(logs: FloatArray, alphas: FloatArray) -> tuple[int, float]:
    """The candidate of least KS distance and that distance, found exactly without trying all pairs.

    The deviation at a few points of each tail bounds its distance from below; candidates are tried in the
    order of that bound until it exceeds the best distance found.
    """
    n = logs.size
    sample = np.arange(alphas.size)[:, None]
    sample = sample + ((n - sample) * _PROBES).astype(np.int64)
    bounds = np.abs(_deviation(logs, alphas, np.arange(alphas.size), sample)).max(axis=1)
    bounds = np.where(np.isnan(bounds), np.inf, bounds)
    order = np.argsort(bounds, kind="stable")
    best, least = -1, np.inf
    start, step = 0, 8
    while start < order.size and bounds[order[start]] <= least and np.isfinite(bounds[order[start]]):
        starts = np.sort(order[start : start + step])
        distances = _distances(logs, alphas, starts)
        k = int(np.argmin(distances))
        if distances[k] < least or (distances[k] == least and starts[k] < best):
            best, least = int(starts[k]), float(distances[k])
        start, step = start + step, min(2 * step, max(_BLOCK // n, 8))
    return best, least


def _distances(logs: FloatArray, alphas: FloatArray, starts: IntArray) -> FloatArray:
    """KS distances of the tails that begin at ``starts`` (ascending indices) from their own fits."""
    columns = np.arange(starts[0], logs.size)[None, :]
    deviation = _deviation(logs, alphas, starts, columns)
    # Left of the diagonal lies no part of the tail.
    distances = np.abs(np.where(columns >= starts[:, None], deviation, 0.0)).max(axis=1)
    return np.where(np.isnan(distances), np.inf, distances)


def _deviation(logs: FloatArray, alphas: FloatArray, i: IntArray, j: IntArray) -> FloatArray:
    """Fitted minus empirical distribution (left limit) at the values ``j`` of the tails that start at ``i``."""
    i = i[:, None]
    fitted = -np.expm1((1 - alphas[i]) * np.maximum(logs[j] - logs[i], 0.0))
    deviation: FloatArray = fitted - (j - i) / (logs.size - i)
    return deviation


def start_stderr(values: FloatArray, tail: Tail) -> float:
    """An upper bound on the standard error of a fitted exponent, with the choice of its start in it.

    Args:
        values: The ascending positive eigenvalues that the tail was fitted to.
        tail: Its fit.

    Examples:
        >>> x = np.sort(np.random.default_rng(0).pareto(1.5, 500) + 1)
        >>> tail = fit_tail(x)
        >>> tail.formal_stderr < start_stderr(x, tail) < 5 * tail.formal_stderr
        True
    """
    alphas = _resampled_exponents(values)
    chance = float(np.sqrt(np.mean((alphas - tail.alpha) ** 2))) if alphas.size else 0.0
    return float(np.hypot(max(chance, tail.formal_stderr), _systematic_error(values[tail.start :], tail)))


def is_gradual(values: FloatArray, tail: Tail) -> bool:
    """Whether the values steepen beyond chance from well below the tail's start on, so that it has no clear start.

    Hill's index of the tail, and of the upper quarter of the values where the tail is no more than that, against the
    index of a generalised Pareto law: three standard errors apart.

    Args:
        values: The ascending positive eigenvalues that the tail was fitted to.
        tail: Its fit.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> sharp, slow = np.sort(rng.pareto(2.0, 1000) + 1), np.sort(rng.pareto(4.0, 1000) ** 2)
        >>> is_gradual(sharp, fit_tail(sharp)), is_gradual(slow, fit_tail(slow))
        (False, True)
    """
    quarter = values.size // _QUARTER
    starts = [tail.start]
    if quarter >= _FEWEST_UPPER and tail.size < 1.5 * quarter:
        starts.append(values.size - quarter)
    for start in starts:
        upper = values[start:] / values[start]
        if upper.size < _FEWEST_UPPER or upper[-1] <= 1:
            continue
        further, error = _pareto_index(upper)
        if float(np.log(upper[1:]).mean()) - further > _STEEPENS * error:
            return True
    return False


def _resampled_exponents(values: FloatArray) -> FloatArray:
    """The exponents of resampled values, each with a start of its own."""
    size = values.size
    logs = np.log(values) - np.log(values[-1])
    weights = _bootstrap_weights(size)
    starts, probes = _start_grid(size)
    counts = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]
    sums = np.cumsum((weights * logs)[:, ::-1], axis=1)[:, ::-1]
    tails = counts[:, starts]
    spread = sums[:, starts] - tails * logs[starts]
    usable = (tails >= _LEAST_TAIL) & (spread > 64 * np.finfo(np.float64).eps * size)
    alphas = 1 + tails / np.where(usable, spread, 1.0)
    fitted = -np.expm1((1 - alphas)[:, :, None] * (logs[probes] - logs[starts][:, None]))
    empirical = 1 - counts[:, probes] / np.where(usable, tails, 1.0)[:, :, None]
    distances = np.where(usable, np.abs(fitted - empirical).max(axis=2), np.inf)
    best = np.argmin(distances, axis=1)
    sample = np.arange(_SAMPLES)
    exponent: FloatArray = alphas[sample, best][np.isfinite(distances[sample, best])]
    return exponent


def _systematic_error(tail_values: FloatArray, tail: Tail) -> float:
    """By how much the exponent may still change beyond the largest eigenvalue."""
    index = 1 / (tail.alpha - 1)
    further, error = _pareto_index(tail_values / tail_values[0])
    least = max(further - _BELOW * error, index / _STEEPEST)
    most = max(further + _ABOVE * error, index)
    return float(max(1 / least - 1 / index, 1 / index - 1 / most, 0.0))


def _pareto_index(upper: FloatArray) -> tuple[float, float]:
    """The index of a generalised Pareto law beyond 1, and the error of its difference from Hill's (Hausman 1978)."""
    further, _ = fit_generalised_pareto(upper[1:] - 1)
    return further, float(np.sqrt((1 + 2 * max(further, 0.0)) / upper.size))


@lru_cache(maxsize=8)
def _bootstrap_weights(size: int) -> FloatArray:
    """How often each value is drawn, once for each number of values: the same for whatever values."""
    rng = np.random.default_rng(size)
    drawn = rng.integers(0, size, (_SAMPLES, size)) + size * np.arange(_SAMPLES)[:, None]
    return np.bincount(drawn.ravel(), minlength=_SAMPLES * size).reshape(_SAMPLES, size).astype(np.float64)


@lru_cache(maxsize=8)
def _start_grid(size: int) -> tuple[IntArray, IntArray]:
    """Starts spaced evenly in the logarithm of the tail's size, and the places where each tail is compared."""
    sizes = np.unique(np.geomspace(min(10, size), size, _STARTS).astype(np.int64))
    starts = size - sizes
    return starts, starts[:, None] + (np.linspace(0, 1, _PLACES) * (sizes - 1)[:, None]).astype(np.int64)


def fit_generalised_pareto(excess: FloatArray) -> tuple[float, float]:
    r"""Maximum-likelihood index ``xi`` and slope ``xi/scale`` of :math:`P(X > x) = (1 + \xi x / s)^{-1/\xi}`.

    The index is the inverse of the exponent of the tail; it is zero for an exponential tail and negative for one that
    ends. The likelihood is profiled over the slope, on a grid, then finer (Grimshaw 1993).

    Args:
        excess: By how much the values exceed the threshold; none negative, not all zero.

    Examples:
        >>> index, slope = fit_generalised_pareto(np.random.default_rng(0).pareto(2.0, 4000))
        >>> round(index, 1), round(slope, 1)
        (0.5, 1.0)
    """
    mean, largest = float(excess.mean()), float(excess.max())
    grid = np.concatenate([-np.linspace(0.98, 0.02, 16) / largest, np.geomspace(1e-3, 30, 24) / mean])
    thin = excess[:: max(excess.size // 4096, 1)]
    index, slope = 0.0, 0.0
    for values in (thin, thin, excess):
        indices = np.log1p(grid[:, None] * values[None, :]).mean(axis=1)
        best = int(np.argmax(-np.log(np.maximum(indices / grid, np.finfo(np.float64).tiny)) - indices))
        index, slope = float(indices[best]), float(grid[best])
        grid = np.linspace(grid[max(best - 1, 0)], grid[min(best + 1, grid.size - 1)], 9)[1:-1]
        grid = grid[np.abs(grid) > 1e-9 / mean]
    return index, slope


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
    """The sizes of the entries of one or more matrices of one layer, added one matrix at a time.

    Entries of large matrices are sorted only if their largest is more than Gaussian entries would show: the
    largest of ``n`` Pareto entries with ``mu < 5`` is far beyond, and it costs next to nothing to find.
    """

    def __init__(self) -> None:
        self._sizes: list[FloatArray] = []
        self._largest: list[_Largest] = []

    def add(self, matrix: NDArray[Any]) -> None:
        """Add one matrix of finite weights."""
        if matrix.size == 0:
            return
        plain = matrix if matrix.dtype in (np.float32, np.float64) else matrix.astype(np.float32)
        largest = max(float(plain.max()), -float(plain.min()))
        self._keep_largest(plain, largest)
        if plain.size > _QUANTILES:
            flat = plain.ravel(order="K")
            with np.errstate(over="ignore", under="ignore"):
                scale = float(np.sqrt(np.dot(flat, flat) / flat.size))
            if not 1e-15 < scale < 1e15:  # squares may have left float32's range
                scale = float(np.sqrt(np.mean(np.square(flat, dtype=np.float64))))
            if not largest > scale * np.sqrt(2 * np.log(flat.size / 1e-3)):
                return
        self._sizes.append(_thinned(np.abs(plain).ravel(order="K")))

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
        """The tail of the entries of all matrices."""
        sizes = np.sort(np.concatenate(self._sizes)) if self._sizes else np.empty(0)
        return (
            _fit_entries(_thinned(sizes))
            if sizes.size >= _FEWEST_ENTRIES
            else EntryTail(False, float("nan"), 0)
        )


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


def _fit_entries(sizes: FloatArray) -> EntryTail:
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
    if sizes.size > _QUANTILES:
        sizes = sizes[((np.arange(_QUANTILES) + 0.5) * (sizes.size / _QUANTILES)).astype(np.int64)]
    return sizes.astype(np.float64)
