"""How much is sampled: by default what a cost model that counts operations allows, else what a clock allows.

The cost model is the same on every machine, so unset numbers of chains and draws are, too. With ``seconds`` a
:class:`Clock` decides, and the numbers that ran are recorded.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strati.landscape.llc.config import BUDGET, DENSE_LIMIT, VIRIAL_LIMIT, LLCConfig, Sampler
from strati.landscape.objective import Potential

_LARGE_BUDGET = 4 * BUDGET  # per temperature, for networks too large to know their curvature exactly
_RUNGS = 7
_WARMUP_SHARE = 1 / 3  # of the time that chains may take before their first draw, as planned
_FEWEST_CHAINS = 4
_LENGTHENED = 2.0  # trajectories of draws are about so many times as long as those of the warm-up
_WORTH = 3.0  # budgets that a whole ladder may cost
_EXCHANGED = 30  # temperatures of a whole ladder, about

ANNEAL = 4
"""Rounds per temperature on the way down a ladder, and at one halfway to the next."""

CROWD = 32
"""Replicas per chain on that way: their numbers tell the shares of a valley's parts."""

_PER_MOVE = 4e-4
_PER_CALL = 2e-5
_PER_NUMBER = 2e-9
_PER_PRODUCT = 0.8e-10


MOST_DRAWS = 50
"""Times the usual number of draws, however many seconds there are."""

WARMUP = 60
"""Rounds before the first draw, where replicas exchange places."""


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


class GradientCost(NamedTuple):
    """Seconds per batched gradient, and per replica in it, on a machine of 2020: a model, hence reproducible.

    ``leap`` is how many gradients a move from one part of a valley to another takes.
    """

    call: float
    replica: float
    leap: int = 1


def collapsed_gradients(width: int) -> int:
    """Gradients of a move with a block of so many parameters integrated out: before, after, and where it ends."""
    return 2 * (width + 1) + 1


class SamplingPlan(NamedTuple):
    """How much is sampled.

    ``exchange`` is whether replicas come down the whole ladder and exchange places, or start at the minimum.
    """

    chains: int
    draws: int
    leapfrog: int
    exchange: bool
    ladder: bool

    def seconds(self, warmup: int, cost: GradientCost, rungs: int | None = None) -> float:
        """What the cost model expects."""
        moves = (1 + self.leapfrog) / 2
        if self.exchange:
            together = _EXCHANGED * self.chains
            down = _EXCHANGED * 2 * ANNEAL * (moves + cost.leap)
            sampling = (warmup + self.draws) * (moves + max(2, cost.leap))
            crowd = cost.call + CROWD * self.chains * cost.replica
            return down * crowd + sampling * (cost.call + together * cost.replica)
        rounds = rungs or (_RUNGS if self.ladder else 1)
        iterations = warmup // 2 + rounds * (self.draws + warmup // 3)
        return iterations * moves * (cost.call + self.chains * cost.replica)


def sampling_plan(
    config: LLCConfig, size: int, cost: GradientCost, *, rungs: int | None = None
) -> SamplingPlan:
    """What is set, and for the rest the most that the cost model's budget allows.

    Args:
        config: What is set.
        size: Number of parameters.
        cost: Of a batched gradient.
        rungs: Sample just so many temperatures, without exchange.
    """
    small, large = size <= VIRIAL_LIMIT, size > DENSE_LIMIT
    leapfrog = config.leapfrog or (6 if small else 20 if large else 10)
    ladders = ([False] if large else [True, False]) if config.ladder is None else [config.ladder]
    # Where some parameters can be integrated out, few chains go far.
    sizes = ((32, 200), (16, 150)) if cost.leap == 1 else ((32, 160), (16, 120), (8, 120))
    exchanged = [SamplingPlan(c, d, leapfrog, True, ladders[0]) for c, d in sizes]
    local = [
        SamplingPlan(c, d, leapfrog, False, ladder)
        for ladder in ladders
        for c, d in ((64, 100), (32, 100), (16, 100), (8, 100), (8, 80), (4, 80))
        if not (large and c > 8)
        if not (ladder and config.ladder is None and c < 8)
    ]
    allowed = _LARGE_BUDGET * (rungs or 1) if large else BUDGET
    warmup = config.warmup or WARMUP
    candidates = local
    if rungs is None and config.sampler == Sampler.TEMPERED:
        candidates = exchanged
    elif rungs is None and small and config.sampler != Sampler.HMC:
        candidates = exchanged + local

    def own(plan: SamplingPlan) -> SamplingPlan:
        return plan._replace(
            chains=config.chains or plan.chains,
            draws=config.draws or plan.draws,
            leapfrog=config.leapfrog or plan.leapfrog,
        )

    def affordable(plan: SamplingPlan) -> bool:
        # More chains than the default are the caller's wish; they do not change what is sampled.
        seconds = own(plan).seconds(warmup, cost, rungs)
        if not plan.exchange:
            return seconds <= allowed
        # Chains that start at a singular minimum do not get from valley to valley: a way down is worth more time.
        dear = _WORTH if plan is exchanged[-1] and plan.ladder else 1.0
        return min(seconds, plan.seconds(warmup, cost, rungs)) <= dear * allowed

    return own(next((p for p in candidates if affordable(p)), candidates[-1]))


