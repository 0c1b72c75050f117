"""Exact conditional draws, block by block, where the loss is quadratic in each block with the others held fixed.

Linear regression, deep linear networks (a layer given the others) and products of powers of two are of this kind. A
whole layer is then drawn at once from a Gaussian, however long and curved the valley that all layers make together,
and draws hardly depend on one another; Hamiltonian trajectories (``hmc``) cannot leave the middle of such a valley
when it is cold. The blocks are not declared but found, by differences of the potential, and every draw is checked
against the quadratic it came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from strati.landscape.behaviour import Potential
from strati.landscape.sampling.budget import GradientCost
from strati.landscape.sampling.config import BUDGET, LLCConfig, Sampler
from strati.landscape.sampling.posterior import LocalPosterior, batchable, replicas_per_pass, rounding_limit
from strati.landscape.sampling.traces import Traces
from strati.rng import derive
from strati.types import Tick, silent

_MOST_BLOCKS = 12
_RUNGS = (10.0, 1e2, 1e3, 1e4, 1e5, 1e6)  # of the temperature asked for; cold ones cost no more than hot ones
_COLDER = (1e7, 1e8)  # also for one block, which any temperature draws outright
_PROBES = 3
_TOLERANCE = 1e-8  # of the spread of values on a line, for its third difference to count as zero
_ROUNDINGS = 1e3
_MISFIT = 1e-2  # of one, in nbeta L: beyond, a conditional is not the quadratic it was taken for
_PER_CUBE = 2e-10  # seconds per multiply-add of a factorisation
_MOST_DRAWS = 50.0  # times the usual number, however many seconds there are
_NUMBERS = 4_000_000  # held at once


def quadratic_blocks(
    potential: Potential, theta: Tensor, sizes: Sequence[int] | None = None
) -> tuple[slice, ...] | None:
    """Consecutive blocks of parameters in each of which the potential is quadratic, the others held fixed.

    Along lines inside a block, through places at a random distance from ``theta``, the third difference of a
    quadratic is zero. ``sizes`` proposes where blocks may end (the parameter tensors of a network); neighbours are
    joined as long as the joined block is quadratic, and without ``sizes`` the ends are searched for.

    Returns:
        The blocks in order, or ``None`` where some parameter is in none, or there are more than a dozen.

    Examples:
        >>> quadratic_blocks(lambda w: (w[0] * w[1] - w[2]) ** 2, torch.ones(3, dtype=torch.float64))
        (slice(0, 1, None), slice(1, 3, None))
        >>> quadratic_blocks(lambda w: (w**4).sum(), torch.zeros(2, dtype=torch.float64)) is None
        True
    """
    if theta.dtype != torch.float64 or not batchable(potential, theta):
        return None
    ends = list(np.cumsum(sizes)) if sizes is not None else list(range(1, theta.numel() + 1))
    probe = _Probe(potential, theta)
    blocks: list[slice] = []
    start = 0
    while start < theta.numel():
        ahead = [int(e) for e in ends if e > start]
        # The longest block from here: quadratic stays quadratic when shortened, so bisect.
        low, high = 0, len(ahead)
        while low < high:
            middle = (low + high + 1) // 2
            if probe.quadratic(slice(start, ahead[middle - 1])):
                low = middle
            else:
                high = middle - 1
        if low == 0 or len(blocks) == _MOST_BLOCKS:
            return None
        blocks.append(slice(start, ahead[low - 1]))
        start = blocks[-1].stop
    return tuple(blocks)


def sweep_cost(blocks: Sequence[slice], cost: GradientCost) -> GradientCost:
    """What a sweep over all blocks costs: a gradient per parameter, a factorisation per block."""
    widths = [b.stop - b.start for b in blocks]
    work = sum((w + 2) * cost.replica + w**3 * _PER_CUBE for w in widths)
    return GradientCost(3 * len(widths) * cost.call, work)


def sample_gibbs(
    target: LocalPosterior,
    blocks: Sequence[slice],
    config: LLCConfig,
    nbetas: Sequence[float],
    tick: Tick = silent,
) -> Traces | None:
    """Draw from the localised posterior at several temperatures at once, by conditionals of the blocks.

    Args:
        target: What to sample.
        blocks: As :func:`quadratic_blocks` gives them.
        config: ``chains``, ``draws``, ``seed``.
        nbetas: The temperatures, the one asked for first.
        tick: Called now and then.

    Returns:
        The traces, or ``None`` where a conditional turns out not to be the Gaussian it was taken for.

    Examples:
        >>> from strati.landscape.sampling.posterior import local_posterior
        >>> seen = local_posterior(lambda w: (w**2).sum(), torch.zeros(3, dtype=torch.float64), 1.0)
        >>> traces = sample_gibbs(seen, [slice(0, 3)], LLCConfig(chains=64, draws=50), [1e4])
        >>> bool(abs(traces.lambda_trace().mean() - 1.5) < 0.1)
        True
    """
    chains, settle, draws = _amount(config, sweep_cost(blocks, target.cost), len(nbetas))
    generator = torch.Generator().manual_seed(derive(config.seed, "gibbs"))
    nbeta = target.theta.new_tensor(list(nbetas))
    offset = _middle(target, nbeta, chains, generator)
    conditionals = [_Conditional(target, block) for block in blocks]
    excess, spread, controls, gradients = [], [], [], 0
    for i in range(settle + draws):
        for b in torch.randperm(len(blocks), generator=generator).tolist():
            drawn = conditionals[b].draw(offset, nbeta, generator)
            if drawn is None:
                return None
            offset, value, slope = drawn
            gradients += (blocks[b].stop - blocks[b].start + 2) * offset.shape[0] * chains
        if i >= settle:
            excess.append(value)
            spread.append((offset**2).sum(-1))
            controls.append(target.controls(offset, slope, nbeta).to(torch.float32))
        if i % 10 == 9:
            tick(f"sweep {i + 1}")
    return Traces(
        nbeta=nbeta.cpu().numpy(),
        main=0,
        gamma=target.gamma,
        baseline=target.baseline,
        excess=torch.stack(excess).permute(1, 2, 0).double().cpu().numpy(),
        spread=torch.stack(spread).permute(1, 2, 0).double().cpu().numpy(),
        controls=torch.stack(controls).permute(1, 2, 0, 3).double().cpu().numpy(),
        parameters=target.size,
        sampler=Sampler.GIBBS,
        acceptance=np.ones(len(nbetas)),
        gradients=gradients,
        global_start=False,
    )


def ladder(target: LocalPosterior, config: LLCConfig, nbeta: float, blocks: Sequence[slice]) -> list[float]:
    """The temperature asked for and, unless the caller wants none, colder ones as far as rounding allows."""
    if config.ladder is False:
        return [nbeta]
    coldest = config.coldest or rounding_limit(target)
    rungs = _RUNGS + (_COLDER if len(blocks) == 1 else ())
    return [nbeta, *(r * nbeta for r in rungs if r * nbeta <= coldest)]


class Amount(NamedTuple):
    """How much is drawn: chains, sweeps before the first draw is kept, draws per chain."""

    chains: int
    settle: int
    draws: int

    def seconds(self, sweep: GradientCost, rungs: int) -> float:
        """What the cost model expects."""
        return (self.settle + self.draws) * (sweep.call + rungs * self.chains * sweep.replica)


class _Probe:
    """Third differences of a potential along random lines inside a block."""

    def __init__(self, potential: Potential, theta: Tensor) -> None:
        self.potential, self.theta = potential, theta
        self.generator = torch.Generator().manual_seed(derive(0, "quadratic blocks", theta.numel()))
        self.size = max(float(theta.abs().mean()), 0.3)

    def quadratic(self, block: slice) -> bool:
        with torch.no_grad():
            return all(self._line(block) for _ in range(_PROBES))

    def _line(self, block: slice) -> bool:
        place = self.theta + self._normal(self.theta.numel())
        direction = torch.zeros_like(self.theta)
        direction[block] = self._normal(block.stop - block.start)
        values = np.array([float(self.potential(place + t * direction)) for t in range(-2, 3)])
        if not np.isfinite(values).all():
            return False
        third = np.abs(np.diff(values, n=3)).max()
        return bool(third <= _TOLERANCE * max(np.ptp(values), 1e-6 * np.abs(values).max(), 1e-280))

    def _normal(self, count: int) -> Tensor:
        return self.size * torch.randn(count, generator=self.generator, dtype=self.theta.dtype).to(self.theta)


class _Conditional:
    """The loss as a function of one block, the rest held fixed: its level, slope and second derivatives."""

    def __init__(self, target: LocalPosterior, block: slice) -> None:
        self.target, self.block = target, block
        width = block.stop - block.start
        # Slopes at the minimum's own block and one unit beside it in every direction: exact for a quadratic.
        here = target.theta[block]
        self.points = torch.cat([here[None], here + torch.eye(width, dtype=here.dtype, device=here.device)])
        passes = replicas_per_pass(target.potential) // (width + 1)
        self.together = max(1, min(passes, _NUMBERS // ((width + 1) * target.size)))

        def value(part: Tensor, rest: Tensor) -> Tensor:
            whole = torch.cat([rest[: block.start], part, rest[block.stop :]])
            return target.potential(whole).reshape(())

        self._slopes = vmap(vmap(grad_and_value(value), in_dims=(0, None)), in_dims=(None, 0))

    def quadratic(self, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Excess loss ``(K, C)``, slope ``(K, C, w)`` and second derivatives at a zero offset of the block."""
        rest = (self.target.theta + offset).reshape(-1, self.target.size)
        parts = [self._slopes(self.points, r) for r in torch.split(rest, self.together)]
        slopes, values = (torch.cat([p[i] for p in parts]).detach() for i in (0, 1))
        hessian = slopes[:, 1:] - slopes[:, :1]
        shape = offset.shape[:-1]
        width = len(self.points) - 1
        symmetric = ((hessian + hessian.mT) / 2).reshape(*shape, width, width)
        level = (values[:, 0] - self.target.baseline).reshape(shape)
        return level, slopes[:, 0].reshape(*shape, width), symmetric

    def draw(
        self, offset: Tensor, nbeta: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The block drawn anew given the rest: offset, excess loss, slope; ``None`` where it is no Gaussian."""
        level, start, hessian = self.quadratic(offset)
        beta = nbeta[:, None, None, None]
        precision = beta * hessian + self.target.gamma * torch.eye(
            start.shape[-1], dtype=offset.dtype, device=offset.device
        )
        factor, failed = torch.linalg.cholesky_ex(precision)
        if bool((failed != 0).any()) or not bool(torch.isfinite(precision).all()):
            return None
        mean = torch.cholesky_solve(-beta * start[..., None], factor)
        noise = torch.randn(mean.shape, generator=generator, dtype=offset.dtype).to(offset.device)
        drawn = (mean + torch.linalg.solve_triangular(factor.mT, noise, upper=True))[..., 0]
        new = offset.clone()
        new[..., self.block] = drawn
        excess, slope = self.target.evaluate(new)
        expected = level + (drawn * (start + 0.5 * (hessian @ drawn[..., None])[..., 0])).sum(-1)
        rounding = torch.finfo(offset.dtype).eps * (level.abs() + abs(self.target.baseline))
        misfit = nbeta[:, None] * ((excess - expected).abs() - _ROUNDINGS * rounding)
        return None if bool((misfit > _MISFIT).any()) else (new, excess, slope)


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


def _amount(config: LLCConfig, sweep: GradientCost, rungs: int) -> Amount:
    """What is set, for the rest the most that the cost model's budget allows."""
    plans = [
        Amount(c, s, d)
        for c, s, d in ((64, 100, 100), (32, 80, 100), (16, 60, 80), (16, 30, 60), (8, 20, 60))
    ]
    own = [Amount(config.chains or a.chains, a.settle, config.draws or a.draws) for a in plans]
    allowed = config.seconds or BUDGET
    chosen = next(
        (a for a in own if a.seconds(sweep, rungs) <= allowed), own[-1]._replace(draws=config.draws or 30)
    )
    if config.seconds is None or config.draws is not None:
        return chosen
    spare = max(1.0, allowed / chosen.seconds(sweep, rungs))
    return chosen._replace(draws=int(chosen.draws * min(spare, _MOST_DRAWS)))


def affordable(config: LLCConfig, blocks: Sequence[slice], cost: GradientCost) -> bool:
    """Whether the smallest useful number of sweeps stays within a few times the budget."""
    return (
        Amount(config.chains or 8, 20, config.draws or 30).seconds(sweep_cost(blocks, cost), 1) <= 4 * BUDGET
    )
