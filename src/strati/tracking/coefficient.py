r"""Learning coefficients of many checkpoints that can be compared: one sampler, one step, the same random numbers.

Every checkpoint is sampled by stochastic-gradient Langevin dynamics with the same data, batches, temperature,
localisation, step, chain length and noise (:mod:`strati.landscape.llc.sgld`). The localisation is the default of
``strati.llc`` at the last checkpoint. Moves are preconditioned by each checkpoint's own curvature; the step, in those
coordinates, is the smallest that any checkpoint needs. Since the noise is shared, the fluctuations of neighbouring
checkpoints are alike and cancel in their difference: :func:`difference_error` states the error of a difference, which
is smaller than those of the two levels would make it.

The value is ``nbeta (<L> - L(checkpoint))`` in the middle of training too, where the checkpoint is no minimum and the
value may be negative; :func:`measured` says where that is so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from strati.core.errors import BadInputError

if TYPE_CHECKING:
    from torch import nn

    from strati.landscape.llc.traces import Traces
    from strati.landscape.objective import Objective

BLOCKS = 20
"""Means of consecutive draws that are kept of every chain."""

CHAINS, DRAWS = 4, 400
"""Of every estimate, where nothing is said."""

_FEWEST, _MOST = 100, 4000  # draws that a number of seconds may come to
_TURNS = 4.0  # times that flat directions relax during the draws of a chain
_TRIAL = 200  # draws that show whether a step lets chains diverge
_SHORTER, _TRIALS = 4.0, 6  # a step that lets chains diverge is divided by this, so many times
_MOST_OF_HALF = 1.05  # of half the parameters: a wall can lift a value a little above
_CHOSEN = 0  # seed of all chance in the choice of settings
_STEADY = 1.1  # R-hat above which no value is given


@dataclass(frozen=True)
class Shared:
    """What is the same for every checkpoint.

    Attributes:
        loss: Name of the loss.
        nbeta: Inverse temperature.
        gamma: Localisation.
        step: Step of the sampler.
        chains: Chains of every estimate.
        draws: Draws kept of every chain; half as many are left out before.
        batch: Rows of a minibatch.
        seed: Random seed of noise and batches.
    """

    loss: str
    nbeta: float
    gamma: float
    step: float
    chains: int
    draws: int
    batch: int
    seed: int


class Level(NamedTuple):
    """A coefficient: its value, error, the means of blocks of draws (chain by chain), and what a reader must know."""

    value: float | None
    error: float | None
    blocks: tuple[tuple[float, ...], ...]
    reason: str | None
    off_minimum: bool


def calibrated(
    objectives: Iterable[tuple[str, Objective]],
    *,
    loss: str,
    nbeta: float | None = None,
    gamma: float | None = None,
    chains: int | None = None,
    draws: int | None = None,
    batch: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
) -> tuple[Shared, str]:
    """The settings that all checkpoints share, and the name of the one that needs the smallest step.

    Args:
        objectives: Checkpoints by name, one in memory at a time.
        loss: Name of the loss.
        nbeta: Inverse temperature; ``n / ln n`` by default.
        gamma: Localisation; by default that of ``strati.llc`` at the last checkpoint.
        chains: 4 by default.
        draws: 400 by default, more (up to 4,000) where flat directions take longer, or what ``seconds`` allow.
        batch: Rows of a minibatch; 256 by default, fewer of long sequences.
        seconds: Spend roughly this many seconds (of the cost model) on an estimate.
        seed: Random seed of the estimates. The settings do not depend on it, so that other seeds estimate the same.

    Raises:
        BadInputError: No step is small enough.
    """
    import torch

    from strati.landscape.llc.minibatches import default_batch
    from strati.landscape.llc.posterior import default_gamma
    from strati.landscape.llc.sampling_plan import gradient_cost

    smallest: tuple[float, str, Objective] | None = None
    slowest, last = 0.0, None
    hot = nbeta
    for name, objective in objectives:
        hot = hot or (objective.count / math.log(objective.count) if objective.count > 2 else objective.count)
        last = objective.flat.theta
        step, rate = _stable_step(objective, hot, gamma or 1.0, batch)
        if smallest is None or step < smallest[0]:
            smallest, slowest = (step, name, objective), rate
    if smallest is None or last is None or hot is None:
        raise BadInputError(
            "checkpoints", "none can be rebuilt as a network; give model=, or follow spectra alone"
        )
    gamma = gamma or default_gamma(last)
    step, name, objective = smallest
    batch = min(batch or default_batch(objective, hot), objective.rows)
    chains = chains or CHAINS
    for _ in range(_TRIALS):
        count = draws
        if count is None and seconds is not None:
            cost = gradient_cost(objective.batch(torch.arange(batch)), objective.flat.theta, turning=0)
            each = cost.call / (chains if objective.flat.size <= _together() else 1) + cost.replica
            count = int(np.clip(seconds / (each * chains * 1.5), _FEWEST, _MOST))
        elif count is None:
            count = int(np.clip(2 * _TURNS / (step * slowest), DRAWS, _MOST))
        shared = Shared(loss, float(hot), gamma, step, chains, count, batch, seed)
        traces = _sampled(objective, replace(shared, seed=_CHOSEN, draws=min(count, _TRIAL)))
        if np.isfinite(traces.excess).all() and _bounded(traces, shared):
            return shared, name
        step /= _SHORTER
    raise BadInputError(name, "the chains diverge at every step size tried; a larger gamma would help")


def measured(objective: Objective, shared: Shared) -> Level:
    """The coefficient of one checkpoint at the shared settings; no value where its chains do not mix."""
    from strati.landscape.llc.diagnostics import rhat, standard_error
    from strati.landscape.llc.estimate import drifting

    traces = _sampled(objective, shared)
    trace = traces.lambda_trace()
    if not np.isfinite(trace).all():
        return _refused(
            "the chains diverged at the step that all checkpoints share; a larger gamma would help"
        )
    if not _bounded(traces, shared):
        return _refused(
            "the chains left the neighbourhood: the step that all checkpoints share is too long here; a larger gamma "
            "would help"
        )
    agreement = rhat(trace)
    if agreement is None or agreement > _STEADY:
        rhat_text = "undefined" if agreement is None else f"{agreement:.3g}"
        return _refused(
            f"the chains have not mixed (R-hat {rhat_text} above {_STEADY:g}); more draws or a larger gamma would help"
        )
    if drifting(traces, traces.main):
        return _refused(
            "the chains are still on their way from where they started; more draws or a larger gamma would help"
        )
    value, error = float(trace.mean()), standard_error(trace)
    half = traces.parameters / 2
    if error is None or error > half or value - 3 * error > _MOST_OF_HALF * half:
        return _refused(
            f"the average {value:.4g} cannot be that of {traces.parameters} parameters (half of them at most): the "
            "chains left for places of higher loss; a larger gamma would help"
        )
    parts = np.array_split(trace, min(BLOCKS, trace.shape[1]), axis=1)
    blocks = np.stack([part.mean(1) for part in parts], axis=1)
    lower = traces.centre is not None and shared.nbeta * -traces.centre > 0.02 * max(abs(value), 1.0)
    lower = (
        lower or value < -3 * error
    )  # chains that went apart have no common centre; at a minimum none is below 0
    return Level(
        value,
        error,
        tuple(tuple(float(f"{v:.7g}") for v in row) for row in blocks),
        None,
        lower,
    )


def difference_error(
    one: Sequence[Sequence[float]] | None, other: Sequence[Sequence[float]] | None
) -> float | None:
    """Standard error of the difference of two coefficients drawn with the same random numbers, from their blocks.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> noise = rng.normal(size=(4, 20))
        >>> difference_error(noise, 1 + noise + 0.01 * rng.normal(size=(4, 20))) < 0.01
        True
    """
    from strati.landscape.llc.diagnostics import standard_error

    if one is None or other is None:
        return None
    a, b = np.asarray(one, float), np.asarray(other, float)
    if a.shape != b.shape or a.ndim != 2 or a.size == 0:
        return None
    return standard_error(b - a)


def objective_of(model: nn.Module, loss: str, data: Any, layers: Sequence[str] | None = None) -> Objective:
    """The loss as a function of the weights, or of some of them, in the network's own precision."""
    from strati.landscape.objective import objective

    return objective(model, loss, data, layers=layers)


