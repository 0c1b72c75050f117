"""``reproduce dropped-net-figures``: figures 2 to 6, 8 and 9 of dropped-neural-net from the public puzzle.

Figure 7 needs a network trained here and is drawn by ``dropped-net-study``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.reassemble import reassemble
from strati.reassembly.residual.order import Seed, seed_order
from strati.reassembly.residual.pieces import read_pieces
from strati.reassembly.residual.result import Reassembly, Stage
from strati_reproductions.datasets import external_data
from strati_reproductions.dropped_net.puzzle import (
    SEED_ROWS,
    Puzzle,
    appendix_b,
    correlation,
    puzzle,
    rank_correlation,
    ranked,
)
from strati_reproductions.pictures import save
from strati_reproductions.registry import Reproduction, Row

if TYPE_CHECKING:
    from strati.core.results import Tick
    from strati.reassembly.residual.network import Ints


def dropped_net_figures(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Draw them, and the numbers that the paper's captions give. Needs matplotlib."""
    from strati_reproductions.dropped_net import plots

    found = puzzle()
    result = reassemble(read_pieces(external_data("dropped-net", "pieces")), found.x, found.y)
    assert isinstance(result, Reassembly)
    ins, outs = np.array(result.ins), np.array(result.outs)
    product = found.parts.w_out[outs] @ found.parts.w_in[ins]
    wrong = found.parts.w_out[np.roll(outs, 7)] @ found.parts.w_in[ins]
    trace = np.trace(product, axis1=1, axis2=2)
    by_norm = seed_order(found.parts, ins, outs, found.x[:SEED_ROWS], Seed.DELTA_NORM)
    singular = np.linalg.svd(product, compute_uv=False)
    share = singular**2 / (singular**2).sum(axis=1, keepdims=True)
    effective = np.exp(-(share * np.log(share)).sum(axis=1))
    raw, own = appendix_b(found, raw=True), appendix_b(found, raw=False)
    tick("blocks")
    stages = progress(found, ins, outs, folder, tick)
    labels = [f"{k + 1}: tr {trace[k]:.1f}" for k in range(len(ins))]
    chosen = [0, 12, 24, 36]
    kinds = ("on the raw inputs", "on each block's own stream")
    pictures = {
        "figure-2": plots.dataset(found.x, found.y[:, 0], found.true[:, 0]),
        "figure-3": plots.separation(result),
        "figure-4": plots.products(
            np.concatenate([product[chosen], wrong[chosen]]),
            [labels[k] for k in chosen] + [f"wrong: tr {np.trace(wrong[k]):.1f}" for k in chosen],
            columns=4,
        ),
        "figure-5": plots.products(product[by_norm], [labels[int(k)] for k in by_norm]),
        "figure-6": plots.progressions(stages),
        "figures-8-and-9": plots.properties(
            singular,
            effective,
            dict(zip(kinds, (raw.norms, own.norms), strict=True)),
            dict(zip(kinds, (raw.active, own.active), strict=True)),
        ),
    }
    figures: list[str] = []
    for name, figure in pictures.items():
        figures += save(figure, folder, name)
        tick(name)
    position = np.arange(len(ins))
    rows = (
        Row("figure 5: traces, least", -13.5, float(trace.min())),
        Row("figure 5: traces, greatest", -7.4, float(trace.max())),
        *(Row(f"figure 6: MSE of the {s.stage} order", _SIX[s.stage], s.mse) for s in stages),
        Row("figure 8: activation fraction on the raw inputs, mean over blocks", 0.5, float(np.mean(raw.active)),
            "the paper says about 1/2; on each block's own stream see the next row"),
        Row("figure 8: activation fraction on each block's own stream, mean", None, float(np.mean(own.active))),
        Row("figure 9: delta-norm on the raw inputs against position, Spearman", "increases",
            rank_correlation(raw.norms)),
        Row("figure 9: delta-norm on each block's own stream against position, Spearman", None,
            rank_correlation(own.norms)),
        Row("figure 9: effective rank against position, correlation", None, correlation(effective, position)),
    )  # fmt: skip
    title = "I Dropped a Neural Net: figures 2 to 9"
    return Reproduction("dropped-net-figures", title, rows, tuple(figures), captions=CAPTIONS)


CAPTIONS = {
    "figure-2": "the puzzle's data: features and outputs, each sorted.",
    "figure-3": "the diagonal dominance of every pair of projections: one bright cell per row, on the diagonal once "
    "matched; in the histogram true pairs and all others lie apart.",
    "figure-4": "W_out W_in of four true pairs (top) has a negative diagonal, of four wrong ones (bottom) none.",
    "figure-5": "W_out W_in of all 48 blocks by delta-norm: every one has a negative diagonal. Figure 7, of networks "
    "trained here, is with dropped-net-study.",
    "figure-6": "places of the blocks in three orders: by delta-norm, by Bradley-Terry strengths, solved. The nearer "
    "to a straight rise, the nearer to the truth.",
    "figures-8-and-9": "singular values of the products, effective rank, delta-norm and active fraction by place in "
    "the network, the last two on the raw inputs and on each block's own stream: half of the neurons are active on the "
    "raw inputs only, and only there the delta-norm grows with depth.",
}


_SIX = {"delta-norm": 0.036794, "Bradley-Terry": 0.00299, "solved": 0.0}


def progress(found: Puzzle, ins: Ints, outs: Ints, folder: Path, tick: Tick) -> list[Stage]:
    """Figure 6: the order by delta-norm, by Bradley-Terry strengths, and solved, each with its error over all rows."""
    place = {int(i): k for k, i in enumerate(ins)}
    (by_strength, rest), _ = ranked(found, folder, tick)
    stages = []
    for name, chain in (
        ("delta-norm", found.seeded(Seed.DELTA_NORM)),
        ("Bradley-Terry", (by_strength, rest)),
        ("solved", (ins, outs)),
    ):
        order = tuple(place[int(i)] for i in chain[0])
        stages.append(Stage(name, order, found.parts.mse(*chain, found.x, found.y)))
    return stages
