r"""The power-law tail of a spectrum: :math:`p(\lambda) \sim \lambda^{-\alpha}` for :math:`\lambda \ge x_\min`.

Continuous maximum likelihood with the :math:`x_\min` of least Kolmogorov-Smirnov distance (Clauset, Shalizi
and Newman 2009). Every eigenvalue is a candidate: the exponents of all of them come from one cumulative sum
of logarithms, and a lower bound on each distance leaves few to be worked out in full. As in the field's
reference tool the distance uses the left limits ``k/n`` of the empirical distribution. What the tail is
compared with lives in :mod:`strati.spectra.alternatives`.

The error is an upper bound. The formula :math:`(\alpha - 1)/\sqrt n` takes :math:`x_\min` as known, which it is not.
Three parts, of which the first two come from one bootstrap, all of it vectorised:

* the eigenvalues are resampled, the start is chosen anew by the least Kolmogorov-Smirnov distance (over starts spaced
  evenly in the logarithm of the tail's size), and the exponents' root mean square distance from ``alpha`` is taken;
* never less than the formula's error;
* a power law that is still steepening at :math:`x_\min` follows a generalised Pareto law there, of which the pure power
  law is a case; where that law's index, less its standard error, is smaller than :math:`1/(\alpha - 1)`, the two
  exponents' difference is added in quadrature, as a systematic error (up to one and a half times
  ``alpha - 1``); likewise where the index, and half its standard error, is larger.

How often ``alpha +- 1.96 stderr`` covers the true exponent: ``python tools/calibrate_spectra.py coverage``. Laws that
steepen more slowly than a generalised Pareto law are not covered; where the upper quarter of the values shows one
(:func:`is_gradual`), a warning says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from strati.spectra.generalised_pareto import fit as fit_generalised_pareto

if TYPE_CHECKING:
    from strati.core.results import FloatArray, IntArray

FEWEST = 10
"""Fewer eigenvalues than this are not fitted at all."""

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
    best, distance = _least(logs, alphas)
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


def _least(logs: FloatArray, alphas: FloatArray) -> tuple[int, float]:
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
        some = np.sort(order[start : start + step])
        distances = _distances(logs, alphas, some)
        k = int(np.argmin(distances))
        if distances[k] < least or (distances[k] == least and some[k] < best):
            best, least = int(some[k]), float(distances[k])
        start, step = start + step, min(2 * step, max(_BLOCK // n, 8))
    return best, least


def _distances(logs: FloatArray, alphas: FloatArray, some: IntArray) -> FloatArray:
    """KS distances of the tails that start at ``some`` (ascending indices) from their own fits."""
    columns = np.arange(some[0], logs.size)[None, :]
    deviation = _deviation(logs, alphas, some, columns)
    # Left of the diagonal lies no part of the tail.
    distances = np.abs(np.where(columns >= some[:, None], deviation, 0.0)).max(axis=1)
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
    again = _resampled(values)
    chance = float(np.sqrt(np.mean((again - tail.alpha) ** 2))) if again.size else 0.0
    return float(np.hypot(max(chance, tail.formal_stderr), _gradual(values[tail.start :], tail)))


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
        further, error = _index(upper)
        if float(np.log(upper[1:]).mean()) - further > _STEEPENS * error:
            return True
    return False


def _resampled(values: FloatArray) -> FloatArray:
    """The exponents of resampled values, each with a start of its own."""
    size = values.size
    logs = np.log(values) - np.log(values[-1])
    weights = _weights(size)
    starts, probes = _grid(size)
    counts = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]
    sums = np.cumsum((weights * logs)[:, ::-1], axis=1)[:, ::-1]
    tails = counts[:, starts]
    spread = sums[:, starts] - tails * logs[starts]
    usable = (tails >= _LEAST_TAIL) & (spread > 64 * np.finfo(np.float64).eps * size)
    alphas = 1 + tails / np.where(usable, spread, 1.0)
    fitted = -np.expm1((1 - alphas)[:, :, None] * (logs[probes] - logs[starts][:, None]))
    seen = 1 - counts[:, probes] / np.where(usable, tails, 1.0)[:, :, None]
    distances = np.where(usable, np.abs(fitted - seen).max(axis=2), np.inf)
    best = np.argmin(distances, axis=1)
    sample = np.arange(_SAMPLES)
    exponent: FloatArray = alphas[sample, best][np.isfinite(distances[sample, best])]
    return exponent


def _gradual(tail_values: FloatArray, tail: Tail) -> float:
    """By how much the exponent may still change beyond the tail that was seen."""
    index = 1 / (tail.alpha - 1)
    further, error = _index(tail_values / tail_values[0])
    least = max(further - _BELOW * error, index / _STEEPEST)
    most = max(further + _ABOVE * error, index)
    return float(max(1 / least - 1 / index, 1 / index - 1 / most, 0.0))


def _index(upper: FloatArray) -> tuple[float, float]:
    """The index of a generalised Pareto law beyond 1, and the error of its difference from Hill's (Hausman 1978)."""
    further, _ = fit_generalised_pareto(upper[1:] - 1)
    return further, float(np.sqrt((1 + 2 * max(further, 0.0)) / upper.size))


@lru_cache(maxsize=8)
def _weights(size: int) -> FloatArray:
    """How often each value is drawn, once for each number of values: the same for whatever values."""
    rng = np.random.default_rng(size)
    drawn = rng.integers(0, size, (_SAMPLES, size)) + size * np.arange(_SAMPLES)[:, None]
    return np.bincount(drawn.ravel(), minlength=_SAMPLES * size).reshape(_SAMPLES, size).astype(np.float64)


@lru_cache(maxsize=8)
def _grid(size: int) -> tuple[IntArray, IntArray]:
    """Starts spaced evenly in the logarithm of the tail's size, and the places where each tail is compared."""
    sizes = np.unique(np.geomspace(min(10, size), size, _STARTS).astype(np.int64))
    starts = size - sizes
    return starts, starts[:, None] + (np.linspace(0, 1, _PLACES) * (sizes - 1)[:, None]).astype(np.int64)
