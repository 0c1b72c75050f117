"""Why it works: likeness by distance before, during and after training, by depth and fine-tuning; what is confused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.reassembly.transformer.arrange import path
from strati.reassembly.transformer.blueprint import unit_kinds
from strati.reassembly.transformer.evidence import features, similarities, stacks
from strati.reassembly.transformer.timeline import Similarity
from strati_reproductions.pictures import COLOURS, PAPER, panels, save
from strati_reproductions.registry import Row

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.shuffle import ShuffledCheckpoint

    Matrix = NDArray[np.float64]

CAPTIONS = {
    "likeness-by-distance": "How alike two blocks are, by the blocks between them: after training likeness falls with "
    "distance, which is what puts blocks in order; before training it is the same at every distance.",
    "readable-over-training": "Matrices put back from the weights alone at checkpoints of one training: the order "
    "becomes readable as the network learns.",
}


def likeness_tables(dropped: ShuffledCheckpoint) -> dict[str, Matrix]:
    """Role to the likeness of its pieces on the stream, in true order."""
    pieces = dropped.pieces
    assert pieces is not None  # dropped in memory
    numbers = {
        s.role: [b[s.role] for b in dropped.answer["blocks"]] for s in pieces.blueprint.block if s.matrix
    }
    flat = {role: features(role, stack) for role, stack in stacks(pieces, numbers).items()}
    given = Similarity(unit_kinds(pieces.blueprint), similarities(flat), pieces.blueprint.blocks)
    return {role: given.between[role, role] for role in flat}


def falling(what: str, dropped: ShuffledCheckpoint) -> Row:
    """Mean likeness of two pieces of one role that are one, two and three blocks apart."""
    parts = []
    for role, table in likeness_tables(dropped).items():
        near = [f"{np.diagonal(table, k).mean():+.2f}" for k in range(1, min(4, len(table)))]
        parts.append(f"{role} {' '.join(near)}")
    return Row(f"likeness by distance: {what}", None, "; ".join(parts), "1, 2, 3 blocks apart")


def by_depth(what: str, dropped: ShuffledCheckpoint) -> Row:
    """Likeness of neighbours in the first, middle and last third of a network, all roles together."""
    tables = list(likeness_tables(dropped).values())
    near = np.mean([np.diagonal(table, 1) for table in tables], axis=0)
    thirds = [part.mean() for part in np.array_split(near, 3) if len(part)]
    listed = ", ".join(f"{value:+.2f}" for value in thirds)
    return Row(
        f"likeness of neighbours by depth: {what}",
        None,
        listed,
        "first, middle and last third of the network",
    )


def confused(wrong: Sequence[tuple[str, int]]) -> Row:
    """Which matrices are out of place, and by how many blocks."""
    roles, apart = Counter(role for role, _ in wrong), Counter(distance for _, distance in wrong)
    listed = ", ".join(f"{role} {count}" for role, count in roles.most_common()) or "none"
    note = "blocks off: " + ", ".join(f"{distance}: {count}" for distance, count in sorted(apart.items()))
    return Row(
        "matrices out of place without data, all networks, by role", None, listed, note if wrong else ""
    )


def misplaced(blocks: Sequence[Mapping[str, int]], answer: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Role of each matrix that is not in its place, and how many blocks off it is."""
    place = {(role, number): k for k, block in enumerate(answer["blocks"]) for role, number in block.items()}
    found = []
    for k, block in enumerate(blocks):
        for role, number in block.items():
            true = place.get((role, number))
            if true is not None and true != k:
                found.append((role, abs(true - k)))
    return found


def residual_path() -> Row:
    """Does the path through Gram matrices order the 48 blocks of the public puzzle without data? How far?"""
    from strati.reassembly.residual.order import Seed
    from strati_reproductions.dropped_net.puzzle import puzzle
    from strati_reproductions.dropped_net.ranking import swap_repair

    found = puzzle()
    chain = found.seeded(Seed.FROBENIUS)
    solved, _ = swap_repair(found.parts, *chain, found.x[:1000], found.y[:1000])
    ins, outs = chain[0][solved], chain[1][solved]  # the true order
    A, B = found.parts.w_in[ins].astype(np.float64), found.parts.w_out[outs].astype(np.float64)
    likeness = _alike(A.transpose(0, 2, 1) @ A) + _alike(B @ B.transpose(0, 2, 1))
    order = path(likeness)
    tau = _tau(order)
    near = [float(np.diagonal(likeness, k).mean()) for k in (1, 2, 3, 24)]
    note = "likeness 1, 2, 3 and 24 blocks apart: " + ", ".join(f"{value:+.3f}" for value in near)
    return Row("public puzzle, 48 blocks: |tau| of the path through Grams, no data", None, abs(tau), note)


def _alike(grams: Matrix) -> Matrix:
    """Correlation of Gram matrices without their diagonals and their mean over blocks."""
    off = ~np.eye(grams.shape[1], dtype=bool)
    flat = grams[:, off] - grams[:, off].mean(axis=0)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    return np.asarray(flat @ flat.T)


def _tau(order: NDArray[np.intp]) -> float:
    n = len(order)
    return float(np.mean([np.sign(order[j] - order[i]) for i in range(n) for j in range(i + 1, n)]))


def draw(
    folder: Path, curves: Mapping[str, ShuffledCheckpoint], steps: Sequence[tuple[int, int, int]]
) -> tuple[str, ...]:
    """Two figures: likeness by distance of several networks, and matrices in place over training.

    Args:
        folder: Where they go.
        curves: Name to network.
        steps: Step of training, matrices in place, matrices.
    """
    figure, (axis,) = panels(1, columns=1, title="likeness of two blocks by their distance", size=(7.5, 4.2))
    for colour, (name, dropped) in zip(cycle(COLOURS), curves.items(), strict=False):
        tables = list(likeness_tables(dropped).values())
        count = len(tables[0])
        mean = [float(np.mean([np.diagonal(t, k).mean() for t in tables])) for k in range(1, count)]
        axis.plot(range(1, count), mean, marker="o", markersize=3, label=name, color=colour)
    axis.axhline(0, color=PAPER, lw=0.8, label="_zero")
    axis.set_xlabel("distance in blocks")
    axis.set_ylabel("likeness on the stream, mean over roles")
    axis.legend(frameon=False)
    files = save(figure, folder, "likeness-by-distance")
    if steps:
        title = "what the weights of one training tell"
        figure, (axis,) = panels(1, columns=1, title=title, size=(7.5, 4.2))
        shares = [right / of for _, right, of in steps]
        axis.plot([max(s, 1) for s, _, _ in steps], shares, marker="o", label="matrices", color=COLOURS[0])
        axis.set_xscale("log")
        axis.set_xlabel("training step")
        axis.set_ylabel("share of matrices in place, no data")
        files += save(figure, folder, "readable-over-training")
    return files
