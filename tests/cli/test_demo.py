"""``strati demo``: its commands are strati's own, it shows one line each, and it can be run again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import pytest
from command import run_strati

from strati import embedded
from strati.cli.demo import plan
from strati.cli.main import COMMANDS, strati


def test_every_step_is_a_command_of_strati_itself(tmp_path: Path) -> None:
    group = click.Context(strati, info_name="strati")
    for _, words in plan(tmp_path, 0):
        assert words[0] in COMMANDS
        command = strati.get_command(group, words[0])
        assert command is not None
        command.make_context(words[0], list(words[1:]), parent=group)  # parses the options, runs nothing


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "mine.txt").write_text("mine")
    done = run_strati("demo", "--out", str(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    assert (tmp_path / "small" / "mine.txt").read_text() == "mine"


@pytest.mark.slow
def test_the_demo_shows_one_line_per_command_and_runs_again(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    first = run_strati("demo", "--out", "tour", cwd=tmp_path, env=os.environ | {"COLUMNS": "120"})
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert [line.split()[0] for line in lines[:-2]] == [words[0] for _, words in plan(tmp_path, 0)]
    assert max(map(len, lines)) <= 120 and lines[-1].startswith("next: strati scan")
    assert "tour/report.html" in lines[-2] and (tmp_path / "tour" / "report.html").stat().st_size > 100_000
    results = {name: (tmp_path / "tour" / f"{name}.json") for name in ("scan", "plan", "apply", "lineage")}
    before = {name: path.read_text() for name, path in results.items()}
    assert json.loads(before["plan"])["layers"]
    again = run_strati("demo", "--out", "tour", "--quiet", cwd=tmp_path)
    assert again.returncode == 0 and again.stdout == ""
    timed = ("apply",)  # it times a forward pass
    assert all(results[name].read_text() == text for name, text in before.items() if name not in timed)
    copied = (tmp_path / "tour" / "shakespeare" / "model.safetensors").read_bytes()
    assert copied == (embedded.path("shakespeare") / "model.safetensors").read_bytes()
