"""A first order of paired blocks, from their weights or their effect on the raw inputs.

None needs more than one look at each block. Ranking by comparisons is :mod:`strati.reassembly.ranking`,
ordering by regression :mod:`strati.reassembly.regression`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.passes import Floats, Ints, Parts


class Seed(StrEnum):
    """What blocks are sorted by, ascending."""

    DELTA_NORM = "delta-norm"
    DELTA_NORM_NO_BIAS = "delta-norm-no-bias"
    FROBENIUS = "frobenius"
    L1 = "l1"
    SPREAD = "spread"
    CONSENSUS = "consensus"


def seed_order(parts: Parts, ins: Ints, outs: Ints, x: Floats, seed: Seed) -> Ints:
    """Positions of the blocks ``(ins, outs)`` in a first order.

    ``delta-norm`` is the mean norm of a block's residual on the raw inputs (paper, section 4.1);
    ``delta-norm-no-bias`` the same without the output bias; ``frobenius`` and ``l1`` are norms of ``W_out``;
    ``spread`` the norm of the standard deviations of the residual (what the block does beyond a constant);
    ``consensus`` sorts by the mean rank in ``l1`` and ``spread``.
    """
    if seed is Seed.CONSENSUS:
        ranks = [np.argsort(seed_order(parts, ins, outs, x, s)) for s in (Seed.L1, Seed.SPREAD)]
        return np.argsort(ranks[0] + ranks[1], kind="stable")
    return np.argsort(seed_values(parts, ins, outs, x, seed), kind="stable")


def seed_values(parts: Parts, ins: Ints, outs: Ints, x: Floats, seed: Seed) -> NDArray[np.float64]:
    """The value of each block that a seed sorts by."""
    if seed is Seed.FROBENIUS:
        return np.asarray(np.linalg.norm(parts.B[outs].astype(np.float64), axis=(1, 2)))
    if seed is Seed.L1:
        return np.asarray(np.abs(parts.B[outs].astype(np.float64)).sum(axis=(1, 2)))
    values = []
    for i, j in zip(ins, outs, strict=True):
        r = parts.residual(int(i), int(j), x)
        if seed is Seed.SPREAD:
            values.append(np.linalg.norm(r.std(axis=0)))
        else:
            shift = parts.b[j] if seed is Seed.DELTA_NORM_NO_BIAS else 0
            values.append(np.linalg.norm(r - shift, axis=1).mean())
    return np.array(values, dtype=np.float64)
