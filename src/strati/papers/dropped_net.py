"""``reproduce dropped-net-tables`` and ``dropped-net-figures``: the public puzzle of dropped-neural-net.

Tables 1 to 3, Bradley-Terry (4.3), near-commutativity (4.2) and appendix B on the real network, figures 2 to 6, 8, 9.
Appendix A (a network trained here, figure 7) is with the study of open questions, ``strati.papers.dropped_study``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.network.data import read_data
from strati.papers.beside import beside
from strati.papers.registry import Reproduction, Row
from strati.reassembly.pairing import Pairing, pair
from strati.reassembly.parts import Parts, run, stack
from strati.reassembly.pieces import read_pieces, sort_out
from strati.reassembly.ranking import bradley_terry, cycles, gaps, soft_wins
from strati.reassembly.repair import Round, bubble
from strati.reassembly.seeds import Seed, seed_order
from strati.reassembly.solve import reassemble

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.parts import Floats, Ints
    from strati.types import Tick

_TABLE_1 = ((21, 0.001025), (7, 0.000553), (5, 0.000200), (3, 0.000052), (1, 0.000000))
_TABLE_2 = (
    *((23, 0.021690), (20, 0.012919), (21, 0.008559), (15, 0.005873), (11, 0.004097), (9, 0.002745)),
    *(
        (12, 0.001012),
        (5, 0.000380),
        (2, 0.000247),
        (1, 0.000182),
        (1, 0.000118),
        (1, 0.000052),
        (1, 0.000000),
    ),
)
_TABLE_3 = ((30, 0.005936), (16, 0.003397), (12, 0.001405), (9, 0.000568), (4, 0.000223), (1, 0.000000))


@dataclass(frozen=True)
class Puzzle:
    """The public puzzle: its weights, its pairs, its rows."""

    parts: Parts
    pairs: Pairing
    x: Floats
    y: Floats
    true: Floats

    def seeded(self, seed: Seed) -> tuple[Ints, Ints]:
        """The paired blocks in a seed's order, taken on all rows."""
        order = seed_order(self.parts, self.pairs.ins, self.pairs.outs, self.x, seed)
        return self.pairs.ins[order], self.pairs.outs[order]


def puzzle() -> Puzzle:
    """Read the puzzle that lies beside the project."""
    data = read_data(beside("dropped-net", "historical_data.csv"), inputs="measurement_*", target="pred,true")
    parts = stack(sort_out(read_pieces(beside("dropped-net", "pieces"))), "relu")
    assert data.y is not None
    columns = data.y.astype(np.float32)
    return Puzzle(parts, pair(parts), data.x.astype(np.float32), columns[:, :1], columns[:, 1:])


