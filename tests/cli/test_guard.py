"""Not losing anything: no result is written over an input, nor over a network without ``--force``."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from command import run_strati

from strati import embedded

MODEL = str(embedded.path("digits-mlp.safetensors"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two networks, a folder with one, and data."""
    for name in ("a.safetensors", "b.safetensors"):
        shutil.copy(MODEL, tmp_path / name)
    (tmp_path / "folder").mkdir()
    shutil.copy(MODEL, tmp_path / "folder" / "model.safetensors")
    (tmp_path / "folder" / "config.json").write_text(json.dumps({"model_type": "none"}))
    shutil.copy(embedded.path("digits.npz"), tmp_path / "data.npz")
    (tmp_path / "link.safetensors").symlink_to("a.safetensors")
    (tmp_path / "hard.safetensors").hardlink_to(tmp_path / "a.safetensors")
    (tmp_path / "old.txt").write_text("anything")
    (tmp_path / "data.csv").write_text("a,b\n1,2\n")
    (tmp_path / "spec.toml").write_text(
        'name = "s"\n[network]\npath = "a.safetensors"\n[data]\npath = "data.csv"\n'
    )
    (tmp_path / "study").mkdir()
    for name in ("study.sqlite", "data.npz"):
        (tmp_path / "study" / name).write_bytes(b"kept")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["scan", "a.safetensors", "--json", "a.safetensors"],
        ["scan", "a.safetensors", "--html", "./a.safetensors"],
        ["scan", "a.safetensors", "--json", "link.safetensors"],
        ["scan", "a.safetensors", "--json", "hard.safetensors"],
        ["scan", "link.safetensors", "--json", "a.safetensors"],
        ["scan", "folder", "--json", "folder/model.safetensors"],
        ["scan", "folder", "--json", "folder/config.json"],
        ["inspect", "a.safetensors", "--json", "a.safetensors"],
        ["compare", "a.safetensors", "b.safetensors", "--json", "b.safetensors"],
        ["degeneracy", "a.safetensors", "--data", "data.npz", "--json", "data.npz"],
        ["basis", "a.safetensors", "--data", "data.npz", "--sparsify", "a.safetensors"],
        ["report", "old.txt", "-o", "old.txt"],
        ["reassemble", "--drop", "folder", "--out", "pieces", "--answer", "folder/model.safetensors"],
        ["reassemble", "--drop", "a.safetensors", "--out", "pieces", "--answer", "link.safetensors"],
        ["study", "spec.toml", "--out", "new", "--json", "spec.toml"],
        ["study", "spec.toml", "--out", "new", "--export", "data.csv"],
        ["audit", "study", "--json", "study/study.sqlite"],
        ["audit", "study", "--html", "study/data.npz"],
        ["audit", "study", "--figures", "study"],
        ["plan", "study", "--action", "drop", "--budget", "loss=+2%", "--json", "study/study.sqlite"],
    ],
)
def test_an_input_is_never_overwritten(words: list[str], place: Path) -> None:
    before = {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}
    for force in ([], ["--force"]):
        done = run_strati(*words, *force, cwd=place)
        assert done.returncode == 2
        assert re.fullmatch(r"strati: error: .*is one of the inputs.*\n", done.stderr)
    assert before == {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}


def test_files_that_out_keeps_are_no_place_for_a_result(place: Path) -> None:
    for words in (
        ["study", "fcn-digits", "--out", "study", "--json", "study/study.sqlite"],
        ["study", "fcn-digits", "--out", "folder", "--json", "folder/study.sqlite"],
        ["scan", "a.safetensors", "--out", "study", "--json", "study/data.npz"],
    ):
        done = run_strati(*words, "--force", cwd=place)
        assert done.returncode == 2
        assert "belongs to the files that --out keeps" in done.stderr
    assert (place / "study" / "study.sqlite").read_bytes() == b"kept"
    assert not (place / "folder" / "study.sqlite").exists()


def test_what_a_spec_or_a_study_names_is_an_input(place: Path) -> None:
    done = run_strati("study", "spec.toml", "--out", "new", "--json", "a.safetensors", "--force", cwd=place)
    assert done.returncode == 2
    assert "is one of the inputs" in done.stderr


def test_every_option_that_writes_is_known() -> None:
    import click

    from strati.cli.common import OUTPUTS
    from strati.cli.main import COMMANDS
    from strati.cli.main import strati as group

    seen = set()
    for verb in COMMANDS:
        command = group.get_command(click.Context(group), verb)
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option) and not option.is_flag:
                helped, metavar = option.help or "", option.metavar or ""
                if helped.startswith(("Write", "The page to write")) or metavar.startswith(("FILE", "DIR")):
                    assert OUTPUTS & set(option.opts), (verb, option.opts)
                    seen |= OUTPUTS & set(option.opts)
    assert seen == OUTPUTS


def test_a_network_is_overwritten_only_by_force(place: Path) -> None:
    original = (place / "b.safetensors").read_bytes()
    done = run_strati("inspect", "a.safetensors", "--json", "b.safetensors", cwd=place)
    assert done.returncode == 2
    assert "--force" in done.stderr
    assert (place / "b.safetensors").read_bytes() == original
    done = run_strati("inspect", "a.safetensors", "--json", "b.safetensors", "--force", cwd=place)
    assert done.returncode == 0
    assert (place / "b.safetensors").read_text().startswith('{"schema"')


def test_anything_else_is_overwritten_as_before(place: Path) -> None:
    for _ in range(2):
        assert run_strati("inspect", "a.safetensors", "--json", "old.txt", cwd=place).returncode == 0
        assert run_strati("inspect", "folder", "--json", "folder/inspect.json", cwd=place).returncode == 0
        assert run_strati("inspect", "folder", "--html", "folder/page.html", cwd=place).returncode == 0
    done = run_strati("inspect", "folder", "--json", "x", "--html", "./x", cwd=place)
    assert "two outputs" in done.stderr
