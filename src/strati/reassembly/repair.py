"""Improving an order by exchanging neighbours, or by taking a block out and putting it elsewhere.

:func:`bubble` is the paper's repair: every neighbouring pair is tried with a full forward pass. :func:`sweep`
does the same walk with the adjoint of one backward pass: the exchange of two neighbours is computed
exactly where it happens and carried to the output linearly, so a whole sweep costs about as much as
four forward passes, whatever the number of blocks. :func:`insert` is for orders where neighbours are all in
order and a block is far from its place: one pass ranks every way to move one block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.passes import run

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.passes import Floats, Ints, Parts, Pass


@dataclass(frozen=True)
class Round:
    """One round of repair: how many exchanges, and the error after it."""

    round: int
    swaps: int
    mse: float


def bubble(
    parts: Parts, ins: Ints, outs: Ints, x: Floats, y: Floats, *, limit: int = 200
) -> tuple[Ints, tuple[Round, ...]]:
    """Exchange neighbours while the mean squared error falls (paper, section 4.4).

    Sweeps over all neighbouring pairs, keeping each exchange that lowers the error, until a sweep keeps none.

    Returns:
        Positions of the given blocks in the new order, and one record per sweep that kept an exchange.
    """
    order = np.arange(len(ins))
    best = parts.mse(ins, outs, x, y)
    rounds: list[Round] = []
    while len(rounds) < limit:
        swaps = 0
        for k in range(len(order) - 1):
            order[[k, k + 1]] = order[[k + 1, k]]
            mse = parts.mse(ins[order], outs[order], x, y)
            if mse < best:
                best = mse
                swaps += 1
            else:
                order[[k, k + 1]] = order[[k + 1, k]]
        if swaps == 0:
            break
        rounds.append(Round(len(rounds) + 1, swaps, best))
    return order, tuple(rounds)


@dataclass(frozen=True)
class Swept:
    """What a sweep did: the new order, the error before it, and each exchange with the error predicted after it."""

    order: Ints
    before: float
    moves: tuple[tuple[int, float], ...]


def sweep(
    parts: Parts, ins: Ints, outs: Ints, x: Floats, y: Floats, *, caution: float = 0.5, floor: float = 0.0
) -> Swept:
    """One walk from first to last block, exchanging neighbours where the predicted error falls.

    With ``z`` the stream before blocks ``a, b``, the exchange changes the stream after them by
    ``D = r_b(z) + r_a(z + r_b(z)) - r_a(z) - r_b(z + r_a(z))``, and the output by ``<adjoint, D>`` to first
    order. ``z`` follows the exchanges already made; the adjoint is that of the order at the start.

    Args:
        parts: The weights.
        ins: Input projections in the present order.
        outs: Output projections.
        x: Inputs; a few hundred rows are enough.
        y: Outputs to reach.
        caution: An exchange must gain so many standard errors over these rows; without it, few rows make
            exchanges that other rows take back.
        floor: Below this error nothing is exchanged.

    Returns:
        Positions of the given blocks in the new order, the error before, and the exchanges (the first of the two
        places, the error predicted after it).
    """
    streams, pre = _forward(parts, ins, outs, x)
    error = parts.L @ parts.leave(streams[-1], 0) + parts.l[:, None] - y.T
    before = float(np.mean(np.square(error, dtype=np.float64)))
    order = list(range(len(ins)))
    if before < floor:
        return Swept(np.array(order), before, ())
    adjoint = _backward(parts, ins, outs, streams, pre)
    moves: list[tuple[int, float]] = []
    z = streams[0]
    ra = streams[1] - streams[0] if len(order) > 1 else z
    for k in range(len(order) - 1):
        a, b = order[k], order[k + 1]
        za = z + ra if moves else streams[k + 1]
        rba = _residual(parts, ins[b], outs[b], za) if moves else streams[k + 2] - za
        rb = _residual(parts, ins[b], outs[b], z)
        zb = z + rb
        rab = _residual(parts, ins[a], outs[a], zb)
        change = rb + rab
        change -= ra
        change -= rba
        effect = (adjoint[k + 2] * change).sum(axis=1)
        gain, error_of_gain = _gain(error, effect)
        if gain > caution * error_of_gain:
            order[k], order[k + 1] = b, a
            error += effect
            z, ra = zb, rab
            moves.append((k, float(np.vdot(error, error)) / error.size))
        else:
            z, ra = za, rba
    return Swept(np.array(order), before, tuple(moves))


def insert(
    parts: Parts, ins: Ints, outs: Ints, x: Floats, y: Floats, *, tries: int = 12
) -> tuple[Ints, float, tuple[tuple[int, int, float], ...]]:
    """Take blocks out and put them elsewhere, while the true error falls.

    Moving a block past others exchanges it with each of them, so its effect on the output is, to second order, the
    sum of the effects ``<J_a^T g, r_b> - <J_b^T g, r_a>`` of those pairs (:mod:`strati.reassembly.regression`): one
    forward and one backward pass predict all ``n (n - 1)`` moves. The best are tried in turn with a forward pass each.

    Returns:
        Positions of the given blocks in the new order, its error on these rows, and the moves made: from where, to
        where, and the error after it.
    """
    n = len(ins)
    order = np.arange(n)
    passed = run(parts, ins, outs, x)
    error = passed.output - y
    best = float(np.mean(np.square(error, dtype=np.float64)))
    moves: list[tuple[int, int, float]] = []
    gains = _insertion_gains(passed, error)
    for flat in np.argsort(-gains, axis=None, kind="stable")[:tries]:
        block, place = divmod(int(flat), n)
        if gains[block, place] <= 0:
            break
        start = int(np.flatnonzero(order == block)[0])
        moved = np.insert(np.delete(order, start), place, block)
        mse = parts.mse(ins[moved], outs[moved], x, y)
        if mse < best:
            order, best = moved, mse
            moves.append((start, place, mse))
    return order, best, tuple(moves)


def insertion_rows(blocks: int) -> int:
    """So many rows that the effects of all pairs on them stay within some tens of megabytes."""
    return max(64, min(400, 8_000_000 // blocks**2))


def _insertion_gains(passed: Pass, error: Floats) -> NDArray[np.float64]:
    """By how much the mean squared error is predicted to fall when block ``a`` is put at place ``b``."""
    residuals = np.stack(passed.residuals, axis=1)  # rows, blocks, width
    adjoint = np.stack(passed.adjoint, axis=2)  # outputs, rows, places, width
    steps = adjoint[:, :, :-1] - adjoint[:, :, 1:]
    rows, n, _ = residuals.shape
    total = np.zeros((n, n))
    for q in range(len(steps)):
        effect = steps[q] @ residuals.transpose(0, 2, 1)  # rows, a, b
        effect -= effect.transpose(0, 2, 1).copy()
        # to the right, a meets a + 1, ..., b; to the left it meets a - 1, ..., b, each pair the other way round
        right = np.cumsum(np.triu(effect, 1), axis=2)
        left = np.cumsum(np.tril(effect, -1)[:, :, ::-1], axis=2)[:, :, ::-1]
        moved = np.triu(right, 1) - np.tril(left, -1)
        total -= np.einsum("xab,xab->ab", moved, moved) + 2 * np.einsum("x,xab->ab", error[:, q], moved)
    return np.asarray(total / (rows * len(steps)))


# The walk works on columns (width x rows): matrix products of a few hundred columns run half again as fast.


def _residual(parts: Parts, i: int, j: int, z: Floats) -> Floats:
    u = parts.A[i] @ parts.enter(z, 0)
    u += parts.a[i][:, None]
    r: Floats = parts.B[j] @ parts.act.spend(u)
    r += parts.b[j][:, None]
    return r


def _forward(parts: Parts, ins: Ints, outs: Ints, x: Floats) -> tuple[list[Floats], list[Floats]]:
    streams, pre = [np.ascontiguousarray(x.T)], []
    for i, j in zip(ins, outs, strict=True):
        u = parts.A[i] @ parts.enter(streams[-1], 0)
        u += parts.a[i][:, None]
        z = parts.B[j] @ parts.act.value(u)
        z += parts.b[j][:, None]
        z += streams[-1]
        pre.append(u)
        streams.append(z)
    return streams, pre


def _backward(parts: Parts, ins: Ints, outs: Ints, streams: list[Floats], pre: list[Floats]) -> list[Floats]:
    """Derivatives of the output by the stream before each block: (outputs, width, rows)."""
    rows = pre[0].shape[1]
    g: Floats = np.ascontiguousarray(np.broadcast_to(parts.L[:, :, None], (*parts.L.shape, rows)))
    g = parts.left_back(streams[-1], g, -2)
    adjoint = [g]
    for k in range(len(pre) - 1, -1, -1):
        inner = parts.B[outs[k]].T @ g
        inner *= parts.act.slope(pre[k])
        g = g + parts.entered_back(streams[k], parts.A[ins[k]].T @ inner, -2)
        adjoint.append(g)
    return adjoint[::-1]


def _gain(error: Floats, effect: Floats) -> tuple[float, float]:
    """By how much the mean squared error would fall, with its standard error over rows."""
    per_row = effect + error
    per_row += error
    per_row *= effect
    gains = per_row[0] if len(per_row) == 1 else per_row.sum(axis=0)
    count = len(gains)
    mean = float(gains.sum()) / count
    return -mean, math.sqrt(max(float(gains @ gains) / count - mean * mean, 0.0) / count)
