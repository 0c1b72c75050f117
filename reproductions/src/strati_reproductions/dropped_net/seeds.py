"""Seed orders that were compared and are not in the product: residual norms without bias, spreads, and a consensus."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.residual.order import Seed, seed_order

if TYPE_CHECKING:
    from strati.reassembly.residual.network import Floats, Ints, ResidualWeights

SEEDS = ("delta-norm", "delta-norm-no-bias", "frobenius", "l1", "spread", "consensus")


def named_order(parts: ResidualWeights, ins: Ints, outs: Ints, x: Floats, name: str) -> Ints:
    """Positions of the blocks ``(ins, outs)`` in the order of a seed.

    ``delta-norm-no-bias`` is the mean norm of the residual without the output bias, ``spread`` the norm of the standard
    deviations of the residual; ``consensus`` sorts by the mean rank in ``l1`` and ``spread``.
    """
    if name in list(Seed):
        return seed_order(parts, ins, outs, x, Seed(name))
    if name == "consensus":
        ranks = [np.argsort(named_order(parts, ins, outs, x, seed)) for seed in ("l1", "spread")]
        return np.argsort(ranks[0] + ranks[1], kind="stable")
    measures: dict[str, Callable[[Floats, Floats], float]] = {
        "delta-norm-no-bias": lambda r, bias: float(np.linalg.norm(r - bias, axis=1).mean()),
        "spread": lambda r, _: float(np.linalg.norm(r.std(axis=0))),
    }
    values = [
        measures[name](parts.residual(int(i), int(j), x), parts.b_out[j])
        for i, j in zip(ins, outs, strict=True)
    ]
    return np.argsort(values, kind="stable")
