"""The draws of a sampler on (temperature, chain, draw) axes; estimates are made of them in ``llc``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from strati.core.errors import BadInputError, require

if TYPE_CHECKING:
    from torch import Tensor

    from strati.core.results import FloatArray
    from strati.landscape.llc.geometry import Surroundings


_MOST_BYTES = 2 << 30  # of kept positions
_BLOCKS = 4  # sums of positions that are kept


class Observer(Protocol):
    """Sees the positions of the chains at the temperature that was asked for, one call per kept draw."""

    def observe(self, first: int, offsets: Tensor) -> None:
        """Take the offsets ``(chains, d)`` from the given parameters of the chains from number ``first`` on."""

    def restart(self) -> None:
        """Forget all draws so far: they were part of the warm-up."""


@dataclass(frozen=True)
class Traces:
    """Draws of the sampler, kept: every estimate is recomputed from them at once.

    Attributes:
        nbeta: The temperatures, ascending, ``(K,)``.
        main: Index of the temperature that was asked for.
        gamma: Localisation.
        baseline: ``L*``.
        excess: ``L - L*``, ``(K, chain, draw)``.
        spread: ``|theta - theta*|^2``, same shape.
        controls: Zero-mean functions of the draws, ``(K, chain, draw, m)``.
        parameters: Number of parameters that were varied.
        sampler: Which sampler drew them.
        acceptance: Mean acceptance per temperature, ``(K,)``.
        gradients: Gradients of one replica that were computed in all.
        global_start: Whether the chains came down from the localisation alone, or started at the minimum.
        around: What derivatives at the given parameters say; ``None`` if that was not affordable.
        warmup: Rounds before the first kept draw.
        on_data: Whether the loss is one over data, not a plain function.
        centre: ``L - L*`` at the mean of the draws of the temperature asked for, where that was computed.
        positions: With ``keep=True`` the weights at the kept draws by the parameter's name, ``(chain, draw, ...)``.
    """

    nbeta: FloatArray
    main: int
    gamma: float
    baseline: float
    excess: FloatArray
    spread: FloatArray
    controls: FloatArray
    parameters: int
    sampler: str
    acceptance: FloatArray
    gradients: int
    global_start: bool
    around: Surroundings | None = None
    centre: float | None = None
    warmup: int = 0
    on_data: bool = False
    positions: Mapping[str, FloatArray] | None = None

    @property
    def chains(self) -> int:
        """Number of chains."""
        return int(self.excess.shape[1])

    @property
    def draws(self) -> int:
        """Kept draws per chain."""
        return int(self.excess.shape[2])

    def lowered(self, offset: float) -> Traces:
        """The same draws with a lower loss for ``L*``."""
        if offset == 0:
            return self
        return replace(self, baseline=self.baseline - offset, excess=self.excess + offset)

    def only(self, index: int) -> Traces:
        """The draws of one temperature."""
        return self._part(slice(index, index + 1))

    def first(self, count: int) -> Traces:
        """The draws of the hottest temperatures, one at least."""
        return self._part(slice(0, max(1, count)))

    def _part(self, k: slice) -> Traces:
        parts = {n: getattr(self, n)[k] for n in ("nbeta", "excess", "spread", "controls", "acceptance")}
        return replace(self, main=0, **parts)

    def lambda_trace(self, index: int | None = None) -> FloatArray:
        """``nbeta (L - L*)`` on (chain, draw) axes, at the main temperature or another."""
        k = self.main if index is None else index
        trace: FloatArray = self.nbeta[k] * self.excess[k]
        return trace

    def to_arviz(self) -> Any:
        """The main temperature's draws as an ``arviz.InferenceData``.

        Raises:
            MissingExtraError: arviz is not installed.
        """
        return require("arviz", "arviz", "converting traces").from_dict(posterior=self.posterior())

    def posterior(self) -> dict[str, FloatArray]:
        """The main temperature's draws by name on (chain, draw) axes, as ``arviz.from_dict(posterior=...)`` takes them.

        ``llc``, ``loss`` and ``distance``, and with ``keep=True`` the weights. SGLD keeps the weights of every fifth
        draw, and the other traces are thinned alike.
        """
        thin = 1
        if self.positions:
            count = next(iter(self.positions.values())).shape[1]
            thin = -(-self.draws // count)
        scalars = {
            "llc": self.lambda_trace()[:, ::thin],
            "loss": self.baseline + self.excess[self.main][:, ::thin],
            "distance": np.sqrt(self.spread[self.main][:, ::thin]),
        }
        return {**scalars, **(self.positions or {})}


class KeptPositions:
    """An :class:`Observer` that keeps every position.

    Args:
        theta: The given parameters.
        most: Bytes that the positions may take.
    """

    def __init__(self, theta: Tensor, most: int = _MOST_BYTES) -> None:
        self._theta, self._most = theta, most
        self.restart()

    def restart(self) -> None:
        """Forget all draws so far."""
        self._draws: dict[int, list[Tensor]] = {}
        self._bytes = 0

    def observe(self, first: int, offsets: Tensor) -> None:
        """Keep the positions of some chains.

        Raises:
            BadInputError: They take too much memory.
        """
        self._bytes += offsets.nbytes
        if self._bytes > self._most:
            size = f"{offsets.shape[-1]:,} parameters take more than {self._most / 2**30:.0f} GB"
            raise BadInputError("keep", f"the draws of {size}; give fewer draws, or vary fewer layers")
        self._draws.setdefault(first, []).append(offsets.detach().to("cpu", copy=True))

    def by_name(self, split: Callable[[Tensor], Mapping[str, Tensor]]) -> dict[str, FloatArray]:
        """The weights of each parameter on (chain, draw, ...) axes."""
        import torch

        chains = [torch.stack(self._draws[first], dim=1) for first in sorted(self._draws)]
        draws = torch.cat(chains) + self._theta.cpu()
        return {
            name: draws[..., place].double().numpy()
            for name, place in split(torch.arange(draws.shape[-1])).items()
        }


class PositionSums:
    """Sums of all chains' positions over at most four blocks of steps: the mean after any step costs little memory.

    Args:
        length: Steps of a block, at first.

    Examples:
        >>> import torch
        >>> sums = PositionSums(2)
        >>> for step in range(12):
        ...     sums.add(step, torch.tensor([[float(step)], [float(step)]]))
        >>> float(sums.mean_after(4))  # of 4 to 11
        7.5
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._sums: dict[int, Tensor] = {}
        self._counts: dict[int, int] = {}

    def add(self, step: int, offset: Tensor) -> None:
        """Count the chains' positions at a step."""
        while step // self._length >= _BLOCKS:
            self._length *= 2
            for block in sorted(self._sums):
                total, count = self._sums.pop(block), self._counts.pop(block)
                self._put(block // 2, total, count)
        self._put(step // self._length, offset.sum(0), len(offset))

    def _put(self, block: int, total: Tensor, count: int) -> None:
        if block in self._sums:
            self._sums[block] += total
        else:
            self._sums[block] = total
        self._counts[block] = self._counts.get(block, 0) + count

    def mean_after(self, step: int) -> Tensor:
        """The mean over the blocks that begin at a step or later, or over the last one."""
        blocks = [b for b in self._sums if b * self._length >= step] or [max(self._sums)]
        total = self._sums[blocks[0]].clone()
        for block in blocks[1:]:
            total += self._sums[block]
        return total / sum(self._counts[block] for block in blocks)
