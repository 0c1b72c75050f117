"""From values on a ladder of temperatures to the learning coefficient at zero temperature.

``Z(nbeta)`` is a sum of ``nbeta^-lambda_k P_k(ln nbeta)``, so with ``t = ln nbeta`` the value at a temperature is
``lambda(t) = lambda - d/dt ln P(t) - d/dt ln(1 +- exp(-rate (t - u)))``: the limit, the logarithms of a multiplicity
``m`` (``P`` is of degree ``m - 1``: a sum of ``1/(t + c_i)``), and the next exponent, fading at the rate of its
distance. All of these are tried, over grids of ``c_i``, ``rate`` and ``u``, with any number of hot temperatures left
out (at a price); the limit is the average over those that fit; its error is their spread and their noise, and never
less than a share of the way from the coldest value. Where nothing fits, or the temperatures span too little, there is
no limit.

Chains that come down a ladder and get caught on the way agree with one another for a long time. But the draws of one
temperature, reweighted, must give the mean of the next colder one: :func:`consistent_rungs` counts the temperatures
that do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.stats import chi2 as chi_squared

from strati.landscape.llc import tuning
from strati.landscape.llc.config import Sampler
from strati.landscape.llc.traces import rhat

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.landscape.llc.traces import Traces


_RATES = np.array([1 / 16, 1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 1.0])
_ONSETS = np.linspace(-6.0, 0.0, 31)  # logarithm of the next exponent's weight at the first temperature
_OFFSETS = np.geomspace(
    0.5, 20.0, 20
)  # of the logarithm, beyond the temperature where the loss begins to be felt


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
    if len(t) < tuning.FEWEST_RUNGS or t[-1] - t[0] < tuning.LEAST_SPAN:
        return NoLimit("too few temperatures mixed to show how the values approach a limit")
    origin = float(np.log(hottest)) if hottest is not None else float(t[0]) - np.log(100.0)
    sigma = tuning.CORRELATED_RUNGS * np.maximum(stderr, tuning.ERROR_FLOOR * np.maximum(np.abs(y), 0.05))
    if _steepness(t, y, sigma) > tuning.STEEPEST_END:
        return NoLimit("the values over the ladder still change: the regime of the limit is not reached")
    fits = []
    for cut in range(len(t) - tuning.FEWEST_RUNGS + 1):
        if t[-1] - t[cut] < tuning.LEAST_SPAN:
            break
        part = _fits(t[cut:], y[cut:], sigma[cut:], origin)
        likely = chi_squared.sf(part.misfit, max(1, len(t) - cut - 2)) > tuning.LEAST_FIT
        fits.append(part.only(likely, cut))
    if not any(len(f.value) for f in fits):
        return NoLimit(
            "the values over the ladder follow no known law: the regime of the limit is not reached"
        )
    limit = _average(fits)
    bridged = abs(limit.value - float(y[-1]))
    limit = limit._replace(stderr=max(limit.stderr, tuning.BRIDGED_SHARE * bridged))
    if bridged > tuning.FARTHEST_LIMIT * max(limit.value, float(y[-1])) + 2 * float(sigma[-1]):
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
        return part._replace(log_weight=part.log_weight - tuning.COST_PER_CUT * cut)


def _steepness(t: FloatArray, y: FloatArray, sigma: FloatArray) -> float:
    """Relative change per e-folding at the cold end, beyond two standard errors."""
    end = t >= min(t[-1] - tuning.COLD_END, t[-3])
    x, weight = t[end] - t[end].mean(), 1 / sigma[end] ** 2
    x = x - (weight @ x) / weight.sum()
    slope = float((weight * x) @ y[end] / (weight @ x**2))
    error = float(1 / np.sqrt(weight @ x**2))
    return (abs(slope) - 2 * error) / max(abs(float(y[-1])), 1e-12)


def _trusted(values: FloatArray, errors: FloatArray) -> np.ndarray:
    """Finite values, up to the first temperature at which the error jumps."""
    good = np.isfinite(values) & np.isfinite(errors)
    size = np.maximum(errors, tuning.ERROR_FLOOR * np.abs(values))
    for k in range(2, len(values)):
        before = size[:k][good[:k]]
        if len(before) >= 2 and (not good[k] or size[k] > tuning.BLOWN_ERROR * before.max()):
            good[k:] = False
            break
    return good


def _fits(t: FloatArray, y: FloatArray, sigma: FloatArray, origin: float) -> _LadderFits:
    """Every form, each with the limit that suits it best.

    Slow fading and a logarithm look alike, so only a quick one is added to a logarithm.
    """
    groups: list[_LadderFits] = []
    for multiplicity in tuning.MULTIPLICITIES:
        offsets = _OFFSETS if multiplicity > 1 else np.ones(1)
        logs = -(multiplicity - 1) / (t[None, :] - origin + offsets[:, None])
        plain = 1 + (multiplicity > 1)
        groups.append(_group(logs, y, sigma, multiplicity, plain))
        if multiplicity > 2:
            groups.append(_group(_unequal(t - origin, multiplicity), y, sigma, multiplicity, plain + 1))
        if len(t) > tuning.FEWEST_RUNGS:
            for rate in _RATES if multiplicity == 1 else _RATES[_RATES > tuning.QUICK_RATE]:
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
    shares = {m: float(weight[every.multiplicity == m].sum()) for m in tuning.MULTIPLICITIES}
    return Limit(mean, tuning.LIMIT_WIDENING * float(np.sqrt(variance)), max(shares, key=lambda m: shares[m]))


def consistent_rungs(traces: Traces) -> int:
    """How many temperatures, from the hottest on, have mixed and agree with those before; all where it cannot be told.

    Examples:
        >>> import torch
        >>> from strati.landscape.llc.config import LLCConfig
        >>> from strati.landscape.llc.llc import draw
        >>> point = torch.zeros(2, dtype=torch.float64)
        >>> traces = draw(lambda w: (w**2).sum(), point, LLCConfig(chains=8, draws=50, coldest=1e6, ladder=True))
        >>> consistent_rungs(traces) == len(traces.nbeta)
        True
    """
    count = len(traces.nbeta)
    if traces.sampler not in (Sampler.HMC, Sampler.TEMPERED) or count < 2 or traces.chains < 4:
        return count
    largest = tuning.SPREAD_RHAT if traces.global_start else tuning.STARTED_RHAT
    apart = np.array([(rhat(spread) or np.inf) > largest for spread in traces.spread])
    if traces.global_start:
        apart[1:] |= _disagree(traces)
    lost = apart[:-1] & apart[1:]  # one alone may be chance
    return max(1, int(lost.argmax())) if lost.any() else count - int(apart[-1])


def _disagree(traces: Traces) -> np.ndarray:
    """Whether each temperature but the first differs from what all hotter ones say, beyond chance."""
    every_chain = _differences(traces, None)
    parts = np.stack([_differences(traces, c) for c in range(traces.chains)])
    value = np.cumsum(every_chain)
    left_out = np.cumsum(parts, axis=1)
    chains = traces.chains
    error = np.sqrt((chains - 1) / chains * ((left_out - left_out.mean(0)) ** 2).sum(0))
    size = np.abs(traces.nbeta[1:] * traces.excess[1:].mean((1, 2)))
    disagree: np.ndarray = ~(
        np.abs(value) <= np.maximum(tuning.DISAGREEMENT_ERRORS * error, tuning.DISAGREEMENT_SHARE * size)
    )
    return disagree


def _differences(traces: Traces, without: int | None) -> np.ndarray:
    """``nbeta <L>`` of each temperature but the first, less what the next hotter one predicts."""
    keep = np.arange(traces.chains) != (-1 if without is None else without)
    excess = traces.excess[:, keep].reshape(len(traces.nbeta), -1)
    step = np.diff(traces.nbeta)[:, None]
    hot, cold = excess[:-1], excess[1:]
    weight = np.exp(-step * (hot - hot.min(axis=1, keepdims=True)))
    predicted = (weight * hot).sum(1) / weight.sum(1)
    differences: np.ndarray = traces.nbeta[1:] * (cold.mean(1) - predicted)
    return differences
