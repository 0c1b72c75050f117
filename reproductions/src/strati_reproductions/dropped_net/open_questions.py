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
from threadpoolctl import threadpool_limits

from strati.core.rng import stream
from strati.reassembly.reassemble import reassemble
from strati.reassembly.residual.network import stack
from strati.reassembly.residual.order import Seed, regress_order
from strati.reassembly.residual.pieces import as_pieces, assign_roles_by_shape
from strati.reassembly.residual.solve import EXACT
from strati_reproductions.dropped_net.battery import battery, moves_rows, pairing_rows, solving_rows, squares
from strati_reproductions.dropped_net.puzzle import puzzle
from strati_reproductions.dropped_net.ranking import swap_repair
from strati_reproductions.dropped_net.seeds import SEEDS, named_order
from strati_reproductions.dropped_net.trainer import Recipe, Trained, train
from strati_reproductions.dropped_net.training import appendix_a, in_order
from strati_reproductions.registry import Reproduction, Row

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import Tick
    from strati.reassembly.residual.network import Floats, Ints


def dropped_net_study(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """The open questions, each with its measurement. Trainings are kept in ``folder`` and resumed."""
    base = Recipe(blocks=12, width=24, hidden=48, rows=2000, seed=seed)
    lengths = (3, 30) if quick else (1, 10, 100, 300)
    rows: list[Row] = []
    trained: list[tuple[str, Trained]] = []
    for decay in (0.0, 0.1):
        for epochs in lengths:
            recipe = replace(base, epochs=epochs, weight_decay=decay)
            keep = None if quick else folder / f"diagonal-{epochs}-epochs-{decay:g}.pt"
            trained.append((f"{epochs} epochs, weight decay {decay}", train(recipe, keep=keep)))
            tick(f"{epochs} epochs")
    with threadpool_limits(limits=1, user_api="blas"):
        rows += _diagonal(trained) + _seeds(trained) + _minima(trained[-1], seed, quick)
        tick("trained networks")
        members = battery(quick=quick, seed=1 + seed, folder=folder, tick=tick)
        rows += pairing_rows(members)
        rows += moves_rows([m for m in members if m.recipe.blocks < 20], seed, 1 if quick else 2)
        tick("moves")
        seconds = 10 if quick else 20
        rows += solving_rows("networks of the battery", members, seconds, tick)
        pool = squares(quick=quick, seed=1 + seed, folder=folder, tick=tick)
        rows += solving_rows("16 blocks of 24/24, roles not told by shape, 5 epochs," if not quick else "square", pool,
                             seconds, tick)  # fmt: skip
        rows += _cost((12, 24, 48) if quick else (12, 24, 48, 96, 192), tick)
    more, figures, captions = appendix_a(quick=quick, seed=seed, folder=folder, tick=tick)
    title = "I Dropped a Neural Net: appendix A and open questions on networks trained here"
    return Reproduction("dropped-net-study", title, tuple(rows + more), tuple(figures), captions=captions)


def _diagonal(trained: list[tuple[str, Trained]]) -> list[Row]:
    rows = []
    for name, network in trained:
        parts, _ = in_order(network)
        trace = np.trace(parts.w_out @ parts.w_in, axis1=1, axis2=2)
        note = f"{(trace < 0).mean():.0%} of the blocks negative; training MSE {network.loss:.2g}"
        rows.append(Row(f"trace of W_out W_in, mean: {name}", "negative", float(trace.mean()), note))
    return rows


def _seeds(trained: list[tuple[str, Trained]]) -> list[Row]:
    """Quality of a seed is the number of pairs in the wrong order: it, not the MSE, decides the swaps needed."""
    rows = []
    found = puzzle()
    chain = found.seeded(Seed.FROBENIUS)
    solved, _ = swap_repair(found.parts, *chain, found.x[:1000], found.y[:1000])
    place = {int(i): k for k, i in enumerate(chain[0][solved])}
    for which in SEEDS:
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
        parts, order = in_order(network)
        counts = [
            f"{which} {_inversions(named_order(parts, order, order, network.x[:500], which))}"
            for which in SEEDS
        ]
        rows.append(Row(f"pairs in the wrong order of {_pairs(len(order))}: {name}", None, ", ".join(counts)))
    return rows


def _minima(named: tuple[str, Trained], seed: int, quick: bool) -> list[Row]:
    """Repair from random orders of true pairs: how often it ends short of the truth."""
    name, network = named
    parts, order = in_order(network)
    x, y = network.x[:500], network.pred[:500]
    floor = EXACT * float(y.var())
    starts = 5 if quick else 20
    ends = {"adjacent swaps": 0, "regression": 0}
    for number in range(starts):
        shuffle = stream(seed, "minima", number).permutation(len(order))
        swapped, _ = swap_repair(parts, shuffle, shuffle, x, y)
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
        exact.append(bool(found.exact))
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
    parts = stack(assign_roles_by_shape(as_pieces([*layers[:-1:2], *layers[1:-1:2], layers[-1]])), "relu")
    x = rng.standard_normal((rows, width)).astype(np.float32)
    order = np.arange(blocks)
    y = parts.output(order, order, x)
    return [layers[int(k)] for k in rng.permutation(len(layers))], x, y


def _inversions(order: Ints) -> int:
    return int(sum((order[k] > order[k + 1 :]).sum() for k in range(len(order))))


def _pairs(n: int) -> int:
    return n * (n - 1) // 2
