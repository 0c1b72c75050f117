"""Plans: the choice against brute force, curves made monotone, budgets, predictions that hold, exports."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression
from torch import nn

import strati
from strati.core.errors import BadInputError
from strati.interventions.compress.apply import load_plan
from strati.interventions.compress.budget import Budget, Shape, choose, monotone, read_budget
from strati.interventions.compress.candidates import Candidates
from strati.interventions.compress.costs import Curve, CurveOption, read_curves
from strati.interventions.compress.plan import _predicted
from strati.interventions.compress.predict import (
    Combination,
    Prediction,
    additivity,
    predict,
    selection_bias,
)
from strati.interventions.study import Study
from strati.interventions.study_config import CostScale
from strati.io.adapters.merge import merged


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 5), st.floats(0, 1))
def test_the_choice_is_the_best_there_is(seed: int, layers: int, most: int, share: float) -> None:
    """The multiple-choice knapsack against every choice there is."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, most + 1, layers)
    costs = [np.round(rng.exponential(size=n), 2) for n in counts]
    sizes = [np.round(10 * rng.random(n), 2) for n in counts]
    low, high = sum(s.min() for s in sizes), sum(s.max() for s in sizes)
    budget = low + share * (high - low)
    found = choose(costs, sizes, budget)
    every = itertools.product(*(range(n) for n in counts))
    best = min(
        sum(c[o] for c, o in zip(costs, pick, strict=True))
        for pick in every
        if sum(s[o] for s, o in zip(sizes, pick, strict=True)) <= budget + 1e-9
    )
    assert found.exact
    assert found.cost == pytest.approx(best, abs=1e-9)
    assert found.size <= budget + 1e-6 and found.bound <= found.cost + 1e-9


def test_a_large_choice_is_near_its_bound_and_quick() -> None:
    rng = np.random.default_rng(0)
    costs = [np.sort(rng.exponential(size=12))[::-1] for _ in range(210)]
    sizes = [np.sort(rng.random(12)) for _ in range(210)]
    found = choose(costs, sizes, 0.5 * sum(s[-1] for s in sizes))
    assert found.cost - found.bound <= 0.01 * found.cost


def test_a_choice_prints_nothing_and_stays_within_the_budget(capfd: pytest.CaptureFixture[str]) -> None:
    """Sizes in few steps, as layers of one width have them: HiGHS writes to standard output on such problems."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        layers = int(rng.integers(3, 16))
        costs = [np.sort(np.abs(rng.normal(size=6)))[::-1] * rng.choice([1e-4, 1.0]) for _ in range(layers)]
        sizes = [
            np.array([0.1, 0.2, 0.3, 0.5, 0.7, 1.0]) * rng.choice([256, 1024, 640]) for _ in range(layers)
        ]
        budget = 0.6 * sum(s[-1] for s in sizes)
        found = choose(costs, sizes, budget)
        assert found.exact and found.size <= budget * (1 + 1e-9)
    assert capfd.readouterr().out == ""


def test_a_budget_that_cannot_be_met() -> None:
    with pytest.raises(BadInputError, match="cannot be met"):
        choose([np.zeros(2)], [np.array([3.0, 4.0])], 2.0)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=9), st.integers(0, 1000))
def test_noise_is_pooled_as_isotonic_regression_does(costs: list[float], seed: int) -> None:
    errors = np.random.default_rng(seed).uniform(0.5, 2.0, len(costs))
    found = monotone(np.array(costs), errors, sure=np.inf)
    model = IsotonicRegression(increasing=False)
    want = model.fit_transform(np.arange(len(costs)), costs, sample_weight=errors**-2)
    assert np.allclose(found, want, atol=1e-6)


# --- predictions ---


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["loss", "accuracy", "perplexity", "mse", "f1"]),
    st.floats(0, 1),
    st.floats(-5, 20),
    st.floats(0, 5),
    st.floats(0, 5),
    st.floats(0, 30),
    st.sampled_from([None, 10, 5000]),
)
def test_no_interval_leaves_the_bounds_of_its_measure(
    name: str, intact: float, cost: float, error: float, less: float, more: float, examples: int | None
) -> None:
    unit = name in ("accuracy", "f1")
    start = 1.0 + 20 * intact if name == "perplexity" else intact
    scale = CostScale(name, unit, start, examples=examples)
    low, high = scale.interval(cost, error, 1.96, (less, more))
    least, most = (1.0 if name == "perplexity" else 0.0), (1.0 if unit else np.inf)
    assert least <= low <= scale.performance(cost) <= high <= most
    assert scale.interval(cost, 2 * error, 1.96, (less, more))[1] >= high - 1e-9 * max(high, 1.0)


def test_a_measure_below_its_usual_bound_has_none() -> None:
    """A user's "loss" may be negative, such as a negative log density."""
    study = study_of_settings(2, {None: -1.0, "bits=4": -0.8}, "loss")
    assert strati.plan(study, budget="bits=4", action="quantise").predicted["performance"] == pytest.approx(
        -0.6
    )


