"""Keras files: HDF5 (``.h5``), and ``.keras`` archives, a zip with ``model.weights.h5`` and ``config.json``.

Only weights are read, by :mod:`strati.io.formats.hdf5_process`; layers are never built. A layer that holds Python code
(``Lambda``) is named in a warning, and its code is not looked at. Kernels are stored inputs first.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.display import natural
from strati.core.results import Flag
from strati.io.checkpoint_file import (
    FREE_EXPANSION,
    MAX_DIMENSIONS,
    MAX_RATIO,
    Hint,
    RawCheckpoint,
    Skipped,
    Tensor,
    ZipArchive,
)
from strati.io.formats import hdf5_process as hdf5
from strati.io.formats.hdf5_process import Hdf5Contents
from strati.io.formats.safetensors_file import strict_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.checkpoint_file import MappedFile


WEIGHTS = "model.weights.h5"
MAX_CONFIG = 25_000_000
MAX_DEPTH = 40


def contents(source: MappedFile) -> RawCheckpoint:
    """List the weights of a Keras file; they stay in the file.

    Raises:
        BadInputError: The file is damaged, or one of its datasets is larger than the bytes behind it.
    """
    return _archive(source) if source.head(2) == b"PK" else _hdf5(source)


def _hdf5(source: MappedFile) -> RawCheckpoint:
    datasets, order = hdf5.listing(source)
    weights = [f for f in datasets if not re.match(r"optimizer(_weights|_state|/|$)", f.path)]
    if not weights:
        raise source.error("holds no weights; save the model with model.save_weights")
    rank = {name: position for position, name in enumerate(order)}
    weights.sort(key=lambda f: (rank.get(f.path.split("/")[0], len(rank)), natural(f.path)))
    by_path = {dataset.path: dataset for dataset in weights}
    if len(by_path) != len(weights):
        raise source.error("has two weights of one name; re-save the file")
    tensors, unread = [], []
    for dataset in weights:
        reason = dataset.reason or _check(source, dataset)
        if reason is not None:
            unread.append(Skipped(dataset.path, reason))
        else:
            dtype = np.dtype(dataset.dtype)
            tensors.append(
                Tensor(dataset.path, dataset.shape, dtype.name, prod(dataset.shape) * dtype.itemsize)
            )
    if not tensors and any(dataset.elsewhere for dataset in weights):
        raise source.error("keeps its weights in other files, which are not opened; copy them into one file")
    left = len(datasets) - len(weights)
    flags = (Flag("left-aside", f"{left} tensors of the optimiser left aside"),) if left else ()

    def read(name: str) -> NDArray[Any]:
        return _read(source, by_path[name])

    hints = {tensor.name: _hint(tensor, by_path) for tensor in tensors}
    return RawCheckpoint("keras", tuple(tensors), read, tuple(unread), hints=hints, warnings=flags)


def _check(source: MappedFile, item: Hdf5Contents) -> str | None:
    """Refuse a lie about size; return the reason where a dataset is honest but not read."""
    if len(item.shape) > MAX_DIMENSIONS:
        return "too many dimensions"
    needed = prod(item.shape) * np.dtype(item.dtype).itemsize
    if item.offset is not None:
        source.check(item.offset, needed)
        return None
    if needed == 0:
        return None
    if item.stored == 0:
        return "has a shape but no data in the file"
    if item.stored > source.size:
        raise source.error(
            f"{item.path} claims more bytes than the file has; corrupt: the header does not match the data"
        )
    if needed > FREE_EXPANSION and needed > MAX_RATIO * item.stored:
        raise source.error(
            f"{item.path} would grow {needed:,} bytes out of {item.stored:,}: a bomb, not read"
        )
    return None


def _read(source: MappedFile, item: Hdf5Contents) -> NDArray[Any]:
    dtype = np.dtype(item.dtype)
    if item.offset is not None:
        array = source.array(item.offset, item.shape, dtype)
    elif 0 in item.shape:
        array = np.empty(item.shape, dtype)
    else:
        array = hdf5.values(source, item)
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


_RECURRENT = {4: "lstm", 3: "gru", 1: "rnn"}


def _hint(tensor: Tensor, by_path: dict[str, Hdf5Contents]) -> Hint:
    """The kind of a Keras weight, by its name and those of its neighbours."""
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


def _gates(tensor: Tensor, by_path: dict[str, Hdf5Contents]) -> str | None:
    """The kind of a recurrent layer, which has a recurrent matrix of hidden by gates x hidden next to its kernel."""
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
    ratio, remainder = divmod(other.shape[1], other.shape[0])
    return _RECURRENT.get(ratio) if remainder == 0 else None


def _archive(source: MappedFile) -> RawCheckpoint:
    archive = ZipArchive.of(source)
    contents = _hdf5(archive.part(WEIGHTS))
    config: Any = None
    if "config.json" in archive.entries:
        config = strict_json(source, archive.small("config.json", limit=MAX_CONFIG), "its config.json")
    if not isinstance(config, dict):
        return contents
    code = sorted(_lambdas(config, 0))
    flags: tuple[Flag, ...] = ()
    if code:
        names = ", ".join(code[:3]) + (", ..." if len(code) > 3 else "")
        flags = (Flag("lambda-layer", f"has layers made of Python code ({names}); the code is not run"),)
    return RawCheckpoint(**(vars(contents) | {"warnings": contents.warnings + flags, "config": config}))


def _lambdas(node: Any, depth: int) -> set[str]:
    """Names of the layers that hold code."""
    if depth > MAX_DEPTH:
        return set()
    if isinstance(node, list):
        return set().union(*(_lambdas(child, depth + 1) for child in node)) if node else set()
    if not isinstance(node, dict):
        return set()
    names = set().union(*(_lambdas(child, depth + 1) for child in node.values())) if node else set()
    if node.get("class_name") == "Lambda":
        inner = node.get("config")
        name = inner.get("name") if isinstance(inner, dict) else None
        names.add(str(name or "Lambda"))
    return names
