"""The picture of a degeneracy count: per layer, what is used and what is free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import require

if TYPE_CHECKING:
    from strati.landscape.counts.degeneracy import Degeneracy
    from strati.landscape.llc.llc import LearningCoefficient
    from strati.landscape.llc.parts import PartCoefficients
    from strati.landscape.llc.scales import EffectiveParameters


def plot_degeneracy(result: Degeneracy, *, share: bool = True) -> Any:
    """Draw one bar per layer: parameters used, and free ones.

    Args:
        result: The count.
        share: As a share of the layer's parameters; else their number.

    Returns:
        The matplotlib figure.
    """
    require("matplotlib", "plot", "drawing")
    from matplotlib.figure import Figure

    from strati.core.display import printable

    layers = result.layers
    figure = Figure(figsize=(7.5, 1.2 + 0.32 * len(layers)), layout="constrained")
    axes = figure.subplots()
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
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def plot_llc(result: LearningCoefficient, *, chains: int = 8) -> Any:
    """Left the running mean of some chains, right ``lambda(nbeta)`` with its limit.

    Args:
        result: What to draw.
        chains: How many chains to show.

    Returns:
        A matplotlib figure.
    """
    figure = _figure(9.0)
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
    figure = _figure(6.0)
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
    figure = _figure(5.0)
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


def _figure(width: float) -> Any:
    require("matplotlib", "plot", "drawing")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, 3.6), layout="constrained")
