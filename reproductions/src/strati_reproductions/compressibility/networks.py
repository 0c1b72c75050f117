"""The networks of ``reproduce compressibility``: checkpoints of MLPs of several sizes and of modular addition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from strati.core.results import Tick
from strati.core.rng import derive
from strati_reproductions.checkpointed_training import Training, load, step_of, trained
from strati_reproductions.datasets import embedded_digits
from strati_reproductions.grokking.grokking import DECAY, QUICK, trained_run
from strati_reproductions.grokking.modular_addition import table

DIGITS, ADDITION = "digits", "addition"
_BATCH, _RATE = 128, 3e-3


@dataclass(frozen=True)
class Trainings:
    """Which networks are trained and which of their steps are measured.

    Attributes:
        widths: Hidden widths of the MLPs 64-w-w-10 on the 8 x 8 digits.
        seeds: Trainings of each width.
        steps: Steps of the MLPs that are measured.
        additions: Trainings of modular addition.
        checkpoints: Checkpoints of each of these that are measured, evenly spaced.
        rows: Rows of the training data on which everything is measured.
    """

    widths: tuple[int, ...]
    seeds: int
    steps: tuple[int, ...]
    additions: int
    checkpoints: int
    rows: int


FULL = Trainings((8, 16, 32), 3, (60, 200, 2000), 0, 0, 480)
"""Step 60 was taken after step 20 had shown that zeros in place of the weights keep the tolerance there; modular
addition is left to a longer run (set ``additions`` and ``checkpoints``, which continues the stored measurements)."""
SMALL = Trainings((6,), 2, (60, 300), 0, 0, 100)


@dataclass(frozen=True)
class Checkpoint:
    """A network at one step of one training, with the rows on which it is measured."""

    family: str
    run: str
    step: int
    model: nn.Module
    x: Tensor
    y: Tensor

    @property
    def name(self) -> str:
        """Family, training and step."""
        return f"{self.run}-step-{self.step}"


def checkpoints(trainings: Trainings, seed: int, folder: Path, tick: Tick) -> Iterator[Checkpoint]:
    """Train the networks (or continue) and give their checkpoints one by one."""
    for width in trainings.widths:
        for number in range(seed, seed + trainings.seeds):
            yield from _digits(trainings, width, number, folder, tick)
    for number in range(seed, seed + trainings.additions):
        yield from _additions(trainings, number, folder, tick)


def _digits(trainings: Trainings, width: int, seed: int, folder: Path, tick: Tick) -> Iterator[Checkpoint]:
    digits = embedded_digits()
    x, y = digits.x.float(), digits.y.long()
    torch.manual_seed(derive(seed, "compressibility", width))
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )

    def loss(network: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive(seed, "compressibility", width, step))
        rows = torch.randint(len(y), (_BATCH,), generator=generator)
        return functional.cross_entropy(network(x[rows]), y[rows])

    run = f"{DIGITS}-{width}-seed-{seed}"
    plan = Training(max(trainings.steps), trainings.steps, rate=_RATE)
    for path in trained(folder / run, model, loss, plan, tick=tick):
        load(model, path)
        yield Checkpoint(DIGITS, run, step_of(path), model, x[: trainings.rows], y[: trainings.rows])


def _additions(trainings: Trainings, seed: int, folder: Path, tick: Tick) -> Iterator[Checkpoint]:
    paths = trained_run(folder, QUICK, DECAY, seed, tick=tick)
    (x, y), _ = table(QUICK.modulus, QUICK.share, seed)
    model = QUICK.network(seed)
    places = np.linspace(0, len(paths) - 1, trainings.checkpoints + 1).round().astype(int)[1:]
    for path in (paths[place] for place in places):
        load(model, path)
        run = f"{ADDITION}-seed-{seed}"
        yield Checkpoint(ADDITION, run, step_of(path), model, x[: trainings.rows], y[: trainings.rows])