def test_small_and_large_combinations_do_not_mix() -> None:
    """Sums within noise and sums of several nats: the prediction for a sum of 0.2 is near 0.2, not below zero."""
    small = [Combination((i,), 0.001 * i, 0.002 * i, error=0.05) for i in range(4)]
    large = [Combination((9, i), 2.0 + i, 0.5 * (2.0 + i), error=0.05) for i in range(4)]
    option = CurveOption("bits=2", 2.0, 0.2, 0.05)
    scale = CostScale("loss", False, 0.05)
    relation = additivity([*small, *large], 0.2, 0.05)
    expected = predict([option], scale, relation, None, 0.95)
    assert expected.performance == pytest.approx(0.05 + 0.5 * 0.2)
    assert 0.0 < expected.low < expected.performance < expected.high < 1.0


def test_without_combinations_the_interval_allows_for_costs_that_do_not_add_up() -> None:
    relation = additivity([], 1.0, 0.0)
    expected = predict(
        [CurveOption("bits=2", 2.0, 1.0, 0.0)], CostScale("loss", False, 1.0), relation, None, 0.95
    )
    assert expected.performance == pytest.approx(2.0) and expected.low < 1.6 and expected.high > 3.0


def test_the_measurement_is_the_prediction_and_added_costs_that_contradict_it_are_reported() -> None:
    scale, best = CostScale("loss", False, 0.05), Combination((0,), 0.05, 0.21)
    adding = Prediction(0.1, 0.05, 0.2)
    found = _predicted(adding, Prediction(0.27, 0.22, 0.3), best, scale)
    assert (found["performance"], found["low"], found["high"]) == (0.27, 0.22, 0.3)
    assert found["measured"] == pytest.approx(0.26) and found["contradicted"]
    assert not _predicted(Prediction(0.1, 0.05, 0.28), Prediction(0.27, 0.22, 0.3), best, scale)[
        "contradicted"
    ]
    # a measurement without an error has no interval
    found = _predicted(adding, Prediction(0.26, None, None), best, scale)
    assert found["low"] is None and found["high"] is None
    # no measurement
    assert _predicted(adding, Prediction(None, None, None), best, scale)["performance"] == 0.1


