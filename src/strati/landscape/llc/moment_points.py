"""A squared error over many data as the same function of the parameters over few, where the network is affine.

If every parameter gives ``f(x) = A x + b``, then ``mean ||f(x) - y||^2`` depends on the data by their first and second
moments alone. Points placed in pairs about the mean have the same moments as the data, so the loss over them is the
loss over all data, for every parameter. Deep linear networks and linear regression then cost the same for any
number of data.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from strati.core.rng import derive
from strati.landscape.objective import LossName, Objective

_PROBES = 3
_TOLERANCE = 1e-10


def condensed(objective: Objective) -> Objective:
    """The same loss over ``2 (d_in + d_out)`` data instead of ``n``, or the objective itself.

    With ``k = d_in + d_out`` and ``R`` the triangular factor of the centred ``[X, Y]``, the points are
    ``mean +- sqrt(k/n) R_i``: their mean squared error is that of the data for every affine ``f``.

    Args:
        objective: Any; only squared errors of networks that are affine in their inputs change.

    Examples:
        >>> from strati.landscape.objective import objective as of
        >>> x, y = torch.randn(500, 3).double(), torch.randn(500, 2).double()
        >>> whole = of(torch.nn.Linear(3, 2).double(), "mse", (x, y))
        >>> few = condensed(whole)
        >>> few.rows, few.count, bool(abs(few(few.flat.theta) / whole(few.flat.theta) - 1) < 1e-12)
        (10, 500, True)
    """
    if objective.name not in (LossName.MSE, LossName.BEHAVIOURAL_MSE):
        return objective
    x, y = objective.x, objective.target
    if not isinstance(x, Tensor) or x.dtype != torch.float64 or x.ndim != 2 or y.ndim != 2:
        return objective
    size = x.shape[1] + y.shape[1]
    if len(x) <= 2 * size or not _affine(objective, x):
        return objective
    both = torch.cat([x, y], dim=1)
    centre = both.mean(0)
    factor = torch.linalg.qr(both - centre, mode="r").R * (size / len(x)) ** 0.5
    points = torch.cat([centre + factor, centre - factor])
    return dataclasses.replace(objective, x=points[:, : x.shape[1]], target=points[:, x.shape[1] :])


def _affine(objective: Objective, x: Tensor) -> bool:
    """Whether second differences of the output vanish along lines of inputs, at random parameters."""
    flat = objective.flat
    generator = torch.Generator().manual_seed(derive(0, "affine", flat.size))
    scale = max(float(flat.theta.abs().mean()), 0.3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=x.dtype)

    with torch.no_grad():
        for _ in range(_PROBES):
            theta = flat.theta + scale * normal(flat.size)
            start, step = x[:1], normal(4, x.shape[1]) * (1 + x.std())
            low, middle, high = (flat(theta, start + t * step) for t in (-1.0, 0.0, 1.0))
            bend = (low + high - 2 * middle).abs().max()
            if not bool(bend <= _TOLERANCE * (low.abs().max() + high.abs().max())):
                return False
    return True
