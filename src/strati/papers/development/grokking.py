"""Grokking followed: modular addition with weight decay and without (Nanda et al. 2023), in which order things change.

A network first learns its part of the table by heart; long after, its test loss falls. The claims: the network has
begun to change before that (progress measures move first), and without weight decay it does not generalise. Asked
here: when do spectra leave the random-like phase, when does the learning coefficient fall, when does the test loss,
in which order.

The full size is mod 113 on a network of embeddings and one hidden layer, with five seeds, and one seed of the one-layer
transformer of the paper; both train on the whole batch with weight decay 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from strati.papers.development.drawing import panels
from strati.papers.development.modular_addition import Adder, SmallAdder, table, whole_table_loss
from strati.papers.development.training import Training, halfway, load, step_of, trained
from strati.papers.registry import Reproduction, Row
from strati.rng import derive
from strati.types import Tick, silent

if TYPE_CHECKING:
    from torch import nn

    from strati.tracking.track import Track


@dataclass(frozen=True)
class Setup:
    """A size of the experiment.

    Attributes:
        modulus: Of the addition.
        share: Of the table that is learned from.
        attention: The one-layer transformer; otherwise embeddings and one hidden layer.
        steps: At most.
        every: Steps between two checkpoints.
        seeds: Runs with weight decay.
        coefficients: Checkpoints of each run whose learning coefficient and spectra are taken.
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


TRANSFORMER = Setup(113, 0.3, True, 20_000, 100, 1, 20, 4, 150)
FULL = Setup(113, 0.4, False, 20_000, 50, 5, 20, 4, 150)
QUICK = Setup(31, 0.5, False, 2_000, 50, 2, 9, 4, 100)
RATE, DECAY, BETAS = 3e-3, 1.0, (0.9, 0.98)
"""Nanda et al. have a rate of 1e-3; thrice that makes everything happen in a third of the steps."""

_END = 0.01  # test loss at which grokking has ended


@dataclass(frozen=True)
class Followed:
    """One run: test loss at every checkpoint, the rest at some."""

    steps: tuple[int, ...]
    train: tuple[float, ...]
    test: tuple[float, ...]
    accuracy: float
    track: Track
    left: float | None  # first step at which half of the matrices are no longer random-like

    def coefficient(self) -> tuple[list[float], list[float], list[float]]:
        """Steps, values and errors of the learning coefficient."""
        curve = next((s for s in self.track.curves if s.what == "llc" and s.layer is None), None)
        if curve is None:  # every checkpoint was refused
            return [], [], []
        known = [
            (t, v, e or 0.0)
            for t, v, e in zip(self.track.steps, curve.values, curve.stderr, strict=True)
            if v is not None
        ]
        return [k[0] for k in known], [k[1] for k in known], [k[2] for k in known]

    def events(self) -> dict[str, float | None]:
        """The step at which each thing happens."""
        steps, values, _ = self.coefficient()
        return {
            "half of the matrices leave the random-like phase": self.left,
            "training loss is halfway down": halfway(self.steps, self.train),
            "learning coefficient is halfway down from its peak": halfway(steps, values),
            "test loss is halfway down from its peak": halfway(self.steps, self.test),
        }


