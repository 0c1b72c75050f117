"""Ctrl-C from the first moment to the last: one line and exit code 130, whatever the process is doing.

While the program is still being imported there is nothing to clean up: it leaves at once. While a verb runs the first
Ctrl-C is a ``KeyboardInterrupt``, so that it can say what is kept; a second one leaves at once. When the verb is done
nothing is left to stop. Imports nothing but the standard library's smallest modules: it has to be there first.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

CODE = 130
_MAIN = threading.main_thread()


def leave_at_once() -> None:
    """From now on Ctrl-C ends the process, with a line; for the time of the imports.

    Not where whoever started the process wants interrupts ignored, nor outside the main thread.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler and threading.current_thread() is _MAIN:
        signal.signal(signal.SIGINT, _leave)


def raise_once() -> None:
    """From now on the first Ctrl-C is a ``KeyboardInterrupt`` and the second one ends the process."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, _raise)


def ignore() -> None:
    """From now on Ctrl-C does nothing: the process is about to end anyway."""
    if signal.getsignal(signal.SIGINT) in (_leave, _raise):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"strati: stopped\n")
    os._exit(CODE)


def _raise(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _leave)
    raise KeyboardInterrupt
