"""Stochastic-gradient Langevin dynamics on minibatches, for models whose data do not fit a full pass.

``theta <- theta - (step/2) P (nbeta grad L_b + gamma (theta - theta*)) + sqrt(step P) (xi + xi')/2`` with normal
``xi``, and the ``xi'`` of one step is the ``xi`` of the next (Leimkuhler and Matthews 2013). There is no Metropolis
test. In a direction of curvature ``k = nbeta h + gamma`` whose force has noise of variance ``s`` the variance is
``1/k + (step s/4) / (k (1 - step k/4))``: a step of finite length alone does not heat a quadratic loss, but the noise
of minibatches does. To first order in the step ``nbeta L`` is too large by ``(step/8) s nbeta h / k``. With ``G =
nbeta grad L_b`` and ``s = r nbeta h`` the average of ``(step/8) r/(1 + r) G . P (G - r gamma delta)`` is just that,
and is taken off. For a log-likelihood the covariance of a gradient is the Hessian over the number of predictions, so
``r = nbeta / B`` for ``B`` predictions in a minibatch (less the share of the data that it holds). Where they fit into
memory, the gradients of the minibatches at the given parameters are control variates: each one's difference from
their mean is taken off its gradient, and ``r`` falls by the measured share of the noise that this removes. The
baseline is the loss of each fixed minibatch at the given parameters, computed once. Minibatches are drawn with
replacement: in epochs the next one is anti-correlated with those that brought the chain where it is, which raises its
loss by as much as the noise does.

``P`` is held fixed while draws are kept, so it has no drift term. For ``sgld`` it is the inverse of the posterior's
curvature, each linear layer's taken for a Kronecker product (``posterior.kronecker``), so that flat directions mix as
fast as stiff ones; it is 1 where the step is set, beyond 50,000 parameters, and for networks of other layers. For
``rmsprop-sgld`` it is the inverse root-mean-square gradient (Li et al. 2016).
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from strati.core.results import Tick, silent
from strati.core.rng import derive
from strati.evaluate.models import output_tensor
from strati.landscape.llc import tuning
from strati.landscape.llc.config import Sampler
from strati.landscape.llc.posterior import Rotation, kronecker
from strati.landscape.llc.sampling_plan import Clock, SamplingPlan
from strati.landscape.llc.traces import Observer, PositionSums, Traces, ess, rhat
from strati.landscape.objective import FlatModel, Inputs, LossName, Objective

Batch = tuple[Inputs, Tensor]
NOISE_BATCHES = 4
"""Minibatches whose gradients at one place show how much noise the control variates leave."""


def sample_sgld(
    objective: Objective,
    plan: SamplingPlan,
    tick: Tick = silent,
    *,
    clock: Clock | None = None,
    observer: Observer | None = None,
) -> Traces:
    """Draw by (RMSprop-)SGLD at one temperature; the kept losses are corrected for the step's heating.

    Args:
        objective: A network, loss and data.
        plan: How.
        tick: Called after each group of chains.
        clock: The time that may be used; by default the plan alone decides.
        observer: Sees every fifth kept draw.

    Examples:
        >>> from strati.landscape.llc.config import LLCConfig
        >>> from strati.landscape.llc.sampling_plan import sampling_plan
        >>> from strati.landscape.objective import behavioural_loss
        >>> loss = behavioural_loss(torch.nn.Linear(2, 1), torch.randn(64, 2))
        >>> config = LLCConfig(sampler="sgld", batch=32, chains=2, draws=20, nbeta=20.0)
        >>> sample_sgld(loss, sampling_plan(loss, loss.flat.theta, config).plan).excess.shape
        (1, 2, 20)
    """
    clock = clock or Clock()
    batches = batches_of(objective, plan)
    baselines = _losses(objective, batches, objective.flat.theta)
    kernel = SGLDKernel(objective, plan)
    size = plan.chains if objective.flat.size <= tuning.TOGETHER else 1
    positions = PositionSums(tuning.SGLD_BLOCK)
    began = clock.used
    kernel.calibrate(batches, torch.Generator().manual_seed(derive(plan.seed, "sgld step")))
    groups = [
        ChainGroup(
            kernel,
            batches,
            baselines,
            min(size, plan.chains - start),
            derive(plan.seed, "sgld", start),
            positions,
            None if observer is None else functools.partial(observer.observe, start),
        )
        for start in range(0, plan.chains, size)
    ]
    warmup = plan.warmup or tuning.SGLD_WARMUP
    if clock.timed and "warmup" not in plan.fixed:
        pace = len(groups) * (clock.used - began) / tuning.CALIBRATION_GRADIENTS
        affordable = tuning.SGLD_WARMUP_SHARE * clock.left / max(pace, 1e-9)
        warmup = int(np.clip(affordable, tuning.LEAST_WARMUP, warmup))
    for group in groups:
        group.settle(warmup)
    draws = _draw(groups, plan, warmup, clock, tick, observer)
    excess, spread = _kept(groups, draws)
    mean = kernel.position(positions.mean_after(_skipped(draws, warmup)))
    centre = None
    if bool(torch.isfinite(mean).all()):
        there = _losses(objective, batches, objective.flat.theta + mean)
        centre = float(np.mean(np.array(there) - np.array(baselines)))
    return Traces(
        nbeta=np.array([plan.nbeta]),
        main=0,
        gamma=plan.gamma,
        baseline=float(np.mean(baselines)),
        excess=excess[None],
        spread=spread[None],
        controls=np.zeros((1, *excess.shape, 0)),
        parameters=objective.flat.size,
        sampler=plan.sampler,
        acceptance=np.ones(1),
        gradients=kernel.gradients,
        global_start=False,
        centre=centre,
        warmup=warmup,
        step=kernel.step,
        plan=plan,
    )


def _skipped(draws: int, warmup: int) -> int:
    """Steps after the warm-up that are not kept: warm-up and these are a third of all steps, or more."""
    return max(0, draws // 2 - warmup)


def _draw(
    groups: list[ChainGroup],
    plan: SamplingPlan,
    warmup: int,
    clock: Clock,
    tick: Tick,
    observer: Observer | None = None,
) -> int:
    """Move the chains and return how many draws of each to keep: the last two thirds of the steps with the warm-up.

    Without a number of draws or a limit of time the length is doubled until the chains agree and stand still, or the
    steps that are affordable have been taken.
    """
    if clock.timed and "draws" not in plan.fixed:
        began, taken = clock.used, 0
        _observe_from(groups, None)
        while taken == 0 or clock.left > (clock.used - began) / taken * tuning.TIMED_BLOCK:
            _advance(groups, tuning.TIMED_BLOCK)
            taken += tuning.TIMED_BLOCK
            if taken == tuning.SGLD_BLOCK:  # by now the pace is known: observe the last two thirds
                steps = taken + int(clock.left * taken / (clock.used - began))
                _observe_from(groups, max(taken, (steps + warmup) // 3 - warmup))
            if taken % (50 * tuning.TIMED_BLOCK) == 0:
                tick(f"{taken} steps per chain")
        if (
            taken > 2 * warmup and (taken + warmup) % 3 == 2
        ):  # a number of steps that some number of draws asks for
            _advance(groups, 1)
            taken += 1
        return min(taken, (2 * (taken + warmup) + 1) // 3)
    draws = plan.draws
    _observe_from(groups, _skipped(draws, warmup))
    _advance(groups, draws + _skipped(draws, warmup))
    tick(f"{draws} draws per chain")
    while 2 * draws <= plan.most_draws:
        excess, spread = _kept(groups, draws)
        if not np.isfinite(excess).all() or _mixed(excess, spread):
            break
        if observer is not None:
            observer.restart()
        taken = draws + _skipped(draws, warmup)
        draws *= 2
        _advance(groups, draws + _skipped(draws, warmup) - taken)
        tick(f"{draws} draws per chain")
    return draws


def _observe_from(groups: list[ChainGroup], step: int | None) -> None:
    for group in groups:
        group.observe_from = step


def _advance(groups: list[ChainGroup], count: int) -> None:
    for start in range(0, count, tuning.SGLD_BLOCK):
        for group in groups:
            group.record(min(tuning.SGLD_BLOCK, count - start))


def _kept(groups: list[ChainGroup], draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Corrected excess losses and squared distances ``(chains, draws)``, the last of all."""
    rows = slice(-draws, None)
    excess = np.concatenate([torch.stack(group.excess[rows], dim=1).cpu().numpy() for group in groups])
    spread = np.concatenate([torch.stack(group.spread[rows], dim=1).cpu().numpy() for group in groups])
    return np.where(np.isfinite(excess), excess, math.inf), spread


