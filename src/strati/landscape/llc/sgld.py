"""Stochastic-gradient Langevin dynamics on minibatches, for models whose data do not fit a full pass.

``theta <- theta - (step/2) P (nbeta grad L_b + gamma (theta - theta*)) + sqrt(step P) xi`` with ``xi`` from
``noise``. There is no Metropolis test, so the step heats: in the stationary state ``<delta . F> = d + (step/4) <F .
P F>`` with ``F`` the noisy force, and ``(step/8) <F . P nbeta grad L_b>`` is taken off the average (for a quadratic
direction of curvature ``k`` this undoes the factor ``1/(1 - step k/4)``, and the minibatches' noise with it). The
baseline is the loss of each fixed minibatch at the given parameters, computed once.

``P`` is held fixed, so it has no drift term. For ``sgld`` it is the inverse of the posterior's curvature, each linear
layer's taken for a Kronecker product (``preconditioner``), so that flat directions mix as fast as stiff ones; it is 1
where the step is set, beyond 50,000 parameters, and for networks of other layers. For ``rmsprop-sgld`` it is the
inverse root-mean-square gradient (Li et al. 2016).
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from strati.core.results import Tick, silent
from strati.core.rng import derive
from strati.evaluate.models import output_tensor
from strati.landscape.llc.config import BUDGET, LLCConfig, Sampler
from strati.landscape.llc.diagnostics import ess, rhat
from strati.landscape.llc.minibatches import baselines_of, batches_of, default_batch, shuffled
from strati.landscape.llc.noise import Noise
from strati.landscape.llc.posterior import localised
from strati.landscape.llc.preconditioner import Rotation, kronecker
from strati.landscape.llc.sampling_plan import Clock, gradient_cost
from strati.landscape.llc.traces import Observer, PositionSums, Traces
from strati.landscape.objective import FlatModel, Inputs, Objective

_SHARE_OF_STABLE = (
    0.25  # of the largest stable step, 4/k: inflates the stiffest direction by a third before correction
)
_PIECE = 1 << 16  # parameters moved at a time: what a step reads and writes of them stays in the cache
TOGETHER = 50_000  # parameters up to which chains share one batched pass
_RUNAWAY = 10.0  # times the squared distance of the localisation alone: the chains diverge
_RESTARTS = 8  # of chains that diverge in the warm-up, each with a quarter of the step
_DAMPING = 0.1  # of the mean curvature, in the preconditioner
_FIRST = 500  # draws per chain to begin with
_LEAST_STEPS = 600  # however dear they are
_WARMUP, _LEAST_WARMUP = 100, 10  # steps before the first that is recorded, in which the step is calibrated
_WARMUP_SHARE = 0.2  # of the time
_CALIBRATION = 13  # gradients of a power iteration
_BLOCK = 30  # steps of one group of chains before it is the next one's turn
_TIMED_BLOCK = 6  # the same between two looks at the clock; divisible by three
_POSITION_STRIDE = 5  # of steps whose positions are added up
_BUDGET = 4 * BUDGET  # seconds of the cost model, as for other networks whose curvature is not known
_AGREE, _NEARLY, _ENOUGH = 1.02, 1.1, 200.0  # R-hat of loss and distance, effective sample size: long enough


def sample_sgld(
    objective: Objective,
    config: LLCConfig,
    nbeta: float,
    tick: Tick = silent,
    *,
    by_curvature: bool | None = None,
    clock: Clock | None = None,
    observer: Observer | None = None,
) -> Traces:
    """Draw by (RMSprop-)SGLD at one temperature; the kept losses are corrected for the step's heating.

    Args:
        objective: A network, loss and data.
        config: ``batch``, ``step``, ``chains``, ``draws``, ``warmup``, ``sampler``, ``seed``.
        nbeta: Inverse temperature.
        tick: Called after each group of chains.
        by_curvature: Whether ``sgld`` moves by the inverse of the curvature; by default where the step is not set.
        clock: The time that may be used; by default the cost model alone decides.
        observer: Sees every fifth kept draw.

    Examples:
        >>> from strati.landscape.objective import behavioural_loss
        >>> loss = behavioural_loss(torch.nn.Linear(2, 1), torch.randn(64, 2))
        >>> settings = LLCConfig(sampler="sgld", batch=32, chains=2, draws=20)
        >>> sample_sgld(loss, settings, 20.0).excess.shape
        (1, 2, 20)
    """
    clock = clock or Clock()
    chains = config.chains or 4
    config = replace(config, batch=config.batch or default_batch(objective, nbeta))
    batches = batches_of(objective, config)
    baselines = baselines_of(objective, batches)
    steps = Steps(objective, config, nbeta, by_curvature=by_curvature)
    group = chains if objective.flat.size <= TOGETHER else 1
    positions = PositionSums(_BLOCK)
    began = clock.used
    walks = [
        _Walks(
            steps,
            batches,
            baselines,
            min(group, chains - start),
            derive(config.seed, "sgld", start),
            positions,
            None if observer is None else functools.partial(observer.observe, start),
        )
        for start in range(0, chains, group)
    ]
    warmup = config.warmup or _WARMUP
    if clock.timed and config.warmup is None:
        # The power iteration of each group's calibration has taken 13 gradients.
        pace = (clock.used - began) / _CALIBRATION
        warmup = int(np.clip(_WARMUP_SHARE * clock.left / max(pace, 1e-9), _LEAST_WARMUP, _WARMUP))
    for walk in walks:
        walk.settle(warmup)
    draws = _draw(walks, config, _affordable(objective, config, chains), clock, tick, observer)
    excess, spread = _kept(walks, draws)
    mean = steps.position(positions.mean_after(draws // 2))
    return Traces(
        nbeta=np.array([nbeta]),
        main=0,
        gamma=steps.gamma,
        baseline=float(np.mean(baselines)),
        excess=excess[None],
        spread=spread[None],
        controls=np.zeros((1, *excess.shape, 0)),
        parameters=objective.flat.size,
        sampler=config.sampler,
        acceptance=np.ones(1),
        gradients=sum(w.chains * w.steps_done for w in walks),
        global_start=False,
        centre=_centre(objective, batches, baselines, mean),
        warmup=warmup,
    )


def _draw(
    walks: list[_Walks],
    config: LLCConfig,
    most: int,
    clock: Clock,
    tick: Tick,
    observer: Observer | None = None,
) -> int:
    """Move the chains and return how many draws of each to keep: the last two thirds of the steps.

    Without a number of draws or a limit of time the length is doubled until the chains agree and stand still, or the
    steps that are affordable have been taken.
    """
    if config.draws is not None:
        _observe_from(walks, config.draws // 2)
        _advance(walks, config.draws + config.draws // 2)
        return config.draws
    if clock.timed:
        began, taken = clock.used, 0
        _observe_from(walks, None)
        while taken == 0 or clock.left > (clock.used - began) / taken * _TIMED_BLOCK:
            _advance(walks, _TIMED_BLOCK)
            taken += _TIMED_BLOCK
            if taken == _BLOCK:  # by now the pace is known: observe the last two thirds
                _observe_from(walks, taken + int(clock.left * taken / (clock.used - began)) // 3)
            if taken % (50 * _TIMED_BLOCK) == 0:
                tick(f"{2 * taken // 3} draws per chain")
        return 2 * taken // 3
    draws = min(_FIRST, 2 * most // 3)
    _observe_from(walks, draws // 2)
    _advance(walks, draws + draws // 2)
    tick(f"{draws} draws per chain")
    while 3 * draws <= most:
        excess, spread = _kept(walks, draws)
        if not np.isfinite(excess).all() or _mixed(excess, spread):
            break
        if observer is not None:
            observer.restart()
        _advance(walks, 2 * draws + draws - (draws + draws // 2))
        draws *= 2
        tick(f"{draws} draws per chain")
    return draws


def _observe_from(walks: list[_Walks], step: int | None) -> None:
    for walk in walks:
        walk.observe_from = step


def _advance(walks: list[_Walks], count: int) -> None:
    for start in range(0, count, _BLOCK):
        for walk in walks:
            walk.record(min(_BLOCK, count - start))


def _kept(walks: list[_Walks], draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Corrected excess losses and squared distances ``(chains, draws)`` after the first third of the steps."""
    rows = slice(draws // 2, draws // 2 + draws)
    excess = np.concatenate([torch.stack(walk.excess[rows], dim=1).cpu().numpy() for walk in walks])
    spread = np.concatenate([torch.stack(walk.spread[rows], dim=1).cpu().numpy() for walk in walks])
    return np.where(np.isfinite(excess), excess, math.inf), spread


def _mixed(excess: np.ndarray, spread: np.ndarray) -> bool:
    """Whether the chains agree, hold enough independent draws, and no longer move away from the minimum."""
    loss, distance, size = rhat(excess), rhat(spread), ess(excess)
    if loss is None or distance is None or size is None:
        return False
    half = excess.shape[1] // 2
    early, late = spread[:, :half].mean(), spread[:, half:].mean()
    return loss <= _AGREE and distance <= _NEARLY and size >= _ENOUGH and abs(late - early) <= 0.1 * late


def _affordable(objective: Objective, config: LLCConfig, chains: int) -> int:
    """Steps per chain within the cost model's budget."""
    size = min(config.batch or 256, objective.rows)
    cost = gradient_cost(objective.batch(torch.arange(size)), objective.flat.theta, turning=0)
    return max(_LEAST_STEPS, int(_BUDGET / (cost.call / chains + cost.replica) / chains))


def _centre(
    objective: Objective, batches: list[tuple[Inputs, Tensor]], baselines: list[float], mean: Tensor
) -> float | None:
    """The loss at the mean of the draws, less that at the given parameters, over the same data."""
    if not bool(torch.isfinite(mean).all()):
        return None
    flat = objective.flat
    with torch.no_grad():
        there = [float(objective.loss(flat(flat.theta + mean, x), y)) for x, y in batches]
    return float(np.mean(np.array(there) - np.array(baselines)))


_Piece = tuple[Tensor, Tensor, Tensor, Tensor | None, slice]


class Steps:
    """One Langevin step for a group of chains, with a calibrated step size and preconditioner."""

    def __init__(
        self, objective: Objective, config: LLCConfig, nbeta: float, *, by_curvature: bool | None = None
    ) -> None:
        self.objective, self.config, self.nbeta = objective, config, nbeta
        self.gamma = localised(config, objective, objective.flat.theta).gamma or 1.0
        self.theta = objective.flat.theta
        self.precondition = config.sampler == Sampler.RMSPROP
        self.scale: Tensor | None = None
        self.rotation: Rotation | None = None
        by_curvature = config.step is None if by_curvature is None else by_curvature
        if by_curvature and not self.precondition and self.theta.numel() <= TOGETHER:
            self._use_curvature()
        self.step = config.step if config.step is not None else 0.0
        self._copy: _FlatCopy | None = None
        self._views: tuple[Tensor, list[list[_Piece]]] | None = None
        self._held: tuple[Tensor, int] | None = None  # the chain whose place the copy holds, and its version
        ends = np.cumsum([0, *objective.flat.sizes]).tolist()
        self._places = [slice(a, b) for a, b in pairwise(ends)]

    def _use_curvature(self) -> None:
        """Move in coordinates in which the curvature is about diagonal, by its inverse."""
        factors = kronecker(self.objective) if self.objective.name is not None else None
        if factors is not None:
            self.rotation, curvature = factors
            # Where the chains go, directions that are flat at the minimum are not: the mean curvature bounds them.
            self.scale = 1 / (self.nbeta * (curvature + _DAMPING * curvature.mean()) + self.gamma)

    def position(self, coordinates: Tensor) -> Tensor:
        """Offsets from the given parameters, out of the coordinates that are moved."""
        return coordinates if self.rotation is None else self.rotation.unrotate(coordinates)

    def calibrate(self, batch: tuple[Inputs, Tensor], generator: torch.Generator) -> None:
        """Set the step to a quarter of the largest stable one, from the stiffest curvature of one batch."""
        if self.precondition:
            _, slope = self.gradient(self._jolt(generator)[None], batch)
            root = torch.sqrt(slope[0] ** 2 + (slope[0] ** 2).mean() * 1e-2) + torch.finfo(slope.dtype).tiny
            self.scale = (root.mean() / root).clamp(max=100.0)
        if self.config.step is None:
            self.step = self.stable(torch.zeros_like(self.theta), batch, generator)

    def recalibrate(self, offset: Tensor, batch: tuple[Inputs, Tensor], generator: torch.Generator) -> None:
        """Shorten the step where the chains have come to places of larger curvature."""
        if self.config.step is None:
            self.step = min(self.step, self.stable(offset, batch, generator))

    def stable(self, offset: Tensor, batch: tuple[Inputs, Tensor], generator: torch.Generator) -> float:
        """A quarter of the largest stable step at some offset."""
        stiffest = self.nbeta * self.stiffest(offset, batch, generator) + self.slowest
        return 4 * _SHARE_OF_STABLE / stiffest

    @property
    def slowest(self) -> float:
        """The rate, per unit of the step, at which a direction that the loss does not feel relaxes."""
        return self.gamma * (1.0 if self.scale is None else float(self.scale.max()))

    def gradient(self, offset: Tensor, batch: tuple[Inputs, Tensor]) -> tuple[Tensor, Tensor]:
        """Loss ``(C,)`` and its gradient ``(C, d)`` at the chains' offsets; valid until the next call."""
        x, target = batch
        offset = self.position(offset)
        if offset.shape[0] == 1:
            value, parts = self._one(offset, batch)
            return value, self._turned(torch.cat([p.reshape(-1) for p in parts])[None])

        def loss(theta: Tensor) -> Tensor:
            return self.objective.loss(self.objective.flat(theta, x), target)

        leaf = (self.theta + offset).detach().requires_grad_(True)
        value = vmap(loss)(leaf)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), self._turned(slope)

    def _turned(self, slope: Tensor) -> Tensor:
        return slope if self.rotation is None else self.rotation.rotate(slope)

    def advance(self, offset: Tensor, batch: tuple[Inputs, Tensor], noise: Noise) -> tuple[Tensor, Tensor]:
        """Move ``offset`` in place; returns the batch's loss before the move and the heating to take off."""
        if self.theta.numel() > TOGETHER:
            value, slopes = self._one(offset, batch)
            return value, (self.step * self.nbeta / 8) * self._moved(offset, slopes, noise)
        value, slope = self.gradient(offset, batch)
        self._shake(offset, noise)
        return value, (self.step * self.nbeta / 8) * self._push(offset, slope)

    def _one(self, offset: Tensor, batch: tuple[Inputs, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self._copy is None:
            self._copy = _FlatCopy(self.objective.flat)
        if self._held is None or self._held[0] is not offset or self._held[1] != offset._version:
            torch.add(self.theta, offset[0], out=self._copy.values)
            self._held = None
        return self._copy.gradient(*batch, self.objective.loss)

    def _moved(self, offset: Tensor, slopes: tuple[Tensor, ...], noise: Noise) -> Tensor:
        """Pull, noise and gradient of one chain piece by piece, each piece in the cache for all of it.

        The network's weights are set to the new place on the way, so that the next pass need not go over them.
        Returns ``slope . P slope``.
        """
        pull, root, rate = 0.5 * self.step * self.gamma, math.sqrt(self.step), 0.5 * self.step * self.nbeta
        powers = []
        for slope, pieces in zip(slopes, self._pieces(offset), strict=True):
            flat = slope.reshape(-1)  # may copy, so one tensor at a time
            for here, theta, values, scale, part in pieces:
                force = scaled = flat[part]
                if scale is None:
                    noise.add(here.mul_(1 - pull), root)
                else:
                    scaled = force * scale
                    noise.add(here.mul_(1 - pull * scale), root, scale.sqrt())
                here.sub_(scaled, alpha=rate)
                powers.append(torch.dot(scaled, force))  # unlike vecdot it makes no vector of products
                torch.add(theta, here, out=values)
        power = torch.stack(powers).sum()[None]
        self._held = (offset, offset._version)
        return power

    def _pieces(self, offset: Tensor) -> list[list[_Piece]]:
        """By parameter: views of a chain's offsets, of the given weights and of the network's own, made once."""
        if self._views is None or self._views[0] is not offset:
            assert self._copy is not None
            pieces: list[list[_Piece]] = []
            for place in self._places:
                cuts = [slice(k, min(k + _PIECE, place.stop)) for k in range(place.start, place.stop, _PIECE)]
                pieces.append(
                    [
                        (
                            offset[0, cut],
                            self.theta[cut],
                            self._copy.values[cut],
                            None if self.scale is None else self.scale[cut],
                            slice(cut.start - place.start, cut.stop - place.start),
                        )
                        for cut in cuts
                    ]
                )
            self._views = (offset, pieces)
        return self._views[1]

    def _shake(self, offset: Tensor, noise: Noise) -> None:
        """The localisation's pull and the noise."""
        pull, root = 0.5 * self.step * self.gamma, math.sqrt(self.step)
        if self.rotation is not None and self.scale is not None:
            # Drawn in the network's own coordinates: networks that differ little then move alike.
            increment = torch.zeros_like(offset)
            noise.add(increment, root)
            offset.mul_(1 - pull * self.scale).addcmul_(self.rotation.rotate(increment), self.scale.sqrt())
            return
        for start in range(0, offset.shape[1], _PIECE):
            piece = slice(start, start + _PIECE)
            if self.scale is None:
                noise.add(offset[:, piece].mul_(1 - pull), root)
            else:
                scale = self.scale[piece]
                noise.add(offset[:, piece].mul_(1 - pull * scale), root, scale.sqrt())

    def _push(self, offset: Tensor, slope: Tensor) -> Tensor:
        """The gradient's part of the step; returns ``slope . P slope``.

        The localisation's part of the force is no part of the heating: it does not raise the loss.
        """
        scaled = slope if self.scale is None else slope * self.scale
        offset.sub_(scaled, alpha=0.5 * self.step * self.nbeta)
        power: Tensor = torch.linalg.vecdot(scaled, slope)
        return power

    def _normal(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.theta.shape, generator=generator, dtype=self.theta.dtype).to(
            self.theta.device
        )

    def _jolt(self, generator: torch.Generator) -> Tensor:
        scale = 1e-3 * float(self.theta.std()) if self.theta.numel() > 1 else 1e-3
        return max(scale, 1e-6) * self._normal(generator)

    def stiffest(
        self, offset: Tensor, batch: tuple[Inputs, Tensor], generator: torch.Generator, rounds: int = 12
    ) -> float:
        """Largest curvature of the preconditioned loss by power iteration on differences of gradients."""
        root = 1.0 if self.scale is None else self.scale.sqrt()
        direction = self._normal(generator)
        centre = self.gradient(offset[None], batch)[1][0].clone()
        precision = torch.finfo(self.theta.dtype).eps
        reach = precision ** (1 / 3) * (1 + float(self.theta.norm()))
        value = 0.0
        for _ in range(rounds):
            direction = direction / direction.norm()
            ahead = self.gradient((offset + reach * root * direction)[None], batch)[1][0]
            direction = root * (ahead - centre) / reach
            value = float(direction.norm())
            if value == 0:
                break
        return value


class _FlatCopy:
    """A module whose parameters live in one vector (``values``), without copying the weights twice."""

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
        self, x: Inputs, target: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss ``(1,)`` at :attr:`values` and its gradient by parameter, in the flat vector's order."""
        value = loss(output_tensor(self.module(**x) if isinstance(x, Mapping) else self.module(x)), target)
        return value.detach()[None], torch.autograd.grad(value, self.parameters, materialize_grads=True)


class _Walks:
    """Chains that share one batched pass: where they are, their random streams, what they have seen."""

    def __init__(
        self,
        steps: Steps,
        batches: list[tuple[Inputs, Tensor]],
        baselines: list[float],
        chains: int,
        seed: int,
        positions: PositionSums,
        observe: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.generator = generator = torch.Generator().manual_seed(seed)
        self.steps, self.batches, self.baselines, self.chains = steps, batches, baselines, chains
        self.noise = Noise(derive(seed, "noise"))
        steps.calibrate(batches[0], generator)
        self.offset = steps.theta.new_zeros(chains, steps.theta.numel())
        self.order = shuffled(len(batches), generator)
        self.positions, self.observe = positions, observe
        self.observe_from: int | None = None
        self.excess: list[Tensor] = []
        self.spread: list[Tensor] = []
        self.steps_done = 0

    def settle(self, count: int) -> None:
        """Steps of which nothing is kept, and after which the step is fitted to where the chains are.

        A step that was calibrated and lets the chains diverge is shortened, and they start anew.
        """
        for _ in range(_RESTARTS):
            for i in range(count):
                if i == count // 2 and self._bounded():
                    self.steps.recalibrate(self.offset[0], self.batches[0], self.generator)
                self.steps.advance(self.offset, self.batches[next(self.order)], self.noise)
            self.steps_done += count
            if self.steps.config.step is not None or self._bounded():
                break
            self.steps.step /= 4
            self.offset.zero_()

    def _bounded(self) -> bool:
        """Whether the chains are no farther out than the localisation alone would let them be, by a margin."""
        distance = torch.linalg.vecdot(self.offset, self.offset)
        return bool((distance * self.steps.gamma <= _RUNAWAY * self.offset.shape[1]).all())

    def record(self, count: int) -> None:
        """Take steps and keep the corrected excess loss and squared distance of each."""
        for _ in range(count):
            index = next(self.order)
            step = len(self.excess)
            self.spread.append(torch.linalg.vecdot(self.offset, self.offset).double())
            if step % _POSITION_STRIDE == 0:
                self.positions.add(step, self.offset)
                if self.observe is not None and self.observe_from is not None and step >= self.observe_from:
                    self.observe(self.steps.position(self.offset))
            value, heating = self.steps.advance(self.offset, self.batches[index], self.noise)
            self.excess.append(value.double() - self.baselines[index] - heating.double())
        self.steps_done += count
