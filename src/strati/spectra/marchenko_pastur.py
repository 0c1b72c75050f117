r"""The laws of noise: the Marchenko-Pastur bulk, the Tracy-Widom edge, spikes and quasi-null directions.

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

**The largest eigenvalue** of independent entries of one variance follows the Tracy-Widom law (beta = 1). Its
distribution is a Fredholm determinant (Ferrari and Spohn 2005),

.. math:: F_1(s) = \det(1 - K_s), \qquad K(x, y) = \tfrac12 \mathrm{Ai}\!\left(\tfrac{x+y}{2}\right)
          \text{ on } L^2(s, \infty),

evaluated with Gauss-Legendre nodes (Bornemann 2010), which converges exponentially: 24 nodes up to s = 12 give the
quantiles to better than 1e-6. Centring and scaling for a real ``N x M`` matrix are Johnstone's (2001), with the
half-integer correction of Ma (2012).

**Rows and columns of unequal size, or correlated.** For :math:`W = A^{1/2} Z B^{1/2}` with independent entries in ``Z``
and population eigenvalues :math:`a_i` (rows), :math:`b_j` (columns), the resolvent of :math:`W^T W` follows from two
scalars (Paul and Silverstein 2009),

.. math:: T = \sum_i \frac{a_i}{1 + a_i s}, \qquad s = \sum_j \frac{b_j}{b_j T - z} .

Outside the spectrum ``s`` is real. For ``s`` in :math:`(-1/a_\max, 0)` the least ``z`` is the upper edge, and its
curvature there gives the scale of the Tracy-Widom law (El Karoui 2007); for positive ``s`` the largest ``z`` is the
lower edge. Independent entries with a fourth cumulant :math:`\kappa_4` are, to first order, a case of this: their
rows differ in size by :math:`\kappa_4 / M` more than Gaussian ones, their columns by :math:`\kappa_4 / N`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from strati.core.errors import BadInputError
from strati.spectra.eigenvalues import widest_gap

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from strati.core.results import FloatArray
    from strati.spectra.eigenvalues import Eigenvalues

TRACY_WIDOM_MEAN, TRACY_WIDOM_VARIANCE = -1.2065335745820, 1.6077810345810
_NODES, _END = 24, 12.0
_ATOMS, _SINGLE = 160, 32  # population eigenvalues of separable noise; the largest of them singly
_EDGE_GRID, _EDGE_ROUNDS = 32, 5
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


def tracy_widom_cdf(s: float) -> float:
    """Probability that a Tracy-Widom (beta = 1) variable is at most ``s``.

    Examples:
        >>> round(tracy_widom_cdf(0.9793), 4)
        0.95
    """
    from scipy.special import airy

    if s >= _END:
        return 1.0
    if s < -12:  # below 1e-30
        return 0.0
    nodes, weights = _legendre()
    x = s + (nodes + 1) / 2 * (_END - s)
    root = np.sqrt(weights * (_END - s) / 2)
    kernel = airy((x[:, None] + x[None, :]) / 2)[0] / 2
    share = np.linalg.det(np.eye(_NODES) - root[:, None] * kernel * root[None, :])
    return float(min(max(share, 0.0), 1.0))


@lru_cache(maxsize=64)
def tracy_widom_quantile(p: float) -> float:
    """The value below which a Tracy-Widom (beta = 1) variable falls with probability ``p``.

    Examples:
        >>> round(tracy_widom_quantile(0.99), 4)
        2.0234

    Raises:
        BadInputError: ``p`` is not strictly between 0 and 1.
    """
    from scipy.optimize import brentq

    if not 0 < p < 1:
        raise BadInputError("Tracy-Widom level", "a probability lies strictly between 0 and 1")
    return float(brentq(lambda s: tracy_widom_cdf(s) - p, -11.0, 11.5, xtol=1e-9))


@lru_cache(maxsize=1)
def _legendre() -> tuple[FloatArray, FloatArray]:
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return nodes, weights


def centre_and_scale(rows: int, columns: int) -> tuple[float, float]:
    r"""Centre and scale of the largest eigenvalue of :math:`W^T W` for unit-variance noise.

    ``(lambda_max / sigma**2 - centre) / scale`` follows the Tracy-Widom law:

    .. math:: \mu = (\sqrt{N-\tfrac12} + \sqrt{M-\tfrac12})^2, \quad
              s = (\sqrt{N-\tfrac12} + \sqrt{M-\tfrac12})
                  \left(\tfrac{1}{\sqrt{N-1/2}} + \tfrac{1}{\sqrt{M-1/2}}\right)^{1/3}

    Examples:
        >>> tuple(round(v, 3) for v in centre_and_scale(100, 25))
        (222.747, 10.016)
    """
    n, m = np.sqrt(rows - 0.5), np.sqrt(columns - 0.5)
    return float((n + m) ** 2), float((n + m) * (1 / n + 1 / m) ** (1 / 3))


def upper_edge(rows: int, columns: int, *, level: float = 0.01, matrices: int = 1) -> float:
    """What the largest eigenvalue of unit-variance noise exceeds with probability ``level``.

    Args:
        rows: Rows of the matrix.
        columns: Columns of the matrix.
        level: Chance that pure noise exceeds the edge.
        matrices: Independent matrices whose eigenvalues are pooled (the slices of a convolution); the
            level is that of the largest eigenvalue of them all.
    """
    centre, scale = centre_and_scale(rows, columns)
    return centre + scale * tracy_widom_quantile(float((1 - level) ** (1 / matrices)))


def lower_edge(rows: int, columns: int, *, level: float, matrices: int = 1) -> float:
    """What the smallest eigenvalue of unit-variance noise falls below with probability ``level`` (tall matrices)."""
    n, m = np.sqrt(rows - 0.5), np.sqrt(columns - 0.5)
    centre, scale = (n - m) ** 2, (n - m) * (1 / m - 1 / n) ** (1 / 3)
    return float(max(centre - scale * tracy_widom_quantile(1 - level / matrices), 0.1 * centre))


@dataclass(frozen=True)
class SeparableNoise:
    """Noise ``A^(1/2) Z B^(1/2)``, by the population eigenvalues of its rows and columns.

    Attributes:
        rows: Eigenvalues of the rows; their mean is the variance of an entry.
        row_counts: How many eigenvalues each of them stands for.
        columns: Eigenvalues of the columns; their mean is 1.
        column_counts: Likewise.
    """

    rows: FloatArray
    row_counts: FloatArray
    columns: FloatArray
    column_counts: FloatArray

    @classmethod
    def from_sizes(cls, rows: FloatArray, columns: FloatArray) -> SeparableNoise:
        """Noise whose rows and columns have these squared norms.

        Args:
            rows: One value per row, not all zero; their sum is that of the eigenvalues.
            columns: One value per column; only their proportions matter.

        Examples:
            >>> noise = SeparableNoise.from_sizes(np.full(4, 6.0), np.full(3, 8.0))
            >>> noise.rows.tolist(), noise.columns.tolist()
            ([2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
        """
        return cls(*_atoms(rows / columns.size), *_atoms(columns / columns.mean()))

    @property
    def variance(self) -> float:
        """The mean variance of an entry."""
        return float(np.sum(self.rows * self.row_counts) / self.row_counts.sum())

    def equal(self) -> SeparableNoise:
        """Noise of the same shape and variance whose rows and columns have one size each."""
        n, m = np.array([self.row_counts.sum()]), np.array([self.column_counts.sum()])
        return SeparableNoise(np.array([self.variance]), n, np.ones(1), m)

    def upper_edge(self) -> tuple[float, float]:
        """Where the spectrum of ``W.T @ W`` ends, and the scale of the largest eigenvalue's fluctuation there.

        Examples:
            >>> edge, scale = SeparableNoise.from_sizes(np.full(400, 100.0), np.ones(100)).upper_edge()
            >>> round(edge, 6), round(scale, 2)  # (sqrt(400) + sqrt(100))^2, and Johnstone's scale
            (900.0, 15.94)
        """
        top = float(self.rows.max())
        low, high = -1 / top * (1 - 1e-9), -1e-6 / top
        best = low
        for _ in range(_EDGE_ROUNDS):  # each grid looks closer around the least value of the one before
            grid = np.linspace(low, high, _EDGE_GRID + 1)
            k = int(np.argmin(self._outside(grid, above=True)))
            best, low, high = float(grid[k]), float(grid[max(k - 1, 0)]), float(grid[min(k + 1, _EDGE_GRID)])
        step = 1e-3 * min(-best, best + 1 / top)
        around = self._outside(np.array([best - step, best, best + step]), above=True)
        curvature = max(float(around[0] - 2 * around[1] + around[2]) / step**2, np.finfo(np.float64).tiny)
        edge = float(around[1])
        damped = self.rows / (1 + self.rows * best)
        total, slope = float(np.sum(self.row_counts * damped)), float(np.sum(self.row_counts * damped**2))
        b = self.columns
        density = float(np.sum(self.column_counts * b / (b * total - edge) ** 2)) * slope
        return edge, float((curvature / 2) ** (1 / 3) * density ** (-2 / 3))

    def lower_edge(self) -> float:
        """Where the spectrum of ``W.T @ W`` begins; zero where null directions belong to it.

        Examples:
            >>> noise = SeparableNoise.from_sizes(np.full(400, 100.0), np.ones(100))
            >>> round(noise.lower_edge(), 4)  # (sqrt(400) - sqrt(100))^2
            100.0
        """
        live = self.rows > 1e-12 * self.rows.max()
        if self.columns.min() <= 0 or self.row_counts[live].sum() <= self.column_counts.sum():
            return 0.0
        low, high = -9.0, 9.0  # log10 of s times the entries' variance times the columns
        for _ in range(_EDGE_ROUNDS):
            grid = np.linspace(low, high, _EDGE_GRID + 1)
            z = self._outside(10**grid / (self.variance * self.column_counts.sum()), above=False)
            k = int(np.argmax(z))
            low, high = float(grid[max(k - 1, 0)]), float(grid[min(k + 1, _EDGE_GRID)])
        return max(float(z[k]), 0.0)

    def widening(self, *, level: float, matrices: int = 1) -> float:
        """How much further the Tracy-Widom edge lies than that of equal rows and columns with the same total.

        A ratio, so that what is known of finite sizes for equal variances carries over.

        Examples:
            >>> rows = np.repeat([100.0, 400.0], 100)
            >>> 1.1 < SeparableNoise.from_sizes(rows, np.ones(100)).widening(level=0.01) < 1.5
            True
        """
        far = tracy_widom_quantile(float((1 - level) ** (1 / matrices)))
        (edge, scale), (plain, width) = self.upper_edge(), self.equal().upper_edge()
        return max(float((edge + far * scale) / (plain + far * width)), 1.0)

    def narrowing(self) -> float:
        """How much lower the spectrum begins than that of equal rows and columns with the same total.

        Nearly square matrices have no lower edge; there the smallest eigenvalues scale with the harmonic means. There
        must be as many rows as columns, or more.
        """
        n, m = float(self.row_counts.sum()), float(self.column_counts.sum())
        if m < 0.8 * n:
            return min(self.lower_edge() / self.equal().lower_edge(), 1.0)
        if self.rows.min() <= 0 or self.columns.min() <= 0:
            return 0.0
        harmonic = 1.0
        for values, counts in ((self.rows, self.row_counts), (self.columns, self.column_counts)):
            total = counts.sum()
            harmonic *= total / float(np.sum(counts / values)) / (float(np.sum(values * counts)) / total)
        return harmonic

    def second_moment(self) -> float:
        """The expected sum of the squared eigenvalues of ``W.T @ W``, for Gaussian ``Z``.

        Examples:
            >>> noise = SeparableNoise.from_sizes(np.full(40, 10.0), np.ones(10))
            >>> round(noise.second_moment())  # N M (N + M + 1)
            20400
        """
        a, a_squares = (float(np.sum(self.row_counts * self.rows**k)) for k in (1, 2))
        b, b_squares = (float(np.sum(self.column_counts * self.columns**k)) for k in (1, 2))
        return a**2 * b_squares + a_squares * b**2 + a_squares * b_squares

    def _outside(self, s: FloatArray, *, above: bool) -> FloatArray:
        """``z`` above the spectrum for each ``s`` in ``(-1/a_max, 0)``, or below it for each positive ``s``.

        ``sum_j b_j/(z - b_j T) = -s`` is monotonic and convex there, so Newton's method converges from its extreme
        term alone.
        """
        b = self.columns
        total = np.sum(self.row_counts * self.rows / (1 + self.rows * s[:, None]), axis=1)
        weights = self.column_counts * b
        end = int(np.argmax(b) if above else np.argmin(b))
        z: FloatArray = b[end] * total - weights[end] / s
        for _ in range(80):
            gaps = z[:, None] - b * total[:, None]
            step = (np.sum(weights / gaps, axis=1) + s) / np.sum(weights / gaps**2, axis=1)
            z = z + step
            if np.all(np.abs(step) <= 1e-12 * np.abs(z)):
                break
        return z


def _atoms(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Values as few atoms with counts: the largest singly, the others in groups of equal number."""
    ordered = np.sort(values)[::-1]
    if ordered.size <= _ATOMS:
        return ordered, np.ones(ordered.size)
    smaller = ordered[_SINGLE:]
    starts = np.linspace(0, smaller.size, _ATOMS - _SINGLE + 1).astype(np.int64)
    counts = np.diff(starts).astype(np.float64)
    means = np.add.reduceat(smaller, starts[:-1]) / counts
    return np.concatenate([ordered[:_SINGLE], means]), np.concatenate([np.ones(_SINGLE), counts])
