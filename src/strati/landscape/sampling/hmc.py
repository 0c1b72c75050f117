"""Metropolis-corrected Hamiltonian Monte Carlo, all chains and temperatures in one batch.

Coordinates are the eigenbasis of the curvature at the minimum, each scaled by its spread at each temperature.
Valleys that meet (``w1^2 w2^2`` and its kin) defeat any fixed step, so three things are added: every
other trajectory draws its step over two and a half decades; small problems also get multiplicative moves;
and replicas exchange places along a ladder of temperatures that begins at the localisation alone, where mixing is
easy. Chains come down that ladder by annealing; those left behind are replaced. Every move of the recorded part
leaves the posterior invariant, so averages have no bias of step size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from strati.landscape.sampling.budget import ANNEAL, CROWD, SamplingPlan, sampling_plan
from strati.landscape.sampling.config import BUDGET, DENSE_LIMIT, VIRIAL_LIMIT, LLCConfig, Sampler
from strati.landscape.sampling.diagnostics import rhat
from strati.landscape.sampling.posterior import LocalPosterior, rounding_limit
from strati.landscape.sampling.traces import Traces
from strati.rng import derive
from strati.types import Tick, silent

_AIM = 0.8  # acceptance the step size is steered to
_LOCAL_AIM = (
    0.9  # the same without exchange: curvature varies along valleys, and no other move frees a stuck chain
)
_SPACING = 1.2  # neighbouring temperatures differ by so many standard deviations of the energy
_LEAST_FACTOR = (
    1.5  # between neighbouring temperatures, or chains in several places would ask for no step at all
)
_LOST = (
    1.0  # nbeta (L - L*) over the number of parameters: such chains have lost the valleys, colder ones too
)
_LEFT_BEHIND = 5.0  # half-widths of the energy above the middle at which an annealed chain is replaced
_LOCAL_RUNGS = (4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)  # of the requested temperature, without exchange
_RUNG_SETTLE = 20  # rounds at a temperature before its draws, without exchange
_ARRIVED = 0.01  # relative change of the distance over a stretch of the warm-up
_FEWEST_DRAWS = 80
_HOPELESS = 6  # trajectories so many times too short do not mix: only enough draws are kept to say so
_HOPELESS_DRAWS = 20
_REACH = 3.0  # longest trajectory, in spreads of a direction


class State(NamedTuple):
    """Replicas: offsets from the minimum ``(K, C, d)``, excess loss ``(K, C)`` and slope ``(K, C, d)``."""

    offset: Tensor
    excess: Tensor
    slope: Tensor


class Tuning(NamedTuple):
    """What is adapted per temperature: the logarithm of the step ``(K,)`` and the directions' scales ``(K, d)``."""

    log_step: Tensor
    scale: Tensor


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
    walk = _Walk(target, config, plan)
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
    return _local(_Walk(target, config, plan), sorted(nbetas), tick)


