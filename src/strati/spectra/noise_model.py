r"""The random part of a layer: its Marchenko-Pastur bulk, and where noise ends when its assumptions fail.

The Marchenko-Pastur law and its edge are those of independent entries of one variance. Slices of unequal size, rows
of unequal size (dead or pruned neurons), correlated neighbours, sparse or heavy entries push noise beyond that edge
without any signal. :func:`noise_model` works in four steps:

1. The slices of a convolution are brought to one variance (:func:`slice_variances`); everything below is measured on
   them, and edges are those of a slice of mean variance.
2. The law is fitted to the middle of the spectrum (:mod:`strati.spectra.bulk`), without quasi-null directions.
3. Where the fit leaves doubt, the matrices are examined, with their candidate spikes taken out: sizes of rows and
   columns against Gaussian noise (whose squared norms vary by ``2/M``) and against the same entries in random order;
   correlation of rows and columns some places apart (:mod:`strati.spectra.autocorrelation`); large entries placed more
   evenly than chance would (a diagonal); the share of exact zeros.
4. Where any of it is beyond chance, the edge is that of noise with these sizes and correlations
   (:mod:`strati.spectra.separable_noise`), and spikes and quasi-null directions are counted anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.spectra import ranks
from strati.spectra.autocorrelation import BEYOND
from strati.spectra.bulk import Bulk, fit_bulk, fit_random_part, without_nulls
from strati.spectra.eigenvalues import Eigenvalues, pooled
from strati.spectra.entries import EntrySizes, EntryTail
from strati.spectra.noise_statistics import NoiseStatistics, evened, shrunk
from strati.spectra.quasi_null import quasi_null
from strati.spectra.violations import Departure, Violation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray

    Source = Callable[[], Iterator[NDArray[Any]]]

_FAR = 0.05  # share of spikes up to which they can be taken out and the rest be called noise
_MANY_NULLS = 0.1  # share of quasi-null directions from which the bulk is no longer fitted around them


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
        return tuple(item for item in self.violations if item.violation != Violation.SLICE_SIZES)

    def shows(self, *violations: Violation) -> bool:
        """Whether any of these assumptions fails."""
        return any(item.violation in violations for item in self.violations)


def noise_model(
    source: Source,
    eigenvalues: Eigenvalues,
    *,
    variances: FloatArray | None = None,
    level: float = 0.01,
    heavy: bool = False,
    correlated: bool = False,
) -> NoiseModel | None:
    """Model the random part of a matrix, or of the slices of a convolution.

    Args:
        source: Yields the matrices, each time it is called.
        eigenvalues: Their eigenvalues.
        variances: Their :func:`slice_variances`, if they are computed already.
        level: Chance that the largest eigenvalue of pure noise passes for a spike.
        heavy: The entries have a power-law tail: a direction that is one large entry is no signal, so only what
            stands out of sizes with all of them in is taken out.
        correlated: Neighbouring rows or columns are correlated (:class:`Neighbours`).

    Returns:
        The model, or ``None`` for fewer than ten eigenvalues.

    Examples:
        >>> from strati.spectra.eigenvalues import eigenvalues
        >>> rng = np.random.default_rng(0)
        >>> W = rng.normal(size=(300, 150)) * rng.lognormal(0, 0.5, 300)[:, None]
        >>> model = noise_model(lambda: iter([W]), eigenvalues(W))
        >>> model.bulk.spikes, [str(item.violation) for item in model.violations]
        (0, ['row-sizes'])
    """
    if variances is None:
        variances = slice_variances(eigenvalues, level=level)
    filled = [k for k, part in enumerate(eigenvalues.parts) if part.size and part[-1] > 0]
    model = _model_of_slices(
        lambda: (matrix for k, matrix in enumerate(source()) if k in filled),
        some_slices(eigenvalues, filled),
        variances[filled],
        level=level,
        heavy=heavy,
        correlated=correlated,
    )
    if model is None or eigenvalues.matrices == 1:
        return model
    zeros = (eigenvalues.matrices - len(filled)) * eigenvalues.columns
    nulls = max(model.quasi_null, _collapsed_directions(eigenvalues, filled))
    return replace(model, quasi_null=nulls + zeros, slice_variances=tuple(variances.tolist()))


def _model_of_slices(
    source: Source,
    eigenvalues: Eigenvalues,
    variances: FloatArray,
    *,
    level: float,
    heavy: bool,
    correlated: bool,
) -> NoiseModel | None:
    equal = equal_slices(eigenvalues, variances)
    gap = ranks.widest_gap(equal)
    plain = fit_random_part(equal, level=level)
    if plain is None:
        return None
    first_nulls = _quasi_null(equal, plain.sigma)
    refit = 0 < first_nulls < _MANY_NULLS * equal.values.size and not gap.collapsed
    bulk = without_nulls(equal, plain, first_nulls) if refit else plain
    model = NoiseModel(
        bulk,
        first_nulls,
        _slice_departure(equal, variances),
        largest=float(equal.values[-1]),
    )
    doubt = bulk.spikes or first_nulls or correlated
    doubt = doubt or bulk.ks_distance > bulk.noise_limit
    if not doubt or gap.collapsed:
        return model
    scaled = scaled_slices(source, variances)
    structured = _with_structure(scaled, equal, model, heavy=heavy)
    return model if structured is None else structured


def slice_variances(eigenvalues: Eigenvalues, *, level: float = 0.01) -> FloatArray:
    """The variance of the random part of each slice, over their mean.

    Of slices with ten eigenvalues or more, each has a bulk of its own; of smaller ones the mean square of the entries
    is taken, less what chance adds to the differences. A slice that is no more than rounding keeps its size.

    Examples:
        >>> from strati.spectra.eigenvalues import eigenvalues
        >>> rng = np.random.default_rng(0)
        >>> found = eigenvalues([rng.normal(size=(200, 100)), 3 * rng.normal(size=(200, 100))])
        >>> slice_variances(found).round(1).tolist()
        [0.2, 1.8]
    """
    count, entries = eigenvalues.matrices, eigenvalues.rows * eigenvalues.columns
    if count == 1 or not all(part.size for part in eigenvalues.parts):
        return np.ones(count)
    squares = np.array([float(part.sum()) for part in eigenvalues.parts]) / entries
    own_level = 1 - (1 - level) ** (1 / count)
    bulks = [_bulk_variance(part, eigenvalues, own_level) for part in eigenvalues.parts]
    small = any(variance is None for variance in bulks)
    variances = shrunk(squares, 2 / entries) if small else np.array(bulks, dtype=np.float64)
    largest = np.array([float(part[-1]) for part in eigenvalues.parts])
    usable = (variances > 0) & (largest > eigenvalues.resolutions**2)
    if not usable.any():
        return np.ones(count)
    relative: FloatArray = np.where(usable, variances, 1.0) / float(variances[usable].mean())
    return np.where(usable, relative, 1.0)


def _bulk_variance(part: FloatArray, eigenvalues: Eigenvalues, level: float) -> float | None:
    """The variance of the random part of one slice; ``None`` if it has too few eigenvalues.

    Where the law fits, the sum of the eigenvalues that are no spikes: unlike the middle of the spectrum it is as large
    as the edge of this very draw is.
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
    values = pooled(parts, eigenvalues.problem)
    extents = tuple(np.array(eigenvalues.extents) / np.sqrt(variances))
    return replace(eigenvalues, values=values, parts=parts, extents=extents)


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
    gaps = (ranks.widest_gap(some_slices(eigenvalues, [k])) for k in places)
    return sum(gap.below for gap in gaps if gap.collapsed)


