"""Ctrl-C at moments that chance would rarely find."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LEFT = "strati: stopped; resume with strati study again\n"
PROGRAM = """
import os, signal, sys, time
from strati.cli import interrupts
interrupts.leave_at_once()
interrupts.raise_once()
sys.argv = ["strati", "study", "again"]
interrupts.resume_command()
try:
    import slow
    time.sleep(30)
except KeyboardInterrupt:
    print("heeded")
    interrupts.leave()
"""
SLOW = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
try:
    time.sleep(0.2)
    print("undisturbed", flush=True)
except KeyboardInterrupt:
    print("disturbed", flush=True)
{rest}
"""


def ended(program: str, *homes: Path) -> tuple[int, str, str]:
    """Exit code, output and errors of a program in a process of its own, which heeds Ctrl-C."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, homes), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("rest", "said", "error"),
    [
        ("", "undisturbed\nheeded\n", ""),
        ("time.sleep(30)", "undisturbed\n", LEFT),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", "undisturbed\n", LEFT),
    ],
    ids=["heeded when the import is done", "an import that never ends", "pressed twice"],
)
def test_an_import_is_not_torn_apart(tmp_path: Path, rest: str, said: str, error: str) -> None:
    """torch's compiled modules import others while they load, and abort the process when that raises."""
    (tmp_path / "slow.py").write_text(SLOW.format(rest=rest))
    assert ended(PROGRAM, tmp_path) == (130, said, error)


HALF = """
class Half:
    def __init__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
        self.open = True

    def __del__(self):
        print(self.open)
"""


def test_an_object_torn_apart_in_its_making_says_nothing() -> None:
    """As a zip file does whose constructor was interrupted: it has nothing to close, and raises where none catches."""
    program = PROGRAM.replace("    import slow\n    time.sleep(30)", "    Half()")
    program = program.replace("import os, signal, sys, time\n", f"import os, signal, sys, time\n{HALF}")
    program = program.replace("    interrupts.leave()", "interrupts.leave()")  # the traceback is gone by then
    assert ended(program) == (130, "heeded\n", "")
