"""The picture of a degeneracy count: per layer, what is used and what is free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strati.core.errors import require

if TYPE_CHECKING:
    from strati.landscape.counts.degeneracy import Degeneracy


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
