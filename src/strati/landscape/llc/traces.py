"""The draws of a sampler on (temperature, chain, draw) axes; estimates are made of them in ``llc``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from strati.core.errors import require

if TYPE_CHECKING:
    from torch import Tensor

    from strati.core.results import FloatArray
    from strati.landscape.llc.geometry import Surroundings


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
        arviz = require("arviz", "arviz", "converting traces")
        return arviz.from_dict(
            posterior={
                "llc": self.lambda_trace(),
                "loss": self.baseline + self.excess[self.main],
                "distance": np.sqrt(self.spread[self.main]),
            }
        )


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
        chosen = [b for b in self._sums if b * self._length >= step] or [max(self._sums)]
        total = self._sums[chosen[0]].clone()
        for block in chosen[1:]:
            total += self._sums[block]
        return total / sum(self._counts[block] for block in chosen)
