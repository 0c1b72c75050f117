"""Learning coefficients of a run: settings chosen once, differences sharper than levels, refusals, groups, heads."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import strati
from strati.configs import LLCConfig
from strati.core.errors import BadInputError, NotFiniteError
from strati.landscape.objective import objective as objective_of
from strati.tracking.checkpoints import grouped
from strati.tracking.coefficients import difference_error, estimate, shared_config


def states(count: int = 4, *, rate: float = 0.05) -> tuple[list[dict[str, torch.Tensor]], nn.Module, tuple]:
    """A small network learning three classes: weights at every tenth step, the network, the data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(90, 3, generator=torch.Generator().manual_seed(1))
    y = x.argmax(1)
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    kept = []
    for _ in range(count):
        for _ in range(10):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
        kept.append({k: v.clone() for k, v in model.state_dict().items()})
    return kept, model, (x, y)


@pytest.fixture(scope="module")
def followed() -> strati.Track:
    kept, model, data = states(5)
    return strati.track(kept, data=data, model=model, what="llc", chains=4, draws=150)


@pytest.mark.slow
def test_an_exact_value() -> None:
    """For a linear network and squared error every direction counts h / (h + gamma/nbeta) / 2."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    x = torch.randn(200, 4, dtype=torch.float64) * torch.tensor([1.0, 1.0, 0.3, 0.1])
    objective = objective_of(model, "behavioural-mse", x)
    shared, _ = shared_config([("a", objective)], LLCConfig(nbeta=40.0, gamma=1.0, chains=8, draws=2000))
    found = estimate(objective, shared)
    stiff = torch.linalg.eigvalsh(2 * x.T @ x / len(x))
    exact = float((40 * stiff / (40 * stiff + 1)).sum() / 2)
    assert found.value == pytest.approx(exact, abs=5 * found.error + 0.02)


def test_all_checkpoints_share_their_settings_and_say_so(followed: strati.Track) -> None:
    settings = followed.settings
    assert {
        "nbeta",
        "gamma",
        "step",
        "chains",
        "draws",
        "batch",
        "seed",
        "loss",
        "sampler",
        "calibrated_on",
        "data",
    } <= (set(settings))
    assert settings["nbeta"] == pytest.approx(90 / math.log(90))
    assert settings["step"] > 0
    assert settings["sampler"] == "sgld"


def test_the_step_is_the_smallest_that_any_checkpoint_needs() -> None:
    """A convolution has no Kronecker curvature: ten times its output weights need a far smaller step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 3, 3), nn.Tanh(), nn.Conv1d(3, 1, 6), nn.Flatten()
    )
    x = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
    weights = model.state_dict()
    stiff = {name: (10 * value if name.startswith("3") else value) for name, value in weights.items()}
    plain, stiffer = (
        objective_of(_filled(copy.deepcopy(model), state), "behavioural-mse", x) for state in (weights, stiff)
    )
    one, _ = shared_config([("a", plain)], LLCConfig(chains=2, draws=40))
    both, name = shared_config([("a", plain), ("b", stiffer)], LLCConfig(chains=2, draws=40))
    assert both.step < one.step / 5
    assert name == "b"


@pytest.mark.parametrize(("hidden", "loss"), [(6, "cross_entropy"), (40, "behavioural-mse")])
def test_the_localisation_is_that_of_llc_at_the_last_checkpoint(hidden: int, loss: str) -> None:
    """One rule for every command and size (409 and 2,723 parameters); earlier checkpoints do not change it."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 3)) for _ in range(2)]
    for parameter in models[0].parameters():
        parameter.data *= 0.1
    data = torch.randn(40, 64), torch.arange(40) % 3
    objectives = [(str(k), objective_of(model, loss, data)) for k, model in enumerate(models)]
    shared, _ = shared_config(objectives, LLCConfig(chains=2, draws=40))
    whole = strati.llc(models[1], loss, data, chains=2, draws=10, warmup=10, ladder=False)
    size = sum(p.numel() for p in models[1].parameters())
    norm = sum(float(p.detach().double().square().sum()) for p in models[1].parameters())
    assert shared.gamma == whole.gamma == pytest.approx(max(1.0, min(1, size / 2500) * size / norm), rel=1e-5)
    assert shared.nbeta == pytest.approx(whole.nbeta)


@pytest.mark.slow
def test_track_and_llc_agree() -> None:
    """565 parameters fitted to sines: two samplers, one question (about 25 CPU seconds)."""
    torch.manual_seed(0)
    x = torch.randn(300, 10)
    y = torch.sin(2 * x[:, :4])
    model = nn.Sequential(nn.Linear(10, 17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 4))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(500):
        optimiser.zero_grad()
        ((model(x) - y) ** 2).sum(1).mean().backward()
        optimiser.step()
    track = strati.track([model], data=x, what="llc", loss="behavioural-mse")
    (value,), (error,) = next((s.values, s.stderr) for s in track.curves if s.what == "llc")
    whole = strati.llc(model, "behavioural-mse", x)
    assert abs(value - whole.estimate) < 4 * math.hypot(error, whole.stderr) < 0.1 * whole.estimate


def test_flat_directions_mix_without_a_larger_gamma() -> None:
    """Columns over four decades: the value at the stated gamma is the closed form."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1, bias=False)
    x = torch.randn(200, 8) * torch.logspace(2, -2, 8)
    track = strati.track([model], data=x, what="llc", loss="behavioural-mse", nbeta=40.0, draws=2000)
    (value,), (error,) = next((s.values, s.stderr) for s in track.curves if s.what == "llc")
    stiff = 40 * torch.linalg.eigvalsh(2 * x.T.double() @ x.double() / len(x))
    exact = float((stiff / (stiff + track.settings["gamma"])).sum() / 2)
    assert value == pytest.approx(exact, abs=4 * error + 0.03)


