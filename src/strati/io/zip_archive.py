"""Zip containers (torch, npz, Keras) read by ``zipfile``, with the checks that it does not make.

Refused: two entries of one name, overlapping entries (Python before 3.11.8 reads them), encrypted ones, other methods
than stored and deflate, and expansion beyond 100 times above 16 MB. Entries that are stored are mapped, not copied.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import StratiError
from strati.io.checkpoint_file import FileSlice, MappedReader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.checkpoint_file import MappedFile

MAX_DIRECTORY = 16_000_000
FREE_EXPANSION = 16_000_000
MAX_RATIO = 100

_ENCRYPTED = 0x1 | 0x40 | 0x2000
_LOCAL_HEADER = struct.Struct("<4s2xHH16xHH")
_PIECE = 1 << 22


class ZipArchive:
    """The members of a zip file by name.

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
