"""How the entries of one matrix depart from independent noise of one variance.

:class:`NoiseMoments` measures the squared norms of rows and columns, the correlation of rows and of columns some places
apart, exact zeros and a diagonal, with or without the leading directions of the matrix (its candidate spikes).

In random order the product of two rows is any off-diagonal entry of the Gram matrix, so the mean square of those
entries, which follows from the eigenvalues and the squared norms, gives the standard error of a lag's sum of products.
Of large matrices a sketch (the rows times random signs) is looked at first, and only lags that stand out there are
summed in full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.spectra.eigenvalues import gram
from strati.spectra.marchenko_pastur import SeparableNoise, upper_edge

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray
    from strati.spectra.eigenvalues import Eigenvalues

SIGNIFICANT = 5.0
"""Standard errors from which a departure is beyond chance."""

_STRIP = 1 << 21  # entries read at a time
_LAGS = 48  # largest lag
_SIGNS = 48  # columns of a sketch
_NO_SKETCH = 1 << 15  # entries up to which no sketch is needed
_LAGS_IN_FULL = 16
_AUTOREGRESSIVE = 0.1  # share of the first correlation by which later ones may differ from an autoregression
_LEAST_DENSITY = 0.05  # of the mean: the least population eigenvalue
_SAMPLE = 1 << 16  # entries that are shuffled
_SHUFFLES = 6
_NOTICED = 3.0  # standard errors for the edge to widen
_SPARSE = 0.5
_DIAGONAL = 0.1  # of the largest singular value of noise: from here on a diagonal shows
_KURTOSIS = 4.5  # a Gaussian's is 3, Laplace's 6: from here on large entries placed evenly are remarkable
_SECOND_MOMENT = (0.85, 1.05)


class Violation(StrEnum):
    """An assumption of the noise law that fails."""

    SPARSE = "sparse"
    ROW_SIZES = "row-sizes"
    COLUMN_SIZES = "column-sizes"
    SLICE_SIZES = "slice-sizes"
    REGULAR = "regular"
    ROW_CORRELATION = "row-correlation"
    COLUMN_CORRELATION = "column-correlation"


@dataclass(frozen=True)
class Departure:
    """A violation and how strong it is.

    Attributes:
        violation: The assumption that fails.
        amount: Share of zeros, correlation, or largest over smallest slice variance; ``None`` where only the
            violation counts.
        lag: How many places apart the correlated rows or columns are.
    """

    violation: Violation
    amount: float | None = None
    lag: int | None = None


@dataclass(frozen=True)
class Correlation:
    """How rows depend on those before them.

    Attributes:
        lags: Distances at which rows are correlated beyond chance, the strongest first; empty if there are none.
        values: The correlations at these distances.
        first_order: Together they are those of a first-order autoregression.
    """

    lags: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    first_order: bool = False

    @property
    def variance_factor(self) -> float:
        """By how much correlation increases the variance of a sum of squares."""
        if self.first_order:
            r = self.values[self.lags.index(1)]
            return (1 + r**2) / (1 - r**2)
        return 1 + 2 * sum(r**2 for r in self.values)

    def spectrum(self, count: int) -> FloatArray:
        """Population eigenvalues of ``count`` rows with this correlation, in no order of size; their mean is 1.

        Examples:
            >>> Correlation().spectrum(3).tolist()
            [1.0, 1.0, 1.0]
            >>> round(float(Correlation((2,), (0.25,)).spectrum(1000).max()), 3)
            1.5
        """
        if not self.lags:
            return np.ones(count)
        frequencies = np.pi * np.random.default_rng(0).permutation((np.arange(count) + 0.5) / count)
        if self.first_order:
            r = self.values[self.lags.index(1)]
            autoregressive: FloatArray = (1 - r**2) / (1 - 2 * r * np.cos(frequencies) + r**2)
            return autoregressive
        waves = (2 * r * np.cos(k * frequencies) for k, r in zip(self.lags, self.values, strict=True))
        density = np.maximum(sum(waves, np.ones(count)), _LEAST_DENSITY)
        return density / float(density.mean())


class Autocorrelation:
    """Products of the rows of one matrix (``axis`` 0), or of its columns (1), some places apart."""

    def __init__(self, matrix: NDArray[Any], axis: int) -> None:
        self._matrix, self._axis = matrix, axis
        self._count, self._other = matrix.shape[axis], matrix.shape[1 - axis]
        self._sums: dict[int, float] = {}
        rng = np.random.default_rng(0)
        signs = None if matrix.size <= _NO_SKETCH else rng.choice([-1.0, 1.0], (self._other, _SIGNS))
        self._signs = signs
        self._sketch: FloatArray | None = None

    def correlation(
        self, vectors: FloatArray, partners: FloatArray, sizes: FloatArray, spread: float
    ) -> Correlation:
        """The correlation beyond chance of the rows of ``W - vectors partners^T``.

        Args:
            vectors: One column per direction that is taken out: its parts of the rows.
            partners: Its parts of the columns.
            sizes: Squared norms of the rows that are left.
            spread: The sum of squared eigenvalues that are left.
        """
        total = float(sizes.sum())
        if self._count < 3 or total <= 0:
            return Correlation()
        strengths = np.sum(partners**2, axis=0)
        diagonal = float(np.sum(sizes**2))
        # Squared cosine of two rows by chance: a product is as large as the two rows are.
        cosine = max(spread - diagonal, 0.0) / max(total**2 - diagonal, np.finfo(np.float64).tiny)
        if cosine <= 1e-24:
            return Correlation()
        measured: dict[int, float] = {}
        beyond: dict[int, float] = {}
        for k in self._lags_to_sum(vectors, partners, sizes, cosine):
            products = self._sum(k) - float(np.sum(vectors[k:] * vectors[:-k] * strengths))
            r = products / (total * (self._count - k) / self._count)
            measured[k] = float(np.clip(r, -0.999, 0.999))
            if abs(products) > SIGNIFICANT * float(np.sqrt(cosine * _weight(sizes, k))):
                beyond[k] = measured[k]
        if not beyond:
            return Correlation()
        lags = tuple(sorted(beyond, key=lambda k: -abs(beyond[k])))
        first = beyond.get(1, 0.0)
        tolerance = SIGNIFICANT * float(np.sqrt(cosine * _weight(sizes, 0))) / total
        tolerance += _AUTOREGRESSIVE * abs(first)
        first_order = 1 in beyond and all(abs(r - first**k) <= tolerance for k, r in measured.items())
        return Correlation(lags, tuple(beyond[k] for k in lags), first_order)

    def _lags_to_sum(
        self, vectors: FloatArray, partners: FloatArray, sizes: FloatArray, cosine: float
    ) -> list[int]:
        """The first lag, and those that stand out of the sketch, the strongest first."""
        rows = self._sketched()
        if vectors.shape[1]:
            rows = rows - vectors @ (partners.T if self._signs is None else partners.T @ self._signs)
        flat, width = np.ascontiguousarray(rows).ravel(), rows.shape[1]
        extra, scale = (0.0, 1.0) if self._signs is None else (1 / width, float(width))
        error = np.sqrt(cosine + extra) * scale
        products = {
            k: abs(float(np.dot(flat[k * width :], flat[: -k * width]))) / float(np.sqrt(_weight(sizes, k)))
            for k in range(2, min(_LAGS, self._count // 4) + 1)
        }
        beyond = [k for k, product in products.items() if product > SIGNIFICANT * error]
        return [1, *sorted(beyond, key=lambda k: -products[k])[:_LAGS_IN_FULL]]

    def _sketched(self) -> FloatArray:
        """The rows, or their products with random signs, computed once."""
        if self._sketch is None:
            rows = self._matrix if self._axis == 0 else self._matrix.T
            if self._signs is None:
                self._sketch = np.asarray(rows, dtype=np.float64)
            elif rows.dtype in (np.float32, np.float64):
                self._sketch = (rows @ self._signs.astype(rows.dtype)).astype(np.float64)
            else:
                step = max(_STRIP // self._other, 1)
                strips = (rows[k : k + step] for k in range(0, self._count, step))
                self._sketch = np.concatenate(
                    [np.asarray(strip, dtype=np.float64) @ self._signs for strip in strips]
                )
        return self._sketch

    def _sum(self, k: int) -> float:
        """The sum of the products of all rows with those ``k`` places on."""
        if k not in self._sums:
            matrix, total = self._matrix, 0.0
            step = max(_STRIP // matrix.shape[1], 1)
            for start in range(0, matrix.shape[0], step):
                if self._axis == 0:
                    part = np.asarray(matrix[start : start + step + k], dtype=np.float64)
                    count = max(min(len(part) - k, step), 0)
                    total += float(np.einsum("ij,ij->", part[k : k + count], part[:count]))
                else:
                    part = np.asarray(matrix[start : start + step], dtype=np.float64)
                    total += float(np.einsum("ij,ij->", part[:, k:], part[:, :-k]))
            self._sums[k] = total
        return self._sums[k]


def _weight(sizes: FloatArray, k: int) -> float:
    """Sum over rows of their squared norm times that of the row ``k`` places on."""
    weight = float(np.dot(sizes[k:], sizes[: sizes.size - k]))
    return max(weight, np.finfo(np.float64).tiny)


class NoiseMoments:
    """Squared norms, autocorrelation and a sample of one matrix, with or without its leading directions."""

    def __init__(self, matrix: NDArray[Any], values: FloatArray) -> None:
        self._matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
        self._transposed = matrix.shape[0] < matrix.shape[1]
        self._values = values
        self.removed = 0
        n, m = self._matrix.shape
        self._leading_vectors = np.empty((m, 0))  # leading right singular vectors, ascending
        rows, columns = np.empty(n), np.zeros(m)
        self._autocorrelation = Autocorrelation(self._matrix, 0), Autocorrelation(self._matrix, 1)
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
        self._all_sizes = rows, columns
        self._diagonal = _has_diagonal(self._matrix)
        self._kurtosis = fourth * n * m / max(float(rows.sum()) ** 2, np.finfo(np.float64).tiny)
        self._measure(np.empty((m, 0)))

    def remove(self, count: int) -> None:
        """Take the largest ``count`` directions out."""
        if count == self.removed:
            return
        if count > self._leading_vectors.shape[1]:
            self._leading_vectors = _leading_vectors(self._matrix, count)
        self._measure(self._leading_vectors[:, self._leading_vectors.shape[1] - count :])
        self.removed = count

    def largest_left(self, removed: int) -> float:
        """The largest eigenvalue that is left when so many are taken out."""
        return float(self._values[self._values.size - removed - 1])

    def _measure(self, right: FloatArray) -> None:
        """Moments of ``E = W (1 - V V^T)`` from those of ``W``, without another pass over the matrix."""
        rows, columns = self._all_sizes
        left = self._matrix.astype(np.float64) @ right if right.shape[1] else np.zeros((rows.size, 0))
        strengths = np.sum(left**2, axis=0)
        self._right, self._left = right, left
        self.rows = np.maximum(rows - np.sum(left**2, axis=1), 0.0)
        self.columns = np.maximum(columns - np.sum(right**2 * strengths, axis=1), 0.0)
        n, m = rows.size, columns.size
        remaining = self._values[: m - right.shape[1]]
        self.variance = float(remaining.sum()) / ((n - right.shape[1]) * (m - right.shape[1]))
        spread = float(np.sum(remaining**2))
        self._row_correlation = self._autocorrelation[0].correlation(left, right, self.rows, spread)
        self._column_correlation = self._autocorrelation[1].correlation(right, left, self.columns, spread)
        # Squared norms of Gaussian rows vary by 2/M; their variance is known to sqrt(2/N).
        self._row_chance = 2 / m * self._column_correlation.variance_factor
        self._column_chance = 2 / n * self._row_correlation.variance_factor
        self._row_excess = _excess(self.rows, self._row_chance)
        self._column_excess = _excess(self.columns, self._column_chance)

    @property
    def _sparse(self) -> bool:
        return self._zeros > _SPARSE * self._matrix.size

    @property
    def is_significant(self) -> bool:
        """Whether the edge of equal independent entries is in doubt."""
        excesses = self._row_excess, self._column_excess
        even = min(excesses) < -SIGNIFICANT and self._kurtosis > _KURTOSIS
        correlated = self._row_correlation.lags or self._column_correlation.lags
        return bool(max(excesses) > _NOTICED or even or self._diagonal or correlated or self._sparse)

    @property
    def explained(self) -> bool:
        """Whether noise with these sizes and correlations has the second moment that the eigenvalues have.

        Of 16 kinds of noise none strays beyond 0.89 to 1.03 times (``tools/calibrate_spectra.py``); layers of trained
        networks have 1.1 to 4 times that, whose large rows come from the signal.
        """
        remaining = self._values[: self._values.size - self.removed]
        ratio = float(np.sum(remaining**2)) / self.noise().second_moment()
        low, high = _SECOND_MOMENT
        return ratio <= high and (ratio >= low or self._sparse)

    def noise(self) -> SeparableNoise:
        """Noise with the sizes and correlations of what is left."""
        n, m = self._matrix.shape
        rows = shrink_sizes(self.rows, self._row_chance) * self._row_correlation.spectrum(n)
        columns = shrink_sizes(self.columns, self._column_chance) * self._column_correlation.spectrum(m)
        return SeparableNoise.from_sizes(rows * (self.variance * n * m / rows.sum()), columns)

    def edge(self, eigenvalues: Eigenvalues, level: float) -> float:
        """What the largest eigenvalue of such noise exceeds with probability ``level``."""
        widening = self.noise().widening(level=level, matrices=eigenvalues.matrices)
        return self.plain_edge(eigenvalues, level) * widening

    def plain_edge(self, eigenvalues: Eigenvalues, level: float) -> float:
        """The same for independent entries of one variance."""
        rows, columns, count = eigenvalues.rows, eigenvalues.columns, eigenvalues.matrices
        return float(upper_edge(rows, columns, level=level, matrices=count) * self.variance)

    def departures(self) -> list[Departure]:
        """The assumptions that fail beyond chance."""
        sizes = [Violation.ROW_SIZES, Violation.COLUMN_SIZES]
        correlations = [Violation.ROW_CORRELATION, Violation.COLUMN_CORRELATION]
        if self._transposed:
            sizes.reverse()
            correlations.reverse()
        departures = []
        if self._sparse:
            departures.append(Departure(Violation.SPARSE, self._zeros / self._matrix.size))
        shuffled = self._against_random_order()
        excesses = (self._row_excess, self._column_excess)
        for violation, (ratio, error, _), excess in zip(sizes, shuffled, excesses, strict=True):
            if ratio > 1 + SIGNIFICANT * error and excess > SIGNIFICANT:
                departures.append(Departure(violation))
        even = any(
            ratio < 1 - max(SIGNIFICANT * error, 0.5) and kurtosis > 2 for ratio, error, kurtosis in shuffled
        )
        if even or self._diagonal:
            departures.append(Departure(Violation.REGULAR))
        sides = (self._row_correlation, self._column_correlation)
        for violation, correlation in zip(correlations, sides, strict=True):
            if correlation.lags:
                departures.append(Departure(violation, correlation.values[0], correlation.lags[0]))
        return departures

    def _against_random_order(self) -> list[tuple[float, float, float]]:
        """Variance of the squared norms of rows, and of columns, over that of the same entries in random order.

        With the ratio's error, and the variance in random order over that of Gaussian entries.
        """
        n, m = self._matrix.shape
        sample = np.unique(np.linspace(0, n - 1, max(min(_SAMPLE // m, n), 2)).astype(np.int64))
        part = np.asarray(self._matrix[sample], dtype=np.float64) - self._left[sample] @ self._right.T
        squares = part**2
        rng = np.random.default_rng(0)  # only the order is random, so any seed will do
        shuffles = [rng.permutation(squares.ravel()).reshape(squares.shape) for _ in range(_SHUFFLES)]
        ratios = []
        for axis in (1, 0):
            chance = [float(shuffle.sum(axis=axis).var()) for shuffle in shuffles]
            mean, spread = float(np.mean(chance)), float(np.std(chance, ddof=1))
            sizes = squares.sum(axis=axis)
            sampling_error = float(np.sqrt(2 / max(squares.shape[1 - axis] - 1, 1)))
            gaussian = 2 / squares.shape[axis] * float(sizes.mean()) ** 2
            ratio = float(sizes.var()) / mean if mean > 0 else 1.0
            error = max(spread / mean if mean > 0 else 0.0, sampling_error)
            ratios.append((ratio, error, mean / gaussian if gaussian > 0 else 1.0))
        return ratios


def shrink_sizes(sizes: FloatArray, chance: float) -> FloatArray:
    """Sizes without the variance that chance alone gives them (``chance``, relative to the squared mean)."""
    mean = float(sizes.mean())
    variance = float(sizes.var()) / mean**2 if mean > 0 else 0.0
    if variance <= chance:
        return np.full(sizes.size, mean)
    return mean + (sizes - mean) * float(np.sqrt(1 - chance / variance))


def _excess(sizes: FloatArray, chance: float) -> float:
    """How many standard errors the sizes' relative variance exceeds what Gaussian entries show."""
    mean = float(sizes.mean())
    if mean <= 0 or sizes.size < 3:
        return 0.0
    ratio = float(sizes.var(ddof=1)) / mean**2 / chance
    return (ratio - 1) / float(np.sqrt(2 / (sizes.size - 1) + 6 * chance / sizes.size))


