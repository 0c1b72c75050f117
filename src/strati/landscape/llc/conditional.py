"""The Gaussian that a block of parameters follows where the loss is quadratic in it, the others held fixed.

Such blocks are found in ``quadratic``; ``gibbs`` draws one after the other, ``collapsed`` integrates one out to move
the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from strati.landscape.llc.posterior import LocalPosterior, replicas_per_pass

_ROUNDINGS = 1e3
_MISFIT = 1e-2  # of one, in nbeta L: beyond, a conditional is not the quadratic it was taken for
_NUMBERS = 4_000_000  # held at once


class Drawn(NamedTuple):
    """Replicas whose block was drawn anew; ``good`` is false where it turned out to be no Gaussian."""

    offset: Tensor
    excess: Tensor
    slope: Tensor
    good: Tensor


class Quadratic(NamedTuple):
    """The loss over a block at one temperature: ``level + start . q + q H q / 2``, and the precision's factor.

    ``failed`` is true where the precision ``nbeta H + gamma`` is not positive.
    """

    level: Tensor
    start: Tensor
    hessian: Tensor
    factor: Tensor
    mean: Tensor
    failed: Tensor


class Conditional:
    """The loss as a function of one block, the rest held fixed: its level, slope and second derivatives."""

    def __init__(self, target: LocalPosterior, block: Sequence[int]) -> None:
        self.target = target
        self.block = torch.tensor(list(block), device=target.theta.device)
        width = len(self.block)
        # Slopes at the minimum's own block and one unit beside it in every direction: exact for a quadratic.
        here = target.theta[self.block]
        self.points = torch.cat([here[None], here + torch.eye(width, dtype=here.dtype, device=here.device)])
        passes = replicas_per_pass(target.potential) // (width + 1)
        self.together = max(1, min(passes, _NUMBERS // ((width + 1) * target.size)))
        order = torch.arange(target.size, device=here.device)
        order[self.block] = target.size + torch.arange(width, device=here.device)

        def value(part: Tensor, rest: Tensor) -> Tensor:
            return target.potential(torch.cat([rest, part])[order]).reshape(())

        self._each = vmap(grad_and_value(value))  # not nested: torch 2.13 batches some losses only once

    @property
    def gradients(self) -> int:
        """How many a look at one replica takes."""
        return len(self.points)

    def _slopes(self, points: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        """Slopes and values at every point for every replica, ``(replicas, points, ...)``."""
        shape = (len(rest), len(points))
        slopes, values = self._each(points.repeat(shape[0], 1), rest.repeat_interleave(shape[1], 0))
        return slopes.reshape(*shape, -1), values.reshape(shape)

    def look(self, offset: Tensor, nbeta: Tensor) -> Quadratic:
        """The quadratic about a zero offset of the block, for replicas ``(K, C, d)``."""
        points = (self.target.theta + offset).reshape(-1, self.target.size)
        parts = [self._slopes(self.points, r) for r in torch.split(points, self.together)]
        slopes, values = (torch.cat([p[i] for p in parts]).detach() for i in (0, 1))
        shape, width = offset.shape[:-1], len(self.points) - 1
        hessian = slopes[:, 1:] - slopes[:, :1]
        hessian = ((hessian + hessian.mT) / 2).reshape(*shape, width, width)
        start = slopes[:, 0].reshape(*shape, width)
        level = (values[:, 0] - self.target.baseline).reshape(shape)
        unit = torch.eye(width, dtype=offset.dtype, device=offset.device)
        precision = nbeta[:, None, None, None] * hessian + self.target.gamma * unit
        bad = ~torch.isfinite(precision).all(-1).all(-1)
        factor, failed = torch.linalg.cholesky_ex(torch.where(bad[..., None, None], unit, precision))
        failed = bad | (failed != 0)
        factor = torch.where(failed[..., None, None], unit, factor)
        mean = torch.cholesky_solve(-nbeta[:, None, None, None] * start[..., None], factor)[..., 0]
        return Quadratic(level, start, hessian, factor, mean, failed)

    def log_marginal(self, seen: Quadratic, offset: Tensor, nbeta: Tensor) -> Tensor:
        """The logarithm of the posterior with the block integrated out, up to a constant, ``(K, C)``."""
        others = offset.clone()
        others[..., self.block] = 0
        beta = nbeta[:, None]
        gain = -0.5 * beta * (seen.start * seen.mean).sum(-1)
        volume = seen.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        logarithm = -beta * seen.level - 0.5 * self.target.gamma * (others**2).sum(-1) + gain - volume
        return torch.where(seen.failed | ~torch.isfinite(logarithm), -torch.inf, logarithm)

    def draw(self, seen: Quadratic, offset: Tensor, nbeta: Tensor, generator: torch.Generator) -> Drawn:
        """The block drawn anew given the rest, and evaluated."""
        noise = torch.randn(seen.mean.shape, generator=generator, dtype=offset.dtype).to(offset.device)
        drawn = (
            seen.mean + torch.linalg.solve_triangular(seen.factor.mT, noise[..., None], upper=True)[..., 0]
        )
        new = offset.clone()
        new[..., self.block] = drawn
        excess, slope = self.target.evaluate(new)
        expected = seen.level + (drawn * (seen.start + 0.5 * (seen.hessian @ drawn[..., None])[..., 0])).sum(
            -1
        )
        rounding = torch.finfo(offset.dtype).eps * (seen.level.abs() + abs(self.target.baseline))
        misfit = nbeta[:, None] * ((excess - expected).abs() - _ROUNDINGS * rounding)
        return Drawn(new, excess, slope, ~seen.failed & (misfit <= _MISFIT))
