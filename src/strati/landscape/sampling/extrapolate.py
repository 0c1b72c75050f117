"""From values on a ladder of temperatures to the learning coefficient at zero temperature.

``Z(nbeta) ~ nbeta^-lambda P(ln nbeta)`` with a polynomial ``P`` of degree ``m - 1``, so with ``t = ln nbeta``
``lambda(t) = lambda - P'(t)/P(t) + (powers of 1/nbeta)``. Each form and each number of left-out hot temperatures is
fitted, and the fits are averaged with weights ``exp(-(chi^2 + 2 k + 2 cut)/2)`` (Jay and Neil 2021): the error
holds what is not known about the form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from strati.types import FloatArray

_OFFSETS = np.geomspace(
    1.0, 20.0, 40
)  # of the logarithm, beyond the temperature where the loss begins to be felt
_RATES = (0.125, 0.25, 0.5, 1.0)  # powers of 1/nbeta next after the leading one
_FLOOR = 2e-3  # no form is trusted to better than this share of the value


class Limit(NamedTuple):
    """The value at zero temperature, its error, and how likely each multiplicity is."""

    value: float
    stderr: float
    multiplicity: int


class _LadderFit(NamedTuple):
    value: float
    variance: float
    score: float
    multiplicity: int


def extrapolate(
    nbeta: FloatArray, values: FloatArray, errors: FloatArray, *, hottest: float | None = None
) -> Limit | None:
    """The limit of ``lambda(nbeta)`` for large ``nbeta``; ``None`` for fewer than three temperatures.

    Args:
        nbeta: Temperatures, ascending.
        values: ``lambda(nbeta)``.
        errors: Their standard errors.
        hottest: The temperature at which the loss begins to be felt over the localisation; valleys then have a
            length of at least ``ln(nbeta/hottest)``, which bounds the logarithmic forms. 1/100 of the first by default.

    Examples:
        >>> t = np.linspace(5, 25, 15)
        >>> limit = extrapolate(np.exp(t), 0.5 - 1 / (t + 2), np.full(15, 0.003), hottest=1.0)
        >>> abs(limit.value - 0.5) < 0.01, limit.multiplicity
        (True, 2)
    """
    if len(nbeta) < 3:
        return None
    t = np.log(nbeta)
    origin = np.log(hottest) if hottest is not None else t[0] - np.log(100.0)
    sigma = np.maximum(errors, _FLOOR * np.maximum(np.abs(values), 0.05))
    fits: list[_LadderFit] = []
    for cut in range(len(t) - 2):
        part = slice(cut, None)
        fits += [
            f._replace(score=f.score + 2 * cut)
            for f in _fits(t[part], values[part], sigma[part], float(origin))
        ]
    scores = np.array([f.score for f in fits])
    weight = np.exp(-(scores - scores.min()) / 2)
    weight /= weight.sum()
    centre = np.array([f.value for f in fits])
    mean = float(weight @ centre)
    variance = float(weight @ np.array([f.variance for f in fits]) + weight @ (centre - mean) ** 2)
    shares: dict[int, float] = {}
    for fit, w in zip(fits, weight, strict=True):
        shares[fit.multiplicity] = shares.get(fit.multiplicity, 0.0) + float(w)
    return Limit(mean, float(np.sqrt(variance)), max(shares, key=lambda m: shares[m]))


def _fits(t: FloatArray, y: FloatArray, sigma: FloatArray, origin: float) -> Iterator[_LadderFit]:
    """Every form that the number of points allows: a power or none, on top of each multiplicity."""
    ones = np.ones_like(t)
    designs = [np.stack([ones], 1)]
    if len(t) >= 4:
        designs += [np.stack([ones, np.exp(-rate * (t - t[0]))], 1) for rate in _RATES]
    for design in designs:
        yield _solve(design, y[None, :], sigma, 1, np.zeros(1))
        if len(t) >= 2 + design.shape[1]:
            offsets = _OFFSETS - origin
            for multiplicity in (2, 3, 4):
                shape = (multiplicity - 1) / (t[None, :] + offsets[:, None])
                yield _solve(design, y[None, :] + shape, sigma, multiplicity, offsets)


def _solve(
    design: FloatArray, y: FloatArray, sigma: FloatArray, multiplicity: int, offsets: FloatArray
) -> _LadderFit:
    """Least squares for each offset of the logarithm at once, averaged over offsets by their likelihood."""
    scaled, target = design / sigma[:, None], y / sigma
    covariance = np.linalg.pinv(scaled.T @ scaled)
    solution = target @ scaled @ covariance
    chi2 = ((target - solution @ scaled.T) ** 2).sum(1)
    weight = np.exp(-(chi2 - chi2.min()) / 2)
    weight /= weight.sum()
    value = float(weight @ solution[:, 0])
    variance = float(covariance[0, 0] + weight @ (solution[:, 0] - value) ** 2)
    # A power's rate and a logarithm's offset are parameters too.
    count = 2 * design.shape[1] - 1 + (len(offsets) > 1)
    return _LadderFit(value, variance, float(chi2.min()) + 2 * count, multiplicity)
