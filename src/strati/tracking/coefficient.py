r"""Learning coefficients of many checkpoints that can be compared: one sampler, one step, the same random numbers.

Every checkpoint is sampled by stochastic-gradient Langevin dynamics with the same data, batches, temperature,
localisation, step, chain length and noise (:mod:`strati.landscape.sampling.sgld`). The step is the one that the
stiffest checkpoint needs. Since the noise is shared, the fluctuations of neighbouring checkpoints are alike and
cancel in their difference: :func:`difference_error` states the error of a difference, which is smaller than those of
the two levels would make it.

The value is ``nbeta (<L> - L(checkpoint))`` in the middle of training too, where the checkpoint is no minimum and the
value may be negative; :func:`measured` says where that is so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from strati.errors import BadInputError

if TYPE_CHECKING:
    from torch import nn

    from strati.landscape.behaviour import Objective
    from strati.landscape.sampling.traces import Traces

BLOCKS = 20
"""Means of consecutive draws that are kept of every chain."""

CHAINS, DRAWS = 4, 400
"""Of every estimate, where nothing is said."""

_FEWEST, _MOST = 100, 4000  # draws that a number of seconds may come to
_TURNS = (
    10.0  # times that the localisation turns a chain around during its draws, so that flat directions mix
)
_SHORTER, _TRIALS = 4.0, 6  # a step that lets chains diverge is divided by this, so many times
_MOST_OF_HALF = 1.05  # of half the parameters: a wall can lift a value a little above
_CHOSEN = 0  # seed of all chance in the choice of settings
_STEADY = 1.1  # R-hat above which no value is given
_NARROW = 10.0  # times the usual localisation, above which a reader is told


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
        usual_gamma: ``N / |theta|^2`` at the smallest weights, with which a weight moves about its own size; ``None``
            where ``gamma`` was given.
    """

    loss: str
    nbeta: float
    gamma: float
    step: float
    chains: int
    draws: int
    batch: int
    seed: int
    usual_gamma: float | None = None


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
        gamma: Localisation; by default the larger of ``N / |theta|^2`` (at the smallest weights) and what turns a chain
            around twenty times in its length, so that flat directions mix.
        chains: 4 by default.
        draws: 400 by default, or what ``seconds`` allow.
        batch: Rows of a minibatch; 256 by default.
        seconds: Spend roughly this many seconds (of the cost model) on an estimate.
        seed: Random seed of the estimates. The settings do not depend on it, so that other seeds estimate the same.

    Raises:
        BadInputError: No step is small enough.
    """
    import torch

    from strati.landscape.sampling.budget import gradient_cost
    from strati.landscape.sampling.config import LLCConfig

    stiffest: tuple[float, str, Objective] | None = None
    rule = count = 0.0
    for name, objective in objectives:
        found = _curvature(objective, batch)
        count = objective.count
        theta = objective.flat.theta
        rule = max(rule, theta.numel() / max(float(theta.double().square().sum()), 1e-300))
        if stiffest is None or found > stiffest[0]:
            stiffest = (found, name, objective)
    if stiffest is None:
        raise BadInputError(
            "checkpoints", "none can be rebuilt as a network; give model=, or follow spectra alone"
        )
    curvature, name, objective = stiffest
    batch = min(batch or LLCConfig().batch, objective.rows)
    chains = chains or CHAINS
    if draws is None:
        draws = DRAWS
        if seconds is not None:
            cost = gradient_cost(objective.batch(torch.arange(batch)), objective.flat.theta, turning=0)
            each = cost.call / (chains if objective.flat.size <= _together() else 1) + cost.replica
            draws = int(np.clip(seconds / (each * chains * 1.5), _FEWEST, _MOST))
    hot = nbeta or (count / math.log(count) if count > 2 else float(count))
    step = 1.0 / (hot * curvature) if curvature > 0 else 1e-3 / max(rule, 1.0)
    usual = None if gamma else max(1.0, rule)
    for _ in range(_TRIALS):
        held = gamma or max(1.0, rule, 2 * _TURNS / (step * draws))
        shared = Shared(loss, hot, held, min(step, 1 / held), chains, draws, batch, seed, usual)
        traces = _sampled(objective, replace(shared, seed=_CHOSEN))
        if np.isfinite(traces.excess).all() and _bounded(traces, shared):
            return shared, name
        step /= _SHORTER
    raise BadInputError(name, "the chains diverge at every step size tried; a larger gamma would help")


def measured(objective: Objective, shared: Shared) -> Level:
    """The coefficient of one checkpoint at the shared settings; no value where its chains do not mix."""
    from strati.landscape.sampling.diagnostics import rhat, standard_error
    from strati.landscape.sampling.estimation import drifting

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
        shown = "undefined" if agreement is None else f"{agreement:.3g}"
        return _refused(
            f"the chains have not mixed (R-hat {shown} above {_STEADY:g}); more draws or a larger gamma would help"
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
    from strati.landscape.sampling.diagnostics import standard_error

    if one is None or other is None:
        return None
    a, b = np.asarray(one, float), np.asarray(other, float)
    if a.shape != b.shape or a.ndim != 2 or a.size == 0:
        return None
    return standard_error(b - a)


def narrow(settings: Mapping[str, Any]) -> str | None:
    """What to say where chains had to be held much closer than usual in order to mix."""
    usual, held = settings.get("usual_gamma"), settings.get("gamma")
    if usual is None or held is None or held <= _NARROW * usual:
        return None
    return (
        f"the chains mix only when they are held {held / usual:.0f} times as tightly as usual (gamma {held:.3g}): the "
        "coefficients are of the nearest surroundings of each checkpoint and may be close to 0; a smaller nbeta or "
        "more draws let them see farther"
    )


def objective_of(model: nn.Module, loss: str, data: Any, layers: Sequence[str] | None = None) -> Objective:
    """The loss as a function of the weights, or of some of them, in the network's own precision."""
    from strati.landscape.behaviour import objective

    return objective(model, loss, data, layers=layers)


def _refused(reason: str) -> Level:
    return Level(None, None, (), reason, False)


def _sampled(objective: Objective, shared: Shared) -> Traces:
    from strati.landscape.sampling.config import LLCConfig
    from strati.landscape.sampling.sgld import sample_sgld

    config = LLCConfig(
        sampler="sgld",
        gamma=shared.gamma,
        step=shared.step,
        chains=shared.chains,
        draws=shared.draws,
        batch=shared.batch,
        seed=shared.seed,
    )
    return sample_sgld(objective, config, shared.nbeta)


def _curvature(objective: Objective, batch: int | None = None) -> float:
    """The stiffest curvature of one batch of the loss."""
    import torch

    from strati.landscape.sampling.config import LLCConfig
    from strati.landscape.sampling.sgld import Steps, batches_of
    from strati.rng import derive

    config = LLCConfig(sampler="sgld", gamma=1.0, step=1.0, seed=_CHOSEN, batch=batch or LLCConfig().batch)
    steps = Steps(objective, config, 1.0)
    generator = torch.Generator().manual_seed(derive(_CHOSEN, "track curvature"))
    zero = torch.zeros_like(objective.flat.theta)
    return steps.stiffest(zero, batches_of(objective, config)[0], generator)


def _bounded(traces: Traces, shared: Shared) -> bool:
    """Whether the chains stay as near as the localisation alone would hold them, by a margin."""
    far = float(traces.spread[traces.main][:, -1].max())
    return far * shared.gamma <= 4.0 * traces.parameters + 40.0


def _together() -> int:
    from strati.landscape.sampling.sgld import TOGETHER

    return TOGETHER
