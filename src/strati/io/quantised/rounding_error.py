r"""How large the error is that rounding leaves in a weight, and the floor it puts under the spectrum.

A value rounded to the nearest of equally spaced codes is off by :math:`\Delta^2/12` in the mean square, and by
:math:`(a^3 + b^3) / (3 (a + b))` where its cell reaches ``a`` down and ``b`` up. Errors of different entries are as
good as independent (Gray and Neuhoff 1998). Where all are equally large, an ``N x M`` matrix of them has eigenvalues up
to :math:`\bar\epsilon\,(\sqrt N + \sqrt M)^2`, the Marchenko-Pastur edge. Steps of real networks differ from row to row
and group to group, and then the largest eigenvalue is larger, up to a hundred times; so it is drawn: directions of the
weight below it are lost in rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Variances = NDArray[np.float32]

_ENTRIES = 2_000_000  # drawn at least, over all draws: small matrices differ more from draw to draw
_DRAWS = 12  # at most
_LARGEST = 64_000_000  # entries that are drawn at most: of larger matrices some rows stand for all


@dataclass(frozen=True)
class Rounding:
    """What rounding did to a layer.

    Attributes:
        error: Mean square of the error.
        floor: The largest eigenvalue of ``E^T E`` for random errors ``E`` of these sizes.
    """

    error: float
    floor: float


def rounding_of(variances: Iterable[NDArray[Any]]) -> Rounding:
    """Error and floor of a layer, from the error's variance at every entry of its matrices."""
    total, entries, floor = 0.0, 0, 0.0
    for variance in variances:
        total += float(variance.sum(dtype=np.float64))
        entries += variance.size
        floor = max(floor, noise_floor(variance))
    return Rounding(total / max(entries, 1), floor)


def noise_floor(variance: NDArray[Any]) -> float:
    """The largest eigenvalue of ``E^T E`` for independent errors ``E`` of the given variances, by drawing them.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> W, steps = rng.normal(size=(400, 100)), np.where(np.arange(400) < 20, 0.5, 0.1)[:, None]
        >>> E = W - np.round(W / steps) * steps
        >>> floor = noise_floor(np.broadcast_to(steps**2 / 12, W.shape))
        >>> bool(0.9 < np.linalg.norm(E, 2) ** 2 / floor < 1.1)
        True
    """
    rows, cols = variance.shape
    if not variance.size or not np.isfinite(variance).all():
        return 0.0
    sampled = min(rows, max(_LARGEST // cols, 1))
    part = variance if sampled == rows else variance[np.linspace(0, rows - 1, sampled).astype(np.int64)]
    spread = np.sqrt(3 * part, dtype=np.float32)  # a uniform error of this half-width has the variance
    rng = np.random.default_rng(0)
    draws = int(np.clip(_ENTRIES // spread.size, 1, _DRAWS))
    tops = []
    for _ in range(draws):
        error = rng.random(spread.shape, dtype=np.float32)
        error *= 2
        error -= 1
        error *= spread
        tops.append(largest_singular_value(error, rng) ** 2)
    scaled = float(np.mean(tops)) * ((sqrt(rows) + sqrt(cols)) / (sqrt(sampled) + sqrt(cols))) ** 2
    # No row or column alone is longer than the largest singular value.
    longest = max(float(variance.sum(axis=axis, dtype=np.float64).max()) for axis in (0, 1))
    return max(scaled, longest)


def largest_singular_value(
    matrix: NDArray[Any], rng: np.random.Generator, *, tolerance: float = 1e-2
) -> float:
    """The largest singular value, of large matrices by Lanczos iterations.

    Args:
        matrix: The matrix.
        rng: Draws the start.
        tolerance: Of the iterations.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> A = rng.normal(size=(300, 250))
        >>> bool(abs(largest_singular_value(A, rng) / np.linalg.norm(A, 2) - 1) < 0.01)
        True
    """
    if min(matrix.shape) < 200:
        return float(np.linalg.norm(matrix, 2))
    from scipy.sparse.linalg import svds

    start = rng.standard_normal(min(matrix.shape)).astype(matrix.dtype)
    if not matrix.any():
        return 0.0
    return float(svds(matrix, k=1, return_singular_vectors=False, v0=start, tol=tolerance)[0])


def even(steps: NDArray[Any]) -> Variances:
    """Mean square error of rounding to equally spaced codes, ``steps`` apart (entry by entry, or group by group)."""
    return np.asarray(np.square(steps, dtype=np.float32) / np.float32(12))


def uneven(codes: NDArray[Any], book: NDArray[Any], scales: NDArray[Any]) -> Variances:
    """Mean square error of rounding to the values of a codebook, code by code.

    Args:
        codes: Indices into the codebook, one row per scale.
        book: The values.
        scales: What the codebook's values are multiplied by, one per row of ``codes``.
    """
    inside: NDArray[np.float32] = _cells(book).astype(np.float32)[codes]
    inside *= np.square(scales.astype(np.float32).reshape(-1, 1))
    return inside


def _cells(book: NDArray[Any]) -> NDArray[np.float64]:
    """Mean square error inside the cell of each value; equal values (0 and -0) share theirs."""
    values, place = np.unique(book.astype(np.float64) + 0.0, return_inverse=True)
    if values.size < 2:
        return np.zeros(book.size)
    half = np.diff(values) / 2
    down, up = np.append(half[:1], half), np.append(half, half[-1:])
    return ((down**3 + up**3) / (3 * (down + up)))[place]


def floats(values: NDArray[Any], scales: NDArray[np.float32] | float) -> Variances:
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


def lattice(values: NDArray[Any], group: int) -> Variances:
    """Mean square error of rounding, from the smallest gap between the values of a group.

    Groups are runs of ``group`` entries of the last axis. A group whose values are all equal has no step to show.
    """
    rows = values.astype(np.float32, copy=False).reshape(-1, group)
    gaps = np.diff(np.sort(rows, axis=1), axis=1)
    tiny = np.abs(rows).max(axis=1, keepdims=True) * np.float32(1e-5)
    least = np.where(gaps > tiny, gaps, np.inf).min(axis=1)
    return np.repeat(even(np.where(np.isfinite(least), least, 0)), group).reshape(values.shape)
