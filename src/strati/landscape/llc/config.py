"""Settings of the samplers. No torch here: the command line reads its defaults from this module."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from strati.core.errors import BadInputError


class Sampler(StrEnum):
    """How the posterior is sampled."""

    AUTO = "auto"
    HMC = "hmc"
    TEMPERED = "tempered-hmc"
    GIBBS = "gibbs"
    SGLD = "sgld"
    RMSPROP = "rmsprop-sgld"


FULL_DATA = (Sampler.HMC, Sampler.TEMPERED, Sampler.GIBBS)
"""Samplers that see all data at each step."""


@dataclass(frozen=True)
class LLCConfig:
    """Settings of the sampler; the defaults suit problems from one to thousands of parameters.

    Attributes:
        nbeta: Inverse temperature; ``None`` means ``n / ln n`` for data and 1e4 for a plain potential.
        gamma: Localisation, ``gamma/2 |theta - theta*|^2``; ``None`` means ``max(1, w N / |theta*|^2)`` with
            ``w = min(1, N / 2500)`` for a network (each weight of a large one then moves about its own size) and 1 for
            a plain potential. Set it to compare networks.
        chains: Independent chains; ``None`` means 32 below nine parameters, 64 beyond, or what is affordable.
        draws: Kept draws per chain; ``None`` means 200 below nine parameters, 100 beyond, fewer if costly.
        warmup: Rounds before the first kept draw, in which step sizes are found; ``None`` means until the chains have
            arrived.
        leapfrog: Longest trajectory in steps; ``None`` means 6 below nine parameters, 10 beyond.
        ladder: Also sample colder temperatures and extrapolate (``asymptotic``); ``None`` means where affordable.
        coldest: The ladder's last inverse temperature; ``None`` means as cold as the problem allows.
        seconds: Budget of wall-clock time, calibration included, for the draws that are not set. The chains and draws
            that ran are in the result's ``settings``; repeating with them gives the same result. ``None`` means an
            amount of work that depends on the problem alone: it goes on until the chains have mixed, up to eight
            times the usual number of draws.
        seed: Random seed.
        sampler: ``hmc`` (all data, Metropolis-corrected, chains start at the minimum), ``tempered-hmc`` (the same with
            replica exchange along a ladder of temperatures), ``gibbs`` (all data, where the loss is quadratic in each
            layer given the others), ``sgld`` or ``rmsprop-sgld`` (minibatches); ``auto`` is ``gibbs`` where that
            is possible, else ``tempered-hmc`` up to eight parameters where affordable, else ``hmc``, and ``sgld``
            where a full pass is unaffordable. The result's ``settings`` name the sampler that ran.
        batch: Rows per minibatch of SGLD; ``None`` means 256, and fewer where a row holds many predictions.
        step: Step size of SGLD; ``None`` calibrates it.
        max_rhat: Above this R-hat no value is given.
        device: Where torch computes; ``None`` means where the model is.
    """

    nbeta: float | None = None
    gamma: float | None = None
    chains: int | None = None
    draws: int | None = None
    warmup: int | None = None
    leapfrog: int | None = None
    ladder: bool | None = None
    coldest: float | None = None
    seconds: float | None = None
    seed: int = 0
    sampler: str = "auto"
    batch: int | None = None
    step: float | None = None
    max_rhat: float = 1.1
    device: str | None = None

    def __post_init__(self) -> None:
        for name in ("nbeta", "gamma", "coldest", "step", "seconds"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise BadInputError(name, f"must be a positive number, not {value}")
        for name, least in (("chains", 2), ("draws", 4), ("warmup", 1), ("leapfrog", 1), ("batch", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadInputError(name, f"must be at least {least}, not {value}")
        if self.sampler not in set(Sampler):
            raise BadInputError(self.sampler, f"no such sampler; there are: {', '.join(Sampler)}")
