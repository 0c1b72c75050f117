"""Conditional draws against quadrature and Aoyagi's values; what they need is found, or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import strati
from strati.core.errors import BadInputError
from strati.landscape.llc.loss_structure import moment_matched_data, quadratic_blocks
from strati.landscape.objective import objective
from strati_reproductions.degeneracy.learning_coefficients import deep_linear_case
from strati_reproductions.llc_cases.known import deep_linear


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_layers_of_any_deep_linear_network_are_found(widths, seed):
    rank = min(1, *widths)
    potential, theta = deep_linear_case(widths, rank, seed)
    blocks = quadratic_blocks(potential, theta)
    sizes = [a * b for a, b in zip(widths[1:], widths[:-1], strict=True)]
    assert blocks is not None
    assert [b.stop - b.start for b in blocks] == sizes and blocks[0].start == 0


@pytest.mark.parametrize(
    "potential",
    [
        lambda w: (w**4).sum(),
        lambda w: (w[0] ** 2 + w[1] ** 2) ** 2,
        lambda w: torch.tanh(w).square().sum(),
        lambda w: w.abs().sum(),
        lambda w: torch.relu(w[0] * w[1] - w[2]) ** 2,
    ],
)
def test_other_functions_have_no_such_blocks(potential):
    assert quadratic_blocks(potential, torch.full((3,), 0.2, dtype=torch.float64)) is None


def test_conditional_draws_against_quadrature():
    """The perfect sampler's 0.361 for w1^2 w2^2 at nbeta 145 (MATH-llc)."""
    result = strati.learning_coefficient(
        lambda w: (w[0] * w[1]) ** 2,
        torch.zeros(2),
        nbeta=145.0,
        sampler="gibbs",
        chains=64,
        draws=150,
        ladder=False,
    )
    assert result.traces.sampler == "gibbs"
    assert abs(result.estimate - 0.361) < max(4 * result.stderr, 0.001) < 0.03


def test_one_block_is_drawn_outright():
    """A quadratic: independent draws, and the closed form at its temperature."""
    scales = torch.logspace(-3, 3, 12, dtype=torch.float64)
    result = strati.learning_coefficient(lambda w: (scales * w**2).sum(), torch.zeros(12), nbeta=50.0)
    exact = 0.5 * float((100 * scales / (100 * scales + 1)).sum())
    assert result.traces.sampler == "gibbs" and result.ess > 0.5 * result.chains * result.draws
    assert abs(result.estimate - exact) < 4 * result.stderr + 1e-3


@pytest.mark.parametrize(
    ("widths", "rank"), [pytest.param((4, 4, 4, 4), 1, marks=pytest.mark.slow), ((7, 4, 3), 2)]
)
def test_deep_linear_potentials_against_aoyagi(widths, rank):
    potential, theta = deep_linear_case(widths, rank, seed=5)
    result = strati.learning_coefficient(potential, theta, chains=16, draws=80, seed=5)
    assert result.reason is None
    assert result.asymptotic == pytest.approx(float(deep_linear(widths, rank).value), rel=0.06)


def test_draws_go_on_until_the_ladder_shows_a_limit():
    """5-5-5-5 of rank 2: the usual number of draws leaves the values of this network too noisy for a limit."""
    weights, inputs = (torch.Generator().manual_seed(1) for _ in range(2))
    layers = [nn.Linear(5, 5, bias=False).double() for _ in range(3)]
    for layer in layers:
        shapes = ((5, 2), (2, 5))
        left, right = (torch.randn(*shape, generator=weights, dtype=torch.float64) for shape in shapes)
        layer.weight.data = left @ right / 10**0.25
    x = torch.randn(500, 5, generator=inputs, dtype=torch.float64)
    result = strati.llc(nn.Sequential(*layers), "behavioural-mse", x, seed=1)
    assert abs(result.asymptotic - 11) <= 3 * result.asymptotic_stderr < 1.0


def test_gibbs_is_refused_where_it_is_not_possible():
    with pytest.raises(BadInputError, match="not quadratic in each layer"):
        strati.learning_coefficient(lambda w: (w**4).sum(), torch.zeros(2), sampler="gibbs")


@given(st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_condensed_data_give_the_same_loss_for_every_parameter(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    x, y = torch.randn(60, 3).double() + 1, torch.randn(60, 2).double()
    whole = objective(model, "mse", (x, y))
    few = moment_matched_data(whole)
    assert few.rows == 10 and few.count == 60
    for _ in range(3):
        theta = 3 * torch.randn_like(whole.flat.theta)
        assert float(few(theta)) == pytest.approx(float(whole(theta)), rel=1e-10)


def test_data_of_other_networks_and_losses_are_left_alone():
    x, y = torch.randn(60, 3).double(), torch.randn(60, 2).double()
    bent = objective(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double(), "mse", (x, y))
    assert moment_matched_data(bent) is bent
    labels = torch.randint(0, 2, (60,))
    other = objective(nn.Linear(3, 2).double(), "cross_entropy", (x, labels))
    assert moment_matched_data(other) is other


def test_regression_on_many_data_counts_its_parameters():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5000, 9, generator=generator).double()
    y = torch.randn(5000, 1, generator=generator).double()
    model = nn.Linear(9, 1).double()
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(5000, 1)], 1), y).solution
    model.weight.data, model.bias.data = solution[:9].T.clone(), solution[9].clone()
    result = strati.llc(model, "mse", (x, y), chains=16, draws=60)
    assert result.nbeta == pytest.approx(5000 / np.log(5000))
    assert result.asymptotic == pytest.approx(5.0, rel=0.02)
