"""Grokking followed: modular addition with weight decay and without (Nanda et al. 2023), in which order things change.

A network first learns its part of the table by heart; long after, its test loss falls. The claims: before that the network
has already begun to change (progress measures move first), and without weight decay it never happens. Asked here: when do
spectra leave the random-like phase, when does the learning coefficient fall, when does the test loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from strati.papers.development.modular_addition import Adder, SmallAdder, table, whole_table_loss
from strati.papers.development.training import Training, load, step_of, trained
from strati.rng import derive
from strati.types import Tick, silent

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Setup:
    """A size of the experiment.

    Attributes:
        modulus: Of the addition.
        share: Of the table that is learned from.
        attention: The one-layer transformer; otherwise embeddings and one hidden layer.
        steps: At most.
        every: Steps between two checkpoints.
        seeds: Runs with weight decay; one more has none.
        coefficients: Checkpoints of each run whose learning coefficient is estimated.
        chains: Chains of each estimate.
        draws: Draws of each chain.
    """

    modulus: int
    share: float
    attention: bool
    steps: int
    every: int
    seeds: int
    coefficients: int
    chains: int
    draws: int

    def network(self, seed: int) -> nn.Module:
        """Untrained."""
        torch.manual_seed(derive(seed, "grokking"))
        return Adder(self.modulus) if self.attention else SmallAdder(self.modulus)


FULL = Setup(113, 0.3, True, 20_000, 100, 5, 20, 4, 400)
QUICK = Setup(53, 0.4, False, 2_000, 50, 2, 10, 4, 200)
RATE, DECAY, BETAS = 3e-3, 1.0, (0.9, 0.98)
"""Nanda et al. have a rate of 1e-3; thrice that makes everything happen in a third of the steps."""

_END = 0.01  # test loss at which grokking has ended
_AFTER = 1.25  # the run without decay goes on for so many times the steps that the one with it needed


def follow(
    folder: Path, setup: Setup, decay: float, seed: int, *, steps: int | None = None, tick: Tick = silent
) -> tuple[Path, ...]:
    """Train one network, until it has grokked or ``steps`` are over; its checkpoints."""
    (x, y), (x_test, y_test) = table(setup.modulus, setup.share, seed)
    last = steps or setup.steps
    marks = tuple(sorted({0, 2, 5, 10, 20, *range(0, last + 1, setup.every)}))
    plan = Training(last, marks, rate=RATE, decay=decay, betas=BETAS, warmup=10)

    def grokked(model: nn.Module) -> bool:
        with torch.no_grad():
            return bool(functional.cross_entropy(model(x_test), y_test) < _END)

    name = f"decay-{decay:g}-seed-{seed}"
    return trained(folder / name, setup.network(seed), whole_table_loss(x, y), plan, done=grokked, tick=tick)
