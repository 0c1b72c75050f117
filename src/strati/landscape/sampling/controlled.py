"""Averages over chains with noise taken out by functions of known mean zero, and errors that allow for what it hid."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from strati.landscape.sampling.config import DENSE_LIMIT, Sampler
from strati.landscape.sampling.diagnostics import rhat, standard_error

if TYPE_CHECKING:
    from strati.landscape.sampling.traces import Traces

_SLOW_RHAT = 1.03
# Controls take out so much noise at most: of places that no chain has seen they know nothing.
_MOST_GAIN = 12.0
# Draws per independent one that are assumed at least where thousands of parameters move: chains that start together and
# are a few hundred draws long do not show how slow they are. Measured over 1,500 draws: 19.
_SLOWEST = 25.0


def controlled_mean(traces: Traces, index: int) -> tuple[float, float]:
    """Mean of ``nbeta (L - L*)`` at one temperature with noise taken out, and its standard error.

    The zero-mean controls are fitted to batch means of the chains, so that slow movement counts as what it is;
    where that does not lower the error the plain mean stands.
    """
    trace = traces.lambda_trace(index)
    if not np.isfinite(trace).all():
        return math.nan, math.nan
    found = standard_error(trace)
    plain = float(trace.mean()), math.nan if found is None else found
    controls = traces.controls[index]
    batches = max(1, trace.shape[1] // 40)
    slow = rhat(traces.spread[index])
    # Controls pass the slowness of the distance on: they help only where the distance itself has mixed.
    if slow is None or slow > _SLOW_RHAT:
        return plain
    if trace.shape[0] * batches < 4 * controls.shape[-1] + 4 and controls.shape[-1] > traces.parameters:
        controls = controls[..., : traces.parameters].sum(
            -1, keepdims=True
        )  # too many to fit: their sum is one
    if controls.shape[-1] == 0 or trace.shape[0] * batches < 4 * controls.shape[-1] + 4:
        return plain
    keep = trace.shape[1] // batches * batches
    y = trace[:, :keep].reshape(trace.shape[0] * batches, -1).mean(1)
    x = controls[:, :keep].reshape(trace.shape[0] * batches, -1, controls.shape[-1]).mean(1)
    coefficients, *_ = np.linalg.lstsq(x - x.mean(0), y - y.mean(), rcond=1e-8)
    adjusted = trace - controls @ coefficients
    error = standard_error(adjusted)
    if error is None or not error < plain[1]:
        return plain
    return float(adjusted.mean()), error


def honest_error(traces: Traces, index: int, error: float) -> float:
    """A standard error that controls have not made smaller than the draws allow, and that holds what still drifts.

    Chains that start at the minimum approach their mean slowly. What the halves of the draws differ by, beyond chance,
    is about what the average has still to go, or less. With thousands of parameters short chains agree with one another
    before they have got there: the error is at least that of one independent draw in 25.
    """
    trace = traces.lambda_trace(index)
    plain = standard_error(trace) or 0.0
    error = max(error, plain / _MOST_GAIN)
    if traces.global_start or not np.isfinite(trace).all():
        return error
    if traces.sampler == Sampler.HMC and traces.parameters > DENSE_LIMIT:
        error = max(error, float(trace.std()) * math.sqrt(_SLOWEST / trace.size))
    half = trace.shape[1] // 2
    change = trace[:, half:].mean(1) - trace[:, :half].mean(1)
    beyond = float(change.mean()) ** 2 - (2 * plain) ** 2
    return math.sqrt(error**2 + max(0.0, beyond))
