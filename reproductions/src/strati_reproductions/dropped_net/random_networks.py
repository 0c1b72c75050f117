"""Forty residual networks drawn by seed, trained here, dropped and put back: how many are exact. Needs torch.

A part of ``reproduce dropped-net-battery``. Widths 16 to 64, 12 to 32 blocks, relu, gelu and tanh, Adam and plain
gradient descent, 20 to 300 epochs, with and without weight decay; some blocks have no biases, some a LayerNorm of
their own, which is a piece like the others. Trainings and results are kept and resumed.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.files import write_atomic
from strati.core.rng import stream
from strati.reassembly.reassemble import reassemble
from strati.reassembly.residual.result import Reassembly
from strati_reproductions.dropped_net.trainer import Recipe, train
from strati_reproductions.registry import Reproduction, Row

if TYPE_CHECKING:
    from strati.core.results import Tick

NETWORKS = 40
"""Networks of the battery; eight with ``quick``."""

SECONDS = 120.0
_PATIENCE = 2.0
"""Time limit for each, in seconds of the processor, which other work on the machine does not change; the search may
take so many times as long by the clock."""


def dropped_net_battery(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Train, drop and put back; a network that was done before is not done again."""
    kept = folder / "battery"
    done = [outcome(number, kept, seed=seed, tick=tick) for number in range(8 if quick else NETWORKS)]
    exact = sum(one["exact"] for one in done)
    taken = sorted(one["seconds"] for one in done)
    note = f"{exact / len(done):.0%}; median {np.median(taken):.1f} s, longest {taken[-1]:.1f} s, limit {SECONDS:g} s"
    rows = [
        Row(f"residual networks drawn by seed, exact within {SECONDS:g} s, of {len(done)}", None, exact, note)
    ]
    for one in done:
        how = "exact" if one["exact"] else f"NOT exact, error {one['share']:.2g} of the variance"
        rows.append(Row(one["name"], None, how, f"{one['seconds']:.1f} s"))
    return Reproduction(
        "dropped-net-battery", "residual networks drawn by seed, put back exactly", tuple(rows)
    )


def drawn(number: int, *, seed: int = 0) -> Recipe:
    """The recipe of one network.

    Examples:
        >>> drawn(0) == drawn(0), drawn(0) == drawn(1)
        (True, False)
    """
    rng = stream(seed, "dropped-net", "battery", number)
    width = int(rng.choice([16, 24, 32, 48, 64]))
    optimiser = str(rng.choice(["adam", "adam", "sgd"]))
    kind = str(rng.choice(["plain", "plain", "plain", "no bias", "pre-norm"]))
    decay = {"adam": 1e-4, "sgd": 1e-3}[optimiser] if rng.random() < 0.5 else 0.0
    return Recipe(
        blocks=int(rng.integers(12, 33)),
        width=width,
        hidden=width * int(rng.choice([1, 2, 2, 3])),
        epochs=round(20 * 15 ** float(rng.random())),
        rows=1500,
        lr=1e-3 if optimiser == "adam" else 1e-2,
        weight_decay=decay,
        activation=str(rng.choice(["relu", "gelu", "tanh"])),
        batch=250,
        seed=1000 * seed + number,
        optimiser=optimiser,
        norm=kind == "pre-norm",
        bias=kind != "no bias",
    )


def named(recipe: Recipe) -> str:
    """A line about a network."""
    more = ", pre-norm" if recipe.norm else "" if recipe.bias else ", no bias"
    return (
        f"{recipe.blocks} blocks of {recipe.width}/{recipe.hidden}, {recipe.activation}, {recipe.optimiser}, "
        f"{recipe.epochs} epochs, weight decay {recipe.weight_decay:g}{more}"
    )


@dataclass(frozen=True)
class _Files:
    folder: Path
    number: int

    @property
    def training(self) -> Path:
        return self.folder / f"{self.number}.pt"

    @property
    def outcome(self) -> Path:
        return self.folder / f"{self.number}.json"


def outcome(number: int, folder: Path, *, seed: int, tick: Tick) -> dict[str, Any]:
    """Whether one network was put back exactly, and how long that took."""
    files, recipe = _Files(folder, number), drawn(number, seed=seed)
    name = named(recipe)
    if files.outcome.is_file():
        kept: dict[str, Any] = json.loads(files.outcome.read_text("utf-8"))
        if kept["name"] == name:
            return kept
    network = train(recipe, keep=files.training)
    pieces, permutation = network.pieces(recipe.seed)
    began = time.process_time()
    found = reassemble(
        pieces, network.x, network.pred, activation=recipe.activation, seconds=_PATIENCE * SECONDS
    )
    taken = time.process_time() - began
    assert isinstance(found, Reassembly)
    result = {
        "name": name,
        "exact": bool(found.exact) and taken <= SECONDS,
        "right": found.permutation == permutation,
        "share": found.mse / found.variance,
        "seconds": taken,
        "training_mse": network.loss,
    }
    write_atomic(files.outcome, json.dumps(result) + "\n")
    tick(name)
    return result
