"""The order of paired blocks as a regression: one forward and one backward pass see every pair at once.

If block ``a`` comes before block ``b``, exchanging just these two changes the output, to second order in the
residuals, by ``D_ab = <J_a^T g, r_b> - <J_b^T g, r_a>``: ``a`` now sees what ``b`` adds, ``b`` no longer what
``a`` adds. ``J_a^T g`` is the step the adjoint takes across block ``a`` and ``r_b`` what ``b`` adds to the stream,
so all ``n (n - 1) / 2`` effects come from one pass. Which pairs are the wrong way round is then a least-squares
problem in the output's error, solved with a ridge; blocks are sorted by the expected number of blocks
they precede. Repeating this is a Gauss-Newton method on orders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.passes import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strati.reassembly.passes import Floats, Ints, Parts, Pass

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Ridge penalties tried, as shares of the mean squared norm of a column."""


def regress_order(
    parts: Parts,
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
