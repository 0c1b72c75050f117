"""Metropolis-corrected Hamiltonian Monte Carlo, all chains and temperatures in one batch.

Coordinates are the eigenbasis of the curvature, each scaled by its spread at each temperature (``walk``): of the
curvature at the minimum, or, for chains that start there, of that where they have come to.
Valleys that meet (``w1^2 w2^2`` and its kin) defeat any fixed step, so three things are added: every
other trajectory draws its step over two and a half decades; small problems also get multiplicative moves;
and replicas exchange places along a ladder of temperatures that begins at the localisation alone, where mixing is
easy. Chains come down that ladder by annealing; those left behind are replaced. Every move of the recorded part
leaves the posterior invariant, so averages have no bias of step size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from strati.landscape.sampling.budget import ANNEAL, CROWD, sampling_plan
from strati.landscape.sampling.config import LLCConfig, Sampler
from strati.landscape.sampling.diagnostics import rhat
from strati.landscape.sampling.posterior import LocalPosterior, rounding_limit
from strati.landscape.sampling.traces import Traces
from strati.landscape.sampling.walk import FEWEST_LONG, HOPELESS_DRAWS, SETTLE, State, Tuning, Walk, steered
from strati.types import Tick, silent

_SPACING = 1.2  # neighbouring temperatures differ by so many standard deviations of the energy
_LEAST_FACTOR = (
    1.5  # between neighbouring temperatures, or chains in several places would ask for no step at all
)
_LOST = (
    1.0  # nbeta (L - L*) over the number of parameters: such chains have lost the valleys, colder ones too
)
_LOCAL_RUNGS = (4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)  # of the requested temperature, without exchange
_STRETCHES = 4  # of the warm-up at least, with thousands of directions
_ARRIVED = 0.01  # relative change of the distance over a stretch of the warm-up


def sample_hmc(target: LocalPosterior, config: LLCConfig, nbeta: float, tick: Tick = silent) -> Traces:
    """Draw from the localised posterior at ``nbeta`` and, with ``config.ladder``, at colder temperatures.

    Args:
        target: What to sample.
        config: How.
        nbeta: The temperature asked for.
        tick: Called after each stage.

    Returns:
        The traces; nothing of the warm-up is in them.

    Examples:
        >>> from strati.landscape.sampling.posterior import local_posterior
        >>> quick = LLCConfig(chains=8, draws=50, ladder=False)
        >>> traces = sample_hmc(local_posterior(lambda w: (w**2).sum(), torch.zeros(1), 1.0), quick, 100.0)
        >>> traces.excess.shape[1:]
        (8, 50)
    """
    plan = sampling_plan(config, target.size, target.cost)
    walk = Walk(target, config, plan)
    if plan.exchange:
        return _exchange(walk, nbeta, tick)
    limit = rounding_limit(target) if config.coldest is None else config.coldest
    colder = [r * nbeta for r in _LOCAL_RUNGS if r * nbeta <= limit] if plan.ladder else []
    return _local(walk, [nbeta, *colder], tick)


def sample_rungs(
    target: LocalPosterior, config: LLCConfig, nbetas: Sequence[float], tick: Tick = silent
) -> Traces:
    """Draw at several given temperatures, each from where the chains of the hotter one ended.

    Examples:
        >>> from strati.landscape.sampling.posterior import local_posterior
        >>> quick = LLCConfig(chains=8, draws=20)
        >>> square = local_posterior(lambda w: (w**2).sum(), torch.zeros(1), 1.0)
        >>> sample_rungs(square, quick, [10.0, 100.0]).excess.shape
        (2, 8, 20)
    """
    plan = sampling_plan(config, target.size, target.cost, rungs=len(nbetas))
    return _local(Walk(target, config, plan), sorted(nbetas), tick)


def _exchange(walk: Walk, nbeta: float, tick: Tick) -> Traces:
    """Anneal from the localisation alone to the coldest temperature, then sample the whole ladder together."""
    target, config = walk.target, walk.config
    coldest = _coldest(target, config, nbeta) if walk.plan.ladder else nbeta
    state = walk.at(walk.normal(1, CROWD * walk.chains, target.size) / math.sqrt(target.gamma))
    energies = state.excess
    tuning = Tuning(target.theta.new_zeros(1), walk.quadratic_scales(target.theta.new_zeros(1)))
    current = 0.0
    ladder: list[float] = []
    rungs: list[State] = []
    tunings: list[Tuning] = []
    while current < coldest:
        following = _next_temperature(energies, current, coldest, nbeta)
        halfway = math.sqrt(current * following) if current > 0 else following / 2
        for step in (halfway, following):
            state = walk.resample(state, step - current)
            current = step
            here = target.theta.new_tensor([current])
            tuning = Tuning(tuning.log_step, walk.scales(state.offset[None], here))
            state, tuning, energies = walk.settle(state, here, tuning, ANNEAL)
        ladder.append(current)
        rungs.append(walk.some(state))
        tunings.append(tuning)
        tick(f"nbeta {current:.3g}")
        if current > nbeta and current * float(energies.median()) > _LOST * target.size:
            break
    temperatures = target.theta.new_tensor(ladder)
    together = State(*(torch.cat(parts) for parts in zip(*rungs, strict=True)))
    joint = Tuning(*(torch.cat(parts) for parts in zip(*tunings, strict=True)))
    return _record(walk, together, temperatures, joint, ladder.index(nbeta))[0]


def _local(walk: Walk, rungs: list[float], tick: Tick) -> Traces:
    """Start at the minimum, sample the first temperature, then cool and sample the others in turn."""
    config, theta = walk.config, walk.target.theta
    parts: list[Traces] = []
    level = rungs[0]
    current = theta.new_tensor([level])
    tuning = Tuning(theta.new_full((1,), math.log(0.3)), walk.quadratic_scales(current))
    state = walk.at(theta.new_zeros(1, walk.chains, len(theta)))
    for i in range(5 if walk.large else 3):
        tuning = walk.adapt(state, current, tuning) if i else tuning
        state, tuning, energies = walk.settle(state, current, tuning, max(6, config.warmup // 4))
        draws = walk.lengthen(tuning)
    if walk.large:
        state, tuning, energies = _arrive(walk, state, current, tuning)
        if len(rungs) > 1:  # colder, trajectories get longer
            draws = config.draws or min(draws, FEWEST_LONG)
    for rung in rungs:
        while level < rung:  # a plain number: a tensor of single precision may never reach the rung
            level = min(rung, (4 if walk.large else 2) * level)
            following = theta.new_tensor([level])
            state = walk.rescue(state, energies)
            shrink = walk.quadratic_scales(following) / walk.quadratic_scales(current)
            # Stiff directions shrink with the temperature; what is not quadratic settles afterwards.
            offset = walk.target.unrotate(walk.target.rotate(state.offset) * shrink[:, None, :])
            state, current = walk.at(offset), following
            tuning = Tuning(tuning.log_step, tuning.scale * shrink)
            state, tuning, energies = walk.settle(state, current, tuning, 6)
        tuning = walk.adapt(state, current, tuning) if parts else tuning
        state, tuning, _ = walk.settle(state, current, tuning, SETTLE // 2)
        # The step last: it has to fit the scales that are used.
        state, found, energies = walk.settle(state, current, tuning, SETTLE // 2)
        tuning = tuning._replace(log_step=found.log_step)
        part, state = _record(walk, state, current, tuning, 0, draws)
        parts.append(part)
        tick(f"nbeta {rung:.3g}")
        stuck = (rhat(part.lambda_trace()) or math.inf) > config.max_rhat
        if stuck or (draws == HOPELESS_DRAWS and walk.hopeless):  # colder, the valleys are narrower still
            break
        walk.lengthen(tuning)
    return _join(parts)


def _arrive(walk: Walk, state: State, nbeta: Tensor, tuning: Tuning) -> tuple[State, Tuning, Tensor]:
    """With thousands of directions: move on until the chains are no longer on their way out.

    The loss settles long before the distance does, and falls or rises with it: chains that are still on their way are
    a few per cent off while R-hat sees nothing.
    """
    rounds = max(6, walk.config.warmup // 4)
    before = 0.0
    for i in range(max(_STRETCHES, walk.plan.draws // rounds)):
        tuning = walk.adapt(state, nbeta, tuning)
        state, tuning, energies = walk.settle(state, nbeta, tuning, rounds)
        distance = float((state.offset**2).sum(-1).mean())
        if i + 1 >= _STRETCHES and abs(distance - before) <= _ARRIVED * distance:
            break
        before = distance
    return state, tuning, energies


def _record(
    walk: Walk, state: State, nbeta: Tensor, tuning: Tuning, main: int, count: int | None = None
) -> tuple[Traces, State]:
    """Finish the warm-up at all temperatures together, then keep the draws."""
    target, config = walk.target, walk.config
    draws = walk.lengthen(tuning) if count is None else count
    warmup = config.warmup if walk.plan.exchange else 0
    log_step = tuning.log_step
    excess, spread, controls, accepted = [], [], [], target.theta.new_zeros(len(nbeta))
    counted = 0
    total = torch.zeros_like(state.offset[main])
    for i in range(warmup + draws):
        wide = walk.wide(i)
        state, chance = walk.trajectory(state, nbeta, Tuning(log_step, tuning.scale), wide=wide)
        if i < warmup and not wide:
            log_step = steered(log_step, chance - walk.aim, 1 / math.sqrt(1 + i / 2))
        for _ in range(2 if walk.collapsed is None else 1):
            state = walk.leap(state, nbeta)
        state = walk.exchange(state, nbeta, i % 2)
        if i >= warmup:
            excess.append(state.excess)
            total += state.offset[main]
            spread.append((state.offset**2).sum(-1))
            controls.append(target.controls(state.offset, state.slope, nbeta).to(torch.float32))
            accepted += 0 if wide else chance
            counted += not wide
    traces = Traces(
        nbeta=_array(nbeta),
        main=main,
        gamma=target.gamma,
        baseline=target.baseline,
        excess=_array(torch.stack(excess).permute(1, 2, 0)),
        spread=_array(torch.stack(spread).permute(1, 2, 0)),
        controls=_array(torch.stack(controls).permute(1, 2, 0, 3)),
        parameters=target.size,
        sampler=Sampler.HMC,
        acceptance=_array(accepted / counted),
        gradients=walk.gradients,
        global_start=walk.plan.exchange,
        centre=float(target.evaluate(total.mean(0)[None] / draws)[0]),
    )
    return traces, state


def _join(parts: list[Traces]) -> Traces:
    """Temperatures sampled one after the other as one set of traces."""
    first, last = parts[0], parts[-1]

    def cat(name: str) -> np.ndarray:
        return np.concatenate([getattr(p, name) for p in parts])

    return Traces(
        nbeta=cat("nbeta"),
        main=0,
        gamma=first.gamma,
        baseline=first.baseline,
        excess=cat("excess"),
        spread=cat("spread"),
        controls=cat("controls"),
        parameters=first.parameters,
        sampler=first.sampler,
        acceptance=cat("acceptance"),
        gradients=last.gradients,
        global_start=first.global_start,
        centre=first.centre,
    )


def _next_temperature(energies: Tensor, current: float, coldest: float, wanted: float) -> float:
    """A fixed number of standard deviations of the energy further, never past a temperature that is wanted."""
    finite = energies[torch.isfinite(energies)].double()
    low, high = torch.quantile(finite, finite.new_tensor([0.16, 0.84])) if len(finite) else (0, 0)
    width = max(float(high - low) / 2, 1e-290)
    following = current + _SPACING / width
    if current > 0:
        following = min(max(following, _LEAST_FACTOR * current), 4 * current)
    following = min(following, coldest)
    return wanted if current < wanted < following else following


def _coldest(target: LocalPosterior, config: LLCConfig, nbeta: float) -> float:
    """The ladder's end: far down for a few parameters, for more where the least curvature has come into view."""
    if config.coldest is not None:
        return max(config.coldest, nbeta)
    return max(nbeta, min(max(1e12, 1e3 * nbeta), rounding_limit(target)))


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().cpu().numpy()
