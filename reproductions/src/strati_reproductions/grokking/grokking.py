"""``reproduce grokking`` and ``grokking-levels``: modular addition with and without weight decay (Nanda et al. 2023).

A network first memorises its part of the table; long after, its test loss falls. The paper claims that the network has
begun to change before that (progress measures move first), and that it does not generalise without weight decay. This
reproduction also measures when spectra leave the random-like phase, when the learning coefficient falls and when the
test loss does, with intervals. In ``grokking`` every run has the gamma that strati's rule gives for it, so that only
the course of a run can be read. In ``grokking-levels`` all runs have one gamma, so that levels can be compared.

The full size is that of the paper: mod 113, 30 % of the table, a one-layer transformer, AdamW on the whole batch at a
rate of 1e-3 with weight decay 1 (five seeds; one for the levels) and without (one). The quick one is mod 31 on
embeddings and one hidden layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from strati.core.results import Tick, silent
from strati.core.rng import derive
from strati_reproductions.checkpointed_training import Training, load, step_of, trained
from strati_reproductions.grokking.events import Event, first_of, halfway, mean_step, ratio
from strati_reproductions.grokking.modular_addition import Adder, SmallAdder, table, whole_table_loss
from strati_reproductions.pictures import events_by_seed, over_steps
from strati_reproductions.registry import Reproduction, Row
from strati_reproductions.rows import Fact

if TYPE_CHECKING:
    from torch import nn

    from strati.tracking.result import Track

SEE = (
    "The training loss falls first and the test loss long after it, but only with weight decay. Below are the learning "
    "coefficient with two errors and the stable rank of every layer. The table has the gamma of every run: the levels "
    "of runs with different gammas cannot be compared."
)
SEE_LEVELS = (
    "Losses of seed 0 and without decay; below them the learning coefficient with two errors, at one gamma."
)
SEE_ORDER = "One row per event, one mark with its interval per seed. Events further left happen earlier."


@dataclass(frozen=True)
class Setup:
    """A size of the experiment.

    Attributes:
        modulus: Modulus of the addition.
        share: Share of the table that is used for training.
        attention: Use the one-layer transformer; otherwise embeddings and one hidden layer.
        rate: Learning rate.
        steps: Most steps of a run.
        every: Steps between two checkpoints.
        seeds: Runs with weight decay.
        coefficients: Checkpoints of each run whose learning coefficient and spectra are measured.
        chains: Chains of each estimate.
        draws: Draws of each chain.
        batch: Rows of a minibatch of the sampler. ``nbeta`` is ``batch / ln batch``: at that of all rows the stiffest
            checkpoint needs such short steps that chains mix only under a localisation at which every coefficient is
            near 0.
        gamma: Localisation of every learning coefficient; ``None`` is what strati's rule gives for each run.
    """

    modulus: int
    share: float
    attention: bool
    rate: float
    steps: int
    every: int
    seeds: int
    coefficients: int
    chains: int
    draws: int
    batch: int
    gamma: float | None

    def network(self, seed: int) -> nn.Module:
        """The untrained network."""
        torch.manual_seed(derive(seed, "grokking"))
        return Adder(self.modulus, width=WIDTH) if self.attention else SmallAdder(self.modulus)


FULL = Setup(113, 0.3, True, 1e-3, 20_000, 100, 5, 20, 4, 400, 128, None)
QUICK = Setup(31, 0.5, False, 3e-3, 2_000, 50, 2, 9, 4, 200, 128, 100.0)
WIDTH = 128
"""Of the transformer; its weights start with a variance of ``1 / WIDTH``."""
LEVELS = replace(FULL, seeds=1, coefficients=12, draws=200, gamma=4.0 * WIDTH)
"""Gamma was fixed before the run: it holds a weight to half of the size with which weights start."""
DECAY, BETAS = 1.0, (0.9, 0.98)

SPECTRA = "half of the matrices leave the random-like phase"
TRAIN = "training loss is halfway down"
COEFFICIENT = "learning coefficient is halfway down from its peak"
TEST = "test loss is halfway down from its peak"
CODES = {SPECTRA: "spectra", TRAIN: "training-loss", COEFFICIENT: "coefficient", TEST: "test-loss"}

_END = 0.01  # test loss at which grokking has ended


@dataclass(frozen=True)
class TrackedRun:
    """One run: losses at every checkpoint, learning coefficients and spectra at some."""

    steps: tuple[int, ...]
    train: tuple[float, ...]
    test: tuple[float, ...]
    accuracy: float
    track: Track
    left: Event | None  # half of the matrices are no longer random-like

    def coefficient(self) -> tuple[list[float], list[float], list[float]]:
        """Steps, values and errors of the learning coefficient."""
        curve = next((s for s in self.track.curves if s.what == "llc" and s.layer is None), None)
        if curve is None:  # every checkpoint was refused
            return [], [], []
        estimates = [
            (t, v, e or 0.0)
            for t, v, e in zip(self.track.steps, curve.values, curve.stderr, strict=True)
            if v is not None
        ]
        return [k[0] for k in estimates], [k[1] for k in estimates], [k[2] for k in estimates]

    def events(self) -> dict[str, Event | None]:
        """The step at which each thing happens, with its interval."""
        return {
            SPECTRA: self.left,
            TRAIN: halfway(self.steps, self.train),
            COEFFICIENT: halfway(*self.coefficient()),
            TEST: halfway(self.steps, self.test),
        }


def grokking(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """In which order spectra, learning coefficient and test loss change, with weight decay and without."""
    setup = QUICK if quick else FULL
    runs = [_tracked(folder, setup, DECAY, seed + k, tick=tick) for k in range(setup.seeds)]
    longest = max(run.steps[-1] for run in runs)
    without = _tracked(folder, setup, 0.0, seed, steps=longest, tick=tick)
    each = [run.events() for run in runs]
    events = {what: [of_run[what] for of_run in each] for what in each[0]}
    rows = [
        *_ending(runs, without, setup),
        *_when(events, without.events()),
        *_order(events),
        *_coefficients(runs, without, setup),
    ]
    name = f"grokking-mod-{setup.modulus}"
    pictures = (
        *over_steps(folder, name, _curves(runs[0], without), title=f"a + b mod {setup.modulus}, seed {seed}"),
        *events_by_seed(folder, f"{name}-order", events, title="events by seed"),
    )
    title = "Grokking of a + b mod p: the order of the changes (Nanda et al. 2023)"
    captions = {name: SEE, f"{name}-order": SEE_ORDER}
    return Reproduction("grokking", title, tuple(rows), pictures, captions=captions)


def grokking_levels(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """The learning coefficients of runs that generalise and of one that memorises, at one gamma."""
    setup = QUICK if quick else LEVELS
    home = folder.parent / "grokking"
    runs = [_tracked(home, setup, DECAY, seed + k, tick=tick) for k in range(setup.seeds)]
    longest = max(run.steps[-1] for run in runs)
    without = _tracked(home, setup, 0.0, seed, steps=longest, tick=tick)
    rows = [*_ending(runs, without, setup), *_coefficients(runs, without, setup)]
    rows.append(_levels(rows))
    curves = [
        _curves(runs[0], without)[0],
        {
            "title": "learning coefficient",
            "lines": [
                *((f"seed {seed + k}", *run.coefficient()) for k, run in enumerate(runs)),
                ("no decay", *without.coefficient()),
            ],
        },
    ]
    name = f"levels-mod-{setup.modulus}"
    title = f"a + b mod {setup.modulus}, gamma {setup.gamma:g} in all runs"
    pictures = over_steps(folder, name, curves, title=title)
    heading = "Grokking of a + b mod p: levels of the learning coefficient at one gamma"
    return Reproduction("grokking-levels", heading, tuple(rows), pictures, captions={name: SEE_LEVELS})


def trained_run(
    folder: Path, setup: Setup, decay: float, seed: int, *, steps: int | None = None, tick: Tick = silent
) -> tuple[Path, ...]:
    """Train one network, until it has grokked or ``steps`` are over; its checkpoints."""
    (x, y), test = table(setup.modulus, setup.share, seed)
    last = steps or setup.steps
    marks = tuple(sorted({0, 2, 5, 10, 20, *range(0, last + 1, setup.every)}))
    plan = Training(last, marks, rate=setup.rate, decay=decay, betas=BETAS, warmup=10)
    kind = "transformer" if setup.attention else "mlp"
    home = folder / f"{kind}-{setup.modulus}-{setup.rate:g}" / f"decay-{decay:g}-seed-{seed}"
    return trained(
        home,
        setup.network(seed),
        whole_table_loss(x, y),
        plan,
        done=lambda model: _loss(model, *test)[0] < _END,
        tick=tick,
    )


def _tracked(
    folder: Path, setup: Setup, decay: float, seed: int, *, steps: int | None = None, tick: Tick
) -> TrackedRun:
    from strati.spectra.scan import scan
    from strati.tracking.track import track

    paths = trained_run(folder, setup, decay, seed, steps=steps, tick=tick)
    (x, y), test = table(setup.modulus, setup.share, seed)
    model = setup.network(seed)
    train, tested = [], []
    for path in paths:
        load(model, path)
        train.append(_loss(model, x, y)[0])
        tested.append(_loss(model, *test))
    measured_paths = [
        paths[i] for i in np.unique(np.linspace(0, len(paths) - 1, setup.coefficients).round().astype(int))
    ]
    tracked = track(
        measured_paths,
        data=(x, y),
        model=model,
        out=paths[0].parent / f"tracked-{setup.chains}-{setup.draws}-{setup.batch}-{setup.gamma or 'rule'}",
        what="spectra,llc",
        loss="cross_entropy",
        chains=setup.chains,
        draws=setup.draws,
        batch=setup.batch,
        nbeta=setup.batch / math.log(setup.batch),
        gamma=setup.gamma,
        seed=seed,
        tick=tick,
    )
    learned: list[bool] = []
    for path in paths:
        phases = [layer["phase"] for layer in scan(path).to_dict()["layers"]]
        learned.append(sum(phase != "random-like" for phase in phases) >= len(phases) / 2)
        if learned[-1]:
            break
    steps_of_paths = tuple(step_of(path) for path in paths)
    return TrackedRun(
        steps_of_paths,
        tuple(train),
        tuple(h[0] for h in tested),
        tested[-1][1],
        tracked,
        first_of(steps_of_paths[: len(learned)], learned),
    )


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    with torch.no_grad():
        outputs = model(x)
        return float(functional.cross_entropy(outputs, y)), float((outputs.argmax(1) == y).double().mean())


def _ending(runs: list[TrackedRun], without: TrackedRun, setup: Setup) -> list[Row]:
    size = (
        f"mod {setup.modulus}, {setup.share:.0%} of the table, rate {setup.rate:g}, {setup.steps} steps at most; "
        f"{setup.seeds} seeds with decay {DECAY:g}, 1 without"
    )
    grokked = sum(run.test[-1] < _END for run in runs)
    ends = ", ".join(str(run.steps[-1]) if run.test[-1] < _END else "not reached" for run in runs)
    return [
        Row(
            "runs with weight decay that generalise",
            "all",
            "all" if grokked == len(runs) else f"{grokked} of {len(runs)}",
            size,
            seeds=len(runs),
            key="runs-that-generalise",
            facts={"count": grokked, "of": len(runs)},
        ),
        Row(f"their test loss falls below {_END:g} at step", "about 10,000", ends),
        Row(
            "test accuracy without weight decay, after as many steps as the longest",
            "does not generalise",
            f"{without.accuracy:.1%}",
            f"training loss {without.train[-1]:.2g}, test loss {without.test[-1]:.3g} at step {without.steps[-1]}",
            key="accuracy-without-decay",
            facts={"accuracy": float(without.accuracy)},
        ),
    ]


def _when(events: dict[str, list[Event | None]], without: dict[str, Event | None]) -> list[Row]:
    """The step of each event: mean over seeds with its interval, and every seed's own interval."""
    rows = []
    for what, by_seed in events.items():
        happened = [e for e in by_seed if e is not None]
        mean = mean_step(by_seed)
        text = f"{mean[0]:.0f} [{mean[1]:.0f}, {mean[2]:.0f}]" if mean else "; ".join(map(_shown, happened))
        alone = without[what]
        note = (
            "mean over seeds with 95 % interval; by seed, between checkpoints: "
            + "; ".join("never" if e is None else _shown(e) for e in by_seed)
            + f"; without decay: {'never' if alone is None else _shown(alone)}"
        )
        rows.append(Row(f"step at which {what}", None, text or "never", note, seeds=len(happened)))
    return rows


