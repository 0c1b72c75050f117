"""What derivatives decide: regular points, certain ranges, kinks, and parameters beside a minimum."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import strati
from strati.core.rng import derive
from strati.landscape.llc.config import LLCConfig
from strati.landscape.llc.geometry import NumericalRank, jacobian_rank, local_geometry
from strati.landscape.objective import objective
from strati_reproductions.llc_cases.battery import battery
from strati_reproductions.llc_cases.known import deep_linear
from strati_reproductions.llc_cases.known_cases import normal


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.float64)


def looked(model: nn.Module, loss: str, data):
    whole = objective(model, loss, data, dtype=torch.float64)
    return local_geometry(whole, whole.flat.theta)


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(0, 4), st.floats(-6, 6))
@settings(max_examples=25, deadline=None)
def test_quadratics_are_counted_whatever_their_scales(seed, rank, free, decades):
    """r squares of any scale, rotated, in N directions: exactly r/2."""
    generator = torch.Generator().manual_seed(seed)
    size = rank + free
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    scale = 10.0 ** (decades * torch.rand(rank, generator=generator, dtype=torch.float64) / 2)
    found = local_geometry(lambda w: (scale * (basis[:rank] @ w) ** 2).sum(), zeros(size))
    assert found.rank == NumericalRank(rank, rank)
    assert found.exact == rank / 2 and found.range == (rank / 2, rank / 2)


@pytest.mark.parametrize(
    ("potential", "size", "range_"),
    [
        (lambda w: (w**4).sum(), 2, (0.0, 0.5)),
        (lambda w: w[0] ** 2 + w[1] ** 4, 2, (0.5, 0.75)),
        (lambda w: w[0] ** 2 * w[1] ** 4 * w[2] ** 6, 3, (0.0, 0.75)),
        (lambda w: (w[0] ** 2 - w[1] ** 3) ** 2, 2, (0.0, 0.5)),
        (lambda w: (w[0] - w[1] ** 2) ** 2 + (w[0] * w[1]) ** 2, 2, (0.5, 0.75)),
    ],
)
def test_singular_points_have_a_range_and_no_exact_value(potential, size, range_):
    found = local_geometry(potential, zeros(size))
    assert found.exact is None and found.range == range_


def test_curved_valleys_of_minima_are_exact():
    """(exp(w1 w2) - 2)^2 vanishes along a curve: one square, nothing else."""
    found = local_geometry(
        lambda w: (torch.exp(w[0] * w[1]) - 2) ** 2, torch.tensor([1.0, np.log(2.0)]).double()
    )
    assert found.exact == 0.5


@pytest.mark.parametrize("power", [1.0, 2.5, 3.0])
def test_kinks_are_seen(power):
    found = local_geometry(lambda w: (w.abs() ** power).sum(), zeros(2))
    assert not found.smooth and found.exact is None and found.range == (None, None)


@pytest.mark.parametrize("seed", range(6))
def test_a_training_loss_along_a_valley_of_its_minima_is_exact(seed):
    """Two linear layers 1-2-1 at the least-squares fit of noisy data: one square and a curved valley, so 1/2."""
    torch.manual_seed(seed)
    x, noise = torch.tensor([[-1.0], [0.5], [1.0]]).double(), torch.tensor([[1.0], [0.0], [1.0]]).double()
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False)).double()
    with torch.no_grad():
        y = model(x) + noise
    found = looked(model, "mse", (x, y))
    assert found.rank == NumericalRank(1, 1) and found.exact == 0.5


@given(
    st.integers(0, 10**6),
    st.sampled_from([((5, 3, 5), 1), ((2, 2, 2), 1), ((4, 2, 3), 1), ((2, 2, 2, 2), 1), ((3, 4, 4, 3), 2)]),
    st.sampled_from(["mse", "behavioural-mse"]),
)
@settings(max_examples=20, deadline=None)
def test_layers_of_low_rank_in_single_precision_are_of_low_rank(seed, shape, loss):
    """Their rank is one or two up to 1e-8 only, and their outputs are rounded: neither counts (Aoyagi's values)."""
    widths, rank = shape
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))
    for layer in model:
        rows, columns = layer.weight.shape
        layer.weight.data = torch.randn(rows, rank) @ torch.randn(rank, columns) / 2
    x = torch.randn(80, widths[0])
    found = looked(model, loss, x if loss == "behavioural-mse" else (x, model(x).detach()))
    value, (low, high) = float(deep_linear(widths, rank).value), found.range
    assert found.exact in (None, value)
    assert low is None or low - 1e-9 <= value <= high + 1e-9


