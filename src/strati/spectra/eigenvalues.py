r"""The eigenvalues of :math:`W^T W` of one matrix, or of several of one shape pooled.

They come from the Gram matrix of the smaller side in float64, formed strip by strip so that a long
matrix in half precision is never held in double. The Gram route squares the condition number: an
eigenvalue below about ``1e-16`` of the largest is lost. For weights stored in float32 or coarser that is
far below what their rounding leaves defined; for float64 weights the singular values are computed directly
when, and only when, an eigenvalue that small turns up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.spectra import on_device
from strati.spectra.two_stage import symmetric_eigenvalues

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray

    Look = Callable[[NDArray[Any]], None]

COARSE = 1e-4
"""Spacing above which a dtype is one of half precision or less."""

_STRIP = 4096
_GRAM_FLOOR = 1e-9  # share of lambda_max below which a Gram eigenvalue has fewer than seven digits


@dataclass(frozen=True)
class Eigenvalues:
    """Pooled eigenvalues and what is needed to judge them.

    Attributes:
        values: Ascending, float64, none negative; empty if the weights are not finite or out of range.
        rows: The longer side ``N`` of each matrix.
        columns: The shorter side ``M``.
        matrices: How many matrices were pooled.
        epsilon: Spacing of the dtype that the weights came in.
        problem: Empty, ``"not-finite"``, ``"out-of-range"`` or ``"constant"`` (the last with values).
        parts: The eigenvalues of each matrix.
        empty: Zero rows of the longer side and of the shorter side, in the matrix that has fewest.
        extents: Largest row norm plus largest column norm of each matrix: how far errors in proportion to its
            entries reach in its spectrum.
    """

    values: FloatArray
    rows: int
    columns: int
    matrices: int
    epsilon: float
    problem: str = ""
    parts: tuple[FloatArray, ...] = ()
    extents: tuple[float, ...] = ()
    empty: tuple[int, int] = (0, 0)

    @property
    def aspect(self) -> float:
        """``Q = N/M``, at least 1."""
        return self.rows / self.columns if self.columns else float("nan")

    @property
    def tolerance(self) -> float:
        r"""Singular values up to this are zero: :math:`\max(N, M)\,\epsilon\,s_\max`."""
        largest = float(self.values[-1]) if self.values.size else 0.0
        return self.rows * self.epsilon * float(np.sqrt(largest))

    @property
    def relative_resolution(self) -> float:
        """Size of rounding errors relative to the entries.

        Rounding to half precision errs by half the spacing at most; what is stored in float32 or finer was often
        computed in it, with errors of a few spacings.
        """
        return (0.5 if self.epsilon > COARSE else 3.0) * self.epsilon

    @property
    def resolutions(self) -> FloatArray:
        """For each matrix, the singular value up to which its singular values may be rounding errors.

        Errors in proportion to the entries, in random directions, have singular values up to their size times the
        largest row norm plus the largest column norm (Seginer 2000). Each matrix has its own: the small taps of a
        kernel are rounded in proportion to their own entries.
        """
        return self.relative_resolution * np.array(self.extents)

    @property
    def resolution(self) -> float:
        """The largest of the :attr:`resolutions`."""
        return float(self.resolutions.max(initial=0.0))


def eigenvalues(
    matrices: NDArray[Any] | Iterable[NDArray[Any]],
    dtype: Any = None,
    *,
    look: Look | None = None,
    device: str | None = None,
) -> Eigenvalues:
    """Eigenvalues of ``W.T @ W``, pooled over the matrices given.

    Args:
        matrices: One 2-D array, or an iterable of 2-D arrays of one shape (either way up), which is read
            one at a time.
        dtype: The dtype that the weights came in, if the array has been converted since.
        look: Called with each matrix of finite weights while it is at hand.
        device: Solve on this torch device, in float64; by default with LAPACK.

    Returns:
        The eigenvalues, ``min(shape)`` for each matrix.

    Raises:
        BadInputError: An array is not a matrix of real floating-point or integer numbers, or shapes differ.

    Examples:
        >>> eigenvalues(np.diag([3.0, 2.0, 1.0])).values.round(12).tolist()
        [1.0, 4.0, 9.0]
    """
    pool: list[FloatArray] = []
    shape: tuple[int, int] | None = None
    problem = ""
    constant = True
    epsilon = 0.0
    first: Any = None
    extents: list[float] = []
    empty = (np.inf, np.inf)
    for matrix in [matrices] if isinstance(matrices, np.ndarray) else matrices:
        matrix = _as_matrix(matrix)
        sides = (max(matrix.shape), min(matrix.shape))
        if shape is not None and sides != shape:
            raise BadInputError(
                "matrices", f"shapes differ ({shape} and {sides}); pool matrices of one shape"
            )
        shape = sides
        epsilon = spacing(dtype if dtype is not None else matrix.dtype)
        if matrix.size:
            first = matrix.flat[0] if first is None else first
            constant = constant and _is_constant(matrix, first)
        one = _of_one(matrix, epsilon, device)
        extents.append(one.extent)
        empty = (min(empty[0], one.empty[0]), min(empty[1], one.empty[1]))
        problem = problem or one.problem
        pool.append(one.values)
        if look is not None and not one.problem:
            look(matrix)
    if shape is None:
        raise BadInputError("matrices", "none given; give at least one")
    if not problem and constant:
        problem = "constant"
    values = pooled(pool, problem)
    zeros = (int(empty[0]), int(empty[1]))
    return Eigenvalues(values, *shape, len(pool), epsilon, problem, tuple(pool), tuple(extents), zeros)


def pooled(parts: Sequence[FloatArray], problem: str) -> FloatArray:
    """The eigenvalues of all matrices together, ascending; none if the weights are not finite or out of range."""
    if problem in ("not-finite", "out-of-range"):
        return np.empty(0)
    return np.sort(np.concatenate(parts)) if len(parts) > 1 else parts[0]


def spacing(dtype: Any) -> float:
    """Machine epsilon of a dtype or its name; integers are exact, so float64's.

    Examples:
        >>> spacing("bfloat16"), spacing(np.float32) == 2.0**-23
        (0.0078125, True)
    """
    import ml_dtypes

    try:
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        raise BadInputError(
            dtype, "is not a numeric dtype; give one such as 'float32' or 'bfloat16'"
        ) from None
    if kind.kind in "iub" or kind.name.startswith(("int", "uint")):  # ml_dtypes' int4 has no kind of its own
        kind = np.dtype(np.float64)
    return float(ml_dtypes.finfo(kind).eps)


def gram(matrix: NDArray[Any]) -> FloatArray:
    """``W.T @ W`` of the smaller side in float64, converted strip by strip."""
    lower = _gram(matrix)
    whole: FloatArray = lower + np.tril(lower, -1).T
    return whole


def _gram(matrix: NDArray[Any], device: str | None = None) -> Any:
    """The lower half of the Gram matrix.

    By BLAS' ``syrk``, added up in place: half the work of a general product, and no second matrix. On a torch device
    the whole Gram matrix, as a tensor there.
    """
    from scipy.linalg.blas import dsyrk

    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    rows, columns = tall.shape
    strip = max(_STRIP, columns)
    upper: Any = np.zeros((columns, columns), order="F") if device is None else None
    for start in range(0, rows, strip):
        part = _double(tall[start : start + strip])
        if device is not None:
            upper = on_device.add_gram(upper, part, device)
        elif part.flags.c_contiguous:
            upper = dsyrk(1.0, part.T, beta=1.0, c=upper, overwrite_c=1)
        else:
            upper = dsyrk(1.0, np.asfortranarray(part), beta=1.0, c=upper, trans=1, overwrite_c=1)
    return upper.T if device is None else upper


@dataclass(frozen=True)
class _One:
    """What one matrix gives."""

    values: FloatArray
    problem: str = ""
    extent: float = 0.0
    empty: tuple[int, int] = (0, 0)


def _of_one(matrix: NDArray[Any], epsilon: float, device: str | None) -> _One:
    if matrix.size == 0:
        return _One(np.empty(0))
    with np.errstate(over="ignore", invalid="ignore"):
        square = _gram(matrix, device)
        trace = float(square.trace())
    if not np.isfinite(trace) or trace < 1e-280:
        if not np.isfinite(_double(matrix)).all():
            return _One(np.empty(0), "not-finite")
        # Finite weights whose squares leave float64's range (only float64 weights can do that).
        if not np.isfinite(trace) or np.any(matrix):
            return _One(np.empty(0), "out-of-range")
    try:
        values = symmetric_eigenvalues(square) if device is None else on_device.eigenvalues(square)
    except np.linalg.LinAlgError:  # the two-stage reduction did not converge, and has used the matrix up
        values = np.asarray(np.linalg.eigvalsh(_gram(matrix)), dtype=np.float64)
    del square
    if epsilon < 1e-12 and values[0] < _GRAM_FLOOR * values[-1]:
        whole = _double(matrix)
        if device is None:
            values = np.asarray(np.linalg.svd(whole, compute_uv=False)[::-1] ** 2, dtype=np.float64)
        else:
            values = on_device.singular_values(whole, device)[::-1] ** 2
    values = np.maximum(values, 0.0)
    low, high = float(np.sqrt(values[0])), float(np.sqrt(values[-1]))
    # No row is longer than the largest singular value. Only where rounding of that size might matter, for directions
    # that are null or for values that are all equal, does it take another look at the matrix to know better.
    extent, rounding = 2 * high, 6 * epsilon * high
    if low <= rounding or high - low <= 2 * rounding:
        extent = _extent(matrix)
    sides = (_empty(matrix), _empty(matrix.T))
    return _One(values, "", extent, sides if matrix.shape[0] >= matrix.shape[1] else sides[::-1])


def _extent(matrix: NDArray[Any]) -> float:
    """Largest row norm plus largest column norm."""
    step = max((1 << 21) // matrix.shape[1], 1)
    longest, columns = 0.0, np.zeros(matrix.shape[1])
    for start in range(0, matrix.shape[0], step):
        squares = _double(matrix[start : start + step]) ** 2
        longest = max(longest, float(squares.sum(axis=1).max()))
        columns += squares.sum(axis=0)
    return float(np.sqrt(longest) + np.sqrt(columns.max()))


def _empty(matrix: NDArray[Any]) -> int:
    """Number of rows that are zero; only those that begin with a zero are looked at."""
    rows = np.flatnonzero(np.asarray(matrix[:, 0]) == 0)
    found = 0
    for start in range(0, rows.size, 1024):
        found += int(np.count_nonzero(~matrix[rows[start : start + 1024]].astype(bool).any(axis=1)))
    return found


def _as_matrix(given: Any) -> NDArray[Any]:
    matrix: NDArray[Any] = np.asarray(given)
    if matrix.ndim != 2:
        raise BadInputError(
            "matrix", f"has {matrix.ndim} dimensions; a spectrum is of a matrix, two dimensions"
        )
    if matrix.dtype.kind in "cOSUMmV" and not matrix.dtype.name.startswith(
        ("bfloat", "float", "int", "uint")
    ):
        raise BadInputError("matrix", f"has dtype {matrix.dtype.name}; a spectrum is of real numbers")
    return matrix


def _is_constant(matrix: NDArray[Any], value: Any) -> bool:
    if matrix.shape[0] and not (matrix[0] == value).all():  # the common case, without touching the rest
        return False
    return bool((matrix == value).all())


def _double(matrix: NDArray[Any]) -> FloatArray:
    return matrix if matrix.dtype == np.float64 else matrix.astype(np.float64)
