"""Improving an order by exchanging neighbours.

:func:`bubble` is the paper's repair: every neighbouring pair is tried with a full forward pass. :func:`sweep`
does the same walk with the adjoint of one backward pass: the exchange of two neighbours is computed
exactly where it happens and carried to the output linearly, so a whole sweep costs about as much as
four forward passes, whatever the number of blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from strati.reassembly.parts import Floats, Ints, Parts


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


def sweep(
    parts: Parts, ins: Ints, outs: Ints, x: Floats, y: Floats, *, caution: float = 0.5, floor: float = 0.0
) -> tuple[Ints, int, float]:
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
        Positions of the given blocks in the new order, the number of exchanges, and the error before them.
    """
    streams, pre = _forward(parts, ins, outs, x)
    error = parts.L @ streams[-1] + parts.l[:, None] - y.T
    before = float(np.mean(np.square(error, dtype=np.float64)))
    order = list(range(len(ins)))
    if before < floor:
        return np.array(order), 0, before
    adjoint = _backward(parts, ins, outs, pre)
    swaps, z, moved = 0, streams[0], False
    ra = streams[1] - streams[0] if len(order) > 1 else z
    for k in range(len(order) - 1):
        a, b = order[k], order[k + 1]
        za = z + ra if moved else streams[k + 1]
        rba = _residual(parts, ins[b], outs[b], za) if moved else streams[k + 2] - za
        rb = _residual(parts, ins[b], outs[b], z)
        zb = z + rb
        rab = _residual(parts, ins[a], outs[a], zb)
        change = rb + rab
        change -= ra
        change -= rba
        effect = np.einsum("odx,dx->ox", adjoint[k + 2], change)
        gain, error_of_gain = _gain(error, effect)
        if gain > caution * error_of_gain:
            order[k], order[k + 1] = b, a
            error += effect
            z, ra, moved = zb, rab, True
            swaps += 1
        else:
            z, ra = za, rba
    return np.array(order), swaps, before


# The walk works on columns (width x rows): matrix products of a few hundred columns run half again as fast.


def _residual(parts: Parts, i: int, j: int, z: Floats) -> Floats:
    u = parts.A[i] @ z
    u += parts.a[i][:, None]
    r: Floats = parts.B[j] @ parts.act.value(u)
    r += parts.b[j][:, None]
    return r


def _forward(parts: Parts, ins: Ints, outs: Ints, x: Floats) -> tuple[list[Floats], list[Floats]]:
    streams, pre = [np.ascontiguousarray(x.T)], []
    for i, j in zip(ins, outs, strict=True):
        u = parts.A[i] @ streams[-1]
        u += parts.a[i][:, None]
        z = parts.B[j] @ parts.act.value(u)
        z += parts.b[j][:, None]
        z += streams[-1]
        pre.append(u)
        streams.append(z)
    return streams, pre


def _backward(parts: Parts, ins: Ints, outs: Ints, pre: list[Floats]) -> list[Floats]:
    """Derivatives of the output by the stream before each block: (outputs, width, rows)."""
    rows = pre[0].shape[1]
    g: Floats = np.ascontiguousarray(np.broadcast_to(parts.L[:, :, None], (*parts.L.shape, rows)))
    adjoint = [g]
    for k in range(len(pre) - 1, -1, -1):
        inner = parts.B[outs[k]].T @ g
        inner *= parts.act.slope(pre[k])
        g = g + parts.A[ins[k]].T @ inner
        adjoint.append(g)
    return adjoint[::-1]


def _gain(error: Floats, effect: Floats) -> tuple[float, float]:
    """By how much the mean squared error would fall, with its standard error over rows."""
    per_row = -(effect * (effect + 2 * error)).sum(axis=0)
    return float(per_row.mean()), float(per_row.std()) / math.sqrt(len(per_row))
