r"""Noise whose rows and columns are of unequal size or correlated: where its spectrum begins and ends.

Marchenko and Pastur take independent entries of one variance. For :math:`W = A^{1/2} Z B^{1/2}` with independent
entries in ``Z`` and population eigenvalues :math:`a_i` (rows), :math:`b_j` (columns), the resolvent of :math:`W^T W`
follows from two scalars (Paul and Silverstein 2009),

.. math:: T = \sum_i \frac{a_i}{1 + a_i s}, \qquad s = \sum_j \frac{b_j}{b_j T - z} .

Outside the spectrum ``s`` is real. For ``s`` in :math:`(-1/a_\max, 0)` the least ``z`` is the upper edge, and its
curvature there gives the scale of the Tracy-Widom law (El Karoui 2007); for positive ``s`` the largest ``z`` is the
lower edge. Independent entries with a fourth cumulant :math:`\kappa_4` are, to first order, a case of this: their
rows differ in size by :math:`\kappa_4 / M` more than Gaussian ones, their columns by :math:`\kappa_4 / N`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strati.spectra import tracy_widom

if TYPE_CHECKING:
    from strati.core.results import FloatArray

_ATOMS, _SINGLE = 160, 32  # population eigenvalues kept; the largest of them singly
_GRID, _GRIDS = 32, 5


@dataclass(frozen=True)
class Population:
    """Population eigenvalues of rows and columns: atoms, and how many eigenvalues each stands for.

    The columns' mean is 1, the rows' mean the variance of an entry.
    """

    rows: FloatArray
    row_counts: FloatArray
    columns: FloatArray
    column_counts: FloatArray

    @property
    def variance(self) -> float:
        """The mean variance of an entry."""
        return float(np.sum(self.rows * self.row_counts) / self.row_counts.sum())

    def equal(self) -> Population:
        """Rows and columns of one size each, with the same numbers and total."""
        n, m = np.array([self.row_counts.sum()]), np.array([self.column_counts.sum()])
        return Population(np.array([self.variance]), n, np.ones(1), m)


def population(rows: FloatArray, columns: FloatArray) -> Population:
    """Population eigenvalues out of squared norms.

    Args:
        rows: One value per row, not all zero; their sum is that of the eigenvalues.
        columns: One value per column; only their proportions matter.

    Examples:
        >>> both = population(np.full(4, 6.0), np.full(3, 8.0))
        >>> both.rows.tolist(), both.columns.tolist()
        ([2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    """
    a, a_counts = _atoms(rows / columns.size)
    b, b_counts = _atoms(columns / columns.mean())
    return Population(a, a_counts, b, b_counts)


def upper_edge(noise: Population) -> tuple[float, float]:
    """Where the spectrum of ``W.T @ W`` ends, and the scale of the largest eigenvalue's fluctuation there.

    Examples:
        >>> edge, scale = upper_edge(population(np.full(400, 100.0), np.ones(100)))
        >>> round(edge, 6), round(scale, 2)  # (sqrt(400) + sqrt(100))^2, and Johnstone's scale
        (900.0, 15.94)
    """
    top = float(noise.rows.max())
    low, high = -1 / top * (1 - 1e-9), -1e-6 / top
    best = low
    for _ in range(_GRIDS):  # each grid looks closer around the least value of the one before
        grid = np.linspace(low, high, _GRID + 1)
        k = int(np.argmin(_above(grid, noise)))
        best, low, high = float(grid[k]), float(grid[max(k - 1, 0)]), float(grid[min(k + 1, _GRID)])
    step = 1e-3 * min(-best, best + 1 / top)
    around = _above(np.array([best - step, best, best + step]), noise)
    curvature = max(float(around[0] - 2 * around[1] + around[2]) / step**2, np.finfo(np.float64).tiny)
    edge = float(around[1])
    shrunk = noise.rows / (1 + noise.rows * best)
    total, slope = float(np.sum(noise.row_counts * shrunk)), float(np.sum(noise.row_counts * shrunk**2))
    b = noise.columns
    density = float(np.sum(noise.column_counts * b / (b * total - edge) ** 2)) * slope
    return edge, float((curvature / 2) ** (1 / 3) * density ** (-2 / 3))


def lower_edge(noise: Population) -> float:
    """Where the spectrum of ``W.T @ W`` begins; zero where null directions belong to it.

    Examples:
        >>> round(lower_edge(population(np.full(400, 100.0), np.ones(100))), 4)  # (sqrt(400) - sqrt(100))^2
        100.0
    """
    live = noise.rows > 1e-12 * noise.rows.max()
    if noise.columns.min() <= 0 or noise.row_counts[live].sum() <= noise.column_counts.sum():
        return 0.0
    low, high = -9.0, 9.0  # log10 of s times the entries' variance times the columns
    for _ in range(_GRIDS):
        grid = np.linspace(low, high, _GRID + 1)
        z = _below(10**grid / (noise.variance * noise.column_counts.sum()), noise)
        k = int(np.argmax(z))
        low, high = float(grid[max(k - 1, 0)]), float(grid[min(k + 1, _GRID)])
    return max(float(z[k]), 0.0)


def widening(noise: Population, *, level: float, matrices: int = 1) -> float:
    """How much further the Tracy-Widom edge lies than that of equal rows and columns with the same total.

    A ratio, so that what is known of finite sizes for equal variances carries over.

    Examples:
        >>> rows = np.repeat([100.0, 400.0], 100)
        >>> 1.1 < widening(population(rows, np.ones(100)), level=0.01) < 1.5
        True
    """
    far = tracy_widom.quantile(float((1 - level) ** (1 / matrices)))
    (edge, scale), (plain, width) = upper_edge(noise), upper_edge(noise.equal())
    return max(float((edge + far * scale) / (plain + far * width)), 1.0)


def narrowing(noise: Population) -> float:
    """How much lower the spectrum begins than that of equal rows and columns with the same total.

    Nearly square matrices have no lower edge; there the smallest eigenvalues scale with the harmonic means. There must
    be as many rows as columns, or more.
    """
    n, m = float(noise.row_counts.sum()), float(noise.column_counts.sum())
    if m < 0.8 * n:
        return min(lower_edge(noise) / lower_edge(noise.equal()), 1.0)
    if noise.rows.min() <= 0 or noise.columns.min() <= 0:
        return 0.0
    harmonic = 1.0
    for values, counts in ((noise.rows, noise.row_counts), (noise.columns, noise.column_counts)):
        total = counts.sum()
        harmonic *= total / float(np.sum(counts / values)) / (float(np.sum(values * counts)) / total)
    return harmonic


def second_moment(noise: Population) -> float:
    """The expected sum of the squared eigenvalues of ``W.T @ W``, for Gaussian ``Z``.

    Examples:
        >>> round(second_moment(population(np.full(40, 10.0), np.ones(10))))  # N M (N + M + 1)
        20400
    """
    a, a_squares = (float(np.sum(noise.row_counts * noise.rows**k)) for k in (1, 2))
    b, b_squares = (float(np.sum(noise.column_counts * noise.columns**k)) for k in (1, 2))
    return a**2 * b_squares + a_squares * b**2 + a_squares * b_squares


def _above(s: FloatArray, noise: Population) -> FloatArray:
    """``z`` above the spectrum for each ``s`` in ``(-1/a_max, 0)``."""
    b = noise.columns
    total = np.sum(noise.row_counts * noise.rows / (1 + noise.rows * s[:, None]), axis=1)
    weights = noise.column_counts * b
    top = int(np.argmax(b))
    # sum_j b_j/(z - b_j T) = -s falls and is convex: Newton's method from its largest term alone, left of the root.
    z = b[top] * total - weights[top] / s
    return _newton(z, total, s, weights, b)


def _below(s: FloatArray, noise: Population) -> FloatArray:
    """``z`` below the spectrum for each positive ``s``."""
    b = noise.columns
    total = np.sum(noise.row_counts * noise.rows / (1 + noise.rows * s[:, None]), axis=1)
    weights = noise.column_counts * b
    end = int(np.argmin(b))
    z = b[end] * total - weights[end] / s  # right of the root
    return _newton(z, total, s, weights, b)


def _newton(
    z: FloatArray, total: FloatArray, s: FloatArray, weights: FloatArray, b: FloatArray
) -> FloatArray:
    for _ in range(80):
        gaps = z[:, None] - b * total[:, None]
        step = (np.sum(weights / gaps, axis=1) + s) / np.sum(weights / gaps**2, axis=1)
        z = z + step
        if np.all(np.abs(step) <= 1e-12 * np.abs(z)):
            break
    return z


def _atoms(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Values as few atoms with counts: the largest singly, the rest in groups of equal number."""
    ordered = np.sort(values)[::-1]
    if ordered.size <= _ATOMS:
        return ordered, np.ones(ordered.size)
    rest = ordered[_SINGLE:]
    starts = np.linspace(0, rest.size, _ATOMS - _SINGLE + 1).astype(np.int64)
    counts = np.diff(starts).astype(np.float64)
    means = np.add.reduceat(rest, starts[:-1]) / counts
    return np.concatenate([ordered[:_SINGLE], means]), np.concatenate([np.ones(_SINGLE), counts])
