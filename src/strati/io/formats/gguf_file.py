"""GGUF (llama.cpp), its header parsed here and strictly; quantised tensors are dequantised by the gguf library.

Layout: magic, version, counts, key-value pairs, tensor records, padding, data. Numbers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.display import natural
from strati.core.errors import UnsupportedError
from strati.core.plugins import require
from strati.io.checkpoint_file import MAX_TENSORS, Quantisation, RawCheckpoint, Tensor, numpy_dtype
from strati.io.quantised.rounding_error import even, lattice

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.checkpoint_file import MappedFile

MAX_PAIRS = 100_000
MAX_TEXT = 10_000_000
MAX_LIST = 4_000_000

_PLAIN = {
    0: "float32",
    1: "float16",
    30: "bfloat16",
    28: "float64",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
}
# Number of the type: its name, entries per block, bytes per block (ggml's own table).
_CODED = {
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 40),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    29: ("iq1_m", 256, 56),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
}
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor's bytes are, and in which code."""

    type: int
    shape: tuple[int, ...]
    offset: int


def contents(source: MappedFile) -> RawCheckpoint:
    """Check the header of a GGUF file; the weights stay in the file.

    Raises:
        BadInputError: The header is truncated or lies about the file.
        UnsupportedError: It is of a version or byte order that is not read.
    """
    cursor = _Cursor(source, 4)
    version = cursor.number("<I")
    if version not in (2, 3):
        raise UnsupportedError(
            source.path, f"is GGUF version {version} (or big-endian); convert it to version 3"
        )
    count, pairs = cursor.number("<Q"), cursor.number("<Q")
    if count > MAX_TENSORS or pairs > MAX_PAIRS:
        raise source.error(
            f"claims {count:,} tensors and {pairs:,} settings, more than the limit; the header is probably corrupt"
        )
    settings: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text(65_535)
        if key in settings:
            raise source.error(f"has the setting {key} twice; re-save the file")
        settings[key] = cursor.value(cursor.number("<I"))
    records = [_record(cursor) for _ in range(count)]
    alignment = settings.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise source.error("its alignment is not a power of two; the file is damaged")
    start = -(-cursor.position // alignment) * alignment
    return _contents(source, records, start, alignment, _config(settings))


def _contents(
    source: MappedFile,
    records: list[tuple[str, TensorPlace]],
    start: int,
    alignment: int,
    config: dict[str, Any],
) -> RawCheckpoint:
    tensors: list[Tensor] = []
    places: dict[str, TensorPlace] = {}
    spans: list[tuple[int, int, str]] = []
    for name, place in records:
        if name in places:
            raise source.error(f"has two tensors named {name}; re-save the file")
        nbytes = _nbytes(source, name, place)
        if place.offset % alignment:
            raise source.error(f"{name} is not aligned; the file is damaged")
        source.check(start + place.offset, nbytes)
        places[name] = place
        spans.append((place.offset, place.offset + nbytes, name))
        coded = place.type in _CODED
        dtype = _CODED[place.type][0] if coded else _PLAIN[place.type]
        tensors.append(Tensor(name, place.shape, dtype, nbytes, quantised=coded))
    reached = 0
    for begin, end, name in sorted(spans):
        if begin < reached:
            raise source.error(f"{name} overlaps the tensor before it; the header is corrupt")
        reached = max(reached, end)

    tensors.sort(key=lambda t: natural(t.name))

    def read(name: str) -> NDArray[Any]:
        place = places[name]
        if place.type in _PLAIN:
            return source.array(start + place.offset, place.shape, numpy_dtype(_PLAIN[place.type]))
        return _dequantise(source, name, place, start)

    kinds = {}
    for name, place in places.items():
        if place.type in _CODED:
            label, block, size = _CODED[place.type]
            kinds[name] = Quantisation(label, 8 * size / block, _STEPS.get(label, 32))

    def error(name: str, index: int | None) -> NDArray[Any] | None:
        if name not in kinds:
            return None
        values = read(name)
        part = values if index is None else values.reshape(-1, *values.shape[-2:])[index]
        return _rounding(part, kinds[name].scheme)

    return RawCheckpoint("gguf", tuple(tensors), read, config=config, quantisation=kinds, rounding=error)


_STEPS = {"q2_k": 16, "q3_k": 16, "q6_k": 16, "q8_k": 256}
"""Entries that share a step, where they are not 32."""


def _rounding(values: NDArray[Any], label: str) -> NDArray[Any] | None:
    """Mean square of the rounding error of each entry; the step follows from the values of each group."""
    group = _STEPS.get(label, 32)
    if label.startswith("q8"):  # 255 codes and few entries: the largest entry has the largest code
        steps = np.abs(values.reshape(-1, group)).max(axis=1) / np.float32(127)
        return np.repeat(even(steps), group).reshape(values.shape)
    # Several entries share a code of a table there: no step says how far they were moved.
    return None if label.startswith(("iq1", "iq2", "iq3")) else lattice(values, group)


def _nbytes(source: MappedFile, name: str, place: TensorPlace) -> int:
    if place.type in _PLAIN:
        return prod(place.shape) * numpy_dtype(_PLAIN[place.type]).itemsize
    if place.type not in _CODED:
        raise source.error(
            f"{name} is of type {place.type}, which is none that GGUF knows; newer than strati or damaged"
        )
    _, block, size = _CODED[place.type]
    if not place.shape or place.shape[-1] % block:
        raise source.error(
            f"{name} has rows of {place.shape[-1:]} entries, no multiple of its block of {block}"
        )
    return prod(place.shape) // block * size


def _dequantise(source: MappedFile, name: str, place: TensorPlace, start: int) -> NDArray[Any]:
    gguf = require("gguf", "gguf", "reading quantised GGUF tensors")
    label, block, size = _CODED[place.type]
    rows = (*place.shape[:-1], place.shape[-1] // block * size)
    blocks = source.array(start + place.offset, rows, np.dtype(np.uint8))
    try:
        with np.errstate(all="ignore"):
            values: NDArray[Any] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(place.type))
    except (NotImplementedError, ValueError):
        raise UnsupportedError(
            name, f"is coded as {label}, which the installed gguf cannot dequantise"
        ) from None
    return values.reshape(place.shape)


def _config(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with the head counts also under the names that ``config.json`` uses."""
    config = dict(settings)
    prefix = settings.get("general.architecture")
    for ours, theirs in (
        ("num_attention_heads", "attention.head_count"),
        ("num_key_value_heads", "attention.head_count_kv"),
        ("head_dim", "attention.key_length"),
    ):
        if f"{prefix}.{theirs}" in settings:
            config.setdefault(ours, settings[f"{prefix}.{theirs}"])
    return config


def _record(cursor: _Cursor) -> tuple[str, TensorPlace]:
    name = cursor.text(4096)
    dimensions = cursor.number("<I")
    if dimensions > 8:
        raise cursor.source.error(
            f"{name} claims {dimensions} dimensions; corrupt: the header does not match the data"
        )
    shape = tuple(cursor.number("<Q") for _ in range(dimensions))[::-1]  # the fastest axis comes first
    kind = cursor.number("<I")
    return name, TensorPlace(kind, shape, cursor.number("<Q"))


class _Cursor:
    """Reads values one after another, never past the end of the file."""

    def __init__(self, source: MappedFile, position: int) -> None:
        self.source = source
        self.data = source.view
        self.position = position

    def number(self, form: str) -> Any:
        size = struct.calcsize(form)
        self.source.check(self.position, size)
        (number,) = struct.unpack_from(form, self.data, self.position)
        self.position += size
        return number

    def text(self, limit: int) -> str:
        raw = self.raw(limit)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self.source.error("has a name that is not UTF-8; the file is damaged") from None

    def raw(self, limit: int) -> memoryview:
        length = self.number("<Q")
        if length > limit:
            raise self.source.error(
                f"has a text of {length:,} bytes; corrupt: the header does not match the data"
            )
        self.source.check(self.position, length)
        self.position += length
        return self.data[self.position - length : self.position]

    def value(self, kind: int, depth: int = 0) -> Any:
        """A setting; the content of long lists and texts is passed over."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return str(self.raw(MAX_TEXT)[:4096], "utf-8", "replace")
        if kind != _ARRAY or depth > 4:
            raise self.source.error(f"has a setting of type {kind}, which is none that GGUF knows; damaged")
        inner, count = self.number("<I"), self.number("<Q")
        if count > MAX_LIST:
            raise self.source.error(
                f"has a list of {count:,} settings; corrupt: the header does not match the data"
            )
        if inner in _SCALARS:
            size = count * struct.calcsize(_SCALARS[inner])
            self.source.check(self.position, size)
            self.position += size
        else:
            for _ in range(count):
                if inner == _STRING:
                    self.raw(MAX_TEXT)
                else:
                    self.value(inner, depth + 1)
        return f"a list of {count}"
