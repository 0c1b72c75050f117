"""Memory-mapped, bounds-checked access to an untrusted file.

What the bytes mean is decided in ``formats/``.
"""

from __future__ import annotations

import io
import mmap
import os
import stat
import tempfile
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class MappedFile:
    """A regular file: its path, its size, and its bytes by range.

    The file is opened without blocking (a FIFO would hang) and must be regular (``/dev/zero`` never
    ends). Its bytes are mapped, so that weights occupy file pages and no memory of the process.

    Args:
        path: The file.

    Attributes:
        path: The file.
        size: Its bytes.
        data: All of them, mapped read-only.
        view: The same as a memoryview, which is quicker to slice.
        opened: What was made of the file already: its zip directory, files with its external data.
        place: The file that holds them, and ``offset`` where they begin in it: other ones for a :class:`FileSlice`.

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
        try:
            _check_regular(handle, self.path)
            self.size = os.fstat(handle).st_size
            if self.size == 0:
                raise BadInputError(self.path, "is empty (0 bytes); the download or copy did not finish")
            # Mapping reads nothing, and outlives the closed file. Arrays of the plain class: slicing an np.memmap and
            # summing it takes several times as long.
            self._map = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(handle)
        self.data: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.view = memoryview(self._map)
        self.opened: dict[object, Any] = {}

    def read(self, offset: int, count: int) -> bytes:
        """Copy ``count`` bytes; for headers.

        Raises:
            BadInputError: The range leaves the file.
        """
        self.check(offset, count)
        return bytes(self.view[offset : offset + count])

    def head(self, count: int) -> bytes:
        """The first ``count`` bytes, fewer if the file is shorter."""
        return bytes(self.view[:count])

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A C-ordered array that lies in the file, as a view of its pages.

        Raises:
            BadInputError: The range leaves the file.
        """
        count = dtype.itemsize * prod(shape)
        self.check(offset, count)
        return np.ndarray(shape, dtype, self.view, offset)

    def find(self, piece: bytes, start: int) -> int:
        """Where the bytes ``piece`` are found first from ``start`` on; -1 if nowhere."""
        return self._map.find(piece, start)

    def check(self, offset: int, count: int) -> None:
        """Refuse a range that leaves the file."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise self.error(f"truncated: needs byte {offset + count:,}, the file has {self.size:,}")

    def error(self, why: str) -> BadInputError:
        """An error about this file."""
        return BadInputError(self.path, why)


class FileSlice(MappedFile):
    """A file inside another one: of an archive's entry, its bytes where they lie, or inflated into a temporary file.

    Messages name the outer file.
    """

    def __init__(self, outer: MappedFile, data: NDArray[np.uint8], *, offset: int | None) -> None:
        self.path = outer.path
        self.size = len(data)
        self.data, self.view, self.opened = data, data.data, {}
        if offset is not None:
            self.place, self.offset = outer.path, offset
            return
        self._file = tempfile.NamedTemporaryFile(prefix="strati-", suffix=".h5")  # noqa: SIM115 - lives as long as this
        self._file.write(data.data)
        self._file.flush()
        self.place, self.offset = Path(self._file.name), 0


class MappedReader(io.RawIOBase):
    """Mapped bytes as a stream, for libraries that read from one.

    Args:
        source: The file.
        limit: The most that is copied at once: sizes that a header claims are not to be trusted.
    """

    def __init__(self, source: MappedFile, *, limit: int) -> None:
        self._source, self._limit, self._position = source, limit, 0

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """It can be read anywhere."""
        return True

    def tell(self) -> int:
        """The position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size}[whence]
        if start + offset < 0:
            raise OSError("negative position")
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Copy the next bytes.

        Raises:
            BadInputError: More than the limit.
        """
        available = max(self._source.size - self._position, 0)
        count = available if size is None or size < 0 else min(size, available)
        if count > self._limit:
            raise self._source.error(
                f"claims a directory of {count:,} bytes, more than the limit of {self._limit:,}; it is probably corrupt"
            )
        self._position += count
        return bytes(self._source.view[self._position - count : self._position])

    def readinto(self, buffer: Any) -> int:
        """Copy the next bytes into a buffer."""
        target = memoryview(buffer).cast("B")
        piece = self.read(len(target))
        target[: len(piece)] = piece
        return len(piece)


def _check_regular(handle: int, path: Path) -> None:
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    kind = next((name for test, name in kinds if test(mode)), "a device")
    raise BadInputError(path, f"is {kind}, not a regular file; give a file or a Hugging Face directory")


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file; check the path"
    if isinstance(error, PermissionError):
        return "cannot be read (permission denied); check its permissions"
    return f"cannot be opened ({error.strerror or 'unknown reason'}); check the path"
