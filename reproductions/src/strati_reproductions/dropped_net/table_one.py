"""``reproduce dropped-net-table-1``: does any reading of sections 4.3 and 4.4 give table 1 of dropped-neural-net?

The paper's table starts from the Bradley-Terry order with an MSE of 0.002989 and makes 21, 7, 5, 3 and 1 exchanges. The
text leaves open on which rows the blocks are compared and the exchanges judged, against which column of the data, how
the strengths are started and stopped, and in which direction a sweep goes. Here each of these choices is varied. The
first sweep of every variant is compared with the table's first line; the closest variants are repaired to the end.

With every pair of blocks compared once, the likelihood is greatest for strengths in the order of the summed wins
(``sum_j w_ij = sum_j s_i / (s_i + s_j)`` rises with ``s_i``), so that the start, the normalisation and the stopping of
the MM algorithm can change the order only of a fit that is far from its end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from strati.core.files import write_atomic
from strati.reassembly.residual.order import Seed
from strati_reproductions.dropped_net.puzzle import TABLE_1, Puzzle, puzzle, solved
from strati_reproductions.dropped_net.ranking import soft_wins
from strati_reproductions.registry import Reproduction, Row

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import Tick
    from strati.reassembly.residual.network import Floats, ResidualWeights

    Matrix = NDArray[np.float64]
    Blocks = list[tuple[int, int]]

TEMPERATURE, STOPPED = 0.001, 280
PAPER_START = 0.002989
COMPARED = (2000, 10_000)
"""Rows on which two blocks are compared: the paper's number, and all."""
FIRST_ROWS = (*range(100, 1001, 50), 1500, 2000, 2500, 3000, 5000, 10_000)
DRAWN = (500, 1000, 2000)
_SEEDS = (0, 1, 42)
_COMPLETED = 8  # variants that are repaired to the end
_LONGEST = 12  # sweeps of a repair
TARGETS = ("pred", "true")


class Chain:
    """Blocks in an order on fixed rows; the streams between them are kept as far as they are valid."""

    def __init__(self, parts: ResidualWeights, blocks: Blocks, x: Floats, y: Floats) -> None:
        self.blocks = list(blocks)
        self._parts, self._targets = parts, y.T
        self._streams = [np.ascontiguousarray(x.T)]

    def exchange(self, place: int) -> None:
        """Exchange the blocks at ``place`` and after it."""
        self.blocks[place], self.blocks[place + 1] = self.blocks[place + 1], self.blocks[place]
        del self._streams[place + 1 :]

    def error(self, place: int = 0) -> float:
        """The mean squared error; ``place`` is the first block that has changed since the last call."""
        return self.errors(place, self._targets)[0]

    def errors(self, place: int, *targets: Floats) -> list[float]:
        """The mean squared errors against several targets (outputs by rows)."""
        while len(self._streams) <= place:
            done = len(self._streams) - 1
            self._streams.append(_passed(self._parts, self.blocks[done], self._streams[done]))
        z = self._streams[place]
        for block in self.blocks[place:]:
            z = _passed(self._parts, block, z)
        outputs = self._parts.w_last @ z + self._parts.b_last[:, None]
        return [float(np.mean(np.square(outputs - y, dtype=np.float64))) for y in targets]


def _passed(parts: ResidualWeights, block: tuple[int, int], z: Floats) -> Floats:
    u = parts.w_in[block[0]] @ z
    u += parts.b_in[block[0]][:, None]
    r: Floats = parts.w_out[block[1]] @ np.maximum(u, 0, out=u)
    r += parts.b_out[block[1]][:, None]
    r += z
    return r