def _shown(event: Event) -> str:
    return f"{event.step:.0f} [{event.low:.0f}, {event.high:.0f}]"


def _order(events: dict[str, list[Event | None]]) -> list[Row]:
    """Which of two comes first, and by what factor, seed by seed."""
    rows = []
    pairs = ((SPECTRA, TEST), (COEFFICIENT, TEST), (SPECTRA, COEFFICIENT), (TRAIN, SPECTRA))
    for first, second in pairs:
        both = [
            (a, b)
            for a, b in zip(events[first], events[second], strict=True)
            if a is not None and b is not None
        ]
        surely = sum(a.high < b.low for a, b in both)
        before = sum(a.step < b.step for a, b in both)
        times = ratio(events[first], events[second])
        note = f"{surely} with intervals that do not meet"
        if times is not None:
            note += f"; at {times[0]:.2f} [{times[1]:.2f}, {times[2]:.2f}] of its step"
        claim = "progress measures move first" if second == TEST else None
        count = f"{before} of {len(both)} seeds"
        what = f"{first}, before the {second}"
        facts: dict[str, Fact] = {
            "first": CODES[first],
            "second": CODES[second],
            "count": before,
            "of": len(both),
        }
        rows.append(Row(what, claim, count, note, seeds=len(both), key="order", facts=facts))
    return rows


