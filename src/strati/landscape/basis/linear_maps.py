"""One linear map rewritten with more zeros and the same outputs on the data: columns folded, rows recombined, silenced.

The three steps of ``sparsify``, on one map and its reader. Which maps there are, and what they read, is found there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import scipy.linalg

if TYPE_CHECKING:
    from strati.core.results import BoolArray, FloatArray, IntArray


class LinearMap:
    """One linear map being rewritten, in double precision.

    Args:
        weight: Its matrix, outputs first.
        bias: Its bias, if it has one.
    """

    def __init__(self, weight: FloatArray, bias: FloatArray | None) -> None:
        self.weight, self.bias = weight.copy(), None if bias is None else bias.copy()

    @property
    def size(self) -> int:
        """Number of weights and biases."""
        return self.weight.size + (0 if self.bias is None else self.bias.size)

    def zeros(self) -> int:
        """How many of them are zero."""
        return int((self.weight == 0).sum()) + (0 if self.bias is None else int((self.bias == 0).sum()))

    def before(self, rows: FloatArray) -> FloatArray:
        """Preactivations."""
        return rows @ self.weight.T + (0.0 if self.bias is None else self.bias)

    def pivot(self, seen: DataStatistics, tolerance: float) -> int:
        """Zero the columns of inputs that are combinations of others; how many."""
        live = np.flatnonzero((self.weight != 0).any(axis=0))  # a column that is zero stays so
        keep, coefficients, constant = seen.dependencies(
            tolerance, with_constant=self.bias is not None, columns=live
        )
        gone = np.setdiff1d(live, keep)
        if gone.size == 0:
            return 0
        moved = self.weight[:, gone]
        self.weight[:, keep] += moved @ coefficients
        if self.bias is not None:
            self.bias += moved @ constant
        self.weight[:, gone] = 0.0
        return int(gone.size)

    def recombine(
        self, rows: FloatArray, following: LinearMap, *, linear: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Recombine synchronised blocks where that keeps every gate; sizes written, reported, zeros won.

        Args:
            rows: What the map reads.
            following: The map that reads what comes out of it.
            linear: Nothing but a multiple lies between the two: there are no gates.
        """
        written, reported, won = [], [], 0
        p = self.before(rows)
        for block in _synchronised(p > 0, p, everything=linear):
            gain = self._eliminate(p, block, following, free=linear)
            if gain > 0:
                written.append(int(block.size))
                won += gain
            else:
                reported.append(int(block.size))
        return tuple(written), tuple(reported), won

    def silence(self, unread: BoolArray) -> None:
        """Zero the rows of outputs that nobody reads."""
        self.weight[unread] = 0.0
        if self.bias is not None:
            self.bias[unread] = 0.0

    def _eliminate(self, p: FloatArray, block: IntArray, following: LinearMap, *, free: bool) -> int:
        """Gaussian elimination among the rows of a block, each step only if it keeps all gates on the data.

        ``p_k -> p_k - c p_m`` with ``c = W_kj / W_mj`` zeroes ``W_kj``; the reader's column ``m`` takes on
        ``c`` times column ``k``.
        """
        gate = p[:, block] > 0
        start = self.zeros()
        used: set[int] = set()
        for m in block:
            live = np.flatnonzero(self.weight[m] != 0)
            live = live[~np.isin(live, list(used))]
            if live.size == 0:
                continue
            j = int(live[np.abs(self.weight[m, live]).argmax()])
            used.add(j)
            for place, k in enumerate(block):
                if k == m or self.weight[k, j] == 0:
                    continue
                c = self.weight[k, j] / self.weight[m, j]
                row = self.weight[k] - c * self.weight[m]
                row[j] = 0.0
                row[np.abs(row) <= 1e-14 * np.abs(self.weight[k]).max()] = 0.0
                new = p[:, k] - c * p[:, m]
                slack = 1e-9 * np.abs(p[:, k]).max()
                unchanged = free or bool(np.where(gate[:, place], new >= slack, new <= 0).all())
                if not unchanged or (row == 0).sum() <= (self.weight[k] == 0).sum() or abs(c) > 1e6:
                    continue
                self.weight[k], p[:, k] = row, new
                if self.bias is not None:
                    self.bias[k] -= c * self.bias[m]
                following.weight[:, m] += c * following.weight[:, k]
        return self.zeros() - start


