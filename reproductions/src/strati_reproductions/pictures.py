"""What the reproductions' pictures share: colours, panels, and saving as PNG and SVG with their data as CSV.

Colours are those of Okabe and Ito (2008), distinct with any kind of colour vision; text and axes are a middle grey on
a transparent ground, readable on light and dark pages alike. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from strati.core.errors import require
from strati.core.files import write_atomic
from strati_reproductions.picture_data import figure_csv

OURS = "#0072B2"
PAPER = "#D55E00"
THEORY = "#009E73"
COLOURS = (OURS, PAPER, THEORY, "#CC79A7", "#E69F00", "#56B4E9", "#999999")
_GREY = "#808080"
_WIDEST, _PALETTE = (
    1200,
    64,
)  # pixels and colours of a stored PNG: a quarter of the bytes, hardly a difference to see


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
    if image.width > _WIDEST:
        height = round(image.height * _WIDEST / image.width)
        image = image.resize((_WIDEST, height), Image.Resampling.LANCZOS)
    packed = BytesIO()
    image.quantize(_PALETTE, method=Image.Quantize.FASTOCTREE).save(packed, "PNG", optimize=True)
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