class _Walk:
    """The moves. Holds the random stream and counts gradients."""

    def __init__(self, target: LocalPosterior, config: LLCConfig, plan: SamplingPlan) -> None:
        self.target, self.config, self.plan = target, config, plan
        self.chains, self.longest = plan.chains, plan.leapfrog
        self.hopeless = False  # whether trajectories are far too short for the valleys
        self.aim = _AIM if plan.exchange else _LOCAL_AIM
        self.generator = torch.Generator().manual_seed(derive(config.seed, "hmc"))
        self.device = target.theta.device
        self.gradients = 0

    def wide(self, i: int) -> bool:
        """Whether the ``i``-th trajectory draws its step over decades: half of them where valleys may meet."""
        return i % 2 == 1 if self.plan.exchange else i % 8 == 7

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=self.target.theta.dtype).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=self.target.theta.dtype).to(self.device)

    def at(self, offset: Tensor) -> State:
        self.gradients += offset.shape[0] * offset.shape[1]
        return State(offset, *self.target.evaluate(offset))

    def energy(self, state: State, nbeta: Tensor) -> Tensor:
        return nbeta[:, None] * state.excess + 0.5 * self.target.gamma * (state.offset**2).sum(-1)

    def trajectory(self, state: State, nbeta: Tensor, tuning: Tuning, *, wide: bool) -> tuple[State, Tensor]:
        """One trajectory of random length; returns the new state and the mean acceptance per temperature."""
        temperatures, chains, size = state.offset.shape
        steps = 1 + int(self.uniform(1) * self.longest)
        u = self.uniform(temperatures, chains)
        jitter = 10.0 ** (0.5 - 2.5 * u) if wide else torch.exp(0.4 * (u - 0.5))
        step = (tuning.log_step.exp()[:, None] * jitter)[..., None]
        scale = tuning.scale[:, None, :]
        gamma = self.target.gamma

        def kick(s: State) -> Tensor:
            return self.target.rotate(nbeta[:, None, None] * s.slope + gamma * s.offset) * scale

        momentum = self.normal(temperatures, chains, size)
        before = self.energy(state, nbeta) + 0.5 * (momentum**2).sum(-1)
        new = state
        momentum = momentum - 0.5 * step * kick(new)
        for i in range(steps):
            new = self.at(new.offset + self.target.unrotate(step * scale * momentum))
            momentum = momentum - (1.0 if i < steps - 1 else 0.5) * step * kick(new)
        after = self.energy(new, nbeta) + 0.5 * (momentum**2).sum(-1)
        chance = torch.exp((before - after).clamp(max=0)).nan_to_num(0.0)
        accept = self.uniform(temperatures, chains) < chance
        return _where(accept, new, state), chance.mean(1)

    def rescale(self, state: State, nbeta: Tensor) -> State:
        """Multiply some coordinates by random factors of any size and sign, with the Jacobian in the ratio."""
        shape = state.offset.shape
        spread = 10.0 ** (0.7 - 2.0 * self.uniform(shape[0], shape[1], 1))
        chosen = self.uniform(*shape) < self.uniform(shape[0], shape[1], 1)
        exponent = self.normal(*shape) * spread * chosen
        sign = 1.0 - 2.0 * (self.uniform(*shape) < 0.25).to(state.offset.dtype)
        new = self.at(state.offset * torch.exp(exponent) * sign)
        log_ratio = self.energy(state, nbeta) - self.energy(new, nbeta) + exponent.sum(-1)
        accept = self.uniform(shape[0], shape[1]).log() < log_ratio.nan_to_num(-math.inf)
        return _where(accept, new, state)

    def exchange(self, state: State, nbeta: Tensor, first: int) -> State:
        """Swap neighbouring temperatures (even pairs, then odd ones) where Metropolis allows it."""
        if len(nbeta) < first + 2:
            return state
        low = torch.arange(first, len(nbeta) - 1, 2, device=self.device)
        log_ratio = (nbeta[low] - nbeta[low + 1])[:, None] * (state.excess[low] - state.excess[low + 1])
        accept = (self.uniform(*log_ratio.shape).log() < log_ratio).long()
        source = torch.arange(len(nbeta), device=self.device)[:, None].repeat(1, state.excess.shape[1])
        source[low] += accept
        source[low + 1] -= accept
        wide = source[..., None].expand_as(state.offset)
        return State(
            state.offset.gather(0, wide), state.excess.gather(0, source), state.slope.gather(0, wide)
        )

    def rescue(self, state: State, recent: Tensor) -> State:
        """Replace chains that annealing left behind in a worse minimum by copies of others.

        Ordinary resampling would also punish chains for the fluctuation of the moment and soon leave one
        ancestor. Here a chain goes only if its *mean* loss is far above what the others fluctuate by, where its
        weight is nil; the exchange that follows is exact in any case.

        Args:
            state: Replicas of one temperature.
            recent: Their recent losses, ``(rounds, C)``.
        """
        means = recent.mean(0)
        low, centre, high = torch.quantile(recent.reshape(-1), recent.new_tensor([0.16, 0.5, 0.84]))
        behind = ~(means <= centre + _LEFT_BEHIND * (high - low) / 2)
        good = torch.nonzero(~behind).reshape(-1)
        if len(good) in (0, self.chains):
            return state
        index = torch.arange(self.chains, device=self.device)
        picks = (self.uniform(int(behind.sum())) * len(good)).long().clamp(max=len(good) - 1)
        index[behind] = good[picks]
        return State(*(part[:, index] for part in state))

    def resample(self, state: State, colder: float) -> State:
        """Replicas of the next temperature, each as often as its weight there says (population annealing).

        Parts of a valley between which no move is left get the shares that the colder temperature gives them. Copies
        go apart in the moves that follow.

        Args:
            state: Replicas of one temperature.
            colder: The change of the inverse temperature.
        """
        weight = torch.softmax(-colder * state.excess[0].double().nan_to_num(math.inf), dim=0)
        count = len(weight)
        places = (torch.arange(count, device=self.device) + self.uniform(1).double()) / count
        index = torch.searchsorted(weight.cumsum(0), places).clamp(max=count - 1)
        return State(*(part[:, index] for part in state))

    def some(self, state: State) -> State:
        """As many replicas as there are chains, at random."""
        index = torch.randperm(state.excess.shape[1], generator=self.generator)[: self.chains].to(self.device)
        return State(*(part[:, index] for part in state))

    def scales(self, offsets: Tensor, nbeta: Tensor) -> Tensor:
        """Spread of every eigendirection ``(K, d)`` over samples ``(S, K, C, d)``, shrunk to the quadratic's."""
        prior = 1 / (nbeta[:, None] * self.target.curvature + self.target.gamma)
        squares = (self.target.rotate(offsets) ** 2).sum((0, 2))
        count = offsets.shape[0] * offsets.shape[2]
        belief = 2 if self.target.size <= DENSE_LIMIT else 10
        return torch.sqrt((squares + belief * prior) / (count + belief))

    def quadratic_scales(self, nbeta: Tensor) -> Tensor:
        """Spread of every eigendirection were the loss quadratic."""
        return 1 / torch.sqrt(nbeta[:, None] * self.target.curvature + self.target.gamma)

    def lengthen(self, tuning: Tuning) -> int:
        """Without exchange, fit trajectories to the step found, and return how many draws the budget then allows.

        A step of one crosses a quadratic valley; curved ones force short steps, and only long trajectories
        follow them.
        """
        if self.plan.exchange or self.config.leapfrog is not None:
            return self.plan.draws
        budget = (self.plan.draws + _RUNG_SETTLE) * (1 + self.plan.leapfrog) / 2
        seconds = self.plan.seconds(self.config.warmup, self.target.cost)
        most = self.plan.leapfrog * (3 if seconds < BUDGET / 3 else 1)
        needed = math.ceil(_REACH / float(tuning.log_step.exp().min()))
        self.hopeless = needed > _HOPELESS * most and self.target.size <= DENSE_LIMIT
        self.longest = min(max(needed, 3), most)
        affordable = int(2 * budget / (1 + self.longest)) - _RUNG_SETTLE
        draws = min(max(affordable, _FEWEST_DRAWS), 2 * self.plan.draws)
        return self.config.draws or (_HOPELESS_DRAWS if self.hopeless else draws)

    def settle(
        self, state: State, nbeta: Tensor, tuning: Tuning, rounds: int, *, learn: bool = True
    ) -> tuple[State, Tuning, Tensor]:
        """Move at one temperature while the step is steered and, with ``learn``, the scales; returns the losses too."""
        log_step, offsets = tuning.log_step, []
        for i in range(rounds):
            wide = self.wide(i)
            state, chance = self.trajectory(state, nbeta, Tuning(log_step, tuning.scale), wide=wide)
            if not wide:
                log_step = log_step + (chance - self.aim) / (1 + i / 8)
            if self.target.size <= 2 * VIRIAL_LIMIT:
                state = self.rescale(state, nbeta)
            offsets.append(state)
        kept = offsets[rounds // 3 :]
        scale = self.scales(torch.stack([s.offset for s in kept]), nbeta) if learn else tuning.scale
        return state, Tuning(log_step, scale), torch.stack([s.excess[0] for s in kept])


def _exchange(walk: _Walk, nbeta: float, tick: Tick) -> Traces:
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


def _local(walk: _Walk, rungs: list[float], tick: Tick) -> Traces:
    """Start at the minimum, sample the first temperature, then cool and sample the others in turn."""
    target, config = walk.target, walk.config
    parts: list[Traces] = []
    level = rungs[0]
    current = target.theta.new_tensor([level])
    tuning = Tuning(target.theta.new_full((1,), math.log(0.3)), walk.quadratic_scales(current))
    state = walk.at(target.theta.new_zeros(1, walk.chains, target.size))
    # On its way out of the minimum every flat direction looks narrow, and is slower for it where it is so treated:
    # with thousands of them the quadratic is the better guide until they have arrived.
    learn = target.size <= DENSE_LIMIT
    for _ in range(3 if learn else 5):
        state, tuning, energies = walk.settle(state, current, tuning, max(6, config.warmup // 4), learn=learn)
        draws = walk.lengthen(tuning)
    if not learn:
        state, tuning, energies = _arrive(walk, state, current, tuning)
    for rung in rungs:
        while level < rung:  # a plain number: a tensor of single precision may never reach the rung
            level = min(rung, 2 * level)
            following = target.theta.new_tensor([level])
            state = walk.rescue(state, energies)
            shrink = walk.quadratic_scales(following) / walk.quadratic_scales(current)
            # Stiff directions shrink with the temperature; what is not quadratic settles afterwards.
            state = walk.at(target.unrotate(target.rotate(state.offset) * shrink[:, None, :]))
            current, tuning = following, Tuning(tuning.log_step, tuning.scale * shrink)
            state, tuning, energies = walk.settle(state, current, tuning, 6)
        state, tuning, _ = walk.settle(state, current, tuning, _RUNG_SETTLE // 2)
        # The step last: it has to fit the scales that are used.
        state, found, energies = walk.settle(state, current, tuning, _RUNG_SETTLE // 2)
        tuning = tuning._replace(log_step=found.log_step)
        part, state = _record(walk, state, current, tuning, 0, draws)
        parts.append(part)
        tick(f"nbeta {rung:.3g}")
        stuck = (rhat(part.lambda_trace()) or math.inf) > config.max_rhat
        if stuck or (draws == _HOPELESS_DRAWS and walk.hopeless):  # colder, the valleys are narrower still
            break
        walk.lengthen(tuning)
    return _join(parts)


def _arrive(walk: _Walk, state: State, nbeta: Tensor, tuning: Tuning) -> tuple[State, Tuning, Tensor]:
    """With thousands of directions: move on, learning their scales, until the chains are no longer on their way out.

    The loss settles long before the distance does, and falls or rises with it: chains that are still on their way are
    a few per cent off while R-hat sees nothing.
    """
    rounds = max(6, walk.config.warmup // 4)
    before = 0.0
    for _ in range(max(2, walk.plan.draws // rounds)):
        state, tuning, energies = walk.settle(state, nbeta, tuning, rounds)
        distance = float((state.offset**2).sum(-1).mean())
        if abs(distance - before) <= _ARRIVED * distance:
            break
        before = distance
    return state, tuning, energies


def _record(
    walk: _Walk, state: State, nbeta: Tensor, tuning: Tuning, main: int, count: int | None = None
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
            log_step = log_step + (chance - walk.aim) / math.sqrt(1 + i / 2)
        if target.size <= 2 * VIRIAL_LIMIT:
            state = walk.rescale(walk.rescale(state, nbeta), nbeta)
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


def _where(accept: Tensor, new: State, old: State) -> State:
    wide = accept[..., None]
    return State(
        torch.where(wide, new.offset, old.offset),
        torch.where(accept, new.excess, old.excess),
        torch.where(wide, new.slope, old.slope),
    )


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().cpu().numpy()
