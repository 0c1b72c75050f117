"""The pictures of top-down-eigenspectra: histograms of eigenvalues as small multiples, bars by network, phases.

Eigenvalues are drawn on a logarithmic axis, as the paper draws them, with the bulk that Marchenko and Pastur give
shaded and the start of the power-law tail marked. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati_reproductions.pictures import COLOURS, OURS, PAPER, legend_below, panels, save

if TYPE_CHECKING:
    from strati.core.results import FloatArray


@dataclass(frozen=True)
class Shown:
    """A spectrum to be drawn: its eigenvalues, the bulk's edges and the tail's start where there are any."""

    title: str
    eigenvalues: FloatArray
    bulk: tuple[float, float] | None = None
    tail: float | None = None


def as_shown(title: str, eigenvalues: FloatArray, metrics: Mapping[str, Any]) -> Shown:
    """A spectrum with the bulk and the tail that a scan found in it."""
    edges = metrics.get("mp_lambda_minus"), metrics.get("mp_lambda_plus")
    bulk = None if edges[0] is None or edges[1] is None else (float(edges[0]), float(edges[1]))
    return Shown(title, eigenvalues, bulk, metrics.get("xmin"))


def spectra_grid(rows: Sequence[Sequence[Shown]], folder: Path, stem: str, title: str) -> tuple[str, ...]:
    """Small multiples: one row of panels per network or state, one panel per layer."""
    columns = max(len(row) for row in rows)
    figure, axes = panels(len(rows) * columns, columns=columns, title=title, size=(2.5, 2.1), sharex=True)
    for axis, spectrum in zip(axes, (spectrum for row in rows for spectrum in row), strict=True):
        _spectrum(axis, spectrum, logarithmic=True)
    for axis in axes[-columns:]:
        axis.set_xlabel("log10 eigenvalue")
    legend_below(figure, axes)
    return save(figure, folder, stem)


def _spectrum(axis: Any, one: Shown, *, logarithmic: bool) -> None:
    """A histogram with the bulk shaded and the start of the tail marked; linear ones end at the 98th percentile."""
    values = np.asarray(one.eigenvalues, dtype=float)
    positive = values[values > values.max() * 1e-14]
    drawn = np.log10(positive) if logarithmic else positive[positive <= np.quantile(positive, 0.98)]
    axis.hist(drawn, bins=50, color=OURS, label="eigenvalues")
    if one.bulk is not None and one.bulk[1] > 0:
        low, high = (max(edge, positive.min()) for edge in one.bulk)
        ends = (np.log10(low), np.log10(high)) if logarithmic else (low, min(high, drawn.max()))
        axis.axvspan(*ends, color=COLOURS[4], alpha=0.25, label="bulk")
    if one.tail is not None and one.tail > 0 and (logarithmic or one.tail < drawn.max()):
        axis.axvline(
            np.log10(one.tail) if logarithmic else one.tail,
            color=PAPER,
            ls="--",
            lw=1,
            label="tail from here",
        )
    axis.set_title(one.title)


def linear_and_log(shown: Sequence[Shown], folder: Path, stem: str, title: str) -> tuple[str, ...]:
    """The same layers with linear and with logarithmic eigenvalues, one above the other (the paper's figure 3)."""
    figure, axes = panels(2 * len(shown), columns=len(shown), title=title, size=(2.5, 2.1))
    for k, spectrum_shown in enumerate(shown):
        for row, name in enumerate(("eigenvalue", "log10 eigenvalue")):
            axis = axes[row * len(shown) + k]
            _spectrum(axis, spectrum_shown, logarithmic=row == 1)
            axis.set_xlabel(name)
    legend_below(figure, axes)
    return save(figure, folder, stem)


def bars(
    values: dict[str, float],
    folder: Path,
    stem: str,
    *,
    title: str,
    label: str,
    band: tuple[float, float] | None = None,
) -> tuple[str, ...]:
    """One bar per name; a band where the paper says the values lie."""
    figure, (axis,) = panels(1, title=title, size=(6.4, 0.6 + 0.28 * len(values)))
    axis.barh(list(values), list(values.values()), color=OURS)
    if band is not None:
        axis.axvspan(*band, color=PAPER, alpha=0.2, label="paper")
        axis.legend(frameon=False)
    axis.invert_yaxis()
    axis.set_xlabel(label)
    return save(figure, folder, stem)


def points_by_group(
    groups: Mapping[str, Mapping[str, Sequence[float]]], folder: Path, stem: str, *, title: str, label: str
) -> tuple[str, ...]:
    """One panel per network, in it every layer as a point by kind (attention, MLP), medians as lines."""
    figure, axes = panels(len(groups), title=title, sharey=True)
    for axis, (name, kinds) in zip(axes, groups.items(), strict=True):
        for place, (values, colour) in enumerate(zip(kinds.values(), COLOURS, strict=False)):
            spread = np.linspace(-0.2, 0.2, len(values)) if len(values) > 1 else np.zeros(len(values))
            axis.plot(place + spread, values, "o", ms=3, color=colour, alpha=0.7)
            axis.hlines(np.median(values), place - 0.3, place + 0.3, color=colour)
        axis.set_xticks(range(len(kinds)), list(kinds))
        axis.set_title(name)
    axes[0].set_ylabel(label)
    return save(figure, folder, stem)


def confusion_map(counts: dict[tuple[Any, Any], int], names: Sequence[Any], folder: Path) -> tuple[str, ...]:
    """Counts of phases: rows are the truth, columns the answers."""
    table = np.array([[counts[a, b] for b in names] for a in names], dtype=float)
    table /= np.maximum(table.sum(axis=1, keepdims=True), 1)
    figure, (axis,) = panels(1, size=(6.0, 4.6), title="Share of matrices of a phase that get each name")
    axis.imshow(table, cmap="cividis", vmin=0, vmax=1)
    for i in range(len(names)):
        for j in range(len(names)):
            if table[i, j] >= 0.005:
                axis.text(j, i, f"{table[i, j]:.2f}", ha="center", va="center", fontsize=7,
                          color="black" if table[i, j] > 0.5 else "white")  # fmt: skip
    axis.set_xticks(range(len(names)), [str(n) for n in names], rotation=35, ha="right")
    axis.set_yticks(range(len(names)), [str(n) for n in names])
    axis.set(xlabel="named", ylabel="made to be")
    return save(figure, folder, "phases")


def lines(
    series: dict[str, dict[str, Sequence[float | None]]], folder: Path, stem: str, *, title: str, label: str
) -> tuple[str, ...]:
    """One panel per group, one line per name, over checkpoints in order."""
    figure, axes = panels(len(series), title=title, sharey=True)
    for axis, (name, inner) in zip(axes, series.items(), strict=True):
        for (line, values), colour in zip(inner.items(), COLOURS, strict=False):
            axis.plot([float("nan") if v is None else v for v in values], color=colour, label=line)
        axis.set(title=name, xlabel="checkpoint")
    axes[0].set_ylabel(label)
    axes[0].legend(frameon=False)
    return save(figure, folder, stem)
