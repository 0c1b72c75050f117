"""Exact conditional draws of blocks of parameters in which the loss is quadratic, the others held fixed.

Linear regression, deep linear networks (a layer given the others) and products of powers of two are of this kind. A
whole layer is then drawn at once from a Gaussian, however long and curved the valley that all layers make together,
and draws hardly depend on one another (:func:`sample_gibbs`); Hamiltonian trajectories (``hmc``) cannot leave the
middle of such a valley when it is cold. Every draw is checked against the quadratic it came from.

Where the loss is quadratic in one block ``q`` given the rest ``r``, the integral of the posterior over ``q`` is known
in closed form, and wide: ``r`` moves in it by Metropolis steps of all sizes, and ``q`` is then drawn from its
Gaussian (:class:`CollapsedMoves`). Both together leave the posterior invariant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from strati.core.results import Tick, silent
from strati.core.rng import derive
from strati.landscape.llc import tuning
from strati.landscape.llc.estimate import settled, shows_limit
from strati.landscape.llc.posterior import LocalPosterior, TraceRecorder, replicas_per_pass
from strati.landscape.llc.sampling_plan import Clock, SamplingPlan, Stopping
from strati.landscape.llc.traces import Traces


class Drawn(NamedTuple):
    """Replicas whose block was drawn anew; ``good`` is false where it turned out to be no Gaussian."""

    offset: Tensor
    excess: Tensor
    slope: Tensor
    good: Tensor


class Quadratic(NamedTuple):
    """The loss over a block at one temperature: ``level + start . q + q H q / 2``, and the precision's factor.

    ``failed`` is true where the precision ``nbeta H + gamma`` is not positive.
    """

    level: Tensor
    start: Tensor
    hessian: Tensor
    factor: Tensor
    mean: Tensor
    failed: Tensor


class Conditional:
    """The loss as a function of one block, the rest held fixed: its level, slope and second derivatives."""

    def __init__(self, target: LocalPosterior, block: Sequence[int]) -> None:
        self.target = target
        self.block = torch.tensor(list(block), device=target.theta.device)
        width = len(self.block)
        # Slopes at the minimum's own block and one unit beside it in every direction: exact for a quadratic.
        here = target.theta[self.block]
        self.points = torch.cat([here[None], here + torch.eye(width, dtype=here.dtype, device=here.device)])
        passes = replicas_per_pass(target.potential) // (width + 1)
        self.together = max(1, min(passes, tuning.CONDITIONAL_NUMBERS // ((width + 1) * target.size)))
        order = torch.arange(target.size, device=here.device)
        order[self.block] = target.size + torch.arange(width, device=here.device)

        def value(part: Tensor, rest: Tensor) -> Tensor:
            return target.potential(torch.cat([rest, part])[order]).reshape(())

        self._each = vmap(grad_and_value(value))  # not nested: torch 2.13 batches some losses only once

    @property
    def gradients(self) -> int:
        """How many a look at one replica takes."""
        return len(self.points)

    def _slopes(self, points: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        """Slopes and values at every point for every replica, ``(replicas, points, ...)``."""
        shape = (len(rest), len(points))
        slopes, values = self._each(points.repeat(shape[0], 1), rest.repeat_interleave(shape[1], 0))
        return slopes.reshape(*shape, -1), values.reshape(shape)

    def look(self, offset: Tensor, nbeta: Tensor) -> Quadratic:
        """The quadratic about a zero offset of the block, for replicas ``(K, C, d)``."""
        points = (self.target.theta + offset).reshape(-1, self.target.size)
        parts = [self._slopes(self.points, r) for r in torch.split(points, self.together)]
        slopes, values = (torch.cat([p[i] for p in parts]).detach() for i in (0, 1))
        shape, width = offset.shape[:-1], len(self.points) - 1
        hessian = slopes[:, 1:] - slopes[:, :1]
        hessian = ((hessian + hessian.mT) / 2).reshape(*shape, width, width)
        start = slopes[:, 0].reshape(*shape, width)
        level = (values[:, 0] - self.target.baseline).reshape(shape)
        unit = torch.eye(width, dtype=offset.dtype, device=offset.device)
        precision = nbeta[:, None, None, None] * hessian + self.target.gamma * unit
        bad = ~torch.isfinite(precision).all(-1).all(-1)
        factor, failed = torch.linalg.cholesky_ex(torch.where(bad[..., None, None], unit, precision))
        failed = bad | (failed != 0)
        factor = torch.where(failed[..., None, None], unit, factor)
        mean = torch.cholesky_solve(-nbeta[:, None, None, None] * start[..., None], factor)[..., 0]
        return Quadratic(level, start, hessian, factor, mean, failed)

    def log_marginal(self, seen: Quadratic, offset: Tensor, nbeta: Tensor) -> Tensor:
        """The logarithm of the posterior with the block integrated out, up to a constant, ``(K, C)``."""
        others = offset.clone()
        others[..., self.block] = 0
        beta = nbeta[:, None]
        gain = -0.5 * beta * (seen.start * seen.mean).sum(-1)
        volume = seen.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        logarithm = -beta * seen.level - 0.5 * self.target.gamma * (others**2).sum(-1) + gain - volume
        return torch.where(seen.failed | ~torch.isfinite(logarithm), -torch.inf, logarithm)

    def draw(self, seen: Quadratic, offset: Tensor, nbeta: Tensor, generator: torch.Generator) -> Drawn:
        """The block drawn anew given the rest, and evaluated."""
        noise = torch.randn(seen.mean.shape, generator=generator, dtype=offset.dtype).to(offset.device)
        drawn = (
            seen.mean + torch.linalg.solve_triangular(seen.factor.mT, noise[..., None], upper=True)[..., 0]
        )
        new = offset.clone()
        new[..., self.block] = drawn
        excess, slope = self.target.evaluate(new)
        expected = seen.level + (drawn * (seen.start + 0.5 * (seen.hessian @ drawn[..., None])[..., 0])).sum(
            -1
        )
        rounding = torch.finfo(offset.dtype).eps * (seen.level.abs() + abs(self.target.baseline))
        misfit = nbeta[:, None] * ((excess - expected).abs() - tuning.MISFIT_ROUNDINGS * rounding)
        return Drawn(new, excess, slope, ~seen.failed & (misfit <= tuning.LARGEST_MISFIT))


def sample_gibbs(
    target: LocalPosterior, plan: SamplingPlan, tick: Tick = silent, clock: Clock | None = None
) -> Traces | None:
    """Draw from the localised posterior at all temperatures of a plan at once, by conditionals of its blocks.

    Args:
        target: What to sample.
        plan: How. Unless its temperatures were given, draws go on until they allow an extrapolation.
        tick: Called now and then.
        clock: The time that may be used; by default the plan alone decides.

    Returns:
        The traces, or ``None`` where a conditional turns out not to be the Gaussian it was taken for.

    Examples:
        >>> from strati.landscape.llc.config import LLCConfig
        >>> from strati.landscape.llc.sampling_plan import sampling_plan
        >>> config = LLCConfig(chains=64, draws=50, sampler="gibbs", ladder=False)
        >>> plan, target, *_ = sampling_plan(lambda w: (w**2).sum(), torch.zeros(3, dtype=torch.float64), config)
        >>> bool(abs(sample_gibbs(target, plan).lambda_trace().mean() - 1.5) < 0.1)
        True
    """
    clock = clock or Clock()
    generator = torch.Generator().manual_seed(derive(plan.seed, "gibbs"))
    nbeta = target.theta.new_tensor([plan.nbeta, *plan.ladder])
    offset = _middle(target, nbeta, plan.chains, generator)
    conditionals = [Conditional(target, range(*block)) for block in plan.blocks]
    recorder = TraceRecorder(target, plan, nbeta, 0)
    stopping = Stopping(plan, clock, clock.used + clock.left)
    extrapolated = bool(plan.ladder) and not plan.temperatures_given
    warmup = plan.warmup or 0
    gradients, i = 0, 0

    def settled_all() -> bool:
        traces = recorder.traces(gradients, warmup)
        return settled(traces, plan) and (not extrapolated or shows_limit(traces, plan))

    while True:
        for b in torch.randperm(len(conditionals), generator=generator).tolist():
            quadratic = conditionals[b].look(offset, nbeta)
            if bool(quadratic.failed.any()):
                return None
            offset, excess, slope, good = conditionals[b].draw(quadratic, offset, nbeta, generator)
            if not bool(good.all()):
                return None
            gradients += (conditionals[b].gradients + 1) * offset.shape[0] * plan.chains
        i += 1
        if i % 10 == 0:
            tick(f"sweep {i}")
        if i > warmup:
            recorder.add(offset, excess, slope)
            if stopping.enough(len(recorder), i, settled_all):
                return recorder.traces(gradients, warmup)


def _middle(target: LocalPosterior, nbeta: Tensor, chains: int, generator: torch.Generator) -> Tensor:
    """Where to begin: stiff directions at their spread, the flat ones at a common size that the loss allows.

    At the minimum itself the conditionals would start at the far end of a valley, one layer large and the others
    nothing, and forget it slowly.
    """
    noise = torch.randn(len(nbeta), chains, target.size, generator=generator, dtype=nbeta.dtype).to(
        nbeta.device
    )
    spread = 1 / torch.sqrt(nbeta[:, None] * target.curvature + target.gamma)
    stiff = nbeta[:, None] * target.curvature > target.gamma
    low, high = (
        nbeta.new_zeros(len(nbeta), chains),
        nbeta.new_ones(len(nbeta), chains),
    )  # share of the spread, in decades
    allowed = 0.5 * target.size
    for _ in range(12):
        share = 10.0 ** (-6 * (low + high) / 2).to(noise.dtype)
        offset = target.unrotate(noise * torch.where(stiff[:, None], 1.0, share[..., None]) * spread[:, None])
        excess, _ = target.evaluate(offset)
        fits = nbeta[:, None] * excess <= allowed
        low, high = torch.where(fits, low, (low + high) / 2), torch.where(fits, (low + high) / 2, high)
    return offset


class CollapsedMoves:
    """Moves of the parameters outside of a quadratic block, which is integrated out.

    Examples:
        >>> from strati.landscape.llc.posterior import local_posterior
        >>> target = local_posterior(lambda w: w[0] ** 2 * w[1] ** 4, torch.zeros(2, dtype=torch.float64), 1.0)
        >>> moves = CollapsedMoves(target, torch.Generator().manual_seed(0))
        >>> start = torch.zeros(1, 5, 2, dtype=torch.float64)
        >>> offset, excess, slope = moves.move(start, *target.evaluate(start), start.new_tensor([1e4]))
        >>> torch.equal(excess, target.evaluate(offset)[0])
        True
    """

    def __init__(self, target: LocalPosterior, generator: torch.Generator) -> None:
        self.target, self.generator = target, generator
        self.conditional = Conditional(target, target.quadratic)
        others = [i for i in range(target.size) if i not in target.quadratic]
        self.rest = torch.tensor(others, device=target.theta.device)
        self.round = 0

    def move(
        self, offset: Tensor, excess: Tensor, slope: Tensor, nbeta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One move of every replica ``(K, C, d)``: offsets, excess losses and slopes."""
        others = offset[..., self.rest]
        self.round += 1
        kinds = (
            (self._stretched, self._shifted, self._parted)
            if len(self.rest) > 1
            else (self._stretched, self._shifted)
        )
        proposed, jacobian = kinds[self.round % len(kinds)](others)
        new = offset.clone()
        new[..., self.rest] = proposed
        both = torch.cat([offset, new], dim=1)
        quadratic = self.conditional.look(both, nbeta)
        before, after = self.conditional.log_marginal(quadratic, both, nbeta).chunk(2, dim=1)
        log_ratio = after - before + jacobian
        moved = Quadratic(*(part.chunk(2, dim=1)[1] for part in quadratic))
        drawn = self.conditional.draw(moved, new, nbeta, self.generator)
        accept = (self._uniform(*log_ratio.shape).log() < log_ratio) & drawn.good
        wide = accept[..., None]
        return (
            torch.where(wide, drawn.offset, offset),
            torch.where(accept, drawn.excess, excess),
            torch.where(wide, drawn.slope, slope),
        )

    def _stretched(self, rest: Tensor) -> tuple[Tensor, Tensor]:
        """Some coordinates times factors of any size and sign."""
        shape = rest.shape
        mask = self._uniform(*shape) < self._uniform(*shape[:-1], 1)
        exponent = self._normal(*shape) * self._decades(tuning.STRETCH_DECADES, *shape[:-1], 1) * mask
        sign = 1.0 - 2.0 * (self._uniform(*shape) < 0.25).to(rest.dtype)
        return rest * torch.exp(exponent) * sign, exponent.sum(-1)

    def _shifted(self, rest: Tensor) -> tuple[Tensor, Tensor]:
        """Some coordinates moved by steps of any size."""
        shape = rest.shape
        mask = self._uniform(*shape) < self._uniform(*shape[:-1], 1)
        size = self._decades(tuning.SHIFT_DECADES, *shape[:-1], 1) / math.sqrt(self.target.gamma)
        return rest + self._normal(*shape) * size * mask, rest.new_zeros(shape[:-1])

    def _parted(self, rest: Tensor) -> tuple[Tensor, Tensor]:
        """One parameter nearer to, or farther from, another or its negative: units that do the same share a valley."""
        shape = rest.shape
        place = rest + self.target.theta[self.rest]
        first = (self._uniform(*shape[:-1]) * shape[-1]).long().clamp(max=shape[-1] - 1)
        apart = 1 + (self._uniform(*shape[:-1]) * (shape[-1] - 1)).long().clamp(max=shape[-1] - 2)
        one_place, other = first[..., None], ((first + apart) % shape[-1])[..., None]
        sign = 1.0 - 2.0 * (self._uniform(*shape[:-1], 1) < 0.5).to(rest.dtype)
        gap = place.gather(-1, one_place) - sign * place.gather(-1, other)
        exponent = self._normal(*shape[:-1], 1) * self._decades(tuning.STRETCH_DECADES, *shape[:-1], 1)
        return rest.scatter_add(-1, one_place, gap * torch.expm1(exponent)), exponent[..., 0]

    def _decades(self, between: tuple[float, float], *shape: int) -> Tensor:
        return 10.0 ** (between[0] + (between[1] - between[0]) * self._uniform(*shape))

    def _normal(self, *shape: int) -> Tensor:
        theta = self.target.theta
        return torch.randn(*shape, generator=self.generator, dtype=theta.dtype).to(theta.device)

    def _uniform(self, *shape: int) -> Tensor:
        theta = self.target.theta
        return torch.rand(*shape, generator=self.generator, dtype=theta.dtype).to(theta.device)
