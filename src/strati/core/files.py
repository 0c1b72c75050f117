"""Writing files whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from strati.core.errors import BadInputError


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Write ``data`` beside ``path``, flush it to disk, and rename it into place.

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
