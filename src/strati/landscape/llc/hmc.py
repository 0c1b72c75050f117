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
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from strati.core.results import Tick, silent
from strati.landscape.llc.config import DENSE_LIMIT, LLCConfig, Sampler
from strati.landscape.llc.diagnostics import rhat
from strati.landscape.llc.estimate import settled
from strati.landscape.llc.hmc_kernel import (
    FEWEST_LONG,
    HOPELESS_DRAWS,
    SETTLE,
    Replicas,
    Tuning,
    Walk,
    steered,
)
from strati.landscape.llc.posterior import LocalPosterior, rounding_limit
from strati.landscape.llc.sampling_plan import (
    ANNEAL,
    CROWD,
    MOST_DRAWS,
    WARMUP,
    Clock,
    sampling_plan,
    timed_plan,
)
from strati.landscape.llc.traces import Traces

_SPACING = 1.2  # neighbouring temperatures differ by so many standard deviations of the energy
_LEAST_FACTOR = (
    1.5  # between neighbouring temperatures, or chains in several places would ask for no step at all
)
_LOST = (
    1.0  # nbeta (L - L*) over the number of parameters: such chains have lost the valleys, colder ones too
)
_LOCAL_RUNGS = (4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)  # of the requested temperature, without exchange
_ROUNDS = 15  # of a stage of the warm-up
_STAGES, _MOST_STAGES = 3, 12  # of the warm-up of chains that start at the minimum
_STAGES_LARGE, _MOST_STAGES_LARGE = 9, 18  # the same with thousands of directions
_ARRIVED = 0.01  # relative change of the distance over a stage of the warm-up
_WARMUP_END = 0.45  # of the time that is left: then draws are kept, wherever the chains are
_MOST_TIMES = 8  # the usual number of draws, for chains that have not mixed
_FEWEST = 4  # draws, however little time there is


def sample_hmc(
    target: LocalPosterior,
    config: LLCConfig,
    nbeta: float,
    tick: Tick = silent,
    clock: Clock | None = None,
) -> Traces:
    """Draw from the localised posterior at ``nbeta`` and, with ``config.ladder``, at colder temperatures.

    Args:
        target: What to sample.
        config: How.
        nbeta: The temperature asked for.
        tick: Called after each stage.
        clock: The time that may be used; by default the plan's work alone decides.

    Returns:
        The traces; nothing of the warm-up is in them.

    Examples:
        >>> from strati.landscape.llc.posterior import local_posterior
        >>> quick = LLCConfig(chains=8, draws=50, ladder=False)
        >>> traces = sample_hmc(local_posterior(lambda w: (w**2).sum(), torch.zeros(1), 1.0), quick, 100.0)
        >>> traces.excess.shape[1:]
        (8, 50)
    """
    clock = clock or Clock()
    plan = sampling_plan(config, target.size, target.cost)
    if clock.timed:
        stages = _STAGES_LARGE if target.size > DENSE_LIMIT else _STAGES
        call = _seconds_per_call(target, plan.chains)
        plan = timed_plan(plan, config, stages * _ROUNDS + SETTLE, call, target.cost, clock.left)
    walk = Walk(target, config, plan)
    if plan.exchange:
        return _exchange(walk, nbeta, tick, clock)
    limit = rounding_limit(target) if config.coldest is None else config.coldest
    colder = [r * nbeta for r in _LOCAL_RUNGS if r * nbeta <= limit] if plan.ladder else []
    return _local(walk, [nbeta, *colder], tick, clock, go_on=True)


def _seconds_per_call(target: LocalPosterior, chains: int) -> float:
    """Measured time of a batched gradient; the first call, which may prepare things, does not count."""
    offset = target.theta.new_zeros(1, chains, target.size)
    target.evaluate(offset[:, :1])
    began = time.perf_counter()
    target.evaluate(offset)
    return time.perf_counter() - began


def sample_rungs(
    target: LocalPosterior, config: LLCConfig, nbetas: Sequence[float], tick: Tick = silent
) -> Traces:
    """Draw at several given temperatures, each from where the chains of the hotter one ended.

    Examples:
        >>> from strati.landscape.llc.posterior import local_posterior
        >>> quick = LLCConfig(chains=8, draws=20)
        >>> square = local_posterior(lambda w: (w**2).sum(), torch.zeros(1), 1.0)
        >>> sample_rungs(square, quick, [10.0, 100.0]).excess.shape
        (2, 8, 20)
    """
    plan = sampling_plan(config, target.size, target.cost, rungs=len(nbetas))
    return _local(Walk(target, config, plan), sorted(nbetas), tick)


