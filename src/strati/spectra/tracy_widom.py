r"""The Tracy-Widom law (beta = 1): how far the largest eigenvalue of pure noise strays beyond its edge.

The distribution is a Fredholm determinant (Ferrari and Spohn 2005),

.. math:: F_1(s) = \det(1 - K_s), \qquad K(x, y) = \tfrac12 \mathrm{Ai}\!\left(\tfrac{x+y}{2}\right)
          \text{ on } L^2(s, \infty),

evaluated with Gauss-Legendre nodes (Bornemann 2010), which converges exponentially: 24 nodes up to s = 12
give the quantiles to better than 1e-6. Centring and scaling for a real ``N x M`` noise matrix are Johnstone's
(2001), with the half-integer correction of Ma (2012).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from strati.core.errors import BadInputError

if TYPE_CHECKING:
    from strati.core.results import FloatArray

MEAN, VARIANCE = -1.2065335745820, 1.6077810345810
_NODES, _END = 24, 12.0


def cdf(s: float) -> float:
    """The probability that a Tracy-Widom (beta = 1) variable is at most ``s``.

    Examples:
        >>> round(cdf(0.9793), 4)
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
def quantile(p: float) -> float:
    """The value below which a Tracy-Widom (beta = 1) variable falls with probability ``p``.

    Examples:
        >>> round(quantile(0.99), 4)
        2.0234

    Raises:
        BadInputError: ``p`` is not strictly between 0 and 1.
    """
    from scipy.optimize import brentq

    if not 0 < p < 1:
        raise BadInputError("Tracy-Widom level", "a probability lies strictly between 0 and 1")
    return float(brentq(lambda s: cdf(s) - p, -11.0, 11.5, xtol=1e-9))


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
    return centre + scale * quantile(float((1 - level) ** (1 / matrices)))


@lru_cache(maxsize=1)
def _legendre() -> tuple[FloatArray, FloatArray]:
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return nodes, weights
