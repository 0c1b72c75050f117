"""Scatter plots of a study: performance against a metric, as figures 2 to 11 of robust-and-critical-layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.interventions.audit.correlations import kendall, linear_rmse, spearman
from strati.report.plots import new_figure

if TYPE_CHECKING:
    import pandas as pd

    from strati.interventions.study import Study

COLOURS = {"reinitialise": "#0072B2", "rerandomise": "#D55E00"}
"""Of the paper's two interventions; others take the rest of Okabe and Ito's colours in the order of their names."""
_OTHERS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#000000")
NAMES = {"reinitialise": "re-initialised", "rerandomise": "re-randomised"}


def scatter(study: Study, metric: str | Sequence[str] | None = None, *, pooled: bool | None = None) -> Any:
    """Performance against a metric: one panel per layer, or one for all of a network with many layers.

    Args:
        study: The rows.
        metric: The metric on the horizontal axis; by default ``alpha``, or the first that has a value. Of several
            metrics each has one panel with all layers, and those without a value are left out.
        pooled: One panel for all layers; default: when there are more than eight.

    Raises:
        BadInputError: The study has no such metric, or no value of it.
    """
    table = study.frame()
    table = table[(table["status"] == "done") & (table["intervention"] != "intact")]
    defined = [name for name in ("alpha", *study.metrics) if name in table and table[name].notna().any()]
    metrics = (
        [metric or (defined or ["alpha"])[0]] if metric is None or isinstance(metric, str) else [*metric]
    )
    if len(metrics) == 1 and metrics[0] not in study.metrics:
        raise BadInputError(metrics[0], f"not a metric of this study; there are {', '.join(study.metrics)}")
    available = [name for name in metrics if name in defined]
    if not available:
        raise BadInputError(", ".join(metrics), "has no value on any changed layer of this study")
    if len(metrics) > 1:
        panels = [(name, name, table[table[name].notna()]) for name in available]
    else:
        name = available[0]
        table = table[table[name].notna()]
        layers = list(dict.fromkeys(table["layer"]))
        pooled = len(layers) > 8 if pooled is None else pooled
        panels = [(str(layer), name, table[table["layer"] == layer]) for layer in layers]
        panels = [("all layers", name, table)] if pooled else panels
    columns = min(len(panels), 4 if len(metrics) > 1 else 3)
    rows = -(-len(panels) // columns)
    figure = new_figure(4.2 * columns, 3.3 * rows)
    for i, (title, name, part) in enumerate(panels):
        _panel(figure.add_subplot(rows, columns, i + 1), title, part, name, study.performance["name"])
    return figure


def draw_all(study: Study, folder: Path) -> list[Path]:
    """Draw every metric of a study into a folder, one file each."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(
            folder, f"cannot be made ({error.strerror or error}); choose another place"
        ) from None
    drawn = []
    for metric in study.metrics:
        if all(row.get(metric) is None for row in study.rows if row["intervention"] != "intact"):
            continue
        path = folder / f"{re.sub(r'[^A-Za-z0-9_-]', '_', metric)}.png"
        scatter(study, metric).savefig(path, dpi=110)
        drawn.append(path)
    return drawn


def _panel(axes: Any, title: str, part: pd.DataFrame, metric: str, performance: str) -> None:
    kinds = [str(kind) for kind in sorted(set(part["intervention"]))]
    others = [kind for kind in kinds if kind not in COLOURS]
    for kind in kinds:
        points = part[part["intervention"] == kind]
        axes.scatter(
            points[metric],
            points["performance"],
            s=9,
            alpha=0.6,
            color=COLOURS.get(kind) or _OTHERS[others.index(kind) % len(_OTHERS)],
            label=NAMES.get(kind, kind),
        )
    x, y = part[metric].to_numpy(float), part["performance"].to_numpy(float)
    text = title
    if len(x) > 2 and np.ptp(x) > 0:
        ones = np.ones((1, len(x)))
        rho, tau, rmse = (float(f(x, y, ones)[0]) for f in (spearman, kendall, linear_rmse))
        slope, height = np.polyfit(x, y, 1)
        at = np.linspace(x.min(), x.max(), 100)  # on a logarithmic axis it is a curve
        axes.plot(at, height + slope * at, color="#808080", linestyle="--", linewidth=1, label="_line")
        text = f"{title}\nrho {rho:.3f}  RMSE {rmse:.3g}  K-tau {tau:.3f}"
    axes.set_title(text.replace("$", r"\$"), fontsize=9)
    axes.set(xlabel=metric.replace("$", r"\$"), ylabel=performance)
    if performance == "perplexity":
        axes.set_yscale("log")
    axes.legend(fontsize=7)
