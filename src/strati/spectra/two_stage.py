"""Eigenvalues of a large symmetric matrix by LAPACK's two-stage reduction, where the library at hand has it.

The usual reduction to tridiagonal form spends half of its work in matrix-vector products, which wait for memory. The
two-stage one goes through a band first and does nearly all of it in matrix-matrix products: the same eigenvalues to
rounding. How much that saves depends on the cache. Time over that of ``numpy.linalg.eigvalsh``, one thread, on two
machines: 0.82 and 1.25 at 1,024 columns, 0.65 and 1.4 at 1,536, 0.9 or less on both at 3,072, 0.8 or less at 4,096.
It is in the OpenBLAS that numpy and scipy ship, but no wrapper calls it; so it is looked up there once, tried against
``numpy.linalg.eigvalsh`` on a small matrix, and used only if it is there and agrees.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from strati.core.results import FloatArray

    Solve = Callable[[FloatArray], FloatArray]

PAYS_FROM = 3072
"""Columns from which the two-stage reduction is used: fixed, so that the solver does not depend on the machine."""

_NAMES = ("scipy_dsyevd_2stage_64_", "dsyevd_2stage_64_", "scipy_dsyevd_2stage_", "dsyevd_2stage_")


def symmetric_eigenvalues(matrix: FloatArray) -> FloatArray:
    """The eigenvalues of a symmetric matrix, ascending, by the faster way.

    Args:
        matrix: Float64 and finite. Only its lower half is read, and it may be overwritten.

    Raises:
        LinAlgError: The solver did not converge.

    Examples:
        >>> symmetric_eigenvalues(np.array([[2.0, 0.0], [1.0, 2.0]])).round(12).tolist()
        [1.0, 3.0]
    """
    solve = two_stage() if matrix.shape[0] >= PAYS_FROM else None
    if solve is not None:
        return solve(matrix)
    return np.asarray(np.linalg.eigvalsh(matrix), dtype=np.float64)


@lru_cache(maxsize=1)
def two_stage() -> Solve | None:
    """The two-stage solver, if a loaded library has it and it agrees with numpy's; looked up once."""
    for routine in _routines():
        solve = _bound(routine)
        if _agrees(solve):
            return solve
    return None


def _routines() -> list[Any]:
    """The routine in each OpenBLAS that this process has loaded, numpy's before others."""
    from threadpoolctl import ThreadpoolController

    found = []
    for library in ThreadpoolController().lib_controllers:
        if library.internal_api != "openblas":
            continue
        try:
            handle = ctypes.CDLL(library.filepath)
        except OSError:
            continue
        routines = (getattr(handle, name, None) for name in _NAMES)
        found += [(library.filepath, routine) for routine in routines if routine is not None][:1]
    return [routine for _, routine in sorted(found, key=lambda pair: "numpy" not in pair[0])]


def _bound(routine: Any) -> Solve:
    """The routine as a function of a matrix.

    Integers are passed as 64 bits: a library of 32-bit integers reads their lower half, which on the little-endian
    machines that these libraries are built for is the same number.
    """

    def solve(matrix: FloatArray) -> FloatArray:
        square = np.ascontiguousarray(matrix)  # its lower half is the upper one of a matrix stored by columns
        size = ctypes.c_int64(square.shape[0])
        values = np.empty(square.shape[0])
        info = ctypes.c_int64(0)
        work, integers = np.zeros(1), np.zeros(2, dtype=np.int64)

        def call(length: int, whole: int) -> None:
            routine(
                ctypes.c_char_p(b"N"),
                ctypes.c_char_p(b"U"),
                ctypes.byref(size),
                square.ctypes.data_as(ctypes.c_void_p),
                ctypes.byref(size),
                values.ctypes.data_as(ctypes.c_void_p),
                work.ctypes.data_as(ctypes.c_void_p),
                ctypes.byref(ctypes.c_int64(length)),
                integers.ctypes.data_as(ctypes.c_void_p),
                ctypes.byref(ctypes.c_int64(whole)),
                ctypes.byref(info),
                ctypes.c_size_t(1),  # lengths of the two texts, as Fortran passes them
                ctypes.c_size_t(1),
            )
            if info.value != 0:
                raise np.linalg.LinAlgError("the two-stage reduction failed")

        call(-1, -1)  # asks how much room is needed
        length, whole = int(work[0]), max(int(integers[0]), 1)
        work, integers = np.empty(length), np.empty(whole, dtype=np.int64)
        call(length, whole)
        return values

    return solve


def _agrees(solve: Solve) -> bool:
    rng = np.random.default_rng(0)
    for size in (1, 2, 70, 130):
        half = rng.normal(size=(size, size))
        matrix = half @ half.T
        expected = np.linalg.eigvalsh(matrix)
        try:
            found = solve(np.tril(matrix))
        except (np.linalg.LinAlgError, ValueError, ctypes.ArgumentError):
            return False
        if not np.allclose(found, expected, rtol=0, atol=1e-12 * float(expected[-1])):
            return False
    return True
