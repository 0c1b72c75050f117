"""The moves of Hamiltonian Monte Carlo, all chains and temperatures in one batch.

A trajectory follows the Gaussian that the posterior would be, were the loss quadratic, exactly (a rotation of offset
and momentum), and is kicked by what the loss adds to it. Thousands of directions that the loss does not feel
then cost no accuracy, and the step is as long as the few that it does feel allow. Every move that is recorded leaves
the posterior invariant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from strati.core.rng import derive
from strati.landscape.llc.collapsed import CollapsedMoves
from strati.landscape.llc.config import DENSE_LIMIT, VIRIAL_LIMIT, LLCConfig
from strati.landscape.llc.posterior import LocalPosterior, adapted
from strati.landscape.llc.sampling_plan import SamplingPlan

_AIM = 0.8  # acceptance the step size is steered to
# The same for chains that start at the minimum of a small problem: curvature varies along valleys, and no other move
# frees a stuck chain. With thousands of directions no single one of them holds a chain up.
_LOCAL_AIM, _LARGE_AIM = 0.9, 0.7
_STIFFER = 2.0  # with thousands of directions: some are stiffer at any one place than over the places that are averaged
_LONGEST_STEP = math.pi / 2  # of a quarter turn: more is no farther
_LEFT_BEHIND = 5.0  # half-widths of the energy above the middle at which an annealed chain is replaced
_REACH = 3.0  # longest trajectory, in spreads of a direction
_FEWEST_DRAWS = 80
_HOPELESS = 6  # trajectories so many times too short do not mix: only enough draws are kept to say so

FEWEST_LONG = 50
"""Draws of trajectories that are many steps long, with thousands of parameters."""

HOPELESS_DRAWS = 20
"""Draws that are enough to say that chains do not mix."""

SETTLE = 20
"""Rounds at a temperature before its draws, without exchange."""


class Replicas(NamedTuple):
    """Replicas: offsets from the minimum ``(K, C, d)``, excess loss ``(K, C)`` and slope ``(K, C, d)``."""

    offset: Tensor
    excess: Tensor
    slope: Tensor


class Tuning(NamedTuple):
    """What is adapted per temperature: the logarithm of the step ``(K,)`` and the directions' scales ``(K, d)``."""

    log_step: Tensor
    scale: Tensor


class Walk:
    """The moves. Holds the random stream and counts gradients."""

    def __init__(self, target: LocalPosterior, config: LLCConfig, plan: SamplingPlan) -> None:
        self.target, self.config, self.plan = target, config, plan
        self.chains, self.longest = plan.chains, plan.leapfrog
        self.hopeless = False  # whether trajectories are far too short for the valleys
        self.large = target.size > DENSE_LIMIT
        # On its way out of the minimum every flat direction looks narrow, and is slower for it where it is so treated:
        # with thousands of them the quadratic is the better guide, where it is known.
        self.learn = not self.large or not bool(target.curvature.any())
        self.aim = _AIM if plan.exchange else _LARGE_AIM if self.large else _LOCAL_AIM
        self.generator = torch.Generator().manual_seed(derive(config.seed, "hmc"))
        self.device = target.theta.device
        self.gradients = self.rounds = 0
        self.few = target.size <= 2 * VIRIAL_LIMIT
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
        self, state: Replicas, nbeta: Tensor, tuning: Tuning, *, wide: bool
    ) -> tuple[Replicas, Tensor]:
        """One trajectory of random length; returns the new state and the mean acceptance per temperature."""
        temperatures, chains, size = state.offset.shape
        steps = 1 + int(self.uniform(1) * self.longest)
        u = self.uniform(temperatures, chains)
        jitter = 10.0 ** (0.5 - 2.5 * u) if wide else torch.exp(0.4 * (u - 0.5))
        step = (tuning.log_step.exp()[:, None] * jitter)[..., None]
        scale = tuning.scale[:, None, :]
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

    def leap(self, state: Replicas, nbeta: Tensor) -> Replicas:
        """What gets a few parameters from one part of a valley to another: collapsed moves, or factors of any size."""
        if not self.few:
            return state
        if self.collapsed is None:
            return self.rescale(state, nbeta)
        self.gradients += self.target.cost.leap * state.excess.numel()
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

    def rescue(self, state: Replicas, recent: Tensor) -> Replicas:
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
        stiffness = (_STIFFER if self.large else 1.0) * self.target.curvature
        return 1 / torch.sqrt(nbeta[:, None] * stiffness + self.target.gamma)

    def lengthen(self, tuning: Tuning) -> int:
        """Without exchange, fit trajectories to the step found, and return how many draws the budget then allows.

        A step of one crosses a quadratic valley; curved ones force short steps, and only long trajectories
        follow them.
        """
        if self.plan.exchange or self.config.leapfrog is not None:
            return self.plan.draws
        budget = (self.plan.draws + SETTLE) * (1 + self.plan.leapfrog) / 2
        most = 3 * self.plan.leapfrog
        needed = math.ceil(_REACH / float(tuning.log_step.exp().min()))
        self.hopeless = needed > _HOPELESS * most
        self.longest = min(max(needed, 3), most)
        affordable = int(2 * budget / (1 + self.longest)) - SETTLE
        draws = min(max(affordable, FEWEST_LONG if self.large else _FEWEST_DRAWS), 2 * self.plan.draws)
        return self.config.draws or (HOPELESS_DRAWS if self.hopeless else draws)

    def adapt(self, state: Replicas, nbeta: Tensor, tuning: Tuning) -> Tuning:
        """Move on in the coordinates of the curvature where the chains are, instead of that at the minimum."""
        target = adapted(self.target, state.offset[0])
        if target is None:
            return tuning
        self.target = target
        return tuning._replace(scale=self.quadratic_scales(nbeta))

    def settle(
        self,
        state: Replicas,
        nbeta: Tensor,
        tuning: Tuning,
        rounds: int,
        until: Callable[[], bool] | None = None,
    ) -> tuple[Replicas, Tuning, Tensor]:
        """Move at one temperature while the step is steered and, with ``learn``, the scales; returns the losses too."""
        log_step, offsets = tuning.log_step, []
        for i in range(rounds):
            if i and until is not None and until():
                break
            wide = self.wide(i)
            state, chance = self.trajectory(state, nbeta, Tuning(log_step, tuning.scale), wide=wide)
            if not wide:
                log_step = steered(log_step, chance - self.aim, 1 / (1 + i / 8))
            state = self.leap(state, nbeta)
            offsets.append(state)
        self.rounds += len(offsets)
        recent = offsets[len(offsets) // 3 :]
        scale = self.scales(torch.stack([s.offset for s in recent]), nbeta) if self.learn else tuning.scale
        return state, Tuning(log_step, scale), torch.stack([s.excess[0] for s in recent])


def steered(log_step: Tensor, surplus: Tensor, rate: float) -> Tensor:
    """A longer step where more moves are accepted than need be, a shorter one where fewer are."""
    return (log_step + rate * surplus).clamp(max=math.log(_LONGEST_STEP))


def _where(accept: Tensor, new: Replicas, old: Replicas) -> Replicas:
    wide = accept[..., None]
    return Replicas(
        torch.where(wide, new.offset, old.offset),
        torch.where(accept, new.excess, old.excess),
        torch.where(wide, new.slope, old.slope),
    )