def gaps_of(
    parts: ResidualWeights, blocks: Blocks, x: Floats, targets: Sequence[Floats], tick: Tick
) -> list[Matrix]:
    """Equation 7 for several targets at once: by how much the error grows when two blocks change places."""
    n = len(blocks)
    columns = [y.T for y in targets]
    chain = Chain(parts, blocks, x, targets[0])
    base = chain.errors(0, *columns)
    tables = [np.zeros((n, n)) for _ in targets]
    for a in range(n):
        for b in range(a + 1, n):
            order = list(blocks)
            order[a], order[b] = order[b], order[a]
            chain.blocks[a:] = order[a:]
            for table, error, start in zip(tables, chain.errors(a, *columns), base, strict=True):
                table[a, b], table[b, a] = error - start, start - error
        chain.blocks[a:] = blocks[a:]
        tick(f"block {a + 1} compared on {len(x):,} rows")
    return tables


def strengths(wins: Matrix, start: Matrix, iterations: int) -> Matrix:
    """Hunter's MM algorithm from given strengths, stopped after so many iterations."""
    total, s = wins + wins.T, start / start.sum()
    for _ in range(iterations):
        share = total / np.maximum(s[:, None] + s[None, :], np.finfo(np.float64).tiny)
        s = wins.sum(axis=1) / share.sum(axis=1)
        s /= s.sum()
    return np.asarray(s)


def orders(gap: Matrix) -> dict[str, tuple[int, ...]]:
    """Orders of the blocks by name: strengths from several starts, summed wins, wins that count 1."""
    wins, n = soft_wins(gap, TEMPERATURE), len(gap)
    starts = {"equal strengths": np.ones(n)} | {
        f"random strengths ({seed})": np.random.default_rng(seed).uniform(size=n) for seed in _SEEDS
    }
    fits = {
        f"MM from {name}, {count} iterations": strengths(wins, start, count)
        for (name, start), count in product(starts.items(), (STOPPED, 2 * STOPPED))
    }
    scores = {"summed wins": wins.sum(axis=1), "wins that count 1": (gap > 0).sum(axis=1)} | fits
    return {name: tuple(np.argsort(-np.asarray(s), kind="stable").tolist()) for name, s in scores.items()}


Sweep = Callable[[Chain], int]


def judged(places: Iterable[int], *, updated: bool = True) -> Sweep:
    """A sweep over places that keeps each exchange which lowers the error.

    Args:
        places: In this order.
        updated: An exchange is compared with the error reached so far; otherwise with that before the sweep.
    """
    in_order = tuple(places)

    def sweep(chain: Chain) -> int:
        best, exchanges = chain.error(), 0
        for place in in_order:
            chain.exchange(place)
            error = chain.error(place)
            if error < best:
                exchanges += 1
                best = error if updated else best
            else:
                chain.exchange(place)
        return exchanges

    return sweep


def at_once(chain: Chain) -> int:
    """Judge all exchanges in the present order, then make those that lower the error."""
    best, lower = chain.error(), []
    for place in range(len(chain.blocks) - 1):
        chain.exchange(place)
        lower.append(chain.error(place) < best)
        chain.exchange(place)
    for chosen in np.flatnonzero(lower).tolist():
        chain.exchange(chosen)
    return sum(lower)


def sweeps(n: int) -> dict[str, tuple[Sweep, ...]]:
    """The kinds of repair: the sweeps that one round consists of, or that rounds take in turn."""
    right, left = range(n - 1), range(n - 2, -1, -1)
    return {
        "left to right": (judged(right),),
        "right to left": (judged(left),),
        "both ways in a round": (judged([*right, *left]),),
        "odd places, then even": (judged([*range(0, n - 1, 2), *range(1, n - 1, 2)]),),
        "left to right against the error before the sweep": (judged(right, updated=False),),
        "right to left against the error before the sweep": (judged(left, updated=False),),
        "all exchanges judged at once": (at_once,),
        "the direction changes every round": (judged(right), judged(left)),
    }


@dataclass(frozen=True)
class Variant:
    """One reading of the paper: where the order comes from, and how it is repaired on which rows."""

    order: str
    sweep: str
    rows: str
    target: str = "pred"

    @property
    def name(self) -> str:
        """All choices in words."""
        against = "" if self.target == "pred" else f" against `{self.target}`"
        return f"{self.order}; {self.sweep}, {self.rows}{against}"


