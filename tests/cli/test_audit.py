"""``strati audit``: the JSON contract, figures, and studies that are not there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from command import run_strati

from strati.core.errors import BadInputError
from strati.interventions.study import load_study, study


def run(*words: str | Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    return run_strati("audit", *words, expect=expect)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study")
    network = {"source": "fcn", "count": 2, "together": 2, "hidden": [12, 10]}
    study(
        {
            "network": network,
            "data": {"name": "digits"},
            "train": {"epochs": 2},
            "interventions": {"draws": 2},
        },
        out=path,
    )
    return path


def test_the_json_has_the_fields_that_scripts_rely_on(folder: Path) -> None:
    found = json.loads(run(folder, "--json", "-", "--resamples", "50").stdout)
    assert found["schema"] == "strati.audit/1" and found["failed"] == 0
    row = found["metrics"][0]
    assert {
        "metric",
        "layer",
        "spearman",
        "spearman_ci",
        "kendall",
        "kendall_ci",
        "rmse",
        "rmse_ci",
        "n",
    } <= set(row)
    alpha = [r for r in found["metrics"] if r["metric"] == "alpha" and r["intervention"] is None]
    assert [r["layer"] for r in alpha] == [None, "type:linear", "fc1", "fc2", "fc3"]
    assert [r["n"] for r in alpha] == [18, 18, 6, 6, 6]
    for r in found["metrics"]:
        if r["spearman_ci"] is not None:
            assert -1 <= r["spearman_ci"][0] <= r["spearman_ci"][1] <= 1
    assert {(r["layer"], r["intervention"]) for r in found["layers"]} == {
        (f"fc{i}", kind) for i in (1, 2, 3) for kind in ("reinitialise", "rerandomise")
    }
    assert {r["class"] for r in found["layers"]} <= {"robust", "critical", "mixed"}
    names = (
        "invariant",
        "separates_robust_from_critical",
        "predicts_performance",
        "tells_reinitialised_from_rerandomised",
    )
    for verdict in found["verdicts"]:
        assert all(verdict[name] in (True, False, None) for name in names)
        assert verdict["text"] and "\n" not in verdict["text"]
        assert verdict["recommendation"] in {
            "use",
            "use-with-care",
            "distinguish-only",
            "do-not-use",
            "unknown",
        }
    kinds = [v["intervention"] for v in found["verdicts"] if v["metric"] == "alpha"]
    assert kinds == [None, "reinitialise", "rerandomise"]
    assert {r["intervention"] for r in found["metrics"]} == set(kinds)
    assert found["performance"]["name"] == "accuracy" and found["performance"]["chance"] == pytest.approx(0.1)
    assert 0 < found["performance"]["intact"] <= 1 and found["performance"]["higher_is_better"] is True
    point = found["points"][0]
    assert {"network", "layer", "intervention", "draw", "performance", "metrics"} <= set(point)
    assert "alpha" in point["metrics"] and len(found["points"]) == 24


def test_the_same_seed_gives_the_same_and_thresholds_are_options(folder: Path) -> None:
    first, again = (run(folder, "--json", "-", "--resamples", "50").stdout for _ in range(2))
    assert first == again
    strict = json.loads(
        run(folder, "--json", "-", "--resamples", "20", "--robust", "99", "--critical", "98").stdout
    )
    assert {r["class"] for r in strict["layers"]} == {"critical"}


def test_a_table(folder: Path) -> None:
    lines = run(folder, "--resamples", "20").stdout.splitlines()
    assert len(lines[0]) <= 100 and "\\[" not in "".join(lines)
    assert any("within layers" in line for line in lines)
    assert lines[-1].startswith("next: strati report ")
    verbose = run(folder, "--resamples", "20", "--verbose").stdout
    assert "alpha" in verbose and len(verbose.splitlines()) > len(lines)


def test_a_figure_of_each_layer_and_of_all(folder: Path) -> None:
    found = load_study(folder)
    assert [axes.get_title().splitlines()[0] for axes in found.plot(metric="alpha").axes] == [
        "fc1",
        "fc2",
        "fc3",
    ]
    assert len(found.plot(metric="alpha", pooled=True).axes) == 1
    with pytest.raises(BadInputError, match="not a metric of this study"):
        found.plot(metric="beta")


@pytest.mark.slow
def test_all_figures(folder: Path, tmp_path: Path) -> None:
    done = run(folder, "--resamples", "20", "--figures", tmp_path / "figures")
    assert done.stdout
    assert (tmp_path / "figures" / "alpha.png").read_bytes().startswith(b"\x89PNG")


def test_studies_that_are_not_there_are_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    raw = bytearray((folder / "study.sqlite").read_bytes())
    raw[len(raw) // 2 :] = b"\x55" * (len(raw) - len(raw) // 2)
    (damaged / "study.sqlite").write_bytes(raw)
    for where, word in (
        (tmp_path / "gone", "no such folder"),
        (tmp_path / "empty", "no store here"),
        (damaged, "damaged"),
    ):
        told = run(where, expect=2).stderr
        assert told.startswith("strati: error: ") and word in told and told.count("\n") == 1
    assert not (tmp_path / "empty" / "study.sqlite").exists()
    assert "has to be below" in run(folder, "--robust", "0.3", expect=2).stderr
