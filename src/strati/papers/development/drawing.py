"""Pictures of trainings: one panel per quantity over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strati.errors import require


def panels(
    path: Path, curves: Sequence[Mapping[str, Any]], *, title: str, marks: Sequence[float] = ()
) -> str:
    """Draw panels below one another and return the path.

    Args:
        path: The picture.
        curves: A panel each: ``title``, ``lines`` of ``(name, steps, values)`` or with errors after them, ``log`` for a
            logarithmic axis.
        title: Above all.
        marks: Steps to rule.
    """
    require("matplotlib", "plot", "pictures of trainings")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.3 * len(curves)), layout="constrained")
    axes = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, curves, strict=True):
        for name, steps, values, *errors in panel["lines"]:
            x = np.asarray(steps, float)
            y = np.array([np.nan if v is None else v for v in values], float)
            (line,) = axis.plot(x, y, lw=1.4, label=str(name))
            if errors:
                e = np.array([0.0 if v is None else v for v in errors[0]], float)
                axis.fill_between(x, y - 2 * e, y + 2 * e, color=line.get_color(), alpha=0.2, lw=0)
        for mark in marks:
            axis.axvline(mark, color="#c8553d", lw=0.8)
        if panel.get("log"):
            axis.set_yscale("log")
        axis.set_xscale("symlog", linthresh=10)
        axis.set_ylabel(panel["title"])
        if 1 < len(panel["lines"]) <= 8:
            axis.legend(fontsize=7, frameon=False)
    axes[-1].set_xlabel("training step")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return str(path)
