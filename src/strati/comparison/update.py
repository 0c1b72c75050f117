"""Two versions of one matrix: the size, rank and pattern of the update, and what became of the leading directions.

Between a matrix ``A`` and its later version ``B`` of the same shape are compared: the spectra, the relative size of
``B - A``, the rank and spectrum of ``B - A``, the leading singular subspaces, and whether ``B`` has leading directions
that ``A`` does not have (intruder dimensions, arXiv 2410.21228). The distance of the spectra is also defined for
matrices of different shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.linalg

from strati.comparison.update_rank import RankTest, UpdateKind, rank_test

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray

    Matrix = NDArray[Any]

_ROWS = 512  # of each side, for the test whether two matrices hold their units in one order
_INTRUDER_DIRECTIONS = 16  # leading directions of the later matrix that are looked at, at least
_WINDOW = 2.0  # half-width, in norms of a random update, of the window in which a direction's partners lie
_OWN_SHARE = 0.5  # of a direction, inside its window; below it the direction is an intruder
_ZEROS = 0.05  # share of zeros by which two matrices must differ
_FEW = 0.1  # share of the entries that a sparse change concerns at most
_REMOVED = 0.05  # what a projection leaves of the component along its direction
_SKETCH = 32  # numbers that stand for a direction
_GRID_ROWS, _GRID_LEVELS = 24, 257


class UpdatePattern(StrEnum):
    """A change that has a name of its own."""

    ZEROS = "zeros"
    GRID = "grid"
    PROJECTION = "projection"
    SPARSE = "sparse"


@dataclass(frozen=True)
class Intruder:
    """A leading singular direction of the later matrix without a partner in the earlier one.

    Attributes:
        number: Its place among the later matrix's singular values, from 1.
        singular_value: Its singular value, relative to the largest.
        overlap: Its squared length inside the earlier matrix's directions of at least about its own strength. After
            a random update of the same Frobenius norm this is at least 0.75 (Davis and Kahan 1970).
    """

    number: int
    singular_value: float
    overlap: float


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
        intruders: Leading directions of ``B`` that ``A`` does not have.
        pattern: A change with a name of its own; ``None`` for any other.
        pattern_share: Of the entries that became zero (``zeros``) or changed (``sparse``).
        removed: Of a projection, a sketch of the direction that was removed, for comparing layers.
    """

    relative_change: float | None
    stable_rank: float | None
    rank: RankTest
    subspace_overlap: float | None
    directions: int
    overlap_by_chance: float | None
    eigenvalues: FloatArray
    intruders: tuple[Intruder, ...] = ()
    pattern: UpdatePattern | None = None
    pattern_share: float | None = None
    removed: tuple[float, ...] | None = None


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
    directions = _LeadingDirections.of(a, b)
    changed = rank.kind not in (UpdateKind.UNTOUCHED, UpdateKind.ROUNDING)
    pattern, share = change_pattern(before, after) if changed and not np.any(variance) else (None, None)
    size = relative_change(before, after)
    smaller = size is not None and size < 1  # a larger update replaces the directions instead of adding some
    removed = _projection(before, after) if rank.kind is UpdateKind.LOW_RANK and rank.rank == 1 else None
    return Update(
        relative_change=size,
        stable_rank=float(eigenvalues.sum() / eigenvalues[-1]) if rank.rank else None,
        rank=rank,
        subspace_overlap=directions.overlap if directions is not None else None,
        directions=directions.count if directions is not None else 0,
        overlap_by_chance=directions.by_chance if directions is not None else None,
        eigenvalues=eigenvalues,
        intruders=directions.intruders(float(np.sqrt(eigenvalues.sum())))
        if directions and changed and smaller
        else (),
        pattern=pattern if removed is None else UpdatePattern.PROJECTION,
        pattern_share=share,
        removed=removed,
    )


def damp_intruders(before: Matrix, after: Matrix, factor: float) -> FloatArray:
    """Scale the intruder dimensions of a matrix: its leading directions that the earlier matrix does not have.

    Args:
        before: The base's matrix.
        after: The fine-tune's matrix, of the same shape.
        factor: What their singular values are multiplied by; 0 removes them, 1 changes nothing.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> base = rng.normal(size=(80, 60))
        >>> u, v = (x / np.linalg.norm(x) for x in (rng.normal(size=80), rng.normal(size=60)))
        >>> tuned = base + 40 * np.outer(u, v)
        >>> damped = damp_intruders(base, tuned, 0.5)
        >>> [round(float(np.linalg.norm(w, 2))) for w in (base, tuned, damped)]
        [16, 41, 21]
    """
    a, b = _tall(before), _tall(after)
    directions = _LeadingDirections.of(a, b)
    damped = b.copy()
    if directions is not None:
        for intruder in directions.intruders(float(np.linalg.norm(b - a))):
            vector = directions.right[1][:, intruder.number - 1]
            damped += (factor - 1) * np.outer(b @ vector, vector)
    return damped if np.shape(after)[0] >= np.shape(after)[1] else damped.T


