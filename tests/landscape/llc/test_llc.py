"""The estimator against quadrature, known coefficients, and its own promises.

Settings here are lighter than the defaults; the full truth table runs under ``slow`` and in the benchmark.
Bounds are at least four standard errors wide, so a right sampler fails fewer than one in ten thousand runs; seeds
are fixed in any case.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import strati
from strati.core.errors import BadInputError
from strati.landscape.llc.extrapolate import Limit, NoLimit, extrapolate
from strati.landscape.llc.llc import LLCConfig, draw, estimate, load_traces, sample
from strati.landscape.llc.loss_structure import GradientCost
from strati.landscape.llc.sampling_plan import hmc_amount
from strati.landscape.llc.traces import KeptPositions

LIGHT = LLCConfig(chains=32, draws=150, warmup=30)


def quadrature(loss, nbeta: float, gamma: float, grid: np.ndarray | None = None) -> float:
    """``nbeta <L>`` in two dimensions by summation over a grid uniform in the logarithm, for even losses."""
    u = np.linspace(-25, 3, 1600) if grid is None else grid
    w = np.exp(u)
    a, b = w[:, None], w[None, :]
    values = nbeta * loss(a, b)
    log_weight = -values - 0.5 * gamma * (a**2 + b**2) + u[:, None] + u[None, :]
    weight = np.exp(log_weight - log_weight.max())
    return float((weight * values).sum() / weight.sum())


@pytest.mark.parametrize(
    ("loss", "nbeta", "gamma"),
    [
        (lambda a, b: a**2 * b**2, 145.0, 1.0),
        (lambda a, b: a**2 * b**2, 145.0, 10.0),
        (lambda a, b: a**4 + b**2, 1e4, 1.0),
    ],
)
def test_value_at_a_temperature_against_quadrature(loss, nbeta, gamma):
    result = strati.learning_coefficient(
        lambda w: loss(w[0], w[1]), torch.zeros(2), config=LIGHT, nbeta=nbeta, gamma=gamma, ladder=False
    )
    exact = quadrature(loss, nbeta, gamma)
    assert abs(result.estimate - exact) < 4 * result.stderr + 1e-3 * exact and result.stderr < 0.02 * exact
    assert abs(result.estimate - exact) < 5 * result.stderr + 1e-3 * exact
    assert result.asymptotic is None and "one temperature" in result.reason


def test_published_finite_temperature_values():
    """The perfect sampler's 0.361 and 0.202 for w1^2 w2^2 at nbeta 145 (gamma 1 and 10)."""
    assert quadrature(lambda a, b: a**2 * b**2, 145.0, 1.0) == pytest.approx(0.361, abs=1e-3)
    assert quadrature(lambda a, b: a**2 * b**2, 145.0, 10.0) == pytest.approx(0.202, abs=1e-3)


@pytest.mark.parametrize("c", [0.03, 0.3])
@pytest.mark.parametrize("nbeta", [30.0, 1e4])
def test_quadratic_that_turns_quartic_against_quadrature(c, nbeta):
    w = np.linspace(-4, 4, 400_001)
    energy = nbeta * (c**2 * w**2 + w**4)
    weight = np.exp(-energy - 0.5 * w**2)
    exact = (weight * energy).sum() / weight.sum()
    result = strati.learning_coefficient(
        lambda t: (c**2 * t**2 + t**4).sum(), torch.zeros(1), config=LIGHT, nbeta=nbeta, ladder=False
    )
    assert result.estimate == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    ("potential", "size", "value"),
    [
        (lambda w: 1e4 * w[0] ** 2 + 1e-3 * w[1] ** 2 + 0 * w[2], 3, 1.0),
        (lambda w: (w[0] * w[1]) ** 2, 2, 0.5),
    ],
)
def test_limit_against_known_values(potential, size, value):
    result = strati.learning_coefficient(potential, torch.zeros(size), config=LIGHT)
    assert result.asymptotic == pytest.approx(value, rel=0.06)
    assert result.rhat < 1.02 and result.ess > 500 and result.chains == 32 and result.draws == 150
    assert result.reason is None


