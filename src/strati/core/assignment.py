"""Linear assignment, perfect matching within one set, and Sinkhorn's scaling to doubly stochastic matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.intp]
    Matrix = NDArray[np.float64]


def assign(score: NDArray[Any]) -> Ints:
    """The column of each row in the assignment of greatest total score (square matrix, finite).

    Where the best columns of all rows differ, they are the answer, and scipy, which takes longer to import than the
    rest of a reassembly, is not needed.

    Examples:
        >>> assign(np.array([[3.0, 4.0], [0.0, 2.0]])).tolist()
        [0, 1]
    """
    table = np.asarray(score, dtype=np.float64)
    best: Ints = table.argmax(axis=1) if table.size else np.zeros(0, dtype=np.intp)
    if len(set(best.tolist())) == len(best):
        return best
    from scipy.optimize import linear_sum_assignment

    return np.asarray(linear_sum_assignment(table, maximize=True)[1])


def match(score: NDArray[Any]) -> tuple[Ints, Ints]:
    """Split one set of ``2n`` into ``n`` ordered pairs (first, second) of great total score.

    ``score[i, j]`` is for ``i`` as first and ``j`` as second; the diagonal is not used. Greedy by score, then
    pairs exchange members while the total grows: exact where scores are separated, near otherwise.

    Examples:
        >>> first, second = match(np.array([[0, 9, 1, 1], [0, 0, 1, 1], [1, 1, 0, 2], [1, 1, 8, 0.0]]))
        >>> first.tolist(), second.tolist()
        ([0, 3], [1, 2])
    """
    both = np.maximum(score, np.asarray(score).T).astype(np.float64)
    size = len(both)
    partner = np.full(size, -1, dtype=np.intp)
    for flat in np.argsort(-both, axis=None, kind="stable"):
        i, j = divmod(int(flat), size)
        if i != j and partner[i] < 0 and partner[j] < 0:
            partner[i], partner[j] = j, i
    while _exchange(both, partner):
        pass
    low = np.flatnonzero(np.arange(size) < partner)
    high = partner[low]
    forward = np.asarray(score)[low, high] >= np.asarray(score)[high, low]
    return np.where(forward, low, high), np.where(forward, high, low)


def _exchange(both: Matrix, partner: Ints) -> bool:
    """Make the best exchange of partners between two pairs, if one raises the total."""
    first = np.flatnonzero(np.arange(len(partner)) < partner)
    second = partner[first]
    held = both[first, second]
    now = held[:, None] + held[None, :]
    straight = both[np.ix_(first, first)] + both[np.ix_(second, second)] - now
    crossed = both[np.ix_(first, second)] + both[np.ix_(second, first)] - now
    gain = np.maximum(straight, crossed)
    np.fill_diagonal(gain, -np.inf)
    if gain.size == 0 or gain.max() <= 1e-12 * max(1.0, float(np.abs(held).max())):
        return False
    k, m = divmod(int(gain.argmax()), len(first))
    a, b, c, d = first[k], second[k], first[m], second[m]
    for i, j in ((a, c), (b, d)) if straight[k, m] >= crossed[k, m] else ((a, d), (b, c)):
        partner[i], partner[j] = j, i
    return True


def sinkhorn(weights: Matrix, shared: bool, rounds: int) -> Matrix:
    """Rescale positive weights in turn until every row and column sums to one (Sinkhorn and Knopp).

    Args:
        weights: Rows x columns.
        shared: Rows and columns are one set, of which nothing is paired with itself.
        rounds: How often.

    Examples:
        >>> sinkhorn(np.array([[2.0, 1.0], [1.0, 2.0]]), False, 5).sum(axis=1).round(12).tolist()
        [1.0, 1.0]
    """
    if shared:
        np.fill_diagonal(weights, 0)
    for _ in range(rounds):
        if shared:
            used = np.sqrt(weights.sum(axis=1) + weights.sum(axis=0))
            weights = weights / used[:, None] / used[None, :]
        else:
            weights = weights / weights.sum(axis=1, keepdims=True)
            weights = weights / weights.sum(axis=0, keepdims=True)
    return weights


def balanced(weights: Matrix, rounds: int) -> Matrix:
    """:func:`sinkhorn` of two sets by a scale for each row and column: faster, for weights above 1e-100.

    Examples:
        >>> weights = np.array([[2.0, 1.0], [0.5, 2.0]])
        >>> bool(np.allclose(balanced(weights, 9), sinkhorn(weights, False, 9), rtol=1e-14))
        True
    """
    columns = np.ones(weights.shape[1])
    turned = np.ascontiguousarray(weights.T)
    for _ in range(rounds):
        rows = 1 / (weights @ columns)
        columns = 1 / (turned @ rows)
    return np.asarray(rows[:, None] * weights * columns)