def change_pattern(before: Matrix, after: Matrix) -> tuple[UpdatePattern | None, float | None]:
    """Name a change: entries set to zero, entries rounded to a grid, few entries changed.

    Returns:
        The pattern and the share of entries concerned; twice ``None`` for any other change.

    Examples:
        >>> w = np.random.default_rng(0).normal(size=(64, 64))
        >>> change_pattern(w, np.where(np.abs(w) < np.median(np.abs(w)), 0, w))
        (<UpdatePattern.ZEROS: 'zeros'>, 0.5)
        >>> change_pattern(w, np.round(4 * w) / 4)[0]
        <UpdatePattern.GRID: 'grid'>
    """
    zeros = [float(np.mean(np.asarray(matrix) == 0)) for matrix in (before, after)]
    if grid_step(after) is not None and grid_step(before) is None:
        return UpdatePattern.GRID, None
    if zeros[1] - zeros[0] >= _ZEROS:
        return UpdatePattern.ZEROS, zeros[1] - zeros[0]
    changed = float(np.mean(np.asarray(before, np.float64) != np.asarray(after, np.float64)))
    return (UpdatePattern.SPARSE, changed) if changed <= _FEW else (None, None)


def grid_step(matrix: Matrix) -> float | None:
    """The step of the grid that a matrix's rows, or groups of their entries, lie on; ``None`` where there is none.

    Examples:
        >>> w = np.random.default_rng(0).normal(size=(32, 64))
        >>> grid_step(np.round(4 * w) / 4), grid_step(w)
        (0.25, None)
    """
    rows, columns = matrix.shape
    sample = np.asarray(matrix[np.linspace(0, rows - 1, min(rows, _GRID_ROWS)).astype(int)], np.float64)
    for width in dict.fromkeys((columns, 128, 64, 32, 16)):
        if width > columns or width < 8:
            continue
        starts = (np.arange(len(sample)) * width) % (columns - width + 1) // width * width
        steps = [
            _step_of_levels(row[start : start + width]) for row, start in zip(sample, starts, strict=True)
        ]
        regular = [step for step in steps if step is not None]
        if len(regular) >= 0.9 * len(steps) and any(step > 0 for step in regular):
            return float(np.median([step for step in regular if step > 0]))
    return None


def _step_of_levels(entries: Matrix) -> float | None:
    """The spacing of equally spaced levels; of few uneven ones, their mean spacing; ``None`` where there are none."""
    levels = np.unique(entries)
    gaps = np.diff(levels)
    # Decoding leaves levels a rounding apart.
    levels = np.concatenate([levels[:1], levels[1:][gaps > 1e-4 * (levels[-1] - levels[0])]])
    if levels.size < 2:
        return 0.0
    gaps = np.diff(levels)
    if levels.size <= 16 and entries.size >= 4 * levels.size:
        return float(gaps.mean())
    if levels.size > 0.95 * entries.size and entries.size > _GRID_LEVELS:
        return None
    step = float(gaps.min())
    if (levels[-1] - levels[0]) / step > _GRID_LEVELS:
        return None
    places = (levels - levels[0]) / step
    return step if np.abs(places - np.rint(places)).max() < 0.05 else None


def _projection(before: Matrix, after: Matrix) -> tuple[float, ...] | None:
    """A sketch of the direction that an update of rank 1 projected out of a matrix; ``None`` for any other update.

    Abliteration removes one direction of the residual stream from every layer that writes to it: of ``B``, nothing is
    left along the direction of ``B - A``. A LoRA of rank 1 adds something instead.
    """
    a, b = np.asarray(before, np.float64), np.asarray(after, np.float64)
    left, _, right = np.linalg.svd(b - a, full_matrices=False)
    for direction, start, end in ((left[:, 0], a, b), (right[0], a.T, b.T)):
        if np.linalg.norm(direction @ end) < _REMOVED * np.linalg.norm(direction @ start):
            probes = np.random.default_rng(direction.size).standard_normal((_SKETCH, direction.size))
            return tuple((probes @ direction).tolist())
    return None


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
    from scipy.stats import wasserstein_distance

    return float(wasserstein_distance(*logs))


