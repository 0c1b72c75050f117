"""Triangular factors of many rows, with rounding errors that do not add up when the rows repeat each other."""

from __future__ import annotations

import torch
from torch import Tensor

from strati.core.rng import derive

TALL, TOGETHER = 4, 32
"""Rows that are factorised at once: so many times the columns, at least as many as are mixed."""


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
    hadamard = rows.new_ones(1, 1)
    while len(hadamard) < TOGETHER:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    end = len(rows) // TOGETHER * TOGETHER
    blocks, remainder = (rows * signs).split([end, len(rows) - end])
    mixed = (hadamard / TOGETHER**0.5) @ blocks.reshape(-1, TOGETHER, rows.shape[1])
    return torch.cat([mixed.reshape(end, -1), remainder])