FLAT = {
    "1 + w1^2 + w2^4": (lambda w: 1 + w[0] ** 2 + w[1] ** 4, 1),
    "0.3 + w1^4 + w2^4": (lambda w: 0.3 + (w**4).sum(), 0),
    "1 + w1^2 + w2^6": (lambda w: 1 + w[0] ** 2 + w[1] ** 6, 1),
}


@pytest.mark.parametrize("offset", [0.0, 1e-5, 1e-4, 1e-3, 5e-3, 0.02, 0.1])
@pytest.mark.parametrize("name", FLAT)
def test_curvature_beside_a_flat_minimum_is_not_counted(name, offset):
    """The loss's rounding hides where the minimum of a fourth power is: what curvature is left there is no rank."""
    potential, rank = FLAT[name]
    found = local_geometry(potential, torch.full((2,), offset, dtype=torch.float64))
    assert found.exact is None and found.rank.low <= rank <= found.rank.high


def steps(seed: int, nearest: float) -> tuple[nn.Module, torch.Tensor]:
    """A 2-3-1 tanh network, two units of which are steps: the data next to them are at ``tanh(+-nearest)``."""
    x = normal(derive(seed, "inputs"), 150, 2)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(derive(seed, "weights", k), *parameter.shape))
        for unit, place in ((0, 60), (1, 90)):
            below, above = (x @ model[0].weight[unit]).sort().values[place - 1 : place + 1]
            steep = 2 * nearest / (above - below)
            model[0].weight[unit] *= steep
            model[0].bias[unit] = -steep * (above + below) / 2
    return model, x


@pytest.mark.parametrize("nearest", [12.0, 16.0])
@pytest.mark.parametrize("seed", range(3))
def test_units_that_ran_away_are_not_called_free(seed, nearest):
    """Weights of 1e3 to 1e4: squared, slopes of steps are below rounding, and how many directions are left is open."""
    model, x = steps(seed, nearest)
    found = looked(model, "mse", (x, model(x).detach()))
    assert found.exact is None and found.range[0] <= 4.5 and found.range[1] == 6.5


def test_half_a_square_is_not_smooth():
    assert not local_geometry(lambda w: (torch.relu(w) ** 2).sum(), zeros(2)).smooth


@given(st.integers(0, 10**6), st.sampled_from([(2, 3, 1), (1, 2, 1), (3, 4, 1), (2, 4, 2)]))
@settings(max_examples=15, deadline=None)
def test_tanh_networks_are_regular_and_never_more_free_than_that(seed, widths):
    """Random tanh networks on enough data: full rank, so N/2; where rounding hides it, a range that holds N/2."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(*widths[:2]), nn.Tanh(), nn.Linear(*widths[1:]))
    size = sum(p.numel() for p in model.parameters())
    found = looked(model, "behavioural-mse", torch.randn(200, widths[0]))
    assert found.exact in (None, size / 2)
    assert found.range[0] <= size / 2 <= found.range[1]


def test_ranks_that_rounding_hides_are_left_open():
    """1-4-1 tanh on 40 data has full rank in 60-digit arithmetic; double precision sees 11 to 13."""
    for seed in range(12):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
        whole = objective(model, "behavioural-mse", torch.randn(40, 1), dtype=torch.float64)
        assert jacobian_rank(whole, whole.flat.theta).high == 13


@pytest.mark.parametrize("gamma", [1.0, 100.0])
def test_symmetries_of_relu_networks_are_taken_off(gamma):
    """3-4-2 ReLU: 26 parameters, four scalings: 11, whatever the localisation hides from the ladder."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    result = strati.llc(model, "behavioural-mse", torch.randn(100, 3), gamma=gamma, chains=4, draws=20)
    assert (result.asymptotic, result.asymptotic_stderr) == (11.0, 0.0)


