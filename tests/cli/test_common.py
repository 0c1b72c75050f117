"""What all commands share: suggestions, groups of options, pictures, the width of the output."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest
from command import run_strati

from strati import embedded
from strati.cli.common import TITLES, Command, screen_width, show
from strati.cli.main import strati as group

MODEL = embedded.path("digits-mlp.safetensors")


@pytest.mark.parametrize(
    ("words", "nearest"),
    [(["scna"], "'scan'"), (["compar"], "'compare'"), (["scan", "m", "--jsn"], "--json")],
)
def test_a_misspelt_command_or_option_gets_a_suggestion(words: list[str], nearest: str) -> None:
    done = run_strati(*words)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("strati: error: ") and nearest in line


def test_every_command_lists_its_options_in_groups() -> None:
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if name == "reproduce":
            continue
        assert isinstance(command, Command), name
        text = command.get_help(click.Context(command, info_name=name))
        assert "\nOutput:" in text and "\nOptions:" not in text, name
        positions = [text.find(f"\n{title}:") for title in TITLES]
        present = [place for place in positions if place >= 0]
        assert present == sorted(present), name


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot_writes_a_picture(ending: str, tmp_path: Path) -> None:
    picture = tmp_path / f"scan.{ending}"
    done = run_strati("scan", MODEL, "--plot", picture)
    assert done.returncode == 0, done.stderr
    assert picture.stat().st_size > 1000
    assert done.stdout.splitlines()[-1].startswith("next: ")


def test_a_picture_of_another_format_is_refused_before_any_work(tmp_path: Path) -> None:
    done = run_strati("scan", MODEL, "--plot", tmp_path / "scan.txt")
    assert done.returncode == 2 and ".png" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("width", [60, 80, 133])
def test_text_is_wrapped_at_columns_also_on_a_pipe(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert not sys.stdout.isatty() and screen_width() == width
    show("word " * 200)
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    assert " ".join(" ".join(lines).split()) == " ".join(["word"] * 200)


def test_notes_stand_above_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    show("answer\nnext: strati scan m", notes=["wrote m.json"])
    assert capsys.readouterr().out.split("\n")[:3] == ["answer", "wrote m.json", "next: strati scan m"]
