"""Ctrl-C from the first moment to the last: one line and exit code 130, whatever the process is doing.

While the program is still being imported there is nothing to clean up: it leaves at once. While a verb runs the first
Ctrl-C is a ``KeyboardInterrupt``, so that the verb can say what is kept; it waits for the end of an import, since
compiled modules that import others abort the process on any exception there. A second one leaves at once, and so does
the first where it was not heeded within seconds: imported code may swallow it, and threads may not stop. What is kept
is written whole or not at all, so that this loses nothing. When the verb is done nothing is left to stop.
Imports nothing but small modules of the standard library: it has to be there first.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType

CODE = 130
PATIENCE = 6
"""Seconds after which a Ctrl-C that was not heeded ends the process."""

_PAUSE = 0.01
"""Seconds between two looks whether an import is done."""

_MAIN = threading.main_thread()
_STOPPED = "strati: stopped"
_line = _STOPPED
"""What a process says that leaves at once."""


def resume_command(*, kept: bool = True) -> str:
    """The command as it was typed, which goes on where it was stopped.

    Args:
        kept: Whether results are kept; then a process that leaves at once from now on says the command, too.
    """
    import shlex

    global _line
    command = f"strati {shlex.join(sys.argv[1:])}"
    if kept:
        _line = f"{_STOPPED}; resume with {command}"
    return command


def last_words() -> str:
    """What a process says that was stopped in the middle of something that cannot be told."""
    return _line


def leave_at_once() -> None:
    """From now on Ctrl-C ends the process, with a line; for the time of the imports.

    Not where whoever started the process wants interrupts ignored, nor outside the main thread.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler and threading.current_thread() is _MAIN:
        signal.signal(signal.SIGINT, _leave)


def raise_once() -> None:
    """From now on the first Ctrl-C is a ``KeyboardInterrupt`` and the second one ends the process."""
    global _line
    _line = _STOPPED
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, _raise)


def pressed() -> bool:
    """Whether Ctrl-C came while a verb ran: an import that swallowed it leaves half a module and fails elsewhere."""
    return signal.getsignal(signal.SIGINT) is _leave


def ignore() -> None:
    """From now on Ctrl-C does nothing: the process is about to end anyway."""
    if signal.getsignal(signal.SIGINT) in (_leave, _raise):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if hasattr(signal, "SIGALRM"):
            signal.setitimer(signal.ITIMER_REAL, 0)


def leave() -> None:
    """End the process with the code of a Ctrl-C that was explained; returns where the process is not the program's own.

    ``sys.exit`` is not enough. CPython remembers a ``KeyboardInterrupt`` that passed through code run from a string
    (dataclasses and named tuples are made so, hence every import is such a moment); a program started with ``-m`` then
    kills itself by SIGINT at its end, even though the exception was caught long ago.
    """
    if signal.getsignal(signal.SIGINT) not in (_leave, _raise):
        return
    ignore()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody listens
            stream.flush()
    os._exit(CODE)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, f"{_line}\n".encode(errors="replace"))
    os._exit(CODE)


def _unsaid(thing: object) -> None:
    """Nothing of objects whose making was torn apart: they cannot close what they never opened (a zip file is one)."""


def _raise(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _leave)
    sys.unraisablehook = _unsaid
    end = time.monotonic() + PATIENCE
    if not hasattr(signal, "SIGALRM"):
        raise KeyboardInterrupt

    def when_imported(number: int, frame: FrameType | None) -> None:
        left = end - time.monotonic()
        if left <= 0:
            _leave(number, frame)
        if _importing(frame):
            signal.setitimer(signal.ITIMER_REAL, _PAUSE)
            return
        signal.signal(signal.SIGALRM, _leave)
        signal.setitimer(signal.ITIMER_REAL, left)
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, when_imported)
    when_imported(number, frame)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