def test_training_loss_at_its_minimum():
    torch.manual_seed(0)
    x, labels = torch.randn(200, 4).double(), torch.randint(0, 3, (200,))
    model = nn.Linear(4, 3).double()
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=500, tolerance_grad=1e-12, tolerance_change=0.0
    )

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        value = nn.functional.cross_entropy(model(x), labels)
        value.backward()
        return value

    optimiser.step(closure)
    found = looked(model, "cross_entropy", (x, labels))
    assert found.minimum and found.exact == 5.0  # 5 weights per class, less the logits' common shift


def regression(offset: float) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Eleven parameters beside the least-squares fit, by ``nbeta (L - L_min) = offset``."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(200, k, generator=generator, dtype=torch.float64) for k in (10, 1))
    design = torch.cat([x, torch.ones(200, 1)], 1)
    solution = torch.linalg.lstsq(design, y).solution[:, 0]
    step = torch.randn(11, generator=generator, dtype=torch.float64)
    lift = float(((design @ step) ** 2).mean()) * 200 / np.log(200)
    theta = solution + step * (offset / lift) ** 0.5
    model = nn.Linear(10, 1).double()
    model.weight.data, model.bias.data = theta[None, :10].clone(), theta[10:].clone()
    return model, x, y


@pytest.mark.parametrize("sampler", ["auto", "hmc"])
@pytest.mark.parametrize("offset", [0.5, 2.0, 4.0])
def test_beside_the_minimum_values_are_corrected_and_say_so(sampler, offset):
    """Without correction the value is low by exactly the offset (3.4 for 5.4 at offset 2)."""
    model, x, y = regression(offset)
    result = strati.llc(model, "mse", (x, y), sampler=sampler, chains=16, draws=100)
    assert abs(result.estimate - 5.42) < 4 * result.stderr + 0.03
    assert "not at the minimum" in result.reason and result.warnings[0].code == "off-minimum"
    assert (result.asymptotic, result.asymptotic_stderr) == (5.5, 0.0)


def test_far_from_the_minimum_there_is_no_value():
    model, x, y = regression(300.0)
    result = strati.llc(model, "mse", (x, y), chains=8, draws=50)
    assert result.estimate is None and result.asymptotic is None and "not at a minimum" in result.reason
    assert result.asymptotic_low is None


def test_at_a_saddle_there_is_no_value():
    result = strati.learning_coefficient(
        lambda w: w[0] ** 2 - w[1] ** 2 + w[1] ** 4, zeros(2), chains=8, draws=50
    )
    assert result.estimate is None and "not at a minimum" in result.reason


def test_absolute_values_have_their_coefficient_and_the_true_reason():
    result = strati.learning_coefficient(lambda w: w.abs().sum(), zeros(1), chains=16, draws=100)
    assert abs(result.estimate - 1) < 4 * result.stderr + 0.01
    assert result.asymptotic is None or abs(result.asymptotic - 1) < 3 * result.asymptotic_stderr + 0.01
    assert result.asymptotic_low is None and result.asymptotic_high is None
    assert "differentiable" in result.reason


QUICK = (
    "w^4",
    "w1^2 w2^2",
    "2-3-1 tanh",
    "2-3-1 ReLU",
    "softmax regression, 3 inputs, 3 classes",
)


@pytest.mark.parametrize("case", [c for c in battery() if c.name in QUICK], ids=lambda c: c.name)
def test_known_coefficients_quickly(case):
    """The quick part of tools/calibrate_llc_limit.py: within two errors and the certain range."""
    result = case.run(LLCConfig(chains=16, draws=100))
    value = float(case.value)
    assert result.asymptotic_low - 1e-9 <= value <= result.asymptotic_high + 1e-9
    if result.asymptotic is None:
        assert result.reason
    else:
        assert abs(result.asymptotic - value) <= 2 * result.asymptotic_stderr + 1e-9


def test_the_battery_holds_every_kind_in_both_halves():
    kinds = {c.kind for c in battery()}
    assert len(battery()) >= 40 and len(kinds) >= 8
    for half in ("development", "final"):
        assert {c.kind for c in battery() if c.half == half} == kinds
