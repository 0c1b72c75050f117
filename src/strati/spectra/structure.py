r"""Which assumption of the noise law a matrix breaks, and how much further its edge lies for that.

The Marchenko-Pastur law and its edge are those of independent entries of one variance. Rows of unequal size (dead
or pruned neurons), correlated neighbours, sparse or heavy entries push noise beyond that edge without any signal.
What a matrix shows of this is measured here, on what is left of it when its candidate spikes are taken out:

* sizes of rows and columns, against Gaussian noise (whose squared norms vary by ``2/M``), and against the same
  entries in random order, which tells sizes that differ from entries that are merely heavy;
* correlation of rows and columns some places apart, against random order (:mod:`strati.spectra.lags`);
* large entries placed more evenly than chance would (a diagonal), and the share of exact zeros.

Where any of it is beyond chance, the edge is that of noise with these sizes and correlations
(:mod:`strati.spectra.unequal`), and spikes are counted anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.spectra import tracy_widom, unequal
from strati.spectra.lags import BEYOND, Lags

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.spectra.bulk import Bulk
    from strati.spectra.eigenvalues import Eigenvalues
    from strati.types import FloatArray

    Source = Callable[[], Iterator[NDArray[Any]]]

_FAR = 0.05  # share of spikes up to which they can be taken out and the rest be called noise
_STRIP = 1 << 21  # entries looked at in one go
_SAMPLE = 1 << 16  # entries that are put in random order
_SHUFFLES = 6
_NOTICED = 3.0  # standard errors for the edge to widen
_SPARSE = 0.5
_SHAPING = 0.1  # of the largest singular value of noise: from here on a diagonal shows
_KURTOSIS = 4.5  # a Gaussian's is 3, Laplace's 6: from here on large entries placed evenly are remarkable
_PLAIN = (np.float32, np.float64)
_SECOND_MOMENT = (0.85, 1.05)


@dataclass(frozen=True)
class Structure:
    """What a matrix shows beyond independent entries of one variance.

    Attributes:
        broken: The assumptions that fail, one phrase each; empty where only the fourth moment widens the edge.
        widening: The edge of such noise over that of independent entries of one variance, at least 1.
        narrowing: The same of the lower end, at most 1.
        sizes: Rows or columns differ in size.
        regular: Large entries are placed more evenly than chance would.
    """

    broken: tuple[str, ...]
    widening: float
    narrowing: float
    sizes: bool
    regular: bool


def examine(
    source: Source, found: Eigenvalues, bulk: Bulk, *, heavy: bool = False
) -> tuple[Bulk, Structure] | None:
    """Look for structure that would put noise beyond the edge of a fitted bulk.

    Args:
        source: Yields the matrices, each time it is called.
        found: Their eigenvalues.
        bulk: The bulk fitted under independent entries of one variance.
        heavy: The entries have a power-law tail: a direction that is one large entry is no signal, so only what
            stands out of sizes with all of them in is taken out.

    Returns:
        The bulk with the edge and the spikes of such noise, and the structure; ``None`` if there is none beyond
        chance, or noise with such a structure would have another spectrum: then there is more than noise.
    """
    counts = [int(part.size - np.searchsorted(part, bulk.edge, side="right")) for part in found.parts]
    seen = [_Sizes(matrix, part) for matrix, part in zip(source(), found.parts, strict=True)]
    if not any(sizes.noticed for sizes in seen):
        return None
    most = [max(int(_FAR * part.size), 1) for part in found.parts]
    for sizes, count, limit in zip(seen, counts, most, strict=True):
        sizes.remove(count if count <= limit and not heavy else 0)
    if not any(sizes.noticed for sizes in seen):
        return None
    for _ in range(6):
        edge = max(sizes.edge(found, bulk.level) for sizes in seen)
        beyond = [int(part.size - np.searchsorted(part, edge, side="right")) for part in found.parts]
        if any(count > limit for count, limit in zip(beyond, most, strict=True)):
            return None
        if beyond == [sizes.removed for sizes in seen]:
            break
        for sizes, count in zip(seen, beyond, strict=True):
            sizes.remove(count)
    edge = _put_back(seen, found, bulk.level, edge)
    if not any(sizes.noticed for sizes in seen):
        return None
    told = dict.fromkeys(phrase for sizes in seen for phrase in sizes.broken())
    regular = any("regular" in phrase for phrase in told)
    if not regular and not all(sizes.explained for sizes in seen):
        return None
    if not told and edge <= 1.0005 * max(sizes.plain(found, bulk.level) for sizes in seen):
        return None
    spikes = sum(sizes.removed for sizes in seen)
    variance = float(np.mean([sizes.variance for sizes in seen]))
    scale = variance / bulk.sigma**2
    structure = Structure(
        broken=tuple(told),
        widening=edge / max(sizes.plain(found, bulk.level) for sizes in seen),
        narrowing=min(sizes.narrowing() for sizes in seen),
        sizes=any("size" in phrase for phrase in told),
        regular=regular,
    )
    widened = replace(
        bulk,
        sigma=float(np.sqrt(variance)),
        lambda_minus=bulk.lambda_minus * scale,
        lambda_plus=bulk.lambda_plus * scale,
        edge=edge,
        spikes=spikes,
        size=found.values.size - spikes,
    )
    return widened, structure


def _put_back(seen: list[_Sizes], found: Eigenvalues, level: float, edge: float) -> float:
    """Put directions back that noise with themselves in it explains, the weakest first; the edge after that.

    The largest directions of correlated noise are the correlated ones. Without them the rest looks less correlated
    than the noise is, its edge comes out low, and they would stay outside for good.
    """
    while any(sizes.removed for sizes in seen):
        weakest = min((s for s in seen if s.removed), key=lambda s: s.largest_kept(s.removed - 1))
        weakest.remove(weakest.removed - 1)
        wider = max(sizes.edge(found, level) for sizes in seen)
        if weakest.largest_kept(weakest.removed) > wider:
            weakest.remove(weakest.removed + 1)
            return edge
        edge = wider
    return edge


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
            own = flat[: step * width]
            # Along the flat rows every neighbour but the last of a row and the first of the next one.
            columns += float(
                np.dot(own[1:], own[:-1]) - np.dot(own[width::width], own[width - 1 : -1 : width])
            )
        return (matrix.shape[0], width), rows, columns

    def correlated(self, found: Eigenvalues) -> bool:
        """Whether any side's neighbours are correlated beyond what a random order gives."""
        for (shape, *products), values in zip(self._products, found.parts, strict=False):
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