@pytest.mark.slow
def test_regular_regression_counts_its_parameters():
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    y = x @ torch.tensor([[1.0], [2.0], [0.0]]) + 0.3 * torch.randn(
        200, 1, generator=torch.Generator().manual_seed(1)
    )
    model = nn.Linear(3, 1)
    design = torch.cat([x, torch.ones(200, 1)], 1)
    solution = torch.linalg.lstsq(design, y).solution
    model.weight.data, model.bias.data = solution[:3].T.clone(), solution[3].clone()
    result = strati.llc(model, nn.functional.mse_loss, (x, y), config=LIGHT)
    assert result.nbeta == pytest.approx(200 / np.log(200))
    assert result.asymptotic == pytest.approx(2.0, rel=0.03)
    frozen = strati.llc(model, nn.functional.mse_loss, (x, y), config=LIGHT, layers=["bias"])
    assert frozen.traces.parameters == 1 and frozen.asymptotic == pytest.approx(0.5, rel=0.03)


@pytest.mark.slow
def test_the_error_covers_rare_excursions():
    """Of a valley that few draws enter the controls know little; they must not make the error too small."""
    nbeta, w = 1e4, np.sinh(np.linspace(-12, 12, 200_001)) / np.sinh(12) * 10
    # Given w2 the other two are Gaussian; their integral leaves one dimension.
    stiffness = 2 * nbeta * w**2 + 1
    weight = np.exp(-(w**2) / 2) / stiffness * np.cosh(np.linspace(-12, 12, 200_001))
    exact = (weight * 2 * nbeta * w**2 / stiffness).sum() / weight.sum()
    for seed in (102, 108):
        result = strati.learning_coefficient(
            lambda t: t[1] ** 2 * (t[0] ** 2 + t[2] ** 2), torch.zeros(3, dtype=torch.float64), seed=seed
        )
        assert abs(result.estimate - exact) < 3 * result.stderr
        assert result.estimate == pytest.approx(exact, rel=0.01)
        assert result.asymptotic == pytest.approx(0.5, rel=0.02)


def test_same_seed_same_traces_other_seed_other_traces():
    settings = LLCConfig(chains=4, draws=30, ladder=False)

    def run(seed: int) -> np.ndarray:
        return strati.learning_coefficient(
            lambda w: (w**2).sum(), torch.zeros(2), config=settings, seed=seed
        ).traces.excess

    assert np.array_equal(run(3), run(3)) and not np.array_equal(run(3), run(4))


def test_estimates_are_recomputed_from_kept_traces():
    settings = LLCConfig(chains=8, draws=100)
    traces = sample(lambda w: (w**2).sum(), torch.zeros(1, dtype=torch.float64), settings)
    assert estimate(traces).estimate == estimate(traces, settings).estimate
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arviz = pytest.importorskip("arviz")
        data = traces.to_arviz()
    assert data.posterior["llc"].dims[:2] == ("chain", "draw")
    assert float(arviz.rhat(data, var_names=["llc"])["llc"]) == pytest.approx(estimate(traces).rhat, rel=1e-6)


def test_payload_has_the_interface_fields():
    result = strati.learning_coefficient(
        lambda w: (w**2).sum(), torch.zeros(1), chains=4, draws=600, ladder=False
    )
    form = result.to_dict()
    assert (form["asymptotic"], form["asymptotic_stderr"]) == (0.5, 0.0)  # one parameter, one square
    assert form["asymptotic_low"] == form["asymptotic_high"] == 0.5 and form["warnings"] == []
    wanted = {"estimate", "stderr", "nbeta", "gamma", "asymptotic", "asymptotic_stderr", "rhat", "ess"}
    assert wanted | {"chains", "draws", "reason", "traces"} <= set(form)
    assert len(form["traces"]) == 4 and len(form["traces"][0]) <= 500
    assert str(result.summary()).startswith("Learning coefficient 0.5")
    assert form["settings"] == result.settings and form["settings"]["draws"] == 600


