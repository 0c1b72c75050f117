"""A followed run drawn: one panel per quantity, changes with their intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strati.errors import require

if TYPE_CHECKING:
    from strati.tracking.track import Track


def plot_track(result: Track, *, most: int = 8) -> Any:
    """One panel per quantity over the steps: the network's own with its error, layers as thin lines.

    Args:
        result: The followed run.
        most: At most so many panels.

    Returns:
        The matplotlib figure.
    """
    require("matplotlib", "plot", "plots")
    from matplotlib import pyplot

    whats = list(dict.fromkeys(series.what for series in result.curves))[:most]
    figure, axes = pyplot.subplots(
        max(len(whats), 1),
        1,
        figsize=(8, 2.1 * max(len(whats), 1)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    steps = np.asarray(result.steps)
    for axis, what in zip(axes[:, 0], whats, strict=False):
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
            axis.axvspan(change["low"], change["high"], color="#c8553d", alpha=0.12, lw=0)
            axis.axvline(change["step"], color="#c8553d", lw=0.8)
        axis.set_ylabel(what)
    axes[-1, 0].set_xlabel("training step")
    return figure
