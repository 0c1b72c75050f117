"""``strati demo``: its commands are strati's own, and take the options that they are given."""

from __future__ import annotations

from pathlib import Path

import click

from strati.cli.demo import plan
from strati.cli.main import COMMANDS, strati


def test_every_step_is_a_command_of_strati_itself(tmp_path: Path) -> None:
    group = click.Context(strati, info_name="strati")
    for _, words in plan(tmp_path, 0):
        assert words[0] in COMMANDS
        command = strati.get_command(group, words[0])
        assert command is not None
        command.make_context(words[0], list(words[1:]), parent=group)  # parses the options, runs nothing


def test_the_study_of_the_tour_needs_no_other_package(tmp_path: Path) -> None:
    study = next(words for _, words in plan(tmp_path, 0) if words[0] == "study")
    assert Path(study[1]).is_file() and {"--reinitialise", "--rerandomise"} <= set(study)
