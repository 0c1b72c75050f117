"""Metropolis-corrected Hamiltonian Monte Carlo, all chains and temperatures in one batch.

A trajectory (:class:`HMCKernel`) follows the Gaussian that the posterior would be, were the loss quadratic, exactly (a
rotation of offset and momentum), and is kicked by what the loss adds to it. Thousands of directions that the loss
does not feel then cost no accuracy, and the step is as long as the few that it does feel allow. Coordinates are the
eigenbasis of the curvature at the minimum or, for chains that start there, where they have come to.

Valleys that meet (``w1^2 w2^2`` and its kin) defeat any fixed step, so three things are added: every other trajectory
draws its step over two and a half decades; small problems also get multiplicative moves; and replicas exchange places
along a ladder of temperatures that begins at the localisation alone, where mixing is easy. Chains come down that
ladder by annealing; those left behind are replaced. Every move of the recorded part leaves the posterior invariant,
so averages have no bias of step size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from strati.core.results import Tick, silent
from strati.core.rng import derive
from strati.landscape.llc import tuning
from strati.landscape.llc.estimate import settled
from strati.landscape.llc.gibbs import CollapsedMoves
from strati.landscape.llc.posterior import LocalPosterior, TraceRecorder, adapted, array
from strati.landscape.llc.sampling_plan import Clock, SamplingPlan, Stopping
from strati.landscape.llc.traces import Traces, rhat


class Replicas(NamedTuple):
    """Replicas: offsets from the minimum ``(K, C, d)``, excess loss ``(K, C)`` and slope ``(K, C, d)``."""

    offset: Tensor
    excess: Tensor
    slope: Tensor


class Adaptation(NamedTuple):
    """What is adapted per temperature: the logarithm of the step ``(K,)`` and the directions' scales ``(K, d)``."""

    log_step: Tensor
    scale: Tensor


