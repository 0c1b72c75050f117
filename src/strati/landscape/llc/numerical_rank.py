"""The rank of a Hessian or a Jacobian, with what rounding cannot decide.

Rows and columns are scaled first, so that a parameter with a small effect is not taken for one with none. What rounding
does to the entries is measured, by moving the parameters by a few units in the last place; singular values above
that bound are certainly not zero (Weyl), and those below are taken for zero only where a wide gap sets them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from strati.core.rng import derive
from strati.landscape.counts.ranks import upper
from strati.landscape.objective import Objective, metric_jacobian

_UNITS = 4.0  # in the last place, by which parameters are moved to measure rounding
_SAFETY = 8.0
_GAP = 1e4  # between singular values that count and those that do not, times the widest gap among the former
_GAP_SINGLE = 1e3  # the same where the parameters are rounded to single precision
_KEEPS = 1.5  # factor within which an eigenvalue stays between places that cannot be told apart
_WORK = 1.5e9  # multiply-adds that a decomposition may take
_CHUNK = 4_000_000  # numbers of a Jacobian held at once


class NumericalRank(NamedTuple):
    """The least and the largest rank that rounding allows; equal where the rank is known."""

    low: int
    high: int

    @property
    def known(self) -> bool:
        """Whether rounding leaves no choice."""
        return self.low == self.high


class HessianRank(NamedTuple):
    """Rank of a Hessian, and whether some eigenvalue is certainly negative."""

    rank: NumericalRank
    negative: bool


def hessian_rank(
    hessian: Callable[[Tensor], Tensor], theta: Tensor, others: Sequence[Tensor] = ()
) -> HessianRank:
    """The rank of a symmetric matrix that depends on parameters, at ``theta``.

    Args:
        hessian: The matrix as a function of the parameters.
        theta: Where.
        others: Further places that ``theta`` cannot be told from: an eigenvalue counts only if it is there as well.

    Examples:
        >>> theta = torch.zeros(3, dtype=torch.float64)
        >>> hessian_rank(lambda t: torch.diag(torch.tensor([1.0, 1e-30, 0.0]).double()), theta).rank
        NumericalRank(low=2, high=2)
    """
    matrix, places = hessian(theta), [hessian(place) for place in others]
    rounding = (hessian(_nudged(theta)) - matrix).abs()
    moved = torch.stack([rounding, *((place - matrix).abs() for place in places)]).amax(0)
    scale = _scales(matrix.diagonal().abs().sqrt(), rounding.diagonal().sqrt())

    def scaled(of: Tensor) -> Tensor:
        return of * scale[:, None] * scale  # one after the other: the product of two scales may overflow

    values = torch.linalg.eigvalsh(scaled(matrix))
    bound = _bound(values.abs().max(), scaled(rounding), len(theta))
    # An eigenvalue is a square: gaps are, too.
    rank = _count(values.abs(), bound, gap=_GAP**1.5)
    # A parameter whose effect is small here may have more of it there: without the scales that changes little.
    plain = torch.linalg.eigvalsh(matrix) if places else values
    alike = [
        max(_alike(values, torch.linalg.eigvalsh(scaled(p))), _alike(plain, torch.linalg.eigvalsh(p)))
        for p in places
    ]
    low = min([rank.low, *alike])
    beyond = -10 * _bound(values.abs().max(), scaled(moved), len(theta))
    certain = low == rank.low
    return HessianRank(rank if certain else NumericalRank(low, len(theta)), bool((values < beyond).any()))


def _alike(here: Tensor, there: Tensor) -> int:
    """How many eigenvalues, from the largest on, keep their size between two places.

    A curvature that is there only because the minimum was missed by a little (``12 w^2`` of ``w^4``) does not.
    """
    first, second = (v.abs().sort(descending=True).values for v in (here, there))
    changed = torch.maximum(first, second) > _KEEPS * torch.minimum(first, second)
    return int(changed.long().argmax()) if bool(changed.any()) else len(here)


def jacobian_rank(objective: Objective, theta: Tensor) -> NumericalRank | None:
    """The rank of the outputs' Jacobian over all data; ``None`` where it takes too long to compute.

    For losses of probabilities the logits' common shift is left out.

    Examples:
        >>> from strati.landscape.objective import behavioural_loss
        >>> loss = behavioural_loss(torch.nn.Linear(2, 1).double(), torch.ones(5, 2).double())
        >>> jacobian_rank(loss, loss.flat.theta)
        NumericalRank(low=1, high=1)
    """
    outputs = objective.outputs
    if float(outputs) * objective.flat.size**2 > _WORK:
        return None
    here = _triangular(objective, theta)
    noise = _column_noise(objective, theta)
    norms = torch.linalg.vector_norm(here, dim=0)
    scale = _scales(norms, noise)
    values = torch.linalg.svdvals(here * scale)
    bound = _bound(values.max(), (noise * scale)[None], max(outputs, objective.flat.size))
    rank = _count(values, bound, gap=_GAP)
    if bool((theta.to(torch.float32) == theta).all()):
        low = min(rank.low, _beyond_single(objective, theta, here))
        rank = rank if low == rank.low else NumericalRank(low, len(theta))
    # Neither the number of outputs nor rounding can be exceeded.
    return NumericalRank(rank.low, min(rank.high, outputs, objective.flat.size))


def _beyond_single(objective: Objective, theta: Tensor, jacobian: Tensor) -> int:
    """The rank without singular values that parameters in single precision have by rounding alone.

    Layers of rank one, say, are so up to 1e-8 only. Such values lie below what one rounding does, and a wide gap sets
    them apart; where singular values fall off gradually they count, as the parameters given are what they are.
    """
    noise = _column_noise(objective, theta, torch.finfo(torch.float32).eps)
    scale = _scales(torch.linalg.vector_norm(jacobian, dim=0), noise)
    values = torch.linalg.svdvals(jacobian * scale)
    bound = _bound(values.max(), (noise * scale)[None], max(jacobian.shape))
    above = int((values > bound).sum())
    apart = 0 < above < len(values) and float(values[above - 1]) > _GAP_SINGLE * float(values[above])
    return above if apart else len(theta)


def _scales(size: Tensor, noise: Tensor) -> Tensor:
    """Inverse sizes; what is not above its noise is left as small as it is."""
    largest = size.max()
    usable = size > 1e3 * noise
    return torch.where(usable & (size > 0), 1 / size.clamp(min=1e-300), 1 / largest.clamp(min=1e-300))


def _bound(largest: Tensor, noise: Tensor, size: int) -> float:
    precision = torch.finfo(noise.dtype).eps
    spread = float(torch.linalg.vector_norm(noise))
    return _SAFETY * (spread + math.sqrt(size) * precision * float(largest))


def _count(values: Tensor, bound: float, *, gap: float) -> NumericalRank:
    """Singular values above the bound; the others are zero only if the gap before them is like no other."""
    counted = values[values > 10 * bound].sort(descending=True).values
    low = len(counted)
    if low in (0, len(values)):
        return NumericalRank(low, len(values) if float(values.max()) > bound else low)
    steps = counted[:-1] / counted[1:]
    widest = float(steps.max()) if low > 1 else 1.0
    apart = float(counted[-1]) > gap * widest * bound and not bool(
        ((values > bound) & (values <= 10 * bound)).any()
    )
    return NumericalRank(low, low if apart else len(values))


def _pieces(objective: Objective) -> list[Objective]:
    per_row = max(1, objective.outputs // objective.rows) * objective.flat.size
    step = max(1, _CHUNK // per_row)
    return [objective.part(slice(i, i + step)) for i in range(0, objective.rows, step)]


def _kind(objective: Objective) -> str:
    name = objective.name
    return "kl" if name is not None and not name.squared else "mse"


def _triangular(objective: Objective, theta: Tensor) -> Tensor:
    """The triangular factor of the Jacobian, a few rows of data at a time."""
    factor = theta.new_zeros(0, objective.flat.size)
    for piece in _pieces(objective):
        jacobian, _ = metric_jacobian(objective.flat, theta, piece.x, kind=_kind(objective))
        factor = upper(torch.cat([factor, jacobian]))
    return factor


def _column_noise(objective: Objective, theta: Tensor, precision: float | None = None) -> Tensor:
    nudged = _nudged(theta, precision)
    total = torch.zeros_like(theta)
    for piece in _pieces(objective):
        here, there = (
            metric_jacobian(objective.flat, t, piece.x, kind=_kind(objective))[0] for t in (theta, nudged)
        )
        total += ((there - here) ** 2).sum(0)
    return total.sqrt()


def _nudged(theta: Tensor, precision: float | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(derive(0, "rounding", theta.numel()))
    signs = torch.randint(0, 2, theta.shape, generator=generator).to(theta) * 2 - 1
    return theta * (1 + _UNITS * (precision or torch.finfo(theta.dtype).eps) * signs)
