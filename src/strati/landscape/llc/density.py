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
    from strati.core.results import FloatArray
    from strati.landscape.llc.traces import Traces

_SAMPLES = 150_000
_ROUNDS = 50
_SOLVED = 30_000  # samples that the equations of the free energies are solved with
_STEP = 2.0  # lambda(eps) is the slope of ln V between eps/step and eps*step
_GROUPS = 8


@dataclass(frozen=True)
class DensityOfStates:
    """Weighted samples of parameter space.

    Attributes:
        log_loss: ``ln(L - L*)`` of every sample, ascending.
        log_weight: Logarithm of the volume each stands for, up to a constant.
        left_out: The same without one group of chains each, ``(groups, samples)``, for errors: the free energies that
            make the weights are found anew without the group, whose samples weigh nothing.
        localised: Whether volumes are still weighed by the localisation: so where free directions run far, and the
            plain volume is not defined.
    """

    log_loss: FloatArray
    log_weight: FloatArray
    left_out: FloatArray
    localised: bool

    def log_volume(self, epsilon: float) -> float:
        """``ln V(eps)`` up to a constant."""
        end = np.searchsorted(self.log_loss, math.log(epsilon))
        return float(logsumexp(self.log_weight[:end])) if end else -math.inf

    def coefficient(self, epsilon: float) -> tuple[float, float] | None:
        """``lambda(eps)`` and its standard error; ``None`` where there are too few samples.

        Examples:
            >>> import torch
            >>> from strati.landscape.llc.llc import LLCConfig, sample
            >>> traces = sample(lambda w: (w**2).sum(), torch.zeros(2), LLCConfig(chains=16, draws=200, coldest=1e4))
            >>> abs(density_of_states(traces).coefficient(1e-2)[0] - 1) < 0.05
            True
        """
        low, high = np.searchsorted(self.log_loss, [math.log(epsilon / _STEP), math.log(epsilon * _STEP)])
        if low < 50 or high - low < 50 or high >= len(self.log_loss):
            return None

        def slope(weight: FloatArray) -> float:
            return float((logsumexp(weight[:high]) - logsumexp(weight[:low])) / (2 * math.log(_STEP)))

        slopes = np.array([slope(w) for w in self.left_out])
        if not np.isfinite(slopes).all():
            return None
        groups = len(slopes)
        error = math.sqrt((groups - 1) / groups * float(((slopes - slopes.mean()) ** 2).sum()))
        return slope(self.log_weight), error


def density_of_states(traces: Traces) -> DensityOfStates:
    """Reweight the traces of a ladder of temperatures into one set of samples of parameter space."""
    step = max(1, traces.excess.size // _SAMPLES)
    excess, spread = traces.excess[:, :, ::step], traces.spread[:, :, ::step]
    chains = excess.shape[1]
    losses = excess.reshape(-1)
    free = _free_energies(traces.nbeta, excess)
    log_weight = _log_weight(traces.nbeta, free, losses)
    pull = 0.5 * traces.gamma * spread.reshape(-1)
    localised = not _few_dominate(log_weight, pull)
    groups = min(_GROUPS, chains)
    member = np.arange(chains) * groups // chains
    left_out = []
    for group in range(groups):
        others = excess[:, member != group]
        without = _log_weight(traces.nbeta, _free_energies(traces.nbeta, others, free), losses)
        gone = np.broadcast_to((member == group)[None, :, None], excess.shape).reshape(-1)
        left_out.append(np.where(gone, -np.inf, without))
    weights = np.stack([log_weight, *left_out]) + (0.0 if localised else pull)
    positive = losses > 0
    log_loss = np.log(np.where(positive, losses, 1.0))[positive]
    order = np.argsort(log_loss, kind="stable")
    sorted_weights = weights[:, positive][:, order]
    return DensityOfStates(log_loss[order], sorted_weights[0], sorted_weights[1:], localised)


def _log_weight(nbeta: FloatArray, free: FloatArray, losses: FloatArray) -> FloatArray:
    """``-ln sum_k exp(f_k - nbeta_k L)``: the volume that a sample of the mixture of temperatures stands for."""
    return -_log_mixture(free, -nbeta[:, None] * losses[None, :])


def _log_mixture(free: FloatArray, reduced: FloatArray) -> FloatArray:
    terms = free[:, None] + reduced
    top = terms.max(axis=0)
    mixture: FloatArray = top + np.log(np.exp(terms - top).sum(axis=0))
    return mixture


def _free_energies(nbeta: FloatArray, excess: FloatArray, start: FloatArray | None = None) -> FloatArray:
    """``-ln Z`` per temperature out of ``(K, chain, draw)``: thermodynamic integration, then the exact equations."""
    if start is None:
        means = excess.mean(axis=(1, 2)) * nbeta
        steps = 0.5 * (means[1:] + means[:-1]) * np.diff(np.log(nbeta))
        free = np.concatenate([[0.0], np.cumsum(steps)])
    else:
        free = start
    thin = max(1, excess.size // _SOLVED)
    losses = excess[:, :, ::thin].reshape(-1)
    reduced = -nbeta[:, None] * losses[None, :]
    each = len(losses) / len(nbeta)
    for _ in range(_ROUNDS):
        share = np.exp(free[:, None] + reduced - _log_mixture(free, reduced))
        held = share.sum(axis=1)
        # Newton on a convex function; far from its minimum the fixed point is the safer step.
        hessian = np.diag(held) - share @ share.T
        step = np.linalg.lstsq(hessian[1:, 1:], each - held[1:], rcond=1e-12)[0]
        step = np.concatenate([[0.0], step])
        if np.abs(step).max() > 1.0:
            step = np.log(each / np.maximum(held, 1e-300))
            step -= step[0]
        free = free + step
        if np.abs(step).max() < 1e-6:
            break
    return free


def _few_dominate(log_weight: FloatArray, pull: FloatArray) -> bool:
    """Whether undoing the localisation keeps enough effective samples at every scale of weight."""
    # A localisation that was hardly felt has pulls well below one; free directions have pulls of their number / 2.
    share = np.exp(log_weight - log_weight.max())
    return bool((share * pull).sum() / share.sum() < 1.0) and float(np.quantile(pull, 0.9)) < 3.0
