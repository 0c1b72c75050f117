"""What storing weights in a dtype does to them: spacings, rounding errors, and which arrays are conversions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray

    Matrix = NDArray[Any]

COARSE = ("float16", "bfloat16")
"""The half-precision dtypes that updates and intermediate copies are computed in."""

_SAMPLE, _FEWEST_VALUES = 4096, 16
_FROM_COARSEST = ("float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32", "float64")
_COARSER_THAN_FLOAT16 = _FROM_COARSEST[:3]


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