def test_differences_are_sharper_than_levels(followed: strati.Track) -> None:
    """Common random numbers: the error of a difference is below what independent levels would give."""
    level = next(s for s in followed.curves if s.what == "llc")
    change = next(s for s in followed.curves if s.what == "llc_change")
    assert change.values[0] is None
    for k in range(2, 5):
        assert change.values[k] == pytest.approx(level.values[k] - level.values[k - 1])
        independent = math.hypot(level.stderr[k], level.stderr[k - 1])
        assert 0 < change.stderr[k] < 0.7 * independent


@pytest.mark.slow
def test_the_error_of_a_difference_is_honest() -> None:
    """Over 8 seeds the differences of two checkpoints spread as their stated error says (within a factor of two)."""
    kept, model, data = states(3)
    model.load_state_dict(kept[1])
    one = objective_of(model, "cross_entropy", data)
    other_model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))
    other_model.load_state_dict(kept[2])
    other = objective_of(other_model, "cross_entropy", data)
    base, _ = shared_config([("a", one), ("b", other)], LLCConfig(chains=4, draws=200))
    differences, errors = [], []
    for seed in range(8):
        shared = replace(base, seed=seed)
        a, b = estimate(one, shared), estimate(other, shared)
        if a.value is not None and b.value is not None:
            differences.append(b.value - a.value)
            errors.append(difference_error(a.blocks, b.blocks))
    assert len(differences) >= 6
    assert 0.5 < np.std(differences, ddof=1) / np.mean(errors) < 2.0


def test_a_checkpoint_that_does_not_mix_is_refused_with_its_reason() -> None:
    kept, model, data = states(2)
    wild = {k: v * 300 for k, v in kept[0].items()}
    objective = objective_of(_filled(model, kept[1]), "behavioural-mse", data[0])
    shared, _ = shared_config([("a", objective)], LLCConfig(chains=4, draws=60))
    refused = estimate(objective_of(_filled(model, wild), "behavioural-mse", data[0]), shared)
    assert refused.value is None
    assert "chains" in refused.reason
    with pytest.raises(BadInputError, match=r"nothing could be measured.*chains have not mixed"):
        strati.track(kept, data=data, model=model, what="llc", chains=2, draws=12, gamma=1e-6, nbeta=1e-3)


def _filled(model: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    import copy

    holder = copy.deepcopy(model)
    holder.load_state_dict(state)
    return holder


def test_layers_heads_and_groups() -> None:
    kept, model, (x, y) = states(2)
    found = strati.track(
        kept,
        data=(x, y),
        model=model,
        what="llc",
        per_layer=True,
        data_groups="y",
        chains=4,
        draws=200,
        layers="0.*",
    )
    names = {(s.what, s.layer) for s in found.curves}
    assert ("llc", "0.weight") in names
    assert ("llc", "2.weight") not in names
    assert {("llc[0]", None), ("llc[1]", None), ("llc[2]", None)} <= names
    assert {("llc_change", None), ("llc_change[0]", None)} <= names
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    gpt = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    ).eval()
    ids = torch.randint(16, (6, 8), generator=torch.Generator().manual_seed(0))
    run = strati.track(
        [gpt.state_dict()],
        data=ids,
        model=gpt,
        what="llc",
        loss="behavioural-kl",
        heads=[(0, 1)],
        chains=2,
        draws=30,
    )
    assert ("llc", "head 0.1") in {(s.what, s.layer) for s in run.curves}
    with pytest.raises(BadInputError, match="not block"):
        strati.track(kept, data=(x, y), model=model, what="llc", heads="one")


