r"""How many directions of a difference of weights lie beyond rounding, and what kind of update that is.

Between ``A`` and ``B`` that hold the same real weights, each rounded to its own dtype, the difference is rounding
noise: entry ``ij`` has variance :math:`(u^A_{ij})^2/12 + (u^B_{ij})^2/12` with the dtypes' spacings ``u`` at that
weight. The largest singular value of such noise is simulated; singular values of ``B - A`` above it are counted. A
merged LoRA of rank r is ``B = round(A + L)``: r directions and one rounding. Where less is left over than two
roundings would leave, :func:`smallest_rank` asks exactly which rank's rounding gives ``B``. A full fine-tune leaves
directions at all sizes. Spacings of dtypes, rounding errors and conversions stand at the end of this module.

An update below the dtype's step shows only its largest directions. ``low-rank`` is therefore claimed only where the
next direction of a falling spectrum would have shown as well, and where what is left of every entry fits into the
roundings; otherwise the kind is ``undecided``. The rank is judged within the rows and columns that changed: single
entries that changed are no low-rank update. ``rounding`` is claimed only where the two dtypes differ and every entry
differs by what the conversion gives: two networks of one dtype are the same or they are not.

Where rounding errors are much larger in some rows or columns than in others, the few large ones would hide every
direction that lies elsewhere: rows and columns are divided by the size of their errors first, which changes no rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.linalg

from strati.io.quantised.rounding_error import largest_singular_value
from strati.spectra.marchenko_pastur import (
    TRACY_WIDOM_MEAN,
    TRACY_WIDOM_VARIANCE,
    tracy_widom_cdf,
    tracy_widom_quantile,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray

    Matrix = NDArray[Any]

LEVEL = 1e-3
"""Chance that rounding alone counts as a direction, per layer."""

COARSE = ("float16", "bfloat16")
"""The half-precision dtypes that updates and intermediate copies are computed in."""

_SAMPLE, _FEWEST_VALUES = 4096, 16
_FROM_COARSEST = ("float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32", "float64")
_COARSER_THAN_FLOAT16 = _FROM_COARSEST[:3]
_DRAWS = 8
_CLOSE = 1e-4  # tolerance of the largest singular values of draws
_UNSURE = 1.4
_EXCESS = 1.25  # what is left may carry this much of rounding's energy before it counts as more than rounding
_ABSENT = 0.7  # below this share of its energy, a dtype's rounding cannot be part of the difference
_SUMS = 64  # roundings of a product of factors in float32, one for each of its sums; in half precision one
_UNEQUAL = 1.5  # mean size of the errors times the mean of its inverse, 1 where all are equal
_LEAST = 1e-6  # rows of zeros have errors of next to no size
_FALL = 2.0  # the steepest spectrum, k^-2, whose next direction must show before an update is called low-rank
_CLEAR = 1.2  # by this factor
_TWO_ROUNDINGS = (
    0.85,
    1.2,
)  # energy of two roundings against what is expected: 0.95 to 1.17; of one 0.4 to 0.7
_COARSE_SHARE = 1e-2  # of an update's energy that computing it in a coarser dtype may lose
_EXPLAINED = 2e-4  # share of rounding's energy by which entries may still miss their intervals
_ROUNDS = 24
_OVER = 0.8  # over-relaxation of the projection


class UpdateKind(StrEnum):
    """What became of a layer."""

    UNTOUCHED = "untouched"
    ROUNDING = "rounding"
    LOW_RANK = "low-rank"
    DENSE = "dense"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class RankTest:
    """Directions beyond rounding.

    Attributes:
        rank: How many singular values of the difference rounding does not explain.
        pvalue: The chance that rounding gives a singular value as large as the weakest one counted (the largest one
            where none is); ``None`` where nothing changed.
        kind: What kind of update this is.
    """

    rank: int
    pvalue: float | None
    kind: UpdateKind


def rank_test(
    before: Matrix,
    after: Matrix,
    singular: FloatArray,
    *,
    rng: np.random.Generator,
    variance: FloatArray | float = 0.0,
    converted: bool = True,
) -> RankTest:
    """Count the directions of ``after - before`` beyond rounding and name the kind of the update.

    Args:
        before: ``A`` in the dtype it is stored in.
        after: ``B`` likewise, of the same shape.
        singular: Singular values of ``B - A``, ascending.
        rng: Draws the noise.
        variance: Variance per entry of further rounding that the dtypes do not show (a quantised side).
        converted: With a variance, whether the two sides are stored in different formats, so that a conversion
            lies between them.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> A = rng.normal(size=(80, 60)).astype(np.float32)
        >>> B = (A + 0.1 * rng.normal(size=(80, 3)) @ rng.normal(size=(3, 60))).astype(np.float32)
        >>> rank_test(A, B, np.linalg.svd(B.astype(float) - A, compute_uv=False)[::-1], rng=rng)
        RankTest(rank=3, pvalue=0.0, kind=<UpdateKind.LOW_RANK: 'low-rank'>)
    """
    step = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    if not step.any():
        return RankTest(0, None, UpdateKind.UNTOUCHED)
    test = _rank_test(before, after, step, singular, rng, variance, converted)
    changed = min(int(np.count_nonzero(step.any(axis=axis))) for axis in (0, 1))
    few = changed < min(step.shape)
    if test.kind is UpdateKind.LOW_RANK and few and test.rank > changed // 3:
        return replace(test, kind=UpdateKind.DENSE)
    return test


def _rank_test(
    before: Matrix,
    after: Matrix,
    step: FloatArray,
    singular: FloatArray,
    rng: np.random.Generator,
    variance: FloatArray | float,
    converted: bool,
) -> RankTest:
    # Below this a singular value is the arithmetic's, not the weights'.
    arithmetic = (np.finfo(np.float64).eps * float(singular[-1])) ** 2
    sides = [rounding_variance(before), rounding_variance(after)]
    # The update was rounded itself, before it was added: this shows where it is as large as the weights.
    dtypes = [effective_dtype(before), effective_dtype(after)]
    sums = (_SUMS if dtypes[1] in ("float32", "float64") else 1) * spacing(step, dtypes[1]) ** 2 / 12
    noise = sides[0] + sides[1] + variance + arithmetic + sums
    if np.any(variance):
        # Of a quantised side the sizes of errors are a guess, too rough to divide by or to fit exactly.
        counted = _count(step, singular, noise, rng)
        if counted.rank == 0:
            return replace(counted, kind=UpdateKind.ROUNDING if converted else UpdateKind.UNDECIDED)
        return _with_coarse_update(step, singular, noise, counted, rng)
    if is_conversion(before, after):
        return RankTest(0, _count(step, singular, noise, rng).pvalue, UpdateKind.ROUNDING)
    if dtypes[0] != dtypes[1]:
        exact = _of_exact_sum(step, singular, sides, sums + arithmetic, rng)
        if exact is not None:
            return exact
    return _of_rounded_sum(before, after, step, singular, noise, rng)


def _of_exact_sum(
    step: FloatArray,
    singular: FloatArray,
    sides: list[FloatArray],
    extra: FloatArray,
    rng: np.random.Generator,
) -> RankTest | None:
    """The update where the coarser network was never rounded: the finer one was computed from it.

    Rounding of the coarser dtype would leave all of its energy in the difference, so its absence shows.
    """
    fine, coarse = sorted(sides, key=lambda side: float(side.sum()))
    noise = 2 * fine + extra
    counted = _count(step, singular, noise, rng)
    if counted.kind is UpdateKind.LOW_RANK:
        return counted
    absent = _tail_energy(singular, 0) < _ABSENT * float(coarse.sum())
    return counted if absent and counted.rank else None


def _of_rounded_sum(
    before: Matrix,
    after: Matrix,
    step: FloatArray,
    singular: FloatArray,
    noise: FloatArray,
    rng: np.random.Generator,
) -> RankTest:
    sizes = _sizes(noise)
    scaled, values = step, singular
    if sizes is not None:
        scaled, noise = step / sizes, noise / sizes**2
        values = scipy.linalg.svdvals(scaled)[::-1]
    counted = _count(scaled, values, noise, rng)
    if _tail_energy(values, counted.rank) < 0.9 * _left(step.shape, counted.rank) * noise.sum():
        return _exact(before, after, sizes, counted, rng)
    if counted.kind is UpdateKind.LOW_RANK and effective_dtype(after) not in ("float32", "float64"):
        # Noise of the update's own has the energy of a second rounding, but not its bounded entries.
        bound = np.sqrt(3 * rounding_variance(before)) + np.sqrt(3 * rounding_variance(after))
        bound = bound + spacing(step, effective_dtype(after)) / 2
        if not _explains(scaled, bound if sizes is None else bound / sizes, counted.rank):
            return replace(counted, kind=UpdateKind.UNDECIDED)
    return _with_coarse_update(scaled, values, noise, counted, rng, sizes)


def _with_coarse_update(
    step: FloatArray,
    singular: FloatArray,
    noise: FloatArray,
    counted: RankTest,
    rng: np.random.Generator,
    sizes: FloatArray | None = None,
) -> RankTest:
    """Allow for an update that was computed in a coarser dtype before the sum was stored in a finer one."""
    if counted.kind is not UpdateKind.DENSE:
        return counted
    scale = 1.0 if sizes is None else sizes
    for dtype in COARSE:
        coarse = noise + (spacing(step * scale, dtype) / scale) ** 2 / 12
        small = coarse.sum() < _COARSE_SHARE * float(np.square(singular).sum())
        if small and _tail_energy(singular, min(step.shape) // 4) < _EXCESS * coarse.sum():
            again = _count(step, singular, coarse, rng)
            if again.kind is UpdateKind.LOW_RANK:
                return again
    return counted


def _sizes(noise: FloatArray) -> FloatArray | None:
    """The size of the errors, row times column; ``None`` where all are about as large."""
    rows = noise.mean(axis=1)
    rows = np.maximum(rows, _LEAST * rows.mean())
    columns = (noise / rows[:, None]).mean(axis=0)
    columns = np.maximum(columns, _LEAST * columns.mean())
    if max(float(side.mean() * (1 / side).mean()) for side in (rows, columns)) < _UNEQUAL:
        return None
    sizes: FloatArray = np.sqrt(rows[:, None] * columns / (rows.mean() * columns.mean()))
    return sizes


def _exact(
    before: Matrix, after: Matrix, sizes: FloatArray | None, counted: RankTest, rng: np.random.Generator
) -> RankTest:
    """Ask which rank's rounding gives the difference, where the update is not far above the rounding."""
    start, end = np.asarray(before, np.float64), np.asarray(after, np.float64)
    step = end - start
    dtypes = effective_dtype(before), effective_dtype(after)
    halves = [spacing(m, dtype) / 2 for m, dtype in zip((start, end), dtypes, strict=True)]
    # One rounding: that of the sum, or, where the first network is the coarser one, that of its own weights.
    first_is_coarser = halves[0].sum() > 2 * halves[1].sum()
    half = halves[0] if first_is_coarser else halves[1]
    half = half + spacing(step, dtypes[1]) / 2  # the update was rounded before it was added
    scale = 1.0 if sizes is None else sizes
    if float(np.square(step / scale).mean()) > 900 * float(np.square(half / scale).mean()):
        return counted
    smallest = smallest_rank(step / scale, half / scale, counted.rank)
    if smallest is None:
        claimed = counted.kind is UpdateKind.LOW_RANK and not first_is_coarser
        if claimed and not _rounded_twice(step, 2 * halves[1], counted.rank):
            return replace(counted, kind=UpdateKind.UNDECIDED)
        return counted
    if smallest.rank == 0:
        return RankTest(0, counted.pvalue, UpdateKind.UNDECIDED)
    magnitudes = np.abs(smallest.missed)
    null = _largest(lambda: magnitudes * rng.choice((-1.0, 1.0), magnitudes.shape), magnitudes**2, rng)
    pvalue = null.pvalue(largest_singular_value(smallest.missed, rng, tolerance=_CLOSE))
    if smallest.rank <= counted.rank:
        pvalue = min(pvalue, counted.pvalue or 0.0)
    elif pvalue >= LEVEL:
        # What one direction less leaves over has no direction: noise of a second rounding was fitted.
        return counted
    if smallest.rank == counted.rank and counted.kind is UpdateKind.LOW_RANK:
        return replace(counted, pvalue=pvalue)

    def rounded_with(tail: FloatArray) -> FloatArray:
        if first_is_coarser:
            return step / scale + tail
        target = start + (smallest.part + tail) * scale
        return (rounded(target, dtypes[1]) - start) / scale

    # A tail of the update may be spread over entries of all sizes, or grow with the rounding errors.
    tails = [_falling_tail(smallest.part, smallest.rank, rng) / 2]
    if sizes is not None:
        tails.append(_falling_tail(smallest.part * sizes, smallest.rank, rng) / 2 / sizes)
    hidden = any(_explains(rounded_with(tail), half / scale, smallest.rank) for tail in tails)
    return RankTest(smallest.rank, pvalue, UpdateKind.UNDECIDED if hidden else UpdateKind.LOW_RANK)


