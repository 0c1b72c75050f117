"""Sensitivity scores against direct computations: finite differences, explicit gradients and Hessians."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.nn import functional

import strati
from strati.core.errors import BadInputError
from strati.interventions.metrics import NetworkScores
from strati.interventions.study import study
from strati.interventions.targets import Change, find_targets
from strati.interventions.tasks import StudyData, Task, make_task
from strati_reproductions.trained.networks import MLP, CifarResNet, Transformer

RNG = np.random.default_rng(0)


def mlp() -> tuple[nn.Module, StudyData]:
    torch.manual_seed(0)
    data = StudyData("rows", 5, np.empty(0), None, RNG.standard_normal((40, 6)), RNG.integers(0, 5, 40))
    return MLP([6, 7, 5]).eval(), data


def language() -> tuple[nn.Module, StudyData]:
    torch.manual_seed(0)
    data = StudyData("tokens", 20, np.empty(0), None, RNG.integers(0, 20, (6, 9)), None)
    return Transformer(20, 16, 3, 2, 16).eval(), data


def images() -> tuple[nn.Module, StudyData]:
    torch.manual_seed(0)
    pixels = RNG.integers(0, 256, (6, 3, 8, 8), np.uint8)
    return CifarResNet(8, 4).eval(), StudyData(
        "images", 10, np.empty(0), None, pixels, RNG.integers(0, 10, 6)
    )


def scores_of(make: Any) -> tuple[NetworkScores, Task]:
    model, data = make()
    task = make_task(data, "loss", 1000)
    return NetworkScores(model, task), task


def mean_loss(model: nn.Module, task: Task) -> float:
    with torch.no_grad():
        total = sum(task.add_up(task.output(model, x), y) for x, y in task.batches)
    return total / sum(task.count(y) for _, y in task.batches)


@pytest.mark.parametrize("make", [mlp, language, images])
def test_the_fisher_diagonal_is_the_sum_of_squared_example_gradients(make: Any) -> None:
    scores, task = scores_of(make)
    inputs, targets = task.batches[0]
    target = find_targets(scores.model)[1]
    module: Any = scores.model.get_submodule(target.name)
    total = torch.zeros_like(module.weight)
    for x, y in zip(inputs, targets, strict=True):
        scores.model.zero_grad()
        logits = task.output(scores.model, x[None])
        loss = functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), y.reshape(-1), ignore_index=-1, reduction="sum"
        )
        loss.backward()  # type: ignore[no-untyped-call]
        total += module.weight.grad**2
    expected = total / task.count(targets)
    assert torch.allclose(scores.fisher[target.name], expected, rtol=1e-4, atol=1e-8)
    step = RNG.standard_normal(target.shape).astype(np.float32)
    by_hand = 0.5 * float((expected.numpy() * step**2).sum())
    assert scores.fisher_gradient(target.name, step) == pytest.approx(by_hand, rel=1e-4)


@pytest.mark.parametrize("make", [mlp, language])
def test_attributions_add_up_to_the_joint_change_of_the_loss(make: Any) -> None:
    scores, task = scores_of(make)
    steps = {
        t.name: (0.1 * RNG.standard_normal(t.shape)).astype(np.float32) for t in find_targets(scores.model)
    }
    before = {name: w.detach().clone() for name, w in scores.weights.items()}
    shares = scores.attribute(steps)
    assert all(torch.equal(before[name], scores.weights[name]) for name in before)
    intact = mean_loss(scores.model, task)
    with torch.no_grad():
        for name, step in steps.items():
            scores.weights[name].add_(torch.from_numpy(step))
    gained = mean_loss(scores.model, task) - intact
    assert sum(shares.values()) == pytest.approx(gained, rel=3e-2)


def test_the_noise_coefficient_is_half_the_mean_curvature() -> None:
    # with a quadratic loss around W: E[L(W + t |W| u) - L(W)] = t^2 |W|^2 tr(H) / (2 n)
    scores, task = scores_of(mlp)
    target = find_targets(scores.model)[1]
    weight = scores.weights[target.name].detach().numpy().copy()
    hessian = exact_hessian(scores, task, target.name)
    expected = 0.5 * float(np.linalg.norm(weight)) ** 2 * float(np.trace(hessian)) / weight.size
    draws = [NetworkScores(scores.model, task, seed=s).noise_coefficient(target, weight) for s in range(40)]
    # the mean of 40 estimates, within three standard errors (false alarms: 0.3 %)
    assert abs(np.mean(draws) - expected) < 3 * np.std(draws, ddof=1) / np.sqrt(40) + 1e-3 * expected


def exact_hessian(scores: NetworkScores, task: Task, layer: str) -> np.ndarray:
    inputs, targets = task.batches[0]
    weight = scores.weights[layer].detach()

    def loss(values: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(scores.model, {f"{layer}.weight": values}, inputs)
        return functional.cross_entropy(logits, targets)

    size = weight.numel()
    found: np.ndarray = torch.autograd.functional.hessian(loss, weight).reshape(size, size).numpy()
    return found


def test_the_hessian_trace_is_that_of_the_exact_hessian() -> None:
    model, data = mlp()
    task = make_task(data, "loss", 1000)
    many = [NetworkScores(model, task, seed=s).traces for s in range(12)]
    for target in find_targets(model):
        exact = float(np.trace(exact_hessian(NetworkScores(model, task), task, target.name)))
        values = np.array([traces[target.name][0] for traces in many])
        assert abs(values.mean() - exact) < 3 * values.std(ddof=1) / np.sqrt(12) + 1e-6
        # the standard error of eight probes says how far one estimate lies from the next
        errors = [traces[target.name][1] for traces in many]
        assert 0.4 < np.sqrt(np.mean(np.square(errors))) / values.std(ddof=1) < 2.5


@pytest.mark.parametrize("make", [mlp, language])
def test_direct_divergence_by_its_definition(make: Any) -> None:
    scores, task = scores_of(make)
    target = find_targets(scores.model)[1]
    weight = scores.weights[target.name].detach().numpy()
    change = Change("scale", 0, (0.5 * weight).astype(np.float32), None, "")
    inputs, targets = task.batches[0]
    with torch.no_grad():
        p = torch.softmax(task.output(scores.model, inputs), -1)
        with strati.scaled(scores.model, {target.name: 0.5}):
            q = torch.softmax(task.output(scores.model, inputs), -1)
    counted = targets != -1
    expected = float((p * (p / q).log()).sum(-1)[counted].mean())
    (found,) = scores.divergences(target, [change])
    assert found == pytest.approx(expected, rel=1e-4) and found > 0


def test_a_study_records_all_scores_of_edits() -> None:
    model, data = language()
    found = study(
        model, data=data, performance="loss", metrics="all", spectral=False,
        interventions=[strati.quantise(bits=[2, 4]), strati.drop()],
    )  # fmt: skip
    assert found.failed == 0
    edited = [r for r in found.rows if r["intervention"] == "quantise"]
    names = ("fisher_gradient", "kl_direct", "aumann_shapley", "higgs", "hessian_trace", "snr", "sqnr")
    for name in (*names, "kurtosis", "outlier_ratio"):
        assert all(isinstance(row[name], float) for row in edited), name
    blocks = [r for r in found.rows if r["intervention"] == "drop"]
    assert all(0 < row["angular_distance"] < 1 and row["block_influence"] > 0 for row in blocks)
    assert "hessian_trace_stderr" in edited[0] and "hessian_trace_stderr" not in found.metrics


def test_the_default_study_has_one_backward_pass_and_no_more() -> None:
    model, data = mlp()
    edited = study(model, data=data, performance="loss", interventions=strati.zero()).rows[-1]
    assert "fisher_gradient" in edited and "higgs" not in edited and "kl_direct" not in edited
    none = study(model, data=data, performance="loss", interventions=strati.zero(), metrics=()).rows[-1]
    assert "fisher_gradient" not in none
    with pytest.raises(BadInputError, match="fisher_gradient"):
        study(model, data=data, metrics="fisher_gradent")


def test_scores_of_weights_and_outputs_by_their_definitions() -> None:
    model, data = mlp()
    (row,) = [
        r
        for r in study(model, data=data, performance="loss", interventions=strati.quantise(bits=3)).rows
        if r["intervention"] == "quantise" and r["layer"] == find_targets(model)[0].name
    ]
    module: Any = model.get_submodule(row["layer"])
    weight = module.weight.detach().double().numpy()
    with strati.quantised(model, {row["layer"]: "bits=3"}):
        step = module.weight.detach().double().numpy() - weight
    x = data.x_test
    assert row["kurtosis"] == pytest.approx(stats.kurtosis(weight.reshape(-1)), rel=1e-5)
    assert row["sqnr"] == pytest.approx(10 * np.log10((weight**2).sum() / (step**2).sum()), rel=1e-5)
    ratio = ((x @ weight.T) ** 2).sum() / ((x @ step.T) ** 2).sum()
    assert row["snr"] == pytest.approx(10 * np.log10(ratio), rel=1e-4)
    importance = np.abs(weight) * np.sqrt((x**2).mean(0))
    assert row["outlier_ratio"] == pytest.approx(100 * (importance > 5 * importance.mean()).mean())


def _scores(rows: Any, names: tuple[str, ...]) -> dict[tuple[str, str], dict[str, float]]:
    return {
        (r["layer"], r["intervention"]): {name: r[name] for name in names if name in r}
        for r in rows
        if r["intervention"] != "intact"
    }


@pytest.mark.parametrize("make", [mlp, language])
def test_scores_see_calibration_rows_and_not_the_measured_ones(make: Any) -> None:
    model, data = make()
    other = replace(data, x_test=data.x_test[::-1].copy())
    other = replace(other, y_test=None if data.y_test is None else np.roll(data.y_test, 1))
    edits = [strati.prune(share=0.5)] + ([strati.drop()] if make is language else [])
    names = ("wanda_score", "snr", "gptq_error", "activation_error", "outlier_ratio", "fisher_gradient")
    names += ("block_influence", "angular_distance", "kl_direct", "free_directions")
    common: dict[str, Any] = {"performance": "loss", "interventions": edits, "metrics": "all"}
    common |= {"degeneracy": make is mlp, "spectral": False}
    rows = (data.x_test[:5], data.y_test[:5]) if data.y_test is not None else data.x_test[:5]
    first, second = (study(model, data=d, calibration=rows, **common) for d in (data, other))
    measured = [r["performance"] for r in first.rows] != [r["performance"] for r in second.rows]
    assert measured or make is language  # the same texts in another order have the same loss
    assert _scores(first.rows, names) == _scores(second.rows, names)
    there = {name for scores in _scores(first.rows, names).values() for name in scores}
    assert there == set(names) - ({"free_directions"} if make is language else {names[6], names[7]})
    shared = study(model, data=data, **common)  # without calibration rows, the measured ones
    assert _scores(shared.rows, names) != _scores(first.rows, names)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.01, 3.0))
def test_the_fisher_score_grows_with_the_square_of_the_step(size: float) -> None:
    scores, _ = scores_of(mlp)
    target = find_targets(scores.model)[0]
    step = np.ones(target.shape, np.float32)
    one, other = (scores.fisher_gradient(target.name, factor * step) for factor in (1.0, size))
    assert one is not None and other == pytest.approx(size**2 * one, rel=1e-4)
