"""Locks on open files, so that two processes do not write one thing at once. POSIX only; it says so elsewhere."""

from __future__ import annotations

from strati.core.errors import UnsupportedError


def lock(handle: int, *, wait: bool) -> bool:
    """Take the exclusive lock of an open file.

    Args:
        handle: The file's descriptor; closing it gives the lock back.
        wait: Wait for whoever holds it, instead of giving up.

    Returns:
        Whether this process now holds it.

    Raises:
        UnsupportedError: On Windows, which has no such locks.
    """
    try:
        import fcntl
    except ImportError:
        raise UnsupportedError("Windows", "is not supported; use Linux, macOS or WSL") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if wait:
            raise
        return False
    return True
