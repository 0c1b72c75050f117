"""The toy model of superposition followed (Elhage et al. 2022; Chen et al. 2023): polygons and plateaus.

Six features, one at a time, go through two dimensions and back: ``relu(W^T W x + b)``. The columns of ``W`` form
polygons. Chen et al.: regular polygons are critical points, training stays near them for long and goes from high loss
and low learning coefficient to low loss and high learning coefficient. Runs start near a square, as theirs do.

The polygons of :mod:`polygons` are known exactly: their loss, and for pentagons and the hexagon the learning
coefficient. Each plateau of a training is compared with the polygon it stays at, at the same temperature and
localisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from strati.core.results import Tick
from strati.core.rng import derive
from strati_reproductions.checkpointed_training import Training, load, spaced, step_of, trained
from strati_reproductions.pictures import over_steps
from strati_reproductions.registry import Reproduction, Row
from strati_reproductions.superposition.polygons import (
    FEATURES,
    KNOWN,
    SILENT,
    WIDTH,
    CriticalPoint,
    critical_point,
    exact_loss,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.tracking.result import Track

ROWS, BATCH, RATE = 1000, 50, 0.3
NBETA, GAMMA = 1000.0, 60.0
"""Of every learning coefficient in training: cold enough for polygons to differ, and held near them."""

SEE = (
    "Loss, learning coefficient with two errors, and corners of the polygon over training; a vertical line is where a "
    "plateau begins. Each drop of the loss goes with more corners."
)

_COLD, _HELD = 1e6, 400.0  # inverse temperature and localisation at which polygons show their limit
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

    name: str
    first: int
    last: int
    loss: float
    coefficient: float
    error: float


@dataclass(frozen=True)
class Reference:
    """A known polygon, and its learning coefficient at the temperature and localisation of the trainings."""

    point: CriticalPoint
    coefficient: float | None
    error: float | None


def superposition(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Polygons and their learning coefficients; plateaus of trainings, and the transitions between them."""
    seeds, steps, count = (2, 3000, 16) if quick else (5, 40_000, 40)
    rows, references = _known(seed, tick)
    orders: list[tuple[Plateau, Plateau]] = []
    pictures: list[str] = []
    for k in range(seeds):
        tracked, plateaus, picture = _followed(folder, seed + k, steps, count, tick)
        pictures += picture
        rows += _plateau_rows(seed + k, plateaus, references)
        rows.append(
            Row(f"seed {seed + k}: steps at which the loss changes its course", None, *_changes(tracked))
        )
        orders += [(a, b) for a, b in pairwise(plateaus) if a.name != b.name]
    lower = sum(b.loss < a.loss for a, b in orders)
    higher = sum(b.coefficient > a.coefficient for a, b in orders)
    more = sum(int(b.name[0]) > int(a.name[0]) for a, b in orders)
    total = len(orders)
    listed = "; ".join(f"{a.name} to {b.name}" for a, b in orders) or "none seen"
    rows += [
        Row("transitions between plateaus that lower the loss", "all", _all(lower, total), listed),
        Row("transitions that raise the learning coefficient", "all", _all(higher, total), listed),
        Row("transitions to more corners", "most", _all(more, total), listed),
    ]
    title = "The toy model of superposition: polygons and their learning coefficients (Chen et al. 2023)"
    return Reproduction("superposition", title, tuple(rows), tuple(pictures), captions={"superposition": SEE})


def _all(count: int, total: int) -> str:
    return "all" if total and count == total else f"{count} of {total}"


def _known(seed: int, tick: Tick) -> tuple[list[Row], dict[str, Reference]]:
    """The polygons that are known exactly: loss, and the learning coefficient compared with theory."""
    from strati.landscape.llc.llc import learning_coefficient

    rows, references = [], {}
    for name in KNOWN:
        point = critical_point(name)
        cold, warm = (
            learning_coefficient(exact_loss, point.theta, nbeta=nbeta, gamma=gamma, ladder=False, seed=seed)
            for nbeta, gamma in ((_COLD, _HELD), (NBETA, GAMMA))
        )
        references[name] = Reference(point, warm.estimate, warm.stderr)
        note = f"loss {point.loss:.4f} over all data; on a kink of the ReLU: no value from theory"
        if point.coefficient is not None:
            note = f"loss {point.loss:.4f} over all data; theory: half the rank of the Hessian"
        rows.append(
            Row(
                f"polygon {name}: learning coefficient",
                None,
                cold.estimate,
                note if cold.estimate is not None else f"{note}; {cold.reason}",
                theory=point.coefficient,
                error=cold.stderr,
            )
        )
        tick(f"polygon {name}")
    return rows, references


def _plateau_rows(seed: int, plateaus: Sequence[Plateau], references: dict[str, Reference]) -> list[Row]:
    """Each plateau compared with the polygon that it stays at."""
    rows = []
    for plateau in plateaus:
        reference = references.get(plateau.name)
        note = f"loss {plateau.loss:.4f}"
        theory = None
        if reference is not None:
            theory = reference.coefficient
            note += f" (the polygon's: {reference.point.loss:.4f}, other data)"
        rows.append(
            Row(
                f"seed {seed}: {plateau.name} from step {plateau.first} to {plateau.last}, learning coefficient",
                None,
                plateau.coefficient,
                f"{note}; nbeta {NBETA:g}, gamma {GAMMA:g}; theory: the exact polygon sampled with the same",
                theory=theory,
                error=plateau.error,
            )
        )
    return rows


