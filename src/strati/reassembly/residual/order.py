"""The order of paired blocks: seed orders, adjacent swaps, and regression on pairs.

:func:`seed_order` sorts blocks by a number of each. :func:`sweep` tries every adjacent swap with one backward pass: a
swap is computed where it happens and carried to the output by the adjoint. :func:`regress_order` sees all pairs at
once: if block ``a`` comes before block ``b``, exchanging just these two changes the output, to second order in the
residuals, by ``D_ab = <J_a^T g, r_b> - <J_b^T g, r_a>``; which pairs are the wrong way round is a ridge regression of
the error on these effects, and blocks are sorted by the expected number of blocks they precede (Gauss-Newton on
orders). The paper's swap repair and Bradley-Terry ranking are in ``strati_reproductions.dropped_net.ranking``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.residual.network import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strati.reassembly.residual.network import Floats, Ints, Pass, ResidualWeights

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Ridge penalties tried, as shares of the mean squared norm of a column."""


def regress_order(
    parts: ResidualWeights,
    ins: Ints,
    outs: Ints,
    x: Floats,
    y: Floats,
    *,
    steps: int = 20,
    floor: float = 0.0,
    window: int | None = None,
) -> tuple[Ints, float]:
    """Reorder the given blocks by repeated regression while the error falls.

    Args:
        parts: The weights.
        ins: Input projections in the present order.
        outs: Output projections.
        x: Inputs.
        y: Outputs to reach, rows x outputs.
        steps: At most so many regressions.
        floor: Stop when the mean squared error is below this.
        window: Only pairs at most so many places apart may change; for orders that are nearly right.

    Returns:
        Positions of the given blocks in the new order, and its mean squared error.
    """
    order = np.arange(len(ins))
    best = parts.mse(ins, outs, x, y)
    if len(ins) < 2:
        return order, best
    for _ in range(steps):
        passed = run(parts, ins[order], outs[order], x)
        columns, pairs = flip_effects(passed, window)
        step_best, step_order = best, order
        for flips in ridge(columns, (y - passed.output).T.reshape(-1), RIDGES):
            for reach in (1.0, 2.0):  # the ridge shrinks, so a longer step is often better
                candidate = order[sorted_by_flips(reach * flips, pairs, len(order))]
                if np.array_equal(candidate, step_order):
                    continue
                mse = parts.mse(ins[candidate], outs[candidate], x, y)
                if mse < step_best:
                    step_best, step_order = mse, candidate
        if step_best >= 0.999 * best:
            break
        best, order = step_best, step_order
        if best < floor:
            break
    return order, best


def flip_effects(passed: Pass, window: int | None = None) -> tuple[Floats, tuple[Ints, Ints]]:
    """The effect on the output of exchanging pairs of blocks: (outputs * rows, pairs), and the pairs.

    Args:
        passed: A forward and backward pass.
        window: Only pairs at most so many places apart; all of them by default.
    """
    adjoint = np.stack(passed.adjoint)  # positions, outputs, rows, width
    steps = adjoint[:-1] - adjoint[1:]
    residuals = np.stack(passed.residuals)  # positions, rows, width
    n = len(residuals)
    first, second, effects = [], [], []
    for apart in range(1, min(n - 1, window or n) + 1):
        early, late = np.arange(n - apart), np.arange(apart, n)
        effect = np.einsum("aoxd,axd->oxa", steps[early], residuals[late])
        effect -= np.einsum("aoxd,axd->oxa", steps[late], residuals[early])
        effects.append(effect.reshape(-1, len(early)))
        first.append(early)
        second.append(late)
    return np.concatenate(effects, axis=1), (np.concatenate(first), np.concatenate(second))


def sorted_by_flips(flips: NDArray[np.float64], pairs: tuple[Ints, Ints], n: int) -> Ints:
    """Positions sorted by the expected number of blocks each precedes, given how far each pair is flipped.

    Pairs that are not named stay as they are.
    """
    share = np.clip(flips, 0, 1)
    before = np.triu(np.ones((n, n)), 1)
    before[pairs] = 1 - share
    before[pairs[1], pairs[0]] = share
    return np.argsort(-before.sum(axis=1), kind="stable")


