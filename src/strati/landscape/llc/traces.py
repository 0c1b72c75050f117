"""Draws of a sampler on (temperature, chain, draw) axes, their diagnostics, means with control variates, and files.

R-hat, effective sample size and the error of a mean are those of Vehtari, Gelman, Simpson, Carpenter and Buerkner,
Bayesian Analysis 16 (2021), 667-718, as in ArviZ, against which they are tested.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from scipy.special import ndtri
from scipy.stats import rankdata

from strati.core.errors import BadInputError
from strati.core.plugins import require
from strati.core.results import jsonable
from strati.landscape.llc import tuning
from strati.landscape.llc.config import Sampler

if TYPE_CHECKING:
    from torch import Tensor

    from strati.core.results import FloatArray
    from strati.landscape.llc.geometry import LocalGeometry
    from strati.landscape.llc.sampling_plan import SamplingPlan


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
        step: Step of SGLD, set or calibrated.
        plan: What was decided before sampling.
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
    around: LocalGeometry | None = None
    centre: float | None = None
    warmup: int = 0
    on_data: bool = False
    positions: Mapping[str, FloatArray] | None = None
    step: float | None = None
    plan: SamplingPlan | None = None

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

    def __init__(self, theta: Tensor, most: int = tuning.MOST_BYTES) -> None:
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
        while step // self._length >= tuning.POSITION_BLOCKS:
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


def rhat(trace: FloatArray) -> float | None:
    """Rank-normalised split R-hat: the larger of the bulk's and the folded (scale) one; 1 when mixed.

    ``None`` for fewer than four draws or a trace that is not finite; a trace that never moves gives
    infinity (chains stuck in different places) or 1 (all in one place).

    Examples:
        >>> moving = np.random.default_rng(0).normal(size=(4, 500))
        >>> rhat(moving) < 1.01 < rhat(moving + np.arange(4)[:, None])
        True
    """
    if trace.shape[1] < 4 or not np.isfinite(trace).all():
        return None
    split = _split(trace)
    return max(
        _plain_rhat(_normal_scores(split)), _plain_rhat(_normal_scores(np.abs(split - np.median(split))))
    )


def ess(trace: FloatArray, *, rank: bool = True) -> float | None:
    """Effective sample size: of the ranks (bulk), or of the values themselves for the error of a mean.

    ``None`` for fewer than four draws or a trace that is not finite.

    Examples:
        >>> 1000 < ess(np.random.default_rng(0).normal(size=(4, 500))) < 3000
        True
    """
    if trace.shape[1] < 4 or not np.isfinite(trace).all():
        return None
    split = _split(trace)
    return _plain_ess(_normal_scores(split) if rank else split)


def standard_error(trace: FloatArray) -> float | None:
    """Monte Carlo standard error of the mean: ``sd / sqrt(ess)``, never below what the chains' means say.

    Examples:
        >>> abs(standard_error(np.random.default_rng(0).normal(size=(4, 2500))) - 0.01) < 0.003
        True
    """
    size = ess(trace, rank=False)
    if size is None:
        return None
    within = float(trace.std(ddof=1)) / math.sqrt(size)
    chains = trace.shape[0]
    # Few chains estimate the spread of their means badly: only many chains may overrule the autocorrelation.
    between = float(trace.mean(axis=1).std(ddof=1)) / math.sqrt(chains) if chains >= 8 else 0.0
    return max(within, between)


def _split(trace: FloatArray) -> FloatArray:
    half = trace.shape[1] // 2
    return np.concatenate([trace[:, :half], trace[:, -half:]])


def _normal_scores(trace: FloatArray) -> FloatArray:
    ranks = rankdata(trace, method="average").reshape(trace.shape)
    scores: FloatArray = ndtri((ranks - 0.375) / (trace.size + 0.25))
    return scores


def _plain_rhat(trace: FloatArray) -> float:
    draws = trace.shape[1]
    between = draws * float(trace.mean(axis=1).var(ddof=1))
    within = float(trace.var(axis=1, ddof=1).mean())
    if within <= 0:
        return 1.0 if between <= 0 else math.inf
    return math.sqrt((between / within + draws - 1) / draws)


def _plain_ess(trace: FloatArray) -> float:
    chains, draws = trace.shape
    if np.ptp(trace) < np.finfo(float).resolution * np.abs(trace).max(initial=0.0):
        return float(trace.size)
    covariance = _autocovariance(trace)
    mean_variance = covariance[:, 0].mean() * draws / (draws - 1)
    pooled = mean_variance * (draws - 1) / draws
    if chains > 1:
        pooled += trace.mean(axis=1).var(ddof=1)
    if pooled <= 0:
        return float(trace.size)
    correlation = 1 - (mean_variance - covariance.mean(axis=0)) / pooled
    correlation[0] = 1.0
    # Geyer: sums of neighbouring pairs, as long as they are positive, made monotone. As in arviz, the
    # odd term after the last positive pair improves anti-correlated chains.
    last = 1
    pairs = [correlation[0] + correlation[1]]
    while last + 2 < draws - 1:
        pair = correlation[last + 1] + correlation[last + 2]
        if pair <= 0:
            break
        pairs.append(min(pair, pairs[-1]))
        last += 2
    tail = max(float(correlation[last + 1]), 0.0) if last + 1 < draws else 0.0
    tau = -1 + 2 * float(np.sum(pairs)) + tail
    tau = max(tau, 1 / math.log10(trace.size))
    return trace.size / tau


def _autocovariance(trace: FloatArray) -> FloatArray:
    """Biased autocovariance of every chain at every lag, by fast Fourier transform."""
    draws = trace.shape[1]
    length = 1 << (2 * draws - 1).bit_length()
    centred = trace - trace.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, n=length, axis=1)
    full = np.fft.irfft(np.abs(spectrum) ** 2, n=length, axis=1)[:, :draws]
    result: FloatArray = full / draws
    return result


class ChainMean(NamedTuple):
    """A mean over chains and its standard error."""

    value: float
    stderr: float


def control_variate_mean(traces: Traces, index: int) -> ChainMean:
    """Return the mean of ``nbeta (L - L*)`` at one temperature with a conservative standard error.

    Control variates of mean zero are fitted to batch means of the chains, so that slow movement counts as such; where
    they do not lower the error the plain mean is returned. The error is never below what the draws allow:

    - control variates may lower it by a factor of 12 at most;
    - with thousands of parameters short chains agree with one another before they are stationary, so it is at least
      that of one independent draw in 25;
    - chains that start at the minimum approach their mean slowly: a significant difference between the halves of the
      draws is about what the mean has still to move, and is added in quadrature.
    """
    trace = traces.lambda_trace(index)
    if not np.isfinite(trace).all():
        return ChainMean(math.nan, math.nan)
    plain = standard_error(trace)
    if plain is None:
        return ChainMean(float(trace.mean()), math.nan)
    adjusted = _adjusted(traces, index)
    error = plain
    if adjusted is not None:
        reduced = standard_error(adjusted)
        if reduced is not None and reduced < plain:
            trace, error = adjusted, reduced
    stderr = max(error, plain / tuning.MOST_GAIN)
    if not traces.global_start:
        if traces.sampler == Sampler.HMC and traces.parameters > tuning.DENSE_LIMIT:
            stderr = max(
                stderr, float(traces.lambda_trace(index).std()) * math.sqrt(tuning.SLOWEST_LARGE / trace.size)
            )
        half = trace.shape[1] // 2
        change = abs(float(trace[:, half:].mean() - trace[:, :half].mean()))
        if change > tuning.DRIFT_ERRORS * 2 * error:  # 2 error is the standard error of the change
            stderr = math.hypot(stderr, change)
    return ChainMean(float(trace.mean()), stderr)


def _adjusted(traces: Traces, index: int) -> FloatArray | None:
    """Return the trace minus its fitted control variates, or ``None`` where they cannot be fitted."""
    trace, controls = traces.lambda_trace(index), traces.controls[index]
    slow = rhat(traces.spread[index])
    # Control variates inherit the slowness of the distance: they help only where the distance itself has mixed.
    if slow is None or slow > tuning.SLOW_RHAT:
        return None
    batches = max(1, trace.shape[1] // 40)
    means = trace.shape[0] * batches
    if means < 4 * controls.shape[-1] + 4 and controls.shape[-1] > traces.parameters:
        controls = controls[..., : traces.parameters].sum(-1, keepdims=True)  # too many to fit: use their sum
    count = controls.shape[-1]
    if count == 0 or means < 4 * count + 4:
        return None
    keep = trace.shape[1] // batches * batches
    y = trace[:, :keep].reshape(means, -1).mean(1)
    x = controls[:, :keep].reshape(means, -1, count).mean(1)
    coefficients, *_ = np.linalg.lstsq(x - x.mean(0), y - y.mean(), rcond=1e-8)
    adjusted: FloatArray = trace - controls @ coefficients
    return adjusted


TRACE_ARRAYS = ("nbeta", "excess", "spread", "controls", "acceptance")


def save_traces(traces: Traces, path: str | Path) -> None:
    """Write traces as netCDF: ``posterior`` as ArviZ expects it, all arrays of the samplers in ``constant_data``.

    Raises:
        MissingExtraError: arviz is not installed.

    Examples:
        >>> import tempfile, torch
        >>> from strati import learning_coefficient
        >>> from strati.landscape.llc.llc import load_traces
        >>> result = learning_coefficient(lambda w: (w**2).sum(), torch.zeros(1), chains=4, draws=50)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_traces(result.traces, Path(folder) / "draws.nc")
        ...     again = load_traces(Path(folder) / "draws.nc")
        >>> bool((again.excess == result.traces.excess).all())
        True
    """
    arviz = require("arviz", "arviz", "saving draws")
    arrays = {name: getattr(traces, name) for name in TRACE_ARRAYS}
    names = [
        field.name for field in dataclasses.fields(traces) if field.name not in (*TRACE_ARRAYS, "positions")
    ]
    scalars = jsonable({name: getattr(traces, name) for name in names})
    stored = arviz.from_dict(
        posterior=traces.posterior(), constant_data=arrays, attrs={"strati": json.dumps(scalars)}
    )
    stored.to_netcdf(str(path), engine="h5netcdf")
