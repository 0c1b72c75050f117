r"""The Marchenko-Pastur law, and the random part of a spectrum: its bulk, spikes and quasi-null directions.

For an ``N x M`` matrix of i.i.d. entries of variance :math:`\sigma^2`, ``Q = N/M >= 1``, the eigenvalues of
:math:`W^T W / N` have, as the matrix grows, the density

.. math:: \rho(x) = \frac{Q}{2\pi\sigma^2}\,\frac{\sqrt{(x_+ - x)(x - x_-)}}{x},
          \qquad x_\pm = \sigma^2 (1 \pm 1/\sqrt Q)^2 .

**The fit.** :math:`\sigma` is not taken from the largest eigenvalue, which one spike ruins, nor from the sum, which a
tail ruins, but by matching the middle of the spectrum: the mean of the eigenvalues between two ranks against the mean
of the law's quantiles at the same ranks. What lies beyond the Tracy-Widom edge is set aside as spikes, the ranks are
counted anew among the others, and the match is repeated until nothing changes. For pure noise the estimate is good to
about ``1/M`` (eigenvalues repel, so their mean hardly fluctuates).

**Quasi-null directions** are far weaker than noise of the same strength would leave. For tall matrices
(``N - M >= 30``), :math:`\lambda_\min / \sigma^2 \approx \mu_- - s_-\,\mathrm{TW}_1` with
:math:`\mu_- = (\sqrt{N-1/2} - \sqrt{M-1/2})^2`; what lies below the level of one matrix in a thousand is quasi-null.
For square or nearly square matrices the lower edge touches zero ("hard edge") and small eigenvalues are natural: for
``N = M``, :math:`P(N \lambda_\min / \sigma^2 < x) = 1 - e^{-x/2 - \sqrt x}` (Edelman 1988). There the k-th smallest
eigenvalue is compared with the k-th smallest of noise: :math:`\sqrt{(M + \nu/2)\,\lambda_k}/\sigma` has a law that
depends on ``k`` and :math:`\nu = N - M` only. Its quantiles (one in a hundred for ``k = 1``, two in ten thousand
beyond) are tabulated from 20,000 draws of the bidiagonal model each. The smallest eigenvalues are set aside one by one
until the others pass at every rank, and on to the next wide gap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from strati.spectra.eigenvalues import widest_gap
from strati.spectra.noise_edges import lower_edge, upper_edge

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from strati.core.results import FloatArray
    from strati.spectra.eigenvalues import Eigenvalues

_GRID = 2049
_CELL = np.pi / (_GRID - 1)
_LOW, _HIGH = 0.10, 0.80  # ranks between which the law is matched
_ROUNDS = 30
_FEWEST = 10
_HARD = 30
_NULL_LEVEL = 0.001
_RATIO = 0.6  # beyond the table: this share of where the law puts rank k
_WIDE = 3.0  # a gap (ratio of neighbours) that noise shows at the first ranks only
_EXCESS = (0, 1, 2, 4, 7, 12, 20, 30)
# Row per N - M, column per rank k = 1..12: quantile of sqrt((M + (N - M)/2) lambda_k)/sigma.
_QUANTILES = np.array(
    [
        [0.0100, 0.23, 1.07, 2.30, 3.82, 5.16, 6.51, 8.13, 9.56, 11.01, 12.55, 14.35],
        [0.1418, 0.58, 1.77, 2.92, 4.45, 5.79, 7.39, 8.90, 10.11, 11.78, 13.45, 15.07],
        [0.4003, 0.98, 2.33, 3.51, 5.04, 6.66, 8.06, 9.47, 11.01, 12.65, 14.22, 15.80],
        [1.0776, 1.88, 3.28, 4.86, 6.36, 7.80, 9.64, 11.00, 12.27, 14.09, 15.80, 17.49],
        [2.2388, 3.07, 5.03, 6.73, 8.21, 10.07, 11.26, 13.12, 14.72, 16.28, 17.80, 19.35],
        [4.4560, 5.87, 7.86, 9.62, 11.25, 13.17, 14.66, 16.21, 17.94, 19.63, 21.30, 22.88],
        [8.0837, 9.56, 12.04, 14.09, 16.11, 17.62, 19.64, 21.24, 22.98, 25.13, 26.92, 28.62],
        [12.8578, 14.34, 17.27, 19.77, 22.03, 23.74, 25.87, 27.63, 29.67, 31.20, 33.48, 34.96],
    ]
)


def edges(q: float, sigma: float = 1.0) -> tuple[float, float]:
    """The ends ``x_minus, x_plus`` of the law's support.

    Examples:
        >>> edges(4.0)
        (0.25, 2.25)
    """
    root = 1 / np.sqrt(q)
    return float((sigma * (1 - root)) ** 2), float((sigma * (1 + root)) ** 2)


def pdf(x: ArrayLike, q: float, sigma: float = 1.0) -> FloatArray:
    """The law's density at ``x``; zero outside its support.

    Examples:
        >>> pdf([0.1, 1.0, 3.0], 4.0).round(4).tolist()
        [0.0, 0.6164, 0.0]
    """
    x = np.asarray(x, dtype=np.float64)
    low, high = edges(q, sigma)
    inside = (x > low) & (x < high)
    safe = np.where(inside, x, high)
    density = q / (2 * np.pi * sigma**2) * np.sqrt(np.maximum((high - safe) * (safe - low), 0)) / safe
    return np.where(inside, density, 0.0)


def cdf(x: ArrayLike, q: float, sigma: float = 1.0) -> FloatArray:
    """The share of eigenvalues below ``x``, in closed form.

    Examples:
        >>> cdf([0.25, 1.0, 2.25], 4.0).round(4).tolist()
        [0.0, 0.5534, 1.0]
    """
    c = 1 / q
    low, high = edges(q)
    x = np.clip(np.asarray(x, dtype=np.float64) / sigma**2, low, high)
    above, below = np.sqrt(x - low), np.sqrt(high - x)
    # Primitive of sqrt((b - x)(x - a))/x: three terms, with (a + b)/2 = 1 + c and sqrt(ab) = 1 - c. The arc
    # sines are written as arc tangents of half the angle, which lose nothing at the edges.
    first = above * below
    second = 2 * (1 + c) * np.arctan2(above, below)
    third = 2 * (1 - c) * np.arctan2(np.sqrt(high) * above, np.sqrt(low) * below)
    share: FloatArray = np.clip((first + second - third) / (2 * np.pi * c), 0, 1)
    return share


def ppf(p: ArrayLike, q: float, sigma: float = 1.0) -> FloatArray:
    """The quantile of share ``p``: the inverse of :func:`cdf`.

    Examples:
        >>> ppf([0.0, 0.5, 1.0], 4.0).round(4).tolist()
        [0.25, 0.916, 2.25]
    """
    p = np.clip(np.asarray(p, dtype=np.float64), 0, 1)
    start = angle(p, q)
    theta = start
    low, high = edges(q)
    # Newton steps in the angle, where the law is smooth up to both edges; the table is right to one cell.
    for _ in range(2):
        x = 1 + 1 / q - (high - low) / 2 * np.cos(theta)
        slope = pdf(x, q) * (high - low) / 2 * np.sin(theta)
        step = np.where(slope > 0, (cdf(x, q) - p) / np.where(slope > 0, slope, 1.0), 0.0)
        theta = np.clip(theta - step, np.maximum(start - _CELL, 0), np.minimum(start + _CELL, np.pi))
    quantile: FloatArray = np.clip(1 + 1 / q - (high - low) / 2 * np.cos(theta), low, high) * sigma**2
    return quantile


def angle(p: ArrayLike, q: float) -> FloatArray:
    """Where the quantile of share ``p`` lies on the half circle over the support, from 0 to pi (to 1e-6 or so).

    Examples:
        >>> angle([0.0, 1.0], 4.0).round(4).tolist()
        [0.0, 3.1416]
    """
    angles, shares = _table(q)
    place: FloatArray = np.interp(np.clip(np.asarray(p, dtype=np.float64), 0, 1), shares, angles)
    return place


@lru_cache(maxsize=64)
def _table(q: float) -> tuple[FloatArray, FloatArray]:
    """Angles from 0 to pi across the support, and the law's distribution at them."""
    low, high = edges(q)
    angles = np.linspace(0, np.pi, _GRID)
    shares = cdf(1 + 1 / q - (high - low) / 2 * np.cos(angles), q)
    return angles, np.maximum.accumulate(shares)


