"""``strati plan`` and ``strati apply`` on the command line: a study, a plan, a network; one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from strati import embedded
from strati.cli.main import main
from strati.interventions.study import load_study
from strati.interventions.study_spec import read_spec


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
    lines = shown.splitlines()
    assert lines[0].startswith("Truncate ") and len(lines[0]) <= 100
    assert lines[1].startswith("Loss ") and "intact" in lines[1]
    assert lines[-1].startswith("next: strati apply ")
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


@pytest.fixture(scope="module")
def data(measured: Path) -> Path:
    with np.load(embedded.path("digits.npz")) as file:
        x, y = (file["x_test"], file["y_test"]) if "x_test" in file else (file["x"], file["y"])
    np.savez(measured / "test.npz", x=x[:150], y=y[:150])
    np.savez(measured / "named.npz", images=x[:150], labels=y[:150])
    return measured


def test_a_study_of_a_model(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options instead of a TOML file; one column per setting; the folder is enough for a plan."""
    model, out = str(data / "model.safetensors"), str(tmp_path / "s")
    words = ("--truncate", "rank=2,4", "--quantise", "bits=4,3,group=16", "--drop", "--out", out)
    assert run("study", model, "--data", str(data / "test.npz"), *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Most sensitive: ") and len(lines[0]) <= 100
    assert "no residual blocks" in "\n".join(lines) and lines[-1].startswith("next: strati plan ")
    measured = load_study(out)
    assert {r["setting"] for r in measured.rows} == {
        None,
        "rank=2",
        "rank=4",
        "bits=4,group=16",
        "bits=3,group=16",
    }
    assert run("plan", out, "--budget", "bits=5", "--json", str(tmp_path / "p.json"), "--quiet") == 0
    made = json.loads((tmp_path / "p.json").read_text())
    assert made["action"] == "quantise" and made["additivity"]["n"] > 0
    assert run("apply", str(tmp_path / "p.json"), model, "--out", str(tmp_path / "small")) == 0
    assert "as large as before" in capsys.readouterr().out


def test_a_study_of_a_model_by_default(data: Path, tmp_path: Path) -> None:
    model, out = str(data / "model.safetensors"), tmp_path / "s"
    words = ("--inputs", "images", "--targets", "labels", "--activation", "relu", "--performance", "loss")
    assert run("study", model, "--data", str(data / "named.npz"), *words, "--out", str(out), "--quiet") == 0
    measured = load_study(out)
    assert {r["intervention"] for r in measured.rows} == {"intact", "truncate", "quantise", "prune"}
    assert measured.performance["name"] == "loss" and measured.origin.data.rows == 150


def test_initial_weights_are_an_option(data: Path, tmp_path: Path) -> None:
    model, init = str(data / "model.safetensors"), str(embedded.path("digits-mlp-init.safetensors"))
    words = ("--data", str(data / "test.npz"), "--out", str(tmp_path / "s"), "--quiet")
    assert run("study", model, *words, "--reinitialise", "--rerandomise", "--initial", init) == 0
    kinds = {r["intervention"] for r in load_study(tmp_path / "s").rows}
    assert kinds == {"intact", "reinitialise", "rerandomise"}


def test_a_plan_of_a_model_stores_its_study(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")
    words = (
        "plan",
        str(data / "model.safetensors"),
        "--data",
        str(data / "test.npz"),
        "--budget",
        "loss=+5%",
    )
    assert run(*words) == 0
    first = capsys.readouterr().out
    (folder,) = (tmp_path / "cache" / "strati" / "studies").iterdir()
    written = (folder / "study.sqlite").stat().st_mtime_ns
    assert first.splitlines()[-1].startswith("next: ") and first.endswith("--json plan.json\n")
    assert run(*words) == 0
    assert capsys.readouterr().out == first
    assert (folder / "study.sqlite").stat().st_mtime_ns == written, "the second plan measures no layer again"
    assert run(*words, "--out", str(tmp_path / "own"), "--quiet") == 0
    assert {r["intervention"] for r in load_study(tmp_path / "own").rows} == {"intact", "truncate"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("study", "MODEL", "--out", "x"), "add --data DATA"),
        (("study", "MODEL", "--data", "DATA"), "--out: is missing"),
        (("study", "MODEL", "--data", "DATA", "--out", "x", "--reinitialise"), "add --initial INIT"),
        (("study", "MODEL", "--data", "DATA", "--out", "x", "--truncate", "2,4"), "write rank=2,4,8"),
        (("study", "MODEL", "--data", "DATA", "--out", "x", "--truncate", "ranks=2"), "did you mean 'rank'"),
        (("study", "MODEL", "--data", "DATA", "--out", "x", "--inputs", "nosuch"), "nosuch"),
        (("study", "fcn-digits", "--data", "DATA", "--out", "x"), "a spec names its own data"),
        (("study", "fcn-digits", "--out", "x", "--truncate", "rank=2"), "is for a model"),
        (("plan", "MODEL", "--budget", "bits=4"), "give data to measure it on"),
        (
            ("plan", "MODEL", "--data", "DATA", "--budget", "rank=4", "--action", "adapt"),
            "needs the base network",
        ),
    ],
)
def test_wrong_studies_of_models_are_one_line(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"MODEL": str(data / "model.safetensors"), "DATA": str(data / "test.npz")}
    assert run(*(names.get(word, word) for word in words)) == 2
    caught = capsys.readouterr()
    assert caught.err.startswith("strati: error: ") and why in caught.err and caught.err.count("\n") == 1
    assert not caught.out and not list(tmp_path.iterdir())


def test_the_template_is_a_spec(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("study", "--template") == 0
    (tmp_path / "study.toml").write_text(capsys.readouterr().out)
    spec = read_spec(tmp_path / "study.toml")
    assert [one.name for one in spec.config.interventions] == ["truncate", "quantise", "prune"]


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
