"""``strati plan`` and ``strati apply`` on the command line: a study, a plan, a network; one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strati import embedded
from strati.cli.main import main


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("cli")
    (home / "model.safetensors").write_bytes(embedded.path("digits-mlp.safetensors").read_bytes())
    (home / "compress.toml").write_text(
        """
        name = "compress"
        [network]
        source = "mlp"
        path = "model.safetensors"
        [data]
        name = "digits"
        test = 150
        [measure]
        performance = "loss"
        [interventions.truncate]
        parameters = [0.3, 0.5, 0.8]
        [interventions.quantise]
        bits = [2, 4]
        [metrics]
        spectral = false
        """
    )
    assert (
        run("study", str(home / "compress.toml"), "--out", str(home / "s"), "--workers", "1", "--quiet") == 0
    )
    return home


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    return int(caught.value.code or 0)


def test_from_study_to_network(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, out = measured / "plan.json", measured / "small"
    words = ("--action", "truncate", "--budget", "parameters=0.7", "--combinations", "2", "--json", str(plan))
    assert run("plan", str(measured / "s"), *words, "--export", str(measured / "p.csv")) == 0
    shown = capsys.readouterr().out
    assert "predicted" in shown and "spread evenly" in shown
    found = json.loads(plan.read_text())
    assert found["study"]["store"].endswith("study.sqlite") and found["networks"][0]["hash"]
    assert (measured / "p.csv").read_text().startswith("name,choice")
    assert run("apply", str(plan), str(measured / "model.safetensors"), "--out", str(out), "--json", "-") == 0
    applied = json.loads(capsys.readouterr().out)
    assert applied["measured"]["performance"] == pytest.approx(found["predicted"]["measured"], rel=1e-4)
    assert applied["parameters_after"] < applied["parameters_before"]
    assert (out / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--action", "drop", "--budget", "parameters=0.5"), "has no measured 'drop'"),
        (("--action", "truncate", "--budget", "parameters=0.001"), "cannot be met"),
        (("--action", "truncate", "--budget", "much"), "is not a budget"),
        (("--action", "quantise", "--budget", "bits=3", "--export", "/nowhere/x.csv"), "does not exist"),
    ],
)
def test_wrong_plans(
    measured: Path, words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", str(measured / "s"), *words) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1 and error.startswith("strati: error: ")


def test_wrong_networks(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    words = (
        "--action",
        "quantise",
        "--budget",
        "bits=4",
        "--combinations",
        "0",
        "--json",
        str(plan),
        "--quiet",
    )
    assert run("plan", str(measured / "s"), *words) == 0
    other = tmp_path / "other.safetensors"
    raw = bytearray((measured / "model.safetensors").read_bytes())
    raw[-4:] = b"\x00\x00\x80\x3f"
    other.write_bytes(bytes(raw))
    capsys.readouterr()
    for model, out, line in (
        (other, tmp_path / "o", "is another network than the plan was made for"),
        (measured / "model.safetensors", measured, "is the original network's folder"),
        (measured / "gone.safetensors", tmp_path / "o", "no such file"),
    ):
        assert run("apply", str(plan), str(model), "--out", str(out)) == 2
        error = capsys.readouterr().err
        assert line in error and error.count("\n") == 1
    assert not (tmp_path / "o").exists()
    other.write_text("{}")
    assert run("apply", str(other), str(measured / "model.safetensors"), "--out", str(tmp_path / "o")) == 2
    assert "is not a plan" in capsys.readouterr().err