@pytest.mark.parametrize("measure", ["loss", "accuracy"])
def test_a_plan_predicts_what_it_measured(measure: str) -> None:
    """Networks that make no error on 200 rows, hardly trained ones, and both directions of a user's function."""
    for separation in (3.0, 0.1):
        g = torch.Generator().manual_seed(3)
        y = torch.randint(0, 4, (200,), generator=g)
        x = (separation * torch.randn(4, 12, generator=g))[y] + torch.randn(200, 12, generator=g)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(60 if separation > 1 else 3):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimiser.step()

        def scores(model: nn.Module, x: Any = x, y: Any = y) -> Any:
            each = nn.functional.cross_entropy(model(x), y, reduction="none")
            return each if measure == "loss" else (model(x).argmax(1) == y).float()

        edits = [strati.quantise(bits=[1, 2, 3]), strati.prune(share=[0.5, 0.9])]
        options: dict[str, Any] = {"performance": measure, "spectral": False, "interventions": edits}
        for source in ({"data": (x, y)}, {"evaluate": scores}):
            study = strati.study(net, **source, **options)
            for action, budget in (
                ("quantise", "bits=2"),
                ("quantise", "loss=+10%"),
                ("prune", "parameters=0.5"),
            ):
                found = strati.plan(study, budget=budget, action=action, combinations=3).predicted
                most = 1.0 if measure == "accuracy" else np.inf
                assert 0.0 <= found["low"] <= found["performance"] <= found["high"] <= most
                assert found["low"] <= found["measured"] <= found["high"]
                worse = found["performance"] - found["measured"]
                assert (worse if measure == "loss" else -worse) >= -1e-9  # corrected for choosing the best


