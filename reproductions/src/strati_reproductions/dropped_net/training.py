"""Appendix A of dropped-neural-net: does a network trained on the puzzle's own data grow the negative diagonal?

48 blocks like the public ones, Adam at 1e-4, batches of 32, at 150 epochs and 200; without weight decay as the paper
has it, and with decay of two kinds. A part of ``dropped-net-study``; the trainings run together, are kept every ten
epochs and go on from there. Needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.residual.network import ResidualWeights, stack
from strati.reassembly.residual.pairing import Score, pair
from strati.reassembly.residual.pieces import as_pieces, assign_roles_by_shape
from strati_reproductions.dropped_net.puzzle import puzzle
from strati_reproductions.dropped_net.train_stacked import train_together
from strati_reproductions.dropped_net.trainer import Recipe, Trained
from strati_reproductions.pictures import drawn, save
from strati_reproductions.registry import Row
from strati_reproductions.rows import Fact

if TYPE_CHECKING:
    from strati.core.results import Tick
    from strati.reassembly.residual.network import Ints

_BATCH = 32
"""The paper does not say; with 32 the training error comes down to the one that it prints."""

TRAININGS = (
    ("pred", "adam", 0.0),
    ("pred", "adamw", 1.0),
    ("pred", "adam", 1e-4),
    ("true", "adam", 0.0),
)
"""Target, optimiser and weight decay. ``adam`` puts the decay into the gradient, ``adamw`` beside it."""


def appendix_a(
    *, quick: bool, seed: int, folder: Path, tick: Tick
) -> tuple[list[Row], list[str], dict[str, str]]:
    """The traces of networks trained as the paper trained its own, figure 7 of each, and what to see there."""
    found = puzzle()
    rows: list[Row] = []
    figures: list[str] = []
    captions = {}
    count, lengths = (1000, (2, 4)) if quick else (len(found.x), (150, 200))
    trainings = TRAININGS[:2] if quick else TRAININGS
    recipes = [
        Recipe(blocks=48, width=48, hidden=96, lr=1e-4, weight_decay=decay, rows=count, seed=seed, optimiser=optimiser,
               batch=_BATCH)
        for _, optimiser, decay in trainings
    ]  # fmt: skip
    targets = [(found.y if target == "pred" else found.true)[:count] for target, _, _ in trainings]
    keep = None if quick else folder / f"appendix-a-batch-{_BATCH}.pt"
    trained = train_together(recipes, found.x[:count], targets, lengths, keep=keep, tick=tick)
    for k, (target, optimiser, decay) in enumerate(trainings):
        how = "no weight decay" if decay == 0 else f"{optimiser}, weight decay {decay:g}"
        for epochs in lengths:
            network, errors = trained[epochs].networks[k], trained[epochs].errors[k]
            name = f"appendix A, {epochs} epochs on {target}, {how}"
            facts: dict[str, Fact] = {"epochs": epochs, "target": target, "decay": decay}
            rows += _traces(name, network, errors, epochs == lengths[0], facts)
        name = f"figure-7-{target}-{optimiser}-{decay:g}"
        figures += drawn(_figure_seven, network, folder, name)
        captions[name] = (
            f"figure 7: W_out W_in of all 48 blocks after {lengths[-1]} epochs on {target} ({how}), by Frobenius norm: "
            "a dark diagonal is the negative one that the paper reports."
        )
    return rows, figures, captions


def _figure_seven(network: Trained, folder: Path, name: str) -> tuple[str, ...]:
    from strati_reproductions.dropped_net.plots import products

    parts, _ = in_order(network)
    product = parts.w_out @ parts.w_in
    by_norm = np.argsort(np.linalg.norm(product, axis=(1, 2)))
    titles = [f"tr {np.trace(product[k]):.1f}" for k in by_norm]
    return save(products(product[by_norm], titles), folder, name)


def in_order(network: Trained, activation: str = "relu") -> tuple[ResidualWeights, Ints]:
    """The parts of a network in their true order, and that order, 0 to n - 1."""
    layers = [*network.inner, *network.outer, network.last]
    parts = stack(assign_roles_by_shape(as_pieces(layers)), activation)
    return parts, np.arange(len(network.inner))


def _traces(
    name: str, network: Trained, errors: list[float], first: bool, facts: dict[str, Fact]
) -> list[Row]:
    parts, order = in_order(network)
    trace = np.trace(parts.w_out @ parts.w_in, axis1=1, axis2=2)
    diagonal = pair(parts)
    right = {score: int((pair(parts, score).outs == order).sum()) for score in Score}
    own = diagonal.matrix[order, order]
    negative = int((trace < 0).sum())
    when = "the paper says 200 epochs, not its batch" if first else "as many epochs as the paper says"
    ends = f"ends of the last {len(errors)} epochs, {min(errors):.2g} to {max(errors):.2g}: it jumps"
    jumps = f"median of the {ends}; {when}"
    return [
        Row(f"{name}: training MSE", 0.0006, float(np.median(errors)), jumps),
        Row(
            f"{name}: trace of W_out W_in, mean",
            "strongly negative",
            float(trace.mean()),
            f"{trace.min():.2f} to {trace.max():.2f} (the public network's: -13.5 to -7.4)",
            error=float(trace.std(ddof=1) / len(trace) ** 0.5),
            key="trace-mean",
            facts=facts,
        ),
        Row(f"{name}: blocks with a negative trace, of {len(trace)}", "all", negative),
        Row(
            f"{name}: diagonal dominance of true pairs, least",
            None,
            float(own.min()),
            f"1.76 in the public network; pairs right of {len(order)}: "
            + ", ".join(f"{score} {count}" for score, count in right.items()),
        ),
    ]
