"""safetensors, parsed here and strictly: nothing in the header is believed before it is checked.

Layout: 8 bytes of header length (little-endian), a JSON header, the tensors' bytes without holes.
The safetensors library itself takes the last of two tensors of one name without a word.
"""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any

from strati.core.display import natural
from strati.core.errors import UnsupportedError
from strati.io.checkpoint_file import MAX_DIMENSIONS, RawCheckpoint, Tensor, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.checkpoint_file import MappedFile

MAX_HEADER = 25_000_000
MAX_CONTAINERS = 600_000  # '[' and '{' in the header: three per tensor

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_PACKED = {"F4": ("float4_e2m1fn", 4), "F6_E2M3": ("float6_e2m3fn", 6), "F6_E3M2": ("float6_e3m2fn", 6)}
"""Types whose entries fill no whole byte: name and bits. They are listed, not read."""


_FIELDS = frozenset({"dtype", "shape", "data_offsets"})


def contents(source: MappedFile) -> RawCheckpoint:
    """Check the header of a safetensors file; the weights stay in the file.

    Raises:
        BadInputError: The header is truncated, is not JSON, or lies about the file.
    """
    header, start = _header(source)
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not _strings(metadata):
        raise source.error("its __metadata__ is not a table of strings; re-save the file")
    places: dict[str, tuple[int, str, tuple[int, ...]]] = {}
    tensors = []
    spans = []
    for name, entry in header.items():
        tensor, begin, end = _entry(source, name, entry)
        spans.append((begin, end, name))
        tensors.append(tensor)
        places[name] = (start + begin, tensor.dtype, tensor.shape)
    _no_holes(source, spans, source.size - start)
    tensors.sort(key=lambda t: natural(t.name))

    def read(name: str) -> NDArray[Any]:
        offset, dtype, shape = places[name]
        if dtype in {packed for packed, _ in _PACKED.values()}:
            raise UnsupportedError(
                name, f"is stored as {dtype}, several entries to a byte; convert it to float16"
            )
        return source.array(offset, shape, numpy_dtype(dtype))

    return RawCheckpoint("safetensors", tuple(tensors), read)


def _header(source: MappedFile) -> tuple[dict[str, Any], int]:
    if source.size < 8:
        raise source.error(f"truncated: {source.size} bytes, not even the header's length; download it again")
    length = int.from_bytes(source.read(0, 8), "little")
    if length > source.size - 8:
        raise source.error(
            f"truncated: its header claims {length:,} bytes, the file has {source.size - 8:,} after the length"
        )
    if length > MAX_HEADER:
        raise source.error(
            f"its header claims {length:,} bytes, more than the limit of {MAX_HEADER:,}; it is probably corrupt"
        )
    raw = source.read(8, length)
    if raw.count(b"[") + raw.count(b"{") > MAX_CONTAINERS:
        raise source.error(
            f"its header lists more than {MAX_CONTAINERS // 3:,} tensors, the limit; it is probably corrupt"
        )
    header = _unambiguous(raw) or strict_json(source, raw, "its header")
    if not isinstance(header, dict):
        raise source.error("its header is not a JSON table; it is not a safetensors file, or it is damaged")
    return header, 8 + length


def _unambiguous(raw: bytes) -> dict[str, Any] | None:
    """The header, if its number of quotation marks shows that no key is there twice; ``None`` otherwise.

    Looking at the pairs of every entry takes longer than all the rest of opening a file of many small tensors.
    """
    try:
        header = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict):
        return None
    metadata = header.get("__metadata__")
    texts = 1 + 2 * len(metadata) if isinstance(metadata, dict) else 0
    entries = len(header) - (metadata is not None)
    return header if raw.count(b'"') == 2 * (5 * entries + texts) else None


def strict_json(source: MappedFile, raw: bytes, what: str) -> Any:
    """Parse JSON from a file, refusing duplicate keys and anything but UTF-8.

    Raises:
        BadInputError: It is not JSON, too deep, or has a key twice.
    """
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except KeyError as error:
        raise source.error(f"{what} has the key {error.args[0]} twice; re-save the file") from None
    except UnicodeDecodeError:
        raise source.error(f"{what} is not UTF-8 text; the file is damaged") from None
    except json.JSONDecodeError as error:
        raise source.error(
            f"{what} is not valid JSON ({error.msg} at character {error.pos}); damaged"
        ) from None
    except (ValueError, RecursionError):  # a number of thousands of digits; brackets nested without end
        raise source.error(f"{what} holds invalid values; the file is corrupt") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise KeyError(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return table


def _strings(metadata: object) -> bool:
    return isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())


def _entry(source: MappedFile, name: str, entry: object) -> tuple[Tensor, int, int]:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise source.error(f"the header's entry for {name} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or (dtype not in DTYPES and dtype not in _PACKED):
        raise source.error(f"the dtype of {name} is none that safetensors knows: {str(dtype)[:40]}")
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise source.error(f"the shape of {name} is not a list of at most {MAX_DIMENSIONS} natural numbers")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise source.error(f"the data_offsets of {name} are not two rising natural numbers")
    begin, end = offsets
    size = prod(shape)
    bits = 8 * numpy_dtype(DTYPES[dtype]).itemsize if dtype in DTYPES else _PACKED[dtype][1]
    if size * bits != 8 * (end - begin):
        raise source.error(
            f"{name} of shape {tuple(shape)[:8]} and dtype {dtype} cannot fill the {end - begin:,} bytes"
            " its offsets give it; the header is corrupt"
        )
    stored_as = DTYPES[dtype] if dtype in DTYPES else _PACKED[dtype][0]
    return Tensor(name, tuple(shape), stored_as, end - begin), begin, end


def _naturals(values: object) -> bool:
    return isinstance(values, list) and {*map(type, values)} <= {int} and min(values, default=0) >= 0


def _no_holes(source: MappedFile, spans: list[tuple[int, int, str]], available: int) -> None:
    reached = 0
    for begin, end, name in sorted(spans):
        if end > available:
            raise source.error(
                f"truncated: {name} ends at byte {end:,} of the data, the file has {available:,}; download it again"
            )
        if begin < reached:
            raise source.error(f"{name} overlaps the tensor before it; the header is corrupt")
        if begin > reached:
            raise source.error(
                f"{begin - reached:,} bytes before {name} belong to no tensor; re-save the file"
            )
        reached = end
    if reached != available:
        raise source.error(
            f"{available - reached:,} bytes after the last tensor belong to no tensor; re-save the file"
        )
