"""Flax checkpoints (``.msgpack``): a nested table whose arrays are msgpack extensions, read here without flax.

An array is extension 1, itself msgpack: shape, dtype's name, bytes; arrays of more than a gigabyte are cut into chunks.
Kernels are stored inputs first.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.network.contents import MAX_DIMENSIONS, MAX_TENSORS, Contents, Hint, Skipped, Tensor, numpy_dtype
from strati.network.formats.state import is_optimizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.network.source import Source

MAX_DEPTH = 64
MAX_TEXT = 65_536
MAX_NODES = 2_000_000
CHUNKED = "__msgpack_chunked_array__"

_KNOWN = re.compile(r"bfloat16|float(16|32|64)|float8_\w+|u?int(8|16|32|64)|bool")
_LENGTHS = {0xD9: "B", 0xDA: "H", 0xDB: "I", 0xC4: "B", 0xC5: "H", 0xC6: "I"}
_NUMBERS = {
    0xCA: "f",
    0xCB: "d",
    0xCC: "B",
    0xCD: "H",
    0xCE: "I",
    0xCF: "Q",
    0xD0: "b",
    0xD1: "h",
    0xD2: "i",
    0xD3: "q",
}
_FIXED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_EXTENDED = {0xC7: "B", 0xC8: "H", 0xC9: "I"}


@dataclass(frozen=True)
class ArrayPlace:
    """An array's bytes in the file, in one or several pieces."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[int, int], ...]


def contents(source: Source) -> Contents:
    """List the arrays of a Flax checkpoint; they stay in the file.

    Raises:
        BadInputError: The file is truncated, or is not what flax writes.
    """
    cursor = _Cursor(source)
    tree = cursor.value(0)
    if cursor.position != source.size or not isinstance(tree, dict):
        raise source.bad("is not one msgpack table; it is not a Flax checkpoint, or it is corrupt")
    if isinstance(tree.get("params"), dict) and isinstance(tree["params"].get("params"), dict):
        tree = tree["params"]
    places: dict[str, ArrayPlace] = {}
    unread: list[Skipped] = []
    for name, place in _leaves(tree, ""):
        if isinstance(place, ArrayPlace):
            if name in places:
                raise source.bad(f"has two arrays named {name}; re-save the file")
            places[name] = place
        else:
            unread.append(Skipped(name, place))
    if not places:
        raise source.bad("holds no arrays; save the parameters with flax.serialization.to_bytes")
    if len(places) > MAX_TENSORS:
        raise source.bad(
            f"lists {len(places):,} arrays, over the limit of {MAX_TENSORS:,}; it is probably corrupt"
        )
    tensors = tuple(
        Tensor(name, p.shape, p.dtype, prod(p.shape) * numpy_dtype(p.dtype).itemsize)
        for name, p in places.items()
    )

    def read(name: str) -> NDArray[Any]:
        place = places[name]
        kind = numpy_dtype(place.dtype)
        if len(place.pieces) == 1:
            return source.array(place.pieces[0][0], place.shape, kind)
        whole = np.concatenate([source.data[start : start + count] for start, count in place.pieces])
        return whole.view(kind).reshape(place.shape)

    return Contents("flax", tensors, read, tuple(unread), hints=_hints(places))


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, ArrayPlace | str]]:
    """Arrays by dotted name; optimizer state is named and left out."""
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, ArrayPlace):
            yield name.removeprefix("params."), value
        elif isinstance(value, dict):
            if not prefix and (key in ("opt_state", "optimizer") or is_optimizer(value)):
                yield name, "optimizer state, not part of the network"
            else:
                yield from _leaves(value, name)


def _hints(places: dict[str, ArrayPlace]) -> dict[str, Hint]:
    """Kernels are inputs first, but for GPT-2's, which flax keeps outputs first."""
    gpt2 = any(
        re.search(r"c_attn\.kernel$", n) and p.shape[:1] == (3 * p.shape[-1],) for n, p in places.items()
    )
    hints = {}
    for name, place in places.items():
        last = name.rpartition(".")[2]
        if last == "kernel":
            first = not (gpt2 and re.search(r"\.(c_attn|c_proj|c_fc|q_attn)\.kernel$", name))
            hints[name] = Hint("conv" if 3 <= len(place.shape) <= 5 else "linear", transposed=first)
        elif last == "embedding":
            hints[name] = Hint("embedding")
    return hints


