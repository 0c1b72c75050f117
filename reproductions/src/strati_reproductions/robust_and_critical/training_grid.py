"""``reproduce fcn-mnist-grid``: which training gives the alphas and the accuracy of table 1?

robust-and-critical-layers does not say how its 100 networks were trained. The grid covers epochs (5 to 10), batch size
(32, 64, 128) and the scaling of the inputs, with plain gradient descent at 0.01; :data:`NETWORKS` networks each, two
trained together. For every cell, each of the paper's numbers is compared with ours in units of the standard error of
the difference; the spread of single networks is pooled over all cells. Every pair of networks is stored when it is
trained, so that a larger :data:`NETWORKS` continues an earlier run.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strati.core.files import write_atomic
from strati.core.results import Tick
from strati.interventions.study_spec import read_spec
from strati.interventions.tasks import StudyData
from strati.spectra.spectrum import spectrum
from strati_reproductions.pictures import COLOURS, PAPER, drawn, legend_below, panels, save
from strati_reproductions.registry import Reproduction, Row
from strati_reproductions.rows import Fact
from strati_reproductions.trained.networks import build
from strati_reproductions.trained.spec import TrainingSpec
from strati_reproductions.trained.training import Arrays, train

QUANTITIES = (*(f"alpha of FC{number}" for number in range(1, 6)), "test accuracy, %")
PAPER_VALUES = np.array([4.82, 4.205, 4.126, 4.135, 4.193, 96.822])
PAPER_ERRORS = np.array([0.025, 0.039, 0.038, 0.035, 0.034, 0.057])
"""Table 1, 100 networks. FC6 is left out: it has ten eigenvalues, which weightwatcher fits by another rule."""
PAPER_NETWORKS = 100
SCALINGS: dict[str, tuple[float, float] | None] = {
    "standardised": None,
    "0 to 1": (0.0, 1.0),
    "-1 to 1": (0.5, 0.5),
}
"""Mean and deviation that are taken off the pixels; ``None``: those of the training images."""
BATCHES = (32, 64, 128)
EPOCHS = tuple(range(5, 11))
NETWORKS, PLANNED = 2, 10
"""Networks of each training that the stored run has, and that the grid is meant to have."""
_TOGETHER = 2


@dataclass(frozen=True)
class Cell:
    """The networks of one training: a line of :data:`QUANTITIES` for every network.

    ``spread`` is the standard deviation of each quantity over networks, pooled over the trainings.
    """

    scaling: str
    batch: int
    epochs: int
    values: np.ndarray[Any, np.dtype[np.float64]]
    spread: np.ndarray[Any, np.dtype[np.float64]] = field(default_factory=lambda: np.zeros(len(QUANTITIES)))

    @property
    def name(self) -> str:
        """The settings in words."""
        return f"{self.epochs} epochs, batches of {self.batch}, inputs {self.scaling}"

    @property
    def mean(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The mean of every quantity over the networks."""
        return np.asarray(self.values.mean(axis=0))

    @property
    def error(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The standard error of :attr:`mean`."""
        return np.asarray(self.spread / len(self.values) ** 0.5)

    @property
    def distance(self) -> float:
        """The largest difference from the paper over all quantities, in standard errors of the difference."""
        return float(np.max(np.abs(self.mean - PAPER_VALUES) / np.hypot(self.error, PAPER_ERRORS)))


def fcn_mnist_grid(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Train the grid (or continue), and name the cell that comes closest to the paper's table 1."""
    spec = replace(read_spec("fcn-mnist").model, seed=seed)
    scalings, batches = (["standardised"], [128]) if quick else (list(SCALINGS), list(BATCHES))
    epochs = (1, 2) if quick else EPOCHS
    starts = range(0, _TOGETHER if quick else NETWORKS, _TOGETHER)
    groups = [
        (scaling, batch, trained_group(spec, scaling, batch, epochs, start, folder, tick))
        for start, scaling, batch in product(starts, scalings, batches)
    ]
    cells = pooled(
        [
            Cell(
                scaling, batch, epoch, _lines([g for s, b, g in groups if (s, b) == (scaling, batch)], epoch)
            )
            for scaling, batch, epoch in product(scalings, batches, epochs)
        ]
    )
    cells.sort(key=lambda cell: cell.distance)
    seconds = sum(group["seconds"] for _, _, group in groups)
    rows = [*_closest(cells), *_spread(cells), *(_cell_row(cell) for cell in cells), _cost(cells, seconds)]
    title = "Which training gives the alphas and the accuracy of table 1?"
    captions = {
        "grid": "alpha of FC2 against the test accuracy, a point for every number of epochs (they rise from left to "
        "right), a line for every batch size and scaling. The cross is the paper's, with one standard error."
    }
    figures = drawn(_draw, cells, folder)
    return Reproduction("fcn-mnist-grid", title, tuple(rows), figures, captions=captions)


def pooled(cells: list[Cell]) -> list[Cell]:
    """The cells with the spread over networks that they have in common: the root of the mean variance."""
    variance = np.mean([cell.values.var(axis=0, ddof=1) for cell in cells], axis=0)
    return [replace(cell, spread=np.sqrt(variance)) for cell in cells]


def _lines(groups: list[dict[str, Any]], epoch: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([line for group in groups for line in group["lines"][str(epoch)]])


def trained_group(
    spec: TrainingSpec,
    scaling: str,
    batch: int,
    epochs: tuple[int, ...],
    start: int,
    folder: Path,
    tick: Tick,
) -> dict[str, Any]:
    """Networks that are trained together: their lines by epoch, and the processor's seconds, from their file."""
    numbers = list(range(start, start + _TOGETHER))
    file = folder / f"{scaling.replace(' ', '-')}-{batch}-{numbers[0]}-to-{numbers[-1]}.json"
    if not file.is_file():
        scale = SCALINGS[scaling]
        inputs = spec.source if scale is None else replace(spec.source, mean=(scale[0],), std=(scale[1],))
        spec = replace(spec, source=inputs, training=replace(spec.training, batch=batch, epochs=max(epochs)))
        folder.mkdir(parents=True, exist_ok=True)
        began = time.process_time()
        lines = _measured(spec, spec.data, numbers, epochs, tick)
        write_atomic(file, json.dumps({"seconds": time.process_time() - began, "lines": lines}) + "\n")
    group: dict[str, Any] = json.loads(file.read_text())
    return group


def _measured(
    spec: TrainingSpec, data: StudyData, numbers: list[int], epochs: tuple[int, ...], tick: Tick
) -> dict[int, list[list[float]]]:
    """Alphas and test accuracy of every network after each of the epochs."""
    model = build(spec.network, data.shape, data.outputs, spec.source.context)
    x_test = data.inputs(data.x_test)
    y_test = torch.from_numpy(np.asarray(data.y_test).astype(np.int64))
    lines: dict[int, list[list[float]]] = {}

    def measure(epoch: int, networks: list[Arrays]) -> None:
        if epoch in epochs:
            lines[epoch] = [_line(arrays) for arrays in networks]
        tick(f"batch {spec.training.batch}, networks {numbers[0]} to {numbers[-1]}: epoch {epoch}")

    @torch.no_grad()
    def _line(arrays: Arrays) -> list[float]:
        model.load_state_dict({name: torch.from_numpy(values) for name, values in arrays.items()})
        accuracy = float((model(x_test).argmax(1) == y_test).double().mean())
        tails = [spectrum(arrays[f"fc{number}.weight"]).tail for number in range(1, 6)]
        return [*(float("nan") if tail is None else float(tail.alpha) for tail in tails), 100 * accuracy]

    train(spec, data, numbers, after_epoch=measure)
    return lines


def _closest(cells: list[Cell]) -> list[Row]:
    best = cells[0]
    facts: dict[str, Fact] = {
        "distance": best.distance,
        "cells": len(cells),
        "within": best.distance <= 2,
        "networks": len(best.values),
        "planned": PLANNED,
    }
    rows = [
        Row(
            "closest training: largest difference from the paper, in standard errors",
            0,
            round(best.distance, 2),
            f"{best.name}; the closest of {len(cells)} trainings, chosen after looking at all of them",
            error=1.0,
            seeds=len(best.values),
            key="closest-training",
            facts=facts,
        )
    ]
    for what, paper, paper_error, mean, error in zip(
        QUANTITIES, PAPER_VALUES, PAPER_ERRORS, best.mean, best.error, strict=True
    ):
        rows.append(
            Row(
                f"closest training: {what}",
                float(paper),
                float(mean),
                f"{best.name}; the paper's standard error is {paper_error}, which is in ours",
                error=float(np.hypot(error, paper_error)),
                seeds=len(best.values),
            )
        )
    return rows


def _spread(cells: list[Cell]) -> list[Row]:
    """How far single networks differ: ten times the paper's standard errors is its spread over 100 networks."""
    rows = []
    freedom = len({(cell.scaling, cell.batch) for cell in cells}) * (len(cells[0].values) - 1)
    for what, paper_error, deviation in zip(QUANTITIES, PAPER_ERRORS, cells[0].spread, strict=True):
        paper = round(float(paper_error * PAPER_NETWORKS**0.5), 3)
        note = "paper: ten times its standard error over 100 networks; ours is pooled over all trainings"
        error = float(deviation / (2 * freedom) ** 0.5)
        rows.append(Row(f"spread over networks, {what}", paper, float(deviation), note, error=error))
    return rows


def _cost(cells: list[Cell], seconds: float) -> Row:
    count = len(cells[0].values)
    note = f"{count} networks for every training of the {PLANNED} planned; later runs continue from the stored ones"
    return Row("processor minutes of the trainings", None, round(seconds / 60, 1), note, seeds=count)


def _cell_row(cell: Cell) -> Row:
    numbers = ", ".join(f"{mean:.3f}" for mean in cell.mean)
    note = f"alphas of FC1 to FC5 and accuracy: {numbers}"
    what = f"{cell.name}: largest difference, in standard errors"
    return Row(what, None, round(cell.distance, 2), note, seeds=len(cell.values))


def _draw(cells: list[Cell], folder: Path) -> tuple[str, ...]:
    scalings = sorted({cell.scaling for cell in cells})
    figure, axes = panels(len(scalings), title="Table 1: alpha of FC2 and test accuracy", sharey=True)
    for axis, scaling in zip(axes, scalings, strict=True):
        for batch, colour in zip(BATCHES, COLOURS, strict=False):
            line = sorted(
                (c for c in cells if (c.scaling, c.batch) == (scaling, batch)), key=lambda c: c.epochs
            )
            points = [(c.mean[-1], c.mean[1]) for c in line]
            if points:
                axis.plot(*zip(*points, strict=True), "o-", ms=3, color=colour, label=f"batch {batch}")
        axis.errorbar(
            PAPER_VALUES[-1],
            PAPER_VALUES[1],
            PAPER_ERRORS[1],
            PAPER_ERRORS[-1],
            color=PAPER,
            capsize=3,
            label="paper",
        )
        axis.set(title=f"inputs {scaling}", xlabel="test accuracy, %")
    axes[0].set_ylabel("alpha of FC2")
    legend_below(figure, axes)
    return save(figure, folder, "grid")
