"""Which of two matrices of one shape is which: q or k, gate or up, the embedding or the head.

Roles that share units are found in pairs; what is left is which of the two is the one. Training leaves them unlike:
a query reads where the MLP of its block reads and what its head writes, a key does not; keys of all tokens are
compared, so that a key's directions are fewer; the rows of a gate share a direction, as its activation is not
symmetric, while those of up have no sign; up's rows are as long as down's columns. The sign of each difference, block
by block, and what it is worth, its mean and spread over networks whose roles are known, give the odds
(:mod:`~strati.reassembly.transformer.calibration`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.transformer import stream, units

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Blueprint
    from strati.reassembly.transformer.evidence import Expected

    Floats = NDArray[np.float32]
    Matrix = NDArray[np.float64]

TWINS = (("q", "k"), ("gate", "up"))
"""Roles of one unit that may have one shape."""

_NOISE = 0.15
_SHARE = 0.35
"""Added to the variance of every sign; signs are correlated, so each counts for a part of what it would alone."""

_NOTHING = 1e-6
"""Size of differences that are rounding."""

_COHERENT = 4.0
"""Nats of two blocks whose twins differ in the same way."""


def differences(stacked: Mapping[str, Floats], blueprint: Blueprint) -> dict[str, Matrix]:
    """Sign to its value in every block, for all twins that the network has; positive or negative by network kind.

    Args:
        stacked: Role to matrices, block by block.
        blueprint: The architecture.
    """
    found: dict[str, Matrix] = {}
    flat = {role: stream.features(role, stack) for role, stack in stacked.items()}
    for one, two in TWINS:
        if one not in stacked or two not in stacked:
            continue
        for other in stacked:
            if other not in (one, two) and len(flat[other]) > 1:
                alike = [np.einsum("bx,bx->b", flat[role], flat[other]) for role in (one, two)]
                found[f"{one} over {two}: like {other}"] = np.asarray(alike[0] - alike[1], dtype=np.float64)
    found |= _spectra(stacked, "q", "k")
    found |= _heads(stacked, blueprint)
    found |= _gates(stacked)
    return found


def signs_of(values: Mapping[str, Matrix]) -> dict[str, float]:
    """Each sign over all blocks: between -1 and 1, which it is where all blocks agree."""
    return {name: float(_level(by_block).mean()) for name, by_block in values.items()}


def odds_of(found: Mapping[str, float], known: Mapping[str, Expected], start: str) -> float:
    """Log-odds that two pieces are what they are called, by all signs whose names start so."""
    return float(
        sum(value * _worth(known[name]) for name, value in found.items() if _told(name, known, start))
    )


@dataclass(frozen=True)
class Turned:
    """Blocks whose twins are to be exchanged, and by how many nats each of them, and all at once, is sure."""

    swap: NDArray[np.bool_]
    margins: Matrix
    whole: float


def turned(
    stacked: Mapping[str, Floats], blueprint: Blueprint, known: Mapping[str, Expected], twins: tuple[str, str]
) -> Turned:
    """In which blocks two twins stand the wrong way round.

    The signs of every block, and the likeness of ``G_one - G_two`` of each two blocks: queries are like queries.

    Args:
        stacked: Role to matrices, block by block.
        blueprint: The architecture.
        known: What the signs are worth.
        twins: Two roles.
    """
    start = f"{twins[0]} over {twins[1]}:"
    alone = np.zeros(blueprint.blocks)
    for name, by_block in differences(stacked, blueprint).items():
        if _told(name, known, start):
            alone += _worth(known[name]) * _level(by_block) / len(by_block)
    flat = [_raw(stacked[role]) for role in twins]
    apart = flat[0] - flat[1]
    apart /= np.maximum(np.linalg.norm(apart, axis=1, keepdims=True), 1e-30)
    both = _COHERENT * np.asarray(apart @ apart.T, dtype=np.float64)
    np.fill_diagonal(both, 0)
    leading = np.where(np.linalg.eigh(both)[1][:, -1] >= 0, 1.0, -1.0)
    best, most = np.ones(len(alone)), -np.inf
    for first in (np.ones(len(alone)), leading, -leading, np.where(alone >= 0, 1.0, -1.0)):
        way = _climbed(first, alone, both)
        for one in (way, -way):
            total = float(one @ alone + 0.5 * one @ both @ one)
            if total > most:
                best, most = one, total
    return Turned(best < 0, 2 * best * (alone + both @ best), 2 * float(best @ alone))


def _climbed(way: Matrix, alone: Matrix, both: Matrix) -> Matrix:
    """Single blocks turned while that gains."""
    way = way.copy()
    for _ in range(4 * len(way)):
        cost = way * (alone + both @ way)
        worst = int(np.argmin(cost))
        if cost[worst] >= 0:
            break
        way[worst] *= -1
    return way


def _raw(stack: Floats) -> Floats:
    return stream.flat_grams(np.ascontiguousarray(stack[:, :, stream.directions(stack.shape[2])]))


def _level(by_block: Matrix) -> Matrix:
    """In units of their size over all blocks; no block counts for more than that."""
    size = float(np.sqrt(np.square(by_block).mean()))
    return np.clip(by_block / size, -1.0, 1.0) if size > _NOTHING else np.zeros_like(by_block)


def _told(name: str, known: Mapping[str, Expected], start: str) -> bool:
    return name in known and name.startswith(start)


def _worth(known: Expected) -> float:
    """Nats of a sign that all blocks agree upon."""
    return _SHARE * 2 * known.mean / (known.spread**2 + _NOISE)


def ends_of(first: Matrix, second: Matrix, stacked: Mapping[str, Floats]) -> dict[str, float]:
    """Differences of an embedding and a head (tokens by width), each between -1 and 1, free of the order of blocks."""
    found = {}
    pair = [np.asarray(table[:: max(1, len(table) // 4096)], np.float64) for table in (first, second)]
    sizes = [np.linalg.norm(table, axis=1) + 1e-30 for table in pair]
    shared = [float(np.linalg.norm((t / s[:, None]).mean(axis=0))) for t, s in zip(pair, sizes, strict=True)]
    found["embedding over head: shared direction"] = shared[0] - shared[1]
    logs = [float(np.log(np.sqrt(np.square(s).mean()))) for s in sizes]
    found["embedding over head: size"] = float(np.tanh(logs[0] - logs[1]))
    for role, stack in stacked.items():
        reads = role in stream.READERS
        some = stream.directions(stack.shape[2 if reads else 1])
        sides = stack[:, :, some] if reads else stack[:, some].transpose(0, 2, 1)
        mean = {role: stream.flat_grams(np.ascontiguousarray(sides)).mean(axis=0)[None]}
        alike = [float(stream.ends(mean, table)[role][0]) for table in (first, second)]
        found[f"embedding over head: like {role}"] = alike[0] - alike[1]
    return found


def _spectra(stacked: Mapping[str, Floats], one: str, two: str) -> dict[str, Matrix]:
    """Stable rank and entropy of the spectra; only of matrices of one shape."""
    if not {one, two} <= set(stacked) or stacked[one].shape != stacked[two].shape:
        return {}
    ranks, spreads = [], []
    for role in (one, two):
        side = stacked[role]
        turned = side.transpose(0, 2, 1)
        gram = turned @ side if side.shape[1] >= side.shape[2] else side @ turned
        values = np.maximum(np.linalg.eigvalsh(gram.astype(np.float64)), 1e-30)
        share = values / values.sum(axis=1, keepdims=True)
        ranks.append(-np.log(share.max(axis=1)))
        spreads.append(-(share * np.log(share)).sum(axis=1))
    return {
        f"{one} over {two}: stable rank": ranks[0] - ranks[1],
        f"{one} over {two}: entropy": spreads[0] - spreads[1],
    }


def _heads(stacked: Mapping[str, Floats], blueprint: Blueprint) -> dict[str, Matrix]:
    """How much more the heads of q than those of k fit the heads of v and of out."""
    tables = units.head_signals(stacked, heads=blueprint.heads, groups=blueprint.groups)
    return {
        f"q over k: heads {other}": np.diagonal(tables[f"q-{other}"]) - np.diagonal(tables[f"k-{other}"])
        for other in ("v", "out")
        if f"q-{other}" in tables
    }


def _gates(stacked: Mapping[str, Floats]) -> dict[str, Matrix]:
    """Directions that rows share, sizes of rows, and how they go with down's columns."""
    if not {"gate", "up", "down"} <= set(stacked):
        return {}
    rows = {
        role: units.aligned(stacked[role], role, 1, 1).astype(np.float64) for role in ("gate", "up", "down")
    }
    size = {role: np.maximum(np.linalg.norm(side, axis=2), 1e-30) for role, side in rows.items()}
    unit = {role: side / size[role][:, :, None] for role, side in rows.items()}
    logs = {role: units.levelled(np.log(one)) for role, one in size.items()}
    level = {role: log - log.mean(axis=0) if len(log) > 2 else log for role, log in logs.items()}
    shared = {role: np.log(np.linalg.norm(side.mean(axis=1), axis=1)) for role, side in unit.items()}
    bound = {
        role: np.abs(np.diagonal(units.correlation(level[role], level["down"]))) for role in ("gate", "up")
    }
    along = {
        role: np.log(np.square(np.einsum("bux,bux->bu", unit[role], unit["down"])).mean(axis=1))
        for role in ("gate", "up")
    }
    return {
        "gate over up: shared direction": shared["gate"] - shared["up"],
        "gate over up: spread of sizes": logs["gate"].std(axis=1) - logs["up"].std(axis=1),
        "gate over up: sizes with down": bound["gate"] - bound["up"],
        "gate over up: along down": along["gate"] - along["up"],
    }
