"""A file from a stranger, opened safely: regular files only, mapped rather than read, every range checked.

What the bytes mean is the business of ``formats/``.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.errors import BadInputError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Source:
    """A regular file: its path, its size, and its bytes by range.

    The file is opened without blocking (a FIFO would hang) and must be regular (``/dev/zero`` never
    ends). Its bytes are mapped, so that weights occupy file pages and no memory of the process.

    Args:
        path: The file.

    Attributes:
        path: The file.
        size: Its bytes.
        data: All of them, mapped read-only.
        place: The file that holds them, and ``offset`` where they begin in it: other ones for a :class:`Part`.

    Raises:
        BadInputError: It is missing, unreadable, empty, a directory, or not a regular file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.place = self.path
        self.offset = 0
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise BadInputError(self.path, _why(error)) from None
        except ValueError:  # a NUL in the path
            raise BadInputError(self.path, "is not a path; give the path of a model") from None
        _regular(handle, self.path)
        with os.fdopen(handle, "rb", buffering=0) as file:
            self.size = os.fstat(handle).st_size
            if self.size == 0:
                raise BadInputError(self.path, "is empty (0 bytes); the download or copy did not finish")
            # Mapping reads nothing, and outlives the closed file.
            self.data: NDArray[np.uint8] = np.memmap(file, dtype=np.uint8, mode="r")

    def read(self, offset: int, count: int) -> bytes:
        """Copy ``count`` bytes; for headers.

        Raises:
            BadInputError: The range leaves the file.
        """
        self.check(offset, count)
        return self.data[offset : offset + count].tobytes()

    def head(self, count: int) -> bytes:
        """The first ``count`` bytes, fewer if the file is shorter."""
        return self.data[: min(count, self.size)].tobytes()

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A C-ordered array that lies in the file, as a view of its pages.

        Raises:
            BadInputError: The range leaves the file.
        """
        count = dtype.itemsize
        for side in shape:
            count *= side
        self.check(offset, count)
        return self.data[offset : offset + count].view(dtype).reshape(shape)

    def check(self, offset: int, count: int) -> None:
        """Refuse a range that leaves the file."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise self.bad(f"truncated: needs byte {offset + count:,}, the file has {self.size:,}")

    def bad(self, why: str) -> BadInputError:
        """An error about this file."""
        return BadInputError(self.path, why)


class Part(Source):
    """A file inside another one: of an archive's entry, its bytes where they lie, or inflated into a temporary file.

    Messages name the outer file.
    """

    def __init__(self, outer: Source, data: NDArray[np.uint8], *, offset: int | None) -> None:
        self.path = outer.path
        self.size = len(data)
        if offset is not None:
            self.place, self.offset, self.data = outer.path, offset, data
            return
        self._file = tempfile.NamedTemporaryFile(prefix="strati-", suffix=".h5")  # noqa: SIM115 - lives as long as this
        self._file.write(data.data)
        self._file.flush()
        self.place, self.offset, self.data = Path(self._file.name), 0, data


def _regular(handle: int, path: Path) -> None:
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return
    os.close(handle)
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    kind = next((name for test, name in kinds if test(mode)), "a device")
    raise BadInputError(path, f"is {kind}, not a regular file; give a file or a Hugging Face directory")


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file; check the path"
    if isinstance(error, PermissionError):
        return "cannot be read (permission denied); check its permissions"
    return f"cannot be opened ({error.strerror or 'unknown reason'}); check the path"
