"""Control-variate means over chains, with conservative standard errors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from strati.landscape.llc.config import DENSE_LIMIT, Sampler
from strati.landscape.llc.diagnostics import rhat, standard_error

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.landscape.llc.traces import Traces

_SLOW_RHAT = 1.03
# Control variates reduce the error by this factor at most: they know nothing of regions that no chain visited.
_MOST_GAIN = 12.0
# Least number of draws per independent draw that is assumed with thousands of parameters: chains that start together
# and are a few hundred draws long do not show their autocorrelation time. Measured over 1,500 draws: 19.
_SLOWEST = 25.0
# Standard errors by which the halves of the draws must differ to count as drift; 0.3 % of stationary chains do.
_DRIFT = 3.0


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
    stderr = max(error, plain / _MOST_GAIN)
    if not traces.global_start:
        if traces.sampler == Sampler.HMC and traces.parameters > DENSE_LIMIT:
            stderr = max(stderr, float(traces.lambda_trace(index).std()) * math.sqrt(_SLOWEST / trace.size))
        half = trace.shape[1] // 2
        change = abs(float(trace[:, half:].mean() - trace[:, :half].mean()))
        if change > _DRIFT * 2 * error:  # 2 error is the standard error of the change
            stderr = math.hypot(stderr, change)
    return ChainMean(float(trace.mean()), stderr)


def _adjusted(traces: Traces, index: int) -> FloatArray | None:
    """Return the trace minus its fitted control variates, or ``None`` where they cannot be fitted."""
    trace, controls = traces.lambda_trace(index), traces.controls[index]
    slow = rhat(traces.spread[index])
    # Control variates inherit the slowness of the distance: they help only where the distance itself has mixed.
    if slow is None or slow > _SLOW_RHAT:
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
