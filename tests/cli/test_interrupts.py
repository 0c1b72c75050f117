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
interrupts.PATIENCE = 1.0
interrupts.leave_at_once()
interrupts.raise_once()
sys.argv = ["strati", "study", "again"]
interrupts.resume_command()
def press():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
try:
    {work}
except KeyboardInterrupt:
    print("stopped")
interrupts.leave(130)
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
    ("work", "printed", "error"),
    [
        ("press()", "stopped\n", ""),
        ("import slow", "", LEFT),
        ("exec('try: press()\\nexcept KeyboardInterrupt: press()')", "", LEFT),
        ("exec('try: press()\\nexcept KeyboardInterrupt: time.sleep(30)')", "", LEFT),
    ],
    ids=["during work", "during an import", "twice", "swallowed"],
)
def test_ctrl_c_ends_the_process_with_its_line(tmp_path: Path, work: str, printed: str, error: str) -> None:
    """By an exception during work; at once during an import (torch would abort), the second time, or if swallowed."""
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(30)\n"
        "finally:\n    print('an exception was raised')\n"
    )
    assert ended(PROGRAM.format(work=work), tmp_path) == (130, printed, error)


def test_an_ignored_interrupt_stays_ignored() -> None:
    """As in a background job of a shell: the handler is not installed, and the program goes on."""
    program = PROGRAM.format(work="os.kill(os.getpid(), signal.SIGINT); print('on')").replace(
        "interrupts.leave_at_once()",
        "signal.signal(signal.SIGINT, signal.SIG_IGN); interrupts.leave_at_once()",
    )
    assert ended(program + "print('end')") == (0, "on\nend\n", "")


HALF = """
class Half:
    def __init__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
        self.open = True

    def __del__(self):
        print(self.open)
"""


def test_ctrl_c_while_an_object_is_constructed_prints_no_second_error() -> None:
    """As a zip file does whose constructor was interrupted: it has nothing to close, and raises where none catches."""
    program = PROGRAM.format(work="Half()").replace("def press", f"{HALF}\ndef press")
    assert ended(program) == (130, "stopped\n", "")
