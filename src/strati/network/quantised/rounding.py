r"""How large the error is that rounding leaves in a weight, and the floor it puts under the spectrum.

A value rounded to the nearest of equally spaced codes is off by :math:`\Delta^2/12` in the mean square, and by
:math:`(a^3 + b^3) / (3 (a + b))` where its cell reaches ``a`` down and ``b`` up. Errors of different entries are as
good as independent (Gray and Neuhoff 1998), so that an ``N x M`` matrix of them has eigenvalues up to
:math:`\bar\epsilon\,(\sqrt N + \sqrt M)^2`, the Marchenko-Pastur edge: directions of the weight below that are lost in
rounding.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def noise_floor(error: float, rows: int, cols: int) -> float:
    """The largest eigenvalue of ``E^T E`` for rounding errors ``E`` of the given mean square.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> W = rng.normal(size=(400, 100))
        >>> E = W - np.round(W / 0.25) * 0.25
        >>> largest = np.linalg.norm(E, 2) ** 2
        >>> bool(0.9 < largest / noise_floor(0.25**2 / 12, 400, 100) < 1.1)
        True
    """
    return error * (sqrt(rows) + sqrt(cols)) ** 2


def even(steps: NDArray[Any]) -> float:
    """Mean square error of rounding to equally spaced codes, ``steps`` apart (entry by entry, or group by group)."""
    return float(np.mean(np.square(steps, dtype=np.float64)) / 12)


def uneven(codes: NDArray[Any], book: NDArray[Any], scales: NDArray[Any]) -> float:
    """Mean square error of rounding to the values of a codebook.

    Args:
        codes: Indices into the codebook, one row per scale.
        book: The values.
        scales: What the codebook's values are multiplied by, one per row of ``codes``.
    """
    inside = _cells(book)[codes].mean(axis=1)
    return float(np.mean(np.square(scales.astype(np.float64).ravel()) * inside))


def _cells(book: NDArray[Any]) -> NDArray[np.float64]:
    """Mean square error inside the cell of each value; equal values (0 and -0) share theirs."""
    values, place = np.unique(book.astype(np.float64) + 0.0, return_inverse=True)
    if values.size < 2:
        return np.zeros(book.size)
    half = np.diff(values) / 2
    down, up = np.append(half[:1], half), np.append(half, half[-1:])
    return ((down**3 + up**3) / (3 * (down + up)))[place]


def floats(values: NDArray[Any], scales: NDArray[np.float32] | float) -> float:
    """Mean square error of rounding to a small floating-point type, from the spacing at each value.

    Args:
        values: Values of the type itself (float8).
        scales: What they are multiplied by, of a shape that broadcasts.
    """
    import ml_dtypes

    info = ml_dtypes.finfo(values.dtype)
    size = np.maximum(np.abs(values.astype(np.float32)), np.float32(info.smallest_normal))
    spacing = np.ldexp(np.float32(1), np.frexp(size)[1] - 1 - info.nmant)
    return even(np.where(np.isfinite(spacing), spacing, 0) * scales)


def lattice(values: NDArray[Any], group: int) -> float:
    """Mean square error of rounding, told from the values alone: the least gap between values of a group.

    Groups are runs of ``group`` entries of the last axis. A group whose values are all equal has no step to show.
    """
    rows = values.astype(np.float32, copy=False).reshape(-1, group)
    gaps = np.diff(np.sort(rows, axis=1), axis=1)
    tiny = np.abs(rows).max(axis=1, keepdims=True) * np.float32(1e-5)
    least = np.where(gaps > tiny, gaps, np.inf).min(axis=1)
    return even(np.where(np.isfinite(least), least, 0))
