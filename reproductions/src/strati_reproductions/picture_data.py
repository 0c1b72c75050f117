"""The numbers behind a figure, read from what was drawn, so that every picture has its data as a table.

One line per point, bar, band or cell: panel, series, and the two axes. Pictures of large matrices are left out; their
numbers are no table that anyone reads.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

Line = tuple[str, str, str, str]

_MOST_CELLS = 1024  # images of more cells have no table
_MOST_POINTS = 2000  # of a longer series every second, third, ... point is listed


def figure_table(figure: Any) -> tuple[list[str], list[Line]]:
    """The columns (panel, series, and the axes' labels where all panels share them) and the lines of a figure.

    Examples:
        >>> from matplotlib.figure import Figure
        >>> axes = Figure().subplots()
        >>> _ = axes.plot([1, 2], [0.5, 0.25], label="loss")
        >>> _ = axes.set(title="a", xlabel="epoch", ylabel="loss")
        >>> figure_table(axes.figure)
        (['panel', 'series', 'epoch', 'loss'], [('a', 'loss', '1', '0.5'), ('a', 'loss', '2', '0.25')])
    """
    lines: list[Line] = []
    labels: list[set[str]] = [set(), set()]
    for axis in figure.axes:
        drawn = list(_lines(axis))
        if drawn:
            lines += drawn
            for names, label in zip(labels, (axis.get_xlabel(), axis.get_ylabel()), strict=True):
                if label:
                    names.add(_flat(label))
    shared = [names.pop() if len(names) == 1 else plain for names, plain in zip(labels, "xy", strict=True)]
    return ["panel", "series", *shared], lines


def figure_csv(figure: Any) -> str:
    """The table of a figure as CSV; empty where it has none."""
    columns, lines = figure_table(figure)
    if not lines:
        return ""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *lines])
    return text.getvalue()


def _lines(axis: Any) -> Iterator[Line]:
    from matplotlib.collections import PathCollection
    from matplotlib.container import BarContainer

    panel = _flat(axis.get_title())
    for number, line in enumerate(axis.lines):
        yield from _points(panel, _name(line, f"line {number + 1}"), zip(*line.get_data(), strict=True))
    for number, points in enumerate(c for c in axis.collections if isinstance(c, PathCollection)):
        yield from _points(panel, _name(points, f"points {number + 1}"), points.get_offsets())
    for container in axis.containers:
        if isinstance(container, BarContainer):
            yield from _bars(axis, panel, container)
    for image in axis.images:
        values = image.get_array()
        if values.ndim == 2 and values.size <= _MOST_CELLS:
            rows, columns = (_ticks(side) for side in (axis.yaxis, axis.xaxis))
            for (i, j), value in _cells(values):
                yield panel, _number(value), columns.get(j, str(j)), rows.get(i, str(i))


def _bars(axis: Any, panel: str, container: Any) -> Iterator[Line]:
    """A bar is its place and its length; places with a name get it as the series."""
    across = container.orientation == "horizontal"
    names = _ticks(axis.yaxis if across else axis.xaxis)
    series = _name(container, "")
    for bar in container.patches:
        start, width = (bar.get_y(), bar.get_height()) if across else (bar.get_x(), bar.get_width())
        place = start + width / 2
        length = bar.get_width() if across else bar.get_height()
        name = names.get(round(place), "") if abs(place - round(place)) < 1e-6 else ""
        pair = (_number(length), name) if across else (name or _number(place), _number(length))
        yield panel, series or name, pair[0], pair[1]


def _ticks(side: Any) -> dict[int, str]:
    """Names of whole places on an axis, where it was given names."""
    texts = [label.get_text() for label in side.get_ticklabels()]
    formatter = type(side.get_major_formatter()).__name__
    if formatter not in ("FixedFormatter", "FuncFormatter", "StrCategoryFormatter"):
        return {}
    return {round(place): _flat(text) for place, text in zip(side.get_ticklocs(), texts, strict=False)}


def _points(panel: str, series: str, points: Any) -> Iterator[Line]:
    """The points of a series, thinned where there are very many."""
    pairs = list(points)
    step = -(-len(pairs) // _MOST_POINTS)
    name = series if step <= 1 else f"{series}, every {step} points"
    for x, y in pairs[:: max(1, step)]:
        yield panel, name, _number(x), _number(y)


def _cells(values: Any) -> Iterator[tuple[tuple[int, int], Any]]:
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            yield (i, j), values[i, j]


def _name(artist: Any, otherwise: str) -> str:
    label = str(artist.get_label())
    return otherwise if label.startswith("_") or not label else _flat(label)


def _flat(text: str) -> str:
    return " ".join(text.replace(r"\$", "$").split())


def _number(value: Any) -> str:
    return f"{float(value):.5g}"
