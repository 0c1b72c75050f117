"""Spectra over training: quasi-null eigenvalues of a transformer, 100 checkpoints of an MLP, three batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.comparison.compare import compare
from strati.core.results import Tick
from strati.core.rng import derive
from strati_reproductions.checkpointed_training import Training, spaced, step_of, trained
from strati_reproductions.datasets import embedded_digits, mnist_digits
from strati_reproductions.eigenspectra.figures import lines
from strati_reproductions.pictures import drawn, over_steps
from strati_reproductions.registry import Reproduction, Row

if TYPE_CHECKING:
    import torch
    from torch import nn

    from strati.tracking.result import Track


SEE = (
    "Stable rank of every layer at each checkpoint, one panel per batch size. That of the three large layers falls "
    "from the value of a random matrix to about a tenth; the last layer's is small from the start."
)


def quasi_null_training(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Train a Llama on Shakespeare and count the eigenvalues below the random bulk at every checkpoint."""
    from strati.tracking.track import track
    from strati_reproductions.dropped_transformer.training import Trainee, causal_batches, initial

    trainee = Trainee("llama", 2, 128, 0.1, seed) if quick else Trainee("llama", 4, 256, 0.1, seed)
    steps, count = (200, 9) if quick else (2000, 24)
    model = initial(trainee)

    def loss(network: nn.Module, step: int) -> torch.Tensor:
        batch = next(causal_batches(derive(seed, "batch", step)))
        tracked: torch.Tensor = network(**batch).loss
        return tracked

    name = f"{trainee.name}-{steps}"
    plan = Training(steps, spaced(steps, count), rate=1e-3, decay=trainee.decay, warmup=20, clip=1.0)
    paths = trained(folder / name, model, loss, plan, tick=tick)
    tracked = track(paths, out=folder / f"followed-{name}", what="spectra", seed=seed, tick=tick)
    shares = _shares(tracked, {n: min(p.shape) for n, p in model.named_parameters() if p.ndim == 2})
    rows = [
        Row(
            f"quasi-null eigenvalues, {kind}: at step 0 / at the end",
            "none in noise / 1 to 6 % in trained transformers",
            f"{values[0]:.2%} / {values[-1]:.2%}",
            f"largest {max(values):.2%} at step {tracked.steps[int(np.argmax(values))]:.0f}; {_trend(values)}",
        )
        for kind, values in shares.items()
    ]
    rows.append(_size(model, f"{steps} steps of AdamW, decay {trainee.decay:g}, {len(paths)} checkpoints"))
    picture = over_steps(
        folder,
        "quasi-null-training",
        [
            {
                "title": "quasi-null share",
                "lines": [(kind, tracked.steps, values) for kind, values in shares.items()],
            }
        ],
        title="quasi-null eigenvalues over a transformer's training",
    )
    title = "Quasi-null eigenvalues over a transformer's training"
    see = "Share of eigenvalues too small for the bulk at each checkpoint, one line per kind of matrix."
    return Reproduction(
        "quasi-null-training", title, tuple(rows), picture, captions={"quasi-null-training": see}
    )


