"""Learning coefficients of a run: settings chosen once, differences sharper than levels, refusals, groups, heads."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import strati
from strati.errors import BadInputError
from strati.tracking.coefficient import Shared, calibrated, difference_error, measured, objective_of
from strati.tracking.groups import grouped


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
    return strati.track(kept, data=data, model=model, what="llc", chains=4, draws=300)


def test_an_exact_value() -> None:
    """For a linear network and squared error every direction counts h / (h + gamma/nbeta) / 2."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    x = torch.randn(200, 4, dtype=torch.float64) * torch.tensor([1.0, 1.0, 0.3, 0.1])
    objective = objective_of(model, "behavioural-mse", x)
    shared, _ = calibrated(
        [("a", objective)], loss="behavioural-mse", nbeta=40.0, gamma=1.0, chains=8, draws=2000
    )
    found = measured(objective, shared)
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


def test_the_step_is_that_of_the_stiffest_checkpoint() -> None:
    """The same network with weights ten times as large in the first layer is the stiffer one; it decides."""
    kept, model, data = states(1)
    stiff = {k: (10 * v if k.startswith("2") else v) for k, v in kept[0].items()}
    one = strati.track(
        [kept[0]], data=data, model=model, what="llc", loss="behavioural-mse", chains=2, draws=40
    )
    both = strati.track(
        [kept[0], stiff], data=data, model=model, what="llc", loss="behavioural-mse", chains=2, draws=40
    )
    assert both.settings["step"] < one.settings["step"] / 10
    assert both.settings["calibrated_on"].endswith("1")


def test_chains_that_are_held_tightly_are_said_to_be() -> None:
    """Columns of very different size: flat directions mix in 40 draws only if gamma is far above the usual."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    x = torch.randn(200, 8) * torch.logspace(2, -2, 8)
    cold, warm, given = (
        strati.track([model], data=x, what="llc", loss="behavioural-mse", chains=2, draws=40, **options)
        for options in ({"nbeta": 40.0}, {"nbeta": 1e-3}, {"nbeta": 40.0, "gamma": 1e6})
    )
    assert cold.settings["gamma"] > 10 * cold.settings["usual_gamma"]
    assert "narrow" in {w.code for w in cold.warnings}
    assert warm.settings["gamma"] < cold.settings["gamma"]
    for other in (warm, given):
        assert "narrow" not in {w.code for w in other.warnings}


def test_differences_are_sharper_than_levels(followed: strati.Track) -> None:
    """Common random numbers: the error of a difference is below what independent levels would give."""
    level = next(s for s in followed.curves if s.what == "llc")
    change = next(s for s in followed.curves if s.what == "llc_change")
    assert change.values[0] is None
    for k in range(2, 5):
        assert change.values[k] == pytest.approx(level.values[k] - level.values[k - 1])
        independent = math.hypot(level.stderr[k], level.stderr[k - 1])
        assert 0 < change.stderr[k] < 0.7 * independent


def test_the_error_of_a_difference_is_honest() -> None:
    """Over 12 seeds the differences of two checkpoints spread as their stated error says (within a factor of two)."""
    kept, model, data = states(3)
    model.load_state_dict(kept[1])
    one = objective_of(model, "cross_entropy", data)
    other_model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))
    other_model.load_state_dict(kept[2])
    other = objective_of(other_model, "cross_entropy", data)
    base, _ = calibrated([("a", one), ("b", other)], loss="cross_entropy", chains=4, draws=100)
    differences, errors = [], []
    for seed in range(12):
        shared = Shared(**{**vars(base), "seed": seed})
        a, b = measured(one, shared), measured(other, shared)
        if a.value is not None and b.value is not None:
            differences.append(b.value - a.value)
            errors.append(difference_error(a.blocks, b.blocks))
    assert len(differences) >= 9
    assert 0.5 < np.std(differences, ddof=1) / np.mean(errors) < 2.0


def test_a_checkpoint_that_does_not_mix_is_refused_with_its_reason() -> None:
    kept, model, data = states(2)
    wild = {k: v * 300 for k, v in kept[0].items()}
    objective = objective_of(_filled(model, kept[1]), "behavioural-mse", data[0])
    shared, _ = calibrated([("a", objective)], loss="behavioural-mse", chains=4, draws=60)
    refused = measured(objective_of(_filled(model, wild), "behavioural-mse", data[0]), shared)
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
        chains=2,
        draws=150,
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
    few, _ = calibrated([("a", objective)], loss="cross_entropy", seconds=0.5)
    many, _ = calibrated([("a", objective)], loss="cross_entropy", seconds=2.0)
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
        calibrated(
            [("one", objective_of(model, "behavioural-mse", x))], loss="behavioural-mse", draws=20, seed=seed
        )
        for seed in (0, 1, 2)
    ]
    assert len({(s.nbeta, s.gamma, s.step) for s, _ in found}) == 1
    assert [s.seed for s, _ in found] == [0, 1, 2]
