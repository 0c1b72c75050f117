r"""The power-law tail of a spectrum: :math:`p(\lambda) \sim \lambda^{-\alpha}` for :math:`\lambda \ge x_\min`.

Continuous maximum likelihood with the :math:`x_\min` of least Kolmogorov-Smirnov distance (Clauset, Shalizi
and Newman 2009). Every eigenvalue is a candidate: the exponents of all of them come from one cumulative sum
of logarithms, and a lower bound on each distance leaves few to be worked out in full. As in the field's
reference tool the distance uses the left limits ``k/n`` of the empirical distribution. What the tail is
compared with lives in :mod:`strati.spectra.alternatives`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from strati.spectra.tail_error import is_gradual, start_stderr

if TYPE_CHECKING:
    from strati.types import FloatArray, IntArray

FEWEST = 10
"""Fewer eigenvalues than this are not fitted at all."""

_BLOCK = 1 << 17  # elements of one block of pairs: fits the second-level cache
_PROBES = np.array(
    [[0.02, 0.06, 0.1, 0.15, 0.2, 0.27, 0.34, 0.42, 0.5, 0.58, 0.66, 0.74, 0.82, 0.9, 0.96, 0.9999]]
)


@dataclass(frozen=True)
class Tail:
    """A fitted tail.

    Attributes:
        alpha: The exponent.
        stderr: Its standard error, the choice of ``xmin`` and a gradual start included
            (:mod:`strati.spectra.tail_error`).
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