def _mixed(excess: np.ndarray, spread: np.ndarray) -> bool:
    """Whether the chains agree, hold enough independent draws, and no longer move away from the minimum."""
    loss, distance, size = rhat(excess), rhat(spread), ess(excess)
    if loss is None or distance is None or size is None:
        return False
    half = excess.shape[1] // 2
    early, late = spread[:, :half].mean(), spread[:, half:].mean()
    agree = loss <= tuning.SGLD_RHAT and distance <= tuning.SGLD_SPREAD_RHAT
    return agree and size >= tuning.SGLD_ESS and abs(late - early) <= 0.1 * late


def batches_of(objective: Objective, plan: SamplingPlan) -> list[Batch]:
    """The data cut once into minibatches of one size, in a random order of the rows."""
    rows = objective.rows
    size = min(plan.batch or rows, rows)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(derive(plan.seed, "batches")))

    def take(index: Tensor) -> Batch:
        x = objective.x
        part = {k: v[index] for k, v in x.items()} if isinstance(x, Mapping) else x[index]
        return part, objective.target[index]

    return [take(order[i : i + size]) for i in range(0, rows - size + 1, size)]


def _losses(objective: Objective, batches: list[Batch], theta: Tensor) -> list[float]:
    with torch.no_grad():
        return [float(objective.loss(objective.flat(theta, x), y)) for x, y in batches]


