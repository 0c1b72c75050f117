"""Stochastic-gradient Langevin dynamics on minibatches, for models whose data do not fit a full pass.

``theta <- theta - (step/2) P (nbeta grad L_b + gamma (theta - theta*)) + sqrt(step P) xi`` with ``xi`` from
``noise``. There is no Metropolis test, so the step heats: in the stationary state ``<delta . F> = d + (step/4) <F .
P F>`` with ``F`` the noisy force, and ``(step/8) <F . P nbeta grad L_b>`` is taken off the average (for a quadratic
direction of curvature ``k`` this undoes the factor ``1/(1 - step k/4)``, and the minibatches' noise with it). The
baseline is the loss of each fixed minibatch at the given parameters, computed once.

``P`` is 1 (``sgld``) or the inverse root-mean-square gradient (``rmsprop-sgld``, Li et al. 2016) found in the
warm-up and then held fixed, which makes its drift term zero.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from strati.landscape.behaviour import FlatModel, Inputs, Objective, as_output
from strati.landscape.sampling.config import LLCConfig, Sampler
from strati.landscape.sampling.noise import Noise
from strati.landscape.sampling.posterior import localised
from strati.landscape.sampling.traces import Traces
from strati.rng import derive
from strati.types import Tick, silent

_SHARE_OF_STABLE = (
    0.25  # of the largest stable step, 4/k: inflates the stiffest direction by a third before correction
)
_PIECE = 1 << 16  # parameters moved at a time: what a step reads and writes of them stays in the cache
_TOGETHER = 50_000  # parameters up to which chains share one batched pass


def sample_sgld(objective: Objective, config: LLCConfig, nbeta: float, tick: Tick = silent) -> Traces:
    """Draw by (RMSprop-)SGLD at one temperature; the kept losses are corrected for the step's heating.

    Args:
        objective: A network, loss and data.
        config: ``batch``, ``step``, ``chains``, ``draws``, ``warmup``, ``sampler``, ``seed``.
        nbeta: Inverse temperature.
        tick: Called after each group of chains.

    Examples:
        >>> from strati.landscape.behaviour import behavioural_loss
        >>> loss = behavioural_loss(torch.nn.Linear(2, 1), torch.randn(64, 2))
        >>> settings = LLCConfig(sampler="sgld", batch=32, chains=2, draws=20)
        >>> sample_sgld(loss, settings, 20.0).excess.shape
        (1, 2, 20)
    """
    chains, draws = config.chains or 4, config.draws or 500
    batches = _batches(objective, config)
    baselines = _baselines(objective, batches)
    steps = Steps(objective, config, nbeta)
    group = chains if objective.flat.size <= _TOGETHER else 1
    parts = []
    for start in range(0, chains, group):
        generator = torch.Generator().manual_seed(derive(config.seed, "sgld", start))
        noise = Noise(derive(config.seed, "noise", start))
        parts.append(_chain(steps, batches, baselines, draws, min(group, chains - start), (generator, noise)))
        tick(f"chains {start + 1} to {min(start + group, chains)}")
    excess, spread = (np.concatenate([p[i] for p in parts], axis=1) for i in (0, 1))
    return Traces(
        nbeta=np.array([nbeta]),
        main=0,
        gamma=steps.gamma,
        baseline=float(np.mean(baselines)),
        excess=excess,
        spread=spread,
        controls=np.zeros((*excess.shape, 0)),
        parameters=objective.flat.size,
        sampler=config.sampler,
        acceptance=np.ones(1),
        gradients=chains * (draws + config.warmup),
        global_start=False,
    )


class Steps:
    """One Langevin step for a group of chains, with a calibrated step size and preconditioner."""

    def __init__(self, objective: Objective, config: LLCConfig, nbeta: float) -> None:
        self.objective, self.config, self.nbeta = objective, config, nbeta
        self.gamma = localised(config, objective, objective.flat.theta).gamma or 1.0
        self.theta = objective.flat.theta
        self.precondition = config.sampler == Sampler.RMSPROP
        self.scale: Tensor | None = None
        self.step = config.step if config.step is not None else 0.0
        self._copy: _FlatCopy | None = None
        ends = np.cumsum([0, *objective.flat.sizes]).tolist()
        self._places = [slice(a, b) for a, b in pairwise(ends)]

    def calibrate(self, batch: tuple[Inputs, Tensor], generator: torch.Generator) -> None:
        """Set the step to a quarter of the largest stable one, from the stiffest curvature of one batch."""
        if self.precondition:
            _, slope = self.gradient(self._jolt(generator)[None], batch)
            root = torch.sqrt(slope[0] ** 2 + (slope[0] ** 2).mean() * 1e-2) + torch.finfo(slope.dtype).tiny
            self.scale = (root.mean() / root).clamp(max=100.0)
        if self.config.step is None:
            stiffest = self.nbeta * self._stiffest(batch, generator) + self.gamma
            self.step = 4 * _SHARE_OF_STABLE / stiffest

    def gradient(self, offset: Tensor, batch: tuple[Inputs, Tensor]) -> tuple[Tensor, Tensor]:
        """Loss ``(C,)`` and its gradient ``(C, d)`` at the chains' offsets; valid until the next call."""
        x, target = batch
        if offset.shape[0] == 1:
            value, parts = self._one(offset, batch)
            return value, torch.cat([p.reshape(-1) for p in parts])[None]

        def loss(theta: Tensor) -> Tensor:
            return self.objective.loss(self.objective.flat(theta, x), target)

        leaf = (self.theta + offset).detach().requires_grad_(True)
        value = vmap(loss)(leaf)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), slope

    def advance(self, offset: Tensor, batch: tuple[Inputs, Tensor], noise: Noise) -> tuple[Tensor, Tensor]:
        """Move ``offset`` in place; returns the batch's loss before the move and the heating to take off."""
        if self.theta.numel() > _TOGETHER:  # tensor by tensor: a large model needs no flat gradient
            value, found = self._one(offset, batch)
            slopes = list(zip(self._places, found, strict=True))
        else:
            value, slope = self.gradient(offset, batch)
            slopes = [(slice(None), slope)]
        self._shake(offset, noise)
        power = functools.reduce(operator.add, [self._push(offset, slope, place) for place, slope in slopes])
        return value, (self.step * self.nbeta / 8) * power

    def _one(self, offset: Tensor, batch: tuple[Inputs, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self._copy is None:
            self._copy = _FlatCopy(self.objective.flat)
        return self._copy.gradient(self.theta, offset[0], *batch, self.objective.loss)

    def _shake(self, offset: Tensor, noise: Noise) -> None:
        """The localisation's pull and the noise."""
        pull, root = 0.5 * self.step * self.gamma, math.sqrt(self.step)
        for start in range(0, offset.shape[1], _PIECE):
            piece = slice(start, start + _PIECE)
            if self.scale is None:
                noise.add(offset[:, piece].mul_(1 - pull), root)
            else:
                scale = self.scale[piece]
                noise.add(offset[:, piece].mul_(1 - pull * scale), root, scale.sqrt())

    def _push(self, offset: Tensor, slope: Tensor, place: slice) -> Tensor:
        """The gradient's part of the step, on some of the parameters; returns ``slope . P slope``.

        The localisation's part of the force is no part of the heating: it does not raise the loss.
        """
        slope = slope.reshape(len(offset), -1)  # may copy, so one tensor at a time
        scaled = slope if self.scale is None else slope * self.scale[place]
        offset[:, place].sub_(scaled, alpha=0.5 * self.step * self.nbeta)
        if len(slope) == 1:
            return torch.dot(scaled[0], slope[0])[None]  # unlike vecdot it makes no vector of products
        power: Tensor = torch.linalg.vecdot(scaled, slope)
        return power

    def _jolt(self, generator: torch.Generator) -> Tensor:
        scale = 1e-3 * float(self.theta.std()) if self.theta.numel() > 1 else 1e-3
        return max(scale, 1e-6) * torch.randn(self.theta.shape, generator=generator, dtype=self.theta.dtype)

    def _stiffest(self, batch: tuple[Inputs, Tensor], generator: torch.Generator, rounds: int = 12) -> float:
        """Largest curvature of the preconditioned loss by power iteration on differences of gradients."""
        root = 1.0 if self.scale is None else self.scale.sqrt()
        direction = torch.randn(self.theta.shape, generator=generator, dtype=self.theta.dtype)
        centre = self.gradient(torch.zeros_like(self.theta)[None], batch)[1][0].clone()
        precision = torch.finfo(self.theta.dtype).eps
        reach = precision ** (1 / 3) * (1 + float(self.theta.norm()))
        value = 0.0
        for _ in range(rounds):
            direction = direction / direction.norm()
            ahead = self.gradient((reach * root * direction)[None], batch)[1][0]
            direction = root * (ahead - centre) / reach
            value = float(direction.norm())
            if value == 0:
                break
        return value


class _FlatCopy:
    """A module whose parameters live in one vector, without copying the weights twice."""

    def __init__(self, flat: FlatModel) -> None:
        self.values = flat.theta.clone()
        values = flat.split(self.values)
        memo: dict[int, Any] = {}  # what a deep copy takes instead of copying the weights
        self.parameters: list[torch.nn.Parameter] = []
        for name, parameter in flat.module.named_parameters():
            held = values[name] if name in values else parameter.detach()
            memo[id(parameter)] = torch.nn.Parameter(held, requires_grad=name in values)
            if name in values:
                self.parameters.append(memo[id(parameter)])
        self.module = copy.deepcopy(flat.module, memo).to(flat.dtype)

    def gradient(
        self,
        theta: Tensor,
        offset: Tensor,
        x: Inputs,
        target: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss ``(1,)`` and its gradient by parameter, in the flat vector's order."""
        torch.add(theta, offset, out=self.values)
        value = loss(as_output(self.module(**x) if isinstance(x, Mapping) else self.module(x)), target)
        return value.detach()[None], torch.autograd.grad(value, self.parameters, materialize_grads=True)


def _chain(
    steps: Steps,
    batches: list[tuple[Inputs, Tensor]],
    baselines: list[float],
    draws: int,
    chains: int,
    chance: tuple[torch.Generator, Noise],
) -> tuple[np.ndarray, np.ndarray]:
    """Corrected excess loss and squared distance, each ``(1, chains, draws)``; a diverged chain is infinite."""
    generator, noise = chance
    steps.calibrate(batches[0], generator)
    offset = torch.zeros(chains, steps.theta.numel(), dtype=steps.theta.dtype)
    order = _order(len(batches), generator)
    for _ in range(max(steps.config.warmup, draws // 2)):
        steps.advance(offset, batches[next(order)], noise)
    excess = torch.empty(draws, chains, dtype=torch.float64)
    spread = torch.empty(draws, chains, dtype=torch.float64)
    for i in range(draws):
        index = next(order)
        spread[i] = torch.linalg.vecdot(offset, offset)
        value, heating = steps.advance(offset, batches[index], noise)
        excess[i] = value - baselines[index] - heating
    excess = torch.where(torch.isfinite(excess), excess, torch.full_like(excess, math.inf))
    return excess.T[None].numpy(), spread.T[None].numpy()


def _batches(objective: Objective, config: LLCConfig) -> list[tuple[Inputs, Tensor]]:
    """The data cut once into minibatches of one size, in a random order of the rows."""
    rows = objective.rows
    size = min(config.batch, rows)
    generator = torch.Generator().manual_seed(derive(config.seed, "batches"))
    order = torch.randperm(rows, generator=generator)
    cuts = [order[i : i + size] for i in range(0, rows - size + 1, size)]

    def take(index: Tensor) -> tuple[Inputs, Tensor]:
        x = objective.x
        part = {k: v[index] for k, v in x.items()} if isinstance(x, Mapping) else x[index]
        return part, objective.target[index]

    return [take(c) for c in cuts]


def _baselines(objective: Objective, batches: list[tuple[Inputs, Tensor]]) -> list[float]:
    flat = objective.flat
    loss: Callable[[Tensor, Tensor], Tensor] = objective.loss
    with torch.no_grad():
        return [float(loss(flat(flat.theta, x), y)) for x, y in batches]


def _order(count: int, generator: torch.Generator) -> Iterator[int]:
    """Batch numbers, shuffled anew each epoch."""
    while True:
        yield from torch.randperm(count, generator=generator).tolist()