def grokking(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """In which order spectra, learning coefficient and test loss change, with weight decay and without."""
    setup = QUICK if quick else FULL
    runs = [_followed(folder, setup, DECAY, seed + k, tick=tick) for k in range(setup.seeds)]
    longest = max(run.steps[-1] for run in runs)
    without = _followed(folder, setup, 0.0, seed, steps=longest, tick=tick)
    rows = [*_ending(runs, without, setup), *_order(runs, setup)]
    pictures = [_drawn(folder, setup, runs[0], without)]
    if not quick:
        one = _followed(folder, TRANSFORMER, DECAY, seed, tick=tick)
        rows += [replace(row, what=f"transformer: {row.what}") for row in _order([one], TRANSFORMER)]
        pictures.append(_drawn(folder, TRANSFORMER, one, None))
    return Reproduction(
        "grokking",
        "Grokking: a + b mod p, what changes when (Nanda et al. 2023)",
        tuple(rows),
        tuple(pictures),
    )


def trained_run(
    folder: Path, setup: Setup, decay: float, seed: int, *, steps: int | None = None, tick: Tick = silent
) -> tuple[Path, ...]:
    """Train one network, until it has grokked or ``steps`` are over; its checkpoints."""
    (x, y), test = table(setup.modulus, setup.share, seed)
    last = steps or setup.steps
    marks = tuple(sorted({0, 2, 5, 10, 20, *range(0, last + 1, setup.every)}))
    plan = Training(last, marks, rate=RATE, decay=decay, betas=BETAS, warmup=10)
    kind = "transformer" if setup.attention else "mlp"
    home = folder / f"{kind}-{setup.modulus}" / f"decay-{decay:g}-seed-{seed}"
    return trained(
        home,
        setup.network(seed),
        whole_table_loss(x, y),
        plan,
        done=lambda model: _loss(model, *test)[0] < _END,
        tick=tick,
    )


def _followed(
    folder: Path, setup: Setup, decay: float, seed: int, *, steps: int | None = None, tick: Tick
) -> Followed:
    from strati.spectra.scan import scan
    from strati.tracking.track import track

    paths = trained_run(folder, setup, decay, seed, steps=steps, tick=tick)
    (x, y), test = table(setup.modulus, setup.share, seed)
    model = setup.network(seed)
    train, held = [], []
    for path in paths:
        load(model, path)
        train.append(_loss(model, x, y)[0])
        held.append(_loss(model, *test))
    some = [
        paths[i] for i in np.unique(np.linspace(0, len(paths) - 1, setup.coefficients).round().astype(int))
    ]
    found = track(
        some,
        data=(x, y),
        model=model,
        out=paths[0].parent / f"followed-{setup.chains}-{setup.draws}",
        what="spectra,llc",
        loss="cross_entropy",
        chains=setup.chains,
        draws=setup.draws,
        seed=seed,
        tick=tick,
    )
    left = None
    for path in some:
        phases = [layer["phase"] for layer in scan(path).to_dict()["layers"]]
        if sum(phase != "random-like" for phase in phases) >= len(phases) / 2:
            left = float(step_of(path))
            break
    at = tuple(step_of(path) for path in paths)
    return Followed(at, tuple(train), tuple(h[0] for h in held), held[-1][1], found, left)


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    with torch.no_grad():
        out = model(x)
        return float(functional.cross_entropy(out, y)), float((out.argmax(1) == y).double().mean())


def _ending(runs: list[Followed], without: Followed, setup: Setup) -> list[Row]:
    size = (
        f"mod {setup.modulus}, {setup.share:.0%} of the table, rate {RATE:g}, {setup.steps} steps at most; "
        f"{setup.seeds} seeds with decay {DECAY:g}, 1 without"
    )
    grokked = sum(run.test[-1] < _END for run in runs)
    ends = ", ".join(str(run.steps[-1]) if run.test[-1] < _END else "not reached" for run in runs)
    return [
        Row("runs with weight decay that generalise", "all", f"{grokked} of {len(runs)}", size),
        Row("their test loss falls below 0.01 at step", "about 10,000 (rate 1e-3)", ends),
        Row(
            "test accuracy without weight decay, after as many steps",
            "does not generalise",
            f"{without.accuracy:.1%}",
            f"training loss {without.train[-1]:.2g}, test loss {without.test[-1]:.3g}",
        ),
    ]


def _order(runs: list[Followed], setup: Setup) -> list[Row]:
    rows = []
    events = [run.events() for run in runs]
    for what in events[0]:
        known = [at for at in (e[what] for e in events) if at is not None]
        spread = "no seed" if not known else f"{np.median(np.array(known, float)):.0f}"
        note = (
            f"range over {len(known)} of {len(runs)} seeds: {min(known):.0f} to {max(known):.0f}"
            if known
            else ""
        )
        rows.append(Row(f"step at which {what}", None, spread, note))
    names = list(events[0])
    for first, second in ((names[0], names[3]), (names[2], names[3])):
        pairs = [(e[first], e[second]) for e in events]
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        before = sum(a < b for a, b in both)
        claim = "progress measures move first"
        rows.append(Row(f"{first}, before the {second}", claim, f"{before} of {len(both)} seeds"))
    breaks = [
        f"{c['step']:.0f} [{c['low']:.0f}, {c['high']:.0f}]"
        for c in runs[0].track.breaks
        if c["what"] == "llc" and c["layer"] is None
    ]
    note = "first seed; 95 % intervals"
    rows.append(
        Row("changes of the learning coefficient at steps", None, "; ".join(breaks) or "none found", note)
    )
    rows.append(
        Row("learning coefficients refused", None, _refused(runs), f"of {setup.coefficients} in each run")
    )
    return rows


def _refused(runs: list[Followed]) -> str:
    failed = [f for run in runs for f in run.track.failed]
    return f"{len(failed)}" + (f" ({failed[0]['reason']})" if failed else "")


def _drawn(folder: Path, setup: Setup, run: Followed, without: Followed | None) -> str:
    steps, values, errors = run.coefficient()
    curves: list[dict[str, Any]] = [
        {
            "title": "loss",
            "log": True,
            "lines": [("training", run.steps, run.train), ("test", run.steps, run.test)],
        },
        {"title": "learning coefficient", "lines": [("decay 1", steps, values, errors)]},
        {
            "title": "stable rank",
            "lines": [
                (s.layer, run.track.steps, s.values) for s in run.track.curves if s.what == "stable_rank"
            ],
        },
    ]
    if without is not None:
        curves[0]["lines"].append(("test, no decay", without.steps, without.test))
        curves[1]["lines"].append(("no decay", *without.coefficient()))
    kind = "transformer" if setup.attention else "mlp"
    return panels(folder / f"grokking-{kind}-{setup.modulus}.png", curves, title=f"a + b mod {setup.modulus}")
