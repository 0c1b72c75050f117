"""Whether the temperatures of a ladder agree: draws of one, reweighted, must give the mean of the next colder one.

Chains that come down a ladder and get caught on the way agree with one another for a long time: R-hat and errors see
little of it. But what the hotter draws say about the colder temperature does not depend on whether the colder chains
found their way, so the difference, summed down the ladder, shows where they lost it. So does the distance from the
minimum, which mixes later than the loss: soon where the chains started at the minimum, and only where they no longer
move at all where a population brought them down, each part of a valley with its share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strati.landscape.llc.config import Sampler
from strati.landscape.llc.diagnostics import rhat

if TYPE_CHECKING:
    from strati.landscape.llc.traces import Traces

_STANDARD_ERRORS = 5.0  # it is looked at after every temperature
_SPREAD_RHAT = 1.2  # beyond, the places that the chains are at are those of their way down alone
_STARTED_RHAT = (
    1.05  # the same for chains that started at the minimum: they have to get there by their own moves
)
_SHARE = 0.01  # of the value: smaller differences do not matter


def agreeing(traces: Traces) -> int:
    """How many temperatures, from the hottest on, have mixed and agree with those before; all where it cannot be told.

    Examples:
        >>> import torch
        >>> from strati.landscape.llc.config import LLCConfig
        >>> from strati.landscape.llc.llc import draw
        >>> point = torch.zeros(2, dtype=torch.float64)
        >>> traces = draw(lambda w: (w**2).sum(), point, LLCConfig(chains=8, draws=50, coldest=1e6, ladder=True))
        >>> agreeing(traces) == len(traces.nbeta)
        True
    """
    count = len(traces.nbeta)
    if traces.sampler not in (Sampler.HMC, Sampler.TEMPERED) or count < 2 or traces.chains < 4:
        return count
    largest = _SPREAD_RHAT if traces.global_start else _STARTED_RHAT
    apart = np.array([(rhat(spread) or np.inf) > largest for spread in traces.spread])
    if traces.global_start:
        apart[1:] |= _disagree(traces)
    lost = apart[:-1] & apart[1:]  # one alone may be chance
    return max(1, int(lost.argmax())) if lost.any() else count - int(apart[-1])


def _disagree(traces: Traces) -> np.ndarray:
    """Whether each temperature but the first differs from what all hotter ones say, beyond chance."""
    every_chain = _differences(traces, None)
    parts = np.stack([_differences(traces, c) for c in range(traces.chains)])
    value = np.cumsum(every_chain)
    left_out = np.cumsum(parts, axis=1)
    chains = traces.chains
    error = np.sqrt((chains - 1) / chains * ((left_out - left_out.mean(0)) ** 2).sum(0))
    size = np.abs(traces.nbeta[1:] * traces.excess[1:].mean((1, 2)))
    disagree: np.ndarray = ~(np.abs(value) <= np.maximum(_STANDARD_ERRORS * error, _SHARE * size))
    return disagree


def _differences(traces: Traces, without: int | None) -> np.ndarray:
    """``nbeta <L>`` of each temperature but the first, less what the next hotter one predicts."""
    keep = np.arange(traces.chains) != (-1 if without is None else without)
    excess = traces.excess[:, keep].reshape(len(traces.nbeta), -1)
    step = np.diff(traces.nbeta)[:, None]
    hot, cold = excess[:-1], excess[1:]
    weight = np.exp(-step * (hot - hot.min(axis=1, keepdims=True)))
    predicted = (weight * hot).sum(1) / weight.sum(1)
    differences: np.ndarray = traces.nbeta[1:] * (cold.mean(1) - predicted)
    return differences
