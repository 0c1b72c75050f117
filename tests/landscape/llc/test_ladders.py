"""Ladders of temperatures against exact integrals, and what an extrapolation from few of them can miss."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from strati.landscape.llc.config import LLCConfig
from strati.landscape.llc.estimate import estimate
from strati.landscape.llc.extrapolate import Limit, consistent_rungs, extrapolate
from strati.landscape.llc.llc import sample
from strati.landscape.llc.traces import control_variate_mean
from strati.landscape.objective import objective
from strati_reproductions.llc_cases.known_cases import Bumps

X = np.linspace(-2, 2, 21)


def two_units(nbetas: np.ndarray, size: int = 140) -> np.ndarray:
    """``lambda(nbeta)`` of ``a1 tanh(b1 x) + a2 tanh(b2 x)`` with true function 0, gamma = 1: an integral over b1, b2.

    The outer weights are Gaussian given the inner ones, ``det(1 + 2 nbeta G(b))^(-1/2)``; the determinant by Lagrange's
    identity, on a grid of ``ln b1`` and ``ln ln (b2 / b1)`` that resolves the ridge of equal units.
    """
    s, e = (np.linspace(np.log(low), np.log(high), size) for low, high in ((1e-7, 7.0), (1e-9, 17.0)))
    first = np.exp(s)[:, None] * np.ones(size)
    second = np.minimum(np.exp(s[:, None] + np.exp(e)), 1e3)
    t, u = (np.tanh(b[..., None] * X) for b in (first, second))
    i, j = np.triu_indices(len(X), 1)
    minors = ((t[..., i] * u[..., j] - t[..., j] * u[..., i]) ** 2).sum(-1) / len(X) ** 2
    trace = ((t**2).sum(-1) + (u**2).sum(-1)) / len(X)
    measure = np.log(first) + np.log(second) + e - (first**2 + second**2) / 2
    values = []
    for k in 2 * nbetas:
        determinant = 1 + k * trace + k * k * minors
        log_weight = measure - 0.5 * np.log(determinant)
        weight = np.exp(log_weight - log_weight.max())
        found = (k * trace + 2 * k * k * minors) / determinant / 2
        values.append(float((weight * found).sum() / weight.sum()))
    return np.array(values)


@pytest.fixture(scope="module")
def traces():
    model = Bumps([0.0, 0.0], [0.0, 0.0])
    loss = objective(model, "behavioural-mse", torch.tensor(X)[:, None], dtype=torch.float64)
    return sample(loss, loss.flat.theta, LLCConfig(chains=16, draws=120, seed=1))


def test_the_grid_is_fine_enough():
    nbetas = np.array([1e2, 1e6, 1e10])
    assert np.abs(two_units(nbetas) - two_units(nbetas, 100)).max() < 1e-3
    assert abs(two_units(np.array([1e13]))[0] - 2 / 3) < 2e-3  # Aoyagi and Watanabe


def test_cold_temperatures_keep_the_shares_of_a_valleys_parts(traces):
    """Chains caught on their way down read 0.73 at 2e4 and 0.9 at 1e9, for 0.67; 4 errors over a dozen decades."""
    assert traces.nbeta[-1] >= 1e11 and consistent_rungs(traces) >= len(traces.nbeta) - 2
    z = []
    for k, exact in enumerate(two_units(traces.nbeta)):
        value, error = control_variate_mean(traces, k)
        z.append((value - exact) / (error + 0.005))
    assert np.abs(z).max() < 4 and abs(np.mean(z)) < 1.5


def test_two_units_with_true_function_zero_have_their_limit(traces):
    result = estimate(traces)
    assert (
        result.asymptotic is not None and abs(result.asymptotic - 2 / 3) < 2 * result.asymptotic_stderr < 0.25
    )


@pytest.mark.parametrize("offsets", [(0.5, 8.0), (1.0, 15.0), (0.5, 20.0), (3.0, 3.5)])
def test_logarithms_with_unlike_offsets_are_within_the_error(offsets):
    """Multiplicity 3, so two roots: five to seven temperatures of a deep linear network's ladder."""
    for count in (5, 7):
        t = np.log(14.7) + np.log(10.0) * np.arange(count)
        y = 2.0 - sum(1 / (t + c) for c in offsets)
        limit = extrapolate(np.exp(t), y, np.full(count, 0.006))
        assert not isinstance(limit, Limit) or abs(limit.value - 2.0) < 2 * limit.stderr


def test_an_error_is_never_far_below_the_way_that_was_bridged():
    t = np.linspace(3, 25, 16)
    limit = extrapolate(np.exp(t), 0.5 - 1 / (t + 1), np.full(16, 1e-5), hottest=1.0)
    assert limit.stderr >= 0.1 * abs(limit.value - (0.5 - 1 / 26))


def test_chains_that_started_at_the_minimum_must_have_spread(traces):
    """Without a way down from the localisation, slow distances mean that the loss is not that of the whole valley."""
    started = dataclasses.replace(traces, global_start=False)
    apart = started.spread.copy()
    apart[4:] *= 1 + 0.5 * np.arange(traces.chains)[None, :, None]
    assert consistent_rungs(dataclasses.replace(started, spread=apart)) <= 4
