"""Keras' HDF5 files through h5py alone: weights only, layers are never built.

Only hard links to datasets inside the file are followed: an external or soft link, an external or a virtual
dataset could return the bytes of any file of the machine. Kernels are stored inputs first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from strati.errors import StratiError, require
from strati.network.archive import FREE_EXPANSION, MAX_RATIO
from strati.network.contents import MAX_DIMENSIONS, MAX_TENSORS, Contents, Hint, Skipped, Tensor, natural
from strati.types import Flag

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from strati.network.source import Source

MAX_DEPTH = 24
MAX_NAME = 4096
MAX_ORDER = 10_000_000  # bytes of the list of layer names


@dataclass(frozen=True)
class Found:
    """A dataset: its path, and what the file says of it."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int | None  # where its bytes are, if they are in one piece
    stored: int  # bytes it occupies in the file
    reason: str | None  # why it is not read, if so


def contents(source: Source) -> Contents:
    """List the weights of a Keras file; they stay in the file.

    Raises:
        BadInputError: The file is damaged, or one of its datasets is larger than the bytes behind it.
    """
    h5py = require("h5py", "keras", "reading Keras .h5 files")
    with _file(h5py, source) as file:
        root = file
        if _is_group(h5py, file, "model_weights"):
            root = file["model_weights"]
        found = list(_walk(h5py, source, root, "", 0, set()))
        order = _order(h5py, root)
    weights = [f for f in found if not re.match(r"optimizer(_weights|_state|/|$)", f.path)]
    if not weights:
        raise source.bad("holds no weights; save the model with model.save_weights")
    rank = {name: position for position, name in enumerate(order)}
    weights.sort(key=lambda f: (rank.get(f.path.split("/")[0], len(rank)), natural(f.path)))
    if len({f.path for f in weights}) != len(weights):
        raise source.bad("has two weights of one name; write the file anew")
    tensors, unread = [], []
    for item in weights:
        reason = item.reason or _check(source, item)
        if reason is not None:
            unread.append(Skipped(item.path, reason))
        else:
            size = prod(item.shape) * item.dtype.itemsize
            tensors.append(Tensor(item.path, item.shape, item.dtype.name, size))
    by_path = {item.path: item for item in weights}
    left = len(found) - len(weights)
    flags = (Flag("left-aside", f"{left} tensors of the optimiser left aside"),) if left else ()

    def read(name: str) -> NDArray[Any]:
        return _read(h5py, source, by_path[name])

    hints = {tensor.name: _hint(tensor, by_path) for tensor in tensors}
    return Contents("keras", tuple(tensors), read, tuple(unread), hints=hints, warnings=flags)


@contextmanager
def _file(h5py: Any, source: Source) -> Iterator[Any]:
    """The file opened by h5py, whose own errors become one line."""
    try:
        with h5py.File(source.path, "r", locking=False) as file:
            yield file
    except StratiError:
        raise
    except (
        OSError,
        RuntimeError,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        MemoryError,
        RecursionError,
    ):
        # h5py's messages are long, and speak of its own insides.
        raise source.bad("its HDF5 structure is damaged or truncated; download or save it again") from None


def _is_group(h5py: Any, group: Any, name: str) -> bool:
    if name not in group or not isinstance(group.get(name, getlink=True), h5py.HardLink):
        return False
    return isinstance(group[name], h5py.Group)


def _walk(h5py: Any, source: Source, group: Any, path: str, depth: int, seen: set[int]) -> Iterator[Found]:
    if depth > MAX_DEPTH or len(seen) > MAX_TENSORS or len(path) > MAX_NAME:
        raise source.bad("has groups nested too deep, or too many; not read")
    for name in group:
        place = f"{path}/{name}" if path else str(name)
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            yield Found(place, (), _nothing(), None, 0, "a link out of its place, which is not followed")
            continue
        item = group[name]
        address = h5py.h5o.get_info(item.id).addr
        if address in seen:
            yield Found(place, (), _nothing(), None, 0, "the same object again, under another name")
            continue
        seen.add(address)
        if isinstance(item, h5py.Group):
            yield from _walk(h5py, source, item, place, depth + 1, seen)
        elif isinstance(item, h5py.Dataset):
            yield _dataset(h5py, item, place)


