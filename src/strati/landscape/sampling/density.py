"""The density of states: volumes ``V(eps)`` out of samples of several temperatures, and ``lambda(eps)``.

Samples of all temperatures are reweighted into one (multistate Bennett acceptance ratio, Shirts and Chodera
2008); the share of weight below ``eps`` is the volume, ``lambda(eps) = d ln V / d ln eps`` its slope (eq. 8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import logsumexp

if TYPE_CHECKING:
    from strati.landscape.sampling.traces import Traces
    from strati.types import FloatArray

_SAMPLES = 300_000
_STEP = 2.0  # lambda(eps) is the slope of ln V between eps/step and eps*step
_GROUPS = 8


@dataclass(frozen=True)
class DensityOfStates:
    """Weighted samples of parameter space.

    Attributes:
        log_loss: ``ln(L - L*)`` of every sample, ascending.
        log_weight: Logarithm of the volume each stands for, up to a constant.
        group: Which group of chains it came from, for errors.
        localised: Whether volumes are still weighed by the localisation: so where free directions run far, and the
            plain volume is not defined.
    """

    log_loss: FloatArray
    log_weight: FloatArray
    group: FloatArray
    localised: bool

    def log_volume(self, epsilon: float) -> float:
        """``ln V(eps)`` up to a constant."""
        end = np.searchsorted(self.log_loss, math.log(epsilon))
        return float(logsumexp(self.log_weight[:end])) if end else -math.inf

    def coefficient(self, epsilon: float) -> tuple[float, float] | None:
        """``lambda(eps)`` and its standard error; ``None`` where there are too few samples.

        Examples:
            >>> import torch
            >>> from strati.landscape.sampling.llc import LLCConfig, sample
            >>> traces = sample(lambda w: (w**2).sum(), torch.zeros(2), LLCConfig(chains=16, draws=200, coldest=1e4))
            >>> abs(density_of_states(traces).coefficient(1e-2)[0] - 1) < 0.05
            True
        """
        value = self._slope(epsilon, None)
        if value is None:
            return None
        left_out = [self._slope(epsilon, g) for g in range(_GROUPS)]
        known = np.array([v for v in left_out if v is not None])
        if len(known) < _GROUPS:
            return None
        error = math.sqrt((_GROUPS - 1) / _GROUPS * float(((known - known.mean()) ** 2).sum()))
        return value, error

    def _slope(self, epsilon: float, without: int | None) -> float | None:
        low, high = np.searchsorted(self.log_loss, [math.log(epsilon / _STEP), math.log(epsilon * _STEP)])
        weight = (
            self.log_weight if without is None else np.where(self.group == without, -np.inf, self.log_weight)
        )
        if low < 50 or high - low < 50 or high >= len(weight):
            return None
        return float((logsumexp(weight[:high]) - logsumexp(weight[:low])) / (2 * math.log(_STEP)))


def density_of_states(traces: Traces) -> DensityOfStates:
    """Reweight the traces of a ladder of temperatures into one set of samples of parameter space."""
    step = max(1, traces.excess.size // _SAMPLES)
    excess, spread = traces.excess[:, :, ::step], traces.spread[:, :, ::step]
    temperatures, chains, draws = excess.shape
    count = chains * draws
    free = _free_energies(traces.nbeta, excess.reshape(temperatures, -1))
    losses = excess.reshape(-1)
    log_mixture = logsumexp(free[:, None] - traces.nbeta[:, None] * losses[None, :], axis=0) + math.log(count)
    log_weight = -log_mixture
    group = np.broadcast_to(np.arange(chains) * _GROUPS // chains, (temperatures, chains))
    pull = 0.5 * traces.gamma * spread.reshape(-1)
    localised = not _few_dominate(log_weight, pull)
    if not localised:
        log_weight = log_weight + pull
    positive = losses > 0
    log_loss = np.log(np.where(positive, losses, 1.0))[positive]
    order = np.argsort(log_loss, kind="stable")
    groups = np.repeat(group[:, :, None], draws, axis=2).reshape(-1)[positive]
    return DensityOfStates(
        log_loss[order], log_weight[positive][order], groups[order].astype(float), localised
    )


def _free_energies(nbeta: FloatArray, excess: FloatArray) -> FloatArray:
    """``-ln Z`` per temperature: thermodynamic integration first, then the self-consistent equations."""
    means = excess.mean(axis=1) * nbeta
    steps = 0.5 * (means[1:] + means[:-1]) * np.diff(np.log(nbeta))
    free = np.concatenate([[0.0], np.cumsum(steps)])
    thin = excess[:, :: max(1, excess.size // 30_000)]
    losses = thin.reshape(-1)
    reduced = -nbeta[:, None] * losses[None, :]
    for _ in range(100):
        log_mixture = logsumexp(free[:, None] + reduced, axis=0)
        new = -logsumexp(reduced - log_mixture, axis=1)
        new -= new[0]
        change = float(np.abs(new - free).max())
        free = new
        if change < 1e-6:
            break
    return free


def _few_dominate(log_weight: FloatArray, pull: FloatArray) -> bool:
    """Whether undoing the localisation keeps enough effective samples at every scale of weight."""
    # A localisation that was hardly felt has pulls well below one; free directions have pulls of their number / 2.
    share = np.exp(log_weight - log_weight.max())
    return bool((share * pull).sum() / share.sum() < 1.0) and float(np.quantile(pull, 0.9)) < 3.0
