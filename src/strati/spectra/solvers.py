"""Solvers for large symmetric eigenvalue problems: LAPACK's two-stage reduction, and a torch device.

The usual reduction to tridiagonal form spends half of its work in matrix-vector products, which wait for memory. The
two-stage reduction goes through a band matrix first and does nearly all work in matrix-matrix products; its eigenvalues
are the same to rounding. How much time it saves depends on the cache. Its time over that of ``numpy.linalg.eigvalsh``
with one thread on two machines: 0.82 and 1.25 at 1,024 columns, 0.65 and 1.4 at 1,536, at most 0.9 on both at 3,072, at
most 0.8 at 4,096. The OpenBLAS libraries that numpy and scipy ship contain the routine, but no wrapper calls it. It is
looked up there once, compared with ``eigvalsh`` on small matrices, and used only if it agrees.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from strati.core.results import FloatArray

    Solve = Callable[[FloatArray], FloatArray]

TWO_STAGE_COLUMNS = 3072
"""Columns from which the two-stage reduction is used: fixed, so that the solver does not depend on the machine."""

_ROUTINES = ("scipy_dsyevd_2stage_64_", "dsyevd_2stage_64_", "scipy_dsyevd_2stage_", "dsyevd_2stage_")


def symmetric_eigenvalues(matrix: FloatArray) -> FloatArray:
    """Eigenvalues of a large symmetric matrix, ascending, by the two-stage reduction if it is available.

    Args:
        matrix: Float64 and finite. Only its lower half is read, and it may be overwritten.

    Raises:
        LinAlgError: The solver did not converge.

    Examples:
        >>> symmetric_eigenvalues(np.array([[2.0, 0.0], [1.0, 2.0]])).round(12).tolist()
        [1.0, 3.0]
    """
    solve = two_stage_solver()
    return np.asarray(np.linalg.eigvalsh(matrix) if solve is None else solve(matrix), dtype=np.float64)


@lru_cache(maxsize=1)
def two_stage_solver() -> Solve | None:
    """The two-stage solver, if a loaded library has it and it agrees with numpy's."""
    solvers = map(_two_stage, _lapack_routines())
    return next((solve for solve in solvers if _agrees_with_numpy(solve)), None)


def _lapack_routines() -> list[Any]:
    """The routine in each OpenBLAS that this process has loaded, numpy's before others."""
    from threadpoolctl import ThreadpoolController

    routines = []
    for library in ThreadpoolController().lib_controllers:
        if library.internal_api != "openblas":
            continue
        try:
            handle = ctypes.CDLL(library.filepath)
        except OSError:
            continue
        names = [name for name in _ROUTINES if hasattr(handle, name)]
        routines += [(library.filepath, getattr(handle, name)) for name in names[:1]]
    return [routine for _, routine in sorted(routines, key=lambda pair: "numpy" not in pair[0])]


def _two_stage(routine: Any) -> Solve:
    """A LAPACK routine as a function of a matrix.

    Integers are passed as 64 bits: a library of 32-bit integers reads their lower half, which on the little-endian
    machines that these libraries are built for is the same number.
    """

    def solve(matrix: FloatArray) -> FloatArray:
        square = np.ascontiguousarray(matrix)  # its lower half is the upper one of a matrix stored by columns
        values = np.empty(square.shape[0])
        size, info = ctypes.c_int64(square.shape[0]), ctypes.c_int64(0)

        def call(work: FloatArray, integers: Any, lengths: tuple[int, int]) -> None:
            arrays = [array.ctypes.data_as(ctypes.c_void_p) for array in (square, values, work, integers)]
            order, (work_length, integer_length) = ctypes.byref(size), map(ctypes.c_int64, lengths)
            kinds = (ctypes.c_char_p(b"N"), ctypes.c_char_p(b"U"))
            buffers = (arrays[2], ctypes.byref(work_length), arrays[3], ctypes.byref(integer_length))
            text_lengths = (ctypes.c_size_t(1), ctypes.c_size_t(1))  # as Fortran passes them
            routine(*kinds, order, arrays[0], order, arrays[1], *buffers, ctypes.byref(info), *text_lengths)
            if info.value != 0:
                raise np.linalg.LinAlgError("the two-stage reduction failed")

        needed, needed_integers = np.zeros(1), np.zeros(2, dtype=np.int64)
        call(needed, needed_integers, (-1, -1))  # asks for the sizes of the work arrays
        lengths = int(needed[0]), max(int(needed_integers[0]), 1)
        call(np.empty(lengths[0]), np.empty(lengths[1], dtype=np.int64), lengths)
        return values

    return solve


def _agrees_with_numpy(solve: Solve) -> bool:
    rng = np.random.default_rng(0)
    for size in (1, 2, 70, 130):
        half = rng.normal(size=(size, size))
        matrix = half @ half.T
        expected = np.linalg.eigvalsh(matrix)
        try:
            values = solve(np.tril(matrix))
        except (np.linalg.LinAlgError, ValueError, ctypes.ArgumentError):
            return False
        if not np.allclose(values, expected, rtol=0, atol=1e-12 * float(expected[-1])):
            return False
    return True


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


def add_gram(total: Any, part: FloatArray, device: str) -> Any:
    """``total + part.T @ part`` as a tensor on the device; ``total`` is ``None`` to begin with."""
    tensor = _on_device(part, device)
    return tensor.T @ tensor if total is None else total.addmm_(tensor.T, tensor)


def device_eigenvalues(square: Any) -> FloatArray:
    """Eigenvalues of a symmetric tensor, ascending."""
    values: FloatArray = torch_on(str(square.device)).linalg.eigvalsh(square).cpu().numpy()
    return values


def device_singular_values(matrix: FloatArray, device: str) -> FloatArray:
    """Singular values of a matrix, descending."""
    values: FloatArray = torch_on(device).linalg.svdvals(_on_device(matrix, device)).cpu().numpy()
    return values


def _on_device(matrix: FloatArray, device: str) -> Any:
    torch = torch_on(device)
    return torch.tensor(np.ascontiguousarray(matrix), dtype=torch.float64, device=device)
