r"""How many directions of a difference of weights lie beyond rounding, and what kind of update that is.

Between ``A`` and ``B`` that hold the same real weights, each rounded to its own dtype, the difference is rounding
noise: entry ``ij`` has variance :math:`(u^A_{ij})^2/12 + (u^B_{ij})^2/12` with the dtypes' spacings ``u`` at that
weight. The largest singular value of such noise is simulated; singular values of ``B - A`` above it are counted. A
merged LoRA of rank r is ``B = round(A + L)``: r directions and one rounding. Where less is left over than two
roundings would leave, it is asked exactly which rank's rounding gives ``B`` (``rounded_sum.py``). A full fine-tune
leaves directions at all sizes.

Where rounding errors are much larger in some rows or columns than in others, the few large ones would hide every
direction that lives elsewhere: rows and columns are divided by the size of their errors first, which changes no rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.linalg

from strati.network.quantised.rounding import largest_singular_value
from strati.spectra.comparing.rounded_sum import smallest_rank
from strati.spectra.tracy_widom import MEAN, VARIANCE, cdf, quantile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.types import FloatArray

    Matrix = NDArray[Any]

LEVEL = 1e-3
"""Chance that rounding alone counts as a direction, per layer."""

_DRAWS = 8
_CLOSE = 1e-4  # tolerance of the largest singular values of draws
_UNSURE = 1.4
_EXCESS = 1.25  # what is left may carry this much of rounding's energy before it counts as more than rounding
_SUMS = 64  # roundings of a product of factors in float32, one for each of its sums; in half precision one
_UNEQUAL = 1.5  # mean size of the errors times the mean of its inverse, 1 where all are equal
_LEAST = 1e-6  # rows of zeros have errors of next to no size
_COARSE = ("float16", "bfloat16")


class UpdateKind(StrEnum):
    """What became of a layer."""

    UNTOUCHED = "untouched"
    ROUNDING = "rounding"
    LOW_RANK = "low-rank"
    DENSE = "dense"


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
) -> RankTest:
    """Count the directions of ``after - before`` beyond rounding and name the kind of the update.

    Args:
        before: ``A`` in the dtype it is stored in.
        after: ``B`` likewise, of the same shape.
        singular: Singular values of ``B - A``, ascending.
        rng: Draws the noise.
        variance: Variance per entry of further rounding that the dtypes do not show (a quantised side).

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> A = rng.normal(size=(80, 60)).astype(np.float32)
        >>> B = (A + 0.1 * rng.normal(size=(80, 3)) @ rng.normal(size=(3, 60))).astype(np.float32)
        >>> rank_test(A, B, np.linalg.svd(B.astype(float) - A, compute_uv=False)[::-1], rng=rng)
        RankTest(rank=3, pvalue=0.0, kind=<UpdateKind.LOW_RANK: 'low-rank'>)
    """
    a, b = np.asarray(before, np.float64), np.asarray(after, np.float64)
    step = b - a
    if not step.any():
        return RankTest(0, None, UpdateKind.UNTOUCHED)
    # Below this a singular value is the arithmetic's, not the weights'.
    arithmetic = (np.finfo(np.float64).eps * float(singular[-1])) ** 2
    noise = rounding_variance(before) + rounding_variance(after) + variance + arithmetic
    # The update was rounded itself, before it was added: this shows where it is as large as the weights.
    dtype = effective_dtype(after)
    noise = noise + (_SUMS if dtype in ("float32", "float64") else 1) * _spacing(step, dtype) ** 2 / 12
    # Of a quantised side the sizes of errors are a guess, too rough to divide by.
    sizes = None if np.any(variance) else _sizes(noise)
    if sizes is not None:
        step, noise = step / sizes, noise / sizes**2
        singular = scipy.linalg.svdvals(step)[::-1]
    found = _count(step, singular, noise, rng)
    if _tail_energy(singular, found.rank) < 0.9 * _left(step.shape, found.rank) * noise.sum() and not np.any(
        variance
    ):
        return _exact(before, after, sizes, found, rng)
    if found.kind is not UpdateKind.DENSE:
        return found
    for dtype in _COARSE:  # the update was computed in a coarser dtype, and the sum stored in a finer one
        coarse = noise + (_spacing(b - a, dtype) / (1.0 if sizes is None else sizes)) ** 2 / 12
        if _tail_energy(singular, min(step.shape) // 4) < _EXCESS * coarse.sum():
            again = _count(step, singular, coarse, rng)
            if again.kind is UpdateKind.LOW_RANK:
                return again
    return found


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
    before: Matrix, after: Matrix, sizes: FloatArray | None, found: RankTest, rng: np.random.Generator
) -> RankTest:
    """Ask which rank's rounding gives the difference, where the update is not far above the rounding."""
    step = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    sides = [_spacing(np.asarray(m, np.float64), effective_dtype(m)) / 2 for m in (before, after)]
    # One rounding: that of the sum, or, where the first network is the coarser one, that of its own weights.
    half = (
        max(sides, key=lambda h: float(np.square(h).sum()))
        if sides[0].sum() > 2 * sides[1].sum()
        else sides[1]
    )
    half = half + _spacing(step, effective_dtype(after)) / 2  # the update was rounded before it was added
    if sizes is not None:
        step, half = step / sizes, half / sizes
    if float(np.square(step).mean()) > 900 * float(np.square(half).mean()):
        return found
    smallest = smallest_rank(step, half, found.rank)
    if smallest is None:
        return found
    if smallest.rank == 0:
        return RankTest(0, found.pvalue, UpdateKind.ROUNDING)
    rest = np.abs(smallest.missed)
    null = _largest(lambda: rest * rng.choice((-1.0, 1.0), rest.shape), rest**2, rng)
    pvalue = null.pvalue(largest_singular_value(smallest.missed, rng, tolerance=_CLOSE))
    if smallest.rank <= found.rank:
        return RankTest(smallest.rank, min(pvalue, found.pvalue or 0.0), UpdateKind.LOW_RANK)
    # What one direction less leaves over must itself have a direction: else noise of a second rounding was fitted.
    return RankTest(smallest.rank, pvalue, UpdateKind.LOW_RANK) if pvalue < LEVEL else found


