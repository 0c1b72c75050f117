r"""Critical points of the toy model of superposition whose polygon is known, with their exact loss. Needs torch.

Six features ``x = u e_j``, one at a time, ``u`` uniform on ``[0, 1]``, go through ``relu(W^T W x + b)``. The loss over
all such data has a closed form: with :math:`a_{ij} = w_i \cdot w_j` it is :math:`\frac16 \sum_{ij} \int_0^1
(\mathrm{relu}(a_{ij} u + b_i) - \delta_{ij} u)^2 du`. Where columns of ``W`` form a regular ``k``-gon and the others
are zero, only the length, the bias of the corners and that of the features left out remain, and the loss is minimised
over them. A feature left out has bias ``1/12`` (written ``+``: its mean comes back) or a negative one (``-``: nothing).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from strati.landscape.objective import exact_hessian

FEATURES, WIDTH = 6, 2
KNOWN = ("4--", "4+-", "4++", "5-", "5+", "6")
"""The polygons, from high loss to low."""

SILENT = -0.5
"""Bias of a feature of which nothing comes back."""

_FLAT = 1e-6  # of the largest curvature


@dataclass(frozen=True)
class CriticalPoint:
    """A polygon at its best size.

    Attributes:
        name: Corners, and one sign per feature left out.
        theta: ``W`` row by row, then ``b``.
        loss: Over all data.
        coefficient: The learning coefficient, half the rank of the Hessian, where the loss is smooth there and its flat
            directions are those of a manifold of minima; ``None`` for squares, which lie on a kink of the ReLU.
    """

    name: str
    theta: Tensor
    loss: float
    coefficient: float | None


def exact_loss(theta: Tensor) -> Tensor:
    """The squared error over all data, of ``W`` row by row and ``b`` in one vector.

    Examples:
        >>> theta = torch.zeros(18, dtype=torch.float64)
        >>> round(float(exact_loss(theta)), 6)  # nothing comes back: the mean square of u
        0.333333
    """
    weight, bias = theta[: WIDTH * FEATURES].reshape(WIDTH, FEATURES), theta[WIDTH * FEATURES :]
    slope = weight.T @ weight
    low = bias[:, None].expand_as(slope)
    first, last = torch.relu(low), torch.relu(low + slope)
    # The share of [0, 1] in which the ReLU is open, without dividing by a slope of zero.
    opens, closes = (last > 0) & (low <= 0), (last <= 0) & (low > 0)
    safe = torch.where(opens | closes, slope, torch.ones_like(slope))
    share = torch.where(
        opens, last / safe, torch.where(closes, -first / safe, ((last > 0) & (low > 0)) * 1.0)
    )
    squares = share * (first**2 + first * last + last**2) / 3
    open_share, start = share.diagonal(), 1 - share.diagonal()  # on the diagonal it opens and never closes
    v, w = first.diagonal(), last.diagonal()
    product = (
        open_share * (start * v + (1 + start) * (v + w) + w) / 6
    )  # of u and the output, by Simpson's rule, exact here
    return (squares.sum() + FEATURES / 3 - 2 * product.sum()) / FEATURES


def critical_point(name: str) -> CriticalPoint:
    """The polygon of that name, at the size and bias at which its loss is stationary.

    Examples:
        >>> found = critical_point("6")
        >>> round(found.loss, 4), found.coefficient
        (0.0482, 8.5)
    """
    corners, signs = int(name[0]), name[1:]
    angles = 2 * math.pi * torch.arange(corners, dtype=torch.float64) / corners
    circle = torch.stack([torch.cos(angles), torch.sin(angles)])
    left_out = torch.zeros(WIDTH, FEATURES - corners, dtype=torch.float64)
    silent = torch.tensor([1 / 12 if s == "+" else SILENT for s in signs], dtype=torch.float64)

    def placed(size: Tensor) -> Tensor:
        bias = torch.cat([size[1].expand(corners), silent])
        return torch.cat([torch.cat([size[0] * circle, left_out], 1).flatten(), bias])

    size = torch.tensor([1.0, 0.0 if corners == 4 else -0.1], dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS(
        [size], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-14, tolerance_change=1e-16
    )

    def value() -> Tensor:
        search.zero_grad()
        loss_there = exact_loss(placed(size))
        loss_there.backward()
        return loss_there

    search.step(value)
    theta = placed(size).detach()
    return CriticalPoint(name, theta, float(exact_loss(theta)), None if corners == 4 else _half_rank(theta))


def _half_rank(theta: Tensor) -> float | None:
    curvature = torch.linalg.eigvalsh(exact_hessian(exact_loss, theta))
    floor = _FLAT * float(curvature.max())
    return float((curvature > floor).sum()) / 2 if float(curvature.min()) > -floor else None
