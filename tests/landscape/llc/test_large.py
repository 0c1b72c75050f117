"""Above 2,500 parameters: values against the closed form, warnings, and what still drifts is part of the error."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import strati
from strati import embedded
from strati.landscape.llc.config import LLCConfig
from strati.landscape.llc.estimate import estimate
from strati.landscape.llc.llc import draw
from strati.landscape.llc.posterior import default_gamma
from strati.landscape.llc.scales import closed_form


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2, 3))])
def test_many_parameters_against_the_closed_form(seed):
    """A linear map of 60 inputs over two decades to 50 outputs: exactly quadratic, 3,000 parameters."""
    torch.manual_seed(0)
    model = nn.Linear(60, 50, bias=False)
    x = torch.randn(200, 60) * torch.logspace(0, -2, 60)
    result = strati.llc(model, "behavioural-mse", x, sampler="hmc", seed=seed)
    h = np.linalg.eigvalsh(2 * (x.T @ x / 200).double().numpy())
    exact = 50 * closed_form(h, result.nbeta, result.gamma)
    assert result.estimate is not None
    assert abs(result.estimate - exact) < 3 * result.stderr < 0.05 * exact  # errors differ between seeds
    trace = result.traces.lambda_trace()
    assert result.stderr >= 0.999 * trace.std() * np.sqrt(25 / trace.size)  # what short chains do not show
    assert result.warnings == ()
    size = sum(float((p.detach() ** 2).sum()) for p in model.parameters())
    assert result.gamma == pytest.approx(3000 / size, rel=1e-5)


def test_the_localisation_has_no_step_in_the_number_of_parameters():
    sizes = [1, 50, 1000, 2499, 2500, 2501, 5000, 100_000]
    gammas = [default_gamma(torch.full((size,), 0.1)) for size in sizes]
    assert gammas == sorted(gammas)
    assert gammas[0] == 1.0 and gammas[-1] == pytest.approx(100.0)
    assert gammas[5] / gammas[3] < 1.01


def test_a_gamma_that_is_set_is_used():
    torch.manual_seed(0)
    model = nn.Linear(60, 50, bias=False)
    x = torch.randn(20, 60)
    result = strati.llc(model, "behavioural-mse", x, gamma=40.0, chains=2, draws=10, warmup=10, sampler="hmc")
    assert result.gamma == 40.0


def test_what_drifts_is_part_of_the_error():
    """A trend that is too small to refuse, 4 % between the halves, and too large for the error of the mean."""
    settings = LLCConfig(sampler="hmc", chains=16, draws=400, ladder=False, leapfrog=8)
    scales = torch.logspace(-1, 1, 12, dtype=torch.float64)
    traces = draw(
        lambda w: (scales * w**2).sum() + (w**4).sum(), torch.zeros(12, dtype=torch.float64), settings
    )
    steady = estimate(traces)
    trend = np.linspace(1.04, 0.96, traces.draws)
    moving = estimate(dataclasses.replace(traces, excess=traces.excess * trend))
    assert moving.estimate is not None
    assert moving.stderr > 3 * steady.stderr and moving.stderr > 0.02 * moving.estimate


@pytest.mark.slow
def test_the_default_budget_covers_a_long_run_or_says_that_it_has_not_converged():
    """3,010 parameters trained on the digits, 300 rows: 15 times the draws after 12 times the warm-up, in 2 minutes."""
    data = np.load(embedded.path("digits.npz"))
    x, y = torch.as_tensor(data["x"]).float(), torch.as_tensor(data["y"]).long()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 10))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    long = strati.llc(model, "behavioural-mse", x[:300], draws=1500, warmup=720, seed=1000)
    assert long.estimate is not None and long.stderr < 0.015 * long.estimate
    for seed in range(3):
        short = strati.llc(model, "behavioural-mse", x[:300], seed=seed)
        if short.estimate is None:
            assert "mixed" in short.reason or "way" in short.reason or "independent" in short.reason
        else:
            assert abs(short.estimate - long.estimate) < 3 * np.hypot(short.stderr, long.stderr)
