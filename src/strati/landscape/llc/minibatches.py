"""Minibatches of stochastic-gradient samplers: how large they are, which rows they hold, in which order they come."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from strati.core.rng import derive
from strati.landscape.llc.config import LLCConfig
from strati.landscape.objective import Inputs, Objective

_LEAST_PREDICTIONS = 1024  # in a minibatch of sequences


def default_batch(objective: Objective, nbeta: float) -> int:
    """Return 256 rows, and fewer of those that hold many predictions: about ``nbeta`` predictions, at least 1,024.

    The noise of minibatches then heats the stiffest direction by a quarter at most, before that is taken off.
    """
    each = max(1, objective.count // max(1, objective.rows))
    return int(np.clip(math.ceil(max(_LEAST_PREDICTIONS, nbeta) / each), 4, 256))


def batches_of(objective: Objective, config: LLCConfig) -> list[tuple[Inputs, Tensor]]:
    """The data cut once into minibatches of one size, in a random order of the rows."""
    rows = objective.rows
    size = min(config.batch or 256, rows)
    generator = torch.Generator().manual_seed(derive(config.seed, "batches"))
    order = torch.randperm(rows, generator=generator)
    cuts = [order[i : i + size] for i in range(0, rows - size + 1, size)]

    def take(index: Tensor) -> tuple[Inputs, Tensor]:
        x = objective.x
        part = {k: v[index] for k, v in x.items()} if isinstance(x, Mapping) else x[index]
        return part, objective.target[index]

    return [take(c) for c in cuts]


def baselines_of(objective: Objective, batches: list[tuple[Inputs, Tensor]]) -> list[float]:
    """The loss of each minibatch at the given parameters."""
    flat = objective.flat
    loss: Callable[[Tensor, Tensor], Tensor] = objective.loss
    with torch.no_grad():
        return [float(loss(flat(flat.theta, x), y)) for x, y in batches]


def shuffled(count: int, generator: torch.Generator) -> Iterator[int]:
    """Batch numbers, shuffled anew each epoch."""
    while True:
        yield from torch.randperm(count, generator=generator).tolist()
