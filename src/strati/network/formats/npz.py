"""numpy's ``.npz`` and ``.npy``: headers read by a pattern, never evaluated; pickled arrays are never loaded."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.errors import UnsupportedError
from strati.network.archive import Archive
from strati.network.contents import MAX_DIMENSIONS, Contents, Skipped, Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.network.source import Source

MAX_HEADER = 16_384

_HEADER = re.compile(
    r"\s*\{\s*'descr'\s*:\s*(?P<descr>'[^']{1,40}'|\[.*\])\s*,"
    r"\s*'fortran_order'\s*:\s*(?P<fortran>True|False)\s*,"
    r"\s*'shape'\s*:\s*\((?P<shape>[0-9,\sL]*)\)\s*,?\s*\}\s*",
    re.DOTALL,
)
_DESCR = re.compile(r"[<>|=]?([fiucb])([0-9]{1,2})")


@dataclass(frozen=True)
class Header:
    """What an ``.npy`` header says, checked."""

    dtype: np.dtype[Any] | None  # None: not a plain number; `reason` says what
    reason: str
    shape: tuple[int, ...]
    fortran: bool
    length: int  # bytes before the data


def contents(source: Source) -> Contents:
    """Check the headers of an ``.npz`` file (or of a single ``.npy``).

    Raises:
        BadInputError: A header is damaged or lies about the bytes behind it.
    """
    if source.head(6) == b"\x93NUMPY":
        return _single(source)
    archive = Archive(source)
    tensors: list[Tensor] = []
    unread: list[Skipped] = []
    headers: dict[str, tuple[str, Header]] = {}
    for entry in archive.entries.values():
        if not entry.name.endswith(".npy"):
            unread.append(Skipped(entry.name, "not an array"))
            continue
        name = entry.name.removesuffix(".npy")
        header = parse(source, archive.peek(entry.name, MAX_HEADER + 12), entry.size, name)
        if header.dtype is None:
            unread.append(Skipped(name, header.reason))
            continue
        headers[name] = (entry.name, header)
        tensors.append(_tensor(name, header))
    if not tensors and not unread:
        raise source.bad("holds no arrays; save the weights with numpy.savez")

    def read(name: str) -> NDArray[Any]:
        entry, header = headers[name]
        return _array(archive.data(entry), header)

    return Contents("npz", tuple(tensors), read, tuple(unread))


def _single(source: Source) -> Contents:
    name = source.path.stem
    header = parse(source, source.head(MAX_HEADER + 12), source.size, name)
    if header.dtype is None:
        raise UnsupportedError(source.path, f"{header.reason}; save plain numbers")
    return Contents("npz", (_tensor(name, header),), lambda _: _array(source.data, header))


def parse(source: Source, head: bytes, size: int, name: str) -> Header:
    """Check an ``.npy`` header against the number of bytes that there are.

    Args:
        source: The file, for errors.
        head: The first bytes of the array's file.
        size: The number of bytes of the array's file.
        name: The array's name.

    Raises:
        BadInputError: It is damaged, longer than any honest one, or its shape does not fill the bytes.
    """
    if head[:6] != b"\x93NUMPY" or len(head) < 12 or head[6] not in (1, 2, 3):
        raise source.bad(f"the array {name} has no numpy header; the file is damaged")
    if head[6] == 1:
        (length,), start = struct.unpack_from("<H", head, 8), 10
    else:
        (length,), start = struct.unpack_from("<I", head, 8), 12
    if length > MAX_HEADER or start + length > len(head):
        raise source.bad(
            f"the header of the array {name} claims {length:,} bytes; truncated, or the header is corrupt"
        )
    found = _HEADER.fullmatch(head[start : start + length].decode("latin-1"))
    if found is None:
        raise source.bad(f"the header of the array {name} is damaged; save it again with numpy")
    sides = [side.strip().rstrip("L") for side in found["shape"].split(",") if side.strip()]
    if len(sides) > MAX_DIMENSIONS or any(not side.isdigit() or len(side) > 18 for side in sides):
        raise source.bad(f"the shape of the array {name} is damaged or absurd")
    shape = tuple(int(side) for side in sides)
    dtype, reason = _dtype(found["descr"])
    if dtype is not None and prod(shape) * dtype.itemsize != size - start - length:
        raise source.bad(
            f"the array {name} of shape {shape[:8]} and dtype {dtype} cannot fill the"
            f" {size - start - length:,} bytes behind its header; truncated, or the header is corrupt"
        )
    return Header(dtype, reason, shape, found["fortran"] == "True", start + length)


def _dtype(descr: str) -> tuple[np.dtype[Any] | None, str]:
    text = descr.strip("'")
    if descr.startswith("["):
        return None, "a table of records; save its columns as plain arrays"
    if text.lstrip("|<>=").startswith("O"):
        return None, "pickled objects, which are never loaded"
    if not _DESCR.fullmatch(text):
        return None, f"dtype {text} is not analysed"
    try:
        return np.dtype(text), ""
    except TypeError:
        return None, f"dtype {text} is not analysed"


def _tensor(name: str, header: Header) -> Tensor:
    assert header.dtype is not None
    return Tensor(name, header.shape, header.dtype.name, prod(header.shape) * header.dtype.itemsize)


def _array(data: NDArray[np.uint8], header: Header) -> NDArray[Any]:
    assert header.dtype is not None
    flat = data[header.length :].view(header.dtype)
    array = flat.reshape(header.shape, order="F" if header.fortran else "C")
    if header.dtype.isnative:
        return array
    return array.astype(header.dtype.newbyteorder("="))
