"""Ranks of small Jacobians in 150-digit arithmetic, where double precision cannot decide.

Narrow networks of smooth neurons have singular values that fall by a constant factor each, down to rounding and below.
With many digits there is nothing to weigh: the network's weights and data are taken as the numbers they are, the
Jacobian is computed with mpmath, brought to rows and columns of one size, and eliminated with complete pivoting in
fixed-point integers. Pivots end at some size or go on down to the last digits; only the first is a rank. Slopes of
saturated neurons can be smaller than any number of digits shows beside others (the slope of tanh at 1e5 has 86,858
zeros after the point); nothing is decided then.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.landscape.counts.ranks import RankRange

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from strati.landscape.mlp.sequential import Chain, ChainStage, Nonlinearity

    Exact = NDArray[np.object_]

BITS = 512
"""Bits after the point."""
LEAST_PIVOT, LARGEST_REST = 150, 300
"""A rank is decided if all its pivots are above ``2^-LEAST_PIVOT`` and nothing above ``2^-LARGEST_REST`` is left.
Rounding leaves at most about ``2^-(BITS - LEAST_PIVOT)``."""
MOST_PRODUCTS = 3_000_000
"""Multiplications of integers that are affordable: some seconds."""


def affordable(parameters: int, values: int) -> bool:
    """Whether an elimination in many digits takes seconds.

    Args:
        parameters: Number of parameters.
        values: Number of data times number of outputs.
    """
    return parameters * values * min(parameters, values) <= MOST_PRODUCTS


def chain_ranks(chain: Chain, x: Tensor, places: list[int]) -> tuple[RankRange, ...] | None:
    """Ranks of a chain's Jacobian restricted to the last chosen layer, the last two, and so on.

    Args:
        chain: The network, in double precision.
        x: Data.
        places: Which layers vary, ascending.

    Returns:
        One rank per chosen layer, in the order of the layers; ``None`` where many digits do not decide, either, or
        the network has an activation that is not computed here.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from strati.landscape.mlp.sequential import as_chain
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(1, 5), nn.Sigmoid(), nn.Linear(5, 1))
        >>> [r.low for r in chain_ranks(as_chain(model).to(torch.float64), torch.randn(30, 1), [0, 1])]
        [16, 6]
    """
    import mpmath

    if any(_activation(stage.activation) is None for stage in chain.stages):
        return None
    with mpmath.workprec(BITS + 128):
        rows = [row for datum in _exact(chain.rows(x)) for row in _jacobian(chain, datum, places)]
        scaled = _even(np.array(rows, dtype=object))
        if scaled is None:
            return None
    sizes = [chain.stages[k].parameters for k in reversed(places)]
    edges = np.cumsum([0, *sizes]).tolist()
    ranks = _eliminated(scaled, edges)
    return None if ranks is None else tuple(RankRange(rank, rank) for rank in reversed(ranks))


def _jacobian(chain: Chain, datum: Exact, places: list[int]) -> list[Exact]:
    """The outputs' derivatives by the chosen layers' parameters on one datum, last layer first."""
    import mpmath

    inputs, slopes = [datum], []
    weights = [_exact(stage.weight) for stage in chain.stages]
    for stage, weight in zip(chain.stages, weights, strict=True):
        p = weight.dot(inputs[-1]) + (0 if stage.bias is None else _exact(stage.bias))
        functions = _activation(stage.activation)
        assert functions is not None
        function, slope = functions
        inputs.append(np.array([function(v) for v in p], dtype=object))
        slopes.append(np.array([slope(v) for v in p], dtype=object))
    rows = []
    for output in range(chain.widths[-1]):
        back = np.array([mpmath.mpf(k == output) for k in range(chain.widths[-1])], dtype=object)
        row: list[Exact] = []
        for k in range(len(chain.stages) - 1, -1, -1):
            back = back * slopes[k]
            if k in places:
                row.append(np.outer(back, _with_constant(inputs[k], chain.stages[k])).ravel())
            back = back.dot(weights[k])
        rows.append(np.concatenate(row))
    return rows


def _with_constant(inputs: Exact, stage: ChainStage) -> Exact:
    import mpmath

    return inputs if stage.bias is None else np.append(inputs, mpmath.mpf(1))


def _exact(tensor: Tensor) -> Exact:
    """Doubles as numbers of many digits, without rounding."""
    import mpmath

    exact: Exact = np.vectorize(mpmath.mpf, otypes=[object])(tensor.detach().double().cpu().numpy())
    return exact


def _activation(kind: Nonlinearity) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """An activation and its derivative for numbers of many digits; ``None`` where there is none."""
    import mpmath as mp

    if kind.slopes is not None:
        below, above = (mp.mpf(slope) for slope in kind.slopes)
        return (lambda p: p * (above if p > 0 else below)), (lambda p: above if p > 0 else below)
    if kind.slope is None:  # options that are not the usual ones
        return None
    functions = {
        "tanh": (mp.tanh, lambda p: mp.sech(p) ** 2),
        "sigmoid": (lambda p: 1 / (1 + mp.exp(-p)), lambda p: 1 / (2 + mp.exp(-p) + mp.exp(p))),
        "silu": (
            lambda p: p / (1 + mp.exp(-p)),
            lambda p: (1 + p / (1 + mp.exp(p))) / (1 + mp.exp(-p)),
        ),
        "gelu": (lambda p: p * mp.ncdf(p), lambda p: mp.ncdf(p) + p * mp.npdf(p)),
    }
    return functions.get(kind.name)


def _even(matrix: Exact) -> Exact | None:
    """Rows and columns brought to one size, as integers of :data:`BITS` bits after the point.

    ``None`` if an entry is not zero but too small to be seen beside the largest of its column or row.
    """
    import mpmath

    for axis in (0, 1):
        size = np.abs(matrix).max(axis=axis, keepdims=True)
        matrix = matrix / np.where(size == 0, mpmath.mpf(1), size)
    sizes = np.abs(matrix)
    if np.any((sizes != 0) & (sizes < mpmath.ldexp(1, -LEAST_PIVOT))):
        return None
    fixed: Exact = np.vectorize(lambda v: int(mpmath.nint(mpmath.ldexp(v, BITS))), otypes=[object])(matrix)
    return fixed


def _eliminated(matrix: Exact, edges: list[int]) -> list[int] | None:
    """Ranks of the columns up to each edge, by elimination group after group; ``None`` if a pivot is neither."""
    ranks, rank = [], 0
    remaining = matrix
    for start, end in pairwise(edges):
        group_columns = end - start  # the first columns of what is left belong to this group
        while group_columns and remaining.shape[0]:
            sizes = np.abs(remaining[:, :group_columns])
            row, column = divmod(int(sizes.argmax()), group_columns)
            size = sizes[row, column]
            if size < 1 << (BITS - LARGEST_REST):
                break
            if size < 1 << (BITS - LEAST_PIVOT):
                return None
            rank += 1
            pivot = remaining[row, column]
            factors = (np.delete(remaining[:, column], row) << BITS) // pivot
            top = np.delete(remaining[row], column)
            remaining = np.delete(np.delete(remaining, row, 0), column, 1)
            remaining = remaining - ((factors[:, None] * top) >> BITS)
            group_columns -= 1
        remaining = remaining[:, group_columns:]
        ranks.append(rank)
    return ranks