def fcn_checkpoints(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """100 checkpoints of a fully connected network on MNIST (quick: 20 on the digits), followed by their spectra."""
    from strati.tracking.track import track

    count = 20 if quick else 100
    name, paths = mlp_run(folder, seed=seed, quick=quick, count=count, batch=64, tick=tick)
    tracked = track(paths, out=folder / f"followed-{name}", what="spectra", seed=seed, tick=tick)
    rows = []
    for layer in dict.fromkeys(s.layer for s in tracked.curves):
        for what in ("stable_rank", "spikes", "alpha"):
            curve = next(s for s in tracked.curves if s.layer == layer and s.what == what)
            defined = [v for v in curve.values if v is not None]
            changes = [c for c in tracked.breaks if c["layer"] == layer and c["what"] == what]
            listed = "; ".join(
                f"step {c['step']:.0f} [{c['low']:.0f}, {c['high']:.0f}], p {c['pvalue']:.1g}"
                for c in changes
            )
            ends = f"from {defined[0]:.3g} to {defined[-1]:.3g}" if defined else "undefined"
            rows.append(Row(f"{layer}: changes of {what}", None, listed or "none", ends))
    rows += _phase_rows(paths, every=1 if quick else 4)
    spacing = "evenly spaced in the logarithm of the step, so the first ones coincide"
    note = f"{count} planned, {spacing}; {len(tracked.failed)} failed"
    rows.append(Row("checkpoints followed", None, float(len(paths)), note))
    drawn_curves = [s for s in tracked.curves if s.what in ("stable_rank", "spikes")]
    picture = over_steps(
        folder,
        f"fcn-checkpoints-{name}",
        [
            {
                "title": what,
                "lines": [(s.layer, tracked.steps, s.values) for s in drawn_curves if s.what == what],
            }
            for what in ("stable_rank", "spikes")
        ],
        title="spectra of a fully connected network over training",
    )
    title = "Spectra of 100 checkpoints of an FCN"
    see = (
        "Above the stable rank of every layer over the steps of training, "
        "below how many eigenvalues lie beyond the edge."
    )
    return Reproduction("fcn-checkpoints", title, tuple(rows), picture, captions={"fcn-checkpoints": see})


def _phase_rows(paths: tuple[Path, ...], every: int) -> list[Row]:
    """The phases of each layer in the order in which they first appear, and the last one."""
    from strati.spectra.scan import scan

    first_steps: dict[str, dict[str, int]] = {}
    last: dict[str, str] = {}
    scanned = sorted({*paths[::every], paths[-1]}, key=step_of)
    for path in scanned:
        for layer in scan(path).to_dict()["layers"]:
            phase = layer["phase"] or "unknown"
            first_steps.setdefault(layer["name"], {}).setdefault(phase, step_of(path))
            last[layer["name"]] = phase
    claim = "random-like, bleeding-out, bulk+spikes, bulk-decay, heavy-tailed"
    return [
        Row(
            f"{name}: phases in the order of their first step",
            claim,
            ", ".join(f"{phase} ({step})" for phase, step in phases.items()),
            f"{last[name]} at the end; {len(scanned)} checkpoints looked at",
        )
        for name, phases in first_steps.items()
    ]


def training_series(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Stable rank, hard rank, sigma, quasi-null share and signal share over training, at several batch sizes.

    24 checkpoints each of the embedded architecture (quick) or of an FCN 784-512-512-512-10 on MNIST.
    """
    rows = []
    ranks: dict[str, dict[str, Sequence[float | None]]] = {}
    for batch in (16, 64, 256):
        _, paths = mlp_run(folder, seed=seed, quick=quick, count=24, batch=batch, tick=tick)
        compared_run = compare(*paths, series=True, jobs=2, tick=tick)
        assert compared_run.series is not None
        ranks[f"batch {batch}"] = {layer.name: layer.stable_rank for layer in compared_run.series.layers}
        for layer, compared in zip(compared_run.series.layers, compared_run.layers, strict=True):
            edges = compared.metrics["mp_lambda_plus"]
            signal = [_signal_share(v, edge) for v, edge in zip(compared.eigenvalues, edges, strict=True)]
            left = layer.leaves_random_like
            when = compared_run.series.labels[left] if left is not None else "never"
            numbers = {
                "stable rank": (layer.stable_rank[0], layer.stable_rank[-1]),
                "hard rank": (layer.hard_rank[0], layer.hard_rank[-1]),
                "sigma": (layer.mp_sigma[0], layer.mp_sigma[-1]),
                "quasi-null": (layer.quasi_null[0], layer.quasi_null[-1]),
                "signal share": (signal[0], signal[-1]),
            }
            note = "; ".join(f"{k} {_short(a)} to {_short(b)}" for k, (a, b) in numbers.items())
            rows.append(Row(f"batch {batch}, {layer.name}: leaves random-like at", None, when, note))
    title = "Spectra over training at three batch sizes, 24 checkpoints"
    return Reproduction(
        "training-series",
        title,
        tuple(rows),
        drawn(_draw_ranks, ranks, folder, title),
        captions={"training-series": SEE},
    )


def _draw_ranks(
    ranks: dict[str, dict[str, Sequence[float | None]]], folder: Path, title: str
) -> tuple[str, ...]:
    return lines(ranks, folder, "training-series", title=title, label="stable rank")


def _signal_share(eigenvalues: np.ndarray[Any, Any], edge: float | None) -> float | None:
    """Share of the squared weights in the directions above the bulk edge: of ``W = W_rand + Delta_sig``."""
    return None if edge is None else float(eigenvalues[eigenvalues > edge].sum() / eigenvalues.sum())


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def mlp_run(
    folder: Path, *, seed: int, quick: bool, count: int, batch: int, tick: Tick
) -> tuple[str, tuple[Path, ...]]:
    """A fully connected network on the digits (quick) or MNIST, resumable: a name and its checkpoints."""
    import torch

    images = embedded_digits() if quick else mnist_digits()
    widths = (64, 96, 64, 10) if quick else (784, 512, 512, 512, 10)
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for a, b in pairwise(widths):
        parts += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    model = torch.nn.Sequential(*parts[:-1])
    last = (40 if quick else 8) * (len(images.y) // batch)

    def loss(network: nn.Module, step: int) -> torch.Tensor:
        chance = torch.Generator().manual_seed(derive(seed, "mlp", batch, step))
        picked = torch.randint(len(images.y), (batch,), generator=chance)
        return torch.nn.functional.cross_entropy(network(images.x[picked]), images.y[picked])

    name = f"{'digits' if quick else 'mnist'}-batch-{batch}-{count}"
    plan = Training(last, spaced(last, count), rate=1e-3)
    return name, trained(folder / name, model, loss, plan, tick=tick)


def _shares(tracked: Track, sizes: dict[str, int]) -> dict[str, list[float]]:
    """Quasi-null eigenvalues over all, by kind of layer."""
    kinds = {"attention": ("_proj",), "MLP": ("mlp",), "embeddings": ("embed", "lm_head")}
    curves = {s.layer: s.values for s in tracked.curves if s.what == "quasi_null" and s.layer in sizes}
    shares = {}
    for kind, words in kinds.items():
        names = [
            n for n in curves if n and any(w in n for w in words) and (kind != "attention" or "mlp" not in n)
        ]
        total = sum(sizes[n] for n in names)
        if total:
            shares[kind] = [
                sum(curves[n][k] or 0.0 for n in names) / total for k in range(len(tracked.steps))
            ]
    return shares


def _trend(values: list[float]) -> str:
    if max(values) == min(values):
        return "does not change"
    return "rises" if values[-1] > values[0] else "falls" if values[-1] < values[0] else "comes and goes"


def _size(model: Any, note: str) -> Row:
    return Row("parameters", None, float(sum(p.numel() for p in model.parameters())), note)
