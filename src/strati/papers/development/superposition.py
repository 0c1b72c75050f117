"""The toy model of superposition followed (Elhage et al. 2022; Chen et al. 2023): polygons and plateaus.

Six features, one at a time, go through two dimensions and back: ``relu(W^T W x + b)``. The columns of ``W`` form
polygons. Chen et al.: regular polygons are critical points, training stays near them for long and goes from high loss
and low learning coefficient to low loss and high learning coefficient. Runs start near the square, as theirs do.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from strati.papers.development.drawing import panels
from strati.papers.development.training import Training, load, spaced, step_of, trained
from strati.papers.registry import Reproduction, Row
from strati.rng import derive
from strati.types import Tick

if TYPE_CHECKING:
    from numpy.typing import NDArray

FEATURES, WIDTH, ROWS, BATCH = 6, 2, 1000, 50
_LONG = 0.35  # of the longest column: shorter ones stand for no feature
_REGULAR = 0.25  # relative difference of angles in a polygon
_SETTLED = 10  # steps in which the start is forgotten
_FLAT = 0.15  # relative change of the loss from one checkpoint to the next, on a plateau


class Superposition(nn.Module):
    """Features through a bottleneck and back."""

    def __init__(self, features: int = FEATURES, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, features))
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        """The features as they come back."""
        return torch.relu(x @ self.weight.T @ self.weight + self.bias)


@dataclass(frozen=True)
class Plateau:
    """A stretch of checkpoints with one polygon and a steady loss."""

    corners: int
    first: int
    last: int
    loss: float
    coefficient: float
    error: float


def superposition(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Plateaus of the toy model, their polygons, losses and learning coefficients."""
    seeds, steps, count = (2, 3000, 16) if quick else (5, 40_000, 40)
    rows: list[Row] = []
    orders, pictures = [], []
    for k in range(seeds):
        found, picture = _followed(folder, seed + k, steps, count, tick)
        pictures.append(picture)
        shown = " -> ".join(
            f"{p.corners}-gon ({p.loss:.4f}, {p.coefficient:.2f} +- {p.error:.2f})" for p in found
        )
        span = f"{steps} steps of SGD, batch {BATCH}, {ROWS} data"
        rows.append(
            Row(f"seed {seed + k}: polygons (loss, learning coefficient)", None, shown or "none", span)
        )
        orders += [(a, b) for a, b in pairwise(found)]
    lower = sum(b.loss < a.loss for a, b in orders)
    higher = sum(b.coefficient > a.coefficient for a, b in orders)
    more = sum(b.corners > a.corners for a, b in orders)
    total = len(orders)
    rows += [
        Row("transitions between plateaus that lower the loss", "all", f"{lower} of {total}"),
        Row("transitions that raise the learning coefficient", "all", f"{higher} of {total}"),
        Row("transitions to more corners", "most", f"{more} of {total}", "4 to 5 to 6"),
    ]
    title = "The toy model of superposition: polygons and their learning coefficients (Chen et al. 2023)"
    return Reproduction("superposition", title, tuple(rows), tuple(pictures))


def data(seed: int) -> Tensor:
    """One feature at a time, uniform between 0 and 1."""
    generator = torch.Generator().manual_seed(derive(seed, "superposition"))
    which = torch.randint(FEATURES, (ROWS,), generator=generator)
    found: Tensor = torch.nn.functional.one_hot(which, FEATURES) * torch.rand(ROWS, 1, generator=generator)
    return found


def polygon(weight: NDArray[np.floating]) -> tuple[int, bool]:
    """How many columns stand for features, and whether they form a regular polygon.

    Examples:
        >>> angles = np.arange(5) * 2 * np.pi / 5
        >>> polygon(np.stack([np.cos(angles), np.sin(angles)]))
        (5, True)
        >>> polygon(np.array([[1.0, 0, -1, 0, 0], [0, 1.0, 0, -1, 0]]))
        (4, True)
    """
    length = np.linalg.norm(weight, axis=0)
    held = weight[:, length > _LONG * length.max()]
    angles = np.sort(np.arctan2(held[1], held[0]))
    gaps = np.diff(np.append(angles, angles[0] + 2 * np.pi))
    even = 2 * np.pi / len(angles)
    return len(angles), bool(np.all(np.abs(gaps - even) <= _REGULAR * even))


def start(seed: int) -> Superposition:
    """Near the square: four features at right angles, two near zero."""
    model = Superposition()
    generator = torch.Generator().manual_seed(derive(seed, "superposition start"))
    with torch.no_grad():
        corners = torch.tensor([[1.0, 0, -1, 0, 0, 0], [0, 1.0, 0, -1, 0, 0]])
        model.weight.copy_(0.9 * corners + 0.05 * torch.randn(WIDTH, FEATURES, generator=generator))
        model.bias.copy_(torch.tensor([0.0, 0, 0, 0, 0.3, 0.3]))
    return model


def _followed(folder: Path, seed: int, steps: int, count: int, tick: Tick) -> tuple[list[Plateau], str]:
    from strati.tracking.track import track

    x = data(seed)

    def loss(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive(seed, "batch", step))
        rows = x[torch.randint(ROWS, (BATCH,), generator=generator)]
        found: Tensor = ((model(rows) - rows) ** 2).sum(1).mean()
        return found

    plan = Training(steps, spaced(steps, count), rate=0.3, sgd=True)
    paths = trained(folder / f"seed-{seed}-{steps}", start(seed), loss, plan, tick=tick)
    found = track(
        paths,
        data=(x, x),
        model=Superposition(),
        out=folder / f"followed-{seed}-{steps}",
        what="loss,llc",
        loss="mse",
        chains=8,
        draws=400,
        seed=seed,
        tick=tick,
    )
    level = next(s for s in found.curves if s.what == "llc")
    each = next(s for s in found.curves if s.what == "loss")
    model = Superposition()
    kinds = [polygon(load(model, path).weight.detach().numpy()) for path in paths]  # type: ignore[operator]
    losses = [FEATURES * (v or float("nan")) for v in each.values]
    plateaus: list[Plateau] = []
    begin = 0
    for k in range(1, len(paths) + 1):
        steady = k < len(paths) and kinds[k] == kinds[begin]
        steady = steady and abs(losses[k] - losses[k - 1]) <= _FLAT * losses[k - 1]
        if steady:
            continue
        values = [
            (v, e) for v, e in zip(level.values[begin:k], level.stderr[begin:k], strict=True) if v is not None
        ]
        if k - begin >= 2 and step_of(paths[begin]) >= _SETTLED and kinds[begin][1] and values:
            mean = float(np.mean([v for v, _ in values]))
            error = float(np.sqrt(np.mean([(e or 0.0) ** 2 for _, e in values])))
            plateaus.append(
                Plateau(
                    kinds[begin][0], step_of(paths[begin]), step_of(paths[k - 1]), losses[k - 1], mean, error
                )
            )
        begin = k
    picture = panels(
        folder / f"superposition-{seed}.png",
        [
            {"title": "loss", "lines": [("loss", found.steps, losses)]},
            {"title": "learning coefficient", "lines": [("lambda", found.steps, level.values, level.stderr)]},
            {"title": "corners", "lines": [("corners", found.steps, [float(k[0]) for k in kinds])]},
        ],
        title=f"toy model of superposition, seed {seed}",
        marks=[float(p.first) for p in plateaus],
    )
    return plateaus, picture
