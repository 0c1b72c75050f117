"""Ranks of many rows of numbers, and what rounding leaves undecided.

Rows are kept as a triangular factor (a QR factorisation extended batch by batch), not as a Gram matrix, which would
lose every singular value below the square root of the machine precision. Columns are brought to one size, so that the
unit of an input and the scale of a neuron do not decide. How large rounding errors are is measured: the same rows
computed again from weights and data moved by a few units in the last place (a twin) show how far rounding is
amplified on the way. A singular value above that is real; one below may be zero. Which rows to take is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import scipy.linalg
import torch
from torch import Tensor

from strati.core.rng import derive

EPS = float(torch.finfo(torch.float64).eps)
TWIN = 4 * EPS
"""Relative change of weights and data that makes the twin."""
LEAST_NOISE = 8 * EPS
"""Relative error of a column that is always allowed for."""
GAP, OPEN = 1e3, 50.0
"""Singular values below the floor are called zero only if the others end this far above it, and they lie this far
below: the floor is what rounding can do at most, some 50 times what it usually does."""
HIDDEN = 1e-12
"""Entries that are real, but smaller than this beside their column, can hide a dimension from any rank in float64."""
BUFFER = 4096
"""Rows that are collected before the factor is brought up to date."""


@dataclass(frozen=True)
class RankRange:
    """A rank: at least ``low``, at most ``high``; equal where rounding leaves no doubt."""

    low: int
    high: int

    @property
    def decided(self) -> bool:
        """Whether there is one number."""
        return self.low == self.high


def rank_range(matrix: Tensor, noise: Tensor | None = None, rows: int = 0) -> RankRange:
    """The rank of a matrix, whatever the scale of its columns.

    With unit columns and column errors of relative size ``rho``, singular values move by at most
    ``||E||_F <= rho sqrt(columns)`` (Weyl): what lies above is not zero. What lies below is zero or too small to tell;
    it is called zero if the spectrum ends well above (by :data:`GAP`) and does not fall towards the floor at a rate
    that would hide the next one.

    Args:
        matrix: Rows by columns, float64.
        noise: Relative error of each column; rounding of the columns themselves by default.
        rows: How many rows went into it, where it is the factor of more.

    Examples:
        >>> v = torch.tensor([[1.0, 1e9, 1.0], [2.0, -1e9, 2.0], [3.0, 5e9, 3.0]], dtype=torch.float64)
        >>> rank_range(v)  # the third column repeats the first
        RankRange(low=2, high=2)
        >>> rank_range(torch.tensor([[1.0, 1.0], [0.0, 1e-14]], dtype=torch.float64))  # as small as rounding
        RankRange(low=1, high=2)
    """
    scaled, floor = balanced(matrix, noise)
    if scaled.numel() == 0:
        return RankRange(0, 0)
    return decide(torch.linalg.svdvals(scaled), floor, max(rows, len(matrix)))


def balanced(matrix: Tensor, noise: Tensor | None = None) -> tuple[Tensor, float]:
    """The columns that are not zero, brought to one size, and below what their singular values mean nothing.

    A column that is more noise than the others is made smaller by as much, so that it does not spoil them.
    """
    size = torch.linalg.vector_norm(matrix, dim=0)
    live = size > 0
    size = size[live]
    rho = torch.full_like(size, LEAST_NOISE) if noise is None else noise[live].clamp(min=LEAST_NOISE)
    usual = max(LEAST_NOISE, 4 * float(rho.median())) if rho.numel() else LEAST_NOISE
    usual = min(usual, 1e-3)
    scaled = matrix[:, live] / (size * (rho / usual).clamp(min=1.0))
    return scaled, 2 * usual * math.sqrt(max(1, size.numel()))


def decide(values: Tensor, floor: float, rows: int) -> RankRange:
    """The rank from singular values (descending) and the floor of what can be told from zero.

    A factorisation itself leaves some units of rounding, growing with the square root of the number of rows, or, where
    the rows repeat each other, with the number of columns (:func:`upper`).
    """
    size = int(values.numel())
    low = int((values > floor).sum())
    if low == size:
        return RankRange(low, low)
    left = EPS * float(values[0]) * max(4.0, math.sqrt(rows) / 4, size / 5)
    if low == 0 or float(values[low]) > max(floor / OPEN, left):
        return RankRange(low, size)
    last = values[max(0, low - 4) : low]
    steepest = float((last[1:] / last[:-1]).min()) if last.numel() > 1 else 1.0
    clear = float(last[-1]) > GAP * floor and float(last[-1]) * steepest > floor
    return RankRange(low, low if clear else size)


class Factor:
    """The triangular factor of a stream of rows, and ranks of all or some columns.

    Once the columns that are not zero are seen to be independent, further rows cannot change a rank and are passed
    over (unless they bring a column to life, or ``whole`` asks for the factor of all rows).

    Args:
        columns: Number of columns.
        whole: Keep every row's share, for eigenvalues of the Gram matrix.
        like: A tensor whose device is used.

    Attributes:
        columns: Number of columns.
        count: Rows taken in.
        hidden: Some entries are real but too small to be seen beside others: no column that is not zero is then
            called dependent.
        lost: Some entries may have been lost to underflow: no column is then called dependent.

    Examples:
        >>> factor = Factor(3)
        >>> rows = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> factor.add(torch.cat([rows, rows.sum(1, keepdim=True)], 1))
        >>> factor.range().high, factor.range([0, 1]).high, bool(torch.allclose(factor.gram()[:2, :2], rows.T @ rows))
        (2, 2, True)
    """

    def __init__(self, columns: int, *, whole: bool = False, like: Tensor | None = None) -> None:
        device = None if like is None else like.device
        self.columns, self.count = columns, 0
        self.hidden = self.lost = False
        self._whole = whole
        self._matrix = torch.zeros(0, columns, dtype=torch.float64, device=device)
        self._waiting: list[Tensor] = []
        self._rows = 0
        self._dead: Tensor | None = None  # columns that are zero, once the others are known to be independent
        self._check = 2 * columns
        self._error = torch.zeros(columns, dtype=torch.float64, device=device)
        self._power = torch.zeros(columns, dtype=torch.float64, device=device)
        self._cache: dict[tuple[int, ...] | None, RankRange] = {}

    def add(self, rows: Tensor) -> None:
        """Take in more rows."""
        rows = rows.double()
        self.count += rows.shape[0]
        self._cache.clear()
        if self._dead is not None:
            if not bool((rows[:, self._dead] != 0).any()):
                return
            self._dead, self._check = None, self.count + 2 * self.columns
        self._waiting.append(rows)
        self._rows += rows.shape[0]
        if self._rows >= max(BUFFER, self.columns):
            self._flush()

    def compare(self, rows: Tensor, twin: Tensor) -> None:
        """Measure the error of the columns on some rows and their twin."""
        if rows.numel() == 0:
            return
        rows, twin = rows.double(), twin.double()
        self._error += (rows - twin).square().sum(0)
        self._power += rows.square().sum(0)
        self.hidden |= has_hidden_entries(
            rows / rows.abs().amax(0, keepdim=True).clamp(min=1e-300), rows, twin
        )
        self._cache.clear()

    @property
    def matrix(self) -> Tensor:
        """The factor ``R`` with ``R^T R`` the Gram matrix of the rows taken in."""
        self._flush()
        return self._matrix

    @property
    def noise(self) -> Tensor:
        """Relative error of each column, as measured."""
        quotient = (self._error / self._power.clamp(min=1e-300)).sqrt()
        return torch.where(self._power > 0, quotient, torch.zeros_like(quotient))

    def gram(self) -> Tensor:
        """``sum_x v(x) v(x)^T``."""
        return self.matrix.T @ self.matrix

    def range(self, members: Sequence[int] | None = None) -> RankRange:
        """Rank of all columns, or of some."""
        key = None if members is None else tuple(members)
        if key not in self._cache:
            self._cache[key] = self._range(key)
        return self._cache[key]

    def _range(self, members: tuple[int, ...] | None) -> RankRange:
        matrix, noise = self.matrix, self.noise
        bounds = self._seen_range(matrix, noise, members)
        if not (self.hidden or self.lost):
            return bounds
        live = (matrix != 0).any(dim=0)
        live = live if members is None else live[list(members)]
        most = int(live.numel() if self.lost else live.sum())
        return RankRange(bounds.low, max(bounds.low, min(most, self.count)))

    def _seen_range(self, matrix: Tensor, noise: Tensor, members: tuple[int, ...] | None) -> RankRange:
        if self._dead is not None:
            alive = ~self._dead if members is None else ~self._dead[list(members)]
            number = int(alive.sum())
            return RankRange(number, number)
        if members is not None:
            index = torch.as_tensor(members, device=matrix.device)
            if index.numel() == 1:
                there = bool((matrix[:, index] != 0).any())
                return RankRange(int(there and float(noise[index]) < 0.1), int(there))
            bounds = rank_range(matrix[:, index], noise[index], self.count)
            return RankRange(bounds.low, bounds.high)
        return rank_range(matrix, noise, self.count)

    def _flush(self) -> None:
        if not self._waiting:
            return
        stacked = torch.cat([self._matrix, *self._waiting])
        self._matrix = upper(stacked)
        self._waiting, self._rows = [], 0
        if not self._whole and self._dead is None and self.count >= self._check:
            self._check = 2 * self.count
            self._settle()

    def _settle(self) -> None:
        """Whether the columns that are not zero are independent beyond doubt: by a cheap test of their Gram matrix."""
        live = torch.linalg.vector_norm(self._matrix, dim=0) > 0
        if not live.any() or len(self._matrix) < int(live.sum()):
            return
        columns = self._matrix[:, live]
        error = self.noise.max().square() * columns.square().sum(0)
        if independent(columns.T @ columns, error):
            self._dead = ~live


def independent(gram: Tensor, error: Tensor) -> bool:
    """Whether vectors are independent beyond doubt: the least eigenvalue of their Gram matrix at unit length says so.

    Args:
        gram: Their inner products.
        error: Squared length of the error of each.
    """
    square = gram.diagonal()
    if not len(square) or not bool((square > 0).all()):
        return False
    size = square.sqrt()
    least = max(1e-9, 1e4 * float((error / square).max()) * len(gram))
    shifted = gram / size / size[:, None]
    shifted.diagonal().sub_(least)  # positive definite if the least eigenvalue is larger
    return least < 1 and int(torch.linalg.cholesky_ex(shifted).info) == 0


def gram_of(rows: Tensor) -> Tensor:
    """``rows rows^T``; numpy takes half the work of torch, knowing that it is symmetric."""
    if rows.device.type != "cpu":
        return rows @ rows.T
    array = rows.numpy()
    return torch.from_numpy(array @ array.T)


def has_hidden_entries(scaled: Tensor, rows: Tensor, twin: Tensor) -> bool:
    """Whether rows hold entries that are no rounding (the twin has them, too) but tiny beside their column."""
    tiny = (scaled != 0) & (scaled.abs() < HIDDEN)
    return bool((tiny & ((rows - twin).abs() < 1e-3 * rows.abs())).any())


def joined(first: Factor, second: Factor) -> Factor:
    """The factor of the rows of both."""
    both = Factor(first.columns, whole=True, like=first.matrix)
    both.add(first.matrix)
    both.add(second.matrix)
    both.count = first.count + second.count
    both.hidden, both.lost = first.hidden or second.hidden, first.lost or second.lost
    both._error = first._error + second._error
    both._power = first._power + second._power
    return both


def certified(probes: Factor, last: Factor) -> tuple[Factor, bool]:
    """The factor of random probes, whose rank is that of all directions or is put above it.

    Every datum's Jacobian is seen through some random probes. Each further probe per datum can add at most as many
    dimensions as the one before (ranks are submodular, and probes are exchangeable), so if the last one added none,
    no other would, and the rank is exact with probability one. If it added some, nothing is known but that silent
    directions are silent: then all others are taken as used, which never overcounts what is free.

    Args:
        probes: Of all probes but the last.
        last: Of the last probe.

    Returns:
        The factor to use, and whether its rank is exact.

    Examples:
        >>> one, two = Factor(3), Factor(3)
        >>> one.add(torch.eye(3, dtype=torch.float64)[:1]), two.add(torch.eye(3, dtype=torch.float64)[:2])
        (None, None)
        >>> certified(two, one)[1], certified(one, two)[1]
        (True, False)
    """
    both = joined(probes, last)
    if both.range().high == probes.range().low:
        return both, True
    full = Factor(both.columns, whole=True, like=both.matrix)
    full.add(torch.diag(torch.linalg.vector_norm(both.matrix, dim=0)))
    full.count = both.count
    return full, False


def perturb(tensor: Tensor, generator: torch.Generator, step: float = TWIN) -> Tensor:
    """A tensor moved by a few units in the last place; whole numbers stay as they are."""
    if not tensor.is_floating_point():
        return tensor
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return (tensor.double() * (1 + step * drawn.to(tensor.device))).to(tensor.dtype)


def fold(activations: Tensor, bias: bool) -> Tensor:
    """Activations with the constant 1 that carries the bias as their last column."""
    if not bias:
        return activations
    return torch.cat([activations, activations.new_ones(len(activations), 1)], dim=1)


def pairs_above(first: Tensor, second: Tensor, threshold: float) -> int:
    """Number of pairs of eigenvalues whose product exceeds a threshold.

    These are the eigenvalues of the factorised Hessian ``G (x) K`` above it: a unit step along such a
    direction of a layer's weights changes the behavioural loss by more than the threshold.

    Examples:
        >>> pairs_above(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.1]), 0.5)
        2
    """
    ordered = second.clamp(min=0).sort().values
    positive = first[first > 0]
    if positive.numel() == 0 or ordered.numel() == 0:
        return 0
    below = torch.searchsorted(ordered, threshold / positive, right=True)
    return int((ordered.numel() - below).sum())


TALL, TOGETHER = 4, 32
"""Rows that are factorised at once: so many times the columns, at least as many as are mixed."""
_HADAMARD = scipy.linalg.hadamard(TOGETHER) / math.sqrt(TOGETHER)


def upper(rows: Tensor) -> Tensor:
    """A triangular factor ``R`` with ``R^T R`` the Gram matrix of the rows.

    In one factorisation of many rows that repeat each other (a linear head's Jacobian on every datum) the rounding
    errors add up with one sign, as the number of rows. So rows are first mixed: random signs, then a Hadamard matrix
    on every :data:`TOGETHER` of them, which leaves the Gram matrix as it is; and they are factorised in a tree, each
    time :data:`TALL` times as many rows as columns (Demmel et al., SIAM J. Sci. Comput. 34, 2012, for the tree).

    Args:
        rows: Rows by columns.

    Examples:
        >>> rows = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.1, 3.0]], dtype=torch.float64).repeat(40_000, 1)
        >>> values = torch.linalg.svdvals(upper(rows))
        >>> bool(values[2] < 1e-15 * values[0])
        True
    """
    columns = rows.shape[1]
    block = max(TALL * columns, TOGETHER)
    if len(rows) > block:
        rows = _mixed(rows)
    while len(rows) > block:
        end = len(rows) // block * block
        blocks, remainder = rows.split([end, len(rows) - end])
        parts = torch.linalg.qr(blocks.reshape(-1, block, columns), mode="r")[1]
        rows = torch.cat([parts.reshape(-1, columns), remainder])
    return rows if len(rows) <= columns else torch.linalg.qr(rows, mode="r")[1]


def _mixed(rows: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(derive(0, "mixed rows", *rows.shape))
    signs = torch.randint(0, 2, (len(rows), 1), generator=generator).to(rows) * 2 - 1
    end = len(rows) // TOGETHER * TOGETHER
    blocks, remainder = (rows * signs).split([end, len(rows) - end])
    mixed = torch.from_numpy(_HADAMARD).to(rows) @ blocks.reshape(-1, TOGETHER, rows.shape[1])
    return torch.cat([mixed.reshape(end, -1), remainder])
