"""Effective parameters over loss scales, against the exact curve and the closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import strati
from strati.core.errors import BadInputError
from strati.landscape.llc.posterior import curvature_spectrum
from strati.landscape.llc.scales import (
    closed_form,
    matching_scale,
    seed_scale,
    temperature_for,
)
from strati.landscape.objective import behavioural_loss, exact_hessian


class Quartic(nn.Module):
    """Outputs (c w, w^2): its behavioural loss at w = 0 is c^2 w^2 + w^4."""

    def __init__(self, c: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.c = c

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.c * self.w, self.w**2], -1).expand(len(x), 2)


def exact(c: float, epsilon: float) -> float:
    """The slope of ln V with V = 2 sqrt((sqrt(c^4 + 4 eps) - c^2)/2)."""
    root = np.sqrt(c**4 + 4 * epsilon)
    return float(epsilon / (root * (root - c**2)))


def test_density_of_states_against_the_exact_curve():
    scales = np.geomspace(1e-6, 1e-1, 6)
    curve = strati.effective_parameters(Quartic(0.1), torch.zeros(4, 1), scales=scales, chains=64, draws=300)
    for row in curve.rows:
        assert row.coefficient == pytest.approx(exact(0.1, row.epsilon), rel=0.05)
        assert row.effective == 2 * row.coefficient
        assert row.nbeta * row.epsilon == pytest.approx(1.0, rel=0.3)
    assert curve.rows[0].gauss_newton == pytest.approx(0.5, rel=0.01)
    assert abs(curve.rows[0].gap) < 0.03 and abs(curve.rows[-1].gap) > 0.1
    form = curve.to_dict()["scales"][0]
    assert {"epsilon", "lambda", "stderr", "effective", "nbeta", "gauss_newton"} <= set(form)
    pytest.importorskip("matplotlib")
    assert curve.plot().axes


def test_quadratic_network_beyond_exchange_uses_temperatures():
    torch.manual_seed(0)
    model = nn.Linear(9, 8, bias=False)  # 72 parameters, exactly quadratic
    x = torch.randn(60, 9)
    curve = strati.effective_parameters(model, x, scales=[1e-3], chains=4, draws=60)
    row = curve.rows[0]
    assert row.coefficient == pytest.approx(row.gauss_newton, rel=0.05)
    assert row.gauss_newton == pytest.approx(36, rel=0.01)


@pytest.mark.parametrize("sampler", ["auto", "hmc"])
def test_effective_parameters_fall_with_the_scale(sampler):
    """A linear network whose inputs span three decades: the closed form is exact, and falls from 20.9 to 5.8."""
    torch.manual_seed(0)
    model, x = nn.Linear(20, 1), torch.randn(500, 20) * torch.logspace(0, -3, 20)
    curve = strati.effective_parameters(
        model, x, scales=[0.3, 1e-6, 1e-3], sampler=sampler, chains=16, draws=100, gamma=1.0
    )
    assert [r.epsilon for r in curve.rows] == [1e-6, 1e-3, 0.3]
    for row in curve.rows:
        assert row.coefficient == pytest.approx(row.gauss_newton, abs=5 * row.stderr + 0.05)
    values = [r.effective for r in curve.rows]
    assert values == sorted(values, reverse=True) and values[0] > 20.5 and values[-1] < 6.5


def test_deep_linear_networks_use_fewer_parameters_at_larger_scales():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 3, bias=False))
    x = torch.randn(200, 6) * torch.logspace(0, -2, 6)
    curve = strati.effective_parameters(model, x, scales=[1e-6, 1e-3, 1e-1], chains=16, draws=80)
    values = [r.effective for r in curve.rows]
    assert None not in values and values == sorted(values, reverse=True)


@pytest.mark.slow
def test_the_error_of_the_density_path_holds_its_scatter():
    """Quadratics of 3 parameters: lambda = 3/2 at every scale. Errors from 8 groups have rms z 1.18 at best.

    24 values, 12 of them about independent: above 1.9 in fewer than one of a thousand right estimators.
    """
    model, x = nn.Linear(3, 1, bias=False).double(), torch.randn(30, 3, dtype=torch.float64)
    z = []
    for seed in range(6):
        curve = strati.effective_parameters(
            model, x, scales=np.geomspace(1e-5, 1e-2, 4), seed=seed, chains=16, draws=100
        )
        z += [(r.coefficient - r.gauss_newton) / r.stderr for r in curve.rows]
    assert 0.4 < np.sqrt(np.mean(np.square(z))) < 1.9


def test_closed_form_limits_and_matching_scale():
    h = np.array([0.0, 1e-6, 1.0, 1e3])
    assert closed_form(h, 1e12, 1.0) == pytest.approx(1.5, rel=1e-4)
    assert closed_form(h, 1e-9, 1.0) < 1e-5
    for epsilon in (1e-8, 1e-3, 1.0):
        nbeta = temperature_for(epsilon, h, 1.0)
        assert matching_scale(closed_form(h, nbeta, 1.0), nbeta) == pytest.approx(epsilon, rel=1e-6)


def test_curvature_is_that_of_the_exact_hessian():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.randn(10, 2, dtype=torch.float64)
    loss = behavioural_loss(model, x)
    values = torch.linalg.eigvalsh(exact_hessian(loss, loss.flat.theta)).clamp(min=0).numpy()
    assert np.allclose(curvature_spectrum(loss), values, atol=1e-9)


def test_seed_scale_is_the_variance_between_networks():
    rng = np.random.default_rng(0)
    outputs = rng.normal(size=(5, 40, 3))
    assert seed_scale(list(outputs)) == pytest.approx(outputs.var(axis=0, ddof=1).sum(1).mean())
    with pytest.raises(BadInputError):
        seed_scale([outputs[0]])


@pytest.mark.parametrize("scales", [[0.0], [-1.0], [np.nan], []])
def test_bad_scales_are_refused(scales):
    with pytest.raises(BadInputError):
        strati.effective_parameters(nn.Linear(1, 1), torch.ones(3, 1), scales=scales)


@pytest.mark.thorough
def test_the_time_budget_holds_for_all_scales_together():
    """Five scales of a network of 3,010 parameters take minutes without a budget."""
    import time

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 10))
    x = torch.randn(100, 64)
    strati.effective_parameters(model, x, scales=[1e-2], seconds=0.5)  # imports are not counted
    start = time.perf_counter()
    curve = strati.effective_parameters(model, x, seconds=4.0)
    assert time.perf_counter() - start < 8.0
    assert len(curve.rows) == 5 and all(row.gauss_newton is not None for row in curve.rows)
