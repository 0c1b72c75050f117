"""Data of a followed run: labels that split its rows into groups (data-refined), and a hash that tells it apart."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strati.core.errors import BadInputError
from strati.core.options import nearest
from strati.tracking.checkpoints import Checkpoint

MOST = 50
"""More groups than this are taken for a column that holds no labels."""


def grouped(data: Any, groups: str | Sequence[Any] | None) -> tuple[Any, tuple[str, ...] | None]:
    """The data without the label column, and one label per row; ``None`` where no groups were asked for.

    Args:
        data: Whatever names data.
        groups: The name of a column (CSV), of an array (``.npz``, a mapping), ``y`` for the targets, or the labels;
            ``None`` for no groups.

    Raises:
        BadInputError: There is no such column, or it holds too many values for labels.

    Examples:
        >>> data, labels = grouped({"x": np.ones((3, 2)), "kind": [0, 1, 0]}, "kind")
        >>> sorted(data), labels
        (['x'], ('0', '1', '0'))
    """
    if groups is None:
        return data, None
    if not isinstance(groups, str):
        return data, _labels("groups", groups)
    if isinstance(data, Mapping):
        if groups not in data:
            raise BadInputError(groups, f"no such column; {nearest(groups, list(data))}")
        remaining = data if groups in ("y", "labels") else {k: v for k, v in data.items() if k != groups}
        return remaining, _labels(groups, data[groups])
    if isinstance(data, tuple | list) and len(data) == 2 and groups == "y":
        return data, _labels(groups, data[1])
    if not isinstance(data, str | os.PathLike):
        raise BadInputError(
            "data_groups", "give one label per row, or data that has named columns (a mapping, CSV or .npz)"
        )
    return _from_file(Path(data), groups)


def digest(data: Any) -> str:
    """A hash that changes when the data do: of a file's name, size and time, or of all values in their order.

    Examples:
        >>> digest(np.ones(3)) == digest([np.ones(3)]), digest(np.ones(3)) == digest(np.zeros(3))
        (True, False)
    """
    if isinstance(data, str | os.PathLike):
        return Checkpoint(0, "data", data).identity()
    hasher = hashlib.sha256()
    for value in _leaves(getattr(data, "dataset", data)):  # a loader may shuffle; what it draws from stays
        hasher.update(value)
    return hasher.hexdigest()


def _leaves(data: Any) -> Iterator[bytes]:
    if data is None or isinstance(data, str | bytes | int | float):
        yield repr(data).encode()
    elif isinstance(data, np.ndarray):
        yield data.tobytes()
    elif hasattr(data, "detach"):
        import torch

        yield data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(data, Mapping):
        for key in sorted(data, key=str):
            yield str(key).encode()
            yield from _leaves(data[key])
    elif isinstance(data, Iterable):
        for part in data:
            yield from _leaves(part)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):  # a map-style data set
        for k in range(len(data)):
            yield from _leaves(data[k])
    else:
        yield repr(type(data)).encode()


def _from_file(path: Path, name: str) -> tuple[Any, tuple[str, ...]]:
    from strati.io.data_files import TARGETS, read_data, read_table

    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            if name not in file:
                raise BadInputError(path, f"has no array {name!r}; {nearest(name, list(file))}")
            return path, _labels(name, file[name])
    table = read_table(path)
    names = list(table.columns)
    if name not in names:
        raise BadInputError(path, f"has no column {name!r}; {nearest(name, names)}")
    labels = _labels(name, np.asarray(table.values)[:, names.index(name)])
    if name in TARGETS:
        return path, labels
    arrays = read_data(path, inputs=",".join(n for n in names if n != name and n not in TARGETS))
    return (arrays.x if arrays.y is None else (arrays.x, arrays.y)), labels


def _labels(name: str, values: Any) -> tuple[str, ...]:
    held = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    if held.ndim != 1:
        raise BadInputError(name, f"must hold one label per row, not an array of shape {held.shape}")
    are_integers = held.dtype.kind == "f" and bool(np.all(held == np.round(held)))
    labels = tuple(str(int(v)) if are_integers else str(v) for v in held.tolist())
    if len(set(labels)) > MOST:
        raise BadInputError(name, f"holds {len(set(labels))} different values; groups are at most {MOST}")
    return labels
