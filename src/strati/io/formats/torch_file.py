"""torch files (`.pt`, `.pth`, `.bin`) without torch: the zip format and the stream that came before it.

Only tensors and plain containers are built, by :mod:`strati.io.formats.restricted_pickle`. Which of the tables in
the file is the network is decided in :mod:`strati.io.formats.state_dict`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import UnsupportedError
from strati.io.checkpoint_file import MAX_DIMENSIONS, RawCheckpoint, Skipped, Tensor, ZipArchive, numpy_dtype
from strati.io.formats import state_dict as state
from strati.io.formats.restricted_pickle import BrokenError, Inert, PickledName, PickleStream, RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from strati.io.checkpoint_file import MappedFile

MAGIC = 0x1950A86A20F9469CFC6C
MAX_PICKLE = 32_000_000  # of names and numbers: the weights are not among them

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}
_DTYPES = frozenset(_STORAGES.values()) | {
    *("double", "float", "half", "long", "int", "short", "cfloat", "cdouble", "complex32"),
    *("uint16", "uint32", "uint64", "float4_e2m1fn_x2"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
}
_SAME = {"double": "float64", "float": "float32", "half": "float16", "long": "int64", "int": "int32"}
_SAME |= {"short": "int16", "cfloat": "complex64", "cdouble": "complex128"}
_BYTES = {
    "qint8": 1,
    "quint8": 1,
    "qint32": 4,
    "quint4x2": 1,
    "quint2x4": 1,
    "complex32": 4,
    "float4_e2m1fn_x2": 1,
}


@dataclass(frozen=True)
class Storage(Inert):
    """A run of bytes that tensors view: its key in the file, its type, and its number of entries."""

    key: str
    dtype: str
    entries: int
    first: int = 0  # of a view of another storage (the old stream format): where it begins


@dataclass(frozen=True)
class Stored(Inert):
    """A tensor of the file: a strided view of a storage, or something that cannot be read and why not."""

    storage: Storage | None
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    reason: str | None = None


def contents(source: MappedFile) -> RawCheckpoint:
    """Check a torch file; the weights stay in the file.

    Raises:
        BadInputError: The file is damaged or lies.
        UnsupportedError: It asks for anything but tensors, or is a TorchScript or tar archive.
    """
    if source.head(2) == b"PK":
        return _zip(source)
    return _stream(source)


def _zip(source: MappedFile) -> RawCheckpoint:
    archive = ZipArchive.of(source)
    pickles = [
        n for n in archive.entries if n == "data.pkl" or (n.endswith("/data.pkl") and n.count("/") == 1)
    ]
    if not pickles:
        raise source.error("a zip file without data.pkl or arrays: neither torch nor npz; nothing to read")
    root = pickles[0][: -len("data.pkl")]
    _refuse_programs(source, archive, root)
    if (
        f"{root}byteorder" in archive.entries
        and archive.small(f"{root}byteorder", limit=64).strip() != b"little"
    ):
        raise UnsupportedError(source.path, "was saved on a big-endian machine; load and save it on another")
    sizes = {
        n[len(root) + 5 :]: e.file_size for n, e in archive.entries.items() if n.startswith(f"{root}data/")
    }
    data = archive.small(pickles[0], limit=MAX_PICKLE)
    tree = _load(source, PickleStream(data, _TABLE, _persistent_id))

    def locate(storage: Storage) -> NDArray[np.uint8]:
        return archive.data(f"{root}data/{storage.key}")

    return _gather(source, tree, sizes, locate)


def _refuse_programs(source: MappedFile, archive: ZipArchive, root: str) -> None:
    script = f"{root}constants.pkl" in archive.entries or any(
        n.startswith(f"{root}code/") for n in archive.entries
    )
    if script:
        raise UnsupportedError(
            source.path,
            "is a TorchScript archive, which holds code; convert it where you trust it: "
            "torch.save(torch.jit.load('FILE').state_dict(), 'weights.pt')",
        )
    if f"{root}archive_format" in archive.entries or f"{root}models" in archive.entries:
        raise UnsupportedError(
            source.path, "is a torch.export archive; save its state_dict() with torch.save instead"
        )


def _stream(source: MappedFile) -> RawCheckpoint:
    storages: dict[str, Storage] = {}

    def remember(identity: Any) -> Storage:
        storage = _persistent_id(identity)
        if storages.setdefault(storage.key, storage).dtype != storage.dtype:
            raise BrokenError("it names a storage with two types")
        return storage

    pickles = PickleStream(source.head(MAX_PICKLE), _TABLE, remember)
    magic = _load(source, pickles)
    if magic != MAGIC:
        raise UnsupportedError(
            source.path,
            "is a plain pickle, not a torch file; save the weights with torch.save or as .safetensors",
        )
    version, system = _load(source, pickles), _load(source, pickles)
    if version != 1001:
        raise source.error("is a torch file of an unknown version; load and save it with a present torch")
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise UnsupportedError(source.path, "was saved on a big-endian machine; load and save it on another")
    tree = _load(source, pickles)
    keys = _load(source, pickles)
    if not isinstance(keys, list) or not all(isinstance(k, str) for k in keys) or len(set(keys)) != len(keys):
        raise source.error("its list of storages is damaged; download it again")
    places: dict[str, tuple[int, int]] = {}
    position = pickles.position
    for key in keys:
        entries = int.from_bytes(source.read(position, 8), "little", signed=True)
        if key not in storages:
            raise source.error("lists a storage that no tensor uses; damaged")
        count = entries * _itemsize(storages[key].dtype)
        source.check(position + 8, count)
        places[key] = (position + 8, count)
        position += 8 + count

    def locate(storage: Storage) -> NDArray[np.uint8]:
        start, count = places[storage.key]
        return source.data[start : start + count]

    return _gather(source, tree, {k: n for k, (_, n) in places.items()}, locate)


def _load(source: MappedFile, pickles: PickleStream) -> Any:
    try:
        return pickles.load()
    except RefusedError as error:
        raise UnsupportedError(
            source.path,
            f"asks for {error}, which is not a tensor: refused, nothing was run; "
            "save the state dict alone, torch.save(model.state_dict(), ...)",
        ) from None
    except BrokenError as error:
        raise source.error(f"its pickle is damaged: {error}; download or save it again") from None


def _gather(
    source: MappedFile, tree: Any, sizes: dict[str, int], locate: Callable[[Storage], NDArray[np.uint8]]
) -> RawCheckpoint:
    """Check every tensor against its storage, and name them."""
    named, beside, warnings = state.state_dict(source, tree, Stored)
    tensors: list[Tensor] = []
    unread: list[Skipped] = list(beside)
    ties: dict[str, str] = {}
    shared: dict[str, tuple[object, int]] = {}
    first: dict[object, str] = {}
    readable: dict[str, Stored] = {}
    for name, stored in named.items():
        reason = _check(source, name, stored, sizes)
        if reason is not None or stored.storage is None:
            unread.append(Skipped(name, reason or "has no storage"))
            continue
        tensors.append(Tensor(name, stored.shape, stored.dtype, prod(stored.shape) * _itemsize(stored.dtype)))
        readable[name] = stored
        shared[name] = (stored.storage.key, sizes[stored.storage.key] // _itemsize(stored.dtype))
        steps = tuple(sorted((s, n) for s, n in zip(stored.stride, stored.shape, strict=True) if n > 1))
        place = (stored.storage.key, stored.dtype, stored.offset, steps)
        if prod(stored.shape) > 0:
            tied = first.setdefault(place, name)
            if tied != name:
                ties[name] = tied

    def read(name: str) -> NDArray[Any]:
        return _view(readable[name], locate)

    return RawCheckpoint("torch", tuple(tensors), read, tuple(unread), ties, shared=shared, warnings=warnings)


def _check(source: MappedFile, name: str, stored: Stored, sizes: dict[str, int]) -> str | None:
    """Refuse a lie; return the reason where the tensor is honest but cannot be read."""
    if stored.reason is not None or stored.storage is None:
        return stored.reason
    storage, itemsize = stored.storage, _itemsize(stored.dtype)
    if storage.key not in sizes:
        raise source.error(f"the bytes of {name} (storage {storage.key}) are missing; the file is damaged")
    available = sizes[storage.key]
    if (storage.first + storage.entries) * _itemsize(storage.dtype) > available:
        raise source.error(
            f"the storage of {name} claims {storage.entries:,} entries of {storage.dtype}, the file has {available:,}"
            " bytes of it; corrupt: the header does not match the data"
        )
    if prod(stored.shape) == 0:
        return None
    last = stored.offset + sum((n - 1) * s for n, s in zip(stored.shape, stored.stride, strict=True))
    if (last + 1) * itemsize > available:
        raise source.error(
            f"{name} of shape {stored.shape[:8]} reaches beyond its storage; the file is corrupt"
        )
    if prod(stored.shape) * itemsize > available:
        return f"repeats its storage: shape {stored.shape[:8]} out of {available:,} bytes (an expanded view)"
    if stored.dtype in _BYTES:
        return f"dtype {stored.dtype} is not analysed"
    return None


def _view(stored: Stored, locate: Callable[[Storage], NDArray[np.uint8]]) -> NDArray[Any]:
    assert stored.storage is not None
    dtype = numpy_dtype(stored.dtype)
    if prod(stored.shape) == 0:
        return np.empty(stored.shape, dtype)
    flat = locate(stored.storage)
    flat = flat[: len(flat) // dtype.itemsize * dtype.itemsize].view(dtype)[stored.offset :]
    expected, step = [], 1
    for side in reversed(stored.shape):
        expected.append(step)
        step *= side
    needed = [s if n > 1 else e for s, n, e in zip(stored.stride, stored.shape, expected[::-1], strict=True)]
    if needed == expected[::-1]:  # contiguous: a plain slice keeps the memory map's type
        return flat[: prod(stored.shape)].reshape(stored.shape)
    strides = tuple(s * dtype.itemsize for s in needed)
    return np.lib.stride_tricks.as_strided(flat, stored.shape, strides, subok=True, writeable=False)


def _itemsize(dtype: str) -> int:
    return _BYTES[dtype] if dtype in _BYTES else numpy_dtype(dtype).itemsize


def _persistent_id(identity: Any) -> Storage:
    if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
        raise BrokenError("it names a storage in an unknown way")
    _, kind, key, _, entries, *view_of = identity
    if not isinstance(kind, PickledName) or kind.name.rpartition(".")[2] not in _STORAGES:
        raise BrokenError("it names a storage of an unknown type")
    if not isinstance(key, str) or not _natural(entries):
        raise BrokenError("it names a storage without key or size")
    dtype = _STORAGES[kind.name.rpartition(".")[2]]
    if (
        view_of and view_of[0] is not None
    ):  # a view of a larger storage: (its key, first entry, number of entries)
        view = view_of[0]
        if not isinstance(view, tuple) or len(view) != 3 or not _natural(view[1]) or not _natural(view[2]):
            raise BrokenError("it has a storage view in an unknown way")
        if view[1] + view[2] > entries:
            raise BrokenError("it has a storage view beyond its storage")
        return Storage(key, dtype, view[2], view[1])
    return Storage(key, dtype, entries)


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _naturals(values: Any) -> bool:
    return isinstance(values, tuple) and len(values) <= MAX_DIMENSIONS and all(_natural(v) for v in values)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Stored:
    if (
        not isinstance(storage, Storage)
        or not _natural(offset)
        or not _naturals(shape)
        or not _naturals(stride)
    ):
        raise BrokenError("it has a tensor without storage, shape or stride")
    if len(shape) != len(stride):
        raise BrokenError("it has a tensor whose shape and stride differ in length")
    return Stored(storage, storage.dtype, storage.first + offset, shape, stride)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> Any:
    base = _tensor(storage, offset, shape, stride)
    if not isinstance(dtype, PickledName) or not dtype.name.startswith("torch."):
        raise BrokenError("it has a tensor without dtype")
    name = dtype.name.removeprefix("torch.")
    name = _SAME.get(name, name)
    assert base.storage is not None
    if base.storage.first and _itemsize(base.storage.dtype) != _itemsize(name):
        raise BrokenError("it views a part of a storage as another type")
    return Stored(base.storage, name, base.offset, base.shape, base.stride)


def _unreadable(reason: str, shape_at: int | None = None) -> Callable[..., Stored]:
    def build(*arguments: Any) -> Stored:
        shape = arguments[shape_at] if shape_at is not None and shape_at < len(arguments) else ()
        return Stored(None, "", 0, shape if _naturals(shape) else (), (), reason)

    return build


def _parameter(data: Any, *_: Any) -> Any:
    if not isinstance(data, Stored):
        raise BrokenError("one of its parameters is not a tensor")
    return data


def _from_type(function: Any, _kind: Any, arguments: Any, *_: Any) -> Any:
    if not isinstance(function, PickledName) or not isinstance(arguments, tuple):
        raise BrokenError("it has a tensor of an unknown type")
    return function(*arguments)


class _OrderedDict(dict[Any, Any]):
    """A stand-in for ``collections.OrderedDict``; its state, torch's ``_metadata``, is dropped."""

    def __setstate__(self, state: object) -> None:
        pass