def test_one_number_per_network_has_no_interval() -> None:
    """How far a mean over unknown examples varies is not known, neither for a plan nor for a layer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(60, 6)
    y = net(x).argmax(1)

    def loss(model: nn.Module) -> float:
        return float(nn.functional.cross_entropy(model(x), y))

    study = strati.study(net, evaluate=loss, spectral=False, interventions=strati.quantise(bits=[2, 4]))
    plan = strati.plan(study, budget="bits=3")
    assert plan.predicted["performance"] == pytest.approx(plan.predicted["measured"])
    assert plan.predicted["low"] is None and plan.predicted["high"] is None
    assert all(layer.cost_ci is None for layer in plan.layers if layer.choice != "keep")
    assert plan.to_dict()["predicted"]["low"] is None


def test_the_action_is_one_that_the_study_has() -> None:
    study = study_of_settings(2, {None: 1.0, "bits=4": 1.1}, "loss")
    assert strati.plan(study, budget="loss=+30%").action == "quantise"


def test_a_loss_of_almost_nothing_may_be_more_on_new_data() -> None:
    """100 rows without an error: up to 7 % of new rows may have the loss of a guess."""
    tiny = CostScale("loss", False, 1e-4, examples=100, chance=2.3)
    low, high = tiny.interval(0.0, 1e-5, 2.77)
    assert low < 1e-4 and 0.1 < high < 0.2
    # where the loss is that of many failures, the sample's own error is enough
    assert CostScale("loss", False, 0.5, examples=100, chance=2.3).interval(0.0, 0.05, 2.77)[1] < 0.67


def test_the_best_of_many_equal_combinations_is_corrected_for_its_luck() -> None:
    """Twelve equal combinations: the chosen one seems to be better by 0.2, and the bootstrap takes half of that away.

    The mean of 150 choices has a standard error of 0.006.
    """
    rng = np.random.default_rng(0)
    seen, corrected = [], []
    for _ in range(150):
        pool = [
            Combination((i,), 1.0, float(g.mean()), g)
            for i, g in enumerate(1 + rng.standard_normal((12, 64)))
        ]
        best = min(pool, key=lambda c: c.measured or 0.0)
        seen.append(float(best.measured or 0.0))
        corrected.append(seen[-1] + selection_bias(best, pool, lambda c: c.argmin(0), None, rng))
    assert 1.0 - np.mean(seen) > 0.18
    assert 0.0 < 1.0 - np.mean(corrected) < 0.12


def test_intervals_cover_the_loss_on_data_the_plan_did_not_see() -> None:
    """Six cells of one small network: fewer than five covered has probability 0.03 at a coverage of 95 %."""
    cells = list(calibrate().cells(1, measures=("loss",)))
    assert all(cell.possible for cell in cells)
    assert len(cells) == 6 and sum(cell.covered for cell in cells) >= 5


def calibrate() -> Any:
    """The tool that measures coverage."""
    path = Path(__file__).parents[3] / "tools" / "calibrate_plan.py"
    spec = importlib.util.spec_from_file_location("calibrate_plan", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["calibrate_plan"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- on a network ---


@pytest.fixture(scope="module")
def measured() -> Study:
    torch.manual_seed(0)
    sizes = [(16, 24), (24, 24), (24, 24), (24, 5)]
    net = nn.Sequential()
    for i, (a, b) in enumerate(sizes):
        net.add_module(f"fc{i}", nn.Linear(a, b))
        net.add_module(f"act{i}", nn.Tanh())
    with torch.no_grad():
        net.fc1.weight.copy_(0.2 * net.fc1.weight + 2 * torch.outer(torch.randn(24), torch.randn(24)) / 10)
        net.fc3.weight.mul_(4)
    x = torch.randn(500, 16, generator=torch.Generator().manual_seed(1))
    return strati.study(
        net,
        data=(x, net(x).argmax(1)),
        performance="loss",
        spectral=False,
        interventions=[
            strati.truncate(parameters=[0.1, 0.3, 0.5, 0.7, 0.9]),
            strati.quantise(bits=[2, 3, 4, 8]),
            strati.prune(share=[0.25, 0.5, 0.75]),
        ],
    )


@pytest.mark.parametrize(
    ("action", "budget"),
    [
        ("truncate", "parameters=0.7"),
        ("quantise", "bits=3.0"),
        ("quantise", "bits=2.5"),
        ("prune", "parameters=0.5"),
    ],
)
def test_a_plan_meets_its_budget_and_its_prediction_holds(measured: Study, action: str, budget: str) -> None:
    plan = strati.plan(measured, budget=budget, action=action, combinations=6)
    kind, value = budget.split("=")
    assert plan.size["planned"] <= float(value) * plan.size["full"] * (1 + 1e-9)
    assert plan.predicted["low"] <= plan.predicted["measured"] <= plan.predicted["high"]
    assert plan.additivity["n"] >= 3
    # what it says is what the network does
    model = next(iter(measured.body.evaluators.values())).model
    task = next(iter(measured.body.evaluators.values())).task
    with strati.intervened(model, action, plan.choices), torch.no_grad():
        total = sum(task.add_up(task.output(model, a), b) for a, b in task.batches)
    assert plan.predicted["measured"] == pytest.approx(total / 500, rel=1e-5)
    # never worse than spreading evenly, on the data it was made from
    assert plan.predicted["measured"] <= plan.uniform["performance"] + 1e-9
    found = json.loads(plan.to_json())
    assert found["schema"] == "strati.plan/1" and kind in found["budget"]
    assert {"name", "choice", "saves", "cost", "cost_ci"} <= set(found["layers"][0])
    assert {"performance", "low", "high"} <= set(found["predicted"]) & set(found["uniform"])
    assert {"predicted", "measured", "n"} <= set(found["additivity"])


def test_additive_costs_give_the_plan_of_brute_force(measured: Study) -> None:
    curves = read_curves(measured, "truncate", "parameters")
    full = sum(c.options[-1].size for c in curves)
    best = min(
        sum(c.options[o].cost for c, o in zip(curves, pick, strict=True))
        for pick in itertools.product(*(range(len(c.options)) for c in curves))
        if sum(c.options[o].size for c, o in zip(curves, pick, strict=True)) <= 0.6 * full
    )
    bare = Study("bare", measured.performance, measured.rows, measured.units, origin=measured.origin)
    plan = strati.plan(bare, budget="parameters=0.6")
    assert sum(layer.cost for layer in plan.layers) == pytest.approx(best, abs=1e-12)
    assert plan.additivity["n"] == 0 and plan.outcome == "not-measured" and plan.exact


def test_a_budget_on_the_loss_is_met_by_measurement(measured: Study) -> None:
    plan = strati.plan(measured, budget="loss=+10%", action="quantise", combinations=2)
    assert plan.predicted["measured"] <= 1.1 * plan.performance["intact"] + 1e-9
    assert plan.outcome in ("smaller", "not-smaller")
    assert (plan.size["planned"] < plan.uniform["size"]) == (plan.outcome == "smaller")


def test_the_even_spread_is_even(measured: Study) -> None:
    plan = strati.plan(measured, budget="parameters=0.5", action="truncate", combinations=0)
    assert plan.uniform["choices"] == ["parameters=0.5"] and plan.uniform["draws"] == 1
    mixed = strati.plan(measured, budget="bits=2.5", action="quantise", combinations=0)
    assert set(mixed.uniform["choices"]) == {"bits=2", "bits=3"} and mixed.uniform["draws"] > 1


def study_of_settings(layers: int, performances: dict[str | None, float], name: str) -> Study:
    """A study without a network: every layer has these performances by setting; ``None`` is the intact one."""
    rows: list[dict[str, Any]] = []
    for i, (setting, performance) in itertools.product(range(layers), performances.items()):
        row = {"network": "n", "layer": f"l{i}", "type": "linear", "setting": setting, "draw": 0}
        row |= {"intervention": "intact" if setting is None else "quantise", "performance": performance}
        row |= {"intact_performance": performances[None], "rows": 8, "cols": 8}
        rows.append(row | {"status": "done", "reason": None, "initialiser": ""})
    measure = {"name": name, "chance": None, "higher_is_better": False}
    return Study("s", measure, tuple(rows), len(rows))


def test_a_plan_no_better_than_even_says_so() -> None:
    """Four equal layers: nothing can be gained."""
    study = study_of_settings(4, {None: 1.0, "bits=2": 2.0, "bits=4": 1.1}, "loss")
    plan = strati.plan(study, budget="bits=4", action="quantise")
    assert plan.choices == {f"l{i}": "bits=4" for i in range(4)}
    assert plan.predicted["performance"] == pytest.approx(1.4)
    assert plan.outcome == "uniform"


def test_perplexities_add_up_as_logarithms() -> None:
    plan = strati.plan(
        study_of_settings(2, {None: 10.0, "bits=4": 20.0}, "perplexity"), budget="bits=4", action="quantise"
    )
    assert plan.predicted["performance"] == pytest.approx(40.0)


def candidates(costs: list[list[float]], budget: float) -> Candidates:
    """Layers of 2, 4 or 16 bits with these costs at 2 and 4."""
    curves = [
        Curve(
            f"l{i}",
            "linear",
            Shape(1, 1, 1),
            (
                CurveOption("bits=2", 2.0, two, 0.0),
                CurveOption("bits=4", 4.0, four, 0.0),
                CurveOption("keep", 16.0, 0.0, 0.0),
            ),
        )
        for i, (two, four) in enumerate(costs)
    ]
    scale = CostScale("loss", False, 1.0)
    return Candidates(curves, scale, Budget("bits", budget), "bits", np.random.default_rng(0))


def test_layers_that_harm_each_other_are_outside() -> None:
    """Layers 0 and 1 at 2 bits cost eight times as much together: adding up takes both, the correction does not."""
    some = candidates([[1.0, 0.1], [1.0, 0.1], [1.5, 0.1], [1.5, 0.1]], 3.0)

    def measure(options: tuple[int, ...]) -> Combination:
        summed = sum(c.options[o].cost for c, o in zip(some.curves, options, strict=True))
        return Combination(options, summed, summed + 14.0 * (options[0] == 0 and options[1] == 0))

    tried = [measure(o) for o in (*some.plans(), (0, 1, 0, 1), (1, 0, 0, 1), (1, 1, 0, 0))]
    assert tried[0].options == (0, 0, 1, 1) and tried[0].measured == pytest.approx(16.2)
    found = some.corrected(measure, tried[:3])
    assert found and min(c.measured for c in found if c.measured is not None) < 4


def test_the_luckiest_of_many_equal_choices_is_not_taken_for_better() -> None:
    """Eight choices as good as the even spread, 24 sequences: the plan is the even spread in 95 % of the cases.

    400 cases; the share of others lies below 0.05 + 3 sqrt(0.05 * 0.95 / 400) = 0.083 with probability 0.999.
    """
    some, rng = candidates([[1.0, 0.1]] * 4, 4.0), np.random.default_rng(5)

    def drawn(options: tuple[int, ...], mean: float) -> Combination:
        groups = mean + rng.standard_normal(24)
        return Combination(options, 1.0, float(groups.mean()), groups)

    wrong = right = 0
    for _ in range(400):
        even = [drawn((1, 1, 1, 1), 1.0)]
        wrong += some.best([drawn((0, 2, 1, 1), 1.0) for _ in range(8)], even)[0] is not even[0]
        right += not some.best([drawn((0, 2, 1, 1), -1.0) for _ in range(8)], even)[1]
    assert wrong / 400 < 0.083
    assert right == 400


@pytest.mark.parametrize(
    ("budget", "action", "word"),
    [
        ("parameters=0.0001", "truncate", "cannot be met"),
        ("bits=4", "truncate", "is not a budget for truncate"),
        ("parameters=1.5", "truncate", "above 0, at most 1"),
        ("half", "truncate", "is not a budget; write parameters=0.8"),
        ("parameters=0.5", "drop", "no measured 'drop'"),
        ("parameters=0.5", "shrink", "no such action"),
        ("bits=1", "quantise", "cannot be met"),
    ],
)
def test_wrong_plans_are_one_line(measured: Study, budget: str, action: str, word: str) -> None:
    with pytest.raises(BadInputError, match=word) as caught:
        strati.plan(measured, budget=budget, action=action)
    assert "\n" not in str(caught.value)


def test_another_network_than_the_study_s_is_refused(measured: Study, tmp_path: Path) -> None:
    import copy

    model = next(iter(measured.body.evaluators.values())).model
    same = strati.plan(
        measured, budget="bits=4", action="quantise", combinations=0, model=copy.deepcopy(model)
    )
    assert same.additivity["n"] > 0
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.fc0.weight[0, 0] += 1.0
    with pytest.raises(BadInputError, match="another network than the study measured"):
        strati.plan(measured, budget="bits=4", action="quantise", model=other)


def test_options_of_a_plan(measured: Study) -> None:
    with pytest.raises(BadInputError, match="did you mean 'combinations'"):
        strati.plan(measured, budget="bits=4", combination=3)
    assert read_budget({"bits": 4}, "quantise").value == 4.0
    few = strati.plan(measured, budget="bits=4", action="quantise", layers=("fc1",), combinations=0)
    assert [layer.name for layer in few.layers] == ["fc1"]


def test_dropping_blocks_and_a_study_on_disk(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "tokens.npy", rng.integers(0, 40, (12, 10)))
    (tmp_path / "t.txt").write_text("the quick brown fox jumps over the lazy dog. " * 80)
    spec = {
        "network": {"source": "transformer", "width": 16, "depth": 4, "heads": 2},
        "data": {"path": str(tmp_path / "t.txt"), "context": 16},
        "train": {"epochs": 2, "batch": 16},
        "measure": {"performance": "loss", "batch": 8},
        "interventions": {"drop": {}, "quantise": {"bits": [2, 4]}},
        "metrics": {"spectral": False},
    }
    strati.study(spec, out=tmp_path / "s")
    plan = strati.plan(tmp_path / "s", budget="parameters=0.75", action="drop", combinations=3)
    assert list(plan.choices.values()) == ["drop"]
    assert plan.additivity["n"] > 0 and plan.networks[0]["hash"]
    plan.export(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json")["action"] == "drop"
    (tmp_path / "s" / "data.npz").write_bytes(b"other")
    with pytest.raises(BadInputError, match="has changed since the study"):
        strati.plan(tmp_path / "s", budget="bits=3", action="quantise")


def test_adapter_ranks_measured_and_guessed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    tuned = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    tuned.load_state_dict(base.state_dict())
    with torch.no_grad():  # the first layer's update has rank 1, the second's is full
        tuned[0].weight += torch.outer(torch.randn(16), torch.randn(12))
        tuned[2].weight += torch.randn(4, 16)
    x = torch.randn(300, 12)
    data = (x, tuned(x).argmax(1))
    found = strati.study(
        tuned,
        data=data,
        performance="loss",
        interventions=strati.adapt(base, rank=[0, 1, 2, 4]),
        spectral=False,
    )
    plan = strati.plan(found, budget="rank=2.5", action="adapt")
    assert plan.quantity == "measured-update"
    ranks = {layer.name: layer.choice for layer in plan.layers}
    assert ranks["0"] == "rank=1" and ranks["2"] == "keep"
    applied = strati.apply(plan, tuned, out=tmp_path / "adapted")
    weights = strati.open(tmp_path / "adapted" / "model.safetensors")
    both = merged(strati.open(base.state_dict()), strati.open(tmp_path / "adapted" / "adapter"))
    for name in ("0.weight", "2.weight"):
        np.testing.assert_allclose(both.read(name), weights.read(name), atol=1e-6)
    assert applied.measured["performance"] is not None
    assert [u.rank for u in both.parts[1].contents.adapters.values()] == [1, 4]
    plan.export(tmp_path / "peft.json", format="peft")
    written = json.loads((tmp_path / "peft.json").read_text())
    assert written["rank_pattern"]["^0$"] == 1 and written["alpha_pattern"]["^0$"] == 2
    assert written["strati"]["layers"][0]["cost_ci"][0] <= written["strati"]["layers"][0]["cost"]
    zero = strati.study(tuned, data=data, interventions="zero", performance="loss", spectral=False)
    guess = strati.plan(zero, budget="rank=2", action="adapt")
    assert guess.quantity == "guess-gradient" and guess.size["planned"] <= 4
    assert guess.predicted["performance"] is None and not guess.frontier and guess.outcome == "guess"
    assert (guess.frame()["quantity"] == "guess-gradient").all()
    assert (plan.frame()["quantity"] == "measured-update").all()
    with pytest.raises(BadInputError, match="says nothing about the loss"):
        strati.plan(zero, budget="loss=+2%", action="adapt")


def test_peft_reads_the_ranks(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(100, 12)
    found = strati.study(
        net, data=(x, net(x).argmax(1)), interventions=strati.truncate(rank=[1, 2, 3]), spectral=False
    )
    plan = strati.plan(found, budget="rank=2", action="truncate", combinations=0)
    plan.export(tmp_path / "p.json", format="peft")
    config = json.loads((tmp_path / "p.json").read_text())
    config.pop("strati")
    made = peft.get_peft_model(nn.Sequential(*net), peft.LoraConfig(**config))
    ranks = {n: m.r["default"] for n, m in made.named_modules() if hasattr(m, "r") and isinstance(m.r, dict)}
    want = {layer.name: int(layer.choice.split("=")[1]) for layer in plan.layers}
    assert {n.rsplit(".", 1)[-1]: r for n, r in ranks.items()} == want


def test_peft_loads_the_ranks_of_a_language_model(tmp_path: Path) -> None:
    """Eleven blocks, so that block 1 could be taken for block 10; every adapter has its rank, no other layer does."""
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=11,
        num_attention_heads=2,
        vocab_size=30,
        max_position_embeddings=32,
    )
    base = transformers.LlamaForCausalLM(config).eval()
    tuned = transformers.LlamaForCausalLM(config).eval()
    tuned.load_state_dict(base.state_dict())
    layers = [f"model.layers.{i}.self_attn.{p}" for i in (0, 1, 10) for p in ("q_proj", "v_proj")]
    with torch.no_grad():
        for name in layers[1:]:
            tuned.get_submodule(name).weight += 0.5 * torch.randn(16, 16)
    found = strati.study(
        tuned,
        data=np.random.default_rng(0).integers(0, 30, (6, 12)),
        performance="loss",
        interventions=strati.adapt(base, rank=[0, 1, 2, 4, 8]),
        layers=layers,
        spectral=False,
    )
    bare = Study("bare", found.performance, found.rows, found.units, origin=found.origin)  # by added costs
    plan = strati.plan(bare, budget="rank=4", action="adapt")
    plan.export(tmp_path / "rank.json", format="peft")
    config_of = json.loads((tmp_path / "rank.json").read_text())
    costs = {x["name"]: x["cost_ci"] for x in config_of.pop("strati")["layers"]}
    assert set(costs) == set(layers)
    made = peft.get_peft_model(base, peft.LoraConfig(**config_of))
    there = {
        n.removeprefix("base_model.model."): (m.r["default"], m.lora_alpha["default"])
        for n, m in made.named_modules()
        if isinstance(getattr(m, "r", None), dict)
    }
    ranks = {x.name: 16 if x.choice == "keep" else int(x.choice.split("=")[1]) for x in plan.layers}
    assert ranks["model.layers.0.self_attn.q_proj"] == 0  # it was not tuned
    assert there == {n: (r, 2 * r) for n, r in ranks.items() if r}
    assert sum(ranks.values()) <= 4 * len(layers)


def test_tensor_types_are_named_as_gguf_names_them(measured: Study, tmp_path: Path) -> None:
    """The names against the gguf package's own map, the pattern against how llama.cpp matches it."""
    import re

    import gguf

    from strati.interventions.compress.exports import gguf_name

    architectures = {
        "LLAMA": ["model.layers.3.self_attn.{q,k,v,o}_proj", "model.layers.10.mlp.{gate,up,down}_proj"],
        "GPT2": [
            "transformer.h.2.attn.{c_attn,c_proj}",
            "h.1.mlp.{c_fc,c_proj}",
            "transformer.wte",
            "lm_head",
        ],
        "BERT": [
            "encoder.layer.1.attention.self.{query,key,value}",
            "encoder.layer.0.{attention.output,intermediate,output}.dense",
            "embeddings.word_embeddings",
        ],
        "PHI3": [
            "model.layers.1.self_attn.qkv_proj",
            "model.layers.1.mlp.gate_up_proj",
            "model.embed_tokens",
        ],
    }
    for name, patterns in architectures.items():
        known = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, name), 12)
        for pattern in patterns:
            head, _, rest = pattern.partition("{")
            inner, _, tail = rest.partition("}")
            for word in inner.split(",") if rest else [""]:
                assert gguf_name(head + word + tail) == known.get_name(head + word + tail), head + word + tail
    types = {t.name.lower() for t in gguf.GGMLQuantizationType}
    plan = strati.plan(measured, budget="bits=4", action="quantise", combinations=0)
    plan.export(tmp_path / "types.sh", format="llama.cpp")
    options = re.findall(r"--tensor-type '([^']*)'", (tmp_path / "types.sh").read_text())
    for layer, option in zip(plan.layers, options, strict=True):
        pattern, _, kind = option.partition(
            "="
        )  # llama.cpp: name, "=", type; the name is a regular expression
        assert kind in types and pattern == pattern.lower()
        assert re.search(pattern, f"{layer.name}.weight") and not re.search(pattern, f"x{layer.name}.weight")


def test_other_forms(measured: Study, tmp_path: Path) -> None:
    plan = strati.plan(measured, budget="bits=4", action="quantise", combinations=0)
    plan.export(tmp_path / "plan.csv", format="csv")
    assert (
        (tmp_path / "plan.csv").read_text().startswith("name,choice,saves,cost,cost_low,cost_high\nfc0,bits=")
    )
    plan.export(tmp_path / "types.sh", format="llama.cpp")
    script = (tmp_path / "types.sh").read_text()
    assert script.count("--tensor-type") == 4 and "measured cost" in script
    with pytest.raises(BadInputError, match="make a plan of the action adapt"):
        plan.export(tmp_path / "x.json", format="peft")
    with pytest.raises(BadInputError, match="no such form"):
        plan.export(tmp_path / "x.json", format="xml")  # type: ignore[arg-type]
    for text, word in (("{", "not JSON"), ("{}", "not a plan"), ('{"schema": "strati.plan/1"}', "damaged")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(BadInputError, match=word):
            load_plan(tmp_path / "bad.json")
