"""What the reproductions' pictures share: colours, panels, curves over training steps, saving with the data as CSV.

Colours are those of Okabe and Ito (2008), distinct with any kind of colour vision; text and axes are a middle grey on
a transparent ground, readable on light and dark pages alike. Needs matplotlib.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from strati.core.files import write_atomic
from strati.core.plugins import require

OURS = "#0072B2"
PAPER = "#D55E00"
THEORY = "#009E73"
COLOURS = (OURS, PAPER, THEORY, "#CC79A7", "#E69F00", "#56B4E9", "#999999")
_GREY = "#808080"
_PNG_WIDTH, _PNG_COLOURS = 1200, 64  # a quarter of the bytes, with hardly a visible difference
_LEGEND_LINES = 8  # panels with more lines have no legend
_CSV_CELLS = 1024  # images with more cells have no table
_CSV_POINTS = 2000  # of a longer series every second, third, ... point is listed

Line = tuple[str, str, str, str]


def panels(
    count: int, *, columns: int = 3, title: str = "", size: tuple[float, float] = (3.6, 2.8), **shared: Any
) -> tuple[Any, list[Any]]:
    """Make a figure of equal panels.

    Args:
        count: Number of panels.
        columns: Most panels in a row.
        title: Title of the figure.
        size: Width and height of a panel, in inches.
        shared: ``sharex``, ``sharey`` of matplotlib's ``subplots``.

    Returns:
        The figure and its axes.
    """
    require("matplotlib", "plot", "drawing the figures of a reproduction")
    from matplotlib.figure import Figure

    wide = min(count, columns)
    high = -(-count // wide)
    figure = Figure(figsize=(size[0] * wide, size[1] * high + (0.4 if title else 0)), layout="constrained")
    axes = list(figure.subplots(high, wide, squeeze=False, **shared).flat)
    for spare in axes[count:]:
        spare.remove()
    if title:
        figure.suptitle(title, color=_GREY, fontsize=11)
    for axis in axes[:count]:
        _plain(axis)
    return figure, axes[:count]


def legend_below(figure: Any, axes: Sequence[Any]) -> None:
    """One legend for all panels, below them, with every label once."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False)


def drawn(draw: Callable[..., tuple[str, ...]], *arguments: Any) -> tuple[str, ...]:
    """What ``draw(*arguments)`` draws; nothing where matplotlib is not installed: the numbers need no picture."""
    return draw(*arguments) if find_spec("matplotlib") is not None else ()


def save(figure: Any, folder: Path, stem: str) -> tuple[str, ...]:
    """Write a figure as PNG (few colours) and as SVG, and its data as CSV under the same name.

    Returns:
        The paths of both pictures.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.png", folder / f"{stem}.svg"]
    table = figure_csv(figure)
    if table:
        write_atomic(folder / f"{stem}.csv", table)
    for axis in figure.axes:
        _plain(axis)
    for legend in figure.legends:
        _quiet(legend)
    figure.savefig(paths[0], dpi=120, transparent=True)
    compress(paths[0])
    figure.savefig(paths[1], transparent=True, metadata={"Date": None})
    return tuple(map(str, paths))


def compress(file: Path) -> None:
    """Rewrite a PNG with a palette, and no wider than a page shows it, where that makes it smaller."""
    from io import BytesIO

    from PIL import Image

    with Image.open(file) as stored:
        image = stored.convert("RGBA")
    if image.width > _PNG_WIDTH:
        height = round(image.height * _PNG_WIDTH / image.width)
        image = image.resize((_PNG_WIDTH, height), Image.Resampling.LANCZOS)
    packed = BytesIO()
    image.quantize(_PNG_COLOURS, method=Image.Quantize.FASTOCTREE).save(packed, "PNG", optimize=True)
    if packed.tell() < file.stat().st_size:
        write_atomic(file, packed.getvalue())


def _plain(axis: Any) -> None:
    for name in ("top", "right"):
        axis.spines[name].set_visible(False)
    for name in ("left", "bottom"):
        axis.spines[name].set_color(_GREY)
    axis.tick_params(colors=_GREY, labelsize=8)
    for text in (axis.title, axis.xaxis.label, axis.yaxis.label):
        text.set_color(_GREY)
        text.set_fontsize(min(9, text.get_fontsize()))
    if axis.get_legend() is not None:
        _quiet(axis.get_legend())


def _quiet(legend: Any) -> None:
    for text in legend.get_texts():
        text.set_color(_GREY)
        text.set_fontsize(8)


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
    figure, axes = panels(len(curves), columns=1, title=title, size=(8, 2.3), sharex=True)
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
        if 1 < len(panel["lines"]) <= _LEGEND_LINES:
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
    figure, (axis,) = panels(1, columns=1, title=title, size=(8, 0.8 + 0.55 * len(events)))
    for row, (name, by_seed) in enumerate(events.items()):
        for seed, event in enumerate(by_seed):
            if event is not None:
                place = row + 0.09 * (seed - (len(by_seed) - 1) / 2)
                axis.plot(
                    event[1:], [place, place], color=COLOURS[row % len(COLOURS)], lw=1, label="_interval"
                )
                axis.plot(event[:1], [place], "o", ms=4, color=COLOURS[row % len(COLOURS)], label=name)
    axis.set_yticks(range(len(events)), list(events))
    axis.invert_yaxis()
    axis.set_xscale("symlog", linthresh=10)
    axis.set_xlabel("training step")
    return save(figure, folder, stem)


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
        if values.ndim == 2 and values.size <= _CSV_CELLS:
            rows, columns = (_ticks(side) for side in (axis.yaxis, axis.xaxis))
            for (i, j), entry in _cells(values):
                yield panel, _number(entry), columns.get(j, str(j)), rows.get(i, str(i))


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
    step = -(-len(pairs) // _CSV_POINTS)
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