def _refused(reason: str) -> Level:
    return Level(None, None, (), reason, False)


def _sampled(objective: Objective, shared: Shared) -> Traces:
    from strati.landscape.llc.config import LLCConfig
    from strati.landscape.llc.sgld import sample_sgld

    config = LLCConfig(
        sampler="sgld",
        gamma=shared.gamma,
        step=shared.step,
        chains=shared.chains,
        draws=shared.draws,
        batch=shared.batch,
        seed=shared.seed,
    )
    return sample_sgld(objective, config, shared.nbeta, by_curvature=True)


def _stable_step(
    objective: Objective, nbeta: float, gamma: float, batch: int | None = None
) -> tuple[float, float]:
    """A stable step of one checkpoint, and the rate per unit of the step at which its flat directions relax."""
    import torch

    from strati.core.rng import derive
    from strati.landscape.llc.config import LLCConfig
    from strati.landscape.llc.minibatches import batches_of, default_batch
    from strati.landscape.llc.sgld import Steps

    config = LLCConfig(
        sampler="sgld", gamma=gamma, seed=_CHOSEN, batch=batch or default_batch(objective, nbeta)
    )
    steps = Steps(objective, config, nbeta, by_curvature=True)
    generator = torch.Generator().manual_seed(derive(_CHOSEN, "track curvature"))
    zero = torch.zeros_like(objective.flat.theta)
    return steps.stable(zero, batches_of(objective, config)[0], generator), steps.slowest


def _bounded(traces: Traces, shared: Shared) -> bool:
    """Whether the chains stay as near as the localisation alone would hold them, by a margin."""
    far = float(traces.spread[traces.main][:, -1].max())
    return far * shared.gamma <= 4.0 * traces.parameters + 40.0


def _together() -> int:
    from strati.landscape.llc.sgld import TOGETHER

    return TOGETHER