def test_not_at_a_minimum_gives_a_reason_not_a_number():
    result = strati.learning_coefficient(lambda w: ((w - 1) ** 2).sum(), torch.zeros(2), chains=8, draws=100)
    assert result.estimate is None and result.stderr is None and result.asymptotic is None
    assert "not at a minimum" in result.reason


def test_chains_that_do_not_mix_give_a_reason_not_a_number():
    traces = sample(lambda w: (w**2).sum(), torch.zeros(1), LLCConfig(chains=4, draws=50, ladder=False))
    apart = traces.excess + np.arange(4)[None, :, None] * traces.excess.std() * 5
    broken = type(traces)(**(vars(traces) | {"excess": apart}))
    result = estimate(broken)
    assert result.estimate is None and "not mixed" in result.reason and result.rhat > 1.1
    diverged = type(traces)(**(vars(traces) | {"excess": np.where(apart > 0, np.inf, apart)}))
    assert estimate(diverged).estimate is None and "diverged" in estimate(diverged).reason


def test_values_that_no_minimum_can_have_give_a_reason_not_a_number():
    """More than half the parameters, a ladder that climbs, chains on their way: none of it is a coefficient."""
    settings = LLCConfig(chains=8, draws=100, coldest=1e6, ladder=True)
    traces = draw(lambda w: (w**2).sum(), torch.zeros(2, dtype=torch.float64), settings)
    high = type(traces)(**(vars(traces) | {"excess": 50 * traces.excess}))
    assert estimate(high).estimate is None and "cannot be that of 2 parameters" in estimate(high).reason
    assert all(np.isnan(value) for _, value, _ in estimate(high).ladder)
    climb = traces.excess * (1 + np.arange(len(traces.nbeta)))[:, None, None]
    assert estimate(type(traces)(**(vars(traces) | {"excess": climb}))).asymptotic is None
    ramp = traces.excess * np.linspace(0.5, 1.5, traces.draws)
    assert "on their way" in estimate(type(traces)(**(vars(traces) | {"excess": ramp}))).reason


def test_small_relu_network_is_sampled_at_its_own_minimum():
    """A 2-2-1 network once came out at 172 of 9 parameters: other minima's losses were taken for its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    curve = strati.effective_parameters(model, torch.randn(40, 2), chains=8, draws=60)
    for row in curve.rows:
        assert (row.coefficient is None) == (row.reason is not None)
        assert row.coefficient is None or 0 <= row.coefficient <= 4.5 + 3 * row.stderr


@pytest.mark.slow
def test_deep_linear_network_on_data():
    """Layers 5-3-5 at rank one: 8 by Aoyagi's formula."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 5, bias=False))
    for layer in model:
        layer.weight.data = torch.randn(len(layer.weight), 1) @ torch.randn(1, layer.weight.shape[1]) / 2
    x = torch.randn(100, 5)
    result = strati.llc(model, "mse", (x, model(x).detach()), chains=16, draws=80, nbeta=145.0)
    assert result.reason is None and result.asymptotic == pytest.approx(8.0, rel=0.1)


def test_cost_decides_how_much_is_sampled():
    settings, cheap, dear = LLCConfig(), GradientCost(5e-4, 1e-6), GradientCost(5e-4, 1e-2)
    assert hmc_amount(settings, 2, cheap).exchange and not hmc_amount(settings, 2, dear).exchange
    assert hmc_amount(settings, 30, cheap).chains > hmc_amount(settings, 30, dear).chains
    assert hmc_amount(settings, 30, cheap).ladder and not hmc_amount(settings, 30, dear).ladder
    own = hmc_amount(LLCConfig(chains=5, draws=33, leapfrog=4, ladder=True), 30, dear)
    assert own[:3] == (5, 33, 4) and own.ladder


