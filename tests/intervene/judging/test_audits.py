"""Audits of made-up studies whose answers are known."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from scipy import stats

from strati.errors import BadInputError
from strati.intervene.judging.audit import AuditConfig, audit
from strati.intervene.study import Study

ACCURACY = {"name": "accuracy", "chance": 0.1, "higher_is_better": True}


def rows(
    networks: int = 12,
    layers: int = 4,
    seed: int = 0,
    *,
    kinds: tuple[str, ...] = ("reinitialise", "rerandomise"),
) -> list[dict[str, Any]]:
    """Re-initialised layers keep their accuracy, re-randomised ones lose it, with some noise."""
    rng = np.random.default_rng(seed)
    found = []
    for n in range(networks):
        for k in range(layers):
            for kind in ("intact", *kinds):
                lost = {"intact": 0.0, "reinitialise": 0.02, "rerandomise": 0.8}[kind]
                performance = 0.95 - lost * rng.uniform(0.9, 1.0)
                found.append(
                    {
                        "network": f"n{n:02d}",
                        "layer": f"fc{k}",
                        "type": "a" if k < layers // 2 else "b",
                        "intervention": kind,
                        "draw": 0,
                        "status": "done",
                        "reason": None,
                        "performance": performance,
                        "intact_performance": 0.95,
                        "oracle": 2.0 * performance,
                        "noise": float(rng.standard_normal()),
                        "same": 7.0,
                        "moved": 0.0 if kind == "intact" else 1.0 - performance,
                    }
                )
    return found


def made(rows: list[dict[str, Any]], performance: dict[str, Any] = ACCURACY) -> Study:
    return Study("made", performance, tuple(rows), len(rows))


def verdicts(study: Study, **options: Any) -> dict[str, Any]:
    return {v.metric: v for v in audit(study, options=AuditConfig(resamples=200, **options)).verdicts}


def test_a_perfect_metric_and_noise() -> None:
    found = verdicts(made(rows()))
    oracle, noise, same, moved = (found[k] for k in ("oracle", "noise", "same", "moved"))
    assert oracle.predicts_performance and oracle.separates_robust_from_critical
    assert oracle.tells_reinitialised_from_rerandomised and oracle.invariant
    assert oracle.text.startswith("Use oracle: it goes with accuracy")
    assert not noise.predicts_performance and not noise.separates_robust_from_critical
    assert not noise.tells_reinitialised_from_rerandomised and not noise.invariant
    assert noise.text.startswith("Do not judge layers by noise")
    assert same.invariant and same.predicts_performance is None and not same.separates_robust_from_critical
    assert moved.predicts_performance and moved.invariant, "0.07 against 0.85 on critical points"
    assert all("\n" not in v.text for v in found.values())


def test_numbers_are_those_of_scipy() -> None:
    study = made(rows())
    table = study.frame()
    table = table[table["intervention"] != "intact"]
    found = {(r.metric, r.layer): r for r in audit(study, options=AuditConfig(resamples=100)).metrics}
    for where, part in (
        (None, table),
        ("fc1", table[table["layer"] == "fc1"]),
        ("type:b", table[table["type"] == "b"]),
    ):
        row = found[("noise", where)]
        assert row.n == len(part)
        assert row.spearman == pytest.approx(stats.spearmanr(part["noise"], part["performance"]).statistic)
        assert row.kendall == pytest.approx(
            stats.kendalltau(part["noise"], part["performance"]).statistic, abs=1e-6
        )
        line = stats.linregress(part["noise"], part["performance"])
        left = part["performance"] - line.intercept - line.slope * part["noise"]
        assert row.rmse == pytest.approx(float(np.sqrt((left**2).mean())))
        assert row.spearman_ci is not None and row.spearman_ci[0] <= row.spearman <= row.spearman_ci[1]
        assert row.resampled == "networks"


def test_a_correlation_that_layer_types_make_is_seen_through() -> None:
    found = rows(kinds=("rerandomise",))
    rng = np.random.default_rng(3)
    for row in found:  # type b survives, type a does not; the metric knows the type and nothing else
        if row["intervention"] == "rerandomise":
            row["performance"] = (0.9 if row["type"] == "b" else 0.2) + 0.05 * rng.standard_normal()
        row["kind"] = (10.0 if row["type"] == "b" else 0.0) + rng.standard_normal()
    verdict = verdicts(made(found))["kind"]
    pooled = next(r for r in audit(made(found)).metrics if r.metric == "kind" and r.layer is None)
    assert pooled.spearman is not None and pooled.spearman > 0.7
    assert verdict.predicts_performance is False
    assert "types make the correlation" in verdict.text
    assert verdict.tells_reinitialised_from_rerandomised is None, "there is no re-initialised layer"


def test_classes_and_thresholds() -> None:
    found = {(r.layer, r.intervention): r for r in audit(made(rows())).layers}
    assert found["fc0", "reinitialise"].layer_class == "robust"
    assert found["fc0", "rerandomise"].layer_class == "critical"
    row = found["fc0", "rerandomise"]
    part = [r["performance"] for r in rows() if r["layer"] == "fc0" and r["intervention"] == "rerandomise"]
    assert row.performance_mean == pytest.approx(np.mean(part))
    assert row.performance_sem == pytest.approx(stats.sem(part))
    loose = audit(made(rows()), options=AuditConfig(robust=0.01, critical=0.0, resamples=10)).layers
    assert {r.layer_class for r in loose} == {"robust"}
    with pytest.raises(BadInputError, match="has to be below"):
        audit(made(rows()), options=AuditConfig(robust=0.4))


@pytest.mark.parametrize(
    ("measure", "values", "classes"),
    [
        (
            {"name": "loss", "chance": 10.0, "higher_is_better": False},
            (1.0, 1.5, 9.0),
            ["robust", "critical"],
        ),
        (
            {"name": "perplexity", "chance": 50_000.0, "higher_is_better": False},
            (20.0, 22.0, 6000.0),
            ["robust", "critical"],
        ),
        (
            {"name": "score", "chance": None, "higher_is_better": True},
            (10.0, 9.5, 2.0),
            ["robust", "critical"],
        ),
        (
            {"name": "error", "chance": None, "higher_is_better": False},
            (1.0, 1.05, 3.0),
            ["robust", "critical"],
        ),
    ],
)
def test_less_is_better_and_no_known_chance(
    measure: dict[str, Any], values: tuple[float, ...], classes: list[str]
) -> None:
    found = rows(layers=2)
    by_kind = dict(zip(("intact", "reinitialise", "rerandomise"), values, strict=True))
    for row in found:
        row["performance"], row["intact_performance"] = by_kind[row["intervention"]], values[0]
    assert [r.layer_class for r in audit(made(found, measure)).layers[:2]] == classes


def test_failed_points_are_counted_and_left_out() -> None:
    found = rows()
    for row in found[5:50:9]:
        for name in ("performance", "intact_performance", "oracle", "noise", "same", "moved"):
            row.pop(name)
        row |= {"status": "failed", "reason": "no luck"}
    result = audit(made(found))
    assert result.failed == 5
    plain = json.loads(result.to_json())
    assert plain["failed"] == 5 and len(plain["points"]) == len(found) - 5


def test_missing_values_and_few_points_give_null_not_numbers() -> None:
    found = rows(networks=1, layers=2)
    for row in found:
        row["noise"] = None
    result = audit(made(found))
    by_key = {(r.metric, r.layer): r for r in result.metrics}
    assert by_key[("noise", None)].n == 0 and by_key[("noise", None)].spearman is None
    assert by_key[("oracle", "fc0")].spearman is None and by_key[("oracle", "fc0")].n == 2
    assert "noise" not in {v.metric for v in result.verdicts}
    assert all(v.separates_robust_from_critical is None for v in result.verdicts)


def test_the_same_seed_gives_the_same_intervals_whatever_the_order_of_rows() -> None:
    first, again = audit(made(rows())), audit(made(rows()[::-1]))
    assert first.metrics == again.metrics and first.verdicts == again.verdicts


def test_a_study_without_changed_layers_is_refused() -> None:
    only = [row for row in rows() if row["intervention"] == "intact"]
    with pytest.raises(BadInputError, match="no changed layer"):
        audit(made(only))