class _Sizes:
    """Squared norms, neighbours' products and a sample of one matrix, with or without its largest directions."""

    def __init__(self, matrix: NDArray[Any], values: FloatArray) -> None:
        self._matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
        self._turned = matrix.shape[0] < matrix.shape[1]
        self._values = values
        self.removed = 0
        n, m = self._matrix.shape
        self._known = np.empty((m, 0))  # leading right singular vectors, ascending
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
        if count > self._known.shape[1]:
            self._known = _leading(self._matrix, count)
        self._take(self._known[:, self._known.shape[1] - count :])
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
        kept = self._values[: m - right.shape[1]]
        self.variance = float(kept.sum()) / ((n - right.shape[1]) * (m - right.shape[1]))
        spread = float(np.sum(kept**2))
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
        kept = self._values[: self._values.size - self.removed]
        ratio = float(np.sum(kept**2)) / unequal.second_moment(self.population())
        low, high = _SECOND_MOMENT
        return ratio <= high and (ratio >= low or self._zeros > _SPARSE * self._matrix.size)

    def population(self) -> unequal.Population:
        n, m = self._matrix.shape
        rows = _shrunk(self.rows, 2 / m * self._column_shift.longer) * self._row_shift.spectrum(n)
        columns = _shrunk(self.columns, 2 / n * self._row_shift.longer) * self._column_shift.spectrum(m)
        return unequal.population(rows * (self.variance * n * m / rows.sum()), columns)

    def edge(self, found: Eigenvalues, level: float) -> float:
        wide = unequal.widening(self.population(), level=level, matrices=found.matrices)
        return self.plain(found, level) * wide

    def plain(self, found: Eigenvalues, level: float) -> float:
        edge = tracy_widom.upper_edge(found.rows, found.columns, level=level, matrices=found.matrices)
        return float(edge * self.variance)

    def narrowing(self) -> float:
        return unequal.narrowing(self.population())

    def broken(self) -> list[str]:
        """The assumptions that fail, in words."""
        sides = ("columns", "rows") if self._turned else ("rows", "columns")
        told = []
        share = self._zeros / self._matrix.size
        if share > _SPARSE:
            told.append(f"{share:.0%} of the weights are zero")
        order = self._against_random_order()
        for side, (ratio, error, _), excess in zip(
            sides, order, (self._row_excess, self._column_excess), strict=True
        ):
            if ratio > 1 + BEYOND * error and excess > BEYOND:
                told.append(f"{side} differ in size")
        even = any(ratio < 1 - max(BEYOND * error, 0.5) and heavy > 2 for ratio, error, heavy in order)
        if even or self._diagonal:
            told.append("large weights are placed regularly, as on a diagonal")
        for side, shift in zip(sides, (self._row_shift, self._column_shift), strict=True):
            if shift.lags:
                told.append(shift.phrase(side))
        return told

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
        found = []
        for axis in (1, 0):
            chance = [float(one.sum(axis=axis).var()) for one in shuffled]
            mean, error = float(np.mean(chance)), float(np.std(chance, ddof=1))
            ratio = float(squares.sum(axis=axis).var()) / mean if mean > 0 else 1.0
            own = np.sqrt(2 / max(squares.shape[1 - axis] - 1, 1))
            gaussian = 2 / squares.shape[axis] * float(squares.sum(axis=axis).mean()) ** 2
            heavy = mean / gaussian if gaussian > 0 else 1.0
            found.append((ratio, max(error / mean if mean > 0 else 0.0, float(own)), heavy))
        return found


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


def _shrunk(sizes: FloatArray, chance: float) -> FloatArray:
    """Sizes with the variance that chance alone gives taken away."""
    mean = float(sizes.mean())
    seen = float(sizes.var()) / mean**2 if mean > 0 else 0.0
    if seen <= chance:
        return np.full(sizes.size, mean)
    return mean + (sizes - mean) * float(np.sqrt(1 - chance / seen))