def test_a_function_that_cannot_be_batched_is_sampled_one_by_one():
    def branching(w: torch.Tensor) -> torch.Tensor:
        return (w**2).sum() if float(w.detach().sum()) > 0 else (w**2).sum() * 1.0

    result = strati.learning_coefficient(branching, torch.zeros(2), chains=4, draws=60, ladder=False)
    assert abs(result.estimate - 1.0) < 5 * result.stderr < 0.7


@pytest.mark.parametrize(
    ("potential", "theta", "options"),
    [
        (lambda w: w.sum() / 0, torch.zeros(2), {}),
        (lambda w: w.log().sum(), torch.zeros(2), {}),
        (lambda w: w, torch.zeros(2), {}),
        (lambda w: torch.tensor(1.0), torch.zeros(2), {}),
        (lambda w: (w**2).sum(), torch.zeros(2, 2), {}),
        (lambda w: (w**2).sum(), torch.tensor([np.nan]), {}),
        (lambda w: (w**2).sum(), torch.zeros(2), {"nbeta": -1.0}),
        (lambda w: (w**2).sum(), torch.zeros(2), {"chains": 1}),
        (lambda w: (w**2).sum(), torch.zeros(2), {"sampler": "metropolis"}),
        (lambda w: (w**2).sum(), torch.zeros(2), {"sampler": "sgld"}),
        (lambda w: (w**2).sum(), torch.zeros(2), {"temperature": 3}),
    ],
)
def test_bad_input_is_one_clear_line(potential, theta, options):
    with pytest.raises(BadInputError) as caught:
        strati.learning_coefficient(potential, theta, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [1, 3])
def test_a_loss_that_never_changes_has_coefficient_zero(size):
    result = strati.learning_coefficient(lambda w: 0 * w.sum(), torch.zeros(size), chains=4, draws=50)
    assert (result.estimate, result.stderr) == (0.0, 0.0)
    assert abs(result.asymptotic) < 1e-6


def test_what_is_no_module_is_named():
    with pytest.raises(BadInputError, match="state dict: holds no tensors"):
        strati.llc({}, "mse", (torch.ones(3, 2), torch.ones(3, 1)))


@pytest.mark.parametrize("multiplicity", [1, 2, 3])
def test_extrapolation_of_exact_curves(multiplicity):
    t = np.linspace(4, 27, 20)
    y = 0.5 - (multiplicity - 1) / (t + 3) - 0.3 * np.exp(-0.5 * t)
    limit = extrapolate(np.exp(t), y, np.full(20, 0.001), hottest=1.0)
    assert isinstance(limit, Limit)
    assert abs(limit.value - 0.5) < 2 * limit.stderr < 0.08
    assert limit.stderr < 0.005 or multiplicity > 1
    assert isinstance(extrapolate(np.exp(t[:2]), y[:2], np.full(2, 0.001)), NoLimit)


@pytest.mark.parametrize("rate", [1 / 12, 1 / 6])
@pytest.mark.parametrize("size", [-0.08, 0.08])
def test_extrapolation_covers_slow_powers(rate, size):
    """A next exponent only 1/12 away looks like a logarithm: the error must say so."""
    t = np.linspace(2, 27, 20)
    y = 1 / 6 + size * np.exp(-rate * t)
    limit = extrapolate(np.exp(t), y, np.full(20, 0.0006), hottest=1.0)
    assert isinstance(limit, NoLimit) or abs(limit.value - 1 / 6) < 2 * limit.stderr


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.23, 4.34, 7.0, 10.0, 13.0, 16.0],  # climbing: curvatures come into view one by one
        [1.0, 1.2, 1.0, 1.2, 1.0, 1.2, 1.0],  # no law at all
    ],
)
def test_values_that_do_not_settle_have_no_limit(values):
    nbeta = 4.0 ** np.arange(len(values))
    found = extrapolate(nbeta, np.array(values), np.full(len(values), 0.01))
    assert isinstance(found, NoLimit) and found.reason


def test_temperatures_at_which_the_chains_fell_apart_are_left_out():
    t = np.linspace(4, 27, 24)
    y, error = np.full(24, 0.66), np.full(24, 0.003)
    y[14:], error[14:] = 0.85, 0.07
    limit = extrapolate(np.exp(t), y, error, hottest=1.0)
    assert isinstance(limit, Limit) and abs(limit.value - 0.66) < 0.03


