"""``reproduce dropped-net-study``: what dropped-neural-net leaves open, on networks trained here. Needs torch.

Appendix A (does the negative diagonal appear by itself?), which seed order is best and why, whether repair has
local minima, how training length and weight decay make the diagonal, and how the cost grows with depth.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.papers.dropped_net import puzzle
from strati.papers.registry import Reproduction, Row
from strati.reassembly.make import Recipe, Trained, train
from strati.reassembly.pairing import Score, pair
from strati.reassembly.parts import Parts, stack
from strati.reassembly.pieces import as_pieces, sort_out
from strati.reassembly.regression import regress_order
from strati.reassembly.repair import bubble
from strati.reassembly.seeds import Seed, seed_order
from strati.reassembly.solve import EXACT, reassemble
from strati.rng import stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.parts import Floats, Ints
    from strati.types import Tick


def dropped_net_study(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """The open questions, each with its measurement."""
    base = Recipe(blocks=12, width=24, hidden=48, rows=2000, seed=seed)
    lengths = (3, 30) if quick else (1, 10, 100, 300)
    rows: list[Row] = []
    trained: list[tuple[str, Trained]] = []
    for decay in (0.0, 0.1):
        for epochs in lengths:
            recipe = replace(base, epochs=epochs, weight_decay=decay)
            trained.append((f"{epochs} epochs, weight decay {decay}", train(recipe)))
            tick(f"{epochs} epochs")
    rows += (
        _diagonal(trained) + _pairings(trained) + _seeds(trained, seed) + _minima(trained[-1], seed, quick)
    )
    tick("trained networks")
    rows += _cost((12, 24, 48) if quick else (12, 24, 48, 96, 192), tick)
    figures: list[str] = []
    if not quick:
        more, figures = _appendix_a(folder, seed, tick)
        rows += more
    title = "I Dropped a Neural Net: open questions on networks trained here"
    return Reproduction("dropped-net-study", title, tuple(rows), tuple(figures))


def _truth(network: Trained) -> tuple[Parts, Ints]:
    """The parts in their true order and that order, 0 to n - 1."""
    layers = [*network.inner, *network.outer, network.last]
    parts = stack(sort_out(as_pieces(layers)), "relu")
    return parts, np.arange(len(network.inner))


def _diagonal(trained: list[tuple[str, Trained]]) -> list[Row]:
    rows = []
    for name, network in trained:
        parts, _ = _truth(network)
        trace = np.trace(parts.B @ parts.A, axis1=1, axis2=2)
        note = f"{(trace < 0).mean():.0%} of the blocks negative; training MSE {network.loss:.2g}"
        rows.append(Row(f"trace of W_out W_in, mean: {name}", "negative", float(trace.mean()), note))
    return rows


def _pairings(trained: list[tuple[str, Trained]]) -> list[Row]:
    rows = []
    for name, network in trained:
        parts, order = _truth(network)
        right = [f"{score} {int((pair(parts, score).outs == order).sum())}" for score in Score]
        pieces, permutation = network.pieces()
        found = reassemble(pieces, network.x, network.pred)
        solved = "exact" if found.exact and found.permutation == permutation else "not exact"
        joint = "joint search" if found.searched else "by weights"
        rows.append(Row(f"pairs right of {len(order)}: {name}", None, ", ".join(right), f"{solved}, {joint}"))
    return rows


def _seeds(trained: list[tuple[str, Trained]], seed: int) -> list[Row]:
    """Quality of a seed is the number of pairs in the wrong order: it, not the MSE, decides the swaps needed."""
    rows = []
    found = puzzle()
    chain = found.seeded(Seed.FROBENIUS)
    solved, _ = bubble(found.parts, *chain, found.x[:1000], found.y[:1000])
    place = {int(i): k for k, i in enumerate(chain[0][solved])}
    for which in Seed:
        ins, outs = found.seeded(which)
        wrong = _inversions(np.array([place[int(i)] for i in ins]))
        mse = found.parts.mse(ins, outs, found.x[:1000], found.y[:1000])
        rows.append(
            Row(
                f"public puzzle, seed {which}: pairs in the wrong order of 1128",
                None,
                wrong,
                f"MSE {mse:.4g}",
            )
        )
    for name, network in trained:
        parts, order = _truth(network)
        counts = [
            f"{which} {_inversions(seed_order(parts, order, order, network.x[:500], which))}"
            for which in Seed
        ]
        rows.append(Row(f"pairs in the wrong order of {_pairs(len(order))}: {name}", None, ", ".join(counts)))
    return rows


def _minima(named: tuple[str, Trained], seed: int, quick: bool) -> list[Row]:
    """Repair from random orders of true pairs: how often it ends short of the truth."""
    name, network = named
    parts, order = _truth(network)
    x, y = network.x[:500], network.pred[:500]
    floor = EXACT * float(y.var())
    starts = 5 if quick else 20
    ends = {"adjacent swaps": 0, "regression": 0}
    for number in range(starts):
        shuffle = stream(seed, "minima", number).permutation(len(order))
        swapped, _ = bubble(parts, shuffle, shuffle, x, y)
        ends["adjacent swaps"] += bool((shuffle[swapped] == order).all())
        sorted_, _ = regress_order(parts, shuffle, shuffle, network.x, network.pred, floor=floor)
        ends["regression"] += bool((shuffle[sorted_] == order).all())
    return [
        Row(
            f"random orders repaired exactly by {how}, of {starts}: {name}",
            None,
            count,
            "the rest are local minima",
        )
        for how, count in ends.items()
    ]


def _cost(sizes: tuple[int, ...], tick: Tick) -> list[Row]:
    seconds, exact = [], []
    for blocks in sizes:
        pieces, x, y = planted_network(blocks)
        began = time.process_time()
        found = reassemble(pieces, x, y)
        seconds.append(time.process_time() - began)
        exact.append(found.exact)
        tick(f"{blocks} blocks")
    exponent = float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
    listed = ", ".join(f"{n}: {s:.2f} s" for n, s in zip(sizes, seconds, strict=True))
    note = f"{listed}; {sum(exact)} of {len(exact)} exact"
    return [Row("exponent of the cost in the number of blocks", None, exponent, note)]


def planted_network(
    blocks: int, width: int = 24, hidden: int = 48, rows: int = 4000
) -> tuple[list[tuple[Floats, Floats]], Floats, Floats]:
    """Shuffled pieces of a network with the traits of the public one, of any depth, and its answers.

    A negative diagonal of ``W_out W_in`` tells the pairs, and the size of ``W_out`` grows with depth but for
    chance, so that a seed is near and not right. Residuals shrink with depth, so that the stream keeps its size.
    """
    rng = stream(0, "planted network", blocks)

    def draw(*shape: int) -> NDArray[Any]:
        return np.asarray(rng.uniform(-1, 1, shape) / np.sqrt(shape[-1]), dtype=np.float32)

    layers: list[tuple[Floats, Floats]] = []
    for k in range(blocks):
        size = min(1.0, 12 / blocks) * (0.5 + k / blocks) * (1 + 1.5 * rng.normal() / blocks)
        inner = draw(hidden, width)
        outer = np.asarray(size * (draw(width, hidden) - 0.25 * inner.T), dtype=np.float32)
        layers += [(inner, draw(hidden)), (outer, draw(width) * np.float32(size))]
    layers.append((draw(1, width), draw(1)))
    parts = stack(sort_out(as_pieces([*layers[:-1:2], *layers[1:-1:2], layers[-1]])), "relu")
    x = rng.standard_normal((rows, width)).astype(np.float32)
    order = np.arange(blocks)
    y = parts.output(order, order, x)
    return [layers[int(k)] for k in rng.permutation(len(layers))], x, y


def _appendix_a(folder: Path, seed: int, tick: Tick) -> tuple[list[Row], list[str]]:
    """48 blocks on the puzzle's own data, Adam 1e-4, 200 epochs, as the paper trained; with and without decay."""
    from strati.report.plots.reassembly import products

    found = puzzle()
    rows, figures = [], []
    for decay in (0.0, 0.1):
        recipe = Recipe(
            blocks=48,
            width=48,
            hidden=96,
            epochs=200,
            lr=1e-4,
            weight_decay=decay,
            rows=len(found.x),
            seed=seed,
        )
        network = train(recipe, x=found.x, y=found.true, tick=tick)
        parts, _ = _truth(network)
        product = parts.B @ parts.A
        trace = np.trace(product, axis1=1, axis2=2)
        pairs = pair(parts)
        note = f"training MSE {network.loss:.2g}, {(trace < 0).sum()} of 48 negative, separated {pairs.separated}"
        rows.append(
            Row(
                f"appendix A: mean trace, weight decay {decay}",
                "strongly negative",
                float(trace.mean()),
                note,
            )
        )
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"figure-7-decay-{decay}.png"
        by_norm = np.argsort(np.linalg.norm(product, axis=(1, 2)))
        products(product[by_norm], [f"tr {trace[k]:.1f}" for k in by_norm]).savefig(file, dpi=110)
        figures.append(str(file))
    return rows, figures


def _inversions(order: Ints) -> int:
    return int(sum((order[k] > order[k + 1 :]).sum() for k in range(len(order))))


def _pairs(n: int) -> int:
    return n * (n - 1) // 2
