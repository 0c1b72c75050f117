"""Exact conditional draws, block by block, where the loss is quadratic in each block with the others held fixed.

Linear regression, deep linear networks (a layer given the others) and products of powers of two are of this kind. A
whole layer is then drawn at once from a Gaussian, however long and curved the valley that all layers make together,
and draws hardly depend on one another; Hamiltonian trajectories (``hmc``) cannot leave the middle of such a valley
when it is cold. The blocks are not declared but found, by differences of the potential, and every draw is checked
against the quadratic it came from.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from strati.core.results import Tick, silent
from strati.core.rng import derive
from strati.landscape.llc.conditional import Conditional
from strati.landscape.llc.config import BUDGET, LLCConfig, Sampler
from strati.landscape.llc.estimate import settled, shows_limit
from strati.landscape.llc.posterior import LocalPosterior, rounding_limit
from strati.landscape.llc.sampling_plan import MOST_DRAWS, Clock, GradientCost
from strati.landscape.llc.traces import Traces

_RUNGS = (10.0, 1e2, 1e3, 1e4, 1e5, 1e6)  # of the temperature asked for; cold ones cost no more than hot ones
_COLDER = (1e7, 1e8)  # also for one block, which any temperature draws outright
_PER_CUBE = 2e-10  # seconds per multiply-add of a factorisation
_MOST_TIMES = 4  # the usual number of draws, for chains that have not mixed
_FEWEST = 4  # draws, however little time there is


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
    clock: Clock | None = None,
    *,
    extrapolated: bool = False,
) -> Traces | None:
    """Draw from the localised posterior at several temperatures at once, by conditionals of the blocks.

    Args:
        target: What to sample.
        blocks: As :func:`quadratic_blocks` gives them.
        config: ``chains``, ``draws``, ``seed``.
        nbetas: The temperatures, the one asked for first.
        tick: Called now and then.
        clock: The time that may be used; by default the cost model alone decides.
        extrapolated: Go on until the temperatures allow an extrapolation, too, up to the same limit.

    Returns:
        The traces, or ``None`` where a conditional turns out not to be the Gaussian it was taken for.

    Examples:
        >>> from strati.landscape.llc.posterior import local_posterior
        >>> seen = local_posterior(lambda w: (w**2).sum(), torch.zeros(3, dtype=torch.float64), 1.0)
        >>> traces = sample_gibbs(seen, [slice(0, 3)], LLCConfig(chains=64, draws=50), [1e4])
        >>> bool(abs(traces.lambda_trace().mean() - 1.5) < 0.1)
        True
    """
    clock = clock or Clock()
    sweep = sweep_cost(blocks, target.cost)
    chains, settle, draws = _amount(config, sweep, len(nbetas), clock)
    generator = torch.Generator().manual_seed(derive(config.seed, "gibbs"))
    nbeta = target.theta.new_tensor(list(nbetas))
    offset = _middle(target, nbeta, chains, generator)
    conditionals = [Conditional(target, range(block.start, block.stop)) for block in blocks]
    excess: list[Tensor] = []
    spread: list[Tensor] = []
    controls: list[Tensor] = []
    gradients, i = 0, 0

    def traces() -> Traces:
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
            warmup=settle,
        )

    began = time.perf_counter()
    goal, most = draws, draws if config.draws is not None else _MOST_TIMES * draws
    if clock.timed and config.draws is None:
        most = MOST_DRAWS * draws
    while True:
        for b in torch.randperm(len(blocks), generator=generator).tolist():
            quadratic = conditionals[b].look(offset, nbeta)
            if bool(quadratic.failed.any()):
                return None
            offset, value, slope, good = conditionals[b].draw(quadratic, offset, nbeta, generator)
            if not bool(good.all()):
                return None
            gradients += (conditionals[b].gradients + 1) * offset.shape[0] * chains
        if i >= settle:
            excess.append(value)
            if target.observer is not None:
                target.observer.observe(0, offset[0])
            spread.append((offset**2).sum(-1))
            controls.append(target.controls(offset, slope, nbeta).to(torch.float32))
        i += 1
        if i % 10 == 0:
            tick(f"sweep {i}")
        count = len(excess)
        if count >= most:
            break
        if clock.timed and config.draws is None:
            if count >= _FEWEST and clock.left < (time.perf_counter() - began) / i:
                break
        elif count == goal:
            drawn = traces()
            if settled(drawn, config) and (not extrapolated or shows_limit(drawn, config)):
                break
            goal = min(2 * goal, most)
    return traces()


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


def _amount(config: LLCConfig, sweep: GradientCost, rungs: int, clock: Clock) -> Amount:
    """What is set; of the rest the most that the cost model's budget allows, and no more than there is time for."""
    plans = [Amount(c, s, d) for c, s, d in ((64, 100, 100), (32, 80, 100), (16, 60, 80), (8, 30, 60))]
    allowed = min(BUDGET, clock.left)
    plan = next((a for a in plans if a.seconds(sweep, rungs) <= allowed), plans[-1]._replace(draws=30))
    chains = config.chains or plan.chains
    settle = config.warmup or next((a.settle for a in plans if a.chains <= chains), plans[-1].settle)
    return Amount(chains, settle, config.draws or plan.draws)


def affordable(config: LLCConfig, blocks: Sequence[slice], cost: GradientCost) -> bool:
    """Whether the smallest useful number of sweeps stays within a few times the budget."""
    return (
        Amount(config.chains or 8, 20, config.draws or 30).seconds(sweep_cost(blocks, cost), 1) <= 4 * BUDGET
    )
