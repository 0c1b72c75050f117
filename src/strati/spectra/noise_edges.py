r"""Where the spectrum of noise begins and ends.

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

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from strati.core.errors import BadInputError

if TYPE_CHECKING:
    from strati.core.results import FloatArray

TRACY_WIDOM_MEAN, TRACY_WIDOM_VARIANCE = -1.2065335745820, 1.6077810345810
_NODES, _END = 24, 12.0
_ATOMS, _SINGLE = 160, 32  # population eigenvalues of separable noise; the largest of them singly
_GRID, _GRIDS = 32, 5


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
        for _ in range(_GRIDS):  # each grid looks closer around the least value of the one before
            grid = np.linspace(low, high, _GRID + 1)
            k = int(np.argmin(self._outside(grid, above=True)))
            best, low, high = float(grid[k]), float(grid[max(k - 1, 0)]), float(grid[min(k + 1, _GRID)])
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
        for _ in range(_GRIDS):
            grid = np.linspace(low, high, _GRID + 1)
            z = self._outside(10**grid / (self.variance * self.column_counts.sum()), above=False)
            k = int(np.argmax(z))
            low, high = float(grid[max(k - 1, 0)]), float(grid[min(k + 1, _GRID)])
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