def _rounded_twice(step: FloatArray, spacings: FloatArray, rank: int) -> bool:
    r"""Whether what the leading directions leave has the energy that two roundings of one master copy leave.

    Rounding ``W`` and ``W + L`` to a grid of spacing ``u`` gives a difference with the variance
    :math:`u^2 \varphi (1 - \varphi)` around ``L``, with :math:`\varphi` the fractional part of :math:`|L| / u`.
    """
    left, singular, right = np.linalg.svd(step, full_matrices=False)
    places = np.abs((left[:, :rank] * singular[:rank]) @ right[:rank]) / spacings
    expected = np.square(spacings) * (places % 1) * (1 - places % 1)
    ratio = float(np.square(singular[rank:]).sum()) / float(_left(step.shape, rank) * expected.sum())
    return _TWO_ROUNDINGS[0] < ratio < _TWO_ROUNDINGS[1]


def _falling_tail(part: FloatArray, rank: int, rng: np.random.Generator) -> FloatArray:
    """Directions after the last of a low-rank part, falling as steeply as a sound spectrum may."""
    leading = scipy.linalg.svdvals(part)[:rank]
    more = min(part.shape) - rank
    left, right = (np.linalg.qr(rng.standard_normal((size, more)))[0] for size in part.shape)
    number = np.arange(1, more + 1)
    falling = np.minimum((rank / (rank + number)) ** _FALL, _local_ratio(leading) ** -number)
    return np.asarray((left * (leading[-1] * falling)) @ right.T, np.float64)


