"""Which score orders layers and settings: known answers, and the rate of false claims under the null."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from strati.interventions.audit.audit import audit
from strati.interventions.study import Study

LOSS = {"name": "loss", "chance": None, "higher_is_better": False}


def made(seed: int, layers: int = 14, scores: int = 4, kind: str = "linear") -> Study:
    rng = np.random.default_rng(seed)
    sensitivity = rng.uniform(0.5, 2.0, layers)
    rows: list[dict[str, Any]] = []
    for layer in range(layers):
        for bits in (2, 3, 4):
            step = 2.0**-bits
            cost = sensitivity[layer] * step**2 * np.exp(0.05 * rng.standard_normal())
            rows.append(
                {
                    "network": "n", "layer": f"fc{layer}", "type": kind, "intervention": "quantise",
                    "setting": f"bits={bits}", "draw": 0, "status": "done", "performance": 1.0 + cost,
                    "intact_performance": 1.0, "good": sensitivity[layer] * step**2, "negative": -cost,
                    **{f"noise{k}": float(rng.standard_normal()) for k in range(scores)},
                }
            )  # fmt: skip
    return Study("made", LOSS, tuple(rows), len(rows))


def test_a_score_that_orders_layers_and_settings_is_named() -> None:
    study = made(0)
    found = audit(study, resamples=50)
    by_layer = {row.metric: row for row in found.orders if row.across == "layers"}
    table = study.frame()
    expected = np.mean(
        [stats.spearmanr(part["good"], part["performance"]).statistic for _, part in table.groupby("setting")]
    )
    assert by_layer["good"].spearman == pytest.approx(expected)
    assert by_layer["negative"].spearman == pytest.approx(-1.0)
    assert by_layer["good"].significant and by_layer["negative"].significant
    low, high = by_layer["good"].spearman_ci
    assert low < expected < high
    by_setting = {row.metric: row for row in found.orders if row.across == "settings"}
    assert by_setting["good"].spearman == pytest.approx(1.0) and by_setting["good"].as_good_as_best
    assert not by_layer["noise0"].as_good_as_best
    assert found.to_dict()["orders"][0]["metric"] == "negative"


def test_blocks_are_named_blocks_and_few_layers_are_not_judged() -> None:
    assert {row.across for row in audit(made(1, kind="block"), resamples=20).orders} == {"blocks", "settings"}
    assert audit(made(1, layers=4), resamples=20).orders == ()


def test_a_perfect_order_of_few_blocks_has_a_wide_interval() -> None:
    rows = {
        row.metric: row for row in audit(made(3, layers=6), resamples=20).orders if row.across == "layers"
    }
    low, high = rows["negative"].spearman_ci
    assert rows["negative"].spearman == pytest.approx(-1.0)
    # z = atanh(1 - 6/210) = 2.12 and its error 1.06 / sqrt(3): the interval of a correlation of six points
    assert low == pytest.approx(-np.tanh(2.1203 + 1.96 * 0.612), abs=1e-3)
    assert high == pytest.approx(-np.tanh(2.1203 - 1.96 * 0.612), abs=3e-3)


def test_false_claims_are_rare_under_the_null() -> None:
    # 60 studies with 4 noise scores each at 5 % for all scores of one order: 11 or more has a chance below 0.1 %
    claimed = 0
    for seed in range(60):
        rows = audit(made(seed, layers=10), resamples=10).orders
        claimed += any(r.significant for r in rows if r.across == "layers" and r.metric.startswith("noise"))
    assert claimed <= 10


def test_the_answer_names_the_score_of_each_intervention(capsys: pytest.CaptureFixture[str]) -> None:
    print(audit(made(0), resamples=50))
    first = capsys.readouterr().out.splitlines()[0]
    assert "quantise" in first and "negative" in first and len(first) <= 100
