"""What makes a loss cheap to sample: quadratic blocks, networks affine in their inputs, the cost of a gradient.

A layer of a deep linear network is a quadratic block, the last layer of any network under squared errors, and ``w1`` of
``w1^2 w2^4``. Blocks are not declared but detected by differences of the potential.
If every parameter gives ``f(x) = A x + b``, then ``mean ||f(x) - y||^2`` depends on the data by their first and second
moments alone, and a few points with the same moments replace all data (:func:`moment_matched_data`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from strati.core.rng import derive
from strati.landscape.llc import tuning
from strati.landscape.objective import LossName, Objective, Potential

P = TypeVar("P", bound=Potential)


def quadratic_blocks(
    potential: Potential, theta: Tensor, sizes: Sequence[int] | None = None
) -> tuple[slice, ...] | None:
    """Consecutive blocks of parameters in each of which the potential is quadratic, the others held fixed.

    Along lines inside a block, through places at a random distance from ``theta``, the third difference of a
    quadratic is zero. ``sizes`` proposes where blocks may end (the parameter tensors of a network); neighbours are
    joined as long as the joined block is quadratic, and without ``sizes`` the ends are searched for.

    Returns:
        The blocks in order, or ``None`` where some parameter is in none, or there are more than a dozen.

    Examples:
        >>> quadratic_blocks(lambda w: (w[0] * w[1] - w[2]) ** 2, torch.ones(3, dtype=torch.float64))
        (slice(0, 1, None), slice(1, 3, None))
        >>> quadratic_blocks(lambda w: (w**4).sum(), torch.zeros(2, dtype=torch.float64)) is None
        True
    """
    if theta.dtype != torch.float64 or not batchable(potential, theta):
        return None
    ends = list(np.cumsum(sizes)) if sizes is not None else list(range(1, theta.numel() + 1))
    probe = _Probe(potential, theta)
    blocks: list[slice] = []
    start = 0
    while start < theta.numel():
        ahead = [int(e) for e in ends if e > start]
        # The longest block from here: quadratic stays quadratic when shortened, so bisect.
        low, high = 0, len(ahead)
        while low < high:
            middle = (low + high + 1) // 2
            if probe.quadratic(range(start, ahead[middle - 1])):
                low = middle
            else:
                high = middle - 1
        if low == 0 or len(blocks) == tuning.MOST_BLOCKS:
            return None
        blocks.append(slice(start, ahead[low - 1]))
        start = blocks[-1].stop
    return tuple(blocks)


def largest_quadratic(potential: Potential, theta: Tensor) -> tuple[int, ...]:
    """The most parameters, of a few, in which together the potential is quadratic; none where there are no such.

    Examples:
        >>> largest_quadratic(lambda w: (w[0] - w[1] * w[2]) ** 2 + w[1] ** 4, torch.zeros(3, dtype=torch.float64))
        (0, 2)
    """
    if theta.dtype != torch.float64 or not batchable(potential, theta):
        return ()
    probe = _Probe(potential, theta)
    best: list[int] = []
    for first in range(theta.numel()):
        members: list[int] = []
        for index in (first, *(i for i in range(theta.numel()) if i != first)):
            if probe.quadratic([*members, index]):
                members.append(index)
            elif not members:
                break
        best = max(best, members, key=len)
    return tuple(sorted(best))


class _Probe:
    """Third differences of a potential along random lines inside a block."""

    def __init__(self, potential: Potential, theta: Tensor) -> None:
        self.potential, self.theta = potential, theta
        self.generator = torch.Generator().manual_seed(derive(0, "quadratic blocks", theta.numel()))
        self.size = max(float(theta.abs().mean()), 0.3)

    def quadratic(self, block: Sequence[int]) -> bool:
        with torch.no_grad():
            return all(self._line(block) for _ in range(tuning.STRUCTURE_PROBES))

    def _line(self, block: Sequence[int]) -> bool:
        place = self.theta + self._normal(self.theta.numel())
        direction = torch.zeros_like(self.theta)
        direction[list(block)] = self._normal(len(block))
        values = np.array([float(self.potential(place + t * direction)) for t in range(-2, 3)])
        if not np.isfinite(values).all():
            return False
        third = np.abs(np.diff(values, n=3)).max()
        return bool(
            third <= tuning.QUADRATIC_TOLERANCE * max(np.ptp(values), 1e-6 * np.abs(values).max(), 1e-280)
        )

    def _normal(self, count: int) -> Tensor:
        return self.size * torch.randn(count, generator=self.generator, dtype=self.theta.dtype).to(self.theta)


def batchable(potential: Potential, theta: Tensor) -> bool:
    """Whether ``torch.func.vmap`` can trace the potential: no branches on values, no writes in place.

    Examples:
        >>> batchable(lambda w: (w**2).sum(), torch.zeros(2))
        True
        >>> batchable(lambda w: w.sum() if float(w.sum()) > 0 else -w.sum(), torch.zeros(2))
        False
    """
    try:
        with torch.no_grad():
            vmap(lambda t: potential(t).reshape(()), randomness="error")(torch.stack([theta, theta]))
    except Exception:  # whatever it is that vmap cannot trace: the answer is no
        return False
    return True


def moment_matched_data(objective: P) -> P | Objective:
    """The same loss over ``2 (d_in + d_out)`` data instead of ``n``, or the objective itself.

    With ``k = d_in + d_out`` and ``R`` the triangular factor of the centred ``[X, Y]``, the points are
    ``mean +- sqrt(k/n) R_i``: their mean squared error is that of the data for every affine ``f``.

    Args:
        objective: Any potential; only squared errors of networks that are affine in their inputs change.

    Examples:
        >>> from strati.landscape.objective import objective as of
        >>> x, y = torch.randn(500, 3).double(), torch.randn(500, 2).double()
        >>> whole = of(torch.nn.Linear(3, 2).double(), "mse", (x, y))
        >>> few = moment_matched_data(whole)
        >>> few.rows, few.count, bool(abs(few(few.flat.theta) / whole(few.flat.theta) - 1) < 1e-12)
        (10, 500, True)
    """
    if not isinstance(objective, Objective) or objective.name not in (LossName.MSE, LossName.BEHAVIOURAL_MSE):
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
        for _ in range(tuning.STRUCTURE_PROBES):
            theta = flat.theta + scale * normal(flat.size)
            start, step = x[:1], normal(4, x.shape[1]) * (1 + x.std())
            low, middle, high = (flat(theta, start + t * step) for t in (-1.0, 0.0, 1.0))
            bend = (low + high - 2 * middle).abs().max()
            if not bool(bend <= tuning.AFFINE_TOLERANCE * (low.abs().max() + high.abs().max())):
                return False
    return True


class GradientCost(NamedTuple):
    """Seconds per batched gradient, and per replica in it, on a machine of 2020: a model, hence reproducible.

    ``mode_jump`` is how many gradients a move from one part of a valley to another takes.
    """

    call: float
    replica: float
    mode_jump: int = 1


def collapsed_gradients(width: int) -> int:
    """Gradients of a move with a block of so many parameters integrated out: before, after, and where it ends."""
    return 2 * (width + 1) + 1


def gradient_cost(potential: Potential, theta: Tensor, *, turning: int | None = None) -> GradientCost:
    """What a gradient costs, from the operations, numbers and products of one evaluation.

    Args:
        potential: The loss.
        theta: Where.
        turning: Multiply-adds of a rotation there and back; that of a dense one by default.

    Examples:
        >>> cheap = gradient_cost(lambda w: (w**2).sum(), torch.zeros(2))
        >>> dear = gradient_cost(lambda w: (w[:, None] * torch.ones(1, 10**6)).sum(), torch.zeros(2))
        >>> cheap.replica < 1e-6 < 1e-3 < dear.replica
        True
    """
    with torch.no_grad(), _WorkCounter() as work:
        potential(theta)
    size = theta.numel()
    turning = (2 * size * size if size <= tuning.DENSE_LIMIT else 0) if turning is None else turning
    replica = 3 * (work.numbers * tuning.SECONDS_PER_NUMBER + work.products * tuning.SECONDS_PER_PRODUCT)
    return GradientCost(
        tuning.SECONDS_PER_MOVE + 3 * work.calls * tuning.SECONDS_PER_CALL,
        replica + 2 * turning * tuning.SECONDS_PER_PRODUCT + size * 20 * tuning.SECONDS_PER_NUMBER,
    )


class _WorkCounter(TorchDispatchMode):
    """Counts operations, the numbers they write, and multiply-adds of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.numbers = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        written = out.numel() if isinstance(out, Tensor) else 0
        self.calls += 1
        if any(product in func.__name__ for product in ("mm", "conv")):
            inner = [a for a in args if isinstance(a, Tensor) and a.ndim > 1][-1]
            self.products += written * (inner.shape[-2] if "mm" in func.__name__ else inner[0].numel())
        if not func.is_view:
            self.numbers += written
        return out
