"""Pictures of bases: eigenvalues, the layered graph with modules, edge strengths and ablation curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.display import printable
from strati.core.errors import require

if TYPE_CHECKING:
    from strati.landscape.basis.ablation import AblationPoint
    from strati.landscape.basis.graph import InteractionGraph
    from strati.landscape.basis.modules import Modules
    from strati.landscape.basis.result import InteractionBasis

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#000000")
_GREY = "#b0b0b0"


def plot_eigenvalues(basis: InteractionBasis) -> Any:
    """Draw each layer's eigenvalues, largest first, on a logarithmic scale."""
    figure, axes = _figure(6.5, 4.0)
    for number, layer in enumerate(basis.layers):
        values = layer.eigenvalues[layer.eigenvalues > 0]
        name = printable(layer.name, 30)
        axes.semilogy(np.arange(1, values.size + 1), values, ".-", color=COLOURS[number % 8], label=name)
    axes.set_xlabel("direction")
    axes.set_ylabel("eigenvalue")
    axes.set_title(f"{basis.kind} basis, {basis.data:,} data", loc="left", fontsize=9)
    axes.legend(fontsize=7, frameon=False)
    return figure


def plot_graph(graph: InteractionGraph, *, modules: Modules | None = None, strongest: int = 400) -> Any:
    """Draw the layered graph: columns are layers, strongest direction on top, modules coloured.

    Args:
        graph: What to draw.
        modules: Colours by module; grey where a direction belongs to none.
        strongest: How many edges to draw.
    """
    layers = graph.basis.layers
    figure, axes = _figure(2.2 + 1.4 * len(layers), 5.0)
    heights = [_heights(layer.directions) for layer in layers]
    colours = [
        [_GREY if label < 0 else COLOURS[label % 8] for label in row]
        for row in (modules.labels if modules else [[0] * layer.directions for layer in layers])
    ]
    flat = np.concatenate([edges.ravel() for edges in graph.edges]) if graph.edges else np.zeros(0)
    cutoff = modules.epsilon if modules else 1e-6 * flat.max(initial=0.0)
    floor = max(np.sort(flat)[-min(strongest, flat.size)], cutoff) if flat.size else 0.0
    for site, edges in enumerate(graph.edges):
        for target, source in zip(*np.nonzero((edges >= floor) & (edges > 0)), strict=True):
            same = colours[site][source] == colours[site + 1][target]
            axes.plot(
                [site, site + 1],
                [heights[site][source], heights[site + 1][target]],
                color=colours[site][source] if same else _GREY,
                alpha=float(np.clip((edges[target, source] / flat.max()) ** 0.5, 0.08, 0.9)),
                linewidth=0.8,
                zorder=1,
            )
    for site, layer in enumerate(layers):
        size = 18 if layer.directions <= 60 else 5
        axes.scatter([site] * layer.directions, heights[site], c=colours[site], s=size, zorder=2)
    axes.set_xticks(range(len(layers)), [printable(layer.name, 16) for layer in layers], fontsize=8)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    count = f", {len(modules.modules)} modules" if modules else ""
    axes.set_title(f"interaction graph, {graph.basis.kind} basis{count}", loc="left", fontsize=9)
    return figure


def plot_strengths(graphs: Sequence[InteractionGraph]) -> Any:
    """Draw how much of the normalised strength the strongest edges carry, one line per basis."""
    figure, axes = _figure(6.0, 4.0)
    for number, graph in enumerate(graphs):
        parts = [graph.normalised(site).ravel() for site in range(len(graph.edges))]
        strengths = np.sort(np.concatenate(parts))[::-1] if parts else np.zeros(0)
        if strengths.sum() > 0:
            share = np.arange(1, strengths.size + 1) / strengths.size
            carried = np.cumsum(strengths) / strengths.sum()
            axes.semilogx(share, carried, color=COLOURS[number % 8], label=graph.basis.kind)
    axes.set_xlabel("share of edges, strongest first")
    axes.set_ylabel("share of the strength")
    axes.legend(fontsize=8, frameon=False)
    return figure


def plot_ablation(points: Sequence[AblationPoint]) -> Any:
    """Draw accuracy (or the share of variance lost) against the directions kept, one line per basis."""
    figure, axes = _figure(6.0, 4.0)
    with_accuracy = any(point.accuracy is not None for point in points)
    for number, kind in enumerate(dict.fromkeys(point.kind for point in points)):
        mine = [point for point in points if point.kind == kind]
        heights = [point.accuracy if with_accuracy else point.loss for point in mine]
        axes.plot([point.kept for point in mine], heights, ".-", color=COLOURS[number % 8], label=kind)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlabel("directions kept")
    axes.set_ylabel("accuracy" if with_accuracy else "share of the outputs' variance lost")
    if points:
        axes.set_title(f"layer {printable(points[0].layer, 40)}", loc="left", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    return figure


def _heights(count: int) -> list[float]:
    return [1.0 - (k + 0.5) / count for k in range(count)] if count else []


def _figure(width: float, height: float) -> tuple[Any, Any]:
    require("matplotlib", "plot", "drawing")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes
