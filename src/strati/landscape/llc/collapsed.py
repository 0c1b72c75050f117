"""Moves of some parameters with others, in which the loss is quadratic, integrated out.

At a singular minimum the valleys that two layers make together are long, curved and, when cold, too narrow for any
trajectory. But where the loss is quadratic in a block ``q`` given the rest ``r`` (the last layer of a network under
squared errors, one factor of a product), the integral of the posterior over ``q`` is known in closed form, and wide:
``r`` moves in it by Metropolis steps of all sizes, and ``q`` is then drawn from its Gaussian. Both together leave
the posterior invariant.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from strati.landscape.llc.conditional import Conditional, Quadratic
from strati.landscape.llc.posterior import LocalPosterior

_SIZES = (-5.0, 0.3)  # decades of a step, in widths of the localisation
_STRETCHES = (-2.0, 0.6)  # decades of the logarithm of a factor


class CollapsedMoves:
    """Moves of the parameters outside of a quadratic block, which is integrated out.

    Examples:
        >>> from strati.landscape.llc.posterior import local_posterior
        >>> target = local_posterior(lambda w: w[0] ** 2 * w[1] ** 4, torch.zeros(2, dtype=torch.float64), 1.0)
        >>> moves = CollapsedMoves(target, torch.Generator().manual_seed(0))
        >>> start = torch.zeros(1, 5, 2, dtype=torch.float64)
        >>> offset, excess, slope = moves.move(start, *target.evaluate(start), start.new_tensor([1e4]))
        >>> torch.equal(excess, target.evaluate(offset)[0])
        True
    """

    def __init__(self, target: LocalPosterior, generator: torch.Generator) -> None:
        self.target, self.generator = target, generator
        self.conditional = Conditional(target, target.quadratic)
        others = [i for i in range(target.size) if i not in target.quadratic]
        self.rest = torch.tensor(others, device=target.theta.device)
        self.round = 0

    def move(
        self, offset: Tensor, excess: Tensor, slope: Tensor, nbeta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One move of every replica ``(K, C, d)``: offsets, excess losses and slopes."""
        others = offset[..., self.rest]
        self.round += 1
        kinds = (
            (self._stretched, self._shifted, self._parted)
            if len(self.rest) > 1
            else (self._stretched, self._shifted)
        )
        proposed, jacobian = kinds[self.round % len(kinds)](others)
        new = offset.clone()
        new[..., self.rest] = proposed
        both = torch.cat([offset, new], dim=1)
        quadratic = self.conditional.look(both, nbeta)
        before, after = self.conditional.log_marginal(quadratic, both, nbeta).chunk(2, dim=1)
        log_ratio = after - before + jacobian
        moved = Quadratic(*(part.chunk(2, dim=1)[1] for part in quadratic))
        drawn = self.conditional.draw(moved, new, nbeta, self.generator)
        accept = (self._uniform(*log_ratio.shape).log() < log_ratio) & drawn.good
        wide = accept[..., None]
        return (
            torch.where(wide, drawn.offset, offset),
            torch.where(accept, drawn.excess, excess),
            torch.where(wide, drawn.slope, slope),
        )

    def _stretched(self, rest: Tensor) -> tuple[Tensor, Tensor]:
        """Some coordinates times factors of any size and sign."""
        shape = rest.shape
        mask = self._uniform(*shape) < self._uniform(*shape[:-1], 1)
        exponent = self._normal(*shape) * self._decades(_STRETCHES, *shape[:-1], 1) * mask
        sign = 1.0 - 2.0 * (self._uniform(*shape) < 0.25).to(rest.dtype)
        return rest * torch.exp(exponent) * sign, exponent.sum(-1)

    def _shifted(self, rest: Tensor) -> tuple[Tensor, Tensor]:
        """Some coordinates moved by steps of any size."""
        shape = rest.shape
        mask = self._uniform(*shape) < self._uniform(*shape[:-1], 1)
        size = self._decades(_SIZES, *shape[:-1], 1) / math.sqrt(self.target.gamma)
        return rest + self._normal(*shape) * size * mask, rest.new_zeros(shape[:-1])

    def _parted(self, rest: Tensor) -> tuple[Tensor, Tensor]:
        """One parameter nearer to, or farther from, another or its negative: units that do the same share a valley."""
        shape = rest.shape
        place = rest + self.target.theta[self.rest]
        first = (self._uniform(*shape[:-1]) * shape[-1]).long().clamp(max=shape[-1] - 1)
        apart = 1 + (self._uniform(*shape[:-1]) * (shape[-1] - 1)).long().clamp(max=shape[-1] - 2)
        one_place, other = first[..., None], ((first + apart) % shape[-1])[..., None]
        sign = 1.0 - 2.0 * (self._uniform(*shape[:-1], 1) < 0.5).to(rest.dtype)
        gap = place.gather(-1, one_place) - sign * place.gather(-1, other)
        exponent = self._normal(*shape[:-1], 1) * self._decades(_STRETCHES, *shape[:-1], 1)
        return rest.scatter_add(-1, one_place, gap * torch.expm1(exponent)), exponent[..., 0]

    def _decades(self, between: tuple[float, float], *shape: int) -> Tensor:
        return 10.0 ** (between[0] + (between[1] - between[0]) * self._uniform(*shape))

    def _normal(self, *shape: int) -> Tensor:
        theta = self.target.theta
        return torch.randn(*shape, generator=self.generator, dtype=theta.dtype).to(theta.device)

    def _uniform(self, *shape: int) -> Tensor:
        theta = self.target.theta
        return torch.rand(*shape, generator=self.generator, dtype=theta.dtype).to(theta.device)