class HMCKernel:
    """The moves. Holds the random stream and counts gradients."""

    def __init__(self, target: LocalPosterior, plan: SamplingPlan) -> None:
        self.target, self.plan = target, plan
        self.chains, self.longest = plan.chains, plan.leapfrog
        self.hopeless = False  # whether trajectories are far too short for the valleys
        self.large = target.size > tuning.DENSE_LIMIT
        # On its way out of the minimum every flat direction looks narrow, and is slower for it where it is so treated:
        # with thousands of them the quadratic is the better guide, where it is known.
        self.learn = not self.large or not bool(target.curvature.any())
        self.aim = (
            tuning.AIM_EXCHANGE if plan.exchange else tuning.AIM_LARGE if self.large else tuning.AIM_LOCAL
        )
        self.generator = torch.Generator().manual_seed(derive(plan.seed, "hmc"))
        self.device = target.theta.device
        self.gradients = self.rounds = 0
        self.few = target.size <= 2 * tuning.VIRIAL_LIMIT
        self.collapsed = (
            CollapsedMoves(target, self.generator) if plan.exchange and target.quadratic else None
        )

    def wide(self, i: int) -> bool:
        """Whether the ``i``-th trajectory draws its step over decades: half of them where valleys may meet."""
        return i % 2 == 1 if self.plan.exchange else i % 8 == 7 and not self.large

    def normal(self, *shape: int) -> Tensor:
        """Normal random numbers."""
        return torch.randn(*shape, generator=self.generator, dtype=self.target.theta.dtype).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        """Random numbers between 0 and 1."""
        return torch.rand(*shape, generator=self.generator, dtype=self.target.theta.dtype).to(self.device)

    def at(self, offset: Tensor) -> Replicas:
        """Replicas at these offsets."""
        self.gradients += offset.shape[0] * offset.shape[1]
        return Replicas(offset, *self.target.evaluate(offset))

    def energy(self, state: Replicas, nbeta: Tensor) -> Tensor:
        """``nbeta (L - L*) + gamma/2 |delta|^2`` of every replica."""
        return nbeta[:, None] * state.excess + 0.5 * self.target.gamma * (state.offset**2).sum(-1)

    def trajectory(
        self, state: Replicas, nbeta: Tensor, adaptation: Adaptation, *, wide: bool
    ) -> tuple[Replicas, Tensor]:
        """One trajectory of random length; returns the new state and the mean acceptance per temperature."""
        temperatures, chains, size = state.offset.shape
        steps = 1 + int(self.uniform(1) * self.longest)
        u = self.uniform(temperatures, chains)
        jitter = 10.0 ** (0.5 - 2.5 * u) if wide else torch.exp(0.4 * (u - 0.5))
        step = (adaptation.log_step.exp()[:, None] * jitter)[..., None]
        scale = adaptation.scale[:, None, :]
        cos, sin, pull = torch.cos(step), torch.sin(step), self.target.gamma * scale**2 - 1

        def kick(state: Replicas, place: Tensor) -> Tensor:
            return nbeta[:, None, None] * scale * self.target.rotate(state.slope) + pull * place

        momentum = self.normal(temperatures, chains, size)
        before = self.energy(state, nbeta) + 0.5 * (momentum**2).sum(-1)
        new, place = state, self.target.rotate(state.offset) / scale
        momentum = momentum - 0.5 * step * kick(new, place)
        for i in range(steps):
            place, momentum = cos * place + sin * momentum, cos * momentum - sin * place
            new = self.at(self.target.unrotate(scale * place))
            momentum = momentum - (1.0 if i < steps - 1 else 0.5) * step * kick(new, place)
        after = self.energy(new, nbeta) + 0.5 * (momentum**2).sum(-1)
        chance = torch.exp((before - after).clamp(max=0)).nan_to_num(0.0)
        accept = self.uniform(temperatures, chains) < chance
        return _where(accept, new, state), chance.mean(1)

    def rescale(self, state: Replicas, nbeta: Tensor) -> Replicas:
        """Multiply some coordinates by random factors of any size and sign, with the Jacobian in the ratio."""
        shape = state.offset.shape
        spread = 10.0 ** (0.7 - 2.0 * self.uniform(shape[0], shape[1], 1))
        mask = self.uniform(*shape) < self.uniform(shape[0], shape[1], 1)
        exponent = self.normal(*shape) * spread * mask
        sign = 1.0 - 2.0 * (self.uniform(*shape) < 0.25).to(state.offset.dtype)
        new = self.at(state.offset * torch.exp(exponent) * sign)
        log_ratio = self.energy(state, nbeta) - self.energy(new, nbeta) + exponent.sum(-1)
        accept = self.uniform(shape[0], shape[1]).log() < log_ratio.nan_to_num(-math.inf)
        return _where(accept, new, state)

    def mode_jump(self, state: Replicas, nbeta: Tensor) -> Replicas:
        """What gets a few parameters from one part of a valley to another: collapsed moves, or factors of any size."""
        if not self.few:
            return state
        if self.collapsed is None:
            return self.rescale(state, nbeta)
        self.gradients += self.target.cost.mode_jump * state.excess.numel()
        return Replicas(*self.collapsed.move(*state, nbeta))

    def exchange(self, state: Replicas, nbeta: Tensor, first: int) -> Replicas:
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
        return Replicas(
            state.offset.gather(0, wide), state.excess.gather(0, source), state.slope.gather(0, wide)
        )

    def replace_stuck(self, state: Replicas, recent: Tensor) -> Replicas:
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
        behind = ~(means <= centre + tuning.LEFT_BEHIND * (high - low) / 2)
        good = torch.nonzero(~behind).reshape(-1)
        if len(good) in (0, self.chains):
            return state
        index = torch.arange(self.chains, device=self.device)
        picks = (self.uniform(int(behind.sum())) * len(good)).long().clamp(max=len(good) - 1)
        index[behind] = good[picks]
        return Replicas(*(part[:, index] for part in state))

    def resample(self, state: Replicas, colder: float) -> Replicas:
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
        return Replicas(*(part[:, index] for part in state))

    def some(self, state: Replicas) -> Replicas:
        """As many replicas as there are chains, at random."""
        index = torch.randperm(state.excess.shape[1], generator=self.generator)[: self.chains].to(self.device)
        return Replicas(*(part[:, index] for part in state))

    def scales(self, offsets: Tensor, nbeta: Tensor) -> Tensor:
        """Spread of every eigendirection ``(K, d)`` over samples ``(S, K, C, d)``, shrunk to the quadratic's."""
        prior = 1 / (nbeta[:, None] * self.target.curvature + self.target.gamma)
        squares = (self.target.rotate(offsets) ** 2).sum((0, 2))
        count = offsets.shape[0] * offsets.shape[2]
        belief = 10 if self.large else 2
        return torch.sqrt((squares + belief * prior) / (count + belief))

    def quadratic_scales(self, nbeta: Tensor) -> Tensor:
        """Spread of every eigendirection were the loss quadratic."""
        stiffness = (tuning.STIFFER_LARGE if self.large else 1.0) * self.target.curvature
        return 1 / torch.sqrt(nbeta[:, None] * stiffness + self.target.gamma)

    def adapt_length(self, adaptation: Adaptation) -> int:
        """Without exchange, fit trajectories to the step found, and return how many draws the budget then allows.

        A step of one crosses a quadratic valley; curved ones force short steps, and only long trajectories
        follow them.
        """
        if self.plan.exchange or "leapfrog" in self.plan.fixed:
            return self.plan.draws
        budget = (self.plan.draws + tuning.SETTLE) * (1 + self.plan.leapfrog) / 2
        most = 3 * self.plan.leapfrog
        needed = math.ceil(tuning.REACH / float(adaptation.log_step.exp().min()))
        self.hopeless = needed > tuning.HOPELESS * most
        self.longest = min(max(needed, 3), most)
        affordable = int(2 * budget / (1 + self.longest)) - tuning.SETTLE
        draws = min(
            max(affordable, tuning.FEWEST_LONG if self.large else tuning.FEWEST_DRAWS), 2 * self.plan.draws
        )
        return (
            self.plan.draws
            if "draws" in self.plan.fixed
            else tuning.HOPELESS_DRAWS
            if self.hopeless
            else draws
        )

    def adapt(self, state: Replicas, nbeta: Tensor, adaptation: Adaptation) -> Adaptation:
        """Move on in the coordinates of the curvature where the chains are, instead of that at the minimum."""
        target = adapted(self.target, state.offset[0])
        if target is None:
            return adaptation
        self.target = target
        return adaptation._replace(scale=self.quadratic_scales(nbeta))

    def settle(
        self,
        state: Replicas,
        nbeta: Tensor,
        adaptation: Adaptation,
        rounds: int,
        until: Callable[[], bool] | None = None,
    ) -> tuple[Replicas, Adaptation, Tensor]:
        """Move at one temperature while the step is steered and, with ``learn``, the scales; returns the losses too."""
        log_step, offsets = adaptation.log_step, []
        for i in range(rounds):
            if i and until is not None and until():
                break
            wide = self.wide(i)
            state, chance = self.trajectory(state, nbeta, Adaptation(log_step, adaptation.scale), wide=wide)
            if not wide:
                log_step = adapt_step(log_step, chance - self.aim, 1 / (1 + i / 8))
            state = self.mode_jump(state, nbeta)
            offsets.append(state)
        self.rounds += len(offsets)
        recent = offsets[len(offsets) // 3 :]
        scale = (
            self.scales(torch.stack([s.offset for s in recent]), nbeta) if self.learn else adaptation.scale
        )
        return state, Adaptation(log_step, scale), torch.stack([s.excess[0] for s in recent])


def adapt_step(log_step: Tensor, surplus: Tensor, rate: float) -> Tensor:
    """A longer step where more moves are accepted than need be, a shorter one where fewer are."""
    return (log_step + rate * surplus).clamp(max=math.log(tuning.LONGEST_STEP))


def _where(accept: Tensor, new: Replicas, old: Replicas) -> Replicas:
    wide = accept[..., None]
    return Replicas(
        torch.where(wide, new.offset, old.offset),
        torch.where(accept, new.excess, old.excess),
        torch.where(wide, new.slope, old.slope),
    )


def sample_hmc(
    target: LocalPosterior, plan: SamplingPlan, tick: Tick = silent, clock: Clock | None = None
) -> Traces:
    """Draw from the localised posterior at the plan's temperatures.

    Args:
        target: What to sample.
        plan: How.
        tick: Called after each temperature.
        clock: The time that may be used; by default the plan's work alone decides.

    Returns:
        The traces; nothing of the warm-up is in them.

    Examples:
        >>> from strati.landscape.llc.config import LLCConfig
        >>> from strati.landscape.llc.sampling_plan import sampling_plan
        >>> config = LLCConfig(chains=8, draws=50, ladder=False, nbeta=100.0, sampler="hmc")
        >>> plan, target, *_ = sampling_plan(lambda w: (w**2).sum(), torch.zeros(1), config)
        >>> sample_hmc(target, plan).excess.shape[1:]
        (8, 50)
    """
    clock = clock or Clock()
    walk = HMCKernel(target, plan)
    return _exchange(walk, tick, clock) if plan.exchange else _local(walk, tick, clock)


def _exchange(walk: HMCKernel, tick: Tick, clock: Clock) -> Traces:
    """Anneal from the localisation alone to the coldest temperature, then sample the whole ladder together."""
    target, plan, nbeta = walk.target, walk.plan, walk.plan.nbeta
    coldest = plan.ladder[-1] if plan.ladder else nbeta
    state = walk.at(walk.normal(1, tuning.CROWD * walk.chains, target.size) / math.sqrt(target.gamma))
    energies = state.excess
    adaptation = Adaptation(target.theta.new_zeros(1), walk.quadratic_scales(target.theta.new_zeros(1)))
    current = 0.0
    ladder: list[float] = []
    rungs: list[Replicas] = []
    adaptations: list[Adaptation] = []
    while current < coldest:
        following = _next_temperature(energies, current, coldest, nbeta)
        halfway = math.sqrt(current * following) if current > 0 else following / 2
        for step in (halfway, following):
            state = walk.resample(state, step - current)
            current = step
            here = target.theta.new_tensor([current])
            adaptation = Adaptation(adaptation.log_step, walk.scales(state.offset[None], here))
            state, adaptation, energies = walk.settle(state, here, adaptation, tuning.ANNEAL)
        ladder.append(current)
        rungs.append(walk.some(state))
        adaptations.append(adaptation)
        tick(f"nbeta {current:.3g}")
        if current > nbeta and current * float(energies.median()) > tuning.LOST_VALLEYS * target.size:
            break
    together = Replicas(*(torch.cat(parts) for parts in zip(*rungs, strict=True)))
    joint = Adaptation(*(torch.cat(parts) for parts in zip(*adaptations, strict=True)))
    stopping = Stopping(plan, clock, clock.used + clock.left)
    return _record(walk, together, target.theta.new_tensor(ladder), joint, ladder.index(nbeta), stopping)[0]


def _local(walk: HMCKernel, tick: Tick, clock: Clock) -> Traces:
    """Start at the minimum, sample the first temperature, then cool and sample the others in turn."""
    plan, theta = walk.plan, walk.target.theta
    parts: list[Traces] = []
    level, rungs = plan.nbeta, (plan.nbeta, *plan.ladder)
    current = theta.new_tensor([level])
    state, adaptation, energies, draws = _warm_up(walk, current, clock)
    warmup = walk.rounds
    if walk.large and plan.ladder and "draws" not in plan.fixed:  # colder, trajectories get longer
        draws = min(draws, tuning.FEWEST_LONG)
    for rung in rungs:
        while level < rung:  # a plain number: a tensor of single precision may never reach the rung
            level = min(rung, (4 if walk.large else 2) * level)
            following = theta.new_tensor([level])
            state = walk.replace_stuck(state, energies)
            shrink = walk.quadratic_scales(following) / walk.quadratic_scales(current)
            # Stiff directions shrink with the temperature; what is not quadratic settles afterwards.
            offset = walk.target.unrotate(walk.target.rotate(state.offset) * shrink[:, None, :])
            state, current = walk.at(offset), following
            adaptation = Adaptation(adaptation.log_step, adaptation.scale * shrink)
            state, adaptation, energies = walk.settle(state, current, adaptation, 6)
        adaptation = walk.adapt(state, current, adaptation) if parts else adaptation
        rounds = min(tuning.SETTLE, max(4, warmup // 3)) // 2
        state, adaptation, _ = walk.settle(state, current, adaptation, rounds)
        # The step last: it has to fit the scales that are used.
        state, steered_to, energies = walk.settle(state, current, adaptation, rounds)
        adaptation = adaptation._replace(log_step=steered_to.log_step)
        began = clock.used
        stopping = Stopping(plan, clock, began + clock.left / len(rungs), draws, fixed=bool(parts))
        part, state = _record(walk, state, current, adaptation, 0, stopping)
        parts.append(part)
        tick(f"nbeta {rung:.3g}")
        stuck = (rhat(part.lambda_trace()) or math.inf) > plan.max_rhat
        hopeless = draws == tuning.HOPELESS_DRAWS and walk.hopeless
        # Colder, the valleys are narrower still; and another temperature would take about as long.
        if stuck or hopeless or clock.left < clock.used - began:
            break
        if clock.timed:
            draws = parts[0].draws
        walk.adapt_length(adaptation)
    names = ("nbeta", "excess", "spread", "controls", "acceptance")
    joint: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return replace(parts[0], **joint, gradients=parts[-1].gradients, warmup=warmup)


def _warm_up(walk: HMCKernel, nbeta: Tensor, clock: Clock) -> tuple[Replicas, Adaptation, Tensor, int]:
    """Move from the minimum until the chains are no longer on their way out; returns how many draws to keep, too.

    The loss settles long before the distance does, and falls or rises with it: chains that are still on their way are
    a few per cent off while R-hat sees nothing. A warm-up that is set has that many rounds, however far they lead.
    """
    theta, length = walk.target.theta, walk.plan.warmup
    fewest, most = tuning.STAGES, tuning.MOST_STAGES
    if walk.large:
        fewest, most = tuning.STAGES_LARGE, tuning.MOST_STAGES_LARGE
    adaptation = Adaptation(theta.new_full((1,), math.log(0.3)), walk.quadratic_scales(nbeta))
    state = walk.at(theta.new_zeros(1, walk.chains, len(theta)))
    end = math.inf if clock.seconds is None else clock.used + tuning.WARMUP_END * clock.left

    def over() -> bool:
        return clock.used > end if length is None else walk.rounds >= length

    history: list[float] = []
    while True:
        adaptation = walk.adapt(state, nbeta, adaptation) if history else adaptation
        rounds = min(tuning.STAGE_ROUNDS, math.inf if length is None else length - walk.rounds)
        state, adaptation, energies = walk.settle(state, nbeta, adaptation, int(rounds), over)
        draws = walk.adapt_length(adaptation)
        distances = (state.offset[0] ** 2).sum(-1).double()
        distance, error = float(distances.mean()), float(distances.std()) / math.sqrt(walk.chains)
        history.append(distance)
        if over():
            break
        if length is None and len(history) >= fewest:
            # Over the second half of the way so far: from one stage to the next a slow approach does not show.
            arrived = abs(distance - history[len(history) // 2 - 1]) <= max(tuning.ARRIVED * distance, error)
            if arrived or len(history) >= most:
                break
    return state, adaptation, energies, draws


def _record(
    walk: HMCKernel, state: Replicas, nbeta: Tensor, adaptation: Adaptation, main: int, stopping: Stopping
) -> tuple[Traces, Replicas]:
    """Finish the warm-up at all temperatures together, then keep draws until they are enough."""
    target, plan = walk.target, walk.plan
    warmup = (plan.warmup or 0) if plan.exchange else 0
    log_step = adaptation.log_step
    recorder = TraceRecorder(target, plan, nbeta, main)
    accepted = target.theta.new_zeros(len(nbeta))
    i = counted = 0

    def traces() -> Traces:
        centre = float(target.evaluate(recorder.mean_offset)[0])
        acceptance = array(accepted / max(counted, 1))
        return recorder.traces(walk.gradients, warmup, acceptance=acceptance, centre=centre)

    while True:
        wide = walk.wide(i)
        state, chance = walk.trajectory(state, nbeta, Adaptation(log_step, adaptation.scale), wide=wide)
        if i < warmup and not wide:
            log_step = adapt_step(log_step, chance - walk.aim, 1 / math.sqrt(1 + i / 2))
        for _ in range(2 if walk.collapsed is None else 1):
            state = walk.mode_jump(state, nbeta)
        state = walk.exchange(state, nbeta, i % 2)
        i += 1
        if i <= warmup:
            continue
        recorder.add(*state)
        accepted += 0 if wide else chance
        counted += not wide
        if stopping.enough(len(recorder), i, lambda: settled(traces(), plan)):
            return traces(), state


def _next_temperature(energies: Tensor, current: float, coldest: float, requested: float) -> float:
    """A fixed number of standard deviations of the energy further, never past the one that was requested."""
    finite = energies[torch.isfinite(energies)].double()
    low, high = torch.quantile(finite, finite.new_tensor([0.16, 0.84])) if len(finite) else (0, 0)
    width = max(float(high - low) / 2, 1e-290)
    following = current + tuning.LADDER_SPACING / width
    if current > 0:
        following = min(max(following, tuning.LEAST_FACTOR * current), 4 * current)
    following = min(following, coldest)
    return requested if current < requested < following else following
