"""The paper's own ordering: Bradley-Terry ranking (dropped-neural-net, section 4.3) and swap repair (section 4.4).

For every two blocks of a seed order their places are exchanged and the change of the error noted; the
changes become soft wins, and strengths fitted to them by Hunter's MM algorithm order the blocks. A
forward pass per comparison: a means of the paper, not of the fast solver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strati.core.results import Tick, silent
from strati.reassembly.residual.order import Round

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.residual.network import Floats, Ints, ResidualWeights

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