def _local_ratio(leading: FloatArray) -> float:
    """By what factor each of the last directions is weaker than the one before; 1 where there is only one."""
    if leading.size < 2 or not leading[-1] > 0:
        return 1.0
    many = min(leading.size - 1, 3)
    ratio = float(leading[-1 - many] / leading[-1]) ** (1 / many)
    return ratio if leading.size > 2 else float(ratio ** np.log2(1.5))


def _count(step: FloatArray, singular: FloatArray, noise: FloatArray, rng: np.random.Generator) -> RankTest:
    values = singular[::-1]
    half = np.sqrt(3.0 * noise)  # a uniform error of this half-width has the variance
    null = _largest(lambda: rng.uniform(-1.0, 1.0, step.shape) * half, noise, rng)
    rank = null.count(values)
    weakest = float(values[max(rank - 1, 0)])
    pvalue = null.pvalue(weakest)
    if rank == 0:
        return RankTest(0, pvalue, UpdateKind.UNDECIDED)
    explained = _tail_energy(singular, rank) <= _EXCESS * _left(step.shape, rank) * noise.sum()
    if not explained or rank > max(1, min(step.shape) // 2) or rank == min(step.shape):
        return RankTest(rank, pvalue, UpdateKind.DENSE)
    # Would the next direction of a falling spectrum have been counted? If not, more may lie below the noise.
    if weakest > _gap(values[:rank]) * null.threshold:
        return RankTest(rank, pvalue, UpdateKind.LOW_RANK)
    # A weakest direction that noise gives now and then, far below all others, is noise.
    if rank > 1 and pvalue > LEVEL / 100 and float(values[rank - 2]) > _gap(values[: rank - 1]) * weakest:
        return RankTest(rank - 1, null.pvalue(float(values[rank - 2])), UpdateKind.LOW_RANK)
    return RankTest(rank, pvalue, UpdateKind.UNDECIDED)


def _gap(leading: FloatArray) -> float:
    """How far the last direction must lie above what follows it, to be steeper than a falling spectrum."""
    return _CLEAR * max(float((1 + 1 / leading.size) ** _FALL), _local_ratio(leading))


@dataclass(frozen=True)
class _Null:
    """The largest squared singular value of noise: a Tracy-Widom law of this centre and scale."""

    centre: float
    scale: float

    def pvalue(self, value: float) -> float:
        return 1.0 - tracy_widom_cdf((value**2 - self.centre) / self.scale)

    @property
    def threshold(self) -> float:
        """The singular value that noise exceeds with a chance of :data:`LEVEL`."""
        return float(np.sqrt(max(self.centre + tracy_widom_quantile(1 - LEVEL) * self.scale, 0.0)))

    def count(self, values: FloatArray) -> int:
        """How many of the values stand above the noise."""
        return int(np.count_nonzero(values > self.threshold))


def _largest(draw: Callable[[], FloatArray], variance: FloatArray, rng: np.random.Generator) -> _Null:
    rows, columns = variance.shape
    tops = np.array(
        [
            largest_singular_value(draw(), rng, tolerance=_CLOSE) ** 2
            for _ in range(_DRAWS if max(rows, columns) < 1500 else 4)
        ]
    )
    even = (
        float(variance.mean()) * (np.sqrt(rows) + np.sqrt(columns)) * (rows**-0.5 + columns**-0.5) ** (1 / 3)
    )
    # A few draws may show too little spread; rows of very unequal size have more than the law of equal ones says.
    scale = max(
        even, _UNSURE * float(tops.std(ddof=1) / np.sqrt(TRACY_WIDOM_VARIANCE)), np.finfo(np.float64).tiny
    )
    return _Null(float(tops.mean()) - TRACY_WIDOM_MEAN * scale, scale)


def _tail_energy(singular: FloatArray, rank: int) -> float:
    return float(np.square(singular[: singular.size - rank]).sum())


def _left(shape: tuple[int, ...], rank: int) -> float:
    """The share of the noise's energy that is left when the leading directions are removed."""
    return (1 - rank / shape[0]) * (1 - rank / shape[1])


@dataclass(frozen=True)
class Fit:
    """How well a rank explains a difference.

    Attributes:
        explained: Whether all intervals are met but for a rest that shrinks to nothing.
        part: The matrix of this rank.
        missed: What is missing to the intervals, entry by entry.
    """

    explained: bool
    part: FloatArray
    missed: FloatArray


@dataclass(frozen=True)
class SmallestRank:
    """The smallest rank that explains a difference, a matrix of it, and what one less leaves unexplained."""

    rank: int
    part: FloatArray
    missed: FloatArray


def smallest_rank(step: FloatArray, half: FloatArray, start: int) -> SmallestRank | None:
    r"""The smallest rank, up to a sixth of the shorter side, whose rounding gives the difference.

    ``B = round(A + L)`` puts every entry of ``L`` into an interval, :math:`|L_{ij} - (B - A)_{ij}| \le u_{ij}/2` with
    the spacing ``u`` of the dtype. Whether a matrix of rank k lies in all intervals is asked by alternating
    projections: clip into the intervals, project onto rank k, repeat. This shows directions far below the noise of
    rounding, for the rounding of a sum is deterministic. Beyond a sixth of the side a matrix has so many parameters
    that noise of a second rounding is fitted too.

    Args:
        step: ``B - A``.
        half: Half the spacing at each entry of ``B``.
        start: Where to begin looking.

    Returns:
        ``None`` where no such rank explains it.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> A = np.round(rng.normal(size=(90, 60)) * 8) / 8
        >>> L = 0.1 * rng.normal(size=(90, 2)) @ rng.normal(size=(2, 60))
        >>> smallest_rank(np.round((A + L) * 8) / 8 - A, np.full(A.shape, 1 / 16), start=1).rank
        2
    """
    tall, width = (step, half) if step.shape[0] >= step.shape[1] else (step.T, half.T)
    size = tall.shape[1]
    limit = max(size // 6, min(start, size // 2))
    if limit < 1:
        return None
    _, vectors = scipy.linalg.eigh(tall.T @ tall, subset_by_index=(size - limit, size - 1))
    leading: FloatArray = vectors[:, ::-1]
    fits = {0: Fit(bool((np.abs(tall) <= width).all()), np.zeros_like(tall), tall)}

    def explained(rank: int) -> bool:
        if rank not in fits:
            fits[rank] = _fit(tall, width, leading[:, :rank])
        return fits[rank].explained

    high = min(max(start, 1), limit)
    while not explained(high):
        if high == limit:
            return None
        high = min(2 * high, limit)
    low = -1  # explains nothing, by definition
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if explained(middle) else (middle, high)
    if high > 0:
        explained(high - 1)
    part, missed = fits[high].part, fits[max(high - 1, 0)].missed
    return SmallestRank(high, part, missed) if tall is step else SmallestRank(high, part.T, missed.T)


def _explains(step: FloatArray, half: FloatArray, rank: int) -> bool:
    """Whether some matrix of a rank lies in all intervals."""
    tall, width = (step, half) if step.shape[0] >= step.shape[1] else (step.T, half.T)
    size = tall.shape[1]
    _, vectors = scipy.linalg.eigh(tall.T @ tall, subset_by_index=(size - rank, size - 1))
    return _fit(tall, width, vectors).explained


def _fit(step: FloatArray, half: FloatArray, vectors: FloatArray) -> Fit:
    low, high = step - half, step + half
    energy = float(np.square(half).sum()) / 3
    part = (step @ vectors) @ vectors.T
    history: list[float] = []
    for _ in range(_ROUNDS):
        missed = np.clip(part, low, high) - part
        history.append(float(np.square(missed).sum()) / energy)
        if history[-1] < _EXPLAINED:
            return Fit(True, part, missed)
        if len(history) > 6 and history[-1] > 0.8 * history[-4]:  # no longer shrinking: the rank does not do
            break
        target = part + (1 + _OVER) * missed
        vectors = np.linalg.qr(target.T @ (target @ vectors))[0]
        part = (target @ vectors) @ vectors.T
    return Fit(False, part, missed)


def rounding_variance(matrix: Matrix) -> FloatArray:
    """Variance of the rounding error of each weight: its spacing squared over 12.

    The dtype is the coarsest that holds every weight exactly: bfloat16 weights saved as float32 are as rough as before.

    Examples:
        >>> rounding_variance(np.array([[1.0, 2.0]], np.float32)).tolist() == [[2**-46 / 12, 2**-44 / 12]]
        True
    """
    return np.asarray(spacing(np.asarray(matrix, np.float64), effective_dtype(matrix)) ** 2 / 12, np.float64)


def quantised_variance(matrix: Matrix, error: float, group: int | None) -> FloatArray:
    """Variance of the rounding error of each entry of a quantised matrix: larger where its group's values are larger.

    Args:
        matrix: The decoded weights, outputs by inputs.
        error: Mean square error over the whole matrix.
        group: Entries of a row that share a step; ``None`` for whole rows.

    Examples:
        >>> quantised_variance(np.array([[1.0, -1.0], [3.0, 0.0]]), 0.5, None).tolist()
        [[0.1, 0.1], [0.9, 0.9]]
    """
    sizes = np.abs(np.asarray(matrix, np.float64))
    rows, columns = sizes.shape
    width = group if group and columns % group == 0 else columns
    tops = sizes.reshape(rows, columns // width, width).max(axis=2, keepdims=True) ** 2
    profile = np.broadcast_to(tops, (rows, columns // width, width)).reshape(rows, columns)
    mean = float(profile.mean())
    return profile * (error / mean) if mean > 0 else np.full(sizes.shape, error)


def is_conversion(before: Matrix, after: Matrix) -> bool:
    """Whether one array is the other in another dtype, or both are one array in two dtypes.

    The dtypes must differ, every entry must differ by no more than the roundings allow, and the errors must be as
    large as roundings are: a small update of a coarse network that is stored in a finer dtype leaves smaller ones.
    Conversions that drop digits instead of rounding, or pass through a third dtype, count as well.

    Examples:
        >>> x = np.linspace(0.1, 0.2, 99, dtype=np.float32)
        >>> is_conversion(x, x.astype(np.float16)), is_conversion(x, x + np.float32(1e-4))
        (True, False)
    """
    dtypes = effective_dtype(before), effective_dtype(after)
    a, b = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if _float16_of_coarser(before, after) or _float16_of_coarser(after, before):
        return True
    if dtypes[0] == dtypes[1]:
        return bool(np.array_equal(a, b))
    spacings = [spacing(a, dtypes[0]), spacing(b, dtypes[1])]
    error = b - a
    changed = error != 0
    count = int(np.count_nonzero(changed))
    if count == 0:
        return True
    energy = float((np.square(error) / ((spacings[0] ** 2 + spacings[1] ** 2) / 12))[changed].mean())
    # The square of a uniform error has a standard deviation of 0.9 times its mean.
    tolerance = 0.25 + 5 * 0.9 / np.sqrt(count)
    tie = 1 + 1e-9
    if bool((np.abs(error) <= tie * (spacings[0] + spacings[1]) / 2).all()):
        return bool(abs(energy - 1) <= tolerance)
    first_is_finer = _FROM_COARSEST.index(dtypes[0]) > _FROM_COARSEST.index(dtypes[1])
    (fine, coarse), dtype = ((a, b), dtypes[1]) if first_is_finer else ((b, a), dtypes[0])
    steps = spacing(fine, dtype)
    dropped = np.array_equal(np.trunc(fine / steps) * steps, coarse)
    twice = any(np.array_equal(rounded(rounded(fine, via), dtype), coarse) for via in COARSE)
    return dropped or (twice and bool(abs(energy - 1) <= tolerance))


def _float16_of_coarser(source: Matrix, target: Matrix) -> bool:
    """Whether the target is the source in float16, where the source has the coarser mantissa but the wider range.

    Only entries below float16's normal range change then, and their errors are not uniform. A small update would have
    moved the others off the source's grid.
    """
    if np.asarray(target).dtype != np.float16 or effective_dtype(source) not in _COARSER_THAN_FLOAT16:
        return False
    return np.array_equal(rounded(np.asarray(source, np.float64), "float16"), np.asarray(target, np.float64))


def rounded(values: FloatArray, dtype: str) -> FloatArray:
    """Values rounded to a floating dtype, as float64.

    Examples:
        >>> rounded(np.array([0.1]), "bfloat16").tolist()
        [0.10009765625]
    """
    import ml_dtypes

    stored_as = getattr(ml_dtypes, dtype) if dtype.startswith(("bfloat", "float8")) else np.dtype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.asarray(values).astype(stored_as), np.float64)


def effective_dtype(matrix: Matrix) -> str:
    """The coarsest floating dtype that holds every entry exactly.

    A finer dtype than the stored one is never returned, and a coarser one only where enough different values show
    it: ones and zeros fit every dtype.

    Examples:
        >>> few, many = np.array([1.0, 0.5], np.float32), np.arange(1.0, 40.0, dtype=np.float32)
        >>> effective_dtype(few), effective_dtype(many), effective_dtype(many / 10)
        ('float32', 'bfloat16', 'float32')
    """
    stored_as = np.asarray(matrix).dtype.name
    is_listed = stored_as in _FROM_COARSEST
    values = np.asarray(matrix, np.float64).reshape(-1)
    sample = values[:: max(values.size // _SAMPLE, 1)]
    if np.unique(sample).size < _FEWEST_VALUES:
        return stored_as if is_listed else "float64"
    for name in _FROM_COARSEST[: _FROM_COARSEST.index(stored_as)] if is_listed else _FROM_COARSEST:
        if np.array_equal(rounded(sample, name), sample) and np.array_equal(rounded(values, name), values):
            return name
    return stored_as if is_listed else "float64"


def spacing(values: FloatArray, dtype: str) -> FloatArray:
    """The distance between neighbouring numbers of a dtype at each value.

    Examples:
        >>> spacing(np.array([1.0, 3.0]), "bfloat16").tolist()
        [0.0078125, 0.015625]
    """
    import ml_dtypes

    limits = ml_dtypes.finfo(dtype)
    _, exponent = np.frexp(values)
    between = np.where(values == 0, 0.0, np.ldexp(float(limits.eps), exponent - 1))
    return np.asarray(np.maximum(between, float(limits.smallest_subnormal)), np.float64)