def row_sets(count: int) -> dict[str, NDArray[np.intp]]:
    """Rows on which exchanges are judged, by name: the first ones, later ones, every fifth, and random ones."""
    chosen = {f"first {n:,} rows": np.arange(n) for n in FIRST_ROWS}
    for size in (1000, 2000):
        chosen |= {f"rows {s:,} to {s + size:,}": np.arange(s, s + size) for s in range(size, count, size)}
    chosen |= {f"every {step}th row": np.arange(0, count, step) for step in (5, 10)}
    for seed, size in product(_SEEDS, DRAWN):
        generator = torch.Generator().manual_seed(seed)
        chosen |= {
            f"{size:,} rows of RandomState({seed})": np.random.RandomState(seed).choice(count, size, False),
            f"{size:,} rows of default_rng({seed})": np.random.default_rng(seed).choice(count, size, False),
            f"{size:,} rows of torch.randperm, seed {seed}": torch.randperm(count, generator=generator)[
                :size
            ].numpy(),
        }
    return chosen


def variants(starts: Sequence[str], rows: Sequence[str], kinds: Sequence[str]) -> Iterator[Variant]:
    """The variants that are tried; the first start is the paper's own text."""
    first = [name for name in rows if name.startswith("first")]
    paper, other = starts[0], starts[1:]
    yield from (Variant(paper, kinds[0], name) for name in rows)
    yield from (Variant(paper, kind, name) for kind in kinds[1:3] for name in first)
    few = [f"first {n:,} rows" for n in DRAWN]
    yield from (Variant(paper, kind, name) for kind in kinds[3:7] for name in few)
    yield from (Variant(paper, kind, name, "true") for kind in kinds[:2] for name in few)
    yield from (Variant(start, kind, name) for start in other for kind in kinds[:2] for name in few)


def first_line_distance(exchanges: int, mse: float) -> float:
    """How far a first sweep is from the table's: relative in the exchanges plus logarithmic in the error.

    Examples:
        >>> first_line_distance(21, 0.001025)
        0.0
        >>> round(first_line_distance(15, 0.000748), 2)
        0.6
    """
    paper_exchanges, paper_mse = TABLE_1[0]
    return abs(exchanges - paper_exchanges) / paper_exchanges + abs(math.log(max(mse, 1e-12) / paper_mse))


def table_distance(rounds: Sequence[tuple[int, float]]) -> int:
    """Exchanges by which the rounds differ from the table's, summed over rounds; a missing round has none.

    Examples:
        >>> table_distance([(21, 0.0), (7, 0.0), (5, 0.0), (3, 0.0), (1, 0.0)])
        0
        >>> table_distance([(15, 0.0), (6, 0.0), (4, 0.0), (2, 0.0)])
        10
    """
    length = max(len(rounds), len(TABLE_1))
    ours, paper = ([r[0] for r in table] + [0] * (length - len(table)) for table in (rounds, TABLE_1))
    return sum(abs(a - b) for a, b in zip(ours, paper, strict=True))


def gives_table_1(rounds: Sequence[tuple[int, float]]) -> bool:
    """Whether exchanges and errors of all rounds are the table's."""
    return len(rounds) == len(TABLE_1) and all(
        a == c and abs(b - d) < 5e-7 for (a, b), (c, d) in zip(rounds, TABLE_1, strict=True)
    )


