"""What the format readers in ``formats/`` get and what they return.

They get a :class:`MappedFile`: bounds-checked access to the bytes of an untrusted file without reading it, and the
entries of a zip file by a :class:`ZipArchive`. They return a :class:`RawCheckpoint`: the tensors by name,
how to read one, and the warnings about the file.
"""

from __future__ import annotations

import io
import mmap
import os
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from strati.core.errors import BadInputError, StratiError
from strati.core.results import Flag

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.adapters.lora import AdapterUpdate


ANALYSED = frozenset({"float16", "bfloat16", "float32", "float64"})
"""The dtypes that are analysed; tensors of others are listed as skipped."""

MAX_DIMENSIONS = 32
MAX_TENSORS = 200_000


@dataclass(frozen=True)
class Tensor:
    """One array of a checkpoint, not yet read.

    Attributes:
        name: Its name in the file.
        shape: Its shape as stored.
        dtype: numpy's name of its type (``bfloat16`` and ``float8_*`` as in ml_dtypes), or the
            name of the quantisation (``q4_1``).
        nbytes: Bytes it occupies in the file.
        quantised: Stored as a lossy code; reading it gives float32.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    quantised: bool = False

    @property
    def size(self) -> int:
        """Number of entries."""
        return prod(self.shape)

    @property
    def floating(self) -> bool:
        """Whether its entries are real numbers that can be analysed."""
        return self.quantised or self.dtype in ANALYSED


@dataclass(frozen=True)
class Skipped:
    """A tensor that is not analysed, and why."""

    name: str
    reason: str


Kind = Literal["linear", "conv", "depthwise", "embedding", "lstm", "gru", "rnn", "stack"]


@dataclass(frozen=True)
class Hint:
    """Information that a format has about a tensor beyond its name and shape.

    Attributes:
        kind: What it does; ``None`` if the format does not say.
        transposed: Stored inputs first: ``(in, out)``, or height, width, in, out for kernels.
        label: A name that shows the role better than its own, such as that of the graph node.
        merge: Inputs and outputs of the matrix after merging axes (Keras' attention kernels).
    """

    kind: Kind | None = None
    transposed: bool = False
    label: str | None = None
    merge: tuple[int, int] | None = None


@dataclass(frozen=True)
class Quantisation:
    """How a weight was rounded before it was stored.

    Attributes:
        scheme: The scheme: ``gptq``, ``bitsandbytes-nf4``, ``q4_k``, ...
        bits: Bits per entry without scales (GGUF: with them).
        group: Entries that share a scale; ``None`` if a whole row or tensor does.
    """

    scheme: str
    bits: float
    group: int | None


@dataclass(frozen=True)
class RawCheckpoint:
    """The checked header of a checkpoint.

    Attributes:
        format: The format's name.
        tensors: The tensors that can be read, in the network's order as far as the format keeps it.
        read: Reads one tensor by name.
        unread: Tensors that the file names but that cannot be read, with the reason.
        ties: Tensors that share their bytes with an earlier one: name -> the earlier name.
        hints: Information about single tensors.
        shared: Tensors that are parts of one storage: name -> (storage, its number of entries).
        config: ``config.json`` of a Hugging Face directory, or the format's own hyperparameters.
        warnings: Warnings about the file.
        quantisation: How the tensors stored as lossy codes were rounded.
        rounding: Mean square of the error that rounding left in each entry of a tensor (of a stack: of one of its
            matrices); ``None`` if that is unknown.
        read_part: Reads one matrix of a stack, if that is cheaper than reading all of it.
        adapters: Tensors that are low-rank updates of another network's weights.
        files: The files that the values come from; empty for a network in memory.
    """

    format: str
    tensors: tuple[Tensor, ...]
    read: Callable[[str], NDArray[Any]]
    unread: tuple[Skipped, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, Hint] = field(default_factory=dict)
    shared: Mapping[str, tuple[object, int]] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    warnings: tuple[Flag, ...] = ()
    quantisation: Mapping[str, Quantisation] = field(default_factory=dict)
    rounding: Callable[[str, int | None], NDArray[Any] | None] | None = None
    read_part: Callable[[str, int], NDArray[Any]] | None = None
    adapters: Mapping[str, AdapterUpdate] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        """Name, size and modification time of each file, which identify the values without reading them.

        Raises:
            BadInputError: A file is gone.
        """
        stamps = []
        for file in self.files:
            try:
                state = file.stat()
            except OSError as error:
                raise BadInputError(file, f"cannot be read ({error.strerror or error})") from None
            stamps.append((file.name, state.st_size, state.st_mtime_ns))
        return tuple(stamps)

    def matrix(self, name: str, index: int) -> NDArray[Any]:
        """One matrix of a tensor that stacks several."""
        if self.read_part is not None:
            return self.read_part(name, index)
        stack = self.read(name)
        matrix: NDArray[Any] = stack.reshape(-1, *stack.shape[-2:])[index]
        return matrix


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a name, ml_dtypes' included.

    Examples:
        >>> numpy_dtype("bfloat16").itemsize, numpy_dtype("float32").itemsize
        (2, 4)
    """
    if name.startswith(("bfloat", "float8_", "float4_", "float6_")):
        import ml_dtypes

        small: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return small
    return np.dtype(name)


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
        opened: Cache of objects made from the file: its zip directory, files with its external data.
        place: The file that holds the bytes, and ``offset`` their position in it; for a :class:`FileSlice` another one.

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
    """An entry of an archive as a file: its bytes in place, or inflated into a temporary file.

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


MAX_DIRECTORY = 16_000_000
FREE_EXPANSION = 16_000_000
MAX_RATIO = 100

_ENCRYPTED = 0x1 | 0x40 | 0x2000
_LOCAL_HEADER = struct.Struct("<4s2xHH16xHH")
_PIECE = 1 << 22


class ZipArchive:
    """The members of a zip file (torch, npz, Keras) by name, read by ``zipfile`` with the checks that it does not make.

    Refused: two entries of one name, overlapping entries (Python before 3.11.8 reads them), encrypted ones, other
    methods than stored and deflate, and expansion beyond 100 times above 16 MB. Entries that are stored are mapped, not
    copied.

    Raises:
        BadInputError: The directory is truncated, damaged, or breaks one of the rules above.
    """

    def __init__(self, source: MappedFile) -> None:
        self.source = source
        try:
            self._zip = zipfile.ZipFile(MappedReader(source, limit=MAX_DIRECTORY))
        except StratiError:
            raise
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OSError) as error:
            raise source.error(
                f"its zip directory is damaged or truncated ({error}); download it again"
            ) from None
        self.entries: dict[str, zipfile.ZipInfo] = {}
        for entry in self._zip.infolist():
            if entry.filename in self.entries:
                raise source.error(f"the zip entry {entry.filename} is there twice; re-save the file")
            _check_entry(source, entry)
            self.entries[entry.filename] = entry
        # torch.serialization.set_crc32_options(False) writes zeros everywhere: nothing to compare with then.
        self._checksums = any(entry.CRC for entry in self.entries.values())
        self._checked: set[str] = set()
        self._starts = self._locate()

    @classmethod
    def of(cls, source: MappedFile) -> ZipArchive:
        """The archive of a file, whose directory is read once."""
        if cls not in source.opened:
            source.opened[cls] = cls(source)
        archive: ZipArchive = source.opened[cls]
        return archive

    def small(self, name: str, *, limit: int) -> bytes:
        """An entry's bytes, for small parts such as a pickle.

        Raises:
            BadInputError: There is no such entry, it is larger than ``limit``, or it is damaged.
        """
        if name not in self.entries:
            raise self.source.error(f"the zip entry {name} is missing; the file is damaged")
        size = self.entries[name].file_size
        if size > limit:
            raise self.source.error(
                f"the zip entry {name} claims {size:,} bytes, more than the limit; the file is probably corrupt"
            )
        return self.data(name).tobytes()

    def data(self, name: str) -> NDArray[np.uint8]:
        """An entry's bytes: a view of the file where they are stored plainly, inflated otherwise.

        Raises:
            BadInputError: The entry is truncated, or its checksum is wrong.
        """
        if not self.stored(name):
            return self._inflate(name, self.entries[name].file_size)
        entry, start = self.entries[name], self._starts[name]
        raw: NDArray[np.uint8] = self.source.data[start : start + entry.file_size]
        if self._checksums and name not in self._checked:
            if zlib.crc32(raw.data) != entry.CRC:
                raise self.source.error(f"the checksum of the zip entry {name} is wrong; the file is damaged")
            self._checked.add(name)
        return raw

    def peek(self, name: str, count: int) -> bytes:
        """The first bytes of an entry, unchecked; for headers."""
        size = min(count, self.entries[name].file_size)
        if self.stored(name):
            return self.source.read(self._starts[name], size)
        return self._inflate(name, size).tobytes()

    def part(self, name: str) -> FileSlice:
        """An entry as a file of its own.

        Raises:
            BadInputError: The entry is truncated, or its checksum is wrong.
        """
        return FileSlice(
            self.source, self.data(name), offset=self._starts[name] if self.stored(name) else None
        )

    def stored(self, name: str) -> bool:
        """Whether the entry lies in the file as it is."""
        return self.entries[name].compress_type == zipfile.ZIP_STORED

    def _inflate(self, name: str, size: int) -> NDArray[np.uint8]:
        inflated = np.empty(size, dtype=np.uint8)
        filled = 0
        try:
            with self._zip.open(self.entries[name]) as stream:
                while filled < size and (piece := stream.read(min(_PIECE, size - filled))):
                    inflated[filled : filled + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
                    filled += len(piece)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError):
            raise self.source.error(
                f"the zip entry {name} cannot be inflated, or its checksum is wrong; the file is damaged"
            ) from None
        if filled != size:
            raise self.source.error(f"the zip entry {name} is smaller than it claims; the file is damaged")
        return inflated

    def _locate(self) -> dict[str, int]:
        """Where the bytes of each entry begin; entries must not share any."""
        starts: dict[str, int] = {}
        reached, before = 0, ""
        for entry in sorted(self.entries.values(), key=lambda e: e.header_offset):
            name, offset = entry.filename, entry.header_offset
            self.source.check(offset, 30)
            magic, flags, method, name_length, extra_length = _LOCAL_HEADER.unpack_from(
                self.source.view, offset
            )
            if magic != b"PK\x03\x04":
                raise self.source.error(
                    f"the zip entry {name} is not where the directory says; the file is damaged"
                )
            if flags & _ENCRYPTED or method != entry.compress_type:
                raise self.source.error(f"the zip entry {name} contradicts the directory; not read")
            if offset < reached:
                raise self.source.error(f"the zip entries {before} and {name} overlap; not read")
            starts[name] = offset + 30 + name_length + extra_length
            self.source.check(starts[name], entry.compress_size)
            reached, before = starts[name] + entry.compress_size, name
        return starts


def _check_entry(source: MappedFile, entry: Any) -> None:
    name, packed, size = entry.filename, entry.compress_size, entry.file_size
    if entry.flag_bits & _ENCRYPTED:
        raise source.error(f"the zip entry {name} is encrypted; decrypt the file first")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise source.error(
            f"the zip entry {name} is packed by method {entry.compress_type}; only stored and deflate are read"
        )
    if entry.compress_type == zipfile.ZIP_STORED and packed != size:
        raise source.error(f"the zip entry {name} has two different sizes; the file is damaged")
    if size > FREE_EXPANSION and size > MAX_RATIO * packed:
        raise source.error(
            f"the zip entry {name} would grow {size:,} bytes out of {packed:,}: a zip bomb, not read"
        )
