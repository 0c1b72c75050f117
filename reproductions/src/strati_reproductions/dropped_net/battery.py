"""Networks trained here from PyTorch's default weights: which score pairs them, which moves order them. Needs torch.

A part of ``dropped-net-study``. The seeds are not those on which the combined score's prior was formed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strati.core.rng import stream
from strati.reassembly.reassemble import reassemble
from strati.reassembly.residual.pairing import Score, pair
from strati.reassembly.residual.result import Reassembly
from strati.reassembly.residual.solve import EXACT
from strati_reproductions.dropped_net.ranking import insert, swap_repair
from strati_reproductions.dropped_net.trainer import Recipe, Trained, train
from strati_reproductions.dropped_net.training import in_order
from strati_reproductions.registry import Row

if TYPE_CHECKING:
    from strati.core.results import Tick
    from strati.reassembly.residual.network import Floats, Ints, ResidualWeights


@dataclass(frozen=True)
class Member:
    """One network of the battery and how it was made."""

    name: str
    recipe: Recipe
    network: Trained


def battery(*, quick: bool, seed: int, folder: Path, tick: Tick) -> list[Member]:
    """Relu and gelu, with and without weight decay, trained briefly and long, 12 to 24 blocks."""
    members = []
    shapes = (
        ((12, 32, 64), (16, 16, 32)) if quick else ((12, 32, 64), (20, 24, 48), (24, 48, 96), (16, 16, 32))
    )
    for number, (blocks, width, hidden) in enumerate(shapes):
        for activation in ("relu", "gelu"):
            for decay, epochs in ((0.0, 5), (0.1, 5), (0.0, 60), (0.1, 60))[:: 3 if quick else 1]:
                recipe = Recipe(
                    blocks=blocks, width=width, hidden=hidden, rows=2000, activation=activation, epochs=epochs,
                    weight_decay=decay, seed=100 * seed + number,
                )  # fmt: skip
                name = f"{blocks} blocks of {width}/{hidden}, {activation}, {epochs} epochs, weight decay {decay:g}"
                keep = (
                    None
                    if quick
                    else folder / f"{name.replace(', ', '-').replace(' ', '-').replace('/', '-')}.pt"
                )
                members.append(Member(name, recipe, train(recipe, keep=keep)))
                tick(name)
    return members


def squares(*, quick: bool, seed: int, folder: Path, tick: Tick) -> list[Member]:
    """Briefly trained networks whose hidden width is the block width, so that shape does not tell the roles."""
    members = []
    for number in range(1 if quick else 4):
        recipe = Recipe(
            blocks=8 if quick else 16, width=24, hidden=24, rows=3000, epochs=5, seed=200 * seed + number
        )
        keep = None if quick else folder / f"square-{number}.pt"
        members.append(Member(f"square {number}", recipe, train(recipe, keep=keep)))
        tick(f"square {number}")
    return members


def pairing_rows(members: list[Member]) -> list[Row]:
    """Pairs right by each score, network by network and in all."""
    rows, totals, blocks = [], dict.fromkeys(Score, 0), 0
    behind = []
    for member in members:
        parts, order = in_order(member.network, member.recipe.activation)
        right = {score: int((pair(parts, score).outs == order).sum()) for score in Score}
        for score, count in right.items():
            totals[score] += count
        blocks += len(order)
        if right[Score.COMBINED] < max(right.values()):
            behind.append(member.name)
        listed = ", ".join(f"{score} {count}" for score, count in right.items())
        rows.append(Row(f"pairs right of {len(order)}: {member.name}", None, listed))
    listed = ", ".join(f"{score} {count / blocks:.0%}" for score, count in totals.items())
    note = f"combined is behind another score on {len(behind)} of {len(members)} networks"
    return [*rows, Row(f"pairs right of {blocks} in {len(members)} networks", None, listed, note)]


def solving_rows(what: str, members: list[Member], seconds: float, tick: Tick) -> list[Row]:
    """How many of the networks are put back exactly, how many needed the joint search, and the CPU time."""
    exact, searched, short = 0, 0, []
    began = time.process_time()
    for member in members:
        pieces, permutation = member.network.pieces()
        found = reassemble(
            pieces,
            member.network.x,
            member.network.pred,
            activation=member.recipe.activation,
            seconds=seconds,
        )
        assert isinstance(found, Reassembly)
        good = bool(found.exact) and found.permutation == permutation
        exact += good
        searched += found.searched
        if not good:
            short.append(member.name)
        tick(member.name)
    taken = time.process_time() - began
    note = (
        f"{searched} needed the joint search, {taken:.0f} s of CPU in all, new starts for {seconds:g} s each"
    )
    note += f"; not exact: {'; '.join(short)}" if short else ""
    return [Row(f"{what} put back exactly, of {len(members)}", None, exact, note)]


def moves_rows(members: list[Member], seed: int, starts: int) -> list[Row]:
    """True pairs from random orders: exchanges of neighbours alone, and with insertions between them."""
    ends = {"adjacent swaps": 0, "adjacent swaps and insertions": 0}
    tried = 0
    for member in members:
        parts, order = in_order(member.network, member.recipe.activation)
        x, y = member.network.x[:400], member.network.pred[:400]
        floor = EXACT * float(y.var())
        for number in range(starts):
            shuffle = stream(seed, "moves", number).permutation(len(order))
            swapped, _ = swap_repair(parts, shuffle, shuffle, x, y)
            swapped = shuffle[swapped]
            ends["adjacent swaps"] += bool((swapped == order).all())
            ends["adjacent swaps and insertions"] += bool(
                (_inserted(parts, swapped, x, y, floor) == order).all()
            )
            tried += 1
    return [
        Row(f"random orders of true pairs repaired exactly by {how}, of {tried}", None, count)
        for how, count in ends.items()
    ]


def _inserted(parts: ResidualWeights, chain: Ints, x: Floats, y: Floats, floor: float) -> Ints:
    """Insertions and exchanges of neighbours in turn until neither gains."""
    for _ in range(60):
        order, mse, moves = insert(parts, chain, chain, x, y)
        chain = chain[order]
        if mse < floor or not moves:
            break
        swapped, _ = swap_repair(parts, chain, chain, x, y, limit=1)
        chain = np.asarray(chain[swapped])
    return chain
