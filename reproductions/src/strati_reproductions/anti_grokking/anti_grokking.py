"""``reproduce anti-grokking``: does alpha below 2, or a correlation trap, come before a fall of the test accuracy?

Prakash and Martin (2506.04434, 2602.02859) train a small network on 1,000 MNIST images for 10^7 steps. The test
accuracy rises long after the training accuracy, and after about 10^6 steps it falls again; the fall is said to be
"invariably heralded" by alpha below 2 and by correlation traps. This reproduction trains three seeds and two controls
that the paper does not expect to fall (weight decay, ordinary initial values), and measures in which order the three
events happen, how many steps lie between them, and how often a signal comes without a fall. How far the stored run
went is in :data:`STEPS`; before 10^6 steps it says nothing about a fall.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strati.core.files import write_atomic
from strati.core.results import Tick
from strati.core.rng import stream
from strati.spectra.marchenko_pastur import fit_bulk
from strati.spectra.spectrum import spectrum
from strati_reproductions.anti_grokking.training import Floats, LongRun, Recipe, forward
from strati_reproductions.datasets import Digits, mnist_digits
from strati_reproductions.pictures import drawn, over_steps
from strati_reproductions.registry import Reproduction, Row
from strati_reproductions.rows import Fact

STEPS, CONTROL_STEPS = 100_000, 0
"""Steps of the stored run, and of its controls (0: none). A run with larger numbers continues it; 5,000,000 and
1,000,000 are meant."""
PAPER_STEPS = 10_000_000
LAYERS = ("FC1", "FC2")
"""The layers whose spectra are measured: the third has 10 singular values, too few for a tail."""
FALL = 0.05
"""The test accuracy has fallen when its running median lies this far below its best value so far."""
_WINDOW, _PERSISTENT = 11, 3  # measurements of the running median; consecutive ones that make an event
_PERMUTATIONS, _LEVEL = 5, 0.001
_CHUNK = 100_000  # steps after which the next network is trained, so that all are equally far when a run is stopped
_PHASES = {100_000: "pre-grokking", 1_000_000: "grokking"}
PAPER_ALPHA = {"FC1": (5.0, 3.6, 0.9), "FC2": (2.9, 2.3, 1.3)}
PAPER_TRAPS = {"FC1": ("0 +- 0", "0 +- 0", "7.5 +- 5.6"), "FC2": ("0 +- 0", "0 +- 0", "1 +- 0")}
"""Tables 1 and 2 of 2602.02859 at 10^5, 10^6 and 10^7 steps."""
SHORT = "784-200-200-10 on 1,000 MNIST images, no weight decay"
SEE = (
    "accuracy, alpha and correlation traps of every seed over the steps. The claim is that a line of alpha crosses 2, "
    "or that a trap appears, before the test accuracy falls; compare the steps."
)


@dataclass(frozen=True)
class Plan:
    """The networks of one size of the experiment."""

    main: tuple[Recipe, ...]
    controls: tuple[tuple[str, Recipe], ...]


def plan(*, quick: bool, seed: int) -> Plan:
    """Three seeds and two controls; the quick one has one seed, 200 images and few steps."""
    if quick:
        small = Recipe(seed, 3_000, images=200, batch=40, every=250)
        return Plan((small,), ())
    controls = (
        ("weight decay 0.01", Recipe(seed, CONTROL_STEPS, decay=0.01)),
        ("ordinary initial values", Recipe(seed, CONTROL_STEPS, scale=1.0)),
    )
    return Plan(tuple(Recipe(seed + k, STEPS) for k in range(3)), controls if CONTROL_STEPS else ())


@dataclass(frozen=True)
class Measurement:
    """A network at one step. ``traps`` counts eigenvalues of the permuted matrix beyond the edge of pure noise."""

    step: int
    train_loss: float
    train_accuracy: float
    test_accuracy: float
    alpha_1: float
    alpha_2: float
    traps_1: float
    traps_2: float
    trap_size_1: float
    trap_size_2: float


@dataclass(frozen=True)
class Series:
    """The measurements of one training, in the order of the steps."""

    recipe: Recipe
    points: tuple[Measurement, ...]
    seconds: float


def measure_run(run: LongRun, digits: Digits, tick: Tick) -> Series:
    """Measure every snapshot of a run; measurements made before are read from a file."""
    file = run.folder / "measurements.json"
    points = {m["step"]: Measurement(**m) for m in json.loads(file.read_text())} if file.is_file() else {}
    for step, snapshot in run.snapshots().items():
        if step not in points and step <= run.step:
            with np.load(snapshot) as arrays:
                points[step] = _measure(run, step, dict(arrays), digits)
            tick(f"{run.recipe.name}: measured step {step}")
    ordered = tuple(points[step] for step in sorted(points))
    write_atomic(file, json.dumps([asdict(m) for m in ordered]) + "\n")
    return Series(run.recipe, ordered, run.seconds)


def _measure(run: LongRun, step: int, network: dict[str, Floats], digits: Digits) -> Measurement:
    outputs = forward(run.images, network)
    predicted = forward(digits.x_test.numpy(), network).argmax(1)
    targets = np.eye(outputs.shape[1], dtype=np.float32)[run.labels]
    spectra = []
    for layer in LAYERS:
        tail = spectrum(network[layer]).tail
        alpha = float("nan") if tail is None else float(tail.alpha)
        spectra.append((alpha, *traps(network[layer], stream(run.recipe.seed, "traps", step, layer))))
    return Measurement(
        step,
        float(np.square(outputs - targets).mean()),
        float((outputs.argmax(1) == run.labels).mean()),
        float((predicted == digits.y_test.numpy()).mean()),
        *(numbers[kind] for kind in range(3) for numbers in spectra),
    )


def traps(weight: np.ndarray[Any, Any], rng: np.random.Generator) -> tuple[float, float]:
    """Correlation traps: eigenvalues of the element-wise permuted matrix beyond the Tracy-Widom edge.

    The bulk is fitted to the permuted matrix itself. Both numbers are medians over five permutations, so that chance
    alone gives a trap in fewer than 1 of 10^7 matrices.

    Returns:
        The number of traps, and the largest eigenvalue over the edge.

    Examples:
        >>> noise = np.random.default_rng(0).normal(size=(120, 60))
        >>> traps(noise, np.random.default_rng(1))[0]
        0.0
        >>> traps(noise + 0.5, np.random.default_rng(1))[0]
        1.0
    """
    rows, columns = max(weight.shape), min(weight.shape)
    counts, sizes = [], []
    for _ in range(_PERMUTATIONS):
        permuted = rng.permutation(weight.ravel()).reshape(weight.shape)
        eigenvalues = np.linalg.svd(permuted, compute_uv=False)[::-1].astype(float) ** 2
        bulk = fit_bulk(eigenvalues, rows, columns, level=_LEVEL)
        counts.append(float("nan") if bulk is None else float(bulk.spikes))
        sizes.append(float("nan") if bulk is None else float(eigenvalues[-1] / bulk.edge))
    return float(np.median(counts)), float(np.median(sizes))


@dataclass(frozen=True)
class Events:
    """Steps at which something happens in one run; ``None`` where it does not happen."""

    fits: int | None
    alpha: int | None
    trap: int | None
    fall: int | None


def events(measurements: Sequence[Measurement]) -> Events:
    """When the training images are all learned, alpha goes below 2, a trap appears, the test accuracy falls.

    An event is dated by the first of three measurements in a row that show it; alpha and traps count from the step on
    at which all training images are learned.
    """
    fits = first_step(measurements, lambda m: m.train_accuracy >= 1.0)
    learned = [m for m in measurements if fits is not None and m.step >= fits]
    return Events(
        fits,
        first_step(learned, lambda m: min(m.alpha_1, m.alpha_2) < 2),
        first_step(learned, lambda m: max(m.traps_1, m.traps_2) >= 1),
        fall_step(measurements),
    )


def first_step(measurements: Sequence[Measurement], happens: Callable[[Measurement], bool]) -> int | None:
    """The step of the first measurement from which on something is seen three times in a row."""
    shows = [happens(m) for m in measurements]
    for place in range(len(shows) - _PERSISTENT + 1):
        if all(shows[place : place + _PERSISTENT]):
            return measurements[place].step
    return None


def fall_step(measurements: Sequence[Measurement], fall: float = FALL) -> int | None:
    """The first step at which the running median of the test accuracy is ``fall`` below its best value before.

    Examples:
        >>> def run(accuracies):
        ...     return [Measurement(k, 0, 1, a, 3, 3, 0, 0, 0, 0) for k, a in enumerate(accuracies)]
        >>> fall_step(run([0.5] * 10 + [0.9] * 20 + [0.8] * 20))
        35
        >>> fall_step(run([0.9] * 20 + [0.5] + [0.9] * 20)) is None
        True
    """
    accuracy = np.array([m.test_accuracy for m in measurements])
    if len(accuracy) < _WINDOW:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(accuracy, _WINDOW)
    medians = np.median(windows, axis=1)
    fallen = np.flatnonzero(medians < np.maximum.accumulate(medians) - fall)
    return measurements[int(fallen[0]) + _WINDOW - 1].step if fallen.size else None


def anti_grokking(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Train the networks (or continue), date the events, and compare alphas and traps with the paper's tables."""
    import torch

    setup = plan(quick=quick, seed=seed)
    digits = mnist_digits()
    recipes = [*setup.main, *(recipe for _, recipe in setup.controls)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the products are small: a second thread only waits
    try:
        runs = [LongRun(recipe, digits, folder) for recipe in recipes]
        for last in range(_CHUNK, max(r.steps for r in recipes) + _CHUNK, _CHUNK):
            for run in runs:
                if run.step < min(last, run.recipe.steps):
                    run.advance(last, tick)
        series = [measure_run(run, digits, tick) for run in runs]
    finally:
        torch.set_num_threads(threads)
    main, controls = series[: len(setup.main)], series[len(setup.main) :]
    rows = [
        _reach(main),
        *_accuracies(main),
        *_phase_rows(main),
        *_order_rows([events(run.points) for run in main]),
        *(
            row
            for (name, _), run in zip(setup.controls, controls, strict=True)
            for row in _control_rows(name, run)
        ),
        _cost(series),
    ]
    figures = drawn(_draw, main, folder) + drawn(_draw_controls, setup.controls, controls, folder)
    title = "Anti-grokking: does alpha below 2 or a correlation trap come before the test accuracy falls?"
    captions = {
        "anti-grokking": SEE,
        "anti-grokking-controls": "the same of two networks that are not expected to fall.",
    }
    return Reproduction("anti-grokking", title, tuple(rows), figures, captions=captions)


def _reach(runs: Sequence[Series]) -> Row:
    """How far the run went, and whether it can say anything about a fall."""
    last = min(run.points[-1].step for run in runs)
    fell = sum(events(run.points).fall is not None for run in runs)
    note = f"the test accuracy fell in {fell} of {len(runs)} runs"
    if not fell:
        note = "no test accuracy fell within these steps, so nothing follows about what comes before a fall"
    return Row("steps trained, of every seed", f"{PAPER_STEPS:,}", f"{last:,}", note, seeds=len(runs))


def _accuracies(runs: Sequence[Series]) -> list[Row]:
    best = [max(run.points, key=lambda m: m.test_accuracy) for run in runs]
    last = [run.points[-1] for run in runs]
    recipe = runs[0].recipe
    note = (
        f"784-200-200-10, {recipe.images} images, AdamW at {recipe.rate:g}, batches of {recipe.batch}, initial values "
        f"times {recipe.scale:g}, no weight decay; {_listed([m.step for m in last])} of {PAPER_STEPS:,} steps"
    )
    reached = f"at steps {_listed([m.step for m in best])}; {note}"
    return [
        _over_seeds("largest test accuracy, %", None, [100 * m.test_accuracy for m in best], reached),
        _over_seeds(
            "test accuracy at the last step, %", "50 (at 10^7 steps)", [100 * m.test_accuracy for m in last]
        ),
        _over_seeds("training accuracy at the last step, %", 100.0, [100 * m.train_accuracy for m in last]),
    ]


def _phase_rows(runs: Sequence[Series]) -> list[Row]:
    """Alphas and traps at the paper's steps and at the last one."""
    rows = []
    last = min(run.points[-1].step for run in runs)
    for number, layer in enumerate(LAYERS, 1):
        for place, (step, phase) in enumerate([*_PHASES.items(), (last, "the last step")]):
            if place == len(_PHASES) and step in _PHASES:
                continue
            at = [m for run in runs for m in run.points if m.step == step]
            if len(at) != len(runs):
                continue
            where = f"step {step:,} ({phase})"
            paper = PAPER_ALPHA[layer][place]
            alphas = [float(getattr(m, f"alpha_{number}")) for m in at]
            counts = [float(getattr(m, f"traps_{number}")) for m in at]
            rows += [
                _over_seeds(
                    f"alpha of {layer}, {where}",
                    f"{paper} (at 10^7 steps)" if place == len(_PHASES) else paper,
                    alphas,
                    unexplained=True,
                ),
                _over_seeds(f"correlation traps of {layer}, {where}", PAPER_TRAPS[layer][place], counts),
            ]
    return rows


def _order_rows(dated: Sequence[Events]) -> list[Row]:
    """Which signal comes before the fall, by how many steps, and which comes without one."""
    rows = [
        Row(f"step at which {what}, by seed", paper, _steps([getattr(e, name) for e in dated]), note, seeds=len(dated))
        for name, what, paper, note in (
            ("fits", "all training images are learned", "10^4 to 10^5", ""),
            ("alpha", "alpha of a layer is below 2", "before the fall", "three measurements in a row"),
            ("trap", "a layer has a correlation trap", "before the fall", "three measurements in a row"),
            ("fall", f"the test accuracy has fallen by {100 * FALL:g} points", "after 10^6",
             f"running median of {_WINDOW} measurements against its best value before"),
        )
    ]  # fmt: skip
    for name, what in (("alpha", "alpha below 2"), ("trap", "a correlation trap")):
        falls = [e for e in dated if e.fall is not None]
        earlier = [e for e in falls if getattr(e, name) is not None and getattr(e, name) < e.fall]
        leads = [int(e.fall - getattr(e, name)) for e in earlier if e.fall is not None]
        alone = sum(getattr(e, name) is not None and e.fall is None for e in dated)
        facts: dict[str, Fact] = {"signal": name, "count": len(earlier), "of": len(falls), "alone": alone}
        note = f"earlier by {_listed(leads)} steps" if leads else ""
        rows.append(
            Row(f"falls that {what} comes before", "all", f"{len(earlier)} of {len(falls)}", note,
                seeds=len(dated), key="heralded", facts=facts)
        )  # fmt: skip
        rows.append(
            Row(f"runs with {what} and no fall within the steps trained", None, f"{alone} of {len(dated)}",
                seeds=len(dated), key="alarm-without-fall", facts=facts)
        )  # fmt: skip
    return rows


def _control_rows(name: str, run: Series) -> list[Row]:
    """Whether a network that is not expected to fall shows the signals."""
    dated, last = events(run.points), run.points[-1]
    signals = ", ".join(
        f"{what}: {'never' if step is None else f'from step {step:,}'}"
        for what, step in (("alpha below 2", dated.alpha), ("a trap", dated.trap), ("fall", dated.fall))
    )
    facts: dict[str, Fact] = {"alpha": dated.alpha, "trap": dated.trap, "fall": dated.fall}
    note = f"{last.step:,} steps; test accuracy {100 * last.test_accuracy:.1f} % at the end"
    return [
        Row(f"control, {name}: signals", "few traps, no collapse", signals, note, key="control", facts=facts)
    ]


def _cost(runs: Sequence[Series]) -> Row:
    hours = sum(run.seconds for run in runs) / 3600
    steps = sum(run.points[-1].step for run in runs)
    note = f"{steps:,} steps of {len(runs)} networks, {1e3 * 3600 * hours / steps:.2f} ms each"
    return Row(
        "processor hours of the trainings", "11 (one network of 10^7 steps on a GPU)", round(hours, 2), note
    )


def _over_seeds(
    what: str,
    paper: float | str | None,
    values: Sequence[float],
    note: str = "",
    *,
    unexplained: bool = False,
) -> Row:
    """The mean over seeds with its standard error, and the value of every seed in the note."""
    error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
    by_seed = f"by seed {_listed(values)}"
    return Row(
        what,
        paper,
        float(np.mean(values)),
        f"{by_seed}; {note}" if note else by_seed,
        error=error,
        seeds=len(values),
        unexplained=unexplained,
    )


def _steps(steps: Sequence[int | None]) -> str:
    return ", ".join("never" if step is None else f"{step:,}" for step in steps)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{v:,}" if isinstance(v, int) else f"{v:.4g}" for v in values)


def _draw(runs: Sequence[Series], folder: Path) -> tuple[str, ...]:
    return over_steps(
        folder, "anti-grokking", _panels({f"seed {r.recipe.seed}": r for r in runs}), title=SHORT
    )


def _draw_controls(
    controls: Sequence[tuple[str, Recipe]], runs: Sequence[Series], folder: Path
) -> tuple[str, ...]:
    named = {name: run for (name, _), run in zip(controls, runs, strict=True)}
    return over_steps(folder, "anti-grokking-controls", _panels(named), title="Controls") if named else ()


def _panels(runs: Mapping[str, Series]) -> list[dict[str, Any]]:
    quantities: dict[str, Callable[[Measurement], float]] = {
        "test accuracy": lambda m: m.test_accuracy,
        "training loss": lambda m: m.train_loss,
        "alpha, FC1": lambda m: min(m.alpha_1, 12.0),
        "alpha, FC2": lambda m: min(m.alpha_2, 12.0),
        "traps, FC1": lambda m: m.traps_1,
        "traps, FC2": lambda m: m.traps_2,
    }
    return [
        {
            "title": title,
            "log": title == "training loss",
            "lines": [
                (name, [m.step for m in run.points], [quantity(m) for m in run.points])
                for name, run in runs.items()
            ],
        }
        for title, quantity in quantities.items()
    ]
