r"""Quasi-null eigenvalues: directions far weaker than noise of the same strength would leave.

**Tall matrices** (``N - M >= 30``). The smallest eigenvalue of noise fluctuates below the lower edge by the
Tracy-Widom law, :math:`\lambda_\min / \sigma^2 \approx \mu_- - s_-\,\mathrm{TW}_1` with
:math:`\mu_- = (\sqrt{N-1/2} - \sqrt{M-1/2})^2`. What lies below the level of one matrix in a thousand is
quasi-null.

**Square or nearly square matrices.** The lower edge touches zero ("hard edge") and small eigenvalues are
natural: for ``N = M``, :math:`P(N \lambda_\min / \sigma^2 < x) = 1 - e^{-x/2 - \sqrt x}` (Edelman 1988). There
the rule asks of each rank ``k`` whether the k-th smallest eigenvalue is smaller than noise's k-th smallest
ever is: :math:`\sqrt{(M + \nu/2)\,\lambda_k}/\sigma` has a law that depends on ``k`` and
:math:`\nu = N - M` only. Its quantiles (one in a hundred for ``k = 1``, two in ten thousand beyond) are
tabulated from 20,000 draws of the bidiagonal model each. The smallest eigenvalues
are set aside one by one until the rest passes at every rank, and on to the next wide gap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strati.spectra import marchenko_pastur as law
from strati.spectra import tracy_widom

if TYPE_CHECKING:
    from strati.core.results import FloatArray

_HARD = 30
_LEVEL = 0.001
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


def quasi_null(values: FloatArray, rows: int, columns: int, sigma: float, *, matrices: int = 1) -> int:
    """How many of one matrix's eigenvalues are quasi-null.

    Args:
        values: All eigenvalues of ``W.T @ W`` of one matrix, ascending.
        rows: The longer side ``N``.
        columns: The shorter side ``M``.
        sigma: Standard deviation of the entries of the random part.
        matrices: Number of matrices (the slices of a convolution) that the level is meant for together.

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
        return int(np.searchsorted(scaled, lower_edge(rows, columns, _LEVEL / matrices), side="left"))
    return _hard_edge(scaled, rows, columns, matrices)


def lower_edge(rows: int, columns: int, level: float = _LEVEL) -> float:
    """What the smallest eigenvalue of unit-variance noise falls below with probability ``level`` (tall matrices)."""
    n, m = np.sqrt(rows - 0.5), np.sqrt(columns - 0.5)
    centre, scale = (n - m) ** 2, (n - m) * (1 / m - 1 / n) ** (1 / 3)
    return float(max(centre - scale * tracy_widom.quantile(1 - level), 0.1 * centre))


def _hard_edge(scaled: FloatArray, rows: int, columns: int, matrices: int) -> int:
    ranks = np.arange(1, columns // 2 + 1)
    excess = rows - columns
    table = np.array([np.interp(excess, _EXCESS, column) for column in _QUANTILES.T])
    # P(lambda_k < x) falls as x^(k (k + nu)/2), so quantiles of other levels follow from those in the table. One
    # matrix in a hundred is too many where a matrix has few eigenvalues, and where there are many slices.
    order = np.arange(1, table.size + 1)
    table *= (1 / matrices) ** (1 / (order * (order + excess)))
    table[0] *= min(1.0, columns / 50) ** (1 / (excess + 1))
    near = min(table.size, ranks.size)
    limits = table[:near] ** 2 / (columns + excess / 2)
    lowest = scaled[: ranks.size]
    if np.all(lowest[:near] >= limits):
        return 0
    far = _RATIO * rows * law.ppf((ranks[near:] - 0.5) / columns, rows / columns)
    limits = np.concatenate([limits, far])
    count = 0  # the fewest that must go for the rest to pass as noise
    while count < lowest.size and np.any(lowest[count:] < limits[: lowest.size - count]):
        count += 1
    if count in (0, lowest.size):
        return count
    # What is set aside ends at a wide gap: a last one that alone would pass as noise's smallest goes with it.
    ahead = scaled[count - 1 : 2 * count + 1]
    wide = np.flatnonzero(ahead[1:] >= _WIDE * ahead[:-1])
    return count + int(wide[0]) if wide.size else count
