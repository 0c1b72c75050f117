"""The figure of a reassembly: score matrices and the progression of the order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strati.report.plots import new_figure

if TYPE_CHECKING:
    from strati.reassembly.residual.result import Reassembly, Stage


def draw(result: Reassembly) -> Any:
    """Score matrix before and after matching, the scores' histogram, and the progression of the order."""
    figure = new_figure(11, 6.5)
    axes = figure.subplots(2, 3)
    scores(result, axes[0, 0], axes[0, 1], axes[0, 2])
    for axis, stage in zip(axes[1], _three(result.stages), strict=False):
        progression(stage, axis)
    for axis in axes[1][len(_three(result.stages)) :]:
        axis.set_axis_off()
    return figure


def scores(result: Reassembly, raw: Any, matched: Any, histogram: Any) -> None:
    """The paper's figure 3: scores as found, after matching, and the separation of pairs from the rest."""
    pairing = result.pairing
    ins, outs = list(result.ins), list(result.outs)
    raw.imshow(pairing.matrix, cmap="viridis", aspect="auto")
    raw.set(title="scores as found", xlabel="output projection", ylabel="input projection")
    matched.imshow(pairing.matrix[np.ix_(ins, outs)], cmap="viridis", aspect="auto")
    matched.set(title="after matching and ordering", xlabel="block", ylabel="block")
    unmatched = np.ones(pairing.matrix.shape, dtype=bool)
    unmatched[ins, outs] = False
    if result.pieces.square:
        np.fill_diagonal(unmatched, False)
    histogram.hist(pairing.matrix[unmatched], bins=40, color="0.6", label="not a pair")
    histogram.hist(pairing.matrix[ins, outs], bins=20, color="#D55E00", label="pair")
    histogram.set(title=f"{pairing.score} score", yscale="log", xlabel="score")
    histogram.legend()


def progression(stage: Stage, axis: Any) -> None:
    """The paper's figure 6: each bar is a block, its height the position it ends in."""
    from matplotlib import colormaps

    n = len(stage.order)
    heights = np.array(stage.order) + 1
    axis.bar(range(1, n + 1), heights, color=colormaps["viridis"](heights / n), width=1.0)
    axis.set(title=f"{stage.stage}: MSE {stage.mse:.3g}", xlabel="place", ylabel="final position")


def _three(stages: tuple[Stage, ...]) -> list[Stage]:
    """First, one in the middle, last."""
    return list(stages) if len(stages) <= 3 else [stages[0], stages[len(stages) // 2], stages[-1]]