def test_label_columns_of_files(tmp_path: Path) -> None:
    table = tmp_path / "d.csv"
    table.write_text("a,b,kind,y\n1,2,0,0\n3,4,1,1\n5,6,0,1\n")
    data, labels = grouped(table, "kind")
    assert labels == ("0", "1", "0")
    np.testing.assert_array_equal(data[0], [[1, 2], [3, 4], [5, 6]])  # the labels are no input
    arrays = tmp_path / "d.npz"
    np.savez(arrays, x=np.ones((3, 2)), y=np.zeros(3, int), kind=np.array([2, 2, 5]))
    assert grouped(arrays, "kind") == (arrays, ("2", "2", "5"))
    assert grouped(arrays, "y")[1] == ("0", "0", "0")
    with pytest.raises(BadInputError, match="did you mean 'kind'"):
        grouped(arrays, "kinds")
    with pytest.raises(BadInputError, match="at most 50"):
        grouped({"x": np.ones((60, 1)), "z": np.arange(60)}, "z")


def test_more_seconds_are_more_draws() -> None:
    kept, model, data = states(1)
    objective = objective_of(_filled(model, kept[0]), "cross_entropy", data)
    few, _ = shared_config([("a", objective)], LLCConfig(seconds=0.5))
    many, _ = shared_config([("a", objective)], LLCConfig(seconds=2.0))
    assert few.draws < many.draws


def test_a_value_below_zero_is_marked_even_where_the_chains_went_apart() -> None:
    """On a ridge the chains leave to both sides: the loss at their mean is no lower, that at each of them is."""
    x, y = torch.zeros(40, 1), torch.ones(40, 1)

    class Ridge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a**2).expand(len(x), 1)  # minima at -1 and 1, a maximum between

    state = {"a": torch.zeros(1)}
    found = strati.track([state], data=(x, y), model=Ridge(), what="llc", loss="mse", nbeta=50, gamma=1e-3)
    level = next(s for s in found.curves if s.what == "llc")
    assert level.values[0] is not None and level.values[0] < -30
    assert [w.code for w in found.warnings] == ["off-minimum"]


def test_the_loss_is_the_one_whose_coefficient_is_estimated() -> None:
    """``mse`` is the squared norm of the error, in the series of losses as in the learning coefficient."""
    model = nn.Linear(3, 4)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 3, generator=generator), torch.randn(20, 4, generator=generator)
    found = strati.track([model.state_dict()], data=(x, y), model=model, what="loss", loss="mse")
    expected = ((model(x) - y) ** 2).sum(1).mean()
    assert found.curves[0].values[0] == pytest.approx(float(expected.detach()), rel=1e-6)


def test_the_minibatch_can_be_chosen() -> None:
    model = nn.Linear(3, 1)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    options = {"what": "llc", "loss": "behavioural-mse", "draws": 20, "chains": 2, "batch": 8}
    found = strati.track([model.state_dict()], data=x, model=model, gamma=1e4, **options)
    assert found.settings["batch"] == 8


def test_settings_do_not_depend_on_the_seed():
    """Another seed estimates the same coefficient: nbeta, gamma and step are those of the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(128, 4)
    found = [
        shared_config([("one", objective_of(model, "behavioural-mse", x))], LLCConfig(draws=20, seed=seed))
        for seed in (0, 1, 2)
    ]
    assert len({(s.nbeta, s.gamma, s.step) for s, _ in found}) == 1
    assert [s.seed for s, _ in found] == [0, 1, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_settings_are_calibrated_without_a_checkpoint_whose_weights_are_not_finite(bad: float) -> None:
    weights, model, data = states(3)
    weights[1]["0.weight"] = weights[1]["0.weight"].clone()
    weights[1]["0.weight"][0, 0] = bad
    followed = strati.track(weights, data=data, model=model, what="llc", chains=4, draws=100)
    (series,) = [s for s in followed.curves if s.what == "llc"]
    assert series.values[1] is None
    assert {
        row["quantity"] for row in followed.failed if row["checkpoint"] == followed.failed[0]["checkpoint"]
    }
    with pytest.raises(NotFiniteError):
        objective_of(_with(model, weights[1]), "cross_entropy", data)


def test_data_that_are_not_finite_stop_the_whole_run() -> None:
    weights, model, (x, y) = states(2)
    spoiled = x.clone()
    spoiled[0, 0] = math.nan
    with pytest.raises(BadInputError) as error:
        strati.track(weights, data=(spoiled, y), model=model, what="llc", draws=100)
    assert not isinstance(error.value, NotFiniteError)


def _with(model: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    model.load_state_dict(weights)
    return model