def ridge(columns: Floats, target: Floats, penalties: Sequence[float]) -> list[NDArray[np.float64]]:
    """Least squares with each of several ridge penalties, in whichever of its two forms is the smaller.

    A penalty is a share of the mean squared norm of a column.
    """
    rows, count = columns.shape
    mean = float(np.mean(np.square(columns, dtype=np.float64))) * rows
    if not mean > 0 or not np.isfinite(mean):
        return [np.zeros(count) for _ in penalties]
    dual = rows < count
    gram = (columns @ columns.T if dual else columns.T @ columns).astype(np.float64)
    side = target.astype(np.float64) if dual else (columns.T @ target).astype(np.float64)
    solutions: list[NDArray[np.float64]] = []
    for penalty in penalties:
        shifted = gram.copy()
        shifted[np.diag_indices_from(shifted)] += penalty * mean
        solution = np.asarray(np.linalg.solve(shifted, side), dtype=np.float64)
        solutions.append(np.asarray(columns.T @ solution, dtype=np.float64) if dual else solution)
    return solutions


@dataclass(frozen=True)
class Round:
    """One round of repair: how many exchanges, and the error after it."""

    round: int
    swaps: int
    mse: float


@dataclass(frozen=True)
class Swept:
    """What a sweep did: the new order, the error before it, and each exchange with the error predicted after it."""

    order: Ints
    before: float
    moves: tuple[tuple[int, float], ...]


def sweep(
    parts: ResidualWeights,
    ins: Ints,
    outs: Ints,
    x: Floats,
    y: Floats,
    *,
    caution: float = 0.5,
    floor: float = 0.0,
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
    order = list(range(len(ins)))
    before = parts.mse(ins, outs, x, y)
    if before < floor:
        return Swept(np.array(order), before, ())
    passed = run(parts, ins, outs, x)
    streams, adjoint = passed.streams, passed.adjoint
    error = (passed.output - y).T
    moves: list[tuple[int, float]] = []
    z = streams[0]
    ra = streams[1] - streams[0] if len(order) > 1 else z
    for k in range(len(order) - 1):
        a, b = order[k], order[k + 1]
        za = z + ra if moves else streams[k + 1]
        rba = parts.residual(ins[b], outs[b], za) if moves else streams[k + 2] - za
        rb = parts.residual(ins[b], outs[b], z)
        zb = z + rb
        rab = parts.residual(ins[a], outs[a], zb)
        effect = np.einsum("oxd,xd->ox", adjoint[k + 2], rb + rab - ra - rba)
        gain, error_of_gain = _gain(error, effect)
        if gain > caution * error_of_gain:
            order[k], order[k + 1] = b, a
            error = error + effect
            z, ra = zb, rab
            moves.append((k, float(np.mean(np.square(error)))))
        else:
            z, ra = za, rba
    return Swept(np.array(order), before, tuple(moves))


def _gain(error: Floats, effect: Floats) -> tuple[float, float]:
    """By how much the mean squared error would fall, with its standard error over rows."""
    gains = -((effect + 2 * error) * effect).sum(axis=0)
    return float(gains.mean()), float(gains.std()) / math.sqrt(len(gains))


class Seed(StrEnum):
    """The number of each block by which the first order is sorted, ascending."""

    L1 = "l1"
    DELTA_NORM = "delta-norm"
    FROBENIUS = "frobenius"


def seed_order(parts: ResidualWeights, ins: Ints, outs: Ints, x: Floats, seed: Seed) -> Ints:
    """Positions of the blocks ``(ins, outs)`` in a first order.

    ``l1`` and ``frobenius`` are norms of ``W_out``; ``delta-norm`` is the mean norm of a block's residual on the raw
    inputs (paper, section 4.1).
    """
    if seed is Seed.DELTA_NORM:
        residuals = (parts.residual(int(i), int(j), x) for i, j in zip(ins, outs, strict=True))
        values = np.array([np.linalg.norm(r, axis=1).mean() for r in residuals])
    else:
        flat = parts.w_out[outs].reshape(len(outs), -1).astype(np.float64)
        values = np.linalg.norm(flat, ord=1 if seed is Seed.L1 else 2, axis=1)
    return np.argsort(values, kind="stable")