def _has_diagonal(matrix: NDArray[Any]) -> bool:
    """Whether the diagonal is set apart from its rows and columns, and is enough to shape the spectrum."""
    n, m = matrix.shape
    count = min(n, m)
    diagonal = np.abs(np.diagonal(matrix).astype(np.float64))
    step = max(n * m // _SAMPLE, 1)
    rows, columns = (
        np.abs(np.asarray(part, dtype=np.float64)) for part in (matrix[::step], matrix[:, ::step])
    )
    usual, spread = float(rows.mean()), float(np.sqrt(np.mean(rows**2)))
    if usual == 0:
        return False
    # Of rows and columns of unequal size: large ones meet on the diagonal, too.
    expected = columns.mean(axis=1)[:count] * rows.mean(axis=0)[:count] / usual
    apart = float(diagonal.mean() - expected.mean())
    # Noise of this spread reaches up to `spread (sqrt(n) + sqrt(m))`; a part of that is a part of the spectrum.
    least = _DIAGONAL * spread * (math.sqrt(n) + math.sqrt(m))
    return apart > max(SIGNIFICANT * spread / math.sqrt(m), least)


def _leading_vectors(matrix: NDArray[Any], count: int) -> FloatArray:
    """The right singular vectors of the ``count`` largest singular values of a tall matrix."""
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
