"""Orders by comparisons and moves: Bradley-Terry (dropped-neural-net, 4.3), swap repair (4.4), and insertions.

For every two blocks of a seed order their places are exchanged and the change of the error noted; the
changes become soft wins, and strengths fitted to them by Hunter's MM algorithm order the blocks. A
forward pass per comparison: a means of the paper, not of the fast solver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strati.core.results import Tick, silent
from strati.reassembly.residual.network import run
from strati.reassembly.residual.order import Round

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.residual.network import Floats, Ints, Pass, ResidualWeights

    Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Strengths:
    """Fitted strengths, the iterations it took, and whether the tolerance was reached."""

    strengths: Matrix
    iterations: int
    converged: bool


def gaps(
    parts: ResidualWeights, ins: Ints, outs: Ints, x: Floats, y: Floats, *, tick: Tick = silent
) -> Matrix:
    """``g[a, b]``: by how much the error grows when the blocks at places ``a < b`` change places.

    Positive: ``a`` should precede ``b``. Antisymmetric, ``g[b, a] = -g[a, b]`` (paper, equation 7).
    """
    n = len(ins)
    base = parts.mse(ins, outs, x, y)
    found = np.zeros((n, n))
    for a in range(n):
        for b in range(a + 1, n):
            order = np.arange(n)
            order[[a, b]] = b, a
            found[a, b] = parts.mse(ins[order], outs[order], x, y) - base
            found[b, a] = -found[a, b]
        tick(f"block {a + 1}")
    return found


def soft_wins(gap: Matrix, temperature: float) -> Matrix:
    """``1 / (1 + exp(-g / T))``, the probability that the row precedes the column (equation 8)."""
    wins = 0.5 * (1 + np.tanh(0.5 * gap / temperature))
    np.fill_diagonal(wins, 0)
    return np.asarray(wins)


def bradley_terry(wins: Matrix, *, tolerance: float = 1e-8, limit: int = 10_000) -> Strengths:
    """Maximum-likelihood strengths by Hunter's MM algorithm (2004), normalised to sum 1.

    ``s_i <- sum_j w_ij / sum_j (w_ij + w_ji) / (s_i + s_j)``, until no strength moves by more than
    ``tolerance``.

    Examples:
        >>> fit = bradley_terry(np.array([[0, 0.8], [0.2, 0]]))
        >>> [round(float(s), 6) for s in fit.strengths]
        [0.8, 0.2]
    """
    n = len(wins)
    total = wins + wins.T
    won = wins.sum(axis=1)
    s = np.full(n, 1 / n)
    for iteration in range(1, limit + 1):
        share = total / (s[:, None] + s[None, :])
        np.fill_diagonal(share, 0)
        new = won / np.maximum(share.sum(axis=1), np.finfo(np.float64).tiny)
        new /= new.sum()
        moved = float(np.abs(new - s).max())
        s = new
        if moved < tolerance:
            return Strengths(s, iteration, True)
    return Strengths(s, limit, False)


def cycles(gap: Matrix) -> list[tuple[int, int, int]]:
    """The unordered triples that go round: ``a`` before ``b`` before ``c`` before ``a``, or the other way.

    Each is one 3-cycle; as directed triples it counts three times.
    """
    n = len(gap)
    ahead = gap > 0
    found = []
    for a in range(n):
        for b in range(a + 1, n):
            for c in range(b + 1, n):
                round_one = ahead[a, b] and ahead[b, c] and ahead[c, a]
                if round_one or (ahead[b, a] and ahead[c, b] and ahead[a, c]):
                    found.append((a, b, c))
    return found


def swap_repair(
    parts: ResidualWeights, ins: Ints, outs: Ints, x: Floats, y: Floats, *, limit: int = 200
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


def insert(
    parts: ResidualWeights, ins: Ints, outs: Ints, x: Floats, y: Floats, *, tries: int = 12
) -> tuple[Ints, float, tuple[tuple[int, int, float], ...]]:
    """Move single blocks to other places while the true error falls.

    Moving a block past others exchanges it with each of them, so its effect on the output is, to second order, the
    sum of the effects ``<J_a^T g, r_b> - <J_b^T g, r_a>`` of those pairs (:mod:`strati.reassembly.residual.order`): one
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
