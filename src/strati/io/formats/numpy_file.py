"""numpy's ``.npz`` and ``.npy``: headers read by numpy, arrays mapped; pickled arrays are never loaded."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import UnsupportedError
from strati.io.checkpoint_file import MAX_DIMENSIONS, RawCheckpoint, Skipped, Tensor, ZipArchive

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.checkpoint_file import MappedFile

MAX_HEADER = 4_096  # numpy evaluates it as a literal, which takes memory and stack in proportion
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,  # differs in the names of a record's fields only
}


@dataclass(frozen=True)
class Header:
    """What an ``.npy`` header says, checked."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    length: int  # bytes before the data

    @property
    def unread_reason(self) -> str | None:
        """Why the array is not read, ``None`` for plain numbers."""
        if self.dtype.fields is not None or self.dtype.subdtype is not None:
            return "a table of records; save its columns as plain arrays"
        if self.dtype.kind == "O":
            return "pickled objects, which are never loaded"
        return None if self.dtype.kind in "fiucb" else f"dtype {self.dtype.str} is not analysed"


def contents(source: MappedFile) -> RawCheckpoint:
    """Check the headers of an ``.npz`` file (or of a single ``.npy``).

    Raises:
        BadInputError: A header is damaged or lies about the bytes behind it.
    """
    if source.head(6) == b"\x93NUMPY":
        return _single(source)
    archive = ZipArchive.of(source)
    tensors: list[Tensor] = []
    unread: list[Skipped] = []
    headers: dict[str, Header] = {}
    for entry, info in archive.entries.items():
        name = entry.removesuffix(".npy")
        if name == entry:
            unread.append(Skipped(entry, "not an array"))
            continue
        header = parse(source, archive.peek(entry, MAX_HEADER + 12), info.file_size, name)
        if header.unread_reason is not None:
            unread.append(Skipped(name, header.unread_reason))
            continue
        headers[name] = header
        tensors.append(_tensor(name, header))
    if not tensors and not unread:
        raise source.error("holds no arrays; save the weights with numpy.savez")

    def read(name: str) -> NDArray[Any]:
        return _array(archive.data(f"{name}.npy"), headers[name])

    return RawCheckpoint("npz", tuple(tensors), read, tuple(unread))


def _single(source: MappedFile) -> RawCheckpoint:
    name = source.path.stem
    header = parse(source, source.head(MAX_HEADER + 12), source.size, name)
    if header.unread_reason is not None:
        raise UnsupportedError(source.path, f"{header.unread_reason}; save plain numbers")
    return RawCheckpoint("npz", (_tensor(name, header),), lambda _: _array(source.data, header))


def parse(source: MappedFile, head: bytes, size: int, name: str) -> Header:
    """Check an ``.npy`` header against the number of bytes that there are.

    Args:
        source: The file, for errors.
        head: The first bytes of the array's file.
        size: The number of bytes of the array's file.
        name: The array's name.

    Raises:
        BadInputError: It is damaged, longer than any honest one, or its shape does not fill the bytes.
    """
    stream = io.BytesIO(head)
    try:
        read = _HEADERS[np.lib.format.read_magic(stream)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 2 wrote its numbers otherwise, which numpy mentions
            shape, fortran, dtype = read(stream, max_header_size=MAX_HEADER)
    except Exception:  # numpy lets errors of the tokenizer and the parser through
        raise source.error(
            f"the header of the array {name} is damaged, truncated or longer than {MAX_HEADER:,} bytes;"
            " save it again with numpy"
        ) from None
    header = Header(dtype, shape, fortran, stream.tell())
    if len(shape) > MAX_DIMENSIONS or any(not 0 <= side < 1 << 62 for side in shape):
        raise source.error(f"the shape of the array {name} is damaged or absurd")
    if header.unread_reason is None and prod(shape) * dtype.itemsize != size - header.length:
        raise source.error(
            f"the array {name} of shape {shape[:8]} and dtype {dtype} cannot fill the"
            f" {size - header.length:,} bytes behind its header; truncated, or the header is corrupt"
        )
    return header


def _tensor(name: str, header: Header) -> Tensor:
    return Tensor(name, header.shape, header.dtype.name, prod(header.shape) * header.dtype.itemsize)


def _array(data: NDArray[np.uint8], header: Header) -> NDArray[Any]:
    flat = data[header.length :].view(header.dtype)
    array = flat.reshape(header.shape, order="F" if header.fortran else "C")
    return array if header.dtype.isnative else array.astype(header.dtype.newbyteorder("="))