class Search:
    """The puzzle, the starting orders and the variants, with what was computed stored in a folder."""

    def __init__(self, found: Puzzle, folder: Path, tick: Tick) -> None:
        self._puzzle, self._tick = found, tick
        self._file = folder / "first-sweeps.json"
        self._sweeps: dict[str, list[float]] = (
            json.loads(self._file.read_text()) if self._file.is_file() else {}
        )
        ins, outs = found.seeded(Seed.DELTA_NORM)
        self._seeded: Blocks = [(int(i), int(j)) for i, j in zip(ins, outs, strict=True)]
        self._rows = row_sets(len(found.x))
        self._kinds = sweeps(len(self._seeded))
        self.orders: dict[str, tuple[int, ...]] = {}
        self.same: dict[str, list[str]] = {}
        for count, table in product(COMPARED, self._gaps(folder)):
            where = f"{count:,} rows against {table[0]}"
            self._add({f"{name}, {where}": order for name, order in orders(table[1][count]).items()})

    def _gaps(self, folder: Path) -> list[tuple[str, dict[int, Matrix]]]:
        by_target: dict[str, dict[int, Matrix]] = {target: {} for target in TARGETS}
        for count in COMPARED:
            file = folder / f"comparisons-{count}.json"
            if not file.is_file():
                folder.mkdir(parents=True, exist_ok=True)
                columns = [self._puzzle.y[:count], self._puzzle.true[:count]]
                tables = gaps_of(
                    self._puzzle.parts, self._seeded, self._puzzle.x[:count], columns, self._tick
                )
                write_atomic(file, json.dumps([table.tolist() for table in tables]) + "\n")
            for target, table in zip(TARGETS, json.loads(file.read_text()), strict=True):
                by_target[target][count] = np.array(table)
        return list(by_target.items())

    def _add(self, named: dict[str, tuple[int, ...]]) -> None:
        """Add orders that are new; names of the others are kept with the first name of the same order."""
        known = {order: name for name, order in self.orders.items()}
        for name, order in named.items():
            first = known.setdefault(order, name)
            self.same.setdefault(first, []).append(name)
            self.orders.setdefault(first, order)

    def blocks(self, order: str) -> Blocks:
        """The blocks in one of the orders."""
        return [self._seeded[place] for place in self.orders[order]]

    def error(self, blocks: Blocks) -> float:
        """The mean squared error over all rows."""
        return Chain(self._puzzle.parts, blocks, self._puzzle.x, self._puzzle.y).error()

    def inversions(self, order: str) -> int:
        """Pairs of blocks that stand in the wrong order."""
        truth = {int(i): place for place, i in enumerate(solved(self._puzzle)[0])}
        places = np.array([truth[block[0]] for block in self.blocks(order)])
        return int(np.triu(places[:, None] > places[None, :]).sum())

    def variants(self) -> list[Variant]:
        """All variants."""
        return list(variants(list(self.orders), list(self._rows), list(self._kinds)))

    def first_sweep(self, variant: Variant) -> tuple[int, float]:
        """Exchanges of the first sweep, and the error over all rows after it."""
        if variant.name not in self._sweeps:
            self._sweeps[variant.name] = list(next(self.rounds(variant), (0, math.inf)))
            write_atomic(self._file, json.dumps(self._sweeps) + "\n")
            self._tick(variant.name)
        exchanges, mse = self._sweeps[variant.name]
        return int(exchanges), mse

    def rounds(self, variant: Variant) -> Iterator[tuple[int, float]]:
        """The repair's rounds: exchanges, and the error over all rows."""
        rows = self._rows[variant.rows]
        column = self._puzzle.y if variant.target == "pred" else self._puzzle.true
        chain = Chain(self._puzzle.parts, self.blocks(variant.order), self._puzzle.x[rows], column[rows])
        kinds = self._kinds[variant.sweep]
        for number in range(_LONGEST):
            exchanges = kinds[number % len(kinds)](chain)
            if not exchanges:
                return
            yield exchanges, self.error(chain.blocks)


