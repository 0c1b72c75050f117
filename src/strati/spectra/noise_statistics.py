"""What the entries of one matrix show beyond independent noise: sizes, correlations, zeros, a diagonal.

Measured with or without the largest directions of the matrix (its candidate spikes), for
:mod:`strati.spectra.noise_model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.spectra import separable_noise, tracy_widom
from strati.spectra.autocorrelation import BEYOND, Lags
from strati.spectra.violations import Departure, Violation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray
    from strati.spectra.eigenvalues import Eigenvalues

    Source = Callable[[], Iterator[NDArray[Any]]]

_STRIP = 1 << 21  # entries looked at in one go
_SAMPLE = 1 << 16  # entries that are put in random order
_SHUFFLES = 6
_NOTICED = 3.0  # standard errors for the edge to widen
_SPARSE = 0.5
_SHAPING = 0.1  # of the largest singular value of noise: from here on a diagonal shows
_KURTOSIS = 4.5  # a Gaussian's is 3, Laplace's 6: from here on large entries placed evenly are remarkable
_PLAIN = (np.float32, np.float64)
_SECOND_MOMENT = (0.85, 1.05)


def is_sparse(source: Source) -> bool:
    """Whether most weights are zero, rows and columns that are zero throughout left aside.

    Examples:
        >>> W = np.eye(8) + np.eye(8, k=1)
        >>> is_sparse(lambda: iter([W])), is_sparse(lambda: iter([np.ones((8, 8))]))
        (True, False)
    """
    filled = places = 0
    for matrix in source():
        there = np.asarray(matrix) != 0
        filled += int(there.sum())
        places += int(there.any(axis=1).sum() * there.any(axis=0).sum())
    return places > 0 and filled < (1 - _SPARSE) * places


class Neighbours:
    """Products of neighbouring rows and columns of one or more matrices: a quick look for correlation."""

    def __init__(self) -> None:
        self._products: list[tuple[tuple[int, int], float, float]] = []

    def add(self, matrix: NDArray[Any]) -> None:
        """Look at one matrix of finite weights."""
        if min(matrix.shape) < 3:
            return
        if matrix.flags.f_contiguous and not matrix.flags.c_contiguous:
            shape, rows, columns = self._of(matrix.T)
            self._products.append((shape[::-1], columns, rows))
        else:
            self._products.append(self._of(matrix))

    def _of(self, matrix: NDArray[Any]) -> tuple[tuple[int, int], float, float]:
        rows = columns = 0.0
        width = matrix.shape[1]
        step = max(_STRIP // width, 2)
        for start in range(0, matrix.shape[0], step):  # one row of overlap: the neighbour of the last
            part = matrix[start : start + step + 1]
            flat = np.ascontiguousarray(part, None if part.dtype in _PLAIN else np.float32).ravel()
            rows += float(np.dot(flat[width:], flat[:-width]))
            rows_here = flat[: step * width]
            # Along the flat rows every neighbour but the last of a row and the first of the next one.
            columns += float(
                np.dot(rows_here[1:], rows_here[:-1])
                - np.dot(rows_here[width::width], rows_here[width - 1 : -1 : width])
            )
        return (matrix.shape[0], width), rows, columns

    def correlated(self, eigenvalues: Eigenvalues) -> bool:
        """Whether any side's neighbours are correlated beyond what a random order gives."""
        for (shape, *products), values in zip(self._products, eigenvalues.parts, strict=False):
            total, spread = float(values.sum()), float(np.sum(values**2))
            for count, product in zip(shape, products, strict=True):
                error = np.sqrt(max(spread - total**2 / count, 0.0) / count)  # as if all were of one size
                if abs(product) > BEYOND * error > 0:
                    return True
        return False


def evened(matrix: NDArray[Any]) -> FloatArray:
    """The matrix with its rows, then its columns, brought to one size; zero ones stay zero."""
    double = np.asarray(matrix, dtype=np.float64)
    for axis in (1, 0):
        norms = np.linalg.norm(double, axis=axis, keepdims=True)
        double = double / np.where(norms > 0, norms, 1.0)
    return double