def noise_ratio(objective: Objective, plan: SamplingPlan) -> float:
    """Variance of the force's noise over ``nbeta h``.

    It is 0 on all data and for a behavioural loss, which has none at its minimum, ``nbeta`` over the predictions of a
    minibatch for cross-entropy, and taken for 1 where it is not known.
    """
    size = min(plan.batch or objective.rows, objective.rows)
    others = 1 - size / objective.rows
    if objective.behavioural:
        return 0.0
    if objective.name is LossName.CROSS_ENTROPY:
        return others * plan.nbeta * objective.rows / (size * objective.count)
    return 1.0 if others else 0.0


class SGLDKernel:
    """One Langevin step for a group of chains, with a calibrated step size and preconditioner.

    Chains are offsets ``(C, d)`` from the given parameters, in the coordinates of ``rotation``.
    """

    def __init__(self, objective: Objective, plan: SamplingPlan) -> None:
        self.objective, self.plan = objective, plan
        self.nbeta, self.gamma, self.step = plan.nbeta, plan.gamma, plan.step or 0.0
        self.theta = objective.flat.theta
        self.scale: Tensor | None = None
        self.rotation: Rotation | None = None
        self._copy: _FlatCopy | None = None
        self.gradients, self.fitted = 0, False
        self.noise = noise_ratio(objective, plan)
        self.controls: list[Tensor] = []
        if plan.precondition and self.theta.numel() <= tuning.TOGETHER and objective.name is not None:
            factors = kronecker(objective)
            if factors is not None:
                self.rotation, curvature = factors
                # Where the chains go, directions that are flat at the minimum are not: the mean curvature bounds them.
                self.scale = 1 / (self.nbeta * (curvature + tuning.DAMPING * curvature.mean()) + self.gamma)

    def position(self, coordinates: Tensor) -> Tensor:
        """Offsets from the given parameters, out of the coordinates that are moved."""
        return coordinates if self.rotation is None else self.rotation.unrotate(coordinates)

    def calibrate(self, batches: list[Batch], generator: torch.Generator) -> None:
        """Set the step to a share of the largest stable one, from the stiffest curvature of one batch.

        Also compute the control variates, if the minibatches are few and their gradients have noise.
        """
        batch, zero = batches[0], torch.zeros_like(self.theta)
        if self.plan.sampler == Sampler.RMSPROP:
            size = 1e-3 * float(self.theta.std()) if self.theta.numel() > 1 else 1e-3
            _, slope = self.gradient(max(size, 1e-6) * self._normal(generator)[None], batch)
            root = torch.sqrt(slope[0] ** 2 + (slope[0] ** 2).mean() * 1e-2) + torch.finfo(slope.dtype).tiny
            self.scale = (root.mean() / root).clamp(max=100.0)
        if self.plan.step is None:
            self.step = self.stable(zero, batch, generator)
        few = len(batches) <= tuning.MOST_CONTROLS and len(batches) * len(zero) <= tuning.CONTROL_NUMBERS
        if self.noise > 0 and few:
            slopes = [self.gradient(zero[None], each)[1][0].clone() for each in batches]
            mean = torch.stack(slopes).mean(0)
            self.controls = [slope.sub_(mean) for slope in slopes]

    def recalibrate(self, offset: Tensor, batches: list[Batch], generator: torch.Generator) -> None:
        """Where the first chains have arrived, shorten the step if need be, and measure what the controls remove."""
        if self.fitted:
            return
        self.fitted = True
        if self.plan.step is None:
            self.step = min(self.step, self.stable(offset, batches[0], generator))
        if self.controls:
            slopes = torch.stack(
                [self.gradient(offset[None], batch)[1][0] for batch in batches[:NOISE_BATCHES]]
            )
            controls = torch.stack(self.controls[:NOISE_BATCHES])
            root = 1.0 if self.scale is None else self.scale.sqrt()
            remaining, all_noise = (float((root * s).var(0).sum()) for s in (slopes - controls, slopes))
            if remaining < all_noise:
                self.noise *= remaining / all_noise
            else:
                self.controls = []

    def stable(self, offset: Tensor, batch: Batch, generator: torch.Generator) -> float:
        """A share of the largest stable step at some offset."""
        stiffest = self.nbeta * self.stiffest(offset, batch, generator) + self.slowest
        return 4 * tuning.SHARE_OF_STABLE / stiffest

    @property
    def slowest(self) -> float:
        """The rate, per unit of the step, at which a direction that the loss does not feel relaxes."""
        return self.gamma * (1.0 if self.scale is None else float(self.scale.max()))

    def gradient(self, offset: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss ``(C,)`` and its gradient ``(C, d)`` at the chains' offsets."""
        x, target = batch
        self.gradients += len(offset)
        offset = self.position(offset)
        if offset.shape[0] == 1:
            if self._copy is None:
                self._copy = _FlatCopy(self.objective.flat)
            torch.add(self.theta, offset[0], out=self._copy.values)
            value, slope = self._copy.gradient(x, target, self.objective.loss)
        else:
            leaf = (self.theta + offset).detach().requires_grad_(True)
            value = vmap(lambda t: self.objective.loss(self.objective.flat(t, x), target))(leaf)
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), slope if self.rotation is None else self.rotation.rotate(slope)

    def advance(
        self,
        offset: Tensor,
        batch: Batch,
        generator: torch.Generator,
        *,
        control: Tensor | None = None,
        observe: Callable[[Tensor], None] = lambda offset: None,
    ) -> tuple[Tensor, Tensor]:
        """Move ``offset`` in place: half of the noise, the force, the same half again.

        Noise is drawn in the network's own coordinates: networks that differ little then move alike.

        Args:
            offset: Where the chains are.
            batch: A minibatch.
            generator: Of the noise.
            control: What is taken off its gradient.
            observe: Called between noise and force: that is where the chains sample the posterior.

        Returns:
            The batch's loss there, and the heating to take off.
        """
        noise = torch.randn(offset.shape, generator=generator, dtype=offset.dtype).to(offset.device)
        if self.scale is not None:
            noise = noise if self.rotation is None else self.rotation.rotate(noise)
            noise *= self.scale.sqrt()
        offset.add_(noise, alpha=0.5 * math.sqrt(self.step))
        observe(offset)
        value, slope = self.gradient(offset, batch)
        if control is not None:
            slope -= control
        scaled = slope if self.scale is None else slope * self.scale
        pulled = self.noise * self.gamma / self.nbeta
        heating = torch.linalg.vecdot(scaled, slope) - pulled * torch.linalg.vecdot(scaled, offset)
        pull = 0.5 * self.step * self.gamma
        offset.mul_(1 - pull * (1.0 if self.scale is None else self.scale))
        offset.sub_(scaled, alpha=0.5 * self.step * self.nbeta).add_(noise, alpha=0.5 * math.sqrt(self.step))
        return value, (self.step * self.nbeta / 8) * self.noise / (1 + self.noise) * heating

    def _normal(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.theta.shape, generator=generator, dtype=self.theta.dtype).to(
            self.theta.device
        )

    def stiffest(self, offset: Tensor, batch: Batch, generator: torch.Generator, rounds: int = 12) -> float:
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
    ) -> tuple[Tensor, Tensor]:
        """Loss ``(1,)`` at :attr:`values` and its gradient ``(1, d)``."""
        value = loss(output_tensor(self.module(**x) if isinstance(x, Mapping) else self.module(x)), target)
        slopes = torch.autograd.grad(value, self.parameters, materialize_grads=True)
        return value.detach()[None], torch.cat([slope.reshape(-1) for slope in slopes])[None]


