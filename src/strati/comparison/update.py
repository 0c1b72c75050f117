"""Two versions of one matrix: how far it moved, what the update itself looks like, what became of its directions.

Between a matrix ``A`` and its later self ``B`` of the same shape stand four numbers: the distance of the spectra, the
relative size of ``B - A``, the rank and spectrum of ``B - A``, and how well the leading singular subspaces still align.
The distance of the spectra is also defined for matrices of different shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.linalg

from strati.comparison.update_rank import RankTest, rank_test

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray

    Matrix = NDArray[Any]

_ROWS = 512  # of each side, for the test whether two matrices hold their units in one order


@dataclass(frozen=True)
class Update:
    """What happened between two versions of a matrix.

    Attributes:
        relative_change: ``||B - A||_F / ||A||_F``; ``None`` when ``A`` is zero.
        stable_rank: Of ``B - A``; ``None`` when nothing moved beyond rounding.
        rank: Directions of ``B - A`` beyond rounding, with the weakest one's p-value and the kind of the update.
        subspace_overlap: Mean squared cosine of the principal angles between the ``directions`` leading left (and
            right) singular vectors of ``A`` and of ``B``: 1 the same subspace, ``directions / size`` by chance.
        directions: How many leading directions were compared.
        overlap_by_chance: What two random subspaces of that dimension would give.
        eigenvalues: Of ``(B - A)^T (B - A)``, ascending.
    """

    relative_change: float | None
    stable_rank: float | None
    rank: RankTest
    subspace_overlap: float | None
    directions: int
    overlap_by_chance: float | None
    eigenvalues: FloatArray


def update_between(
    before: Matrix,
    after: Matrix,
    *,
    rng: np.random.Generator | None = None,
    variance: FloatArray | float = 0.0,
    converted: bool = True,
) -> Update:
    """Describe the step from one version of a matrix to another.

    The leading subspace has as many directions as the stable rank of ``A`` (rounded up): those that carry its weight.

    Args:
        before: ``A``, a matrix.
        after: ``B``, of the same shape.
        rng: Draws the rounding noise that the rank is tested against.
        variance: Variance per entry of rounding that the dtypes do not show (a quantised side).
        converted: With a variance, whether the two sides are stored in different formats.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> A = rng.standard_normal((40, 30))
        >>> u = update_between(A, A + 0.1 * np.outer(rng.standard_normal(40), rng.standard_normal(30)))
        >>> u.rank.rank, str(u.rank.kind), round(u.stable_rank, 6)
        (1, 'low-rank', 1.0)
    """
    a, b = _tall(before), _tall(after)
    singular = _singular_values(b - a)
    source = rng if rng is not None else np.random.default_rng(0)
    rank = rank_test(before, after, singular, rng=source, variance=variance, converted=converted)
    eigenvalues = np.square(singular)
    overlap, directions, chance = _overlap(a, b)
    return Update(
        relative_change=relative_change(before, after),
        stable_rank=float(eigenvalues.sum() / eigenvalues[-1]) if rank.rank else None,
        rank=rank,
        subspace_overlap=overlap,
        directions=directions,
        overlap_by_chance=chance,
        eigenvalues=eigenvalues,
    )


def agreement(before: Matrix, after: Matrix) -> float | None:
    r"""Whether ``B`` holds its rows and columns where ``A`` has them, as a z-score.

    Units of independently trained networks have no common order: the cosine of row i of ``A`` with row i of ``B`` is
    then distributed like that with any other row, and likewise for columns, of which at least one are units. The score
    is :math:`\sqrt n\,(\bar c_{ii} - \bar c_{ij}) / s(c_{ij})`, of rows or of columns, whichever is smaller. At most
    512 of each are used.

    Returns:
        ``None`` where there are fewer than four rows or columns, or all of one side's are zero.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> A, B = rng.normal(size=(2, 60, 50))
        >>> agreement(A, B) < 5 < agreement(A, A + B)
        True
    """
    a, b = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if min(a.shape) < 4:
        return None
    scores = []
    for first, second in ((a, b), (a.T, b.T)):
        picked = np.unique(np.linspace(0, first.shape[0] - 1, _ROWS).astype(np.int64))
        unit = []
        for matrix in (first[picked], second[picked]):
            norms = np.linalg.norm(matrix, axis=1, keepdims=True)
            unit.append(matrix / np.where(norms > 0, norms, 1.0))
        cosines = unit[0] @ unit[1].T
        apart = cosines[~np.eye(len(picked), dtype=bool)]
        spread = float(apart.std())
        if not spread > 0:
            return None
        scores.append(float(np.sqrt(len(picked)) * (np.diag(cosines).mean() - apart.mean()) / spread))
    return min(scores)


def relative_change(before: Matrix, after: Matrix) -> float | None:
    """``||B - A||_F / ||A||_F``; ``None`` where the shapes differ or ``A`` is zero.

    Examples:
        >>> relative_change(np.ones((2, 2)), np.full((2, 2), 1.5))
        0.5
    """
    if before.shape != after.shape:
        return None
    start = before.astype(np.float64)
    norm = float(np.linalg.norm(start))
    return float(np.linalg.norm(after.astype(np.float64) - start)) / norm if norm > 0 else None


def spectral_distance(first: FloatArray, second: FloatArray) -> float | None:
    """Wasserstein-1 distance between two spectra on a natural-log scale.

    ``W_1 = int_0^1 |F^-1(q) - G^-1(q)| dq`` over ``ln(lambda)``: 0.69 says that eigenvalues sit a factor of two apart
    on average. Eigenvalues that are zero at double precision have no logarithm and are left out.

    Args:
        first: Eigenvalues of one matrix.
        second: Eigenvalues of the other; their numbers may differ.

    Returns:
        The distance, ``None`` when either has no positive eigenvalue.

    Examples:
        >>> round(spectral_distance(np.array([1.0, 2.0, 4.0]), np.array([2.0, 4.0, 8.0])), 6)
        0.693147
    """
    logs = [_logs(values) for values in (first, second)]
    if logs[0].size == 0 or logs[1].size == 0:
        return None
    return _wasserstein(*logs)


def _logs(values: FloatArray) -> FloatArray:
    finite = values[np.isfinite(values)]
    positive = finite[finite > finite.max(initial=0.0) * np.finfo(np.float64).eps]
    return np.asarray(np.sort(np.log(positive)), dtype=np.float64)


def _wasserstein(a: FloatArray, b: FloatArray) -> float:
    grid = np.union1d(np.arange(1, a.size + 1) / a.size, np.arange(1, b.size + 1) / b.size)
    widths = np.diff(grid, prepend=0.0)
    middle = grid - widths / 2
    gaps = np.abs(a[(middle * a.size).astype(np.int64)] - b[(middle * b.size).astype(np.int64)])
    return float((gaps * widths).sum())


def _overlap(a: FloatArray, b: FloatArray) -> tuple[float | None, int, float | None]:
    """Overlap of the leading subspaces, averaged over both sides of the matrix."""
    columns = a.shape[1]
    gram = a.T @ a
    total, top = float(np.trace(gram)), _largest(gram)
    if columns == 0 or total <= 0 or top <= 0 or not np.any(b):
        return None, 0, None
    directions = int(np.clip(np.ceil(total / top - 1e-9), 1, max(1, columns // 2)))
    sides = []
    right = [_leading(matrix.T @ matrix, directions) for matrix in (a, b)]
    left = [np.linalg.qr(matrix @ basis)[0] for matrix, basis in zip((a, b), right, strict=True)]
    for first, second in (right, left):
        sides.append(float(np.square(first.T @ second).sum()) / directions)
    chance = (directions / a.shape[0] + directions / columns) / 2
    return float(np.clip(np.mean(sides), 0.0, 1.0)), directions, chance


def _leading(gram: FloatArray, count: int) -> FloatArray:
    size = gram.shape[0]
    _, vectors = scipy.linalg.eigh(gram, subset_by_index=(size - count, size - 1))
    return np.asarray(vectors, dtype=np.float64)


def _largest(gram: FloatArray) -> float:
    size = gram.shape[0]
    if size == 0:
        return 0.0
    return float(scipy.linalg.eigh(gram, eigvals_only=True, subset_by_index=(size - 1, size - 1))[0])


def _singular_values(matrix: FloatArray) -> FloatArray:
    """Ascending; by way of the triangular factor, which keeps the small ones that a Gram matrix would lose."""
    if matrix.size == 0:
        return np.zeros(0)
    small = np.linalg.qr(matrix, mode="r") if matrix.shape[0] > 2 * matrix.shape[1] else matrix
    return np.asarray(scipy.linalg.svdvals(small)[::-1], dtype=np.float64)


def _tall(matrix: Matrix) -> FloatArray:
    wide = np.asarray(matrix, dtype=np.float64)
    return wide if wide.shape[0] >= wide.shape[1] else wide.T
