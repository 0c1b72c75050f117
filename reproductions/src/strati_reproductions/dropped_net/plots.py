"""Figures of the dropped-net paper: data, separation, product matrices, progression and properties of the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.report.plots import new_figure
from strati.report.plots.reassembly import progression, scores

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.residual.result import Reassembly, Stage


def separation(result: Reassembly) -> Any:
    """The paper's figure 3 alone."""
    figure, axes = _figure(1, 3, (11, 3.3))
    scores(result, *axes[0])
    return figure


def progressions(stages: Sequence[Stage]) -> Any:
    """The paper's figure 6: one panel per stage."""
    figure, axes = _figure(1, len(stages), (3.7 * len(stages), 3.3))
    for axis, stage in zip(axes[0], stages, strict=True):
        progression(stage, axis)
    return figure


def products(matrices: NDArray[Any], titles: list[str], columns: int = 8) -> Any:
    """The paper's figures 4, 5 and 7: products ``W_out W_in`` on one colour scale."""
    rows = -(-len(matrices) // columns)
    figure, axes = _figure(rows, columns, (1.5 * columns, 1.6 * rows))
    top = float(np.quantile(np.abs(matrices), 0.999))
    for axis in axes.ravel():
        axis.set_axis_off()
    for axis, matrix, title in zip(axes.ravel(), matrices, titles, strict=False):
        axis.imshow(matrix, cmap="RdBu_r", vmin=-top, vmax=top)
        axis.set_title(title, fontsize=6)
    return figure


def properties(
    singular: NDArray[Any],
    effective: NDArray[Any],
    norms: dict[str, list[float]],
    active: dict[str, list[float]],
) -> Any:
    """The paper's figures 8 and 9: spectra, effective rank, delta-norm and active fraction by position.

    ``norms`` and ``active`` hold one series per kind of inputs, by its name.
    """
    figure, axes = _figure(2, 2, (9, 7))
    position = np.arange(1, len(singular) + 1)
    for values, colour in zip(singular, _colours(position / len(position)), strict=True):
        axes[0, 0].semilogy(values, color=colour, lw=0.8)
    axes[0, 0].set(title="singular values of W_out W_in (purple early, yellow late)")
    for axis, series, title in (
        (axes[0, 1], {"": effective}, "effective rank"),
        (axes[1, 0], norms, "mean norm of the residual"),
        (axes[1, 1], active, "active fraction"),
    ):
        for (name, values), mark in zip(series.items(), "os", strict=False):
            axis.plot(position, values, mark, ms=3, label=name)
        axis.set(title=title, xlabel="position")
        if len(series) > 1:
            axis.legend(frameon=False)
    return figure


def dataset(x: NDArray[Any], pred: NDArray[Any], true: NDArray[Any]) -> Any:
    """The paper's figure 2: sorted values of the features, of the predictions and of the targets."""
    figure, axes = _figure(1, 2, (9, 3.5))
    place = np.unique(np.linspace(0, len(x) - 1, 120).astype(int))  # more points than a picture can show
    axes[0, 0].plot(place, np.sort(x, axis=0)[place], lw=0.5)
    axes[0, 0].set(title="features, sorted", xlabel="row", ylabel="value")
    axes[0, 1].plot(place, np.sort(pred)[place], color="#0072B2", label="pred")
    axes[0, 1].plot(place, np.sort(true)[place], color="#D55E00", label="true")
    axes[0, 1].set(title="outputs, sorted", xlabel="row", ylabel="value")
    axes[0, 1].legend()
    return figure


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    figure = new_figure(*size)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _colours(share: NDArray[Any]) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](share)
