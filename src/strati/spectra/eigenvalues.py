r"""Eigenvalues of :math:`W^T W` of one matrix, or of several of one shape pooled, and the ranks that follow from them.

They come from the Gram matrix of the smaller side in float64, formed strip by strip so that a long matrix in half
precision is never held in double precision. The Gram matrix squares the condition number: an eigenvalue below about
``1e-16`` of the largest is lost. For weights stored in float32 or coarser, rounding of the weights hides more than
that. For float64 weights the singular values are computed directly when an eigenvalue that small turns up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.core.plugins import require

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray

    Source = Callable[[], Iterator[NDArray[Any]]]
    Matrices = NDArray[Any] | Iterable[NDArray[Any]] | Source

COARSE = 1e-4
"""Spacing above which a dtype has half precision or less."""

_STRIP = 4096
_GRAM_FLOOR = 1e-9  # share of lambda_max below which a Gram eigenvalue has fewer than seven digits
_COLLAPSED_SHARE = 0.07  # language models have 1 to 6 % of quasi-null directions without being collapsed
_COLLAPSED_DECADES = 4.0


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
        extents: Largest row norm plus largest column norm of each matrix: how far errors in proportion to its
            entries reach in its spectrum.
        empty: Zero rows of the longer side and of the shorter side, in the matrix that has fewest.
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


def eigenvalues(
    matrices: NDArray[Any] | Iterable[NDArray[Any]],
    dtype: Any = None,
    *,
    look: Callable[[NDArray[Any]], None] | None = None,
    device: str | None = None,
) -> Eigenvalues:
    """Compute the eigenvalues of ``W.T @ W``, pooled over matrices.

    Args:
        matrices: One 2-D array, or an iterable of 2-D arrays of one shape (either way up), which is read
            one at a time.
        dtype: The dtype that the weights came in, if the array has been converted since.
        look: Called with each matrix of finite weights while it is in memory.
        device: Solve on this torch device, in float64; by default with LAPACK.

    Returns:
        The eigenvalues, ``min(shape)`` for each matrix.

    Raises:
        BadInputError: An array is not a matrix of real floating-point or integer numbers, or shapes differ.

    Examples:
        >>> eigenvalues(np.diag([3.0, 2.0, 1.0])).values.round(12).tolist()
        [1.0, 4.0, 9.0]
    """
    solutions: list[_Solution] = []
    for array in [matrices] if isinstance(matrices, np.ndarray) else matrices:
        matrix = _real_matrix(array)
        solution = _solve(matrix, spacing(dtype if dtype is not None else matrix.dtype), device)
        if solutions and solution.sides != solutions[0].sides:
            shapes = f"{solutions[0].sides} and {solution.sides}"
            raise BadInputError("matrices", f"shapes differ ({shapes}); pool matrices of one shape")
        solutions.append(solution)
        if look is not None and not solution.problem:
            look(matrix)
    if not solutions:
        raise BadInputError("matrices", "there is none; give at least one")
    constants = {solution.constant for solution in solutions if solution.values.size}
    problems = [solution.problem for solution in solutions if solution.problem]
    problem = problems[0] if problems else "constant" if len(constants) < 2 and None not in constants else ""
    parts = tuple(solution.values for solution in solutions)
    return Eigenvalues(
        pooled(parts, problem),
        *solutions[0].sides,
        len(solutions),
        solutions[-1].epsilon,
        problem,
        parts,
        tuple(solution.extent for solution in solutions),
        (min(s.empty[0] for s in solutions), min(s.empty[1] for s in solutions)),
    )


def matrix_source(W: Matrices) -> Source:
    """A function that yields the matrices each time it is called, for whatever holds them."""
    if callable(W) and not hasattr(W, "detach"):
        return W
    if hasattr(W, "detach"):  # a torch tensor or parameter, with or without a gradient
        matrices = [_from_torch(W.detach().cpu())]
    elif isinstance(W, np.ndarray) or not isinstance(W, Iterable):
        matrices = [np.asarray(W)]
    else:
        matrices = [np.asarray(matrix) for matrix in W]
        if matrices and all(matrix.ndim < 2 for matrix in matrices):  # a matrix as a list of rows
            matrices = [np.asarray(matrices)]
    return lambda: iter(matrices)


def _from_torch(tensor: Any) -> NDArray[Any]:
    if str(tensor.dtype) != "torch.bfloat16":
        return np.asarray(tensor.numpy())
    import ml_dtypes

    return np.asarray(tensor.float().numpy().astype(ml_dtypes.bfloat16))


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
    integer = kind.kind in "iub" or kind.name.startswith(
        ("int", "uint")
    )  # ml_dtypes' int4 has a kind of its own
    return float(ml_dtypes.finfo(np.dtype(np.float64) if integer else kind).eps)


def gram(matrix: NDArray[Any]) -> FloatArray:
    """``W.T @ W`` of the smaller side in float64, converted strip by strip."""
    lower = _gram(matrix)
    square: FloatArray = lower + np.tril(lower, -1).T
    return square


def _gram(matrix: NDArray[Any], device: str | None = None) -> Any:
    """The lower half of the Gram matrix; on a torch device the whole of it as a tensor there.

    BLAS' ``syrk`` adds it up in place: half the work of a general product, and no second matrix.
    """
    from scipy.linalg.blas import dsyrk

    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    rows, columns = tall.shape
    strip = max(_STRIP, columns)
    upper: Any = np.zeros((columns, columns), order="F") if device is None else None
    for start in range(0, rows, strip):
        part = _double(tall[start : start + strip])
        if device is not None:
            tensor = _on_device(part, device)
            upper = tensor.T @ tensor if upper is None else upper.addmm_(tensor.T, tensor)
        elif part.flags.c_contiguous:
            upper = dsyrk(1.0, part.T, beta=1.0, c=upper, overwrite_c=1)
        else:
            upper = dsyrk(1.0, np.asfortranarray(part), beta=1.0, c=upper, trans=1, overwrite_c=1)
    return upper.T if device is None else upper


@dataclass(frozen=True)
class _Solution:
    """The eigenvalues of one matrix; ``constant`` is the value of all its entries, if they are equal."""

    sides: tuple[int, int]
    epsilon: float
    values: FloatArray
    problem: str = ""
    constant: float | None = None
    extent: float = 0.0
    empty: tuple[int, int] = (0, 0)


def _solve(matrix: NDArray[Any], epsilon: float, device: str | None) -> _Solution:
    sides = (max(matrix.shape), min(matrix.shape))
    if matrix.size == 0:
        return _Solution(sides, epsilon, np.empty(0))
    with np.errstate(over="ignore", invalid="ignore"):
        square = _gram(matrix, device)
        trace = float(square.trace())
    if not np.isfinite(trace) or trace < 1e-280:
        if not np.isfinite(_double(matrix)).all():
            return _Solution(sides, epsilon, np.empty(0), "not-finite")
        # Finite weights whose squares leave float64's range (only float64 weights can do that).
        if not np.isfinite(trace) or np.any(matrix):
            return _Solution(sides, epsilon, np.empty(0), "out-of-range")
    values = np.maximum(_gram_eigenvalues(square, device), 0.0)
    if epsilon < 1e-12 and values[0] < _GRAM_FLOOR * values[-1]:
        values = _singular_values(_double(matrix), device)[::-1] ** 2
    low, high = float(np.sqrt(values[0])), float(np.sqrt(values[-1]))
    # No row is longer than the largest singular value. The exact extent needs another pass over the matrix, so it is
    # computed only where rounding of that size matters: for null directions, or for values that are all equal.
    rounding = 6 * epsilon * high
    extent = _extent(matrix) if low <= rounding or high - low <= 2 * rounding else 2 * high
    zero_rows = (_count_zero_rows(matrix), _count_zero_rows(matrix.T))
    empty = zero_rows if matrix.shape[0] >= matrix.shape[1] else zero_rows[::-1]
    return _Solution(sides, epsilon, values, "", _constant(matrix), extent, empty)


def _gram_eigenvalues(square: Any, device: str | None) -> FloatArray:
    if device is not None:
        return np.asarray(torch_on(device).linalg.eigvalsh(square).cpu().numpy(), dtype=np.float64)
    return np.asarray(np.linalg.eigvalsh(square), dtype=np.float64)


def _singular_values(matrix: FloatArray, device: str | None) -> FloatArray:
    if device is not None:
        return np.asarray(torch_on(device).linalg.svdvals(_on_device(matrix, device)).cpu().numpy())
    return np.asarray(np.linalg.svd(matrix, compute_uv=False), dtype=np.float64)


@lru_cache(maxsize=8)
def torch_on(device: str) -> Any:
    """The module torch, if it can compute in float64 on a device.

    Raises:
        BadInputError: There is no such device, or it has no float64.
        MissingExtraError: torch is not installed.

    Examples:
        >>> torch_on("cpu").__name__
        'torch'
    """
    torch = require("torch", "torch", "solving on a torch device")
    try:
        torch.ones(1, dtype=torch.float64, device=device).sum().item()
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise BadInputError(
            f"device {device}",
            f"cannot compute in float64 here ({reason}); leave it out to use the processor",
        ) from None
    return torch


def _on_device(matrix: FloatArray, device: str) -> Any:
    torch = torch_on(device)
    return torch.tensor(np.ascontiguousarray(matrix), dtype=torch.float64, device=device)


def _extent(matrix: NDArray[Any]) -> float:
    """Largest row norm plus largest column norm."""
    step = max((1 << 21) // matrix.shape[1], 1)
    longest, columns = 0.0, np.zeros(matrix.shape[1])
    for start in range(0, matrix.shape[0], step):
        squares = _double(matrix[start : start + step]) ** 2
        longest = max(longest, float(squares.sum(axis=1).max()))
        columns += squares.sum(axis=0)
    return float(np.sqrt(longest) + np.sqrt(columns.max()))


def _count_zero_rows(matrix: NDArray[Any]) -> int:
    candidates = np.flatnonzero(np.asarray(matrix[:, 0]) == 0)
    blocks = (candidates[start : start + 1024] for start in range(0, candidates.size, 1024))
    return sum(int(np.count_nonzero(~matrix[rows].astype(bool).any(axis=1))) for rows in blocks)


def _constant(matrix: NDArray[Any]) -> float | None:
    first = matrix.flat[0]
    if not (matrix[0] == first).all():  # the common case, without reading the other rows
        return None
    return float(first) if (matrix == first).all() else None


def _real_matrix(array: Any) -> NDArray[Any]:
    matrix: NDArray[Any] = np.asarray(array)
    if matrix.ndim != 2:
        raise BadInputError(
            "matrix", f"has {matrix.ndim} dimensions; a spectrum is of a matrix, two dimensions"
        )
    numeric = matrix.dtype.name.startswith(("bfloat", "float", "int", "uint"))
    if matrix.dtype.kind in "cOSUMmV" and not numeric:
        raise BadInputError("matrix", f"has dtype {matrix.dtype.name}; a spectrum is of real numbers")
    return matrix


def _double(matrix: NDArray[Any]) -> FloatArray:
    return matrix if matrix.dtype == np.float64 else matrix.astype(np.float64)


def hard_rank(eigenvalues: Eigenvalues) -> int:
    r"""Number of singular values above :math:`\max(N, M)\,\epsilon\,s_\max` of the dtype the weights came in.

    Examples:
        >>> hard_rank(eigenvalues(np.outer([1.0, 2.0], [3.0, 4.0, 5.0])))
        1
    """
    return int(np.count_nonzero(np.sqrt(eigenvalues.values) > eigenvalues.tolerance))


def stable_rank(values: FloatArray) -> float:
    """``sum(lambda) / lambda_max``.

    Examples:
        >>> stable_rank(np.array([1.0, 1.0, 2.0]))
        2.0
    """
    return float(np.sum(values / values[-1]))


def entropy(eigenvalues: Eigenvalues) -> float:
    r"""Spectral entropy :math:`-\sum p_i \ln p_i / \ln R` with :math:`p_i = \lambda_i / \sum \lambda`; 0 if ``R = 1``.

    ``R`` is the hard rank. For half-precision weights its tolerance may exceed every singular value, so there
    ``R`` is the rank to working precision.

    Examples:
        >>> round(entropy(eigenvalues(np.eye(5))), 12)
        1.0
    """
    values = eigenvalues.values
    floor = eigenvalues.rows * np.finfo(np.float64).eps * values[-1]
    coarse = eigenvalues.epsilon >= COARSE
    rank = int(np.count_nonzero(values > floor)) if coarse else hard_rank(eigenvalues)
    if rank <= 1:
        return 0.0
    shares = values[values > 0] / values.sum()
    shares = shares[shares > 0]
    return float(-np.sum(shares * np.log(shares)) / np.log(rank))


def unresolved(eigenvalues: Eigenvalues) -> int:
    """Number of eigenvalues that are no more than rounding: of the weights' dtype, or of the computation.

    Examples:
        >>> W = np.outer(np.arange(1, 9.0), np.arange(1, 7.0) / 7).astype(np.float32)
        >>> unresolved(eigenvalues(W))
        5
    """
    exact = float(np.finfo(np.float64).eps)
    # Eigenvalues of a Gram matrix are known to 1e-16 of the largest; float64 weights get singular values instead.
    working = (16 * exact) ** 2 if eigenvalues.epsilon < 1e-12 else 4 * exact
    return sum(
        int(np.searchsorted(part, max(resolution**2, working * float(part[-1])), side="right"))
        for part, resolution in zip(eigenvalues.parts, eigenvalues.resolutions, strict=True)
        if part.size
    )


@dataclass(frozen=True)
class Gap:
    """The widest gap of a spectrum that has a sizeable share of the directions below it.

    Attributes:
        decades: Its width in powers of ten of the eigenvalue.
        below: Number of eigenvalues below it.
        above: Number of eigenvalues above it.
        rounding: What lies below is no more than rounding of the dtype.
    """

    decades: float
    below: int
    above: int
    rounding: bool = False

    @property
    def collapsed(self) -> bool:
        """Whether the rank has collapsed.

        The largest eigenvalues of heavy-tailed entries, or strong spikes, can lie decades above the others; the
        chance of it falls with the power of their number. So the fewer lie above a gap, the wider it must be.
        """
        if self.rounding:
            return True
        few = self.above < 0.1 * (self.above + self.below)
        return self.decades >= _COLLAPSED_DECADES * (2.0 if self.above < 3 else 1.5 if few else 1.0)


def widest_gap(eigenvalues: Eigenvalues) -> Gap:
    """The widest gap with at least seven per cent of the directions, and two of them, below it.

    What is zero to working precision counts as one rounding error of the largest eigenvalue. If that many
    directions are no more than rounding of the weights' dtype, the gap is the one above them.

    Examples:
        >>> gap = widest_gap(eigenvalues(np.diag([1.0] * 5 + [1e-6] * 5)))
        >>> round(gap.decades), gap.below, gap.collapsed
        (12, 5, True)
    """
    values = eigenvalues.values
    total = values.size
    least = max(int(np.ceil(_COLLAPSED_SHARE * total)), 2)
    if total < 2 or values[-1] <= 0:
        return Gap(0.0, 0, total)
    logs = np.log10(np.maximum(values / values[-1], np.finfo(np.float64).eps))
    lost = unresolved(eigenvalues)
    # Small eigenvalues belong to noise too: of square noise about 4/pi times the relative resolution.
    usual = 4 / np.pi * eigenvalues.relative_resolution
    if total > lost >= max(_COLLAPSED_SHARE, 3 * usual) * total and (lost > 1 or 2 * lost >= total):
        return Gap(float(logs[lost] - logs[lost - 1]), lost, total - lost, rounding=True)
    if total <= least:
        return Gap(0.0, 0, total)
    steps = np.diff(logs)[least - 1 :]
    widest = int(np.argmax(steps))
    return Gap(float(steps[widest]), widest + least, total - widest - least)
