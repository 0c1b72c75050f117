r"""Numbers of heavy-tailed self-regularisation beyond alpha: computed only when asked for (``htsr=True``, ``--htsr``).

* **Correlation traps** (weightwatcher's ``randomize``; arXiv:2506.04434): eigenvalues of the matrix with its entries
  permuted at random that lie beyond the Tracy-Widom edge of independent entries of that variance. Permuting removes all
  correlations, so a trap comes from a few large entries. Weightwatcher counts them in one permutation and beyond a
  fitted edge; here the count is a mean over several permutations with an error, and a permuted Gaussian matrix has a
  trap with the chance ``level``.
* **Trace-log condition** (SETOL, arXiv:2507.17912): with eigenvalues scaled to mean one, the number of largest
  eigenvalues whose logarithms first sum to less than zero. ``erg_gap`` is that number less the size of the fitted tail.
* **Hill exponent with a fixed start** (AlphaPruning, arXiv:2410.10912): of the upper half of the eigenvalues.
* **FARMS** (arXiv:2506.06280): the mean Hill exponent of square submatrices of half the shorter side, which does not
  depend on the aspect ratio of noise.
* **Truncated power law** :math:`\lambda^{-a} e^{-\lambda / c}` on the fitted tail, with the p-value of the likelihood
  ratio against the pure power law.
* **Localisation**: participation ratio :math:`1 / (n \sum v_i^4)` of the leading singular vectors, the smaller of left
  and right. A random vector has 1/3, one with a single entry 1/n.
* **Level spacings**: mean ratio of adjacent spacings of the eigenvalues; 0.53 where they repel each other as those of
  random matrices do, 0.39 where they are independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.rng import stream
from strati.spectra.marchenko_pastur import upper_edge
from strati.spectra.tail_tests import compare_laws

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray
    from strati.spectra.tails import Tail

_PERMUTATIONS = 4
_DRAWS = 999  # random vectors that a participation ratio is compared with
_MOST_SUBMATRICES = 16
_FEWEST_VALUES = 10


@dataclass(frozen=True)
class HeavyTailMetrics:
    """Numbers of heavy-tailed self-regularisation; ``None`` where one is not defined.

    Attributes:
        traps: Mean number of eigenvalues of the permuted matrix beyond the edge of noise.
        traps_stderr: Its standard error over permutations.
        trap_size: Mean of the permuted matrix's largest eigenvalue over that edge.
        erg_size: Number of largest eigenvalues that fulfil the trace-log condition.
        erg_gap: The same less ``tail_size``.
        alpha_hill: Hill exponent of the upper half of the eigenvalues.
        alpha_hill_stderr: ``(alpha_hill - 1) / sqrt(k)`` of its ``k`` eigenvalues.
        alpha_farms: Mean Hill exponent of square submatrices.
        alpha_farms_stderr: Its standard error over submatrices.
        tpl_alpha: Exponent of the truncated power law.
        tpl_cutoff: Eigenvalue at which it is truncated; ``None`` if it is not.
        tpl_pvalue: Chance of so much better a fit if the pure power law holds.
        localisation: Participation ratio of the leading singular vectors, the smaller one.
        localisation_pvalue: Chance that random vectors have one as small.
        level_spacing: Mean ratio of adjacent spacings.
        level_spacing_stderr: Its standard error.
    """

    traps: float | None = None
    traps_stderr: float | None = None
    trap_size: float | None = None
    erg_size: int | None = None
    erg_gap: int | None = None
    alpha_hill: float | None = None
    alpha_hill_stderr: float | None = None
    alpha_farms: float | None = None
    alpha_farms_stderr: float | None = None
    tpl_alpha: float | None = None
    tpl_cutoff: float | None = None
    tpl_pvalue: float | None = None
    localisation: float | None = None
    localisation_pvalue: float | None = None
    level_spacing: float | None = None
    level_spacing_stderr: float | None = None


FIELDS = tuple(HeavyTailMetrics.__dataclass_fields__)
"""The names of the numbers, as in a row of ``scan``."""


def heavy_tail_metrics(
    matrices: Sequence[NDArray[Any]],
    eigenvalues: FloatArray,
    tail: Tail | None,
    *,
    level: float = 0.01,
    seed: int = 0,
) -> HeavyTailMetrics:
    """Compute every number of this module.

    Args:
        matrices: The matrix, or the slices of a kernel; of several, numbers of the matrix itself are ``None``.
        eigenvalues: Their eigenvalues, ascending.
        tail: The fitted tail.
        level: Chance that a Gaussian matrix has a trap.
        seed: Seed of the permutations.
    """
    numbers: dict[str, Any] = {}
    live = eigenvalues[eigenvalues > 0]
    if live.size >= _FEWEST_VALUES:
        numbers["erg_size"] = trace_log_size(eigenvalues)
        numbers["erg_gap"] = None if tail is None else numbers["erg_size"] - tail.size
        numbers["alpha_hill"], numbers["alpha_hill_stderr"] = hill(live)
        numbers["level_spacing"], numbers["level_spacing_stderr"] = spacing_ratio(live)
    if tail is not None:
        truncated = compare_laws(live[-tail.size :], tail)["truncated_power_law"]
        if truncated["parameters"] is not None:
            rate = truncated["parameters"]["rate"]
            numbers["tpl_alpha"] = truncated["parameters"]["alpha"]
            numbers["tpl_cutoff"] = tail.xmin / rate if rate > 0 else None
            numbers["tpl_pvalue"] = truncated["pvalue"]
    if len(matrices) == 1 and live.size >= _FEWEST_VALUES:
        matrix = np.asarray(matrices[0], dtype=np.float64)
        numbers["traps"], numbers["traps_stderr"], numbers["trap_size"] = traps(
            matrix, level=level, seed=seed
        )
        numbers["localisation"], numbers["localisation_pvalue"] = localisation(matrix, seed=seed)
        if min(matrix.shape) >= 2 * _FEWEST_VALUES:
            numbers["alpha_farms"], numbers["alpha_farms_stderr"] = farms(matrix)
    return HeavyTailMetrics(**numbers)


def trace_log_size(eigenvalues: FloatArray) -> int:
    """Number of largest eigenvalues, scaled to mean one, whose logarithms first sum to less than zero.

    Examples:
        >>> trace_log_size(np.array([0.1, 0.2, 0.2, 0.5, 4.0]))  # 4 * 0.5 * 0.2 is below 1
        3
    """
    values = eigenvalues[::-1] * (eigenvalues.size / float(eigenvalues.sum()))
    with np.errstate(divide="ignore"):
        sums = np.cumsum(np.log(values))
    negative = np.flatnonzero(sums[:-1] < 0)
    return int(negative[0]) + 1 if negative.size else int(values.size)


def hill(values: FloatArray, count: int | None = None) -> tuple[float, float]:
    """Hill's estimate of the exponent from the ``count`` largest of ascending values (default half), and its error.

    Examples:
        >>> values = np.sort(np.random.default_rng(0).pareto(1.5, size=20000) + 1)
        >>> abs(hill(values)[0] - 2.5) < 0.05
        True
    """
    count = values.size // 2 if count is None else count
    mean = float(np.mean(np.log(values[-count:] / values[-count - 1])))
    alpha = 1 + 1 / mean if mean > 0 else float("inf")
    return alpha, (alpha - 1) / float(np.sqrt(count))


def farms(matrix: FloatArray) -> tuple[float, float]:
    """The mean Hill exponent of square submatrices of half the shorter side, and its standard error."""
    side = min(matrix.shape) // 2
    corners = [
        (row, column)
        for row in range(0, matrix.shape[0] - side + 1, side)
        for column in range(0, matrix.shape[1] - side + 1, side)
    ]
    if len(corners) > _MOST_SUBMATRICES:
        corners = [corners[i] for i in np.linspace(0, len(corners) - 1, _MOST_SUBMATRICES).astype(int)]
    exponents = []
    for row, column in corners:
        block = matrix[row : row + side, column : column + side]
        values: FloatArray = np.asarray(np.linalg.svd(block, compute_uv=False)[::-1] ** 2, dtype=np.float64)
        if values[-side // 2 - 1] > 0:
            exponents.append(hill(values)[0])
    if not exponents:
        return float("nan"), float("nan")
    return float(np.mean(exponents)), float(np.std(exponents, ddof=1) / np.sqrt(len(exponents)))


def traps(matrix: FloatArray, *, level: float = 0.01, seed: int = 0) -> tuple[float, float, float]:
    """Mean number of correlation traps over permutations of the entries, its error, and their size over the edge.

    Examples:
        >>> W = np.random.default_rng(0).normal(size=(120, 80))
        >>> traps(W)[0], traps(np.where(np.arange(80) + np.arange(120)[:, None] == 7, 40.0, W))[0] > 1
        (0.0, True)
    """
    edge = float(np.var(matrix)) * upper_edge(max(matrix.shape), min(matrix.shape), level=level)
    rng = stream(seed, "traps")
    counts, sizes = [], []
    for _ in range(_PERMUTATIONS):
        values = permuted_eigenvalues(matrix, rng.permutation(matrix.size))
        counts.append(int(np.count_nonzero(values > edge)))
        sizes.append(float(values[0]) / edge)
    return float(np.mean(counts)), float(np.std(counts, ddof=1) / np.sqrt(len(counts))), float(np.mean(sizes))


def permuted_eigenvalues(matrix: FloatArray, order: NDArray[np.intp]) -> FloatArray:
    """Eigenvalues of the matrix with its entries in another order, descending.

    Examples:
        >>> permuted_eigenvalues(np.array([[1.0, 2.0], [0.0, 0.0]]), np.array([0, 2, 3, 1])).tolist()
        [4.0, 1.0]
    """
    return np.asarray(np.linalg.svd(matrix.ravel()[order].reshape(matrix.shape), compute_uv=False) ** 2)


def localisation(matrix: FloatArray, *, seed: int = 0) -> tuple[float, float]:
    """Participation ratio of the leading singular vectors, the smaller one, and its p-value among random vectors."""
    from scipy.sparse.linalg import svds

    rng = stream(seed, "localisation")
    start = rng.normal(size=min(matrix.shape))
    left, _, right = svds(matrix, k=1, v0=start)
    ratio = min(participation(left[:, 0]), participation(right[0]))
    null = [min(participation(rng.normal(size=(side,))) for side in matrix.shape) for _ in range(_DRAWS)]
    return ratio, (1 + sum(draw <= ratio for draw in null)) / (_DRAWS + 1)


def participation(vector: FloatArray) -> float:
    r"""Participation ratio :math:`(\sum v_i^2)^2 / (n \sum v_i^4)`.

    Examples:
        >>> participation(np.ones(8)), participation(np.eye(8)[0])
        (1.0, 0.125)
    """
    squares = vector**2
    return float(squares.sum() ** 2 / (vector.size * np.sum(squares**2)))


def spacing_ratio(values: FloatArray) -> tuple[float, float]:
    """Mean of the smaller over the larger of adjacent spacings of ascending values, and its standard error."""
    spacings = np.diff(values)
    larger = np.maximum(spacings[1:], spacings[:-1])
    ratios = np.minimum(spacings[1:], spacings[:-1])[larger > 0] / larger[larger > 0]
    if ratios.size < 2:
        return float("nan"), float("nan")
    return float(ratios.mean()), float(ratios.std(ddof=1) / np.sqrt(ratios.size))