@dataclass(frozen=True)
class Bulk:
    """A fitted Marchenko-Pastur bulk, on the eigenvalues' own (unnormalised) scale.

    Attributes:
        sigma: Standard deviation of the entries of the random part.
        lambda_minus: Lower edge of the law, ``N sigma^2 (1 - 1/sqrt(Q))^2``.
        lambda_plus: Upper edge, ``N sigma^2 (1 + 1/sqrt(Q))^2``.
        edge: What the largest eigenvalue of pure noise exceeds with probability ``level``.
        spikes: Number of eigenvalues above ``edge``.
        level: The Tracy-Widom level of ``edge``.
        ks_distance: Kolmogorov-Smirnov distance of the law from the eigenvalues that are no spikes.
        size: Number of those.
        capped: Half of the eigenvalues or more lie beyond the edge; ``spikes`` stops at half.
        matrices: Number of matrices whose eigenvalues are pooled.
    """

    sigma: float
    lambda_minus: float
    lambda_plus: float
    edge: float
    spikes: int
    level: float
    ks_distance: float
    size: int
    capped: bool = False
    matrices: int = 1

    @property
    def noise_limit(self) -> float:
        """The KS distance that the bulk of pure noise stays below in 999 of 1000 draws."""
        return noise_limit(self.size, self.matrices)


