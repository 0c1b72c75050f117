"""Linear assignment, and perfect matching within one set.

:func:`assign` is the Hungarian problem, solved by shortest augmenting paths in numpy; it returns what
``scipy.optimize.linear_sum_assignment`` returns (tests compare them) but does not need half a second to
import, which is more than the rest of a reassembly takes. :func:`sinkhorn` is the same question softly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.intp]
    Matrix = NDArray[np.float64]


def assign(score: NDArray[Any]) -> Ints:
    """The column of each row in the assignment of greatest total score (square matrix, finite).

    Jonker and Volgenant's shortest augmenting path: each row is added in turn along the cheapest path of
    reduced costs, O(n^3) in all.

    Examples:
        >>> assign(np.array([[3.0, 4.0], [0.0, 2.0]])).tolist()
        [0, 1]
    """
    cost = -np.asarray(score, dtype=np.float64)
    n = len(cost)
    column_price = cost.min(axis=0) if n else np.zeros(0)
    row_of = np.full(n, -1, dtype=np.intp)  # by column
    column_of = np.full(n, -1, dtype=np.intp)  # by row
    row_price = np.zeros(n)
    for row in range(n):
        reduced = cost[row] - column_price
        row_price[row] = reduced.min()
        best = int(reduced.argmin())
        if row_of[best] < 0:  # a free column at the least reduced cost needs no path
            row_of[best], column_of[row] = row, best
    for left in np.flatnonzero(column_of < 0):
        _augment(cost, int(left), row_price, column_price, row_of, column_of)
    return column_of


def _augment(
    cost: NDArray[np.float64],
    start: int,
    row_price: NDArray[np.float64],
    column_price: NDArray[np.float64],
    row_of: Ints,
    column_of: Ints,
) -> None:
    n = len(cost)
    distance = np.full(n, np.inf)
    previous = np.full(n, -1, dtype=np.intp)
    done = np.zeros(n, dtype=bool)
    row, reached, end = start, 0.0, -1
    while end < 0:
        path = reached + cost[row] - row_price[row] - column_price
        shorter = ~done & (path < distance)
        distance[shorter] = path[shorter]
        previous[shorter] = row
        open_ = np.where(done, np.inf, distance)
        column = int(open_.argmin())
        reached = float(open_[column])
        done[column] = True
        if row_of[column] < 0:
            end = column
        else:
            row = int(row_of[column])
    inside = done & (distance < reached)
    row_price[row_of[inside]] += reached - distance[inside]
    column_price[inside] -= reached - distance[inside]
    row_price[start] += reached
    while True:
        row = int(previous[end])
        row_of[end] = row
        column_of[row], end = end, int(column_of[row])
        if row == start:
            return


def match(score: NDArray[Any]) -> tuple[Ints, Ints]:
    """Split one pool of ``2n`` into ``n`` ordered couples (first, second) of great total score.

    ``score[i, j]`` is for ``i`` as first and ``j`` as second; the diagonal is not used. Greedy by score, then
    couples exchange members while the total grows: exact where scores are separated, near otherwise.

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


def _exchange(both: NDArray[np.float64], partner: Ints) -> bool:
    """The best exchange of partners between two couples, if one is better than none."""
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
    couples = ((a, c), (b, d)) if straight[k, m] >= crossed[k, m] else ((a, d), (b, c))
    for i, j in couples:
        partner[i], partner[j] = j, i
    return True


def sinkhorn(weights: Matrix, shared: bool, rounds: int) -> Matrix:
    """Positive weights rescaled in turn until every piece is used once (Sinkhorn and Knopp).

    Args:
        weights: Rows x columns.
        shared: Rows and columns are one pool, of which nothing is paired with itself.
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
    """:func:`sinkhorn` of two pools by a scale for each row and column: faster, for weights above 1e-100.

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