class ChainGroup:
    """Chains that share one batched pass: where they are, their random streams, their losses and distances."""

    def __init__(
        self,
        kernel: SGLDKernel,
        batches: list[Batch],
        baselines: list[float],
        chains: int,
        seed: int,
        positions: PositionSums,
        observe: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.kernel, self.batches, self.baselines, self.chains = kernel, batches, baselines, chains
        self.noise = torch.Generator().manual_seed(derive(seed, "noise"))
        self.offset = kernel.theta.new_zeros(chains, kernel.theta.numel())
        self.positions, self.observe = positions, observe
        self.observe_from: int | None = None
        self.excess: list[Tensor] = []
        self.spread: list[Tensor] = []

    def settle(self, count: int) -> None:
        """Steps of which nothing is kept, and after which the step is fitted to where the chains are.

        A step that was calibrated and lets the chains diverge is shortened, and they start anew.
        """
        for _ in range(tuning.RESTARTS):
            for i in range(count):
                if i == count // 2 and self._bounded():
                    self.kernel.recalibrate(self.offset[0], self.batches, self.generator)
                self._advance(self._next())
            if self.kernel.plan.step is not None or self._bounded():
                break
            self.kernel.step /= 4
            self.offset.zero_()

    def _next(self) -> int:
        return int(torch.randint(len(self.batches), (1,), generator=self.generator))

    def _bounded(self) -> bool:
        """Whether the chains are no farther out than the localisation alone would let them be, by a margin."""
        distance = torch.linalg.vecdot(self.offset, self.offset)
        return bool((distance * self.kernel.gamma <= tuning.RUNAWAY * self.offset.shape[1]).all())

    def _advance(
        self, index: int, observe: Callable[[Tensor], None] = lambda offset: None
    ) -> tuple[Tensor, Tensor]:
        control = self.kernel.controls[index] if self.kernel.controls else None
        batch = self.batches[index]
        return self.kernel.advance(self.offset, batch, self.noise, control=control, observe=observe)

    def record(self, count: int) -> None:
        """Take steps and keep the corrected excess loss and squared distance of each."""
        for _ in range(count):
            index = self._next()
            value, heating = self._advance(index, self._see)
            self.excess.append(value.double() - self.baselines[index] - heating.double())

    def _see(self, offset: Tensor) -> None:
        step = len(self.excess)
        self.spread.append(torch.linalg.vecdot(offset, offset).double())
        if step % tuning.POSITION_STRIDE == 0:
            self.positions.add(step, offset)
            if self.observe is not None and self.observe_from is not None and step >= self.observe_from:
                self.observe(self.kernel.position(offset))
