"""The linear algebra of a basis: streamed second moments, whitening, and the diagonalisation on top of it.

Second moments are kept as a triangular factor (a QR factorisation extended chunk by chunk), not as a Gram
matrix: singular values are then good to rounding, so that a layer seen through a badly conditioned linear
map gives the same basis. Networks, sites and Jacobians are not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from strati.core.results import BoolArray, FloatArray

REPEATED = 1e-6
"""Two neighbouring eigenvalues closer than this, relatively, are taken for one repeated eigenvalue."""


@dataclass(frozen=True)
class Moments:
    """Mean and second moment of a layer's activations.

    ``factor`` is the triangular ``R`` with ``R^T R = G``; ``centred`` says whether around the mean.
    """

    mean: FloatArray
    factor: FloatArray
    count: int
    centred: bool = True


@dataclass(frozen=True)
class Whitening:
    """``G = U^T D U`` with the zero eigenvalues dropped.

    ``colour`` is ``U^T D^(1/2)`` (width x rank): activations are ``mean + colour @ w`` with ``w`` white.
    ``whiten`` is ``D^(-1/2) U`` (rank x width).
    """

    values: FloatArray
    colour: FloatArray
    whiten: FloatArray

    @property
    def rank(self) -> int:
        """Number of directions the activations span."""
        return int(self.values.size)


class MomentStream:
    """Collects :class:`Moments` chunk by chunk.

    A column of ones put in front makes the factorisation centre the data by itself:
    ``qr([1 F]) = [[sqrt(n), sqrt(n) mean], [0, R]]`` with ``R^T R`` the scatter around the mean.

    Examples:
        >>> F = np.random.default_rng(0).normal(size=(50, 3)) + 7.0
        >>> stream = MomentStream(centre=True)
        >>> stream.add(F[:20]), stream.add(F[20:])
        (None, None)
        >>> factor = stream.finish().factor
        >>> bool(np.allclose(factor.T @ factor, np.cov(F.T, bias=True)))
        True
    """

    def __init__(self, *, centre: bool) -> None:
        self._centre = centre
        self._factor: FloatArray | None = None
        self._count = 0
        self._sum: FloatArray | float = 0.0

    def add(self, rows: FloatArray) -> None:
        """Take in more rows of activations."""
        rows = np.asarray(rows, dtype=np.float64)
        self._count += len(rows)
        self._sum = self._sum + rows.sum(axis=0)
        if self._centre:
            rows = np.concatenate([np.ones((len(rows), 1)), rows], axis=1)
        stacked = rows if self._factor is None else np.concatenate([self._factor, rows])
        self._factor = triangular(stacked)

    def finish(self) -> Moments:
        """Mean and second moment of everything taken in."""
        if self._factor is None or self._count == 0:
            raise ValueError("no data")
        factor, root = self._factor, np.sqrt(self._count)
        if not self._centre:
            return Moments(np.asarray(self._sum / self._count), factor / root, self._count, centred=False)
        return Moments(factor[0, 1:] / factor[0, 0], factor[1:, 1:] / root, self._count)


def triangular(rows: FloatArray) -> FloatArray:
    """The triangular factor ``R`` of ``rows``: ``R^T R = rows^T rows`` from at most as many rows as columns."""
    return np.asarray(np.linalg.qr(rows, mode="r"))


def whitening(moment: Moments, tolerance: float) -> Whitening:
    """Eigenvectors of the second moment whose eigenvalue exceeds ``tolerance`` times the largest.

    Data that are constant up to rounding of their own mean have no directions at all.
    """
    factor = moment.factor
    if factor.size == 0:
        empty = np.zeros((factor.shape[1], 0))
        return Whitening(np.zeros(0), empty, empty.T)
    _, singular, right = np.linalg.svd(factor, full_matrices=False)
    values = singular**2
    offset = float(moment.mean @ moment.mean) if moment.centred else 0.0
    floor = tolerance * max(values[0], 1e-4 * offset)
    keep = values > floor
    values, right, singular = values[keep], right[keep], singular[keep]
    return Whitening(values, right.T * singular, right / singular[:, None])


def diagonalise(gram: FloatArray, tolerance: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Non-zero eigenvalues, descending, their eigenvectors as rows, and those of the zero eigenvalues.

    Examples:
        >>> values, rows, null = diagonalise(np.diag([0.0, 3.0, 5.0]), 1e-12)
        >>> values.tolist(), np.abs(null).tolist()
        ([5.0, 3.0], [[1.0, 0.0, 0.0]])
    """
    if gram.shape[0] == 0:
        return np.zeros(0), np.zeros((0, 0)), np.zeros((0, 0))
    values, columns = np.linalg.eigh((gram + gram.T) / 2)
    values, rows = values[::-1], columns.T[::-1]
    keep = values > tolerance * max(values[0], 0.0)
    return values[keep], rows[keep], rows[~keep]


def fix_signs(rows: FloatArray) -> BoolArray:
    """Which rows must be turned round so that the entry of largest magnitude is positive."""
    if rows.size == 0:
        return np.zeros(len(rows), dtype=bool)
    largest = np.abs(rows).argmax(axis=1)
    flip: BoolArray = rows[np.arange(len(rows)), largest] < 0
    return flip


def repeated(values: FloatArray) -> tuple[tuple[int, ...], ...]:
    """Groups of neighbouring eigenvalues that are equal as far as can be told.

    Within a group only the subspace is defined, not the directions.

    Examples:
        >>> repeated(np.array([4.0, 4.0, 2.0, 1.0, 1.0]))
        ((0, 1), (3, 4))
    """
    if values.size < 2:
        return ()
    floor = 1e4 * np.finfo(np.float64).eps * values[0]
    equal = values[:-1] - values[1:] <= np.maximum(REPEATED * values[:-1], floor)
    groups: list[tuple[int, ...]] = []
    start = 0
    for k in range(1, values.size + 1):
        if k == values.size or not equal[k - 1]:
            if k - start > 1:
                groups.append(tuple(range(start, k)))
            start = k
    return tuple(groups)
