"""Flax checkpoints (``.msgpack``): a nested table whose arrays are msgpack extensions, unpacked by ``msgpack``.

An array is extension 1, itself msgpack: shape, dtype's name, bytes; arrays of more than a gigabyte are cut into chunks.
Kernels are stored inputs first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.plugins import require
from strati.io.checkpoint_file import (
    MAX_DIMENSIONS,
    MAX_TENSORS,
    Hint,
    RawCheckpoint,
    Skipped,
    Tensor,
    numpy_dtype,
)
from strati.io.formats.safetensors_file import DTYPES
from strati.io.formats.state_dict import is_optimizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.checkpoint_file import MappedFile

MAX_DEPTH = 64
MAX_NAME = 4_096
MAX_LIST = 10_000  # flax writes lists as tables
CHUNKED = "__msgpack_chunked_array__"

_DTYPES = frozenset(DTYPES.values())


@dataclass(frozen=True)
class ArrayPlace:
    """An array's bytes in the file, in one or several pieces."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[int, int], ...]


def contents(source: MappedFile) -> RawCheckpoint:
    """List the arrays of a Flax checkpoint; they stay in the file.

    Raises:
        BadInputError: The file is truncated, or is not what flax writes.
        MissingExtraError: msgpack is not installed.
    """
    tree = _Unpacker(source).tree()
    if isinstance(tree.get("params"), dict) and isinstance(tree["params"].get("params"), dict):
        tree = tree["params"]
    places: dict[str, ArrayPlace] = {}
    unread: list[Skipped] = []
    for name, place in _leaves(source, tree, "", 0):
        if isinstance(place, ArrayPlace):
            if name in places:
                raise source.error(f"has two arrays named {name}; re-save the file")
            places[name] = place
        else:
            unread.append(Skipped(name, place))
    if not places:
        raise source.error("holds no arrays; save the parameters with flax.serialization.to_bytes")
    tensors = tuple(
        Tensor(name, p.shape, p.dtype, prod(p.shape) * numpy_dtype(p.dtype).itemsize)
        for name, p in places.items()
    )

    def read(name: str) -> NDArray[Any]:
        place = places[name]
        kind = numpy_dtype(place.dtype)
        if len(place.pieces) == 1:
            return source.array(place.pieces[0][0], place.shape, kind)
        joined = np.concatenate([source.data[start : start + count] for start, count in place.pieces])
        return joined.view(kind).reshape(place.shape)

    return RawCheckpoint("flax", tensors, read, tuple(unread), hints=_hints(places))


def _leaves(
    source: MappedFile, tree: dict[str, Any], prefix: str, depth: int
) -> Iterator[tuple[str, ArrayPlace | str]]:
    """Arrays by dotted name; optimizer state is named and left out."""
    if depth > MAX_DEPTH:
        raise source.error("its tables are nested too deep; it is probably corrupt")
    for key, child in tree.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(child, ArrayPlace):
            yield name.removeprefix("params."), child
        elif isinstance(child, dict):
            if not prefix and (key in ("opt_state", "optimizer") or is_optimizer(child)):
                yield name, "optimizer state, not part of the network"
            else:
                yield from _leaves(source, child, name, depth + 1)


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


class _Unpacker:
    """Tables as dicts, arrays as :class:`ArrayPlace`; what is neither is dropped as soon as it is read."""

    def __init__(self, source: MappedFile) -> None:
        self._source = source
        self._msgpack = require("msgpack", "flax", "reading Flax .msgpack files")
        self._position = 0
        self._tables = 0

    def tree(self) -> dict[str, Any]:
        """The file's table.

        Raises:
            BadInputError: The file is not one msgpack table, or one that flax would not write.
        """
        try:
            tree = self._msgpack.unpackb(
                self._source.view,
                object_pairs_hook=self._table,
                list_hook=lambda _: None,
                ext_hook=self._extension,
                strict_map_key=False,
                max_str_len=MAX_NAME,
                max_array_len=MAX_LIST,
                max_map_len=MAX_TENSORS,
            )
        except (ValueError, self._msgpack.UnpackException) as error:
            reason = str(error) or type(error).__name__
            raise self._source.error(f"is not a Flax checkpoint, or a damaged one ({reason})") from None
        if not isinstance(tree, dict):
            raise self._source.error(
                "is not one msgpack table; it is not a Flax checkpoint, or it is corrupt"
            )
        return tree

    def _table(self, pairs: list[tuple[Any, Any]]) -> Any:
        self._tables += 1
        table = {str(key): value for key, value in pairs if isinstance(key, str | int)}
        if len(table) != len(pairs) or self._tables > MAX_TENSORS:
            raise self._source.error("has a key that is not text, a key twice, or too many tables; corrupt")
        if table.get(CHUNKED) is True:
            return self._joined(table)
        keep = (dict, ArrayPlace, int)  # whole numbers are the sides of an array in chunks
        return {key: value for key, value in table.items() if isinstance(value, keep)}

    def _joined(self, table: dict[str, Any]) -> ArrayPlace:
        chunks, sides = table.get("chunks"), table.get("shape")
        if isinstance(chunks, dict) and isinstance(sides, dict):
            places = [chunks.get(str(i)) for i in range(len(chunks))]
            shape: tuple[Any, ...] = tuple(sides.get(str(i)) for i in range(len(sides)))
            if places and all(isinstance(p, ArrayPlace) for p in places) and _is_shape(shape):
                pieces = tuple(piece for place in places for piece in place.pieces)  # type: ignore[union-attr]
                (dtype, *others) = {place.dtype for place in places}  # type: ignore[union-attr]
                count = sum(count for _, count in pieces)
                if not others and prod(shape) * numpy_dtype(dtype).itemsize == count:
                    return ArrayPlace(shape, dtype, pieces)
        raise self._source.error("has an array in chunks that do not fit its shape; corrupt")

    def _extension(self, kind: int, payload: bytes) -> ArrayPlace | None:
        if kind != 1:  # numbers of numpy's types, complex ones: no weights
            return None
        inner = self._msgpack.Unpacker(max_buffer_size=MAX_NAME, max_str_len=64)
        inner.feed(payload[: MAX_NAME // 2])
        parts = inner.read_array_header()
        sides, dtype = inner.unpack(), inner.unpack()
        shape = tuple(sides) if isinstance(sides, list) else (-1,)
        if parts != 3 or not _is_shape(shape) or not isinstance(dtype, str) or dtype not in _DTYPES:
            raise self._source.error("has an array of a shape or type that cannot be; corrupt")
        count = prod(shape) * numpy_dtype(dtype).itemsize
        if len(payload) - inner.tell() - count not in (
            2,
            3,
            5,
        ):  # bytes before the values: a code, their number
            raise self._source.error(
                f"has an array of shape {shape[:8]} that does not fill its bytes; corrupt"
            )
        # msgpack does not say where the payload lies. Extensions come in the order of the file, so it is searched from
        # the last one on; bytes that are equal and found earlier are as good.
        self._position = self._source.find(payload, self._position) + len(payload)
        return ArrayPlace(shape, dtype, ((self._position - count, count),))


def _is_shape(shape: tuple[Any, ...]) -> bool:
    return len(shape) <= MAX_DIMENSIONS and all(type(side) is int and 0 <= side < 1 << 62 for side in shape)
