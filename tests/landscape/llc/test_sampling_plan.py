"""``seconds``: the time is kept, what ran can be repeated, and more time gives a smaller error."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import strati
from strati.landscape.llc.config import LLCConfig
from strati.landscape.llc.loss_structure import GradientCost
from strati.landscape.llc.sampling_plan import Amount, Clock, timed_amount


def network(kind: str) -> tuple[nn.Module, torch.Tensor, dict[str, Any]]:
    """A network that is sampled in the named way, its inputs, and the options for that."""
    torch.manual_seed(0)
    if kind == "gibbs":
        model: nn.Module = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False))
        return model, torch.randn(60, 3), {"sampler": "gibbs"}
    if kind == "exchange":
        return (
            nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)),
            torch.randn(40, 1),
            {},
        )
    width = 60 if kind == "large" else 5
    model = nn.Sequential(nn.Linear(40, width), nn.Tanh(), nn.Linear(width, 3))
    return model, torch.randn(50, 40), {"sampler": "sgld" if kind == "sgld" else "hmc"}


@pytest.fixture
def _processor_time(monkeypatch):
    """On a shared machine the processor's time stands in for that on the wall."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)


@pytest.mark.usefixtures("_processor_time")
@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("hmc", 0.7),
        ("large", 0.7),
        ("sgld", 0.7),
        ("gibbs", 0.7),
        ("exchange", 1.0),  # too little for replica exchange on most machines
        pytest.param("exchange", 10.0, marks=pytest.mark.slow),
    ],
)
def test_what_ran_in_the_time_can_be_repeated(kind, seconds):
    model, x, options = network(kind)
    timed = strati.llc(model, "behavioural-mse", x, seconds=seconds, **options)
    settings = timed.settings
    assert settings["seconds"] == seconds
    assert (settings["chains"], settings["draws"]) == (timed.chains, timed.draws)
    names = ("sampler", "nbeta", "gamma", "chains", "draws", "warmup")
    again = strati.llc(model, "behavioural-mse", x, **{name: settings[name] for name in names}, ladder=False)
    if kind in (
        "hmc",
        "large",
        "sgld",
    ):  # one temperature after the other: the first does not depend on the rest
        np.testing.assert_array_equal(timed.traces.lambda_trace(), again.traces.lambda_trace())
        assert (timed.estimate, timed.stderr) == (again.estimate, again.stderr)
    again = strati.llc(model, "behavioural-mse", x, **{name: settings[name] for name in names})
    np.testing.assert_array_equal(timed.traces.lambda_trace(), again.traces.lambda_trace())
    assert (timed.estimate, timed.stderr) == (again.estimate, again.stderr)


@pytest.mark.usefixtures("_processor_time")
@pytest.mark.parametrize("kind", ["hmc", "sgld", "gibbs"])
def test_the_time_is_kept(kind):
    """Calibration included."""
    model, x, options = network(kind)
    strati.llc(
        model, "behavioural-mse", x, chains=2, draws=10, warmup=10, **options
    )  # what is imported at first use
    began = time.process_time()
    strati.llc(model, "behavioural-mse", x, seconds=0.8, **options)
    assert 0.6 < time.process_time() - began < 1.3


@pytest.mark.usefixtures("_processor_time")
def test_more_time_is_more_draws():
    model, x, options = network("hmc")
    short, long = (
        strati.llc(model, "behavioural-mse", x, chains=8, ladder=False, seconds=s, **options)
        for s in (0.6, 4)
    )
    assert long.draws > 3 * short.draws
    assert long.estimate is not None


def test_the_error_falls_with_the_root_of_the_draws_for_every_seed():
    """Chance differences between the halves of a run must not count as drift (they did in a third of the runs)."""
    model, x, options = network("hmc")

    def errors(draws: int) -> np.ndarray:
        runs = (
            strati.llc(model, "behavioural-mse", x, chains=8, ladder=False, draws=draws, seed=s, **options)
            for s in range(6)
        )
        return np.array([run.stderr for run in runs])

    few, many = errors(200), errors(1600)
    assert many.max() < 2 * np.median(many)
    assert 0.2 < np.median(many) / np.median(few) < 0.6


def test_chains_that_have_not_mixed_go_on():
    """A limit of R-hat that the usual draws do not meet: they are doubled, up to eight times as many."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    x = torch.randn(100, 4)
    usual, strict = (
        strati.llc(
            model, "behavioural-mse", x, chains=4, ladder=False, leapfrog=4, sampler="hmc", max_rhat=limit
        )
        for limit in (1.2, 1.005)
    )
    assert strict.draws > usual.draws
    assert strict.draws % usual.draws == 0


def test_fewer_chains_where_time_is_short():
    plan = Amount(64, 100, 10, exchange=False, ladder=True)
    cost = GradientCost(1e-3, 1e-4)
    whole = timed_amount(plan, LLCConfig(), 65, 1e-3 + 64e-4, cost, 1e4)
    assert whole == plan
    short = timed_amount(plan, LLCConfig(), 65, 1e-3 + 64e-4, cost, 2.0)
    assert short.chains < 64
    assert not short.ladder
    assert timed_amount(plan, LLCConfig(chains=64), 65, 1e-3 + 64e-4, cost, 2.0).chains == 64
    slow = timed_amount(plan, LLCConfig(), 65, 10 * (1e-3 + 64e-4), cost, 10.0)
    assert slow.chains < 64


def test_a_clock_counts_down():
    clock = Clock(10.0)
    assert clock.timed
    assert 9.0 < clock.left <= 10.0
    assert not Clock().timed
