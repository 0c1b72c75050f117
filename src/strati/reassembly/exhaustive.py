"""Few blocks: every arrangement of their pieces, tried in full.

Searches that follow gradients may end in a minimum that is none of the right order, and the fewer the blocks, the
less there is to average over. With few blocks all arrangements can be tried: each shares the blocks before with
its neighbours, so that a whole tree of them costs little more than its leaves.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from strati.reassembly.passes import Floats, Ints, Parts

MOST, MOST_ORDERS = 50_000, 5_040
"""Up to so many arrangements of pieces are tried (five blocks; four whose shapes do not tell inputs from outputs), and
so many orders of blocks (seven), which a wrong pair makes worthless."""
_FINAL = 16  # of the best on some rows are judged on all


def how_many(parts: Parts, *, paired: bool) -> int:
    """Number of arrangements: of whole blocks if the pieces are paired, of single pieces otherwise.

    Examples:
        >>> from strati.reassembly.activations import activation
        >>> from strati.reassembly.passes import Parts
        >>> A = np.ones((4, 3, 2), dtype=np.float32)
        >>> four = Parts(A, A[:, :, 0], A.transpose(0, 2, 1), A[:, 0], A[0, :1], A[0, 0, :1], activation("relu"), 4)
        >>> how_many(four, paired=True), how_many(four, paired=False)
        (24, 576)
    """
    if paired:
        return math.factorial(parts.blocks)
    return math.factorial(2 * parts.blocks) if parts.shared else math.factorial(parts.blocks) ** 2


def try_every(
    parts: Parts, x: Floats, y: Floats, *, pairs: tuple[Ints, Ints] | None = None, rows: int = 96
) -> tuple[Ints, Ints, float]:
    """The arrangement of least mean squared error, and that error.

    Args:
        parts: The pieces.
        x: Inputs.
        y: Outputs.
        pairs: Which pieces form a block, if that is known: then only their order is open.
        rows: Of the data, taken evenly, on which all arrangements are tried; the best are judged on all.
    """
    step = max(1, len(x) // rows)
    some, wanted = np.ascontiguousarray(x[::step]), y[::step]
    best: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = []
    with np.errstate(over="ignore", invalid="ignore"):
        for stream, ins, outs in _chains(parts, some, (), (), pairs):
            error = parts.leave(stream) @ parts.L.T + parts.l - wanted
            mse = float(np.mean(np.square(error, dtype=np.float64)))
            entry = (-mse if math.isfinite(mse) else -math.inf, ins, outs)
            if len(best) < _FINAL:
                heapq.heappush(best, entry)
            elif entry > best[0]:
                heapq.heapreplace(best, entry)
    judged = [(parts.mse(np.array(i), np.array(o), x, y), i, o) for _, i, o in sorted(best, reverse=True)]
    mse, ins, outs = min(judged)
    return np.array(ins), np.array(outs), mse


def _chains(
    parts: Parts,
    stream: Floats,
    ins: tuple[int, ...],
    outs: tuple[int, ...],
    pairs: tuple[Ints, Ints] | None,
) -> Iterator[tuple[Floats, tuple[int, ...], tuple[int, ...]]]:
    """Every way to go on from some blocks: the stream after the last, and the pieces in order."""
    if len(ins) == parts.blocks:
        yield stream, ins, outs
        return
    partner = None if pairs is None else dict(zip(pairs[0].tolist(), pairs[1].tolist(), strict=True))
    for i in range(len(parts.A)) if partner is None else partner:
        if i in ins or (parts.shared and i in outs):
            continue
        hidden = parts.act.value(parts.enter(stream) @ parts.A[i].T + parts.a[i])
        for j in range(len(parts.B)) if partner is None else (partner[i],):
            if j in outs or (parts.shared and (j == i or j in ins)):
                continue
            after = stream + hidden @ parts.B[j].T + parts.b[j]
            yield from _chains(parts, after, (*ins, i), (*outs, j), pairs)