def _coefficients(runs: list[TrackedRun], without: TrackedRun, setup: Setup) -> list[Row]:
    rows = []
    for name, run in (*((f"seed {k}", run) for k, run in enumerate(runs)), ("without decay", without)):
        steps, values, errors = run.coefficient()
        text = "none"
        facts: dict[str, Fact] = {"decay": run is not without}
        if values:
            top = int(np.argmax(values))
            text = f"{values[top]:.1f} +- {errors[top]:.1f} at step {steps[top]:.0f}"
            text += f", {values[-1]:.1f} +- {errors[-1]:.1f} at step {steps[-1]:.0f}"
            facts |= {"peak": float(values[top]), "peak_error": float(errors[top])}
            facts |= {"end": float(values[-1]), "end_error": float(errors[-1])}
        breaks = [
            f"{c['step']:.0f} [{c['low']:.0f}, {c['high']:.0f}]"
            for c in run.track.breaks
            if c["what"] == "llc" and c["layer"] is None
        ]
        failed = [f for f in run.track.failed if f["quantity"] == "llc"]
        note = f"gamma {run.track.settings['gamma']:.4g}; change points: {'; '.join(breaks) or 'none'}"
        note += f"; {len(failed)} of {setup.coefficients} checkpoints refused"
        note += f" ({failed[0]['reason']})" if failed else ""
        what = f"{name}: learning coefficient at its peak and at the end"
        rows.append(Row(what, None, text, note, key="peak-and-end", facts=facts))
    return rows


