"""One function decides how a posterior is sampled; the :class:`SamplingPlan` it returns is executed and kept.

By default a cost model that counts operations limits the amount, so that it is the same on every machine. With
``seconds`` a :class:`Clock` limits it, and the numbers that ran are recorded.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from strati.core.errors import BadInputError
from strati.landscape.llc import tuning
from strati.landscape.llc.config import FULL_DATA, LLCConfig, Sampler
from strati.landscape.llc.loss_structure import GradientCost, gradient_cost, quadratic_blocks
from strati.landscape.llc.posterior import LocalPosterior, default_gamma, local_posterior, rounding_limit
from strati.landscape.objective import Objective, Potential

NOT_QUADRATIC = "the loss is not quadratic in each layer given the others; use hmc"

_SETTABLE = ("chains", "draws", "warmup", "leapfrog", "batch", "step")


class Clock:
    """A budget of wall-clock time that starts when the object is made; without seconds it never ends.

    Examples:
        >>> Clock(None).left
        inf
        >>> 0 < Clock(5.0).left <= 5.0
        True
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._start = time.perf_counter()

    @property
    def timed(self) -> bool:
        """Whether there is a limit."""
        return self.seconds is not None

    @property
    def used(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return math.inf if self.seconds is None else self.seconds - self.used


@dataclass(frozen=True)
class SamplingPlan:
    """All that is decided before the first draw.

    Attributes:
        sampler: The sampler that runs, never ``auto``.
        nbeta: Inverse temperature of the estimate.
        gamma: Localisation.
        chains: Independent chains.
        draws: Kept draws per chain, after which it is first checked whether the chains have mixed.
        most_draws: No more than these are kept.
        warmup: Rounds before the first kept draw; ``None`` means until the chains have arrived.
        ladder: Colder temperatures, ascending; with ``tempered-hmc`` only the coldest, as those before it follow from
            the energies.
        leapfrog: Longest trajectory of HMC in steps, at first.
        batch: Rows per minibatch of SGLD.
        step: Step of SGLD; ``None`` means that it is calibrated.
        precondition: Whether SGLD moves by the inverse of the curvature.
        blocks: First and last parameter of the blocks that ``gibbs`` draws.
        temperatures_given: Whether ``nbeta`` and ``ladder`` are scales that were asked for, not to be extrapolated.
        fixed: The settings that the caller made; the others may be adapted in the warm-up.
        seconds: Budget of time.
        seed: Random seed.
        max_rhat: Above this R-hat no value is given.
    """

    sampler: Sampler
    nbeta: float
    gamma: float
    chains: int = 4
    draws: int = 100
    most_draws: int = 100
    warmup: int | None = None
    ladder: tuple[float, ...] = ()
    leapfrog: int = 0
    batch: int | None = None
    step: float | None = None
    precondition: bool = False
    blocks: tuple[tuple[int, int], ...] = ()
    temperatures_given: bool = False
    fixed: tuple[str, ...] = ()
    seconds: float | None = None
    seed: int = 0
    max_rhat: float = 1.1

    @property
    def exchange(self) -> bool:
        """Whether replicas come down the whole ladder and exchange places, or start at the minimum."""
        return self.sampler == Sampler.TEMPERED


class Stopping:
    """When draws are enough: at a fixed number, once chains have mixed (``draws``, then twice as many), or by time.

    Args:
        plan: Draws, and whether they are set.
        clock: The time that may be used.
        until: Used time at which to stop.
        draws: Those of the plan by default.
        fixed: Keep just so many.
    """

    def __init__(
        self, plan: SamplingPlan, clock: Clock, until: float, draws: int | None = None, *, fixed: bool = False
    ) -> None:
        fixed = fixed or "draws" in plan.fixed
        self.goal = draws or plan.draws
        self.clock = clock if clock.timed and not fixed else None
        times = 1 if fixed else plan.most_draws // plan.draws
        self.most = plan.most_draws if self.clock is not None else times * self.goal
        self.until, self._began = until, time.perf_counter()

    def enough(self, count: int, moves: int, settled: Callable[[], bool]) -> bool:
        """Whether to stop after so many kept draws and moves."""
        if count >= self.most:
            return True
        if self.clock is not None:
            pace = (time.perf_counter() - self._began) / moves
            return count >= tuning.FEWEST_DRAWS_TIMED and self.clock.used + pace > self.until
        if count == self.goal:
            self.goal = min(2 * self.goal, self.most)
            return settled()
        return False


class Planned(NamedTuple):
    """A plan, for samplers on all data the posterior that it is for, and what to do where conditionals fail."""

    plan: SamplingPlan
    target: LocalPosterior | None
    otherwise: SamplingPlan | None = None


def sampling_plan(
    potential: Potential,
    theta: Tensor,
    config: LLCConfig,
    clock: Clock | None = None,
    *,
    reduced: Potential | None = None,
    temperatures: Sequence[float] = (),
    limit_known: bool = False,
) -> Planned:
    """Decide sampler, temperatures, localisation, chains and draws: what is set, else the most that is affordable.

    Args:
        potential: The loss.
        theta: The given parameters.
        config: What is set.
        clock: The time that may be used; by default the cost model alone decides.
        reduced: The same loss over fewer data, for samplers on all data.
        temperatures: Sample just these, ascending, without exchange.
        limit_known: Whether nothing is left to extrapolate: no colder temperatures then, unless they are asked for.

    Raises:
        BadInputError: The sampler that was asked for is not possible.

    Examples:
        >>> plan, *_ = sampling_plan(lambda w: (w**4).sum(), torch.zeros(1).double(), LLCConfig(chains=8))
        >>> str(plan.sampler), plan.chains, plan.nbeta, plan.gamma
        ('tempered-hmc', 8, 10000.0, 1.0)
    """
    clock = clock or Clock(config.seconds)
    if limit_known and config.ladder is None:
        config = dataclasses.replace(config, ladder=False)
    reduced = potential if reduced is None else reduced
    on_data = isinstance(potential, Objective)
    gamma = config.gamma or (default_gamma(theta) if on_data else 1.0)
    plan = SamplingPlan(
        choose_sampler(reduced, theta, config),
        float(temperatures[0]) if temperatures else config.nbeta or default_nbeta(potential),
        gamma,
        temperatures_given=bool(temperatures),
        ladder=tuple(temperatures[1:]),
        fixed=tuple(name for name in _SETTABLE if getattr(config, name) is not None),
        seconds=config.seconds,
        seed=config.seed,
        max_rhat=config.max_rhat,
    )
    if plan.sampler not in FULL_DATA:
        if not isinstance(potential, Objective):
            text = "needs data to draw minibatches from; a plain potential is sampled by hmc"
            raise BadInputError(plan.sampler, text)
        return Planned(_minibatch_plan(plan, potential, config), None)
    target = local_posterior(reduced, theta, gamma)
    amount = hmc_amount(config, target.size, target.cost, rungs=len(temperatures) or None)
    if config.sampler not in (Sampler.HMC, Sampler.TEMPERED):
        # Where a ladder of exchanges is affordable it is as good and goes colder; but one block is drawn outright.
        most = 1 if config.sampler == Sampler.AUTO and amount.exchange else tuning.MOST_BLOCKS
        by_blocks = _gibbs_plan(plan, target, config, clock, most)
        if by_blocks is not None:
            otherwise = None
            if config.sampler != Sampler.GIBBS:
                otherwise = _hmc_plan(plan, target, config, clock, amount)
            return Planned(by_blocks, target, otherwise)
    if config.sampler == Sampler.GIBBS:
        raise BadInputError("gibbs", NOT_QUADRATIC)
    return Planned(_hmc_plan(plan, target, config, clock, amount), target)


def choose_sampler(potential: Potential, theta: Tensor, config: LLCConfig) -> Sampler:
    """The sampler asked for; ``auto`` is HMC unless so many passes over all data are unaffordable."""
    kind = Sampler(config.sampler)
    if kind is not Sampler.AUTO:
        return kind
    if not isinstance(potential, Objective):
        return Sampler.HMC
    seconds = tuning.LEAST_GRADIENTS * gradient_cost(potential, theta, turning=0).replica
    return Sampler.SGLD if seconds > tuning.FULL_PASS_LIMIT else Sampler.HMC


def default_nbeta(potential: Potential) -> float:
    """``n / ln n``, the temperature of the widely applicable Bayesian information criterion; 1e4 without data."""
    if not isinstance(potential, Objective):
        return 1e4
    return potential.count / math.log(potential.count) if potential.count > 2 else float(potential.count)


# SGLD


def _minibatch_plan(plan: SamplingPlan, objective: Objective, config: LLCConfig) -> SamplingPlan:
    chains, batch = (
        config.chains or tuning.FEWEST_CHAINS,
        config.batch or default_batch(objective, plan.nbeta),
    )
    size = min(batch, objective.rows)
    cost = gradient_cost(objective.batch(torch.arange(size)), objective.flat.theta, turning=0)
    steps = int(tuning.LARGE_BUDGET / (cost.call / chains + cost.replica) / chains)
    most = 2 * max(tuning.LEAST_STEPS, steps) // 3
    return dataclasses.replace(
        plan,
        chains=chains,
        draws=config.draws or min(tuning.FIRST_DRAWS, most),
        most_draws=config.draws or most,
        warmup=config.warmup or tuning.SGLD_WARMUP,
        batch=batch,
        step=config.step,
        precondition=plan.sampler == Sampler.SGLD and config.step is None,
    )


def default_batch(objective: Objective, nbeta: float) -> int:
    """Return 256 rows, and fewer of those that hold many predictions: about ``nbeta`` predictions, at least 1,024.

    The noise of minibatches then heats the stiffest direction by a quarter at most, before that is taken off.
    """
    each = max(1, objective.count // max(1, objective.rows))
    return int(np.clip(math.ceil(max(tuning.LEAST_PREDICTIONS, nbeta) / each), 4, 256))


# Gibbs


def _gibbs_plan(
    plan: SamplingPlan, target: LocalPosterior, config: LLCConfig, clock: Clock, most: int
) -> SamplingPlan | None:
    """Conditional draws of at most so many blocks; ``None`` where there are no such, or they are not affordable."""
    sizes = target.potential.flat.sizes if isinstance(target.potential, Objective) else None
    blocks = quadratic_blocks(target.potential, target.theta, sizes)
    if blocks is None or len(blocks) > most:
        return None
    widths = [b.stop - b.start for b in blocks]
    # A sweep takes a gradient per parameter and a factorisation per block.
    work = sum(((w + 2) * target.cost.replica + float(w**3) * tuning.SECONDS_PER_CUBE for w in widths), 0.0)
    call = 3 * len(widths) * target.cost.call

    def seconds(chains: int, sweeps: int, rungs: int) -> float:
        return sweeps * (call + rungs * chains * work)

    least = 20 + (config.draws or 30)
    if config.sampler != Sampler.GIBBS and seconds(config.chains or 8, least, 1) > 4 * tuning.BUDGET:
        return None
    ladder = plan.ladder
    if not plan.temperatures_given and config.ladder is not False:
        coldest = config.coldest or rounding_limit(target)
        rungs = tuning.GIBBS_RUNGS + (tuning.ONE_BLOCK_RUNGS if len(blocks) == 1 else ())
        ladder = tuple(r * plan.nbeta for r in rungs if r * plan.nbeta <= coldest)
    amounts = ((64, 100, 100), (32, 80, 100), (16, 60, 80), (8, 30, 60))
    allowed = min(tuning.BUDGET, clock.left)
    chains, _, draws = next(
        (a for a in amounts if seconds(a[0], a[1] + a[2], 1 + len(ladder)) <= allowed), (*amounts[-1][:2], 30)
    )
    chains = config.chains or chains
    draws = config.draws or draws
    times = tuning.MOST_DRAWS if clock.timed else tuning.GIBBS_MOST_TIMES
    return dataclasses.replace(
        plan,
        sampler=Sampler.GIBBS,
        chains=chains,
        draws=draws,
        most_draws=config.draws or times * draws,
        warmup=config.warmup or next((a[1] for a in amounts if a[0] <= chains), amounts[-1][1]),
        ladder=ladder,
        blocks=tuple((b.start, b.stop) for b in blocks),
    )


# HMC


class Amount(NamedTuple):
    """How much HMC samples, with replica exchange or from the minimum, with colder temperatures or without."""

    chains: int
    draws: int
    leapfrog: int
    exchange: bool
    ladder: bool

    def seconds(self, warmup: int, cost: GradientCost, rungs: int | None = None) -> float:
        """What the cost model expects."""
        moves = (1 + self.leapfrog) / 2
        if self.exchange:
            together = tuning.EXCHANGED_ABOUT * self.chains
            down = tuning.EXCHANGED_ABOUT * 2 * tuning.ANNEAL * (moves + cost.mode_jump)
            sampling = (warmup + self.draws) * (moves + max(2, cost.mode_jump))
            crowd = cost.call + tuning.CROWD * self.chains * cost.replica
            return down * crowd + sampling * (cost.call + together * cost.replica)
        rounds = rungs or (tuning.RUNGS_ABOUT if self.ladder else 1)
        iterations = warmup // 2 + rounds * (self.draws + warmup // 3)
        return iterations * moves * (cost.call + self.chains * cost.replica)


def _hmc_plan(
    plan: SamplingPlan, target: LocalPosterior, config: LLCConfig, clock: Clock, amount: Amount
) -> SamplingPlan:
    if clock.timed:
        amount = _timed_amount(amount, config, target, clock.left)
    ladder = plan.ladder
    if amount.ladder and not plan.temperatures_given:
        limit = rounding_limit(target)
        if amount.exchange:
            coldest = config.coldest or min(max(1e12, 1e3 * plan.nbeta), limit)
            ladder = (max(coldest, plan.nbeta),)
        else:
            ladder = tuple(
                r * plan.nbeta for r in tuning.LOCAL_RUNGS if r * plan.nbeta <= (config.coldest or limit)
            )
    times = tuning.MOST_DRAWS if clock.timed else tuning.HMC_MOST_TIMES
    fixed = config.draws is not None or plan.temperatures_given
    return dataclasses.replace(
        plan,
        sampler=Sampler.TEMPERED if amount.exchange else Sampler.HMC,
        chains=amount.chains,
        draws=amount.draws,
        most_draws=amount.draws * (1 if fixed else times),
        warmup=config.warmup or (tuning.EXCHANGE_WARMUP if amount.exchange else None),
        ladder=ladder,
        leapfrog=amount.leapfrog,
    )


def hmc_amount(config: LLCConfig, size: int, cost: GradientCost, *, rungs: int | None = None) -> Amount:
    """What is set, and for the rest the most that the cost model's budget allows.

    Args:
        config: What is set.
        size: Number of parameters.
        cost: Of a batched gradient.
        rungs: Sample just so many temperatures, without exchange.
    """
    small, large = size <= tuning.VIRIAL_LIMIT, size > tuning.DENSE_LIMIT
    leapfrog = config.leapfrog or (6 if small else 20 if large else 10)
    ladders = ([False] if large else [True, False]) if config.ladder is None else [config.ladder]
    # Where some parameters can be integrated out, few chains go far.
    sizes = ((32, 200), (16, 150)) if cost.mode_jump == 1 else ((32, 160), (16, 120), (8, 120))
    exchanged = [Amount(c, d, leapfrog, True, ladders[0]) for c, d in sizes]
    local = [
        Amount(c, d, leapfrog, False, ladder)
        for ladder in ladders
        for c, d in ((64, 100), (32, 100), (16, 100), (8, 100), (8, 80), (4, 80))
        if not (large and c > 8)
        if not (ladder and config.ladder is None and c < 8)
    ]
    allowed = tuning.LARGE_BUDGET * (rungs or 1) if large else tuning.BUDGET
    warmup = config.warmup or tuning.EXCHANGE_WARMUP
    candidates = local
    if rungs is None and config.sampler == Sampler.TEMPERED:
        candidates = exchanged
    elif rungs is None and small and config.sampler != Sampler.HMC:
        candidates = exchanged + local

    def with_settings(amount: Amount) -> Amount:
        return amount._replace(chains=config.chains or amount.chains, draws=config.draws or amount.draws)

    def affordable(amount: Amount) -> bool:
        # More chains than the default are the caller's wish; they do not change what is sampled.
        seconds = with_settings(amount).seconds(warmup, cost, rungs)
        if not amount.exchange:
            return seconds <= allowed
        # Chains that start at a singular minimum do not get from valley to valley: a way down may take more time.
        factor = tuning.LADDER_WORTH if amount is exchanged[-1] and amount.ladder else 1.0
        return min(seconds, amount.seconds(warmup, cost, rungs)) <= factor * allowed

    return with_settings(next((a for a in candidates if affordable(a)), candidates[-1]))


def _timed_amount(amount: Amount, config: LLCConfig, target: LocalPosterior, seconds: float) -> Amount:
    offset = target.theta.new_zeros(1, amount.chains, target.size)
    target.evaluate(offset[:, :1])  # the first call may prepare things
    began = time.perf_counter()
    target.evaluate(offset)
    call = time.perf_counter() - began
    stages = tuning.STAGES_LARGE if target.size > tuning.DENSE_LIMIT else tuning.STAGES
    rounds = stages * tuning.STAGE_ROUNDS + tuning.SETTLE
    return timed_amount(amount, config, rounds, call, target.cost, seconds)


def timed_amount(
    amount: Amount, config: LLCConfig, rounds: int, call: float, cost: GradientCost, seconds: float
) -> Amount:
    """Return fewer chains, no ladder or no exchange where their warm-up leaves too little time.

    Args:
        amount: What is sampled without a limit of time.
        config: What is set.
        rounds: Trajectories of the warm-up of chains that start at the minimum.
        call: Measured seconds of a batched gradient of all chains.
        cost: Of a gradient by the cost model, for the share of calls and replicas in it.
        seconds: That are left.
    """
    pace = call / (cost.call + amount.chains * cost.replica)  # of this machine, in units of the model
    warmup = config.warmup or tuning.EXCHANGE_WARMUP
    if amount.exchange:
        expected = pace * amount._replace(draws=10).seconds(warmup, cost)
        if config.sampler == Sampler.TEMPERED or expected <= 2 * tuning.HMC_WARMUP_SHARE * seconds:
            return amount
        amount = amount._replace(exchange=False)

    def too_many(chains: int) -> bool:
        # Few long chains show that they have mixed where many short ones of the same cost do not.
        trajectory = pace * (1 + amount.leapfrog) / 2 * (cost.call + chains * cost.replica)
        before, draws = rounds * trajectory, tuning.LENGTHENED * amount.draws * trajectory
        return before > tuning.HMC_WARMUP_SHARE * seconds or before + draws > seconds

    if config.chains is None:
        while amount.chains >= 2 * tuning.FEWEST_CHAINS and too_many(amount.chains):
            amount = amount._replace(chains=amount.chains // 2)
    if amount.ladder and config.ladder is None and pace * amount.seconds(warmup, cost) > seconds:
        amount = amount._replace(ladder=False)
    return amount
