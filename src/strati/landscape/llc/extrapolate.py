"""From values on a ladder of temperatures to the learning coefficient at zero temperature.

``Z(nbeta)`` is a sum of ``nbeta^-lambda_k P_k(ln nbeta)``, so with ``t = ln nbeta`` the value at a temperature is
``lambda(t) = lambda - d/dt ln P(t) - d/dt ln(1 +- exp(-rate (t - u)))``: the limit, the logarithms of a multiplicity
``m`` (``P`` is of degree ``m - 1``: a sum of ``1/(t + c_i)``), and the next exponent, fading at the rate of its
distance. All of these are tried, over grids of ``c_i``, ``rate`` and ``u``, with any number of hot temperatures left
out (at a price); the limit is the average over those that fit; its error is their spread and their noise, and never
less than a share of the way from the coldest value. Where nothing fits, or the temperatures span too little, there is
no limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.stats import chi2 as chi_squared

if TYPE_CHECKING:
    from strati.core.results import FloatArray

_RATES = np.array([1 / 16, 1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 1.0])
_ONSETS = np.linspace(-6.0, 0.0, 31)  # logarithm of the next exponent's weight at the first temperature
_QUICK = 0.3  # fading that is quicker than any logarithm
_OFFSETS = np.geomspace(
    0.5, 20.0, 20
)  # of the logarithm, beyond the temperature where the loss begins to be felt
_MULTIPLICITIES = (1, 2, 3, 4)
_FLOOR = 2e-3  # no value is trusted to better than this share
_CORRELATED = (
    1.5  # neighbouring temperatures share their chains: their noise does not average out as if alone
)
_FITS = 0.01  # least probability of the best form's misfit
_SPAN = 6.0  # least number of e-foldings that the fitted temperatures cover
_FEWEST = 4
_BRIDGED = 0.15  # of the way from the coldest value to the limit: better than that no law is known
_PER_CUT = 0.3  # logarithm of weight that each temperature left out costs
_BLOWN = 3.0  # times the largest error before: from there on the chains no longer agree where they are
_WIDEN = 1.25  # calibrated by tools/calibrate_llc_limit.py on the cases that were not held out
_END, _STEEP = (
    3.0,
    0.02,
)  # over the last e-foldings, values that change by more than this share in each do not settle
_FARTHEST = 0.2  # of the limit: farther from the coldest value no extrapolation is believed


class Limit(NamedTuple):
    """The value at zero temperature, its error, and the likeliest multiplicity."""

    value: float
    stderr: float
    multiplicity: int


class NoLimit(NamedTuple):
    """Why the ladder allows no limit."""

    reason: str


def extrapolate(
    nbeta: FloatArray, values: FloatArray, errors: FloatArray, *, hottest: float | None = None
) -> Limit | NoLimit:
    """The limit of ``lambda(nbeta)`` for large ``nbeta``, or why there is none.

    Args:
        nbeta: Temperatures, ascending.
        values: ``lambda(nbeta)``.
        errors: Their standard errors.
        hottest: The temperature at which the loss begins to be felt over the localisation; 1/100 of the first by
            default.

    Examples:
        >>> t = np.linspace(5, 25, 15)
        >>> limit = extrapolate(np.exp(t), 0.5 - 1 / (t + 2), np.full(15, 0.001), hottest=1.0)
        >>> abs(limit.value - 0.5) < 2 * limit.stderr < 0.04
        True
    """
    usable = _trusted(values, errors)
    t, y, stderr = np.log(nbeta)[usable], values[usable], errors[usable]
    if len(t) < _FEWEST or t[-1] - t[0] < _SPAN:
        return NoLimit("too few temperatures mixed to show how the values approach a limit")
    origin = float(np.log(hottest)) if hottest is not None else float(t[0]) - np.log(100.0)
    sigma = _CORRELATED * np.maximum(stderr, _FLOOR * np.maximum(np.abs(y), 0.05))
    if _steepness(t, y, sigma) > _STEEP:
        return NoLimit("the values over the ladder still change: the regime of the limit is not reached")
    fits = []
    for cut in range(len(t) - _FEWEST + 1):
        if t[-1] - t[cut] < _SPAN:
            break
        part = _fits(t[cut:], y[cut:], sigma[cut:], origin)
        likely = chi_squared.sf(part.misfit, max(1, len(t) - cut - 2)) > _FITS
        fits.append(part.only(likely, cut))
    if not any(len(f.value) for f in fits):
        return NoLimit(
            "the values over the ladder follow no known law: the regime of the limit is not reached"
        )
    limit = _average(fits)
    bridged = abs(limit.value - float(y[-1]))
    limit = limit._replace(stderr=max(limit.stderr, _BRIDGED * bridged))
    if bridged > _FARTHEST * max(limit.value, float(y[-1])) + 2 * float(sigma[-1]):
        return NoLimit("the values over the ladder do not settle: the limit is far from the coldest of them")
    return limit


class _LadderFits(NamedTuple):
    """One entry per form: its limit, variance, logarithm of weight, misfit and multiplicity."""

    value: FloatArray
    variance: FloatArray
    log_weight: FloatArray
    misfit: FloatArray
    multiplicity: FloatArray

    def only(self, chosen: np.ndarray, cut: int) -> _LadderFits:
        """Some of the forms, at the price of the temperatures left out (Jay and Neil 2021)."""
        part = _LadderFits(*(column[chosen] for column in self))
        return part._replace(log_weight=part.log_weight - _PER_CUT * cut)


def _steepness(t: FloatArray, y: FloatArray, sigma: FloatArray) -> float:
    """Relative change per e-folding at the cold end, beyond two standard errors."""
    end = t >= min(t[-1] - _END, t[-3])
    x, weight = t[end] - t[end].mean(), 1 / sigma[end] ** 2
    x = x - (weight @ x) / weight.sum()
    slope = float((weight * x) @ y[end] / (weight @ x**2))
    error = float(1 / np.sqrt(weight @ x**2))
    return (abs(slope) - 2 * error) / max(abs(float(y[-1])), 1e-12)


def _trusted(values: FloatArray, errors: FloatArray) -> np.ndarray:
    """Finite values, up to the first temperature at which the error jumps."""
    good = np.isfinite(values) & np.isfinite(errors)
    size = np.maximum(errors, _FLOOR * np.abs(values))
    for k in range(2, len(values)):
        before = size[:k][good[:k]]
        if len(before) >= 2 and (not good[k] or size[k] > _BLOWN * before.max()):
            good[k:] = False
            break
    return good


def _fits(t: FloatArray, y: FloatArray, sigma: FloatArray, origin: float) -> _LadderFits:
    """Every form, each with the limit that suits it best.

    Slow fading and a logarithm look alike, so only a quick one is added to a logarithm.
    """
    groups: list[_LadderFits] = []
    for multiplicity in _MULTIPLICITIES:
        offsets = _OFFSETS if multiplicity > 1 else np.ones(1)
        logs = -(multiplicity - 1) / (t[None, :] - origin + offsets[:, None])
        plain = 1 + (multiplicity > 1)
        groups.append(_group(logs, y, sigma, multiplicity, plain))
        if multiplicity > 2:
            groups.append(_group(_unequal(t - origin, multiplicity), y, sigma, multiplicity, plain + 1))
        if len(t) > _FEWEST:
            for rate in _RATES if multiplicity == 1 else _RATES[_RATES > _QUICK]:
                for fading in _fading(t, rate):
                    shape = (logs[:, None, :] + fading[None, :, :]).reshape(-1, len(t))
                    groups.append(_group(shape, y, sigma, multiplicity, plain + 2))
    return _LadderFits(*(np.concatenate(parts) for parts in zip(*groups, strict=True)))


def _unequal(t: FloatArray, multiplicity: int) -> FloatArray:
    """Logarithms whose offsets are of two kinds, for every pair of offsets and every way to share them out."""
    first, second = (
        _OFFSETS[np.triu_indices(len(_OFFSETS), 1)[0]],
        _OFFSETS[np.triu_indices(len(_OFFSETS), 1)[1]],
    )
    shapes = [
        -many / (t[None, :] + first[:, None]) - (multiplicity - 1 - many) / (t[None, :] + second[:, None])
        for many in range(1, multiplicity - 1)
    ]
    return np.concatenate(shapes)


def _group(
    shape: FloatArray, y: FloatArray, sigma: FloatArray, multiplicity: int, parameters: int
) -> _LadderFits:
    """Forms that differ in grid parameters alone: together they weigh what the best of them does."""
    weight = 1 / sigma**2
    residual = y[None, :] - shape
    value = residual @ weight / weight.sum()
    misfit = ((residual - value[:, None]) ** 2) @ weight
    if not len(value):
        return _LadderFits(*(np.zeros(0) for _ in range(5)))
    share = -(misfit - misfit.min()) / 2
    log_weight = share - np.log(np.exp(share).sum()) - misfit.min() / 2 - parameters
    variance = np.full(len(value), 1 / weight.sum())
    return _LadderFits(value, variance, log_weight, misfit, np.full(len(value), multiplicity))


def _fading(t: FloatArray, rate: float) -> tuple[FloatArray, FloatArray]:
    """``-d/dt ln(1 +- exp(-rate (t - u)))`` for every onset ``u``: from above, and from below."""
    z = rate * (t[None, :] - t[0]) - _ONSETS[:, None]
    above = rate / (1 + np.exp(np.clip(z, -500, 500)))
    before = z[:, 0] > 0.1  # of the other sign the sum must stay positive
    return above, -rate / np.expm1(np.clip(z[before], None, 500))


def _average(fits: list[_LadderFits]) -> Limit:
    every = _LadderFits(*(np.concatenate(parts) for parts in zip(*fits, strict=True)))
    weight = np.exp(every.log_weight - every.log_weight.max()) * (
        every.value >= 0
    )  # no coefficient is negative
    weight /= weight.sum()
    mean = float(weight @ every.value)
    variance = float(weight @ (every.variance + (every.value - mean) ** 2))
    shares = {m: float(weight[every.multiplicity == m].sum()) for m in _MULTIPLICITIES}
    return Limit(mean, _WIDEN * float(np.sqrt(variance)), max(shares, key=lambda m: shares[m]))