def _exchange(walk: Walk, nbeta: float, tick: Tick, clock: Clock) -> Traces:
    """Anneal from the localisation alone to the coldest temperature, then sample the whole ladder together."""
    target, config = walk.target, walk.config
    coldest = _coldest(target, config, nbeta) if walk.plan.ladder else nbeta
    state = walk.at(walk.normal(1, CROWD * walk.chains, target.size) / math.sqrt(target.gamma))
    energies = state.excess
    tuning = Tuning(target.theta.new_zeros(1), walk.quadratic_scales(target.theta.new_zeros(1)))
    current = 0.0
    ladder: list[float] = []
    rungs: list[Replicas] = []
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
    together = Replicas(*(torch.cat(parts) for parts in zip(*rungs, strict=True)))
    joint = Tuning(*(torch.cat(parts) for parts in zip(*tunings, strict=True)))
    draws = walk.plan.draws
    stopping = Stopping(draws, draws if config.draws is not None else _MOST_TIMES * draws)
    if config.draws is None and clock.timed:
        stopping = Stopping(_FEWEST, MOST_DRAWS * draws, clock, clock.used + clock.left)
    return _record(walk, together, temperatures, joint, ladder.index(nbeta), stopping)[0]


def _local(
    walk: Walk, rungs: list[float], tick: Tick, clock: Clock | None = None, *, go_on: bool = False
) -> Traces:
    """Start at the minimum, sample the first temperature, then cool and sample the others in turn.

    Args:
        walk: The moves.
        rungs: Temperatures, ascending.
        tick: Called after each temperature.
        clock: The time that may be used.
        go_on: Draw on at the first temperature until its chains have mixed, up to a limit.
    """
    clock = clock or Clock()
    config, theta = walk.config, walk.target.theta
    parts: list[Traces] = []
    level = rungs[0]
    current = theta.new_tensor([level])
    state, tuning, energies, draws = _warm_up(walk, current, clock)
    warmup = walk.rounds
    if walk.large and len(rungs) > 1:  # colder, trajectories get longer
        draws = config.draws or min(draws, FEWEST_LONG)
    for place, rung in enumerate(rungs):
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
        rounds = min(SETTLE, max(4, warmup // 3)) // 2
        state, tuning, _ = walk.settle(state, current, tuning, rounds)
        # The step last: it has to fit the scales that are used.
        state, steered_to, energies = walk.settle(state, current, tuning, rounds)
        tuning = tuning._replace(log_step=steered_to.log_step)
        began = clock.used
        stopping = Stopping(draws, draws)
        if place == 0 and config.draws is None and clock.timed:
            until = began + clock.left / len(rungs)
            stopping = Stopping(_FEWEST, MOST_DRAWS * walk.plan.draws, clock, until)
        elif place == 0 and config.draws is None and go_on:
            stopping = Stopping(draws, _MOST_TIMES * draws)
        part, state = _record(walk, state, current, tuning, 0, stopping)
        parts.append(part)
        tick(f"nbeta {rung:.3g}")
        stuck = (rhat(part.lambda_trace()) or math.inf) > config.max_rhat
        if stuck or (draws == HOPELESS_DRAWS and walk.hopeless):  # colder, the valleys are narrower still
            break
        if clock.left < clock.used - began:  # another temperature would take about as long
            break
        if clock.timed:
            draws = parts[0].draws
        walk.lengthen(tuning)
    return replace(_join(parts), warmup=warmup)


def _warm_up(walk: Walk, nbeta: Tensor, clock: Clock) -> tuple[Replicas, Tuning, Tensor, int]:
    """Move from the minimum until the chains are no longer on their way out; returns how many draws to keep, too.

    The loss settles long before the distance does, and falls or rises with it: chains that are still on their way are
    a few per cent off while R-hat sees nothing. A warm-up that is set has that many rounds, however far they lead.
    """
    config, theta = walk.config, walk.target.theta
    fewest, most = (_STAGES_LARGE, _MOST_STAGES_LARGE) if walk.large else (_STAGES, _MOST_STAGES)
    tuning = Tuning(theta.new_full((1,), math.log(0.3)), walk.quadratic_scales(nbeta))
    state = walk.at(theta.new_zeros(1, walk.chains, len(theta)))
    end = math.inf if clock.seconds is None else clock.used + _WARMUP_END * clock.left

    def over() -> bool:
        return clock.used > end if config.warmup is None else walk.rounds >= config.warmup

    history: list[float] = []
    while True:
        tuning = walk.adapt(state, nbeta, tuning) if history else tuning
        start = walk.rounds
        rounds = _ROUNDS if config.warmup is None else min(_ROUNDS, config.warmup - start)
        state, tuning, energies = walk.settle(state, nbeta, tuning, rounds, over)
        draws = walk.lengthen(tuning)
        distances = (state.offset[0] ** 2).sum(-1).double()
        distance, error = float(distances.mean()), float(distances.std()) / math.sqrt(walk.chains)
        history.append(distance)
        if over():
            break
        if config.warmup is None and len(history) >= fewest:
            # Over the second half of the way so far: from one stage to the next a slow approach does not show.
            arrived = abs(distance - history[len(history) // 2 - 1]) <= max(_ARRIVED * distance, error)
            if arrived or len(history) >= most:
                break
    return state, tuning, energies, draws


@dataclass(frozen=True)
class Stopping:
    """When draws are enough: at a fixed number, once chains have mixed (``draws``, then twice as many), or by time.

    Attributes:
        draws: After so many it is looked at first.
        most: No more than these.
        clock: The time that may be used.
        until: Used time at which to stop.
    """

    draws: int
    most: int
    clock: Clock | None = None
    until: float = math.inf

    def over(self, count: int, pace: float) -> bool:
        """Whether the time does not suffice for another draw."""
        return self.clock is not None and count >= self.draws and self.clock.used + pace > self.until


def _record(
    walk: Walk, state: Replicas, nbeta: Tensor, tuning: Tuning, main: int, stopping: Stopping
) -> tuple[Traces, Replicas]:
    """Finish the warm-up at all temperatures together, then keep draws until they are enough."""
    target, config = walk.target, walk.config
    warmup = (config.warmup or WARMUP) if walk.plan.exchange else 0
    log_step = tuning.log_step
    excess: list[Tensor] = []
    spread: list[Tensor] = []
    controls: list[Tensor] = []
    accepted = target.theta.new_zeros(len(nbeta))
    counted = 0
    total = torch.zeros_like(state.offset[main])

    def traces() -> Traces:
        return Traces(
            nbeta=_array(nbeta),
            main=main,
            gamma=target.gamma,
            baseline=target.baseline,
            excess=_array(torch.stack(excess).permute(1, 2, 0)),
            spread=_array(torch.stack(spread).permute(1, 2, 0)),
            controls=_array(torch.stack(controls).permute(1, 2, 0, 3)),
            parameters=target.size,
            sampler=Sampler.TEMPERED if walk.plan.exchange else Sampler.HMC,
            acceptance=_array(accepted / max(counted, 1)),
            gradients=walk.gradients,
            global_start=walk.plan.exchange,
            centre=float(target.evaluate(total.mean(0)[None] / len(excess))[0]),
            warmup=warmup,
        )

    goal, i, began = stopping.draws, 0, time.perf_counter()
    while True:
        wide = walk.wide(i)
        state, chance = walk.trajectory(state, nbeta, Tuning(log_step, tuning.scale), wide=wide)
        if i < warmup and not wide:
            log_step = steered(log_step, chance - walk.aim, 1 / math.sqrt(1 + i / 2))
        for _ in range(2 if walk.collapsed is None else 1):
            state = walk.leap(state, nbeta)
        state = walk.exchange(state, nbeta, i % 2)
        i += 1
        if i <= warmup:
            continue
        excess.append(state.excess)
        total += state.offset[main]
        if target.observer is not None:
            target.observer.observe(0, state.offset[main])
        spread.append((state.offset**2).sum(-1))
        controls.append(target.controls(state.offset, state.slope, nbeta).to(torch.float32))
        accepted += 0 if wide else chance
        counted += not wide
        count = len(excess)
        if count >= stopping.most or stopping.over(count, (time.perf_counter() - began) / i):
            break
        if stopping.clock is None and count == goal:
            if settled(traces(), config):
                break
            goal = min(2 * goal, stopping.most)
    return traces(), state


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
