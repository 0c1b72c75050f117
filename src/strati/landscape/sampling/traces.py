"""The draws of a sampler on (temperature, chain, draw) axes; estimates are made of them in ``llc``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.errors import require

if TYPE_CHECKING:
    from strati.landscape.sampling.surroundings import Surroundings
    from strati.types import FloatArray


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
        centre: ``L - L*`` at the mean of the draws of the temperature asked for, where that was computed.
        gamma_from_weights: Whether the localisation was chosen from the size of the weights.
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
    gamma_from_weights: bool = False

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
