"""Pictures of trainings: one panel per quantity over the steps, and events by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strati_reproductions.pictures import COLOURS, PAPER, save
from strati_reproductions.pictures import panels as empty_panels

_MOST = 8  # lines of a panel that get a legend


def over_steps(
    folder: Path, stem: str, curves: Sequence[Mapping[str, Any]], *, title: str, marks: Sequence[float] = ()
) -> tuple[str, ...]:
    """Draw panels below one another over the training steps; the paths of the pictures.

    Args:
        folder: Where to.
        stem: Name of the files without their endings.
        curves: A panel each: ``title``, ``lines`` of ``(name, steps, values)`` or with errors after them, ``log`` for a
            logarithmic axis.
        title: Above all.
        marks: Steps to rule.
    """
    figure, axes = empty_panels(len(curves), columns=1, title=title, size=(8, 2.3), sharex=True)
    for axis, panel in zip(axes, curves, strict=True):
        for number, (name, steps, values, *errors) in enumerate(panel["lines"]):
            x = np.asarray(steps, float)
            y = np.array([np.nan if v is None else v for v in values], float)
            colour = COLOURS[number % len(COLOURS)]
            axis.plot(x, y, lw=1.4, label=str(name), color=colour)
            if errors:
                e = np.array([0.0 if v is None else v for v in errors[0]], float)
                axis.fill_between(x, y - 2 * e, y + 2 * e, color=colour, alpha=0.2, lw=0)
        for mark in marks:
            axis.axvline(mark, color=PAPER, lw=0.8, label="_mark")
        if panel.get("log"):
            axis.set_yscale("log")
        axis.set_xscale("symlog", linthresh=10)
        axis.set_ylabel(panel["title"])
        if 1 < len(panel["lines"]) <= _MOST:
            axis.legend(frameon=False)
    axes[-1].set_xlabel("training step")
    return save(figure, folder, stem)


def events_by_seed(
    folder: Path, stem: str, events: Mapping[str, Sequence[tuple[float, float, float] | None]], *, title: str
) -> tuple[str, ...]:
    """One row per event, one mark with its interval per seed.

    Args:
        folder: Where to.
        stem: Name of the files without their endings.
        events: By name, for every seed ``(step, low, high)``, or ``None`` where it did not happen.
        title: Above.
    """
    figure, (axis,) = empty_panels(1, columns=1, title=title, size=(8, 0.8 + 0.55 * len(events)))
    for row, (name, found) in enumerate(events.items()):
        for seed, event in enumerate(found):
            if event is not None:
                place = row + 0.09 * (seed - (len(found) - 1) / 2)
                axis.plot(
                    event[1:], [place, place], color=COLOURS[row % len(COLOURS)], lw=1, label="_interval"
                )
                axis.plot(event[:1], [place], "o", ms=4, color=COLOURS[row % len(COLOURS)], label=name)
    axis.set_yticks(range(len(events)), list(events))
    axis.invert_yaxis()
    axis.set_xscale("symlog", linthresh=10)
    axis.set_xlabel("training step")
    return save(figure, folder, stem)
