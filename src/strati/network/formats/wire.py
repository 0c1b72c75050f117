"""Protocol buffers on the wire: fields by number, and where their bytes are in the file. Nothing is copied.

Only what ONNX needs: numbers, and length-delimited fields as ranges.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strati.network.source import Source

MAX_FIELDS = 4_000_000


class Wire:
    """A file of protocol-buffer messages."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.data = source.data.data
        self.fields_seen = 0

    def fields(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """The fields of a message: number, wire type, and value and 0 (a number) or the range of its bytes.

        Raises:
            BadInputError: The bytes are no message.
        """
        position = start
        while position < stop:
            self.fields_seen += 1
            if self.fields_seen > MAX_FIELDS:
                raise self.source.bad("has more parts than any real file would; not read")
            key, position = self.varint(position, stop)
            number, kind = key >> 3, key & 7
            if number == 0 or number > 1 << 20:
                raise self._damaged()
            if kind == 0:
                value, position = self.varint(position, stop)
                yield number, kind, value, 0
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
                if position + size > stop:
                    raise self._damaged()
                yield number, kind, position, position + size
                position += size
            elif kind == 2:
                length, position = self.varint(position, stop)
                if length > stop - position:
                    raise self.source.bad(
                        f"truncated or damaged: a part claims {length:,} bytes, {stop - position:,} are there"
                    )
                yield number, kind, position, position + length
                position += length
            else:
                raise self._damaged()

    def varint(self, position: int, stop: int) -> tuple[int, int]:
        """A number of variable length, and where it ends."""
        value = shift = 0
        while True:
            if position >= stop or shift > 63:
                raise self._damaged()
            byte = self.data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position
            shift += 7

    def text(self, start: int, stop: int, limit: int = 65_536) -> str:
        """A string field."""
        if stop - start > limit:
            raise self.source.bad(
                f"has a name of {stop - start:,} bytes; corrupt: the header does not match the data"
            )
        return str(self.data[start:stop], "utf-8", "replace")

    def numbers(self, kind: int, start: int, stop: int) -> list[int]:
        """A repeated number, packed or single."""
        if kind == 0:
            return [start]
        values: list[int] = []
        position = start
        while position < stop:
            if len(values) > 1_000:
                raise self._damaged()
            value, position = self.varint(position, stop)
            values.append(value)
        return values

    def _damaged(self) -> Exception:
        return self.source.bad("its parts do not fit together; no ONNX file, or a damaged one")
