r"""The random part of a spectrum: a Marchenko-Pastur bulk fitted around spikes, tails and null directions.

:math:`\sigma` is not taken from the largest eigenvalue, which one spike ruins, nor from the total, which a
tail ruins, but by matching the middle of the spectrum: the mean of the eigenvalues between two ranks against
the mean of the law's quantiles at the same ranks. What lies beyond the Tracy-Widom edge is set aside as
spikes, the ranks are counted anew among the rest, and the match is repeated until nothing changes. For pure
noise the estimate is good to about ``1/M`` (eigenvalues repel, so their mean hardly fluctuates).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from strati.spectra import marchenko_pastur as law
from strati.spectra import tracy_widom
from strati.spectra.ranks import widest_gap

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.spectra.eigenvalues import Eigenvalues

_LOW, _HIGH = 0.10, 0.80  # ranks between which the law is matched
_ROUNDS = 30
_FEWEST = 10


@dataclass(frozen=True)
class Bulk:
    """A fitted Marchenko-Pastur bulk, on the eigenvalues' own (unnormalised) scale.

    Attributes:
        sigma: Standard deviation of the entries of the random part.
        lambda_minus: Lower edge of the law, ``N sigma^2 (1 - 1/sqrt(Q))^2``.
        lambda_plus: Upper edge, ``N sigma^2 (1 + 1/sqrt(Q))^2``.
        edge: What the largest eigenvalue of pure noise exceeds with probability ``level``.
        spikes: Number of eigenvalues above ``edge``.
        level: The Tracy-Widom level of ``edge``.
        ks_distance: Kolmogorov-Smirnov distance of the law from the eigenvalues that are no spikes.
        size: Number of those.
        capped: Half of the eigenvalues or more lie beyond the edge; ``spikes`` stops at half.
        matrices: Number of matrices whose eigenvalues are pooled.
    """

    sigma: float
    lambda_minus: float
    lambda_plus: float
    edge: float
    spikes: int
    level: float
    ks_distance: float
    size: int
    capped: bool = False
    matrices: int = 1

    @property
    def noise_limit(self) -> float:
        """The KS distance that the bulk of pure noise stays below in 999 of 1000 draws."""
        return noise_limit(self.size, self.matrices)


def fit_bulk(
    eigenvalues: FloatArray, rows: int, columns: int, *, matrices: int = 1, level: float = 0.01
) -> Bulk | None:
    """Fit the Marchenko-Pastur law to ascending eigenvalues of ``W.T @ W``.

    Args:
        eigenvalues: Ascending; null directions (zero to working precision, or below a gap of many decades)
            left out.
        rows: The longer side of the matrix.
        columns: The shorter side of the matrix, or how many of its directions are not null.
        matrices: How many matrices were pooled.
        level: Chance that the largest eigenvalue of pure noise passes for a spike.

    Returns:
        The fit, or ``None`` for fewer than ten eigenvalues.

    Examples:
        >>> W = np.random.default_rng(0).normal(scale=0.1, size=(400, 100))
        >>> W[:, 0] += 3.0
        >>> bulk = fit_bulk(np.linalg.svd(W, compute_uv=False)[::-1] ** 2, 400, 100)
        >>> round(bulk.sigma, 3), bulk.spikes
        (0.1, 1)
    """
    total = eigenvalues.size
    if total < _FEWEST or eigenvalues[-1] <= 0:
        return None
    capped = False
    noise_edge = tracy_widom.upper_edge(rows, columns, level=level, matrices=matrices)
    spikes, seen = total // 4, set()
    variance = _match(eigenvalues[: total - spikes], total, rows, columns)
    for _ in range(_ROUNDS):
        spikes = int(total - np.searchsorted(eigenvalues, noise_edge * variance, side="right"))
        capped = spikes > total // 2
        spikes = min(spikes, total // 2)
        if spikes in seen:
            break
        seen.add(spikes)
        kept = total - spikes
        share = spikes / matrices  # spikes take a direction on both sides of each matrix
        variance = _match(eigenvalues[:kept], kept, rows - share, columns - share)
    if variance <= 0:  # the middle of the spectrum is null
        return None
    sigma = float(np.sqrt(variance))
    q = rows / columns
    low, high = law.edges(q, sigma)
    kept = total - spikes
    share = spikes / matrices
    return Bulk(
        sigma=sigma,
        lambda_minus=rows * low,
        lambda_plus=rows * high,
        edge=noise_edge * variance,
        spikes=spikes,
        level=level,
        ks_distance=_ks(eigenvalues[:kept], rows - share, columns - share, sigma),
        size=kept,
        capped=capped,
        matrices=matrices,
    )


def without_nulls(eigenvalues: Eigenvalues, bulk: Bulk, nulls: int) -> Bulk:
    """The bulk fitted anew without ``nulls`` quasi-null directions, which are no part of the noise.

    The edges of the law stay those of the whole shape.
    """
    rest = fit_bulk(
        eigenvalues.values[nulls:],
        eigenvalues.rows,
        eigenvalues.columns - round(nulls / eigenvalues.matrices),
        matrices=eigenvalues.matrices,
        level=bulk.level,
    )
    if rest is None:
        return bulk
    low, high = law.edges(eigenvalues.aspect, rest.sigma)
    return replace(rest, lambda_minus=eigenvalues.rows * low, lambda_plus=eigenvalues.rows * high)


def fit_random_part(eigenvalues: Eigenvalues, *, level: float = 0.01) -> Bulk | None:
    """Fit the bulk of a matrix or of pooled slices, leaving out what lies below the gap of a collapsed rank."""
    gap = widest_gap(eigenvalues)
    if not gap.collapsed:
        return fit_bulk(
            eigenvalues.values,
            eigenvalues.rows,
            eigenvalues.columns,
            matrices=eigenvalues.matrices,
            level=level,
        )
    columns = max(round(gap.above / eigenvalues.matrices), 1)
    rows = max(eigenvalues.rows - eigenvalues.empty[0], columns)  # zero rows add nothing to the noise
    return fit_bulk(
        eigenvalues.values[gap.below :],
        rows,
        columns,
        matrices=eigenvalues.matrices,
        level=level,
    )


def noise_limit(size: int, matrices: int = 1) -> float:
    """The KS distance that the bulk of pure noise stays below in 999 of 1000 draws.

    Eigenvalues repel each other, so the distance falls almost as ``1/size`` (calibrated on Gaussian and
    uniform noise of 20 to 1000 columns, aspects from 1 to 20); pooled matrices are independent.

    Examples:
        >>> round(noise_limit(500), 4)
        0.0089
    """
    columns = max(size / matrices, 1.0)
    return float((2.45 + 0.32 * np.log(columns)) * np.sqrt(matrices) / size)


def _match(values: FloatArray, total: int, rows: float, columns: float) -> float:
    """The variance that makes the middle of the law agree with the middle of ``total`` ranked values.

    Of a real Gaussian matrix the expected number of eigenvalues below ``x`` is ``M F(x) + 1/4 - A(x)/2`` up to
    higher orders, ``A`` being the arcsine law on the support; without that the variance comes out low by about
    ``1/(2M)``, which matters at the Tracy-Widom edge of small matrices.
    """
    q = max(rows / columns, 1.0)
    low, high = int(_LOW * total), min(max(int(_HIGH * total), int(_LOW * total) + 1), values.size)
    places = (np.arange(low, high) + 0.5) / total
    places += (law.angle(places, q) / (2 * np.pi) - 0.25) / columns
    return float(values[low:high].sum() / (rows * law.ppf(places, q).sum()))


def _ks(values: FloatArray, rows: float, columns: float, sigma: float) -> float:
    expected = law.cdf(values / rows, max(rows / columns, 1.0), sigma)
    places = np.arange(values.size + 1) / values.size
    return float(max(np.abs(expected - places[:-1]).max(), np.abs(expected - places[1:]).max()))
