r"""The generalised Pareto law, :math:`P(X > x) = (1 + \xi x / s)^{-1/\xi}`: a power law with a shifted start.

Its index :math:`\xi` is the inverse of the exponent of the tail; it is zero for an exponential tail and negative for
one that ends. Fitted by maximum likelihood (Grimshaw 1993).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from strati.core.results import FloatArray


def fit(excess: FloatArray) -> tuple[float, float]:
    """Maximum-likelihood index ``xi`` and slope ``xi/scale``: a profile over the slope, on a grid, then finer.

    Args:
        excess: By how much the values exceed the threshold; none negative, not all zero.

    Examples:
        >>> index, slope = fit(np.random.default_rng(0).pareto(2.0, 4000))
        >>> round(index, 1), round(slope, 1)
        (0.5, 1.0)
    """
    mean, largest = float(excess.mean()), float(excess.max())
    grid = np.concatenate([-np.linspace(0.98, 0.02, 16) / largest, np.geomspace(1e-3, 30, 24) / mean])
    thin = excess[:: max(excess.size // 4096, 1)]
    found, slope = 0.0, 0.0
    for values in (thin, thin, excess):
        index = np.log1p(grid[:, None] * values[None, :]).mean(axis=1)
        best = int(np.argmax(-np.log(np.maximum(index / grid, np.finfo(np.float64).tiny)) - index))
        found, slope = float(index[best]), float(grid[best])
        grid = np.linspace(grid[max(best - 1, 0)], grid[min(best + 1, grid.size - 1)], 9)[1:-1]
        grid = grid[np.abs(grid) > 1e-9 / mean]
    return found, slope
