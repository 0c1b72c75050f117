"""Improving an order by exchanging neighbours.

:func:`bubble` is the paper's repair: every neighbouring pair is tried with a full forward pass. :func:`sweep`
does the same walk with the adjoint of one backward pass: the exchange of two neighbours is computed
exactly where it happens and carried to the output linearly, so a whole sweep costs about as much as
four forward passes, whatever the number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.parts import run

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


def sweep(parts: Parts, ins: Ints, outs: Ints, x: Floats, y: Floats) -> tuple[Ints, int, float]:
    """One walk from first to last block, exchanging neighbours where the predicted error falls.

    With ``z`` the stream before blocks ``a, b``, the exchange changes the stream after them by
    ``D = r_b(z) + r_a(z + r_b(z)) - r_a(z) - r_b(z + r_a(z))``, and the output by ``<adjoint, D>`` to first
    order. ``z`` follows the exchanges already made; the adjoint is that of the order at the start.

    Returns:
        Positions of the given blocks in the new order, the number of exchanges, and the error before them.
    """
    passed = run(parts, ins, outs, x)
    error = passed.output - y
    before = float(np.mean(np.square(error, dtype=np.float64)))
    order = list(range(len(ins)))
    swaps, z = 0, x
    ra = parts.residual(ins[order[0]], outs[order[0]], z)
    for k in range(len(order) - 1):
        a, b = order[k], order[k + 1]
        za = z + ra
        rba = parts.residual(ins[b], outs[b], za)
        rb = parts.residual(ins[b], outs[b], z)
        zb = z + rb
        rab = parts.residual(ins[a], outs[a], zb)
        change = rb + rab
        change -= ra
        change -= rba
        effect = np.einsum("oxd,xd->xo", passed.adjoint[k + 2], change)
        # sum((e + v)^2) < sum(e^2)
        if float(np.vdot(effect, effect) + 2 * np.vdot(error, effect)) < 0:
            order[k], order[k + 1] = b, a
            error = error + effect
            z, ra = zb, rab
            swaps += 1
        else:
            z, ra = za, rba
    return np.array(order), swaps, before
