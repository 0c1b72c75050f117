"""Pictures of the loss landscape: degeneracy, learning coefficients, influence, interaction bases and graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.display import printable
from strati.report.plots import new_figure, plain_axes

if TYPE_CHECKING:
    from strati.landscape.basis.ablation import AblationPoint
    from strati.landscape.basis.graph import InteractionGraph
    from strati.landscape.basis.modules import Modules
    from strati.landscape.basis.result import InteractionBasis
    from strati.landscape.counts.degeneracy import Degeneracy
    from strati.landscape.influence.result import Influence
    from strati.landscape.llc.llc import LearningCoefficient
    from strati.landscape.llc.parts import PartCoefficients
    from strati.landscape.llc.scales import EffectiveParameters

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#000000")
_GREY = "#b0b0b0"
_SHOWN = 15  # rows of an influence matrix that are listed


def plot_degeneracy(result: Degeneracy, *, share: bool = True) -> Any:
    """Draw one bar per layer: parameters used, and free ones.

    Args:
        result: The count.
        share: As a share of the layer's parameters; else their number.

    Returns:
        The matplotlib figure.
    """
    layers = result.layers
    figure = new_figure(7.5, 1.2 + 0.32 * len(layers))
    axes = plain_axes(figure)
    places = range(len(layers))
    totals = [c.parameters if share else 1 for c in layers]
    used = [(c.parameters - c.free) / w for c, w in zip(layers, totals, strict=True)]
    free = [c.free / w for c, w in zip(layers, totals, strict=True)]
    axes.barh(places, used, color="#1f5a92", label="used on the data")
    axes.barh(places, free, left=used, color="#d9d9d9", label="free")
    for place, c, u, f in zip(places, layers, used, free, strict=True):
        axes.text(u + f, place, f"  {c.parameters - c.free:,} of {c.parameters:,}", va="center", fontsize=8)
    axes.set_yticks(list(places), [printable(c.name, 36) for c in layers], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("share of the layer's parameters" if share else "parameters")
    axes.set_xlim(0, max([u + f for u, f in zip(used, free, strict=True)], default=1) * 1.35)
    axes.set_title(result.sentence, loc="left", fontsize=9)
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    return figure


def plot_llc(result: LearningCoefficient, *, chains: int = 8) -> Any:
    """Left the running mean of some chains, right ``lambda(nbeta)`` with its limit.

    Args:
        result: What to draw.
        chains: How many chains to show.

    Returns:
        A matplotlib figure.
    """
    figure = new_figure(9.0, 3.6)
    left, right = figure.subplots(1, 2)
    trace = result.traces.lambda_trace()[:chains]
    running = np.cumsum(trace, axis=1) / np.arange(1, trace.shape[1] + 1)
    left.plot(running.T, lw=0.8, alpha=0.7)
    if result.estimate is not None:
        left.axhline(result.estimate, color="black", lw=1)
    left.set(xlabel="draw", ylabel="running mean of nbeta (L - L*)", title=f"nbeta = {result.nbeta:.4g}")
    nbeta, value, error = np.array(result.ladder).T
    right.errorbar(nbeta, value, error, fmt=".-", lw=0.8)
    if result.asymptotic is not None and result.asymptotic_stderr is not None:
        low, high = (result.asymptotic + s * result.asymptotic_stderr for s in (-1, 1))
        right.axhspan(low, high, alpha=0.25, color="tab:orange")
        right.axhline(result.asymptotic, color="tab:orange", lw=1)
    right.set(xscale="log", xlabel="nbeta", ylabel="lambda", title="ladder and limit")
    return figure


def plot_parts(result: PartCoefficients) -> Any:
    """The coefficient of every part with two standard errors.

    Args:
        result: What to draw.

    Returns:
        A matplotlib figure.
    """
    figure = new_figure(6.0, 3.6)
    axes = figure.subplots()
    estimated = [
        (name, f.estimate, 2 * (f.stderr or 0.0))
        for name, f in result.parts.items()
        if f.estimate is not None
    ]
    if estimated:
        names, values, errors = zip(*estimated, strict=True)
        axes.errorbar(values, range(len(names)), xerr=errors, fmt="o")
        axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="learning coefficient", title="parts, all other weights fixed")
    axes.invert_yaxis()
    return figure


def plot_scales(result: EffectiveParameters) -> Any:
    """``N_eff`` over the loss scale with error bars, the closed form as a line.

    Args:
        result: What to draw.

    Returns:
        A matplotlib figure.
    """
    figure = new_figure(5.0, 3.6)
    axes = figure.subplots()
    estimated = [r for r in result.rows if r.effective is not None]
    errors = [2 * (r.stderr or 0.0) for r in estimated]
    axes.errorbar(
        [r.epsilon for r in estimated], [r.effective for r in estimated], errors, fmt="o", label="sampled"
    )
    closed = [(r.epsilon, 2 * r.gauss_newton) for r in result.rows if r.gauss_newton is not None]
    if closed:
        axes.plot(*zip(*closed, strict=True), "-", label="Gauss-Newton")
    axes.axhline(result.parameters, color="grey", lw=0.8, ls=":", label="parameters")
    axes.set(xscale="log", xlabel="loss scale eps", ylabel="effective parameters")
    axes.legend()
    return figure


def plot_influence(result: Influence, *, labels: Any = None) -> Any:
    """Draw the matrix, the rows in its two leading directions, and the strongest rows with two standard errors.

    Args:
        result: What to draw.
        labels: One label per row that colours its point.

    Returns:
        A matplotlib figure.
    """
    figure = new_figure(13.0, 4.2)
    left, middle, right = figure.subplots(1, 3)
    values = np.asarray(result.values, dtype=float)
    largest = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    image = left.imshow(
        values, cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto", interpolation="nearest"
    )
    left.set(xlabel="row", ylabel=result.label_name, title=result.kind)
    figure.colorbar(image, ax=left)
    filled = np.nan_to_num(values)
    singular, directions = np.linalg.svd(filled - filled.mean(1, keepdims=True), full_matrices=False)[1:]
    points = np.zeros((2, filled.shape[1]))
    points[: min(2, len(singular))] = (singular[:, None] * directions)[:2]
    coloured = (
        {}
        if labels is None
        else {"c": np.unique(np.asarray(labels), return_inverse=True)[1], "cmap": "tab10"}
    )
    middle.scatter(*points, s=14, **coloured)
    middle.set(xlabel="first direction", ylabel="second direction", title="rows")
    frame = result.frame()
    key, error = ("own", "own_stderr") if result.square and result.kind != "kernel" else ("value", "stderr")
    shown = frame.reindex(frame[key].astype(float).abs().sort_values(ascending=False).index[:_SHOWN]).dropna()
    places = range(len(shown))
    right.errorbar(shown[key].astype(float), places, xerr=2 * shown[error].astype(float), fmt="o")
    right.set_yticks(places, [str(name) for name in shown[result.label_name]])
    right.invert_yaxis()
    right.set(
        xlabel="own influence" if key == "own" else result.kind, title=f"strongest {result.label_name}s"
    )
    return figure


def plot_eigenvalues(basis: InteractionBasis) -> Any:
    """Draw each layer's eigenvalues, largest first, on a logarithmic scale."""
    figure = new_figure(6.5, 4.0)
    axes = plain_axes(figure)
    for number, layer in enumerate(basis.layers):
        values = layer.eigenvalues[layer.eigenvalues > 0]
        name = printable(layer.name, 30)
        axes.semilogy(np.arange(1, values.size + 1), values, ".-", color=COLOURS[number % 8], label=name)
    axes.set(xlabel="direction", ylabel="eigenvalue")
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
    figure = new_figure(2.2 + 1.4 * len(layers), 5.0)
    axes = plain_axes(figure)
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
    figure = new_figure(6.0, 4.0)
    axes = plain_axes(figure)
    for number, graph in enumerate(graphs):
        parts = [graph.normalised(site).ravel() for site in range(len(graph.edges))]
        strengths = np.sort(np.concatenate(parts))[::-1] if parts else np.zeros(0)
        if strengths.sum() > 0:
            share = np.arange(1, strengths.size + 1) / strengths.size
            carried = np.cumsum(strengths) / strengths.sum()
            axes.semilogx(share, carried, color=COLOURS[number % 8], label=graph.basis.kind)
    axes.set(xlabel="share of edges, strongest first", ylabel="share of the strength")
    axes.legend(fontsize=8, frameon=False)
    return figure


def plot_ablation(points: Sequence[AblationPoint]) -> Any:
    """Draw accuracy (or the share of variance lost) against the directions kept, one line per basis."""
    figure = new_figure(6.0, 4.0)
    axes = plain_axes(figure)
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