def _dataset(h5py: Any, item: Any, path: str) -> Found:
    reason = None
    if item.shape is None or item.id.get_type().get_class() not in (h5py.h5t.INTEGER, h5py.h5t.FLOAT):
        return Found(path, (), _nothing(), None, 0, "no numbers (text, records or nothing)")
    if item.is_virtual or item.external:
        reason = "its data are in other files, which are not opened"
    if len(item.shape) > MAX_DIMENSIONS:
        reason = "too many dimensions"
    # Contiguous data are mapped where they are; filters only apply to chunks.
    offset = item.id.get_offset() if item.chunks is None and reason is None else None
    return Found(path, tuple(item.shape), item.dtype, offset, item.id.get_storage_size(), reason)


def _nothing() -> Any:
    import numpy as np

    return np.dtype(np.uint8)


def _check(source: Source, item: Found) -> str | None:
    needed = prod(item.shape) * item.dtype.itemsize
    if item.offset is not None:
        source.check(item.offset, needed)
        return None
    if needed == 0:
        return None
    if item.stored == 0:
        return "has a shape but no data in the file"
    if item.stored > source.size:
        raise source.bad(f"{item.path} claims more bytes than the file has; damaged or lying")
    if needed > FREE_EXPANSION and needed > MAX_RATIO * item.stored:
        raise source.bad(f"{item.path} would grow {needed:,} bytes out of {item.stored:,}: a bomb, not read")
    return None


def _read(h5py: Any, source: Source, item: Found) -> NDArray[Any]:
    if item.offset is not None:
        array = source.array(item.offset, item.shape, item.dtype)
        return array if item.dtype.isnative else array.astype(item.dtype.newbyteorder("="))
    with _file(h5py, source) as file:
        root = file["model_weights"] if _is_group(h5py, file, "model_weights") else file
        values: NDArray[Any] = root[item.path][()]
    return values.astype(values.dtype.newbyteorder("="), copy=False).reshape(item.shape)


def _order(h5py: Any, root: Any) -> list[str]:
    """The layers in the model's order, where the file keeps it."""
    if "layer_names" not in root.attrs:
        return []
    attribute = h5py.h5a.open(root.id, b"layer_names")
    if attribute.get_storage_size() > MAX_ORDER:
        return []
    names = root.attrs["layer_names"]
    return [n.decode("utf-8", "replace") if isinstance(n, bytes) else str(n) for n in names]


_RECURRENT = {4: "lstm", 3: "gru", 1: "rnn"}


def _hint(tensor: Tensor, by_path: dict[str, Found]) -> Hint:
    """What a Keras weight is, by its name and the names beside it."""
    folder, _, last = tensor.name.lower().rpartition("/")
    last = last.split(":")[0]
    axes = len(tensor.shape)
    if "embedding" in last or (re.search(r"embedding", folder) and last in ("0", "embeddings")):
        return Hint("embedding")
    if last == "depthwise_kernel" or ("depthwise" in folder and axes == 4):
        return Hint("depthwise", transposed=True)
    recurrent = _gates(tensor, by_path)
    if recurrent is not None:
        return Hint(recurrent, transposed=True)  # type: ignore[arg-type]
    if axes == 3 and re.search(r"attention", folder) and re.search(r"query|key|value", folder):
        d, heads, width = tensor.shape
        return Hint("linear", transposed=True, merge=(d, heads * width))
    if axes == 3 and re.search(r"attention", folder):
        heads, width, d = tensor.shape
        return Hint("linear", transposed=True, merge=(heads * width, d))
    if axes == 2:
        return Hint("linear", transposed=True)
    return Hint("conv", transposed=True) if 3 <= axes <= 5 else Hint()


def _gates(tensor: Tensor, by_path: dict[str, Found]) -> str | None:
    """A recurrent layer has a square-ish recurrent matrix beside its kernel: hidden by gates x hidden."""
    if len(tensor.shape) != 2:
        return None
    path = tensor.name
    if re.search(r"(recurrent_)?kernel(:0)?$", path):
        beside = re.sub(r"(recurrent_)?kernel(:0)?$", r"recurrent_kernel\2", path)
    elif re.search(r"cell/vars/[01]$", path):
        beside = path[:-1] + "1"
    else:
        return None
    other = by_path.get(beside)
    if other is None or len(other.shape) != 2 or other.shape[0] == 0 or other.shape[1] != tensor.shape[1]:
        return None
    ratio, rest = divmod(other.shape[1], other.shape[0])
    return _RECURRENT.get(ratio) if rest == 0 else None