def fit_bulk(
    eigenvalues: FloatArray, rows: int, columns: int, *, matrices: int = 1, level: float = 0.01
) -> Bulk | None:
    """Fit the Marchenko-Pastur law to ascending eigenvalues of ``W.T @ W``.

    Args:
        eigenvalues: Ascending, without null directions (zero to working precision, or below a gap of many
            decades).
        rows: The longer side of the matrix.
        columns: The shorter side of the matrix, or how many of its directions are not null.
        matrices: How many matrices were pooled.
        level: Chance that the largest eigenvalue of pure noise passes for a spike.

    Returns:
        The fit, or ``None`` for fewer than ten eigenvalues.

    Examples:
        >>> W = np.random.default_rng(0).normal(scale=0.1, size=(400, 100))
        >>> W[:, 0] += 3.0
        >>> bulk = fit_bulk(np.linalg.svd(W, compute_uv=False)[::-1] ** 2, 400, 100)
        >>> round(bulk.sigma, 3), bulk.spikes
        (0.1, 1)
    """
    total = eigenvalues.size
    if total < _FEWEST or eigenvalues[-1] <= 0:
        return None
    noise_edge = upper_edge(rows, columns, level=level, matrices=matrices)
    variance = _match_variance(eigenvalues[: total - total // 4], total, rows, columns)
    beyond = spikes = 0
    tried: set[int] = set()
    for _ in range(_ROUNDS):
        beyond = int(total - np.searchsorted(eigenvalues, noise_edge * variance, side="right"))
        spikes = min(beyond, total // 2)
        if spikes in tried:
            break
        tried.add(spikes)
        share = spikes / matrices  # spikes take a direction on both sides of each matrix
        size = total - spikes
        variance = _match_variance(eigenvalues[:size], size, rows - share, columns - share)
    if variance <= 0:  # the middle of the spectrum is null
        return None
    sigma = float(np.sqrt(variance))
    low, high = edges(rows / columns, sigma)
    share = spikes / matrices
    return Bulk(
        sigma=sigma,
        lambda_minus=rows * low,
        lambda_plus=rows * high,
        edge=noise_edge * variance,
        spikes=spikes,
        level=level,
        ks_distance=_ks_distance(eigenvalues[: total - spikes], rows - share, columns - share, sigma),
        size=total - spikes,
        capped=beyond > total // 2,
        matrices=matrices,
    )


def fit_random_part(eigenvalues: Eigenvalues, *, level: float = 0.01) -> Bulk | None:
    """Fit the bulk of a matrix or of pooled slices, without what lies below the gap of a collapsed rank."""
    gap = widest_gap(eigenvalues)
    count, rows, columns = eigenvalues.matrices, eigenvalues.rows, eigenvalues.columns
    if not gap.collapsed:
        return fit_bulk(eigenvalues.values, rows, columns, matrices=count, level=level)
    above = max(round(gap.above / count), 1)
    filled = max(rows - eigenvalues.empty[0], above)  # zero rows add nothing to the noise
    return fit_bulk(eigenvalues.values[gap.below :], filled, above, matrices=count, level=level)


def fit_without_nulls(eigenvalues: Eigenvalues, bulk: Bulk, nulls: int) -> Bulk:
    """Fit the bulk anew without ``nulls`` quasi-null directions, which are no part of the noise.

    The edges of the law stay those of the whole shape.
    """
    rows, count = eigenvalues.rows, eigenvalues.matrices
    columns = eigenvalues.columns - round(nulls / count)
    refit = fit_bulk(eigenvalues.values[nulls:], rows, columns, matrices=count, level=bulk.level)
    if refit is None:
        return bulk
    low, high = edges(eigenvalues.aspect, refit.sigma)
    return replace(refit, lambda_minus=rows * low, lambda_plus=rows * high)


def noise_limit(size: int, matrices: int = 1) -> float:
    """The KS distance that the bulk of pure noise stays below in 999 of 1000 draws.

    Eigenvalues repel each other, so the distance falls almost as ``1/size`` (calibrated on Gaussian and
    uniform noise of 20 to 1000 columns, aspects from 1 to 20); pooled matrices are independent.

    Examples:
        >>> round(noise_limit(500), 4)
        0.0089
    """
    columns = max(size / matrices, 1.0)
    return float((2.45 + 0.32 * np.log(columns)) * np.sqrt(matrices) / size)


def _match_variance(values: FloatArray, total: int, rows: float, columns: float) -> float:
    """The variance that makes the middle of the law agree with the middle of ``total`` ranked values.

    Of a real Gaussian matrix the expected number of eigenvalues below ``x`` is ``M F(x) + 1/4 - A(x)/2`` up to
    higher orders, ``A`` being the arcsine law on the support; without that the variance comes out low by about
    ``1/(2M)``, which matters at the Tracy-Widom edge of small matrices.
    """
    q = max(rows / columns, 1.0)
    low, high = int(_LOW * total), min(max(int(_HIGH * total), int(_LOW * total) + 1), values.size)
    places = (np.arange(low, high) + 0.5) / total
    places += (angle(places, q) / (2 * np.pi) - 0.25) / columns
    return float(values[low:high].sum() / (rows * ppf(places, q).sum()))


def _ks_distance(values: FloatArray, rows: float, columns: float, sigma: float) -> float:
    expected = cdf(values / rows, max(rows / columns, 1.0), sigma)
    places = np.arange(values.size + 1) / values.size
    return float(max(np.abs(expected - places[:-1]).max(), np.abs(expected - places[1:]).max()))


def quasi_null(values: FloatArray, rows: int, columns: int, sigma: float, *, matrices: int = 1) -> int:
    """Count the quasi-null eigenvalues of one matrix.

    Args:
        values: All eigenvalues of ``W.T @ W`` of one matrix, ascending.
        rows: The longer side ``N``.
        columns: The shorter side ``M``.
        sigma: Standard deviation of the entries of the random part.
        matrices: Number of matrices (the slices of a convolution) that share the level.

    Returns:
        The number of eigenvalues that noise of that strength would not leave so small.

    Examples:
        >>> W = np.random.default_rng(1).normal(size=(200, 100))
        >>> U, s, V = np.linalg.svd(W, full_matrices=False)
        >>> quasi_null(s[::-1] ** 2, 200, 100, 1.0)
        0
        >>> s[-3:] *= 0.01
        >>> quasi_null(s[::-1] ** 2, 200, 100, 1.0)
        3
    """
    if sigma <= 0 or values.size == 0:
        return 0
    scaled = values / sigma**2
    if rows - columns >= _HARD:
        edge = lower_edge(rows, columns, level=_NULL_LEVEL / matrices)
        return int(np.searchsorted(scaled, edge, side="left"))
    return _quasi_null_at_hard_edge(scaled, rows, columns, matrices)


def _quasi_null_at_hard_edge(scaled: FloatArray, rows: int, columns: int, matrices: int) -> int:
    ranks = np.arange(1, columns // 2 + 1)
    excess = rows - columns
    table = np.array([np.interp(excess, _EXCESS, column) for column in _QUANTILES.T])
    # P(lambda_k < x) falls as x^(k (k + nu)/2), so quantiles of other levels follow from those in the table. One
    # matrix in a hundred is too many where a matrix has few eigenvalues, and where there are many slices.
    order = np.arange(1, table.size + 1)
    table *= (1 / matrices) ** (1 / (order * (order + excess)))
    table[0] *= min(1.0, columns / 50) ** (1 / (excess + 1))
    near = min(table.size, ranks.size)
    near_limits = table[:near] ** 2 / (columns + excess / 2)
    lowest = scaled[: ranks.size]
    if np.all(lowest[:near] >= near_limits):
        return 0
    far_limits = _RATIO * rows * ppf((ranks[near:] - 0.5) / columns, rows / columns)
    limits = np.concatenate([near_limits, far_limits])
    count = 0  # the fewest that must go for the others to pass as noise
    while count < lowest.size and np.any(lowest[count:] < limits[: lowest.size - count]):
        count += 1
    if count in (0, lowest.size):
        return count
    # What is set aside ends at a wide gap: a last one that alone would pass as noise's smallest goes with it.
    ahead = scaled[count - 1 : 2 * count + 1]
    wide = np.flatnonzero(ahead[1:] >= _WIDE * ahead[:-1])
    return count + int(wide[0]) if wide.size else count
