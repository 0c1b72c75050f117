"""Plots of a comparison: alpha and change over depth, phases over training, roles side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import require

if TYPE_CHECKING:
    from strati.comparison.layer_statistics import CheckpointSeries
    from strati.comparison.results import Comparison

ROLE_COLOURS = {
    "attention.q": "#0072B2",
    "attention.k": "#56B4E9",
    "attention.v": "#009E73",
    "attention.qkv": "#0072B2",
    "attention.out": "#332288",
    "mlp.in": "#E69F00",
    "mlp.gate": "#F0E442",
    "mlp.out": "#D55E00",
    "embedding": "#CC79A7",
    "head": "#882255",
    "conv": "#999999",
    "linear": "#000000",
}
"""Okabe-Ito and similar colours, which colour-blind readers can distinguish; one colour per role everywhere."""

PHASES = ("random-like", "bleeding-out", "bulk+spikes", "bulk-decay", "heavy-tailed", "rank-collapse")


def plot_comparison(result: Comparison) -> Any:
    """Draw a series as phases over training, anything else as metrics over depth."""
    if result.series is not None:
        return _plot_series(result.series)
    return _plot_depth(result)


def _plot_depth(result: Comparison) -> Any:
    plt = require("matplotlib.pyplot", "plot", "drawing")
    figure, axes = plt.subplots(3, 1, figsize=(8, 8), sharex=True, layout="constrained")
    places = np.arange(len(result.layers))
    for ax, name in ((axes[0], "alpha"), (axes[1], "stable_rank")):
        for n, marker in zip(range(len(result.networks)), "osD^v<>" * 9, strict=False):
            values = [_nan(layer.metrics[name][n]) for layer in result.layers]
            colours = [ROLE_COLOURS.get(layer.role, "#000000") for layer in result.layers]
            ax.scatter(places, values, c=colours, marker=marker, s=18, label=f"network {n}")
        ax.set_ylabel(name.replace("_", " "))
    axes[0].legend(fontsize="small")
    axes[2].bar(
        places,
        [_nan(layer.relative_change) for layer in result.layers],
        color=[ROLE_COLOURS.get(layer.role, "#000000") for layer in result.layers],
    )
    axes[2].set_ylabel("relative change")
    axes[2].set_xlabel("layer, in network order")
    present = [r for r in ROLE_COLOURS if any(layer.role == r for layer in result.layers)]
    handles = [plt.Line2D([], [], marker="o", ls="", color=ROLE_COLOURS[r], label=r) for r in present]
    axes[2].legend(handles=handles, fontsize="small", ncols=4)
    return figure


def _plot_series(series: CheckpointSeries) -> Any:
    plt = require("matplotlib.pyplot", "plot", "drawing")
    figure, axes = plt.subplots(2, 1, figsize=(8, 6), height_ratios=(2, 1), layout="constrained")
    grid = np.array(
        [[PHASES.index(p) if p in PHASES else np.nan for p in layer.phase] for layer in series.layers]
    )
    colours = plt.get_cmap("viridis", len(PHASES))
    picture = axes[0].imshow(
        grid, aspect="auto", cmap=colours, vmin=-0.5, vmax=len(PHASES) - 0.5, interpolation="none"
    )
    axes[0].set_yticks(range(len(series.layers)), [layer.name for layer in series.layers], fontsize="small")
    bar = figure.colorbar(picture, ax=axes[0], ticks=range(len(PHASES)))
    bar.ax.set_yticklabels(PHASES, fontsize="small")
    for layer in series.layers:
        axes[1].plot(
            [_nan(v) for v in layer.alpha], color=ROLE_COLOURS.get(layer.role, "#000000"), label=layer.name
        )
    axes[1].set_ylabel("alpha")
    axes[1].set_xlabel("checkpoint")
    if len(series.layers) <= 8:
        axes[1].legend(fontsize="small")
    return figure


def _nan(value: float | None) -> float:
    return float("nan") if value is None else float(value)