def scaled_slices(source: Source, variances: FloatArray) -> Source:
    """The slices themselves, divided by their standard deviations."""
    if np.all(variances == 1):
        return source
    scales = np.sqrt(variances)
    return lambda: (
        np.asarray(matrix, dtype=np.float64) / scale for matrix, scale in zip(source(), scales, strict=True)
    )


def _slice_departure(equal: Eigenvalues, variances: FloatArray) -> tuple[Departure, ...]:
    """Whether the slices differ in variance by more than chance, five standard errors."""
    chance = math.sqrt(2 / (equal.rows * equal.columns)) if equal.values.size else math.inf
    if np.abs(np.log(variances)).max() <= BEYOND * chance:
        return ()
    return (Departure(Violation.SLICE_SIZES, float(variances.max() / variances.min())),)


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
    slices = [NoiseStatistics(matrix, part) for matrix, part in zip(source(), parts, strict=True)]
    if not any(sizes.noticed for sizes in slices):
        return None
    most = [max(int(_FAR * part.size), 1) for part in parts]
    candidates = [int(part.size - np.searchsorted(part, bulk.edge, side="right")) for part in parts]
    for sizes, count, limit in zip(slices, candidates, most, strict=True):
        sizes.remove(count if count <= limit and not heavy else 0)
    if not any(sizes.noticed for sizes in slices):
        return None
    for _ in range(6):
        edge = max(sizes.edge(eigenvalues, level) for sizes in slices)
        beyond = [int(part.size - np.searchsorted(part, edge, side="right")) for part in parts]
        if any(count > limit for count, limit in zip(beyond, most, strict=True)):
            return None
        if beyond == [sizes.removed for sizes in slices]:
            break
        for sizes, count in zip(slices, beyond, strict=True):
            sizes.remove(count)
    edge = _put_back(slices, eigenvalues, level, edge)
    if not any(sizes.noticed for sizes in slices):
        return None
    departures = tuple(dict.fromkeys(item for sizes in slices for item in sizes.departures()))
    regular = any(item.violation == Violation.REGULAR for item in departures)
    if not regular and not all(sizes.explained for sizes in slices):
        return None
    plain_edge = max(sizes.plain(eigenvalues, level) for sizes in slices)
    if not departures and edge <= 1.0005 * plain_edge:
        return None
    spikes = sum(sizes.removed for sizes in slices)
    variance = float(np.mean([sizes.variance for sizes in slices]))
    scale = variance / bulk.sigma**2
    # However uneven the rows: what is zero to rounding is no part of any noise.
    narrow = math.sqrt(variance * min(sizes.narrowing() for sizes in slices))
    nulls = max(_quasi_null(eigenvalues, narrow), min(model.quasi_null, ranks.unresolved(eigenvalues)))
    widened = replace(
        bulk,
        sigma=float(np.sqrt(variance)),
        lambda_minus=bulk.lambda_minus * scale,
        lambda_plus=bulk.lambda_plus * scale,
        edge=edge,
        spikes=spikes,
        size=eigenvalues.values.size - spikes,
    )
    return replace(
        model,
        bulk=widened,
        quasi_null=nulls,
        violations=departures + model.violations,
        widening=edge / plain_edge,
        examined=True,
    )


