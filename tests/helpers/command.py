"""The command line for tests: in this process (fast), or in a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

from strati.cli.main import main

WIDTH = "80"
"""Columns of output, whatever terminal the tests run in."""


def run_strati(
    *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, expect: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``strati WORDS`` through the console script's entry point, in this process.

    Args:
        words: The command line.
        cwd: The working directory.
        env: The whole environment, as for ``subprocess.run``.
        expect: The exit code that the run must have.

    Returns:
        Exit code and both outputs, as ``subprocess.run`` gives them.
    """
    arguments = [str(word) for word in words]
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with (
        mock.patch.dict(os.environ, {"COLUMNS": WIDTH} | dict(env or {}), clear=env is not None),
        mock.patch.object(sys, "argv", ["strati", *arguments]),
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main(arguments)
        except SystemExit as leaving:
            code = int(leaving.code or 0)
    texts = []
    for stream in (stdout, stderr):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    assert expect is None or code == expect, texts[1]
    return subprocess.CompletedProcess(arguments, code, *texts)


def strati_command(*words: object) -> list[str]:
    """The command that runs ``strati WORDS`` in a process of its own."""
    return [sys.executable, "-m", "strati.cli.main", *map(str, words)]


def run_strati_process(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run ``strati WORDS`` in a process of its own: for start-up, signals, closed outputs and the environment."""
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        strati_command(*words), capture_output=True, text=True, timeout=120, check=False, **options
    )


strati = run_strati
