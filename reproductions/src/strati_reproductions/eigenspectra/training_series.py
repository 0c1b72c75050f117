"""``reproduce training-series``: spectra of a fully connected network over its training, at several batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strati.comparison.compare import compare
from strati.core.results import Tick
from strati_reproductions.eigenspectra.figures import lines
from strati_reproductions.eigenspectra.over_training import mlp_run
from strati_reproductions.pictures import drawn
from strati_reproductions.registry import Reproduction, Row

SEE = (
    "Stable rank of every layer at each checkpoint, one panel per batch size. That of the three large layers falls "
    "from the value of a random matrix to about a tenth; the last layer's is small from the start."
)


def training_series(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Stable rank, hard rank, sigma, quasi-null share and signal share over training, at several batch sizes.

    24 checkpoints each of the embedded architecture (quick) or of an FCN 784-512-512-512-10 on MNIST.
    """
    rows = []
    ranks: dict[str, dict[str, Sequence[float | None]]] = {}
    for batch in (16, 64, 256):
        _, paths = mlp_run(folder, seed=seed, quick=quick, count=24, batch=batch, tick=tick)
        result = compare(*paths, series=True, jobs=2, tick=tick)
        assert result.series is not None
        ranks[f"batch {batch}"] = {layer.name: layer.stable_rank for layer in result.series.layers}
        for layer, compared in zip(result.series.layers, result.layers, strict=True):
            edges = compared.metrics["mp_lambda_plus"]
            signal = [_signal_share(v, edge) for v, edge in zip(compared.eigenvalues, edges, strict=True)]
            left = layer.leaves_random_like
            when = result.series.labels[left] if left is not None else "never"
            numbers = {
                "stable rank": (layer.stable_rank[0], layer.stable_rank[-1]),
                "hard rank": (layer.hard_rank[0], layer.hard_rank[-1]),
                "sigma": (layer.mp_sigma[0], layer.mp_sigma[-1]),
                "quasi-null": (layer.quasi_null[0], layer.quasi_null[-1]),
                "signal share": (signal[0], signal[-1]),
            }
            note = "; ".join(f"{k} {_short(a)} to {_short(b)}" for k, (a, b) in numbers.items())
            rows.append(Row(f"batch {batch}, {layer.name}: leaves random-like at", None, when, note))
    title = "Spectra over training, 24 checkpoints, three batch sizes"
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
