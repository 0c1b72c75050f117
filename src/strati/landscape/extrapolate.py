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

_RATES = (0.125, 0.25, 0.5, 1.0)  # powers of 1/nbeta next after the leading one
_FLOOR = 2e-3  # no form is trusted to better than this share of the value


class Limit(NamedTuple):
    """The value at zero temperature, its error, and how likely each multiplicity is."""

    value: float
    stderr: float
    multiplicity: int


class _Fit(NamedTuple):
    value: float
    variance: float
    score: float
    multiplicity: int


def extrapolate(nbeta: FloatArray, values: FloatArray, errors: FloatArray) -> Limit | None:
    """The limit of ``lambda(nbeta)`` for large ``nbeta``; ``None`` for fewer than three temperatures.

    Args:
        nbeta: Temperatures, ascending.
        values: ``lambda(nbeta)``.
        errors: Their standard errors.

    Example:
        >>> t = np.linspace(5, 25, 15)
        >>> limit = extrapolate(np.exp(t), 0.5 - 1 / (t + 2), np.full(15, 0.003))
        >>> abs(limit.value - 0.5) < 0.01, limit.multiplicity
        (True, 2)
    """
    if len(nbeta) < 3:
        return None
    t = np.log(nbeta)
    sigma = np.maximum(errors, _FLOOR * np.maximum(np.abs(values), 0.05))
    fits: list[_Fit] = []
    for cut in range(len(t) - 2):
        part = slice(cut, None)
        fits += [f._replace(score=f.score + 2 * cut) for f in _fits(t[part], values[part], sigma[part])]
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


def _fits(t: FloatArray, y: FloatArray, sigma: FloatArray) -> Iterator[_Fit]:
    """Every form that the number of points allows."""
    ones = np.ones_like(t)
    yield _linear(np.stack([ones], 1), y, sigma, multiplicity=1, extra=0)
    if len(t) >= 4:
        for rate in _RATES:
            decay = np.exp(-rate * (t - t[0]))
            yield _linear(np.stack([ones, decay], 1), y, sigma, multiplicity=1, extra=1)
    for multiplicity in (2, 3, 4):
        if len(t) >= 4:
            yield _logarithmic(t, y, sigma, multiplicity)


def _linear(design: FloatArray, y: FloatArray, sigma: FloatArray, *, multiplicity: int, extra: int) -> _Fit:
    scaled, target = design / sigma[:, None], y / sigma
    covariance = np.linalg.pinv(scaled.T @ scaled)
    solution = covariance @ scaled.T @ target
    chi2 = float(((target - scaled @ solution) ** 2).sum())
    return _Fit(
        float(solution[0]), float(covariance[0, 0]), chi2 + 2 * (design.shape[1] + extra), multiplicity
    )


def _logarithmic(t: FloatArray, y: FloatArray, sigma: FloatArray, multiplicity: int) -> _Fit:
    """``lambda - (m - 1)/(t + c)``: the offset ``c`` by search over a grid, the value in closed form.

    The likelihood over the grid gives the error; it holds the whole range of offsets, not a curvature.
    """
    offsets = -t[0] + np.concatenate([np.geomspace(0.5, 60.0, 160)])
    shape = (multiplicity - 1) / (t[None, :] + offsets[:, None])
    precision = 1 / sigma**2
    best = ((y + shape) * precision).sum(1) / precision.sum()
    chi2 = (((y + shape - best[:, None]) ** 2) * precision).sum(1)
    weight = np.exp(-(chi2 - chi2.min()) / 2)
    weight /= weight.sum()
    value = float(weight @ best)
    variance = float(1 / precision.sum() + weight @ (best - value) ** 2)
    return _Fit(value, variance, float(chi2.min()) + 4, multiplicity)