def _ordered_dict(pairs: Any = (), *_: Any) -> _OrderedDict:
    table = _OrderedDict()
    if pairs == ():
        return table
    if not isinstance(pairs, list):
        raise BrokenError("it builds a table from something else")
    for pair in pairs:  # as Python 2 wrote it
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise BrokenError("it builds a table from something else")
        table[pair[0]] = pair[1]
    pairs.clear()  # a list that the pickle uses again is not copied again: memory stays in proportion to the file
    return table


def _size(sides: Any = (), *_: Any) -> tuple[Any, ...]:
    if not isinstance(sides, list | tuple) or len(sides) > MAX_DIMENSIONS:
        raise BrokenError("it has a shape that is none")
    return tuple(sides)


def _nothing(*_: Any) -> None:
    return None


def _table() -> dict[str, PickledName]:
    calls: dict[str, Callable[..., Any] | None] = {
        "collections.OrderedDict": _ordered_dict,
        "collections.Counter": _nothing,
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor_v3,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._tensor._rebuild_from_type_v2": _from_type,
        "torch._utils._rebuild_qtensor": _unreadable("quantised by torch; dequantise it before saving", 2),
        "torch._utils._rebuild_sparse_tensor": _unreadable("a sparse tensor; save it dense"),
        "torch._utils._rebuild_nested_tensor": _unreadable("a nested tensor; save its parts"),
        "torch._utils._rebuild_meta_tensor_no_storage": _unreadable("a meta tensor, which has no values", 1),
        "torch.serialization._get_layout": _nothing,
        "torch.Size": _size,
        "torch.device": _nothing,
        "torch.Tensor": None,
        "torch.nn.parameter.Parameter": None,
        "torch.nn.parameter.Buffer": None,
        "torch.storage.UntypedStorage": None,
        "_codecs.encode": _nothing,
    }
    for module in ("builtins", "__builtin__"):
        calls[f"{module}.set"] = _nothing
        calls[f"{module}.complex"] = _nothing
        calls[f"{module}.bytearray"] = _nothing
    for module in ("torch", "torch.cuda", "torch.storage"):
        calls |= {f"{module}.{storage}": None for storage in _STORAGES}
    calls |= {f"torch.{dtype}": None for dtype in _DTYPES}
    for scheme in (
        "per_tensor_affine",
        "per_tensor_symmetric",
        "per_channel_affine",
        "per_channel_symmetric",
    ):
        calls[f"torch.{scheme}"] = None
    return {name: PickledName(name, call) for name, call in calls.items()}


_TABLE = _table()
