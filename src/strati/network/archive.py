"""Zip containers (torch, npz) read strictly: the directory checked against the file, entries mapped where stored.

Refused: two entries of one name, overlapping entries, encrypted ones, other methods than stored and deflate,
and expansion beyond 100 times above 16 MB. An entry is never inflated past its declared size, and its checksum
is compared when it is first read.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.network.source import Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.network.source import Source

MAX_DIRECTORY = 24_000_000
MAX_ENTRIES = 200_000
FREE_EXPANSION = 16_000_000
MAX_RATIO = 100

_STORED, _DEFLATED = 0, 8
_ENCRYPTED = 0x1 | 0x40 | 0x2000


@dataclass(frozen=True)
class ArchiveEntry:
    """One member: where its bytes are and what they should come to."""

    name: str
    method: int
    crc: int
    packed: int
    size: int
    header: int


class Archive:
    """The members of a zip file by name.

    Raises:
        BadInputError: The directory is truncated, damaged, or breaks one of the rules above.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.entries: dict[str, ArchiveEntry] = {}
        for entry in _directory(source):
            if entry.name in self.entries:
                raise source.bad(f"the zip entry {entry.name} is there twice; re-save the file")
            self.entries[entry.name] = entry
        # torch.serialization.set_crc32_options(False) writes zeros everywhere: nothing to compare with then.
        self._checksums = any(entry.crc for entry in self.entries.values())
        self._starts: dict[str, int] = {}
        self._checked: set[str] = set()
        self._no_overlap()

    def small(self, name: str, *, limit: int) -> bytes:
        """An entry's bytes, for small parts such as a pickle.

        Raises:
            BadInputError: There is no such entry, it is larger than ``limit``, or it is damaged.
        """
        if name not in self.entries:
            raise self.source.bad(f"the zip entry {name} is missing; the file is damaged")
        if self.entries[name].size > limit:
            raise self.source.bad(
                f"the zip entry {name} claims {self.entries[name].size:,} bytes, more than the limit;"
                " the file is probably corrupt"
            )
        return self.data(name).tobytes()

    def data(self, name: str) -> NDArray[np.uint8]:
        """An entry's bytes: a view of the file where they are stored plainly, inflated otherwise.

        Raises:
            BadInputError: The entry is truncated, or its checksum is wrong.
        """
        entry = self.entries[name]
        start = self._starts[name]
        raw = self.source.data[start : start + entry.packed]
        whole: NDArray[np.uint8] = raw if entry.method == _STORED else self._inflate(entry, raw)
        if self._checksums and name not in self._checked:
            if zlib.crc32(whole.data) != entry.crc:
                raise self.source.bad(f"the checksum of the zip entry {name} is wrong; the file is damaged")
            self._checked.add(name)
        return whole

    def peek(self, name: str, count: int) -> bytes:
        """The first bytes of an entry, unchecked; for headers."""
        entry = self.entries[name]
        start = self._starts[name]
        if entry.method == _STORED:
            return self.source.read(start, min(count, entry.size))
        raw = self.source.data[start : start + min(entry.packed, 4 * count + 1024)]
        try:
            return zlib.decompressobj(-15).decompress(raw.data, count)
        except zlib.error:
            raise self.source.bad(f"the zip entry {name} cannot be inflated; the file is damaged") from None

    def part(self, name: str) -> Part:
        """An entry as a file of its own.

        Raises:
            BadInputError: The entry is truncated, or its checksum is wrong.
        """
        data = self.data(name)
        return Part(self.source, data, offset=self._starts[name] if self.stored(name) else None)

    def stored(self, name: str) -> bool:
        """Whether the entry lies in the file as it is."""
        return self.entries[name].method == _STORED

    def _inflate(self, entry: ArchiveEntry, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
        engine = zlib.decompressobj(-15)
        whole = np.empty(entry.size, dtype=np.uint8)
        filled = 0
        # In pieces, so that the packed and the inflated bytes are never both held twice.
        position = 0
        try:
            while not engine.eof:
                chunk: Any = engine.unconsumed_tail
                if not chunk:
                    chunk = raw[position : position + (1 << 20)]
                    position += 1 << 20
                    if len(chunk) == 0:
                        break
                piece = engine.decompress(chunk, min(1 << 22, entry.size - filled + 1))
                if filled + len(piece) > entry.size:
                    raise self.source.bad(f"the zip entry {entry.name} is larger than it claims; not read")
                whole[filled : filled + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
                filled += len(piece)
        except zlib.error:
            raise self.source.bad(
                f"the zip entry {entry.name} cannot be inflated; the file is damaged"
            ) from None
        if filled != entry.size:
            raise self.source.bad(
                f"the zip entry {entry.name} is smaller than it claims; the file is damaged"
            )
        return whole

    def _no_overlap(self) -> None:
        reached, before = 0, ""
        for entry in sorted(self.entries.values(), key=lambda e: e.header):
            start = _data_start(self.source, entry)
            if entry.header < reached:
                raise self.source.bad(f"the zip entries {before} and {entry.name} overlap; not read")
            self.source.check(start, entry.packed)
            self._starts[entry.name] = start
            reached, before = start + entry.packed, entry.name


def _directory(source: Source) -> list[ArchiveEntry]:
    offset, length = _end_record(source)
    if length > MAX_DIRECTORY:
        raise source.bad(
            f"its zip directory claims {length:,} bytes, more than the limit; the file is probably corrupt"
        )
    raw = source.read(offset, length)
    entries: list[ArchiveEntry] = []
    position = 0
    while position < length:
        if position + 46 > length or raw[position : position + 4] != b"PK\x01\x02":
            raise source.bad("its zip directory is damaged; download it again")
        (flags, method, _, _, crc, packed, size, n_name, n_extra, n_comment, _, _, _, header) = (
            struct.unpack_from("<HHHHIIIHHHHHII", raw, position + 8)
        )
        name_at = position + 46
        extra_at = name_at + n_name
        position = extra_at + n_extra + n_comment
        if position > length or len(entries) >= MAX_ENTRIES:
            raise source.bad(
                f"its zip directory is damaged or lists more than {MAX_ENTRIES:,} entries; not read"
            )
        name = raw[name_at:extra_at].decode("utf-8" if flags & 0x800 else "cp437", "replace")
        packed, size, header = _wide(source, raw[extra_at : extra_at + n_extra], packed, size, header)
        _check_entry(source, name, flags, method, packed, size)
        entries.append(ArchiveEntry(name, method, crc, packed, size, header))
    return entries


def _check_entry(source: Source, name: str, flags: int, method: int, packed: int, size: int) -> None:
    if flags & _ENCRYPTED:
        raise source.bad(f"the zip entry {name} is encrypted; decrypt the file first")
    if method not in (_STORED, _DEFLATED):
        raise source.bad(
            f"the zip entry {name} is packed by method {method}; only stored and deflate are read"
        )
    if method == _STORED and packed != size:
        raise source.bad(f"the zip entry {name} has two different sizes; the file is damaged")
    if size > FREE_EXPANSION and size > MAX_RATIO * packed:
        raise source.bad(
            f"the zip entry {name} would grow {size:,} bytes out of {packed:,}: a zip bomb, not read"
        )


def _end_record(source: Source) -> tuple[int, int]:
    tail_at = max(0, source.size - 65_557)
    tail = source.read(tail_at, source.size - tail_at)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + 22 > len(tail):
        raise source.bad("truncated: a zip file without its directory; download or save it again")
    length, offset = struct.unpack_from("<II", tail, at + 12)
    if at >= 20 and tail[at - 20 : at - 16] == b"PK\x06\x07":
        (record,) = struct.unpack_from("<Q", tail, at - 12)
        wide = source.read(record, 56)
        if wide[:4] != b"PK\x06\x06":
            raise source.bad("its zip64 directory is damaged; download it again")
        length, offset = struct.unpack_from("<QQ", wide, 40)
    return offset, length


def _wide(source: Source, extra: bytes, packed: int, size: int, header: int) -> tuple[int, int, int]:
    """Put the 64-bit values of the zip64 extra field in place of the markers."""
    values = [size, packed, header]
    if 0xFFFFFFFF not in values:
        return packed, size, header
    position = 0
    while position + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, position)
        field = extra[position + 4 : position + 4 + length]
        position += 4 + length
        if tag != 1:
            continue
        at = 0
        for index, value in enumerate(values):
            if value == 0xFFFFFFFF and at + 8 <= len(field):
                (values[index],) = struct.unpack_from("<Q", field, at)
                at += 8
        return values[1], values[0], values[2]
    raise source.bad("a zip entry of more than 4 GB lacks its size; the file is damaged")


def _data_start(source: Source, entry: ArchiveEntry) -> int:
    local = source.read(entry.header, 30)
    if local[:4] != b"PK\x03\x04":
        raise source.bad(f"the zip entry {entry.name} is not where the directory says; the file is damaged")
    flags, method = struct.unpack_from("<HH", local, 6)
    if flags & _ENCRYPTED or method != entry.method:
        raise source.bad(f"the zip entry {entry.name} contradicts the directory; not read")
    n_name, n_extra = struct.unpack_from("<HH", local, 26)
    return int(entry.header + 30 + n_name + n_extra)