class _Cursor:
    """Reads msgpack values one after the other, every length checked against the file."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.position = 0
        self._nodes = 0

    def value(self, depth: int) -> Any:
        """The next value: tables as dicts, arrays as :class:`ArrayPlace`, byte strings not read."""
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise self.source.bad(
                "its tables are nested too deep, or hold too many entries; it is probably corrupt"
            )
        code = self._number("B")
        if code < 0x80:
            return code
        if code >= 0xE0:
            return code - 256
        if code < 0x90 or code in (0xDE, 0xDF):
            return self._table(
                code - 0x80 if code < 0x90 else self._number("H" if code == 0xDE else "I"), depth
            )
        if code < 0xA0 or code in (0xDC, 0xDD):
            return self._list(
                code - 0x90 if code < 0xA0 else self._number("H" if code == 0xDC else "I"), depth
            )
        if code < 0xC0:
            return self._text(code - 0xA0)
        return self._other(code)

    def _other(self, code: int) -> Any:
        if code in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[code]
        if code in (0xD9, 0xDA, 0xDB):
            return self._text(self._number(_LENGTHS[code]))
        if code in _LENGTHS:
            return self._skip(self._number(_LENGTHS[code]))
        if code in _NUMBERS:
            return self._number(_NUMBERS[code])
        if code in _FIXED or code in _EXTENDED:
            length = _FIXED.get(code) or self._number(_EXTENDED[code])
            return self._extension(self._number("b"), length)
        raise self.source.bad(f"has the byte {code:#x} where a value should begin; corrupt")

    def _table(self, count: int, depth: int) -> Any:
        table: dict[str, Any] = {}
        for _ in range(self._believable(count, 2)):
            key = self.value(depth + 1)
            if not isinstance(key, str | int) or str(key) in table:
                raise self.source.bad(
                    "has a key that is not text, or a key twice; it is not a Flax checkpoint"
                )
            table[str(key)] = self.value(depth + 1)
        return self._joined(table) if table.get(CHUNKED) is True else table

    def _joined(self, table: dict[str, Any]) -> ArrayPlace:
        chunks, sides = table.get("chunks"), table.get("shape")
        if isinstance(chunks, dict) and isinstance(sides, dict):
            parts = [chunks.get(str(i)) for i in range(len(chunks))]
            shape = [sides.get(str(i)) for i in range(len(sides))]
            places = [part for part in parts if isinstance(part, ArrayPlace)]
            if len(places) == len(parts) > 0 and all(type(side) is int for side in shape):
                whole = tuple(int(side) for side in shape if side is not None)
                pieces = tuple(piece for part in places for piece in part.pieces)
                size = numpy_dtype(places[0].dtype).itemsize
                if (
                    prod(whole) * size == sum(count for _, count in pieces)
                    and len({p.dtype for p in places}) == 1
                ):
                    return ArrayPlace(whole, places[0].dtype, pieces)
        raise self.source.bad("has an array in chunks that do not fit its shape; corrupt")

    def _list(self, count: int, depth: int) -> Any:
        return [self.value(depth + 1) for _ in range(self._believable(count, 1))]

    def _extension(self, kind: int, length: int) -> Any:
        end = self.position + length
        self.source.check(self.position, length)
        if kind != 1:  # numbers of numpy's types, complex ones: no weights
            self.position = end
            return None
        head = self._number("B")
        if head != 0x93:
            raise self.source.bad("has an array that flax would not write; corrupt")
        shape, name = self.value(MAX_DEPTH - 2), self.value(MAX_DEPTH - 2)
        code = self._number("B")
        count = self._number(_LENGTHS[code]) if code in (0xC4, 0xC5, 0xC6) else -1
        good = (
            isinstance(shape, list)
            and all(type(s) is int and s >= 0 for s in shape)
            and len(shape) <= MAX_DIMENSIONS
        )
        if not good or not isinstance(name, str) or not _KNOWN.fullmatch(name) or count < 0:
            raise self.source.bad("has an array of a shape or type that cannot be; corrupt")
        if prod(shape) * numpy_dtype(name).itemsize != count or self.position + count != end:
            raise self.source.bad(
                f"has an array of shape {tuple(shape)[:8]} that does not fill its bytes; corrupt"
            )
        start, self.position = self.position, end
        return ArrayPlace(tuple(shape), name, ((start, count),))

    def _believable(self, count: int, least: int) -> int:
        if count * least > self.source.size - self.position:
            raise self.source.bad("truncated: a table claims more entries than the file has bytes")
        return count

    def _text(self, length: int) -> str:
        if length > MAX_TEXT:
            raise self.source.bad(f"has a name of {length:,} bytes; corrupt")
        raw = self.source.read(self.position, length)
        self.position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.source.bad("has a name that is not UTF-8 text; corrupt") from None

    def _skip(self, length: int) -> None:
        self.source.check(self.position, length)
        self.position += length

    def _number(self, form: str) -> Any:
        size = struct.calcsize(f">{form}")
        (value,) = struct.unpack(f">{form}", self.source.read(self.position, size))
        self.position += size
        return value
