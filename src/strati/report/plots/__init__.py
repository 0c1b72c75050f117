"""Pictures of results with matplotlib, one module per topic; imported by a result's ``plot()`` inside the call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strati.core.display import printable
from strati.core.plugins import require

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_MOST_ROWS, _MOST_PANELS = 60, 3


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure that belongs to no window.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require("matplotlib", "plot", "drawing")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plain_axes(figure: Any) -> Any:
    """One pair of axes without a frame above and to the right."""
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def plot_table(table: pd.DataFrame, *, title: str = "") -> Any:
    """Rows from top to bottom, a panel for each of the first columns of numbers; rows by kind where there is none.

    Args:
        table: A result's table.
        title: Above the figure.

    Returns:
        The figure.
    """
    import pandas as pd

    numbers = [
        name
        for name in table.columns
        if pd.api.types.is_numeric_dtype(table[name])
        and not pd.api.types.is_bool_dtype(table[name])
        and table[name].notna().any()
    ][:_MOST_PANELS]
    words = [name for name in table.columns if name not in numbers and not table[name].isna().all()]
    listed = table.head(_MOST_ROWS)
    labels = [printable(str(v), limit=40) for v in (listed[words[0]] if words else listed.index)]
    height = 1.2 + 0.22 * max(3, len(listed))
    figure = new_figure(2.5 + 3.2 * max(1, len(numbers)), height)
    more = f", the first {_MOST_ROWS} of {len(table)} rows" if len(table) > _MOST_ROWS else ""
    figure.suptitle(f"{title}{more}", fontsize=10)
    if not numbers:
        _counts(figure.add_subplot(1, 1, 1), table, words)
        return figure
    first: Axes | None = None
    for place, name in enumerate(numbers):
        axis = figure.add_subplot(1, len(numbers), place + 1, sharey=first)
        first = first or axis
        axis.barh(range(len(listed)), listed[name].astype(float).fillna(0.0), color="#0072B2")
        axis.set_xlabel(str(name).replace("_", " "))
        axis.set_yticks(range(len(listed)), labels if place == 0 else [""] * len(listed), fontsize=7)
        axis.grid(axis="x", alpha=0.3)
    if first is not None:
        first.set_yticks(range(len(listed)), labels, fontsize=7)
        first.invert_yaxis()
    return figure


def _counts(axis: Axes, table: pd.DataFrame, words: list[Any]) -> None:
    """How many rows there are of each kind."""
    if not words or table.empty:
        axis.text(0.5, 0.5, "nothing to show", ha="center", va="center")
        axis.set_axis_off()
        return
    name = min(words, key=lambda one: table[one].astype(str).nunique())
    counts = table[name].astype(str).value_counts().head(_MOST_ROWS)
    axis.barh(range(len(counts)), counts.to_numpy(), color="#0072B2")
    axis.set_yticks(range(len(counts)), [printable(v, limit=40) for v in counts.index], fontsize=7)
    axis.set_xlabel(f"rows by {str(name).replace('_', ' ')}")
    axis.invert_yaxis()