class DataStatistics:
    """What a linear map reads on the data, as a triangular factor that grows with its width and not with the data.

    Examples:
        >>> rows = np.random.default_rng(0).normal(size=(20, 2))
        >>> rows = np.column_stack([rows, 2 * rows[:, 0] + 5])
        >>> keep, coefficients, constant = DataStatistics(rows).dependencies(1e-12, with_constant=True)
        >>> keep.size, float(np.abs(rows[:, 2] - 2 * rows[:, 0] - 5).max()) < 1e-12
        (2, True)
    """

    def __init__(self, rows: FloatArray | None = None) -> None:
        self._factor: FloatArray | None = None
        self.count = 0
        if rows is not None:
            self.add(rows)

    def add(self, rows: FloatArray) -> None:
        """Take in some rows; a first column of ones carries the mean."""
        both = np.column_stack([np.ones(len(rows)), rows])
        stacked = both if self._factor is None else np.vstack([self._factor, both])
        self._factor = np.asarray(np.linalg.qr(stacked, mode="r"))
        self.count += len(rows)

    def dependencies(
        self, tolerance: float, *, with_constant: bool, columns: IntArray | None = None
    ) -> tuple[IntArray, FloatArray, FloatArray]:
        """Independent inputs, and the others written through them.

        Rank-revealing QR (column pivoting); with a bias to fold into, the constant is one of the independent ones.

        Args:
            tolerance: Second moments below this share of the largest count as zero.
            with_constant: There is a bias to fold into.
            columns: Look only at these inputs; all by default.

        Returns:
            Kept columns, ``coefficients`` (others x kept) and ``constant`` (others): the others are
            ``coefficients f + constant``.
        """
        assert self._factor is not None
        candidates = np.arange(self._factor.shape[1] - 1) if columns is None else columns
        mean = (self._factor[0, 1:] / self._factor[0, 0])[candidates]
        factor = (self._factor[1:, 1:] if with_constant else self._factor[:, 1:])[:, candidates] / np.sqrt(
            self.count
        )
        if not with_constant:
            mean = np.zeros_like(mean)
        scale = np.sqrt((factor**2).sum(axis=0))
        floor = np.sqrt(tolerance) * max(
            float(scale.max(initial=0.0)), 1e-4 * float(np.abs(mean).max(initial=0.0))
        )
        if floor == 0.0:
            independent: IntArray = np.zeros(0, dtype=np.int64)
            return independent, np.zeros((len(mean), 0)), mean
        _, upper, order = scipy.linalg.qr(factor, mode="economic", pivoting=True)
        rank = int((np.abs(np.diag(upper)) > floor).sum())
        independent, others = np.sort(order[:rank]).astype(np.int64), np.sort(order[rank:]).astype(np.int64)
        coefficients, *_ = np.linalg.lstsq(factor[:, independent], factor[:, others], rcond=None)
        return candidates[independent], coefficients.T, mean[others] - coefficients.T @ mean[independent]


def _synchronised(gates: BoolArray, p: FloatArray, *, everything: bool) -> list[IntArray]:
    """Blocks of two and more neurons with one firing pattern on the data; silent neurons are none."""
    if everything:
        return [np.arange(p.shape[1])] if p.shape[1] > 1 else []
    packed = np.packbits(gates, axis=0).T
    _, labels = np.unique(packed, axis=0, return_inverse=True)
    labels = labels.reshape(-1)
    alive = gates.any(axis=0)
    blocks = [np.flatnonzero((labels == k) & alive) for k in np.unique(labels)]
    return [block for block in blocks if block.size > 1]
