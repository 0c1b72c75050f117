r"""The Marchenko-Pastur law: the spectrum of a matrix of independent entries.

For an ``N x M`` matrix of i.i.d. entries of variance :math:`\sigma^2`, ``Q = N/M >= 1``, the eigenvalues of
:math:`W^T W / N` have, as the matrix grows, the density

.. math:: \rho(x) = \frac{Q}{2\pi\sigma^2}\,\frac{\sqrt{(x_+ - x)(x - x_-)}}{x},
          \qquad x_\pm = \sigma^2 (1 \pm 1/\sqrt Q)^2 .

Here live the law's density, distribution, quantiles and edges, all for :math:`W^T W / N`. Fitting it to a
spectrum lives in :mod:`strati.spectra.bulk`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from strati.core.results import FloatArray

_GRID = 2049
_CELL = np.pi / (_GRID - 1)


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
    turned = start
    low, high = edges(q)
    # Newton steps in the angle, where the law is smooth up to both edges; the table is right to one cell.
    for _ in range(2):
        x = 1 + 1 / q - (high - low) / 2 * np.cos(turned)
        slope = pdf(x, q) * (high - low) / 2 * np.sin(turned)
        step = np.where(slope > 0, (cdf(x, q) - p) / np.where(slope > 0, slope, 1.0), 0.0)
        turned = np.clip(turned - step, np.maximum(start - _CELL, 0), np.minimum(start + _CELL, np.pi))
    quantile: FloatArray = np.clip(1 + 1 / q - (high - low) / 2 * np.cos(turned), low, high) * sigma**2
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