class NoiseStatistics:
    """Squared norms, neighbours' products and a sample of one matrix, with or without its largest directions."""

    def __init__(self, matrix: NDArray[Any], values: FloatArray) -> None:
        self._matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
        self._turned = matrix.shape[0] < matrix.shape[1]
        self._values = values
        self.removed = 0
        n, m = self._matrix.shape
        self._leading_vectors = np.empty((m, 0))  # leading right singular vectors, ascending
        rows, columns = np.empty(n), np.zeros(m)
        self._lags = Lags(self._matrix, 0), Lags(self._matrix, 1)
        self._zeros = 0
        step = max(_STRIP // m, 1)
        fourth = 0.0
        for start in range(0, n, step):
            part = np.asarray(self._matrix[start : start + step], dtype=np.float64)
            squares = part**2
            fourth += float(np.dot(squares.ravel(), squares.ravel()))
            rows[start : start + step] = squares.sum(axis=1)
            columns += squares.sum(axis=0)
            self._zeros += int(part.size - np.count_nonzero(part))
        self._all = rows, columns
        self._diagonal = _diagonal(self._matrix)
        self._kurtosis = fourth * n * m / max(float(rows.sum()) ** 2, np.finfo(np.float64).tiny)
        self._take(np.empty((m, 0)))

    def remove(self, count: int) -> None:
        """Take the largest ``count`` directions out."""
        if count == self.removed:
            return
        if count > self._leading_vectors.shape[1]:
            self._leading_vectors = _leading(self._matrix, count)
        self._take(self._leading_vectors[:, self._leading_vectors.shape[1] - count :])
        self.removed = count

    def largest_kept(self, removed: int) -> float:
        """The largest eigenvalue that is left when so many are taken out."""
        return float(self._values[self._values.size - removed - 1])

    def _take(self, right: FloatArray) -> None:
        """Work out sizes and neighbours of ``E = W (1 - V V^T)`` from those of ``W``: no second pass."""
        rows, columns = self._all
        left = self._matrix.astype(np.float64) @ right if right.shape[1] else np.zeros((rows.size, 0))
        strengths = np.sum(left**2, axis=0)
        self._right, self._left = right, left
        self.rows = np.maximum(rows - np.sum(left**2, axis=1), 0.0)
        self.columns = np.maximum(columns - np.sum(right**2 * strengths, axis=1), 0.0)
        n, m = rows.size, columns.size
        remaining = self._values[: m - right.shape[1]]
        self.variance = float(remaining.sum()) / ((n - right.shape[1]) * (m - right.shape[1]))
        spread = float(np.sum(remaining**2))
        self._row_shift = self._lags[0].correlation(left, right, self.rows, spread)
        self._column_shift = self._lags[1].correlation(right, left, self.columns, spread)
        # Squared norms of Gaussian rows vary by 2/M; their variance is known to sqrt(2/N).
        self._row_excess = _excess(self.rows, 2 / m * self._column_shift.longer)
        self._column_excess = _excess(self.columns, 2 / n * self._row_shift.longer)

    @property
    def noticed(self) -> bool:
        """Whether the edge of equal independent entries is in doubt."""
        return bool(
            max(self._row_excess, self._column_excess) > _NOTICED
            or (min(self._row_excess, self._column_excess) < -BEYOND and self._kurtosis > _KURTOSIS)
            or self._diagonal
            or self._row_shift.lags
            or self._column_shift.lags
            or self._zeros > _SPARSE * self._matrix.size
        )

    @property
    def explained(self) -> bool:
        """Whether noise with these sizes and correlations has the second moment that the eigenvalues have.

        Of 16 kinds of noise none strays beyond 0.89 to 1.03 times (``tools/calibrate_spectra.py``); layers of trained
        networks have 1.1 to 4 times that, whose large rows come from the signal.
        """
        remaining = self._values[: self._values.size - self.removed]
        ratio = float(np.sum(remaining**2)) / separable_noise.second_moment(self.population())
        low, high = _SECOND_MOMENT
        return ratio <= high and (ratio >= low or self._zeros > _SPARSE * self._matrix.size)

    def population(self) -> separable_noise.Population:
        """Noise with the sizes and correlations of what is left."""
        n, m = self._matrix.shape
        rows = shrunk(self.rows, 2 / m * self._column_shift.longer) * self._row_shift.spectrum(n)
        columns = shrunk(self.columns, 2 / n * self._row_shift.longer) * self._column_shift.spectrum(m)
        return separable_noise.population(rows * (self.variance * n * m / rows.sum()), columns)

    def edge(self, eigenvalues: Eigenvalues, level: float) -> float:
        """What the largest eigenvalue of such noise exceeds with probability ``level``."""
        wide = separable_noise.widening(self.population(), level=level, matrices=eigenvalues.matrices)
        return self.plain(eigenvalues, level) * wide

    def plain(self, eigenvalues: Eigenvalues, level: float) -> float:
        """The same for independent entries of one variance."""
        edge = tracy_widom.upper_edge(
            eigenvalues.rows, eigenvalues.columns, level=level, matrices=eigenvalues.matrices
        )
        return float(edge * self.variance)

    def narrowing(self) -> float:
        """How much lower the spectrum of such noise begins, at most 1."""
        return separable_noise.narrowing(self.population())

    def departures(self) -> list[Departure]:
        """The assumptions that fail."""
        sizes = [Violation.ROW_SIZES, Violation.COLUMN_SIZES]
        correlations = [Violation.ROW_CORRELATION, Violation.COLUMN_CORRELATION]
        if self._turned:
            sizes.reverse()
            correlations.reverse()
        departures = []
        share = self._zeros / self._matrix.size
        if share > _SPARSE:
            departures.append(Departure(Violation.SPARSE, share))
        order = self._against_random_order()
        for violation, (ratio, error, _), excess in zip(
            sizes, order, (self._row_excess, self._column_excess), strict=True
        ):
            if ratio > 1 + BEYOND * error and excess > BEYOND:
                departures.append(Departure(violation))
        even = any(ratio < 1 - max(BEYOND * error, 0.5) and heavy > 2 for ratio, error, heavy in order)
        if even or self._diagonal:
            departures.append(Departure(Violation.REGULAR))
        for violation, shift in zip(correlations, (self._row_shift, self._column_shift), strict=True):
            if shift.lags:
                departures.append(Departure(violation, shift.values[0], shift.lags[0]))
        return departures

    def _against_random_order(self) -> list[tuple[float, float, float]]:
        """Variance of the squared norms of rows, and of columns, over that of the same entries in random order.

        With the ratio's error, and the variance in random order over that of Gaussian entries.
        """
        n, m = self._matrix.shape
        chosen = np.unique(np.linspace(0, n - 1, max(min(_SAMPLE // m, n), 2)).astype(np.int64))
        part = np.asarray(self._matrix[chosen], dtype=np.float64) - self._left[chosen] @ self._right.T
        squares = part**2
        rng = np.random.default_rng(0)  # the order is the only chance here, and any will do
        shuffled = [rng.permutation(squares.ravel()).reshape(squares.shape) for _ in range(_SHUFFLES)]
        ratios = []
        for axis in (1, 0):
            chance = [float(one.sum(axis=axis).var()) for one in shuffled]
            mean, error = float(np.mean(chance)), float(np.std(chance, ddof=1))
            ratio = float(squares.sum(axis=axis).var()) / mean if mean > 0 else 1.0
            own_error = np.sqrt(2 / max(squares.shape[1 - axis] - 1, 1))
            gaussian = 2 / squares.shape[axis] * float(squares.sum(axis=axis).mean()) ** 2
            heavy = mean / gaussian if gaussian > 0 else 1.0
            ratios.append((ratio, max(error / mean if mean > 0 else 0.0, float(own_error)), heavy))
        return ratios


def _diagonal(matrix: NDArray[Any]) -> bool:
    """Whether the diagonal is set apart from its rows and columns, and is enough to shape the spectrum."""
    n, m = matrix.shape
    count = min(n, m)
    values = np.abs(np.diagonal(matrix).astype(np.float64))
    step = max(n * m // _SAMPLE, 1)
    rows, columns = (
        np.abs(np.asarray(part, dtype=np.float64)) for part in (matrix[::step], matrix[:, ::step])
    )
    usual, spread = float(rows.mean()), float(np.sqrt(np.mean(rows**2)))
    if usual == 0:
        return False
    # Of rows and columns of unequal size: large ones meet on the diagonal, too.
    expected = columns.mean(axis=1)[:count] * rows.mean(axis=0)[:count] / usual
    apart = float(values.mean() - expected.mean())
    # Noise of this spread reaches up to `spread (sqrt(n) + sqrt(m))`; a part of that is a part of the spectrum.
    return apart > max(BEYOND * spread / math.sqrt(m), _SHAPING * spread * (math.sqrt(n) + math.sqrt(m)))


def _leading(matrix: NDArray[Any], count: int) -> FloatArray:
    """The right singular vectors of the ``count`` largest singular values of a tall matrix."""
    from strati.spectra.eigenvalues import gram

    square = gram(matrix)
    columns = square.shape[0]
    if columns < 256:
        return np.linalg.eigh(square)[1][:, columns - count :]
    from scipy.sparse.linalg import ArpackNoConvergence, eigsh

    start = np.random.default_rng(0).normal(size=columns)
    try:
        values, vectors = eigsh(square, k=count, which="LA", v0=start, tol=1e-6)
    except ArpackNoConvergence:
        return np.linalg.eigh(square)[1][:, columns - count :]
    return np.asarray(vectors[:, np.argsort(values)])


def _excess(sizes: FloatArray, chance: float) -> float:
    """How many standard errors the sizes' relative variance exceeds what Gaussian entries show."""
    mean = float(sizes.mean())
    if mean <= 0 or sizes.size < 3:
        return 0.0
    ratio = float(sizes.var(ddof=1)) / mean**2 / chance
    return (ratio - 1) / float(np.sqrt(2 / (sizes.size - 1) + 6 * chance / sizes.size))


def shrunk(sizes: FloatArray, chance: float) -> FloatArray:
    """Sizes with the variance that chance alone gives taken away."""
    mean = float(sizes.mean())
    seen = float(sizes.var()) / mean**2 if mean > 0 else 0.0
    if seen <= chance:
        return np.full(sizes.size, mean)
    return mean + (sizes - mean) * float(np.sqrt(1 - chance / seen))
