"""How often the interval of ``strati plan`` covers the performance on data that the plan has not seen.

Small networks are trained on the digits and on overlapping Gaussian clusters. Each is studied and planned on a
calibration sample; the planned network is then measured on held-out rows. A cell is one network, one action, one
budget and one measure of performance.

    python tools/calibrate_plan.py --networks 8

prints the table that docs/methods/plan.md states.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import strati

ACTIONS = {
    "truncate": ("parameters=0.8", "parameters=0.5"),
    "quantise": ("bits=3.5", "bits=2.5"),
    "prune": ("parameters=0.7", "parameters=0.4"),
}
MEASURES = ("loss", "accuracy")
BOUNDS = {"loss": (0.0, np.inf), "accuracy": (0.0, 1.0)}


@dataclass(frozen=True)
class Case:
    """A trained network with the rows it is planned on and the rows it is judged on."""

    network: nn.Module
    calibration: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Cell:
    """One plan: its interval, and the performance on held-out rows."""

    action: str
    measure: str
    predicted: float
    low: float
    high: float
    held_out: float

    @property
    def covered(self) -> bool:
        """Whether the interval holds the held-out performance."""
        return self.low <= self.held_out <= self.high

    @property
    def possible(self) -> bool:
        """Whether prediction and interval are values that the measure can take."""
        least, most = BOUNDS[self.measure]
        return bool(least <= self.low <= self.predicted <= self.high <= most)


def digits() -> tuple[Tensor, Tensor]:
    """The 8 x 8 digits, scaled to [0, 1]."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y)


def clusters(seed: int, rows: int = 3000, classes: int = 5, width: int = 16) -> tuple[Tensor, Tensor]:
    """Overlapping Gaussian clusters: no network can label them without error."""
    g = torch.Generator().manual_seed(seed)
    centres = 0.7 * torch.randn(classes, width, generator=g)
    y = torch.randint(0, classes, (rows,), generator=g)
    return centres[y] + torch.randn(rows, width, generator=g), y


def case(seed: int, *, rows: int = 300) -> Case:
    """A network trained on one of the two problems; widths, depths and lengths of training differ by seed."""
    x, y = digits() if seed % 2 == 0 else clusters(seed)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=g)
    train, calibration, held_out = order[:800], order[800 : 800 + rows], order[800 + rows :]
    torch.manual_seed(seed)
    width, depth = (24, 40, 64)[seed % 3], 2 + seed // 2 % 2
    sizes = [x.shape[1], *[width] * depth, int(y.max()) + 1]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    network = nn.Sequential(*layers[:-1])
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range((60, 200)[seed // 4 % 2]):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(x[train]), y[train]).backward()
        optimiser.step()
    return Case(network.eval(), (x[calibration], y[calibration]), (x[held_out], y[held_out]))


def performance(network: nn.Module, rows: tuple[Tensor, Tensor], measure: str) -> float:
    """Mean cross-entropy or accuracy on some rows."""
    with torch.no_grad():
        logits = network(rows[0])
    if measure == "accuracy":
        return float((logits.argmax(1) == rows[1]).float().mean())
    return float(nn.functional.cross_entropy(logits, rows[1]))


def cells(seed: int, *, rows: int = 300, measures: tuple[str, ...] = MEASURES) -> Iterator[Cell]:
    """Every action, budget and measure on one network."""
    one = case(seed, rows=rows)
    for measure in measures:
        study = strati.study(
            one.network,
            data=one.calibration,
            performance=measure,
            spectral=False,
            activations=False,
            interventions=[
                strati.truncate(parameters=[0.1, 0.2, 0.3, 0.5, 0.7, 0.9]),
                strati.quantise(bits=[2, 3, 4, 6]),
                strati.prune(share=[0.2, 0.4, 0.6, 0.8]),
            ],
        )
        for action, budgets in ACTIONS.items():
            for budget in budgets:
                plan = strati.plan(study, budget=budget, action=action, seed=seed)
                with strati.intervened(one.network, action, plan.choices):
                    judged = performance(one.network, one.held_out, measure)
                ends: Any = plan.predicted
                yield Cell(action, measure, ends["performance"], ends["low"], ends["high"], judged)


def main() -> None:
    """Print the table of docs/methods/plan.md."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--networks", type=int, default=8, help="Networks to train.")
    parser.add_argument("--first", type=int, default=0, help="Seed of the first network.")
    parser.add_argument("--rows", type=int, default=300, help="Rows of the calibration sample.")
    wanted = parser.parse_args()
    measured = [
        c
        for seed in range(wanted.first, wanted.first + wanted.networks)
        for c in cells(seed, rows=wanted.rows)
    ]
    print(
        "| performance | action | cells | 95 % interval covers | below it | above it | median width | impossible |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for measure in MEASURES:
        for action in ACTIONS:
            own = [c for c in measured if (c.measure, c.action) == (measure, action)]
            below = sum(c.held_out < c.low for c in own)
            above = sum(c.held_out > c.high for c in own)
            width = float(np.median([c.high - c.low for c in own]))
            numbers = (f"{sum(c.covered for c in own)} of {len(own)}", below, above, f"{width:.2g}")
            impossible = sum(not c.possible for c in own)
            print(f"| {measure} | {action} | {len(own)} | {' | '.join(map(str, numbers))} | {impossible} |")


if __name__ == "__main__":
    main()