def _count(step: FloatArray, singular: FloatArray, noise: FloatArray, rng: np.random.Generator) -> RankTest:
    values = singular[::-1]
    half = np.sqrt(3.0 * noise)  # a uniform error of this half-width has the variance
    null = _largest(lambda: rng.uniform(-1.0, 1.0, step.shape) * half, noise, rng)
    rank = null.count(values)
    weakest = float(values[max(rank - 1, 0)])
    pvalue = null.pvalue(weakest)
    if rank == 0:
        return RankTest(0, pvalue, UpdateKind.ROUNDING)
    explained = _tail_energy(singular, rank) <= _EXCESS * _left(step.shape, rank) * noise.sum()
    low = rank <= max(1, min(step.shape) // 2) and rank < min(step.shape) and explained
    return RankTest(rank, pvalue, UpdateKind.LOW_RANK if low else UpdateKind.DENSE)


def rounding_variance(matrix: Matrix) -> FloatArray:
    """Variance of the rounding error of each weight: its spacing squared over 12.

    The dtype is the coarsest that holds every weight exactly: bfloat16 weights saved as float32 are as rough as before.

    Examples:
        >>> rounding_variance(np.array([[1.0, 2.0]], np.float32)).tolist() == [[2**-14 / 12, 2**-12 / 12]]
        True
    """
    return np.asarray(_spacing(np.asarray(matrix, np.float64), effective_dtype(matrix)) ** 2 / 12, np.float64)


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


def within_rounding(before: Matrix, after: Matrix) -> bool:
    """Whether every entry differs by no more than rounding to the two dtypes can make it.

    Examples:
        >>> x = np.array([0.1, 0.2], np.float32)
        >>> within_rounding(x, x.astype(np.float16)), within_rounding(x, x + np.float32(0.01))
        (True, False)
    """
    a, b = np.asarray(before, np.float64), np.asarray(after, np.float64)
    most = _spacing(a, effective_dtype(before)) + _spacing(b, effective_dtype(after))
    return bool((np.abs(b - a) <= most / 2).all())


def effective_dtype(matrix: Matrix) -> str:
    """The coarsest floating dtype that holds every entry exactly.

    Examples:
        >>> effective_dtype(np.array([1.0, 0.5])), effective_dtype(np.array([0.1], np.float32))
        ('bfloat16', 'float32')
    """
    import ml_dtypes

    values = np.asarray(matrix, np.float64)
    own = np.asarray(matrix).dtype.name
    order = ["bfloat16", "float16", "float32", "float64"]
    for name in order[: order.index(own)] if own in order else order:
        kind = ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
        with np.errstate(over="ignore", invalid="ignore"):
            if np.array_equal(values.astype(kind).astype(np.float64), values):
                return name
    return own if own in order else "float64"


def _spacing(values: FloatArray, dtype: str) -> FloatArray:
    """The distance between neighbouring numbers of a dtype at each value."""
    import ml_dtypes

    limits = ml_dtypes.finfo(dtype)
    _, exponent = np.frexp(values)
    spacing = np.where(values == 0, 0.0, np.ldexp(float(limits.eps), exponent - 1))
    return np.asarray(np.maximum(spacing, float(limits.smallest_subnormal)), np.float64)


@dataclass(frozen=True)
class _Null:
    """The largest squared singular value of noise: a Tracy-Widom law of this centre and scale."""

    centre: float
    scale: float

    def pvalue(self, value: float) -> float:
        return 1.0 - cdf((value**2 - self.centre) / self.scale)

    def count(self, values: FloatArray) -> int:
        """How many of the values stand above the noise."""
        return int(np.count_nonzero(values**2 > self.centre + quantile(1 - LEVEL) * self.scale))


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
    scale = max(even, _UNSURE * float(tops.std(ddof=1) / np.sqrt(VARIANCE)), np.finfo(np.float64).tiny)
    return _Null(float(tops.mean()) - MEAN * scale, scale)


def _tail_energy(singular: FloatArray, rank: int) -> float:
    return float(np.square(singular[: singular.size - rank]).sum())


def _left(shape: tuple[int, ...], rank: int) -> float:
    """The share of the noise's energy that is left when the leading directions are removed."""
    return (1 - rank / shape[0]) * (1 - rank / shape[1])


def _leading_part(step: FloatArray, rank: int) -> FloatArray:
    if rank == 0:
        return np.zeros_like(step)
    tall = step if step.shape[0] >= step.shape[1] else step.T
    size = tall.shape[1]
    _, vectors = scipy.linalg.eigh(tall.T @ tall, subset_by_index=(size - rank, size - 1))
    part = (tall @ vectors) @ vectors.T
    return np.asarray(part if tall is step else part.T, np.float64)