def _logs(values: FloatArray) -> FloatArray:
    finite = values[np.isfinite(values)]
    positive = finite[finite > finite.max(initial=0.0) * np.finfo(np.float64).eps]
    return np.asarray(np.log(positive), dtype=np.float64)


@dataclass(frozen=True)
class _LeadingDirections:
    """Leading singular directions of two matrices, outputs and inputs.

    Attributes:
        count: As many as the stable rank of the first matrix, rounded up.
        values: Leading singular values of both, descending.
        left: Their left singular vectors, as columns.
        right: Their right singular vectors, as columns.
    """

    count: int
    values: list[FloatArray]
    left: list[FloatArray]
    right: list[FloatArray]

    @classmethod
    def of(cls, a: FloatArray, b: FloatArray) -> _LeadingDirections | None:
        """``None`` where one of the matrices is zero."""
        columns = a.shape[1]
        total = float(np.square(a).sum())
        if columns == 0 or total <= 0 or not np.any(b):
            return None
        # The largest singular value is among the leading ones, so these are computed before their number is known.
        most = min(columns, max(4 * _INTRUDER_DIRECTIONS, 1))
        top = _leading(a, most)
        count = int(np.clip(np.ceil(total / top[0][0] ** 2 - 1e-9), 1, max(1, columns // 2)))
        if count > most:
            top = _leading(a, count)
        later = _leading(b, max(count, min(columns, _INTRUDER_DIRECTIONS)))
        return cls(count, [top[0], later[0]], [top[1], later[1]], [top[2], later[2]])

    @property
    def overlap(self) -> float:
        """Mean squared cosine of the principal angles, averaged over outputs and inputs."""
        shares = [
            float(np.square(first[:, : self.count].T @ last[:, : self.count]).sum()) / self.count
            for first, last in (self.left, self.right)
        ]
        return float(np.clip(np.mean(shares), 0.0, 1.0))

    @property
    def by_chance(self) -> float:
        """What two random subspaces give."""
        rows, columns = self.left[0].shape[0], self.right[0].shape[0]
        return float(self.count * (1 / rows + 1 / columns) / 2)

    def intruders(self, size: float) -> tuple[Intruder, ...]:
        """Directions of the later matrix without a partner.

        Args:
            size: Frobenius norm of the update. A random one of this norm has the spectral norm ``size (m^-1/2 +
                n^-1/2)``; it leaves every direction with at least three quarters of its square inside the directions
                whose singular values are at most twice that norm smaller.
        """
        rows, columns = self.left[0].shape[0], self.right[0].shape[0]
        margin = _WINDOW * size * (rows**-0.5 + columns**-0.5)
        first, last = self.values
        intruders = []
        for j in range(min(_INTRUDER_DIRECTIONS, last.size, columns // 4)):
            inside = int(np.count_nonzero(first >= last[j] - margin))
            if inside == first.size:
                break  # the window reaches beyond what was computed: this deep, all directions have partners
            overlap = float(
                np.mean(
                    [
                        np.square(mine[:, :inside].T @ theirs[:, j]).sum()
                        for mine, theirs in (self.left, self.right)
                    ]
                )
            )
            if overlap < _OWN_SHARE:
                intruders.append(Intruder(j + 1, float(last[j] / last[0]), overlap))
        return tuple(intruders)


def _leading(matrix: FloatArray, count: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The largest singular values, descending, with left and right singular vectors; the matrix is tall."""
    size = matrix.shape[1]
    squares, right = scipy.linalg.eigh(matrix.T @ matrix, subset_by_index=(size - count, size - 1))
    values, right = np.sqrt(squares[::-1].clip(min=0.0)), right[:, ::-1]
    left = np.linalg.qr(matrix @ right)[0]
    return values, left, right


def _singular_values(matrix: FloatArray) -> FloatArray:
    """Ascending; by way of the triangular factor, which keeps the small ones that a Gram matrix would lose."""
    if matrix.size == 0:
        return np.zeros(0)
    small = np.linalg.qr(matrix, mode="r") if matrix.shape[0] > 2 * matrix.shape[1] else matrix
    return np.asarray(scipy.linalg.svdvals(small)[::-1], dtype=np.float64)


def _tall(matrix: Matrix) -> FloatArray:
    wide = np.asarray(matrix, dtype=np.float64)
    return wide if wide.shape[0] >= wide.shape[1] else wide.T
