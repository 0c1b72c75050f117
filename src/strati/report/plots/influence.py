"""The picture of an influence matrix: entries, an embedding of the rows, and the strongest rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import require

if TYPE_CHECKING:
    from strati.landscape.influence.result import Influence

_SHOWN = 15


def plot_influence(result: Influence, *, labels: Any = None) -> Any:
    """Draw the matrix, the rows in its two leading directions, and the strongest rows with two standard errors.

    Args:
        result: What to draw.
        labels: One label per row that colours its point.

    Returns:
        A matplotlib figure.
    """
    require("matplotlib", "plot", "drawing")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    values = np.asarray(result.values, dtype=float)
    largest = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    image = left.imshow(
        values, cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto", interpolation="nearest"
    )
    left.set(xlabel="row", ylabel=result.label_name, title=result.kind)
    figure.colorbar(image, ax=left)
    filled = np.nan_to_num(values)
    singular, directions = np.linalg.svd(filled - filled.mean(1, keepdims=True), full_matrices=False)[1:]
    points = np.zeros((2, filled.shape[1]))
    points[: min(2, len(singular))] = (singular[:, None] * directions)[:2]
    coloured = (
        {}
        if labels is None
        else {"c": np.unique(np.asarray(labels), return_inverse=True)[1], "cmap": "tab10"}
    )
    middle.scatter(*points, s=14, **coloured)
    middle.set(xlabel="first direction", ylabel="second direction", title="rows")
    frame = result.frame()
    key, error = ("own", "own_stderr") if result.square and result.kind != "kernel" else ("value", "stderr")
    shown = frame.reindex(frame[key].astype(float).abs().sort_values(ascending=False).index[:_SHOWN]).dropna()
    places = range(len(shown))
    right.errorbar(shown[key].astype(float), places, xerr=2 * shown[error].astype(float), fmt="o")
    right.set_yticks(places, [str(name) for name in shown[result.label_name]])
    right.invert_yaxis()
    right.set(
        xlabel="own influence" if key == "own" else result.kind, title=f"strongest {result.label_name}s"
    )
    return figure
