"""``reproduce dropped-net-tables`` and ``dropped-net-figures``: the public puzzle of dropped-neural-net.

Tables 1 to 3, Bradley-Terry (4.3), near-commutativity (4.2) and appendix B on the real network, figures 2 to 6, 8, 9.
Appendix A (a network trained here, figure 7) is with the study of open questions, in ``open_questions``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from strati.network.data import read_data
from strati.papers.beside import beside
from strati.papers.registry import Reproduction, Row
from strati.reassembly.pairing import Pairing, pair
from strati.reassembly.passes import Parts, run, stack
from strati.reassembly.pieces import read_pieces, sort_out
from strati.reassembly.ranking import bradley_terry, cycles, gaps, soft_wins
from strati.reassembly.reassemble import reassemble
from strati.reassembly.repair import Round, bubble
from strati.reassembly.result import Reassembly
from strati.reassembly.seeds import Seed, seed_order
from strati.run.files import write_atomic

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.passes import Floats, Ints
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
_SEED_ROWS = 2000
"""Rows of the seed: the paper does not say, but on the first 2,000, as for comparisons, its numbers come out."""


@dataclass(frozen=True)
class Puzzle:
    """The public puzzle: its weights, its pairs, its rows."""

    parts: Parts
    pairs: Pairing
    x: Floats
    y: Floats
    true: Floats

    def seeded(self, seed: Seed, rows: int = _SEED_ROWS) -> tuple[Ints, Ints]:
        """The paired blocks in a seed's order, taken on so many rows from the first."""
        order = seed_order(self.parts, self.pairs.ins, self.pairs.outs, self.x[:rows], seed)
        return self.pairs.ins[order], self.pairs.outs[order]


def puzzle() -> Puzzle:
    """Read the puzzle that lies beside the project."""
    data = read_data(beside("dropped-net", "historical_data.csv"), inputs="measurement_*", target="pred,true")
    parts = stack(sort_out(read_pieces(beside("dropped-net", "pieces"))), "relu")
    assert data.y is not None
    columns = data.y.astype(np.float32)
    return Puzzle(parts, pair(parts), data.x.astype(np.float32), columns[:, :1], columns[:, 1:])


def dropped_net_tables(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """The three tables, Bradley-Terry, near-commutativity and appendix B.

    The repairs and comparisons take minutes on all rows; what is done is kept in ``folder`` and not done again.
    """
    with threadpool_limits(limits=1, user_api="blas"):  # small matrices: threads only wait for each other
        found = puzzle()
        rows = 1000 if quick else len(found.x)
        table: list[Row] = [*_pairs(found), *_seeds(found)]
        tick("seeds")
        ranked, ranking_rows = _ranking(found, folder, tick)
        table += ranking_rows
        for title, chain, paper_rounds in (
            ("table 1 (from Bradley-Terry)", ranked, _TABLE_1),
            ("table 2 (from delta-norm)", found.seeded(Seed.DELTA_NORM), _TABLE_2),
            ("table 3 (from ||W_out||_F)", found.seeded(Seed.FROBENIUS), _TABLE_3),
        ):
            file = folder / f"{title[:7].replace(' ', '-')}-on-{rows}-rows.json"
            repair = partial(_repaired, found, chain, rows)
            rounds = tuple(Round(**r) for r in _kept(file, repair))
            table += _rounds(
                title, paper_rounds, rounds, f"repair on the first {rows:,} rows" if quick else ""
            )
            tick(title)
        table += _commutativity(found) + _appendix_b(found)
    return Reproduction(
        "dropped-net-tables", "I Dropped a Neural Net: tables, 4.2, 4.3 and appendix B", tuple(table)
    )


def _repaired(found: Puzzle, chain: tuple[Ints, Ints], rows: int) -> list[dict[str, Any]]:
    ins, outs = chain
    return [vars(r) for r in bubble(found.parts, ins, outs, found.x[:rows], found.y[:rows])[1]]


def _kept(file: Path, work: Callable[[], Any]) -> Any:
    """What ``work`` returns (plain numbers and lists), from the file where an earlier run left it."""
    if file.is_file():
        return json.loads(file.read_text())
    done = work()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(done) + "\n")
    return done