def _put_back(slices: list[NoiseStatistics], eigenvalues: Eigenvalues, level: float, edge: float) -> float:
    """Put directions back that noise with themselves in it explains, the weakest first; the edge after that.

    The largest directions of correlated noise are the correlated ones. Without them the rest looks less correlated
    than the noise is, its edge comes out low, and they would stay outside for good.
    """
    while any(sizes.removed for sizes in slices):
        weakest = min((s for s in slices if s.removed), key=lambda s: s.largest_kept(s.removed - 1))
        weakest.remove(weakest.removed - 1)
        wider = max(sizes.edge(eigenvalues, level) for sizes in slices)
        if weakest.largest_kept(weakest.removed) > wider:
            weakest.remove(weakest.removed + 1)
            return edge
        edge = wider
    return edge


def noise_entries(source: Source, model: NoiseModel, entries: EntryTail) -> EntryTail:
    """Whether the entries' power-law tail is that of independent entries.

    A strong spike, rows or slices of unequal size or a strong diagonal put large entries where they are; without
    them, or brought to one size, the entries must still have the tail.
    """
    if model.shows(Violation.REGULAR):
        return EntryTail(False, float("nan"), entries.size)
    bulk = model.bulk
    few = 0 < bulk.spikes <= _FAR * (bulk.spikes + bulk.size)
    uneven = model.shows(Violation.ROW_SIZES, Violation.COLUMN_SIZES)
    if not few and not uneven and not model.shows(Violation.SLICE_SIZES):
        return entries
    from strati.spectra.signal_noise import split

    variances = np.array(model.slice_variances or (1.0,))
    rest = EntrySizes()
    for matrix in scaled_slices(source, variances)():
        part = split(matrix, edge=bulk.edge).noise if few else matrix
        rest.add(evened(part) if uneven else part)
    tail = rest.tail()
    return entries if tail.heavy else tail
