r"""Learning coefficients of a training run, at settings that all of its checkpoints share.

The settings are chosen once, with the step that the stiffest checkpoint needs, and every checkpoint is sampled with the
same random numbers. The noise of two checkpoints is then almost the same, so that the error of their difference, from
the differences of blocks of draws, is smaller than that of either value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from strati.core.errors import BadInputError
from strati.landscape.llc.config import LLCConfig

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.landscape.llc.traces import Traces
    from strati.landscape.objective import Objective

BLOCKS = 20
"""Means of consecutive draws that are kept of every chain."""

CHAINS, DRAWS = 4, 400
"""Of every estimate, by default."""

_FEWEST, _MOST = 100, 4000  # draws that a number of seconds may come to
_TURNS = 10.0  # times that flat directions relax during the draws of a chain
_TRIAL = 200  # draws that show whether a step lets chains diverge
_SHORTER, _TRIALS = 4.0, 6  # a step that lets chains diverge is divided by this, so many times
_MOST_OF_HALF = 1.05  # of half the parameters: a wall can lift a value a little above
_CHOSEN = 0  # seed of all chance in the choice of settings


@dataclass(frozen=True)
class Level:
    """A learning coefficient of one checkpoint.

    Attributes:
        value: The coefficient; ``None`` where ``reason`` says why there is none.
        error: Its standard error.
        blocks: Means of blocks of draws, chain by chain.
        reason: Why there is no value.
        off_minimum: Whether the chains met lower losses than the checkpoint's.
    """

    value: float | None = None
    error: float | None = None
    blocks: tuple[tuple[float, ...], ...] = ()
    reason: str | None = None
    off_minimum: bool = False


def shared_config(
    objectives: Iterable[tuple[str, Objective]], config: LLCConfig | None = None
) -> tuple[LLCConfig, str]:
    """Choose the settings that all checkpoints share, and name the checkpoint that needs the smallest step.

    Args:
        objectives: Checkpoints by name, one in memory at a time.
        config: What is fixed. By default ``nbeta`` is ``n / ln n``, ``gamma`` that of ``strati.llc`` at the last
            checkpoint, ``chains`` 4 and ``draws`` 400, more (up to 4,000) where flat directions take longer, or what
            ``seconds`` (of the cost model) allow. The settings do not depend on ``seed``, so that other seeds
            estimate the same coefficient.

    Raises:
        BadInputError: No step is small enough.
    """
    from strati.landscape.llc.posterior import default_gamma
    from strati.landscape.llc.sampling_plan import default_batch, default_nbeta

    config = config or LLCConfig()
    smallest: tuple[float, float, str, Objective] | None = None
    nbeta, last = config.nbeta, None
    for name, objective in objectives:
        nbeta = nbeta or default_nbeta(objective)
        last = objective.flat.theta
        step, rate = _stable_step(objective, nbeta, config)
        if smallest is None or step < smallest[0]:
            smallest = (step, rate, name, objective)
    if smallest is None or last is None or nbeta is None:
        raise BadInputError(
            "checkpoints", "none can be rebuilt as a network; give model=, or follow spectra alone"
        )
    step, rate, name, objective = smallest
    base = replace(
        config,
        sampler="sgld",
        nbeta=float(nbeta),
        gamma=config.gamma or default_gamma(last),
        chains=config.chains or CHAINS,
        batch=min(config.batch or default_batch(objective, nbeta), objective.rows),
        seconds=None,
    )
    for _ in range(_TRIALS):
        draws = config.draws or _draws(objective, base, config.seconds, step * rate)
        shared = replace(base, step=step, draws=draws)
        traces = _sample(objective, replace(shared, seed=_CHOSEN, draws=min(draws, _TRIAL)))
        if np.isfinite(traces.excess).all() and _bounded(traces, shared):
            return shared, name
        step /= _SHORTER
    raise BadInputError(name, "the chains diverge at every step size tried; a larger gamma would help")


def estimate(objective: Objective, config: LLCConfig) -> Level:
    """Estimate the coefficient of one checkpoint at the shared settings; no value where its chains do not mix."""
    from strati.landscape.llc.traces import standard_error

    traces = _sample(objective, config)
    trace = traces.lambda_trace()
    reason = _refusal(traces, trace, config)
    if reason is not None:
        return Level(reason=reason)
    value, error, half = float(trace.mean()), standard_error(trace), traces.parameters / 2
    if error is None or error > half or value - 3 * error > _MOST_OF_HALF * half:
        reason = (
            f"the average {value:.4g} cannot be that of {traces.parameters} parameters (half of them at most): the "
            "chains left for places of higher loss; a larger gamma would help"
        )
        return Level(reason=reason)
    parts = np.array_split(trace, min(BLOCKS, trace.shape[1]), axis=1)
    blocks = np.stack([part.mean(1) for part in parts], axis=1)
    lower = traces.centre is not None and (config.nbeta or 0.0) * -traces.centre > 0.02 * max(abs(value), 1.0)
    # Chains that went apart have no common centre; at a minimum no value is below 0.
    lower = lower or value < -3 * error
    return Level(value, error, tuple(tuple(float(f"{v:.7g}") for v in row) for row in blocks), None, lower)


def difference_error(
    first: Sequence[Sequence[float]] | None, second: Sequence[Sequence[float]] | None
) -> float | None:
    """Standard error of the difference of two coefficients drawn with the same random numbers, from their blocks.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> noise = rng.normal(size=(4, 20))
        >>> difference_error(noise, 1 + noise + 0.01 * rng.normal(size=(4, 20))) < 0.01
        True
    """
    from strati.landscape.llc.traces import standard_error

    if first is None or second is None:
        return None
    a, b = np.asarray(first, float), np.asarray(second, float)
    if a.shape != b.shape or a.ndim != 2 or a.size == 0:
        return None
    return standard_error(b - a)


def _refusal(traces: Traces, trace: FloatArray, config: LLCConfig) -> str | None:
    """Why the draws do not represent the posterior, or ``None``."""
    from strati.landscape.llc.estimate import drifting
    from strati.landscape.llc.traces import rhat

    if not np.isfinite(trace).all():
        return "the chains diverged at the step that all checkpoints share; a larger gamma would help"
    if not _bounded(traces, config):
        return (
            "the chains left the neighbourhood: the step that all checkpoints share is too long here; a larger gamma "
            "would help"
        )
    agreement, limit = rhat(trace), config.max_rhat
    if agreement is None or agreement > limit:
        shown = "undefined" if agreement is None else f"{agreement:.3g}"
        return f"the chains have not mixed (R-hat {shown} above {limit:g}); more draws or a larger gamma would help"
    if drifting(traces, traces.main):
        return "the chains are still on their way from where they started; more draws or a larger gamma would help"
    return None


def _draws(objective: Objective, config: LLCConfig, seconds: float | None, rate: float) -> int:
    """As many draws as the seconds allow, or as the flat directions need to relax at ``rate`` per draw."""
    if seconds is None:
        return int(np.clip(2 * _TURNS / rate, DRAWS, _MOST))
    import torch

    from strati.landscape.llc.loss_structure import gradient_cost
    from strati.landscape.llc.tuning import TOGETHER

    chains = config.chains or CHAINS
    cost = gradient_cost(objective.batch(torch.arange(config.batch or 1)), objective.flat.theta, turning=0)
    each = cost.call / (chains if objective.flat.size <= TOGETHER else 1) + cost.replica
    return int(np.clip(seconds / (each * chains * 1.5), _FEWEST, _MOST))


def _sample(objective: Objective, config: LLCConfig) -> Traces:
    from strati.landscape.llc.sampling_plan import sampling_plan
    from strati.landscape.llc.sgld import sample_sgld

    plan = sampling_plan(objective, objective.flat.theta, config).plan
    return sample_sgld(objective, replace(plan, precondition=True))


def _stable_step(objective: Objective, nbeta: float, config: LLCConfig) -> tuple[float, float]:
    """A stable step of one checkpoint, and the rate per unit of the step at which its flat directions relax."""
    import torch

    from strati.core.rng import derive
    from strati.landscape.llc.sampling_plan import sampling_plan
    from strati.landscape.llc.sgld import SGLDKernel, batches_of
    from strati.landscape.llc.tuning import SHARE_OF_STABLE, SHARE_OF_TRACK

    trial = LLCConfig(
        sampler="sgld", nbeta=nbeta, gamma=config.gamma or 1.0, seed=_CHOSEN, batch=config.batch
    )
    plan = sampling_plan(objective, objective.flat.theta, trial).plan
    kernel = SGLDKernel(objective, plan)
    generator = torch.Generator().manual_seed(derive(_CHOSEN, "track curvature"))
    zero = torch.zeros_like(objective.flat.theta)
    stable = kernel.stable(zero, batches_of(objective, plan)[0], generator)
    return SHARE_OF_TRACK / SHARE_OF_STABLE * stable, kernel.slowest


def _bounded(traces: Traces, config: LLCConfig) -> bool:
    """Whether the chains stay as near as the localisation alone would hold them, by a margin."""
    far = float(traces.spread[traces.main][:, -1].max())
    return far * (config.gamma or 0.0) <= 4.0 * traces.parameters + 40.0