def dropped_net_tables(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """The three tables, Bradley-Terry, near-commutativity and appendix B."""
    found = puzzle()
    rows = 1000 if quick else len(found.x)
    sample = f"repair on the first {rows:,} rows"
    table: list[Row] = [*_pairs(found)]
    for name, which, paper in (
        ("delta-norm", Seed.DELTA_NORM, 0.036794),
        ("delta-norm without output bias", Seed.DELTA_NORM_NO_BIAS, None),
        ("||W_out||_F", Seed.FROBENIUS, 0.075851),
        ("||W_out||_1", Seed.L1, None),
    ):
        note = "no reading of the definition gives the paper's number" if which is Seed.DELTA_NORM else ""
        table.append(
            Row(f"seed MSE, {name}", paper, found.parts.mse(*found.seeded(which), found.x, found.y), note)
        )
    tick("seeds")
    ranked, ranking_rows = _ranking(found, tick)
    table += ranking_rows
    for title, chain, paper_rounds, note in (
        ("table 1 (from Bradley-Terry)", ranked, _TABLE_1, "ranked around delta-norm"),
        ("table 2 (from delta-norm)", found.seeded(Seed.DELTA_NORM), _TABLE_2, "our seed MSE differs"),
        ("table 3 (from ||W_out||_F)", found.seeded(Seed.FROBENIUS), _TABLE_3, ""),
    ):
        _, rounds = bubble(found.parts, *chain, found.x[:rows], found.y[:rows])
        table += _rounds(title, paper_rounds, rounds, "; ".join(filter(None, (sample, note))))
        tick(title)
    table += _commutativity(found) + _appendix_b(found)
    return Reproduction(
        "dropped-net-tables", "I Dropped a Neural Net: tables, 4.2, 4.3 and appendix B", tuple(table)
    )


def dropped_net_figures(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Figures 2 to 6, 8 and 9 from the real network; figure 7 is drawn by ``dropped-net-study``."""
    from strati.report.plots import reassembly as plots

    found = puzzle()
    result = reassemble(read_pieces(beside("dropped-net", "pieces")), found.x, found.y)
    ins, outs = np.array(result.ins), np.array(result.outs)
    product = found.parts.B[outs] @ found.parts.A[ins]
    wrong = found.parts.B[np.roll(outs, 7)] @ found.parts.A[ins]
    passed = run(found.parts, ins, outs, found.x[:1000])
    trace = np.trace(product, axis1=1, axis2=2)
    by_norm = seed_order(found.parts, ins, outs, found.x, Seed.DELTA_NORM)
    singular = np.linalg.svd(product, compute_uv=False)
    share = singular**2 / (singular**2).sum(axis=1, keepdims=True)
    effective = np.exp(-(share * np.log(share)).sum(axis=1))
    norms = np.array([np.linalg.norm(r, axis=1).mean() for r in passed.residuals])
    active = np.array([(h > 0).mean() for h in passed.hidden])
    labels = [f"{k + 1}: tr {trace[k]:.1f}" for k in range(len(ins))]
    chosen = [0, 12, 24, 36]
    drawn = {
        "figure-2.png": plots.dataset(found.x, found.y[:, 0], found.true[:, 0]),
        "figures-3-and-6.png": plots.draw(result),
        "figure-4.png": plots.products(
            np.concatenate([product[chosen], wrong[chosen]]),
            [labels[k] for k in chosen] + [f"wrong: tr {np.trace(wrong[k]):.1f}" for k in chosen],
            columns=4,
        ),
        "figure-5.png": plots.products(product[by_norm], [labels[int(k)] for k in by_norm]),
        "figures-8-and-9.png": plots.properties(singular, effective, norms, active),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        figure.savefig(folder / name, dpi=110)
        tick(name)
    position = np.arange(len(ins))
    rows = (
        Row("figure 5: traces, least", -13.5, float(trace.min())),
        Row("figure 5: traces, greatest", -7.4, float(trace.max())),
        Row("figure 6: MSE of the final order", 0.0, result.mse),
        Row("figure 8: activation fraction, mean over blocks", "about 1/2", float(active.mean())),
        Row("figure 9: delta-norm against position, correlation", "increases", _correlation(norms, position)),
        Row(
            "figure 9: effective rank against position, correlation", None, _correlation(effective, position)
        ),
    )
    names = tuple(str(folder / name) for name in drawn)
    return Reproduction("dropped-net-figures", "I Dropped a Neural Net: figures 2 to 9", rows, names)


def _pairs(found: Puzzle) -> list[Row]:
    matched = found.pairs.matrix[found.pairs.ins, found.pairs.outs]
    return [
        Row("diagonal dominance of pairs, least", 1.76, found.pairs.matched_min),
        Row(
            "diagonal dominance of pairs, greatest",
            3.28,
            float(matched.max()),
            "the paper's 3.28 is not reached",
        ),
        Row("of what is not a pair, greatest", 0.58, found.pairs.unmatched_max),
        Row("of what is not a pair, typical (1/sqrt(d))", 0.14, _typical(found)),
    ]


def _typical(found: Puzzle) -> float:
    rest = np.ones(found.pairs.matrix.shape, dtype=bool)
    rest[found.pairs.ins, found.pairs.outs] = False
    return float(np.sqrt(np.mean(found.pairs.matrix[rest] ** 2)))


def _ranking(found: Puzzle, tick: Tick) -> tuple[tuple[Ints, Ints], list[Row]]:
    """Comparisons around two seeds: the paper's as we read it, and the one without output bias.

    The paper's seed (MSE 0.0368) lies between the two (0.0524 and 0.0155), and so do its numbers.
    """
    x, y = found.x[:2000], found.y[:2000]
    rows: list[Row] = []
    for seed in (Seed.DELTA_NORM_NO_BIAS, Seed.DELTA_NORM):
        ins, outs = found.seeded(seed)
        gap = gaps(found.parts, ins, outs, x, y, tick=tick)
        wins = soft_wins(gap, 0.001)
        fit = bradley_terry(wins, tolerance=1e-4)
        early = bradley_terry(wins, tolerance=0.0, limit=280)
        round_trips = cycles(gap)
        order = np.argsort(-fit.strengths, kind="stable")
        same = np.array_equal(order, np.argsort(-early.strengths, kind="stable"))
        chain = (ins[order], outs[order])
        n = len(ins)
        triples = n * (n - 1) * (n - 2) // 6
        settled = f"to a change below 1e-4; the order after 280 is {'the same' if same else 'another'}"
        rows += [
            Row(f"Bradley-Terry on {seed}: iterations of MM", 280, fit.iterations, settled),
            Row(
                f"Bradley-Terry on {seed}: triples not transitive", 66, 3 * len(round_trips), f"of {triples}"
            ),
            Row(f"Bradley-Terry on {seed}: 3-cycles", 22, len(round_trips)),
            Row(
                f"Bradley-Terry on {seed}: MSE of its order",
                0.00299,
                found.parts.mse(*chain, found.x, found.y),
            ),
        ]
    return chain, rows


def _rounds(
    title: str, paper: tuple[tuple[int, float], ...], ours: tuple[Round, ...], note: str
) -> list[Row]:
    table = [
        Row(f"{title}: rounds", len(paper), len(ours), note),
        Row(f"{title}: swaps", sum(s for s, _ in paper), sum(r.swaps for r in ours)),
    ]
    for k in range(max(len(paper), len(ours))):
        theirs: Any = f"{paper[k][0]} swaps, {paper[k][1]:.6f}" if k < len(paper) else None
        mine: Any = f"{ours[k].swaps} swaps, {ours[k].mse:.6f}" if k < len(ours) else None
        table.append(Row(f"{title}: round {k + 1}", theirs, mine))
    return table


def _solved(found: Puzzle) -> tuple[Ints, Ints]:
    chain = found.seeded(Seed.FROBENIUS)
    order, _ = bubble(found.parts, *chain, found.x[:1000], found.y[:1000])
    return chain[0][order], chain[1][order]


def _commutativity(found: Puzzle) -> list[Row]:
    """How far two neighbouring blocks of the true order are from commuting."""
    ins, outs = _solved(found)
    passed = run(found.parts, ins, outs, found.x[:1000])
    size = [
        float(np.linalg.norm(r, axis=1).mean() / np.linalg.norm(z, axis=1).mean())
        for r, z in zip(passed.residuals, passed.streams, strict=False)
    ]
    apart = []
    for k in range(len(ins) - 1):
        z, a, b = passed.streams[k], (ins[k], outs[k]), (ins[k + 1], outs[k + 1])
        zb = z + found.parts.residual(*b, z)
        other = zb + found.parts.residual(*a, zb)
        change = np.linalg.norm(other - passed.streams[k + 2], axis=1)
        apart.append(float(change.mean() / np.linalg.norm(passed.streams[k + 2], axis=1).mean()))
    return [
        Row("4.2: residual over stream, median", "small", float(np.median(size))),
        Row("4.2: |AB(x) - BA(x)| over the stream, median of neighbours", "O(|r_A||r_B|)", float(np.median(apart)),
            f"product of two residuals over the stream: {np.median(size) ** 2:.2g}"),
    ]  # fmt: skip


def _appendix_b(found: Puzzle) -> list[Row]:
    """Trace of the product against -E||J||_F^2, and the activation probability, on each block's own stream."""
    ins, outs = _solved(found)
    passed = run(found.parts, ins, outs, found.x[:500])
    trace, jacobian, active, isometry = [], [], [], []
    d = found.x.shape[1]
    for k, (i, j) in enumerate(zip(ins, outs, strict=True)):
        A, B = found.parts.A[i].astype(np.float64), found.parts.B[j].astype(np.float64)
        D = (passed.hidden[k] > 0).astype(np.float64)
        trace.append(float(np.trace(B @ A)))
        active.append(float(D.mean()))
        weights = (B.T @ B) * (A @ A.T)  # ||B D A||_F^2 = d^T ((B^T B) o (A A^T)) d
        jacobian.append(float(np.einsum("xh,hk,xk->x", D, weights, D).mean()))
        mean_trace = float(D.mean(axis=0) @ np.einsum("dh,hd->h", B, A))
        isometry.append((d + 2 * mean_trace + jacobian[-1]) / d)
    correlation = _correlation(np.array(trace), -np.array(jacobian))
    return [
        Row("appendix B: tr(W_out W_in), mean over blocks", None, float(np.mean(trace))),
        Row("appendix B: -E||J_r||_F^2, mean over blocks", "equal to the trace", -float(np.mean(jacobian)),
            f"correlation over blocks {correlation:.2f}"),
        Row("appendix B: activation probability, mean", 0.5, float(np.mean(active)),
            f"{min(active):.2f} to {max(active):.2f}: the proposition's assumption does not hold here"),
        Row("appendix B: E tr(J_f^T J_f) / d, mean over blocks", 1.0, float(np.mean(isometry)),
            f"{min(isometry):.2f} to {max(isometry):.2f}"),
    ]  # fmt: skip


def _correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(np.corrcoef(a, b)[0, 1])