@pytest.mark.parametrize(("ladders", "covered"), [(20, 18), pytest.param(100, 95, marks=pytest.mark.slow)])
def test_extrapolation_error_covers_the_truth(ladders, covered):
    """Noisy ladders: the truth lies within two stated errors in at least 95 of 100."""
    rng = np.random.default_rng(0)
    t = np.linspace(4, 27, 16)
    hits = 0
    for _ in range(ladders):
        y = 0.5 - 1 / (t + 3) + 0.004 * rng.normal(size=16)
        limit = extrapolate(np.exp(t), y, np.full(16, 0.004), hottest=1.0)
        hits += isinstance(limit, NoLimit) or abs(limit.value - 0.5) < 2 * limit.stderr
    assert hits >= covered


def test_pictures_are_drawn():
    pytest.importorskip("matplotlib")
    result = strati.learning_coefficient(lambda w: (w**2).sum(), torch.zeros(1), chains=8, draws=60)
    assert len(result.plot().axes) == 2


def test_the_device_is_an_option_and_must_be_there():
    x = torch.linspace(-1, 1, 20)[:, None]
    few = {"chains": 4, "draws": 20, "ladder": False}
    here = strati.llc(nn.Linear(1, 1), "behavioural-mse", x, device="cpu", **few)
    assert here.estimate is not None
    for call in (
        strati.llc,
        lambda model, loss, data, **o: strati.effective_parameters(model, data, loss=loss, **o),
    ):
        with pytest.raises(BadInputError, match="device: nowhere"):
            call(nn.Linear(1, 1), "behavioural-mse", x, device="nowhere")


@pytest.mark.parametrize("sampler", ["hmc", "sgld"])
def test_kept_draws_give_the_same_losses_and_estimates_after_a_round_trip(tmp_path, sampler):
    pytest.importorskip("arviz")
    torch.manual_seed(0)
    model, x = torch.nn.Linear(2, 1).double(), torch.randn(40, 2, dtype=torch.float64)
    result = strati.llc(
        model, "behavioural-mse", x, keep=True, sampler=sampler, chains=4, draws=60, nbeta=20.0, gamma=1.0
    )
    positions = result.traces.positions
    thin = 1 if sampler == "hmc" else 5
    assert positions["weight"].shape == (4, 60 // thin, 1, 2) and positions["bias"].shape == (
        4,
        60 // thin,
        1,
    )
    if sampler == "hmc":
        weight, bias = torch.tensor(positions["weight"][2, 7]), torch.tensor(positions["bias"][2, 7])
        outputs = torch.nn.functional.linear(x, weight, bias)
        loss = float(((outputs - model(x).detach()) ** 2).sum(1).mean())
        assert loss == pytest.approx(result.traces.excess[0, 2, 7], rel=1e-9)
    path = tmp_path / "draws.nc"
    result.save_draws(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import arviz

        stored = arviz.from_netcdf(str(path), engine="h5netcdf")
    assert stored.posterior["weight"].shape == positions["weight"].shape
    again = estimate(load_traces(path))
    numbers = (again.estimate, again.stderr, again.asymptotic)
    assert numbers == pytest.approx((result.estimate, result.stderr, result.asymptotic), rel=1e-12)
    np.testing.assert_array_equal(again.traces.positions["bias"], positions["bias"])


def test_kept_draws_that_take_too_much_memory_are_refused():
    kept = KeptPositions(torch.zeros(5), most=100)
    with pytest.raises(BadInputError, match="fewer draws"):
        for _ in range(10):
            kept.observe(0, torch.zeros(4, 5))


def test_a_file_without_draws_is_refused(tmp_path):
    pytest.importorskip("arviz")
    (tmp_path / "other.nc").write_bytes(b"no draws")
    with pytest.raises(BadInputError, match="holds no draws"):
        load_traces(tmp_path / "other.nc")
