r"""The random part of a layer: its Marchenko-Pastur bulk, and where noise ends when the law's assumptions fail.

The Marchenko-Pastur law and its edge are those of independent entries of one variance. Slices of unequal size, rows
of unequal size (dead or pruned neurons), correlated neighbours, sparse or heavy entries push noise beyond that edge
without any signal. :func:`noise_model` works in four steps:

1. The slices of a convolution are brought to one variance (:func:`slice_variances`); everything below is measured on
   them, and edges are those of a slice of mean variance.
2. The law is fitted to the middle of the spectrum (:mod:`strati.spectra.marchenko_pastur`), without quasi-null
   directions.
3. Where the fit leaves doubt, the matrices are examined without their candidate spikes
   (:mod:`strati.spectra.noise_structure`): sizes of rows and columns against Gaussian noise (whose squared norms vary
   by ``2/M``) and against the same entries in random order; correlation of rows and columns some places apart; large
   entries placed more evenly than chance would (a diagonal); the share of exact zeros.
4. Where any of it is beyond chance, the edge is that of noise with these sizes and correlations
   (:class:`~strati.spectra.marchenko_pastur.SeparableNoise`), and spikes and quasi-null directions are counted anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.spectra.eigenvalues import Eigenvalues, gram, matrix_source, pooled, unresolved, widest_gap
from strati.spectra.eigenvalues import eigenvalues as compute_eigenvalues
from strati.spectra.marchenko_pastur import Bulk, fit_bulk, fit_random_part, fit_without_nulls, quasi_null
from strati.spectra.noise_structure import SIGNIFICANT, Departure, NoiseMoments, Violation, shrink_sizes
from strati.spectra.tails import EntrySizes, EntryTail

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray
    from strati.spectra.eigenvalues import Matrices, Source

_FEW = 0.05  # share of spikes up to which they can be taken out and the others be called noise
_MANY_NULLS = 0.1  # share of quasi-null directions from which the bulk is no longer fitted around them
_SPARSE = 0.5
_STRIP = 1 << 21  # entries read at a time
_PLAIN = (np.float32, np.float64)
_ROUNDS = 6


@dataclass(frozen=True)
class NoiseModel:
    """The random part of a layer.

    Attributes:
        bulk: The fitted law, with the edge and the spikes of noise that has the violations.
        quasi_null: Number of eigenvalues that such noise would not leave so small.
        violations: What the matrices show beyond independent entries of one variance, if beyond chance.
        widening: The edge of such noise over that of independent entries of one variance, at least 1.
        examined: The edge is that of noise with the structure, fourth moment or correlation of the matrices.
        slice_variances: Variance of each slice over their mean; empty for a single matrix.
        largest: The largest eigenvalue, that of each slice over its variance.
    """

    bulk: Bulk
    quasi_null: int
    violations: tuple[Departure, ...] = ()
    widening: float = 1.0
    examined: bool = False
    slice_variances: tuple[float, ...] = ()
    largest: float = 0.0

    @property
    def sigma(self) -> float:
        """Standard deviation of the entries of the random part."""
        return self.bulk.sigma

    @property
    def edge(self) -> float:
        """What the largest eigenvalue of such noise exceeds with the probability of ``bulk.level``."""
        return self.bulk.edge

    @property
    def structure(self) -> tuple[Departure, ...]:
        """The violations within each slice: those that the edge was moved for."""
        return tuple(d for d in self.violations if d.violation != Violation.SLICE_SIZES)

    def shows(self, *violations: Violation) -> bool:
        """Whether any of these assumptions fails."""
        return any(departure.violation in violations for departure in self.violations)


def noise_model(
    matrices: Matrices,
    eigenvalues: Eigenvalues,
    *,
    variances: FloatArray | None = None,
    level: float = 0.01,
    heavy: bool = False,
    correlated: bool = False,
) -> NoiseModel | None:
    """Model the random part of a matrix, or of the slices of a convolution.

    Args:
        matrices: The matrix, or the slices, or a function that yields them each time it is called.
        eigenvalues: Their eigenvalues.
        variances: Their :func:`slice_variances`, if they are computed already.
        level: Chance that the largest eigenvalue of pure noise passes for a spike.
        heavy: The entries have a power-law tail: a direction that is one large entry is no signal, so only what
            stands out of sizes that include all directions is taken out.
        correlated: Neighbouring rows or columns are correlated (:class:`AdjacentCorrelation`).

    Returns:
        The model, or ``None`` for fewer than ten eigenvalues.

    Examples:
        >>> from strati.spectra.eigenvalues import eigenvalues
        >>> rng = np.random.default_rng(0)
        >>> W = rng.normal(size=(300, 150)) * rng.lognormal(0, 0.5, 300)[:, None]
        >>> model = noise_model(W, eigenvalues(W))
        >>> model.bulk.spikes, [str(departure.violation) for departure in model.violations]
        (0, ['row-sizes'])
    """
    source = matrix_source(matrices)
    if variances is None:
        variances = slice_variances(eigenvalues, level=level)
    filled = [k for k, part in enumerate(eigenvalues.parts) if part.size and part[-1] > 0]
    if not filled:
        return None
    equal = equal_slices(some_slices(eigenvalues, filled), variances[filled])
    plain = _plain_model(equal, variances[filled], level)
    if plain is None:
        return None
    bulk = plain.bulk
    doubt = bulk.spikes or plain.quasi_null or correlated or bulk.ks_distance > bulk.noise_limit
    scaled = scaled_slices(
        lambda: (matrix for k, matrix in enumerate(source()) if k in filled), variances[filled]
    )
    examine = doubt and not widest_gap(equal).collapsed
    structured = _with_structure(scaled, equal, plain, heavy=heavy) if examine else None
    model = plain if structured is None else structured
    if eigenvalues.matrices == 1:
        return model
    zeros = (eigenvalues.matrices - len(filled)) * eigenvalues.columns
    nulls = max(model.quasi_null, _collapsed_directions(eigenvalues, filled))
    return replace(model, quasi_null=nulls + zeros, slice_variances=tuple(variances.tolist()))


def _plain_model(equal: Eigenvalues, variances: FloatArray, level: float) -> NoiseModel | None:
    """The model of independent entries of one variance in each slice."""
    bulk = fit_random_part(equal, level=level)
    if bulk is None:
        return None
    nulls = _quasi_null(equal, bulk.sigma)
    refit = 0 < nulls < _MANY_NULLS * equal.values.size and not widest_gap(equal).collapsed
    chance = math.sqrt(2 / (equal.rows * equal.columns))
    ratio = float(variances.max() / variances.min())
    unequal = np.abs(np.log(variances)).max() > SIGNIFICANT * chance
    return NoiseModel(
        fit_without_nulls(equal, bulk, nulls) if refit else bulk,
        nulls,
        (Departure(Violation.SLICE_SIZES, ratio),) if unequal else (),
        largest=float(equal.values[-1]),
    )


def slice_variances(eigenvalues: Eigenvalues, *, level: float = 0.01) -> FloatArray:
    """The variance of the random part of each slice, over their mean.

    Each slice with ten eigenvalues or more has a bulk of its own; of smaller ones the mean square of the entries is
    taken, less what chance adds to the differences. A slice that is no more than rounding keeps its size.

    Examples:
        >>> from strati.spectra.eigenvalues import eigenvalues
        >>> rng = np.random.default_rng(0)
        >>> slices = eigenvalues([rng.normal(size=(200, 100)), 3 * rng.normal(size=(200, 100))])
        >>> slice_variances(slices).round(1).tolist()
        [0.2, 1.8]
    """
    count, entries = eigenvalues.matrices, eigenvalues.rows * eigenvalues.columns
    if count == 1 or not all(part.size for part in eigenvalues.parts):
        return np.ones(count)
    squares = np.array([float(part.sum()) for part in eigenvalues.parts]) / entries
    bulks = [_bulk_variance(part, eigenvalues, 1 - (1 - level) ** (1 / count)) for part in eigenvalues.parts]
    small = any(variance is None for variance in bulks)
    variances = shrink_sizes(squares, 2 / entries) if small else np.array(bulks, dtype=np.float64)
    largest = np.array([float(part[-1]) for part in eigenvalues.parts])
    usable = (variances > 0) & (largest > eigenvalues.resolutions**2)
    if not usable.any():
        return np.ones(count)
    relative: FloatArray = np.where(usable, variances, 1.0) / float(variances[usable].mean())
    return np.where(usable, relative, 1.0)


def _bulk_variance(part: FloatArray, eigenvalues: Eigenvalues, level: float) -> float | None:
    """The variance of the random part of one slice; ``None`` if it has too few eigenvalues.

    Where the law fits, it is the sum of the eigenvalues that are no spikes: unlike the middle of the spectrum it is as
    large as the edge of this very draw is.
    """
    n, m = eigenvalues.rows, eigenvalues.columns
    bulk = fit_bulk(part, n, m, level=level)
    if bulk is None:
        return None
    if bulk.ks_distance > bulk.noise_limit:
        return bulk.sigma**2
    return float(part[: bulk.size].sum()) / ((n - bulk.spikes) * (m - bulk.spikes))


def equal_slices(eigenvalues: Eigenvalues, variances: FloatArray) -> Eigenvalues:
    """The eigenvalues of slices divided by their variances."""
    if np.all(variances == 1):
        return eigenvalues
    parts = tuple(part / variance for part, variance in zip(eigenvalues.parts, variances, strict=True))
    extents = tuple(np.array(eigenvalues.extents) / np.sqrt(variances))
    values = pooled(parts, eigenvalues.problem)
    return replace(eigenvalues, values=values, parts=parts, extents=extents)


def scaled_slices(source: Source, variances: FloatArray) -> Source:
    """The slices themselves, divided by their standard deviations."""
    if np.all(variances == 1):
        return source
    scales = np.sqrt(variances)
    return lambda: (
        np.asarray(matrix, dtype=np.float64) / scale for matrix, scale in zip(source(), scales, strict=True)
    )


def some_slices(eigenvalues: Eigenvalues, places: Sequence[int]) -> Eigenvalues:
    """The eigenvalues of some of the slices."""
    if len(places) == eigenvalues.matrices:
        return eigenvalues
    parts = tuple(eigenvalues.parts[k] for k in places)
    extents = tuple(eigenvalues.extents[k] for k in places)
    values = pooled(parts, eigenvalues.problem)
    return replace(eigenvalues, values=values, matrices=len(parts), parts=parts, extents=extents)


def _collapsed_directions(eigenvalues: Eigenvalues, places: Sequence[int]) -> int:
    """How many directions lie below the gap of a slice whose rank has collapsed."""
    gaps = (widest_gap(some_slices(eigenvalues, [k])) for k in places)
    return sum(gap.below for gap in gaps if gap.collapsed)


def _quasi_null(eigenvalues: Eigenvalues, sigma: float) -> int:
    rows, columns, count = eigenvalues.rows, eigenvalues.columns, eigenvalues.matrices
    return sum(quasi_null(part, rows, columns, sigma, matrices=count) for part in eigenvalues.parts)


def _with_structure(
    source: Source, eigenvalues: Eigenvalues, model: NoiseModel, *, heavy: bool
) -> NoiseModel | None:
    """The model with the edge and the spikes of noise that has the structure of the matrices.

    ``None`` if there is none beyond chance, or noise with such a structure would have another spectrum: then there is
    more than noise.
    """
    bulk, parts, level = model.bulk, eigenvalues.parts, model.bulk.level
    slices = [NoiseMoments(matrix, part) for matrix, part in zip(source(), parts, strict=True)]
    if not any(moments.is_significant for moments in slices):
        return None
    most = [max(int(_FEW * part.size), 1) for part in parts]
    for moments, count, limit in zip(slices, _beyond(parts, bulk.edge), most, strict=True):
        moments.remove(count if count <= limit and not heavy else 0)
    if not any(moments.is_significant for moments in slices):
        return None
    for _ in range(_ROUNDS):
        first_edge = max(moments.edge(eigenvalues, level) for moments in slices)
        beyond = _beyond(parts, first_edge)
        if any(count > limit for count, limit in zip(beyond, most, strict=True)):
            return None
        if beyond == [moments.removed for moments in slices]:
            break
        for moments, count in zip(slices, beyond, strict=True):
            moments.remove(count)
    edge = _put_back(slices, eigenvalues, level, first_edge)
    if not any(moments.is_significant for moments in slices):
        return None
    departures = tuple(dict.fromkeys(departure for moments in slices for departure in moments.departures()))
    regular = any(departure.violation == Violation.REGULAR for departure in departures)
    if not regular and not all(moments.explained for moments in slices):
        return None
    plain_edge = max(moments.plain_edge(eigenvalues, level) for moments in slices)
    if not departures and edge <= 1.0005 * plain_edge:
        return None
    spikes = sum(moments.removed for moments in slices)
    variance = float(np.mean([moments.variance for moments in slices]))
    scale = variance / bulk.sigma**2
    # However uneven the rows: what is zero to rounding is no part of any noise.
    narrow = math.sqrt(variance * min(moments.noise().narrowing() for moments in slices))
    nulls = max(_quasi_null(eigenvalues, narrow), min(model.quasi_null, unresolved(eigenvalues)))
    widened = replace(
        bulk,
        sigma=float(np.sqrt(variance)),
        lambda_minus=bulk.lambda_minus * scale,
        lambda_plus=bulk.lambda_plus * scale,
        edge=edge,
        spikes=spikes,
        size=eigenvalues.values.size - spikes,
    )
    violations = departures + model.violations
    return replace(
        model,
        bulk=widened,
        quasi_null=nulls,
        violations=violations,
        widening=edge / plain_edge,
        examined=True,
    )


def _beyond(parts: Sequence[FloatArray], edge: float) -> list[int]:
    return [int(part.size - np.searchsorted(part, edge, side="right")) for part in parts]


def _put_back(slices: list[NoiseMoments], eigenvalues: Eigenvalues, level: float, edge: float) -> float:
    """Put directions back that noise with themselves in it explains, the weakest first; the edge after that.

    The largest directions of correlated noise are the correlated ones. Without them the others look less correlated
    than the noise is, its edge comes out low, and they would stay outside for good.
    """
    while any(moments.removed for moments in slices):
        candidates = [moments for moments in slices if moments.removed]
        weakest = min(candidates, key=lambda moments: moments.largest_left(moments.removed - 1))
        weakest.remove(weakest.removed - 1)
        wider = max(moments.edge(eigenvalues, level) for moments in slices)
        if weakest.largest_left(weakest.removed) > wider:
            weakest.remove(weakest.removed + 1)
            return edge
        edge = wider
    return edge


@dataclass(frozen=True)
class Split:
    r"""Signal and noise of a matrix, :math:`W = W_\mathrm{rand} + \Delta_\mathrm{sig}`.

    Attributes:
        noise: ``W_rand``.
        signal: ``Delta_sig``, of rank ``rank``.
        rank: Number of singular triplets in the signal.
        edge: The eigenvalue above which they lie.
    """

    noise: FloatArray
    signal: FloatArray
    rank: int
    edge: float


def split(W: NDArray[Any], *, edge: float | None = None, level: float = 0.01) -> Split:
    """Split a matrix at the edge of its random bulk.

    The signal comes from the leading eigenvectors of the smaller Gram matrix, so that only they are computed.

    Args:
        W: The matrix.
        edge: Eigenvalues of ``W.T @ W`` above this are signal; by default the Tracy-Widom edge of the
            Marchenko-Pastur bulk fitted to ``W``.
        level: Chance that the largest eigenvalue of pure noise passes for signal.

    Returns:
        Noise and signal in float64.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> W = rng.normal(size=(200, 100)) + 3 * np.outer(np.ones(200), np.ones(100)) / 10
        >>> parts = split(W)
        >>> parts.rank, bool(np.allclose(parts.noise + parts.signal, W))
        (1, True)
    """
    double = np.asarray(W, dtype=np.float64)
    if edge is None:
        bulk = fit_random_part(compute_eigenvalues(W), level=level)
        edge = bulk.edge if bulk is not None else float("inf")
    values, vectors = np.linalg.eigh(gram(double))
    leading = vectors[:, values > edge]
    tall = double.shape[0] >= double.shape[1]
    signal = (double @ leading) @ leading.T if tall else leading @ (leading.T @ double)
    return Split(double - signal, signal, leading.shape[1], float(edge))


def noise_entries(source: Source, model: NoiseModel, entries: EntryTail) -> EntryTail:
    """Decide whether the entries' power-law tail is that of independent entries.

    A strong spike, rows or slices of unequal size or a strong diagonal put large entries where they are; without
    them, or brought to one size, the entries must still have the tail.
    """
    if not entries.heavy:
        return entries
    if model.shows(Violation.REGULAR):
        return EntryTail(False, float("nan"), entries.size)
    bulk = model.bulk
    few = 0 < bulk.spikes <= _FEW * (bulk.spikes + bulk.size)
    uneven = model.shows(Violation.ROW_SIZES, Violation.COLUMN_SIZES)
    if not few and not uneven and not model.shows(Violation.SLICE_SIZES):
        return entries
    sizes = EntrySizes()
    for matrix in scaled_slices(source, np.array(model.slice_variances or (1.0,)))():
        noise = split(matrix, edge=bulk.edge).noise if few else matrix
        sizes.add(_equalise_sizes(noise) if uneven else noise)
    tail = sizes.tail()
    return entries if tail.heavy else tail


def _equalise_sizes(matrix: NDArray[Any]) -> FloatArray:
    """The matrix with its rows, then its columns, divided by their norms; zero ones stay zero."""
    double = np.asarray(matrix, dtype=np.float64)
    for axis in (1, 0):
        norms = np.linalg.norm(double, axis=axis, keepdims=True)
        double = double / np.where(norms > 0, norms, 1.0)
    return double


class AdjacentCorrelation:
    """Sums of products of neighbouring rows and columns: a quick test for correlation, one matrix at a time."""

    def __init__(self) -> None:
        self._products: list[tuple[tuple[int, int], float, float]] = []

    def add(self, matrix: NDArray[Any]) -> None:
        """Add one matrix of finite weights."""
        if min(matrix.shape) < 3:
            return
        if matrix.flags.f_contiguous and not matrix.flags.c_contiguous:
            shape, rows, columns = _adjacent_products(matrix.T)
            self._products.append((shape[::-1], columns, rows))
        else:
            self._products.append(_adjacent_products(matrix))

    def significant(self, eigenvalues: Eigenvalues) -> bool:
        """Whether neighbours on any side are correlated beyond what a random order gives."""
        for (shape, *products), values in zip(self._products, eigenvalues.parts, strict=False):
            total, spread = float(values.sum()), float(np.sum(values**2))
            for count, product in zip(shape, products, strict=True):
                error = np.sqrt(max(spread - total**2 / count, 0.0) / count)  # as if all were of one size
                if abs(product) > SIGNIFICANT * error > 0:
                    return True
        return False


def _adjacent_products(matrix: NDArray[Any]) -> tuple[tuple[int, int], float, float]:
    rows = columns = 0.0
    width = matrix.shape[1]
    step = max(_STRIP // width, 2)
    for start in range(0, matrix.shape[0], step):  # one row of overlap: the neighbour of the last
        part = matrix[start : start + step + 1]
        flat = np.ascontiguousarray(part, None if part.dtype in _PLAIN else np.float32).ravel()
        rows += float(np.dot(flat[width:], flat[:-width]))
        strip = flat[: step * width]
        # Along the flat rows every neighbour but the last of a row and the first of the next one.
        columns += float(
            np.dot(strip[1:], strip[:-1]) - np.dot(strip[width::width], strip[width - 1 : -1 : width])
        )
    return (matrix.shape[0], width), rows, columns


def is_sparse(matrices: Matrices) -> bool:
    """Whether most weights are zero, not counting rows and columns that are zero throughout.

    Examples:
        >>> W = np.eye(8) + np.eye(8, k=1)
        >>> is_sparse(W), is_sparse(np.ones((8, 8)))
        (True, False)
    """
    filled = places = 0
    for matrix in matrix_source(matrices)():
        nonzero = np.asarray(matrix) != 0
        filled += int(nonzero.sum())
        places += int(nonzero.any(axis=1).sum() * nonzero.any(axis=0).sum())
    return places > 0 and filled < (1 - _SPARSE) * places