def timed_plan(
    plan: SamplingPlan, config: LLCConfig, rounds: int, call: float, cost: GradientCost, seconds: float
) -> SamplingPlan:
    """Return the plan with fewer chains, no ladder or no exchange where their warm-up leaves too little time.

    Args:
        plan: What is sampled without a limit of time.
        config: What is set.
        rounds: Trajectories of the warm-up of chains that start at the minimum.
        call: Measured seconds of a batched gradient of all chains.
        cost: Of a gradient by the cost model, for the share of calls and replicas in it.
        seconds: That are left.
    """
    pace = call / (cost.call + plan.chains * cost.replica)  # of this machine, in units of the model
    warmup = config.warmup or WARMUP
    if plan.exchange:
        if (
            config.sampler == Sampler.TEMPERED
            or pace * plan._replace(draws=10).seconds(warmup, cost) <= 2 * _WARMUP_SHARE * seconds
        ):
            return plan
        plan = plan._replace(exchange=False)

    def expected(chains: int, trajectories: int) -> float:
        return pace * trajectories * (1 + plan.leapfrog) / 2 * (cost.call + chains * cost.replica)

    def too_many(chains: int) -> bool:
        # Few long chains show that they have mixed where many short ones of the same cost do not.
        before, draws = expected(chains, rounds), _LENGTHENED * expected(chains, plan.draws)
        return before > _WARMUP_SHARE * seconds or before + draws > seconds

    if config.chains is None:
        while plan.chains >= 2 * _FEWEST_CHAINS and too_many(plan.chains):
            plan = plan._replace(chains=plan.chains // 2)
    if plan.ladder and config.ladder is None and pace * plan.seconds(warmup, cost) > seconds:
        plan = plan._replace(ladder=False)
    return plan


def gradient_cost(potential: Potential, theta: Tensor, *, turning: int | None = None) -> GradientCost:
    """What a gradient costs, from the operations, numbers and products of one evaluation.

    Args:
        potential: The loss.
        theta: Where.
        turning: Multiply-adds of a rotation there and back; that of a dense one by default.

    Examples:
        >>> cheap = gradient_cost(lambda w: (w**2).sum(), torch.zeros(2))
        >>> dear = gradient_cost(lambda w: (w[:, None] * torch.ones(1, 10**6)).sum(), torch.zeros(2))
        >>> cheap.replica < 1e-6 < 1e-3 < dear.replica
        True
    """
    with torch.no_grad(), _WorkCounter() as work:
        potential(theta)
    size = theta.numel()
    turning = (2 * size * size if size <= DENSE_LIMIT else 0) if turning is None else turning
    replica = 3 * (work.numbers * _PER_NUMBER + work.products * _PER_PRODUCT)
    return GradientCost(
        _PER_MOVE + 3 * work.calls * _PER_CALL, replica + 2 * turning * _PER_PRODUCT + size * 20 * _PER_NUMBER
    )


class _WorkCounter(TorchDispatchMode):
    """Counts operations, the numbers they write, and multiply-adds of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.numbers = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        written = out.numel() if isinstance(out, Tensor) else 0
        self.calls += 1
        if any(product in func.__name__ for product in ("mm", "conv")):
            inner = [a for a in args if isinstance(a, Tensor) and a.ndim > 1][-1]
            self.products += written * (inner.shape[-2] if "mm" in func.__name__ else inner[0].numel())
        if not func.is_view:
            self.numbers += written
        return out
