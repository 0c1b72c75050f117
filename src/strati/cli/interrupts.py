"""Ctrl-C: one line on standard error and exit code 130, from the first import to the last line of output.

The first Ctrl-C during a command raises ``KeyboardInterrupt``, so that the command can report what is stored. The
process ends at once on a second Ctrl-C, some seconds after a first one that a library swallowed, and while a module is
imported, because an exception inside an import of torch aborts the process. Results are written whole or not at all,
so nothing is lost. This module is imported first and therefore imports only small modules of the standard library.
"""

import atexit
import os
import shlex
import signal
import sys
import threading

CODE = 130
PATIENCE = 5.0
"""Seconds after which a Ctrl-C that code of a library swallowed ends the process."""
line = "strati: stopped"
"""The line that a process prints when it ends at once."""


def resume_command(*, kept: bool = True) -> str:
    """The command as it was typed, which resumes the work; it is printed on Ctrl-C if results are ``kept``."""
    global line
    command = f"strati {shlex.join(sys.argv[1:])}"
    line = f"strati: stopped; resume with {command}" if kept else line
    return command


def leave_at_once() -> None:
    """End the process on Ctrl-C, unless the parent process ignores interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_once() -> None:
    """Raise ``KeyboardInterrupt`` on the first Ctrl-C from now on."""
    global line
    line = "strati: stopped"
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _raise)


def leave(code: int) -> None:
    """Ignore Ctrl-C from now on, and end the process if it was stopped; nothing where no handler was installed.

    ``sys.exit`` would wait for threads that still compute, and CPython kills itself by SIGINT at its end if a
    ``KeyboardInterrupt`` passed through code run from a string, as that of a dataclass is.
    """
    if signal.getsignal(signal.SIGINT) in (_end, _raise):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if code == CODE:
            atexit._run_exitfuncs()
            os._exit(code)


def _end(*_: object) -> None:
    os.write(2, f"{line}\n".encode(errors="replace"))
    os._exit(CODE)


def _raise(*_: object) -> None:
    signal.signal(signal.SIGINT, _end)
    if any(getattr(getattr(m, "__spec__", None), "_initializing", False) for m in [*sys.modules.values()]):
        _end()
    sys.unraisablehook = lambda _: None  # objects that were interrupted in their constructor raise in __del__
    timer = threading.Timer(PATIENCE, _end)
    timer.daemon = True
    timer.start()
    raise KeyboardInterrupt
