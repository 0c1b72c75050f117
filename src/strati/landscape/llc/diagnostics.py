"""Whether chains have mixed: rank-normalised split R-hat, effective sample size, error of a mean.

Definitions of Vehtari, Gelman, Simpson, Carpenter and Buerkner, Bayesian Analysis 16 (2021), 667-718,
as in arviz, against which they are tested. Traces have (chain, draw) axes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtri
from scipy.stats import rankdata

if TYPE_CHECKING:
    from strati.core.results import FloatArray


def rhat(trace: FloatArray) -> float | None:
    """Rank-normalised split R-hat: the larger of the bulk's and the folded (scale) one; 1 when mixed.

    ``None`` for fewer than four draws or a trace that is not finite; a trace that never moves gives
    infinity (chains stuck in different places) or 1 (all in one place).

    Examples:
        >>> moving = np.random.default_rng(0).normal(size=(4, 500))
        >>> rhat(moving) < 1.01 < rhat(moving + np.arange(4)[:, None])
        True
    """
    if trace.shape[1] < 4 or not np.isfinite(trace).all():
        return None
    split = _split(trace)
    return max(
        _plain_rhat(_normal_scores(split)), _plain_rhat(_normal_scores(np.abs(split - np.median(split))))
    )


def ess(trace: FloatArray, *, rank: bool = True) -> float | None:
    """Effective sample size: of the ranks (bulk), or of the values themselves for the error of a mean.

    ``None`` for fewer than four draws or a trace that is not finite.

    Examples:
        >>> 1000 < ess(np.random.default_rng(0).normal(size=(4, 500))) < 3000
        True
    """
    if trace.shape[1] < 4 or not np.isfinite(trace).all():
        return None
    split = _split(trace)
    return _plain_ess(_normal_scores(split) if rank else split)


def standard_error(trace: FloatArray) -> float | None:
    """Monte Carlo standard error of the mean: ``sd / sqrt(ess)``, never below what the chains' means say.

    Examples:
        >>> abs(standard_error(np.random.default_rng(0).normal(size=(4, 2500))) - 0.01) < 0.003
        True
    """
    size = ess(trace, rank=False)
    if size is None:
        return None
    within = float(trace.std(ddof=1)) / math.sqrt(size)
    chains = trace.shape[0]
    # Few chains estimate the spread of their means badly: only many chains may overrule the autocorrelation.
    between = float(trace.mean(axis=1).std(ddof=1)) / math.sqrt(chains) if chains >= 8 else 0.0
    return max(within, between)


def _split(trace: FloatArray) -> FloatArray:
    half = trace.shape[1] // 2
    return np.concatenate([trace[:, :half], trace[:, -half:]])


def _normal_scores(trace: FloatArray) -> FloatArray:
    ranks = rankdata(trace, method="average").reshape(trace.shape)
    scores: FloatArray = ndtri((ranks - 0.375) / (trace.size + 0.25))
    return scores


def _plain_rhat(trace: FloatArray) -> float:
    draws = trace.shape[1]
    between = draws * float(trace.mean(axis=1).var(ddof=1))
    within = float(trace.var(axis=1, ddof=1).mean())
    if within <= 0:
        return 1.0 if between <= 0 else math.inf
    return math.sqrt((between / within + draws - 1) / draws)


def _plain_ess(trace: FloatArray) -> float:
    chains, draws = trace.shape
    if np.ptp(trace) < np.finfo(float).resolution * np.abs(trace).max(initial=0.0):
        return float(trace.size)
    covariance = _autocovariance(trace)
    mean_variance = covariance[:, 0].mean() * draws / (draws - 1)
    pooled = mean_variance * (draws - 1) / draws
    if chains > 1:
        pooled += trace.mean(axis=1).var(ddof=1)
    if pooled <= 0:
        return float(trace.size)
    correlation = 1 - (mean_variance - covariance.mean(axis=0)) / pooled
    correlation[0] = 1.0
    # Geyer: sums of neighbouring pairs, as long as they are positive, made monotone. As in arviz, the
    # odd term after the last positive pair improves anti-correlated chains.
    last = 1
    pairs = [correlation[0] + correlation[1]]
    while last + 2 < draws - 1:
        pair = correlation[last + 1] + correlation[last + 2]
        if pair <= 0:
            break
        pairs.append(min(pair, pairs[-1]))
        last += 2
    tail = max(float(correlation[last + 1]), 0.0) if last + 1 < draws else 0.0
    tau = -1 + 2 * float(np.sum(pairs)) + tail
    tau = max(tau, 1 / math.log10(trace.size))
    return trace.size / tau


def _autocovariance(trace: FloatArray) -> FloatArray:
    """Biased autocovariance of every chain at every lag, by fast Fourier transform."""
    draws = trace.shape[1]
    length = 1 << (2 * draws - 1).bit_length()
    centred = trace - trace.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, n=length, axis=1)
    full = np.fft.irfft(np.abs(spectrum) ** 2, n=length, axis=1)[:, :draws]
    result: FloatArray = full / draws
    return result
