r"""Matrices that share hidden units: q with k, v with out, gate with up with down.

Row ``u`` of one and row (or column) ``u`` of the other belong to one unit of the block, and training leaves traces
of that, unit by unit: their directions on the stream are not independent (the mean squared cosine, which no
change of sign,
scale or order of the units alters), their norms follow each other, and so do the angles between units. The signals are
standardised and joined by :mod:`~strati.reassembly.transformer.evidence`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Matrix = NDArray[np.float64]

PAIRS = (("q", "k"), ("v", "out"), ("gate", "up"), ("up", "down"), ("gate", "down"))
"""Roles that share hidden units."""

SIGNALS = ("cosine", "squared-cosine", "norms", "angles")

_EVEN = 1e-3
"""Spread of the logarithms of sizes below which these are all one."""

_UNITS = 256
"""So many units at most for the angles between them."""


def signals(
    stacks: Mapping[str, Floats], a: str, b: str, *, heads: int, groups: int, rotary: bool
) -> dict[str, Matrix]:
    """Scores of every piece of role ``a`` with every piece of role ``b``, by signal (one more: :func:`head_signals`).

    Args:
        stacks: Role to pieces, outputs by inputs: (pieces, rows, columns).
        a: A role of :data:`PAIRS`.
        b: The other.
        heads: Attention heads.
        groups: Key-value heads.
        rotary: Rows of q and k may be turned within frequency pairs: compare these, not single rows.
    """
    first, second = aligned(stacks[a], a, heads, groups), aligned(stacks[b], b, heads, groups)
    paired = rotary and a == "q" and second.shape[1] // heads % 2 == 0
    sizes = [_sizes(side, heads if paired else 0) for side in (first, second)]
    unit = [side / size[:, :, None] for side, size in zip((first, second), sizes, strict=True)]
    cosine, squared = _cosines(unit[0], unit[1], heads if paired else 0)
    logs = [levelled(np.log(size.astype(np.float64))) for size in sizes]
    return {
        "cosine": cosine,
        "squared-cosine": squared,
        "norms": correlation(*(log - log.mean(axis=0) if len(log) > 2 else log for log in logs)),
        "angles": correlation(*(_angles(side) for side in unit)),
    }


def levelled(logs: Matrix) -> Matrix:
    """Logarithms of sizes, or nought where all sizes of a piece are one: rounding is no signal."""
    return np.where(logs.std(axis=-1, keepdims=True) > _EVEN, logs, 0.0)


HEAD_PAIRS = (("q", "k"), ("v", "out"), ("q", "v"), ("k", "v"), ("q", "out"), ("k", "out"))
"""Roles of one attention, which share its heads."""

_DIRECTIONS = 384
"""So many directions of the stream at most where heads are compared."""


def head_signals(stacks: Mapping[str, Floats], *, heads: int, groups: int) -> dict[str, Matrix]:
    """How much more the heads of one piece overlap with the same heads of another than with all of them.

    The share of ``sum_h tr(G_h G'_h)`` in ``tr(G G')``, with ``G_h`` the Gram matrix on the stream of head h's
    rows as unit
    vectors. A head reads with k what it reads with v, and so on: q with k, v and out of one attention fit head by head.
    """
    if heads < 2 or not {"q", "k", "v", "out"} <= set(stacks):
        return {}
    grams = {role: _head_grams(stacks[role], role, heads, groups) for role in ("q", "k", "v", "out")}
    return {f"{a}-{b}": _overlap(grams[a], grams[b]) for a, b in HEAD_PAIRS}


def shared_heads(stacks: Mapping[str, Floats], a: str, b: str, *, heads: int, groups: int) -> Matrix:
    """The same for two roles, of which there may be any number of pieces."""
    if heads < 2:
        return np.zeros((len(stacks[a]), len(stacks[b])))
    return _overlap(*(_head_grams(stacks[role], role, heads, groups) for role in (a, b)))


def _head_grams(stack: Floats, role: str, heads: int, groups: int) -> list[Floats]:
    """For each head the Gram matrices on the stream of its rows as unit vectors, pieces by entries."""
    rows = aligned(stack, role, heads, groups)
    step = np.linspace(0, rows.shape[2] - 1, min(_DIRECTIONS, rows.shape[2])).astype(np.intp)
    rows = rows[:, :, step]
    unit = rows / np.maximum(np.linalg.norm(rows, axis=2, keepdims=True), np.finfo(np.float32).tiny)
    cut = unit.reshape(len(unit), heads, -1, unit.shape[2])
    return [np.matmul(cut[:, h].transpose(0, 2, 1), cut[:, h]).reshape(len(cut), -1) for h in range(heads)]


def _overlap(a: list[Floats], b: list[Floats]) -> Matrix:
    same = sum((np.asarray(x @ y.T, dtype=np.float64) for x, y in zip(a, b, strict=True)))
    whole = np.sum(a, axis=0) @ np.sum(b, axis=0).T
    return np.asarray(same / np.maximum(whole, np.finfo(np.float32).tiny), dtype=np.float64)


def aligned(stack: Floats, role: str, heads: int, groups: int) -> Floats:
    """Pieces as (pieces, units, width): a row per hidden unit, keys and values repeated for each query head."""
    rows = stack.transpose(0, 2, 1) if role in ("out", "down") else stack
    if role in ("k", "v") and heads != groups:
        cut = rows.reshape(len(rows), groups, -1, rows.shape[2])
        rows = np.repeat(cut, heads // groups, axis=1).reshape(len(rows), -1, rows.shape[2])
    return np.ascontiguousarray(rows)


def _sizes(side: Floats, heads: int) -> Floats:
    """Norms of rows, or of frequency pairs (rows half a head apart) given to both rows."""
    size = np.linalg.norm(side, axis=2)
    if heads:
        cut = size.reshape(len(size), heads, 2, -1)
        both = np.sqrt(np.square(cut).mean(axis=2, keepdims=True))
        size = np.broadcast_to(both, cut.shape).reshape(size.shape)
    return np.asarray(np.maximum(size, np.finfo(np.float32).tiny))


def _cosines(a: Floats, b: Floats, heads: int) -> tuple[Matrix, Matrix]:
    """Mean cosine and mean squared cosine over units; over both rows of a frequency pair with both of the other."""
    by_unit = [np.ascontiguousarray(side.transpose(1, 0, 2)) for side in (a, b)]
    every = np.matmul(by_unit[0], by_unit[1].transpose(0, 2, 1)).astype(np.float64)
    cosine, squared = every.mean(axis=0), np.square(every).mean(axis=0)
    if heads:
        units, wide = len(every), len(every) // heads
        partner = np.arange(units).reshape(heads, 2, wide // 2)[:, ::-1].reshape(-1)
        across = np.matmul(by_unit[0], by_unit[1][partner].transpose(0, 2, 1)).astype(np.float64)
        squared = squared + np.square(across).mean(axis=0)
    return cosine, squared


def _angles(unit: Floats) -> Floats:
    some = np.linspace(0, unit.shape[1] - 1, min(_UNITS, unit.shape[1])).astype(np.intp)
    part = unit[:, some]
    upper = np.triu_indices(len(some), 1)
    return np.stack([(side @ side.T)[upper] for side in part])


def correlation(a: NDArray[np.floating], b: NDArray[np.floating]) -> Matrix:
    """Of every row of one with every row of the other."""
    a = a - a.mean(axis=1, keepdims=True)
    b = b - b.mean(axis=1, keepdims=True)
    tiny = np.finfo(np.float32).tiny
    a = a / np.maximum(np.linalg.norm(a, axis=1, keepdims=True), tiny)
    b = b / np.maximum(np.linalg.norm(b, axis=1, keepdims=True), tiny)
    return np.asarray(a @ b.T, dtype=np.float64)