def _changes(tracked: Track) -> tuple[str, str]:
    breaks_of_loss = [c for c in tracked.breaks if c["what"] == "loss"]
    listed = "; ".join(f"{c['step']:.0f} [{c['low']:.0f}, {c['high']:.0f}]" for c in breaks_of_loss)
    return listed or "none found", "95 % intervals"


def data(seed: int) -> Tensor:
    """One feature at a time, uniform between 0 and 1."""
    generator = torch.Generator().manual_seed(derive(seed, "superposition"))
    which = torch.randint(FEATURES, (ROWS,), generator=generator)
    rows: Tensor = torch.nn.functional.one_hot(which, FEATURES) * torch.rand(ROWS, 1, generator=generator)
    return rows


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


def named(weight: NDArray[np.floating], bias: NDArray[np.floating]) -> tuple[str, bool]:
    """The polygon's name: its corners, and the sign of the bias of every feature left out; whether it is regular.

    Examples:
        >>> named(np.array([[1.0, 0, -1, 0, 0], [0, 1.0, 0, -1, 0]]), np.array([0, 0, 0, 0, 0.1]))
        ('4+', True)
    """
    corners, regular = polygon(weight)
    length = np.linalg.norm(weight, axis=0)
    left = bias[length <= _LONG * length.max()]
    return f"{corners}{'+' * int((left > 0).sum())}{'-' * int((left <= 0).sum())}", regular


def start(seed: int) -> Superposition:
    """Near a square: four features at right angles, two near zero, with biases on either side of zero or above it."""
    model = Superposition()
    generator = torch.Generator().manual_seed(derive(seed, "superposition start"))
    with torch.no_grad():
        corners = torch.tensor([[1.0, 0, -1, 0, 0, 0], [0, 1.0, 0, -1, 0, 0]])
        model.weight.copy_(0.9 * corners + 0.05 * torch.randn(WIDTH, FEATURES, generator=generator))
        model.bias.copy_(torch.tensor([0.0, 0, 0, 0, 0.3, 0.3 if seed % 2 else SILENT]))
    return model


def _followed(
    folder: Path, seed: int, steps: int, count: int, tick: Tick
) -> tuple[Track, list[Plateau], tuple[str, ...]]:
    from strati.tracking.track import track

    x = data(seed)

    def loss(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive(seed, "batch", step))
        rows = x[torch.randint(ROWS, (BATCH,), generator=generator)]
        error: Tensor = ((model(rows) - rows) ** 2).sum(1).mean()
        return error

    plan = Training(steps, spaced(steps, count), rate=RATE, sgd=True)
    paths = trained(folder / f"seed-{seed}-{steps}", start(seed), loss, plan, tick=tick)
    tracked = track(
        paths,
        data=(x, x),
        model=Superposition(),
        out=folder / f"followed-{seed}-{steps}",
        what="loss,llc",
        loss="mse",
        nbeta=NBETA,
        gamma=GAMMA,
        chains=8,
        draws=600,
        seed=seed,
        tick=tick,
    )
    model = Superposition()
    kinds = []
    for path in paths:
        load(model, path)
        kinds.append(named(model.weight.detach().numpy(), model.bias.detach().numpy()))
    plateaus = _plateaus(tracked, [step_of(path) for path in paths], kinds)
    level, each = (next(s for s in tracked.curves if s.what == what) for what in ("llc", "loss"))
    picture = over_steps(
        folder,
        f"superposition-{seed}",
        [
            {"title": "loss", "lines": [("loss", tracked.steps, each.values)]},
            {
                "title": "learning coefficient",
                "lines": [("lambda", tracked.steps, level.values, level.stderr)],
            },
            {"title": "corners", "lines": [("corners", tracked.steps, [float(k[0][0]) for k in kinds])]},
        ],
        title=f"toy model of superposition, seed {seed}",
        marks=[float(p.first) for p in plateaus],
    )
    return tracked, plateaus, picture


def _plateaus(tracked: Track, steps: Sequence[int], kinds: Sequence[tuple[str, bool]]) -> list[Plateau]:
    """Stretches of one regular polygon and a steady loss, two checkpoints long at least."""
    level, each = (next(s for s in tracked.curves if s.what == what) for what in ("llc", "loss"))
    losses = [float("nan") if v is None else v for v in each.values]
    plateaus: list[Plateau] = []
    begin = next((k for k, step in enumerate(steps) if step >= _SETTLED), len(steps))
    for k in range(begin + 1, len(steps) + 1):
        steady = k < len(steps) and kinds[k] == kinds[begin]
        if steady and abs(losses[k] - losses[k - 1]) <= _FLAT * losses[k - 1]:
            continue
        values = [
            (v, e or 0.0)
            for v, e in zip(level.values[begin:k], level.stderr[begin:k], strict=True)
            if v is not None
        ]
        if k - begin >= 2 and kinds[begin][1] and values:
            # The same random numbers at every checkpoint: their errors do not average out, what training adds does.
            mean = float(np.mean([v for v, _ in values]))
            shared = float(np.sqrt(np.mean([e**2 for _, e in values])))
            moved = float(np.std([v for v, _ in values], ddof=1)) if len(values) > 1 else 0.0
            error = float(np.hypot(shared, moved / len(values) ** 0.5))
            plateaus.append(Plateau(kinds[begin][0], steps[begin], steps[k - 1], losses[k - 1], mean, error))
        begin = k
    return plateaus
