"""``reproduce refined-coefficients``: learning coefficients of single heads and of kinds of data (Wang et al. 2024).

The model of ``reproduce in-context`` at several of its checkpoints. Weight-refined: only the weights of one attention
head vary. Data-refined: the loss is that of one kind of windows, text or repeated random sequences, which only an
induction head predicts. The paper finds that heads of different kinds differ in their coefficients, that induction
heads have lower ones than heads that memorise multigrams, and that coefficients change when a head specialises. The
loss here is the mean Kullback-Leibler divergence from the checkpoint's own outputs, so that every checkpoint is a
minimum; gamma and temperature are the same everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from strati.core.files import write_atomic
from strati.core.results import Tick
from strati.core.rng import stream
from strati.landscape.llc.llc import llc
from strati_reproductions.checkpointed_training import step_of
from strati_reproductions.in_context.stages import (
    FULL,
    GAMMA,
    QUICK,
    Measurement,
    Size,
    load_into,
    measure,
    split_text,
    train,
)
from strati_reproductions.pictures import drawn, over_steps
from strati_reproductions.registry import Reproduction, Row
from strati_reproductions.rows import Fact

if TYPE_CHECKING:
    from strati_reproductions.in_context.model import AttentionOnly

_CHAINS = 4
_KIND = 0.3  # mean attention from which on a head is a previous-token or an induction head
_DATA = ("text", "repeated sequences")


@dataclass(frozen=True)
class Refined:
    """Coefficients of one checkpoint by name of the head or kind of data: value and error, or nothing."""

    step: int
    coefficients: dict[str, tuple[float, float] | None]


def refined_coefficients(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Estimate the coefficients of every head and of two kinds of data at some checkpoints of ``in-context``."""
    size, count = (QUICK if quick else FULL), 3
    home = folder.parent / "in-context"
    model, paths = train(size, seed, home, tick)
    _, held_out = split_text(size, home)
    later = [path for path in paths if step_of(path) >= size.steps // 100]
    places = np.unique(np.linspace(0, len(later) - 1, count).round().astype(int))
    points, stages = [], []
    for path in (later[place] for place in places):
        load_into(model, path)
        stages.append(measure(model, held_out, size, step_of(path)))
        points.append(
            _refined(model, held_out, size, step_of(path), folder / f"{size.name}-seed-{seed}", seed)
        )
        tick(f"step {step_of(path)}")
    kinds = head_kinds(stages[-1])
    rows = [*_head_rows(points, kinds), *_kind_rows(points[-1], kinds), *_data_rows(points, stages)]
    title = "Learning coefficients of attention heads and of kinds of data (Wang et al. 2024)"
    captions = {
        "refined": "learning coefficient of every head (top) and of two kinds of data (bottom) over training, with two "
        "errors. The names of the heads say what they are at the end."
    }
    figures = drawn(_draw, points, kinds, folder)
    return Reproduction("refined-coefficients", title, tuple(rows), figures, captions=captions)


def _refined(
    model: AttentionOnly, held_out: np.ndarray[Any, Any], size: Size, step: int, folder: Path, seed: int
) -> Refined:
    """The coefficients of one checkpoint; those estimated before are read from a file."""
    file = folder / f"step-{step}-gamma-{GAMMA:g}.json"
    if not file.is_file():
        x = torch.from_numpy(held_out[:, :-1])
        half = size.context // 2
        once = stream(seed, "repeated rows").integers(0, size.vocabulary, (len(x), half))
        repeated = torch.from_numpy(np.concatenate([once, once], 1))
        options: dict[str, Any] = {
            "nbeta": size.nbeta,
            "gamma": GAMMA,
            "chains": _CHAINS,
            "draws": size.draws,
            "batch": size.windows,
            "sampler": "sgld",
            "seed": seed,
        }
        heads = [(layer, head) for layer in (0, 1) for head in range(size.heads)]
        by_head = llc(model, "behavioural-kl", x, heads=heads, **options).parts
        labels = [_DATA[0]] * len(x) + [_DATA[1]] * len(repeated)
        by_data = llc(model, "behavioural-kl", torch.cat([x, repeated]), groups=labels, **options).parts
        folder.mkdir(parents=True, exist_ok=True)
        numbers = {name: (part.estimate, part.stderr) for name, part in [*by_head.items(), *by_data.items()]}
        write_atomic(file, json.dumps(numbers) + "\n")
    stored = json.loads(file.read_text())
    return Refined(
        step, {n: None if v is None else (float(v), float(e or 0)) for n, (v, e) in stored.items()}
    )


def head_kinds(stage: Measurement) -> dict[str, str]:
    """What every head is, by its attention: ``previous token``, ``induction`` or ``other``.

    Examples:
        >>> head_kinds(Measurement(0, 1.0, 0.0, (0.1, 0.8), (0.4, 0.0)))
        {'0.0': 'other', '0.1': 'previous token', '1.0': 'induction', '1.1': 'other'}
    """
    kinds = {}
    for layer, (name, scores) in enumerate(
        (("previous token", stage.previous_token), ("induction", stage.induction))
    ):
        for head, score in enumerate(scores):
            kinds[f"{layer}.{head}"] = name if score >= _KIND else "other"
    return kinds


def _head_rows(points: Sequence[Refined], kinds: dict[str, str]) -> list[Row]:
    rows = []
    for head, kind in kinds.items():
        estimates = [(p.step, p.coefficients.get(head)) for p in points]
        listed = ", ".join("refused" if c is None else f"{s}: {c[0]:.1f} +- {c[1]:.1f}" for s, c in estimates)
        rows.append(Row(f"head {head} ({kind}): coefficient by step", None, listed))
    return rows


def _kind_rows(last: Refined, kinds: dict[str, str]) -> list[Row]:
    """Coefficients at the end by kind of head, and whether induction heads have the lower ones in their layer."""
    rows = []
    for kind in ("previous token", "induction", "other"):
        estimates = [c for h, k in kinds.items() if k == kind and (c := last.coefficients.get(h)) is not None]
        if estimates:
            mean = float(np.mean([value for value, _ in estimates]))
            error = float(np.sqrt(sum(e**2 for _, e in estimates)) / len(estimates))
            listed = ", ".join(f"{value:.1f}" for value, _ in estimates)
            what = f"heads of the kind {kind}: mean coefficient at the end"
            rows.append(Row(what, None, mean, f"by head {listed}", error=error, seeds=len(estimates)))
    second = {h: c for h, c in last.coefficients.items() if h.startswith("1.") and c is not None}
    induction = [c[0] for h, c in second.items() if kinds[h] == "induction"]
    others = [c[0] for h, c in second.items() if kinds[h] == "other"]
    facts: dict[str, Fact] = {"induction": len(induction), "others": len(others), "lower": None}
    if induction and others:
        facts["lower"] = max(induction) < min(others)
    ours = "not tested" if facts["lower"] is None else "yes" if facts["lower"] else "no"
    note = f"{len(induction)} induction heads, {len(others)} other heads in the second layer"
    what = "every induction head has a lower coefficient than the other heads of its layer"
    return [*rows, Row(what, "yes", ours, note, key="induction-lower", facts=facts)]


def _data_rows(points: Sequence[Refined], stages: Sequence[Measurement]) -> list[Row]:
    rows = []
    for kind in _DATA:
        estimates = [(p.step, p.coefficients.get(kind)) for p in points]
        listed = ", ".join("refused" if c is None else f"{s}: {c[0]:.1f} +- {c[1]:.1f}" for s, c in estimates)
        rows.append(Row(f"coefficient of {kind} by step", None, listed))
    formed = next((s.step for s in stages if max(s.induction) >= _KIND), None)
    pairs = [(p.step, p.coefficients.get(_DATA[1])) for p in points]
    before = [c for step, c in pairs if c is not None and (formed is None or step < formed)]
    after = [c for step, c in pairs if c is not None and formed is not None and step >= formed]
    what = "repeated sequences: coefficient at the end over the last one before an induction head forms"
    ratio = after[-1][0] / before[-1][0] if before and after else None
    note = "no induction head forms" if formed is None else f"it has formed by step {formed}"
    facts: dict[str, Fact] = {"ratio": ratio, "formed": formed}
    return [*rows, Row(what, None, ratio, note, key="data-refined", facts=facts)]


def _draw(points: Sequence[Refined], kinds: dict[str, str], folder: Path) -> tuple[str, ...]:
    def line(name: str, label: str) -> tuple[str, list[int], list[float | None], list[float]]:
        estimates = [p.coefficients.get(name) for p in points]
        values = [None if c is None else c[0] for c in estimates]
        errors = [0.0 if c is None else c[1] for c in estimates]
        return label, [p.step for p in points], values, errors

    heads = [line(head, f"{head}, {kind}") for head, kind in kinds.items()]
    curves = [
        {"title": "heads", "lines": heads},
        {"title": "data", "lines": [line(kind, kind) for kind in _DATA]},
    ]
    return over_steps(folder, "refined", curves, title="Refined learning coefficients")
