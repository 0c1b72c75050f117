"""Metrics of trained layers and blocks that edits are judged by, and the one rule for patterns in studies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import strati
from strati.core.errors import BadInputError
from strati.interventions.metrics import learning_coefficient, spectral_metrics
from strati.interventions.targets import chosen_names
from strati_reproductions.trained.networks import MLP, Transformer

RNG = np.random.default_rng(3)
NAMES = [f"blocks.{i}.{part}" for i in range(3) for part in ("attn.q_proj", "mlp.fc1")]


def test_a_learning_coefficient_of_one_layer_is_that_of_its_exact_posterior() -> None:
    """One softmax of two classes over one input: the exact value by integrating over the grid of both weights."""
    net = nn.Sequential(nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[0.5], [-0.3]]))
    x = torch.linspace(-1, 1, 40)[:, None]
    value, error = learning_coefficient(net, x, "0", chains=8, draws=100)
    nbeta = 40 / np.log(40)
    grid = np.linspace(-8, 8, 401)
    a, b = np.meshgrid(grid + 0.5, grid - 0.3, indexing="ij")
    own = 1 / (1 + np.exp(-0.8 * x.numpy().ravel()))
    loss = np.zeros_like(a)
    for one, p in zip(x.numpy().ravel(), own, strict=True):
        q = 1 / (1 + np.exp(-(a - b) * one))
        loss += (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))) / 40
    weight = np.exp(-nbeta * loss - 0.5 * ((a - 0.5) ** 2 + (b + 0.3) ** 2))  # gamma is 1 in small networks
    want = nbeta * float((loss * weight).sum() / weight.sum())
    assert value is not None and error is not None
    assert value == pytest.approx(want, abs=5 * error)  # one false alarm in two million


def test_edits_carry_the_metrics_of_the_trained_layer() -> None:
    torch.manual_seed(0)
    model, x = MLP([6, 5, 3]).eval(), RNG.standard_normal((50, 6)).astype(np.float32)
    y = model(torch.from_numpy(x)).argmax(1).numpy()
    found = strati.study(
        *(model,),
        data=(x, y),
        performance="loss",
        interventions=[strati.truncate(rank=[1, 2]), strati.zero(), strati.rerandomise()],
        degeneracy=True,
        learning_coefficient=True,
        spectral=False,
        samples=50,
    )
    table = found.frame()
    for _, part in table.groupby("layer"):
        intact = part[part["intervention"] == "intact"].iloc[0]
        edited = part[part["intervention"].isin(["truncate", "zero"])]
        for name in ("learning_coefficient", "free_directions", "jacobian_rank"):
            assert (edited[name] == intact[name]).all() and np.isfinite(intact[name])
        assert part[part["intervention"] == "rerandomise"]["learning_coefficient"].isna().all()
    assert "learning_coefficient" in found.metrics and "learning_coefficient_stderr" not in found.metrics
    assert all(row["learning_coefficient_stderr"] > 0 for row in found.rows if row["intervention"] == "zero")
    judged = {(v.metric, v.intervention) for v in strati.audit(found, resamples=20).verdicts}
    assert {("learning_coefficient", "truncate"), ("free_directions", "zero")} <= judged


def test_blocks_carry_the_mean_metrics_of_their_layers() -> None:
    torch.manual_seed(0)
    model = Transformer(20, 8, 3, 2, 8).eval()
    table = strati.study(
        model, data=RNG.integers(0, 20, (4, 8)), performance="loss", interventions=strati.drop(run=[1, 2])
    ).frame()

    def mean(block: str, name: str) -> float:
        inside = [
            m.weight.detach().numpy()
            for n, m in model.named_modules()
            if n.startswith(f"{block}.") and isinstance(m, nn.Linear)
        ]
        return float(np.mean([spectral_metrics(weight)[name] for weight in inside]))

    for name in ("stable_rank", "entropy", "frobenius_norm"):
        one = table[(table["layer"] == "blocks.1") & (table["setting"] == "run=1")][name].item()
        two = table[(table["layer"] == "blocks.0") & (table["setting"] == "run=2")][name].item()
        assert one == pytest.approx(mean("blocks.1", name))
        assert two == pytest.approx((mean("blocks.0", name) + mean("blocks.1", name)) / 2)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("*", NAMES),
        ("blocks.1.mlp.fc1.weight", ["blocks.1.mlp.fc1"]),
        (["role:mlp.*", "!block:1-2"], ["blocks.0.mlp.fc1"]),
        ("block:0,2", [n for n in NAMES if "blocks.1" not in n]),
        ("!*.mlp.*", [n for n in NAMES if "mlp" not in n]),
    ],
)
def test_patterns_are_read_as_everywhere(patterns: Any, expected: list[str]) -> None:
    assert chosen_names(NAMES, patterns) == set(expected)


def test_blocks_are_chosen_by_their_own_name_and_by_their_layers() -> None:
    whole = ["blocks.0", "blocks.1", "blocks.2"]
    assert chosen_names(NAMES, "blocks.2", whole=whole) == {"blocks.2"}
    assert chosen_names(NAMES, "blocks.2.mlp.fc1", whole=whole) & set(whole) == {"blocks.2"}
    assert chosen_names(NAMES, ["block:1-2", "!blocks.2"], whole=whole) & set(whole) == {"blocks.1"}
    with pytest.raises(BadInputError, match=r"blocks.9: matches no layer; nearest: "):
        chosen_names(NAMES, ["blocks.1", "blocks.9"], whole=whole)


def test_studies_plans_and_changes_in_memory_take_such_patterns() -> None:
    torch.manual_seed(0)
    model = Transformer(20, 8, 3, 2, 8).eval()
    options: dict[str, Any] = {"data": RNG.integers(0, 20, (4, 8)), "performance": "loss", "spectral": False}
    both = [strati.truncate(rank=[1, 2, 4]), strati.drop()]
    found = strati.study(model, interventions=both, layers=["block:1-2", "!role:attention.*"], **options)
    layers = {row["layer"] for row in found.rows if row["intervention"] == "truncate"}
    assert layers and all(name.startswith(("blocks.1.", "blocks.2.")) for name in layers)
    assert {r["layer"] for r in found.rows if r["intervention"] == "drop"} == {"blocks.1", "blocks.2"}
    plan = strati.plan(found, budget="rank=2", action="truncate", layers=("block:2",), combinations=0)
    assert {layer.name for layer in plan.layers} == {n for n in layers if n.startswith("blocks.2.")}
    gone = strati.plan(found, budget="parameters=1.0", action="drop", layers=("blocks.2",), combinations=0)
    assert [layer.name for layer in gone.layers] == ["blocks.2"]
    with pytest.raises(BadInputError, match="matches no layer"):
        strati.plan(found, budget="rank=2", action="truncate", layers=("blocks.2.*", "nothing"))
    name = min(layers)
    with strati.truncated(model, {"block:1": 1}):
        assert int(torch.linalg.matrix_rank(model.get_submodule(name).weight)) == 1


def test_a_tied_weight_is_changed_by_any_of_its_names_and_nested_changes_come_back() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 5, bias=False), nn.ReLU(), nn.Linear(5, 5, bias=False))
    net[2].weight = net[0].weight
    before = net[0].weight.detach().clone()
    with strati.truncated(net, {"2": 1}), pytest.raises(RuntimeError), strati.scaled(net, {"0": 3.0}):
        assert int(torch.linalg.matrix_rank(net[0].weight)) == 1 and net[0].weight is net[2].weight
        raise RuntimeError
    assert torch.equal(net[2].weight, before) and net[0].weight is net[2].weight


def test_settings_take_the_numbers_of_numpy() -> None:
    assert strati.truncate(rank=np.arange(1, 3)).settings == strati.truncate(rank=[1, 2]).settings
    assert strati.quantise(bits=np.int64(4)).settings == strati.quantise(bits=4).settings
    assert strati.prune(share=np.array([0.25, 0.5])).settings == strati.prune(share=[0.25, 0.5]).settings
    with pytest.raises(BadInputError, match="must be a whole number"):
        strati.truncate(rank=np.array([1.5]))


def test_errors_are_over_every_sequence_however_many() -> None:
    torch.manual_seed(0)
    model, tokens = Transformer(20, 8, 1, 2, 8).eval(), RNG.integers(0, 20, (150, 8))
    table = strati.study(model, data=tokens, performance="loss", interventions="zero", spectral=False).frame()
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens))[:, :-1]
    each = nn.functional.cross_entropy(
        logits.reshape(-1, 20), torch.from_numpy(tokens)[:, 1:].reshape(-1), reduction="none"
    )
    by_sequence = each.reshape(150, -1).mean(1).numpy().astype(float)
    intact = table[table["intervention"] == "intact"]["performance_stderr"].iloc[0]
    assert intact == pytest.approx(by_sequence.std(ddof=1) / np.sqrt(150), rel=1e-5)


def test_an_untrained_network_is_studied_with_a_warning() -> None:
    torch.manual_seed(0)
    model = MLP([6, 5, 3]).eval()
    x, y = torch.randn(30, 6), torch.randint(0, 3, (30,))

    def loss(net: nn.Module) -> np.ndarray:
        with torch.no_grad():
            return nn.functional.cross_entropy(net(x), y, reduction="none").numpy()

    with torch.no_grad():  # a little worse than no network at all
        zero = np.log(3.0)
        while not zero < loss(model).mean() < 1.05 * zero:
            model.fc2.bias.normal_(0, 0.3)
    with pytest.warns(RuntimeWarning, match="with all its weights zero, which would be better"):
        found = strati.study(model, evaluate=loss, interventions="zero", spectral=False)
    error = found.frame()["performance_stderr"].iloc[0]
    assert error == pytest.approx(loss(model).std(ddof=1) / np.sqrt(30), rel=1e-5) and not pd.isna(error)


def test_numbers_of_heavy_tailed_self_regularisation_are_metrics_that_audit_judges() -> None:
    from strati import embedded
    from strati.spectra.htsr import FIELDS

    studied = strati.study(
        embedded.path("digits-mlp.safetensors"),
        data=embedded.path("digits.npz"),
        interventions=["rerandomise"],
        draws=3,
        htsr=True,
        activations=False,
        rows=200,
    )
    assert {"traps", "erg_gap", "alpha_hill", "alpha_farms", "localisation", "level_spacing"} <= set(
        studied.metrics
    )
    judged = {verdict["metric"] for verdict in strati.audit(studied).to_dict()["verdicts"]}
    assert set(FIELDS) & set(studied.metrics) <= judged and "erg_gap" in judged
