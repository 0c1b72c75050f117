"""Data-aware edits through study, plan and apply: calibration rows, warnings, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import strati
from strati import interventions as iv
from strati.core.errors import BadInputError
from strati.interventions.edits import InputDirections, truncate
from strati.interventions.input_covariance import InputCovariance, input_covariances
from strati.interventions.quantise_prune import gptq


@pytest.fixture
def case() -> tuple[nn.Module, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(240, 12) @ torch.diag(torch.logspace(-1, 0.5, 12))
    return net.eval(), x.numpy(), net(x).argmax(1).numpy()


def test_a_random_quarter_of_the_data_is_kept_for_the_covariances(case: Any) -> None:
    net, x, y = case
    edits = [iv.truncate(rank=3, metric="inputs"), iv.truncate(rank=3)]
    measured = strati.study(net, data=(x, y), spectral=False, activations=False, interventions=edits)
    assert measured.origin.calibration == 60
    assert measured.origin.data.rows == 180
    rows = measured.frame().set_index(["layer", "setting"])
    assert set(rows["calibration_tokens"].dropna()) == {60.0}
    plain = strati.study(net, data=(x, y), spectral=False, interventions=edits[1])
    assert plain.origin.data.rows == 240
    assert "calibration_tokens" not in plain.frame()
    again = strati.study(net, data=(x, y), spectral=False, activations=False, interventions=edits)
    assert again.frame().equals(measured.frame())


def test_scores_see_the_calibration_rows_and_not_those_that_are_measured(case: Any) -> None:
    net, x, y = case
    options: dict[str, Any] = {"spectral": False, "activations": False, "interventions": iv.truncate(rank=3)}
    given = strati.study(net, data=(x[:120], y[:120]), calibration=(x[120:], y[120:]), **options).frame()
    direct = strati.study(net, data=(x[120:], y[120:]), **options).frame()
    plain = strati.study(net, data=(x[:120], y[:120]), **options).frame()
    assert given["fisher_gradient"].equals(direct["fisher_gradient"])
    assert not given["fisher_gradient"].equals(plain["fisher_gradient"])
    assert given["performance"].equals(plain["performance"])


def test_only_the_first_rows_are_measured(case: Any) -> None:
    net, x, y = case
    options: dict[str, Any] = {"spectral": False, "interventions": iv.truncate(rank=3), "performance": "loss"}
    few = strati.study(net, data=(x, y), rows=50, **options)
    assert few.origin.data.rows == 50
    assert few.frame().equals(strati.study(net, data=(x[:50], y[:50]), **options).frame())


def test_numbers_of_heavy_tails_are_metrics_on_request(case: Any) -> None:
    net, x, y = case
    table = strati.study(net, data=(x, y), htsr=True, interventions=iv.truncate(rank=3)).frame()
    row = table[(table["layer"] == "2") & (table["intervention"] == "truncate")].iloc[0]
    numbers = strati.spectrum(net[2].weight.detach().numpy(), htsr=True).metrics()
    for name in ("alpha_hill", "alpha_farms", "traps", "level_spacing"):
        assert row[name] == pytest.approx(numbers[name])


def test_given_calibration_rows_make_exactly_the_edit(case: Any) -> None:
    net, x, y = case
    covariances = input_covariances(net, [torch.from_numpy(x[:50])])
    measured = strati.study(
        net,
        data=(x, y),
        calibration=x[:50],
        performance="loss",
        spectral=False,
        activations=False,
        interventions=[iv.truncate(rank=2, metric="inputs"), iv.quantise(bits=3, group=8, method="gptq")],
    )
    assert measured.origin.data.rows == 240
    rows = measured.frame().set_index(["layer", "setting"])["performance"]
    for layer in ("0", "2", "4"):
        weight = net.get_submodule(layer).weight
        intact = weight.detach().clone()
        matrix, c = intact.double().numpy(), covariances[layer]
        for setting, edited in (
            ("rank=2,metric=inputs", truncate(InputDirections(matrix, c), rank=2)),
            ("bits=3,group=8,method=gptq", gptq(matrix, c.matrix, 3, 8)),
        ):
            with torch.no_grad():
                weight.copy_(torch.from_numpy(edited))
                loss = nn.functional.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(y))
                weight.copy_(intact)
            assert rows[layer, setting] == pytest.approx(float(loss), rel=1e-4)


def test_every_edit_of_a_plan_from_a_model_is_data_aware_and_apply_goes_layer_by_layer(
    case: Any, tmp_path: Path
) -> None:
    net, x, y = case
    plan = strati.plan(net, data=(x, y), budget="parameters=0.6", performance="loss", combinations=2)
    assert plan.choices
    assert all(choice.endswith("metric=inputs") for choice in plan.choices.values())
    smaller = strati.apply(plan, net)
    calibration = plan.study.body.evaluators["model"].calibration.batches
    working = {name: net.get_submodule(name).weight.detach().clone() for name in ("0", "2", "4")}
    for name in working:  # each layer reads what the layers changed before it give
        if name not in plan.choices:
            continue
        share = float(plan.choices[name].partition(",")[0].partition("=")[2])
        c = input_covariances(net, calibration)[name]
        matrix = working[name].double().numpy()
        edited = truncate(InputDirections(matrix, c), parameters=share)
        with torch.no_grad():
            net.get_submodule(name).weight.copy_(torch.from_numpy(edited))
        np.testing.assert_allclose(smaller.get_submodule(name).weight.detach(), edited, atol=2e-5)
    for name, weight in working.items():
        net.get_submodule(name).weight.data.copy_(weight)
    stored = plan.to_dict()
    with pytest.raises(BadInputError, match="calibration"):
        strati.apply(stored, net)  # the study was not stored, so its data are not at hand
    written = strati.apply(stored, net, out=tmp_path / "small", calibration=x[:60], data=(x, y))
    assert written.measured["performance"] is not None


@pytest.mark.parametrize("action", ["quantise", "prune"])
def test_plans_of_stored_studies_use_the_stored_calibration_rows(
    case: Any, tmp_path: Path, action: str
) -> None:
    net, x, y = case
    from safetensors.torch import save_file

    save_file(net.state_dict(), tmp_path / "net.safetensors")
    np.savez(tmp_path / "data.npz", x=x, y=y)
    edit = (
        iv.quantise(bits=[2, 3, 4], method="gptq")
        if action == "quantise"
        else iv.prune(share=[0.3, 0.6], method="sparsegpt")
    )
    strati.study(
        tmp_path / "net.safetensors",
        data=tmp_path / "data.npz",
        performance="loss",
        spectral=False,
        out=tmp_path / "study",
        interventions=edit,
    )
    budget = "bits=3" if action == "quantise" else "parameters=0.6"
    plan = strati.plan(tmp_path / "study", budget=budget, action=action, combinations=2)
    plan.to_json(tmp_path / "plan.json")
    written = strati.apply(tmp_path / "plan.json", tmp_path / "net.safetensors", out=tmp_path / "small")
    assert written.measured["performance"] < 2 * plan.predicted["performance"] + 0.05


def test_scales_of_groups_are_counted_in_the_budget(case: Any) -> None:
    net, x, y = case
    measured = strati.study(
        net, data=(x, y), performance="loss", spectral=False, interventions=iv.quantise(bits=[2, 4], group=8)
    )
    plan = strati.plan(measured, budget="bits=5", combinations=1)
    parameters = sum(layer.rows * layer.cols for layer in plan.layers)
    counted = 0.0
    for layer in plan.layers:
        bits = 16 if layer.choice == "keep" else int(layer.choice[5])
        groups = 0 if layer.choice == "keep" else layer.rows * -(-layer.cols // 8)
        counted += bits * layer.rows * layer.cols + groups * (16 + bits)
    assert plan.size["planned"] == counted
    assert counted <= 5 * parameters


def test_few_tokens_are_a_warning_and_a_spec_splits_its_data(case: Any) -> None:
    net, x, y = case
    measured = strati.study(
        net, data=(x, y), calibration=x[:5], spectral=False, interventions=iv.prune(share=0.5, method="wanda")
    )
    assert [w["code"] for w in measured.payload()["warnings"]] == ["few-tokens"]
    assert set(measured.frame()["warning"].dropna()) == {"few-tokens"}
    spec = {
        "network": {"path": str(strati.embedded.path("digits-mlp.safetensors"))},
        "data": {"name": "digits", "test": 80},
        "interventions": {"truncate": {"rank": [4], "metric": "inputs"}, "layers": ["*"]},
        "metrics": {"spectral": False},
    }
    from_spec = strati.study(spec)
    assert from_spec.failed == 0
    assert set(from_spec.frame()["calibration_tokens"].dropna()) == {20.0}


def test_bad_input_is_one_line(case: Any) -> None:
    net, x, y = case
    edit = iv.quantise(bits=4, method="gptq")
    with pytest.raises(BadInputError, match="calibration: data-aware edits need data"):
        strati.study(net, evaluate=lambda m: 1.0, higher_is_better=True, interventions=edit)
    with pytest.raises(BadInputError, match="calibration: does not fit"):
        strati.study(net, data=(x, y), calibration=x[:, :5], interventions=edit)
    with pytest.raises(BadInputError, match="calibration: is empty"):
        strati.study(net, data=(x, y), calibration=x[:0], interventions=edit)
    with pytest.raises(BadInputError, match="too few to take a quarter"):
        strati.study(net, data=(x[:3], y[:3]), interventions=edit)
    with pytest.raises(BadInputError, match=r"quantise\.method: must be one of gptq, awq, hqq"):
        iv.quantise(bits=4, method="gtpq")
    with pytest.raises(BadInputError, match="hqq fits zero points"):
        iv.quantise(bits=4, symmetric=True, method="hqq")
    calibrated = strati.study(
        net,
        evaluate=lambda m: float((m(torch.from_numpy(x)).argmax(1) == torch.from_numpy(y)).float().mean()),
        higher_is_better=True,
        calibration=x[:50],
        interventions=edit,
    )
    assert calibrated.failed == 0


def test_a_layer_that_no_data_reach_fails_with_its_reason() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    x = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    y = np.zeros(40, dtype=np.int64)
    measured = strati.study(
        Unused(), data=(x, y), spectral=False, interventions=iv.truncate(rank=1, metric="inputs")
    )
    failed = [row for row in measured.rows if row["status"] == "failed"]
    assert [row["layer"] for row in failed] == ["unused"]
    assert "no calibration data reached" in failed[0]["reason"]


def test_covariance_without_power_truncates_by_weight() -> None:
    w = np.diag([3.0, 2.0, 1.0])
    zero = InputCovariance("fc", np.zeros((3, 3)), 7)
    np.testing.assert_allclose(
        truncate(InputDirections(w, zero), rank=1), np.diag([3.0, 0.0, 0.0]), atol=1e-9
    )


def test_context_managers_take_calibration_data(case: Any) -> None:
    net, x, _ = case
    intact = net[2].weight.detach().clone()
    c = input_covariances(net, [torch.from_numpy(x[:60])])["2"]
    with iv.truncated(net, {"2": "rank=3,metric=inputs"}, calibration=x[:60]) as smaller:
        edited = truncate(InputDirections(intact.double().numpy(), c), rank=3)
        np.testing.assert_allclose(smaller[2].weight.detach(), edited, atol=1e-5)
    assert torch.equal(net[2].weight, intact)
    with (
        pytest.raises(BadInputError, match="give calibration="),
        iv.quantised(net, {"2": "bits=4,method=gptq"}),
    ):
        pass
