"""Files that are written whole or not at all, checks of output paths, tables as CSV or Parquet, and file locks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from strati.core.errors import BadInputError, UnsupportedError
from strati.core.plugins import require

if TYPE_CHECKING:
    import pandas as pd


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Write ``data`` to a temporary file in the same folder, flush it to disk and rename it to ``path``.

    Raises:
        BadInputError: The folder is missing or read-only, or the disk is full; nothing is left behind.
    """
    target = Path(path)
    raw = data.encode("utf-8") if isinstance(data, str) else data
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name[:40]}.", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
    except OSError as error:
        raise BadInputError(
            target, f"cannot be written ({error.strerror or error}); choose another place"
        ) from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def check_writable(path: str | Path) -> None:
    """Refuse an output path that cannot be written before any work is done.

    Raises:
        BadInputError: It is a directory, or its folder is missing or read-only.
    """
    target = Path(path)
    if target.is_dir():
        raise BadInputError(target, "is a directory; give the name of a file to write")
    if not target.parent.is_dir():
        raise BadInputError(target, f"its folder {target.parent} does not exist; create it first")
    if not os.access(target.parent, os.W_OK):
        raise BadInputError(target, f"its folder {target.parent} cannot be written to; choose another place")


def check_table(path: str | Path) -> None:
    """Refuse the path of a table that cannot be written or has an unknown extension, before any work is done.

    Raises:
        BadInputError: Another ending than ``.csv`` or ``.parquet``, or nothing can be written there.
    """
    check_writable(path)
    ending = Path(path).suffix.lower()
    if ending not in (".csv", ".parquet"):
        raise BadInputError(path, "a table is written as .csv or .parquet; give one of these endings")
    if ending == ".parquet":
        require("pyarrow", "parquet", "writing Parquet")


def export_table(table: pd.DataFrame, path: str | Path) -> None:
    """Write a table as ``.csv`` or ``.parquet``, by the file's extension.

    Raises:
        BadInputError: Another ending, or the file cannot be written.
    """
    check_table(path)
    target = Path(path)
    if target.suffix.lower() == ".csv":
        write_atomic(target, table.to_csv(index=False, lineterminator="\n"))
    else:
        write_atomic(target, table.to_parquet(index=False))


def lock(handle: int, *, wait: bool) -> bool:
    """Take the exclusive lock of an open file.

    Args:
        handle: The file's descriptor; closing it releases the lock.
        wait: Wait for the process that holds it instead of returning at once.

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
