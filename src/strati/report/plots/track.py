"""A followed run drawn: one panel per quantity, changes with their intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strati.report.plots import new_figure

if TYPE_CHECKING:
    from strati.tracking.result import Track


def plot_track(result: Track, *, most: int = 8, layer: str | None = None) -> Any:
    """The page's time line: one panel per quantity with its changes, and the spectra of one layer over the run.

    The network's own series are drawn with twice their error, layers as thin lines; changes of the network as bands
    over their intervals, those of layers as ticks at the lower edge.

    Args:
        result: The followed run.
        most: At most so many quantities.
        layer: Whose spectra are drawn; the first by default.

    Returns:
        The matplotlib figure.
    """
    whats = list(dict.fromkeys(series.what for series in result.curves))[:most]
    drawn = (result.spectra or {}).get("layers", [])
    count = max(len(whats), 1) + bool(drawn)
    figure = new_figure(8, 2.1 * count)
    axes = figure.subplots(count, 1, sharex=not drawn, squeeze=False)
    for axis, what in zip(axes[:, 0], whats, strict=False):
        _course(axis, result, what)
    axes[max(len(whats), 1) - 1, 0].set_xlabel("training step")
    if drawn:
        held = next((d for d in drawn if d["layer"] == layer), drawn[0])
        _spectra(axes[-1, 0], result, held)
    return figure


def _course(axis: Any, result: Track, what: str) -> None:
    steps = np.asarray(result.steps)
    for series in (s for s in result.curves if s.what == what):
        values = np.array([np.nan if v is None else v for v in series.values])
        errors = np.array([0.0 if e is None else e for e in series.stderr])
        if series.layer is None:
            axis.plot(steps, values, color="#1f5f8b", lw=1.8)
            axis.fill_between(
                steps, values - 2 * errors, values + 2 * errors, color="#1f5f8b", alpha=0.2, lw=0
            )
        else:
            axis.plot(steps, values, color="#7a7a7a", lw=0.7, alpha=0.6)
    for change in (c for c in result.breaks if c["what"] == what):
        of_network = change["layer"] is None
        axis.axvspan(
            change["low"], change["high"], 0, 1 if of_network else 0.06, color="#c8553d", alpha=0.15, lw=0
        )
        axis.axvline(change["step"], 0, 1 if of_network else 0.06, color="#c8553d", lw=0.8)
    axis.set_ylabel(what)


def _spectra(axis: Any, result: Track, held: dict[str, Any]) -> None:
    """Eigenvalues in order, dark to bright over the run."""
    from matplotlib import colormaps

    defined = [(k, v) for k, v in enumerate(held["values"]) if v]
    for number, (_, values) in enumerate(defined):
        shade = colormaps["cividis"](number / max(1, len(defined) - 1))
        axis.plot(
            result.spectra["ranks"], 10 ** (np.array(values) / result.spectra["unit"]), color=shade, lw=0.8
        )
    axis.set_yscale("log")
    axis.set_xlabel("share of the eigenvalues below")
    axis.set_ylabel(f"spectrum of {held['layer']}", fontsize=8)