def _levels(rows: Sequence[Row]) -> Row:
    """The last coefficients of the runs that generalised over that of the run that memorised."""
    facts_of = [row.facts for row in rows if row.key == "peak-and-end" and "end" in row.facts]
    ends = [float(facts["end"] or 0) for facts in facts_of if facts["decay"]]
    alone = [float(facts["end"] or 0) for facts in facts_of if not facts["decay"]]
    what = "learning coefficient at the end, mean of the runs that generalised over that without decay"
    ratio_of = float(np.mean(ends) / alone[0]) if ends and alone else None
    note = f"{', '.join(f'{v:.1f}' for v in ends)} against {', '.join(f'{v:.1f}' for v in alone)}; one gamma for all"
    facts: dict[str, Fact] = {"ratio": ratio_of}
    return Row(what, None, ratio_of, note, seeds=len(ends), key="level-ratio", facts=facts)


def _curves(run: TrackedRun, without: TrackedRun) -> Sequence[dict[str, Any]]:
    ranks = [(s.layer, run.track.steps, s.values) for s in run.track.curves if s.what == "stable_rank"]
    return (
        {
            "title": "loss",
            "log": True,
            "lines": [
                ("training", run.steps, run.train),
                ("test", run.steps, run.test),
                ("test, no decay", without.steps, without.test),
            ],
        },
        {
            "title": "learning coefficient",
            "lines": [("decay 1", *run.coefficient()), ("no decay", *without.coefficient())],
        },
        {"title": "stable rank", "lines": ranks},
    )