def dropped_net_figures(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Figures 2 to 6, 8 and 9 from the real network; figure 7 is drawn by ``dropped-net-study``."""
    from strati.report.plots import reassembly as plots

    found = puzzle()
    result = reassemble(read_pieces(beside("dropped-net", "pieces")), found.x, found.y)
    assert isinstance(result, Reassembly)
    ins, outs = np.array(result.ins), np.array(result.outs)
    product = found.parts.B[outs] @ found.parts.A[ins]
    wrong = found.parts.B[np.roll(outs, 7)] @ found.parts.A[ins]
    passed = run(found.parts, ins, outs, found.x[:1000])
    trace = np.trace(product, axis1=1, axis2=2)
    by_norm = seed_order(found.parts, ins, outs, found.x[:_SEED_ROWS], Seed.DELTA_NORM)
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


def _seeds(found: Puzzle) -> list[Row]:
    rows = []
    for name, which, count, paper, note in (
        ("delta-norm", Seed.DELTA_NORM, 2000, 0.036794, "norms on the first 2,000 rows, MSE on all"),
        ("delta-norm, all rows", Seed.DELTA_NORM, 10_000, None, "more rows, another order"),
        ("delta-norm without output bias", Seed.DELTA_NORM_NO_BIAS, 2000, None, ""),
        ("||W_out||_F", Seed.FROBENIUS, 2000, 0.075851, ""),
        ("||W_out||_1", Seed.L1, 2000, None, ""),
    ):
        mse = found.parts.mse(*found.seeded(which, count), found.x, found.y)
        rows.append(Row(f"seed MSE, {name}", paper, mse, note))
    return rows


def _ranking(found: Puzzle, folder: Path, tick: Tick) -> tuple[tuple[Ints, Ints], list[Row]]:
    """Comparisons around the delta-norm seed on the first 2,000 rows, T = 0.001 (section 4.3)."""
    x, y = found.x[:2000], found.y[:2000]
    ins, outs = found.seeded(Seed.DELTA_NORM)
    gap = np.array(
        _kept(folder / "comparisons.json", lambda: gaps(found.parts, ins, outs, x, y, tick=tick).tolist())
    )
    wins = soft_wins(gap, 0.001)
    fit = bradley_terry(wins, tolerance=1e-3)
    late = bradley_terry(wins, tolerance=1e-6)
    order = np.argsort(-fit.strengths, kind="stable")
    same = np.array_equal(order, np.argsort(-late.strengths, kind="stable"))
    chain = (ins[order], outs[order])
    n = len(ins)
    round_trips = cycles(gap)
    margins = [min(abs(gap[a, b]), abs(gap[b, c]), abs(gap[a, c])) for a, b, c in round_trips]
    span = _spans(found, ins, outs, round_trips)
    settled = f"the paper names no stopping rule; here no strength moves by 1e-3. After {late.iterations} "
    return chain, [
        Row("Bradley-Terry: iterations of MM", "about 280", fit.iterations,
            settled + f"(1e-6) the order is {'the same' if same else 'another'}"),
        Row("Bradley-Terry: triples not transitive", 66, 3 * len(round_trips),
            f"of {n * (n - 1) * (n - 2) // 6}; each 3-cycle counted from each of its three blocks"),
        Row("Bradley-Terry: 3-cycles", 22, len(round_trips)),
        Row("Bradley-Terry: median margin of the weakest link of a cycle", 1.8e-4, float(np.median(margins))),
        Row("Bradley-Terry: median margin of all comparisons", 0.041,
            float(np.median(np.abs(gap[np.triu_indices(n, 1)])))),
        Row("Bradley-Terry: most places a cycle spans", "below 15", max(span)),
        Row("Bradley-Terry: MSE of its order", 0.00299, found.parts.mse(*chain, found.x, found.y)),
    ]  # fmt: skip


def _spans(found: Puzzle, ins: Ints, outs: Ints, triples: list[tuple[int, int, int]]) -> list[int]:
    """How many places of the true order lie between the outermost two of each triple."""
    truth = {int(i): k for k, i in enumerate(_solved(found)[0])}
    places = [[truth[int(ins[k])] for k in triple] for triple in triples]
    return [max(place) - min(place) for place in places]


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
