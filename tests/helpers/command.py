"""The command line run as a user runs it: in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def strati(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run ``strati WORDS`` and give what it said and its exit code."""
    command = [sys.executable, "-m", "strati.cli.main", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)  # type: ignore[call-overload,no-any-return]
