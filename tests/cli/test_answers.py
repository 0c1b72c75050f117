"""Every command on the embedded networks: the answer first, no line too wide, the key column, a command to run last."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from command import run_strati
from tooling import tool

from strati.cli.main import strati as group

TRANSCRIPT = tool("transcript")
NOT_RUN = {"demo", "reproduce"}
"""Commands that run others or need another package."""


@pytest.mark.parametrize("width", [80, pytest.param(120, marks=pytest.mark.slow)])
def test_every_command_answers_first_and_ends_in_a_command(width: int, tmp_path: Path) -> None:
    TRANSCRIPT.prepare(tmp_path)
    for line in TRANSCRIPT.LINES:
        words = shlex.split(line.words)
        env = {"COLUMNS": str(width), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        done = run_strati(*words, cwd=tmp_path, env=env)
        assert done.returncode == 0, (line.words, done.stderr)
        lines = done.stdout.rstrip("\n").split("\n")
        sentence = re.split(r"(?<=[.!?]) ", " ".join(lines[:3]), maxsplit=1)[0]
        assert 10 <= len(sentence) <= 100, (line.words, sentence)
        too_wide = [text for text in lines if len(text.rstrip()) > width]
        assert not too_wide, (line.words, too_wide)
        assert line.key.lower() in done.stdout.lower(), line.words
        following = shlex.split(lines[-1].removeprefix("next: "))
        assert lines[-1].startswith("next: "), (line.words, lines[-1])
        assert _is_runnable(following), (line.words, lines[-1])


def test_the_transcript_has_every_command() -> None:
    listed = {shlex.split(line.words)[0] for line in TRANSCRIPT.LINES}
    assert listed == {name for name in group.list_commands(None) if name not in NOT_RUN}
    page = TRANSCRIPT.PAGE.read_text(encoding="utf-8")
    assert all(f"$ strati {line.words}\n" in page for line in TRANSCRIPT.LINES)


def _is_runnable(words: list[str]) -> bool:
    """Whether the command line parses: a known command whose options exist."""
    if words[:3] == ["python", "-m", "webbrowser"]:
        return len(words) == 4
    if words[0] != "strati":
        return False
    command = group.get_command(None, words[1])
    if command is None:
        return False
    options = {option for parameter in command.params for option in parameter.opts}
    return all(word.split("=")[0] in options for word in words[2:] if word.startswith("--"))