def dropped_net_table_1(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Try all variants, and report the closest or that one of them gives the table."""
    with threadpool_limits(limits=1, user_api="blas"):
        search = Search(puzzle(), folder, tick)
        tried = search.variants()
        if quick:
            tried = [v for v in tried if v.rows == f"first {DRAWN[0]:,} rows"]
        first = {variant: search.first_sweep(variant) for variant in tried}
        nearest = sorted(tried, key=lambda v: first_line_distance(*first[v]))[:_COMPLETED]
        paper = [v for v in tried if v.sweep == "left to right" and v.order == next(iter(search.orders))]
        turning = [
            Variant(v.order, "the direction changes every round", v.rows) for v in paper if v in nearest
        ]
        completed = {v: list(search.rounds(v)) for v in dict.fromkeys([*nearest, *turning])}
        rows = [*_order_rows(search), *_count_rows(first, completed), *_closest_rows(completed)]
        write_atomic(
            folder / "variants.json",
            json.dumps([asdict(v) | {"exchanges": e, "mse": m} for v, (e, m) in first.items()]) + "\n",
        )
    title = "I Dropped a Neural Net: which reading of the text gives table 1?"
    return Reproduction("dropped-net-table-1", title, tuple(rows))


def _order_rows(search: Search) -> list[Row]:
    """The starting orders, and how many of the fits share them."""
    text = next(iter(search.orders))
    rows = [
        Row("table 1: MSE of the Bradley-Terry order", PAPER_START, search.error(search.blocks(text)),
            f"{text}; the same order comes from {len(search.same[text]) - 1} of the other fits"),
        Row("pairs of blocks that the Bradley-Terry order has the wrong way round", None, search.inversions(text),
            "no repair can make fewer exchanges, and all make an even number more; the paper makes 37"),
    ]  # fmt: skip
    for name in list(search.orders)[1:]:
        note = f"an order of {len(search.same[name])} of the fits; {search.inversions(name)} pairs the wrong way round"
        rows.append(
            Row(f"MSE of another order: {name}", PAPER_START, search.error(search.blocks(name)), note)
        )
    return rows


def _count_rows(
    first: dict[Variant, tuple[int, float]], completed: dict[Variant, list[tuple[int, float]]]
) -> list[Row]:
    exchanges, mse = TABLE_1[0]
    same = [v for v, (count, _) in first.items() if count == exchanges]
    near = [v for v, (_, error) in first.items() if abs(error - mse) < 5e-7]
    exact = [v for v, rounds in completed.items() if gives_table_1(rounds)]
    facts = {"variants": len(first), "exact": len(exact)}
    return [
        Row("variants tried", None, len(first),
            f"the {len(completed)} closest in the first sweep were repaired to the end"),
        Row(f"variants whose first sweep makes {exchanges} exchanges", None, len(same),
            "; ".join(v.name for v in same)),
        Row(f"variants whose first sweep ends at {mse}", None, len(near), "; ".join(v.name for v in near)),
        Row("variants that give all of table 1", "1 or more", len(exact), "; ".join(v.name for v in exact),
            key="table-1-variants", facts=facts),
    ]  # fmt: skip


def _closest_rows(completed: dict[Variant, list[tuple[int, float]]]) -> list[Row]:
    """The repaired variants by their distance from the table, the closest round by round.

    Those that restore the network, as the table's repair does, come before the others.
    """
    ordered = sorted(completed, key=lambda v: (completed[v][-1][1] > 5e-7, table_distance(completed[v])))
    best = completed[ordered[0]]
    rows = [
        Row("closest variant: exchanges by which its rounds differ from the table's", 0, table_distance(best),
            f"{ordered[0].name}; chosen after looking at all of them", unexplained=True)
    ]  # fmt: skip
    for k in range(max(len(best), len(TABLE_1))):
        theirs, ours = (
            f"{table[k][0]} exchanges, {table[k][1]:.6f}" if k < len(table) else None
            for table in (TABLE_1, best)
        )
        rows.append(Row(f"closest variant: round {k + 1}", theirs, ours))
    for variant in ordered[1:]:
        text = " / ".join(f"{count}" for count, _ in completed[variant])
        note = f"exchanges of the rounds; the last error is {completed[variant][-1][1]:.6f}"
        rows.append(Row(variant.name, " / ".join(f"{count}" for count, _ in TABLE_1), text, note))
    return rows
