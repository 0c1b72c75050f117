"""The inputs of a followed run: its checkpoints by training step, its data and their groups, and hashes of both."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strati.core.display import natural
from strati.core.errors import BadInputError
from strati.core.options import nearest
from strati.io.file_formats import ENDINGS as FORMATS

ENDINGS = frozenset(FORMATS) - {".npy"}  # one array is no network

MOST_GROUPS = 50
"""A column with more values than this is taken for one that holds no labels."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint.

    Attributes:
        step: The training step; repeated where a run was restarted.
        name: What to call it.
        source: Whatever names the network: a path, a cache id, a state dict, a module.
    """

    step: float
    name: str
    source: Any

    def identity(self) -> str:
        """A hash that changes when the checkpoint does: of its files' names, sizes and times, or of its values."""
        if isinstance(self.source, str | os.PathLike):
            return _files(Path(self.source))
        return _values(self.source)


def in_order(checkpoints: Any, steps: Sequence[float] | None = None) -> tuple[Checkpoint, ...]:
    """The checkpoints of a run, by rising step.

    The step of a path is the last number in its name; where one of them has none, they are counted from 0. Files of a
    folder that have none (``optimizer.pt``, the last weights) are left out where others have: :func:`left_out`.

    Args:
        checkpoints: Paths, cache ids, state dicts or modules; a mapping of steps to them; or one folder that holds the
            checkpoints.
        steps: Their steps, where the names do not tell.

    Raises:
        BadInputError: There is none, or the steps given are not as many.

    Examples:
        >>> [(c.step, c.name) for c in in_order(["run/ckpt-100", "run/ckpt-20"])]
        [(20.0, 'ckpt-20'), (100.0, 'ckpt-100')]
        >>> [c.step for c in in_order([{}, {}])]
        [0.0, 1.0]
        >>> [c.step for c in in_order({100: {}, 20: {}})]
        [20.0, 100.0]
    """
    if steps is None and _by_step(checkpoints):
        steps = list(checkpoints)
    listed = _listed(checkpoints)
    if not listed:
        raise BadInputError("checkpoints", "there are none; give their paths, or the folder that holds them")
    numbers: list[float | None]
    if steps is None:
        numbers = [_number(source) for source in listed]
    elif not isinstance(steps, Iterable):
        raise BadInputError("steps", "must be a list of numbers, one for each checkpoint")
    elif len(steps) != len(listed):
        raise BadInputError("steps", f"there are {len(steps)} for {len(listed)} checkpoints")
    else:
        numbers = [float(step) for step in steps]
    counted = any(number is None for number in numbers)
    pairs = [
        Checkpoint(float(place if counted else step or 0.0), _name(source, place), source)
        for place, (step, source) in enumerate(zip(numbers, listed, strict=True))
    ]
    return tuple(sorted(pairs, key=lambda checkpoint: checkpoint.step))


def left_out(checkpoints: Any) -> tuple[str, ...]:
    """Names in a folder of checkpoints that have no step, and are therefore not followed."""
    if not isinstance(checkpoints, str | os.PathLike) or not Path(checkpoints).is_dir():
        return ()
    used = set(_listed(checkpoints))
    return tuple(p.name for p in _candidates(Path(checkpoints)) if used and p not in used)


def _by_step(checkpoints: Any) -> bool:
    return (
        isinstance(checkpoints, Mapping)
        and bool(checkpoints)
        and all(isinstance(key, int | float) for key in checkpoints)
    )


def _listed(checkpoints: Any) -> list[Any]:
    if isinstance(checkpoints, str | os.PathLike):
        folder = Path(checkpoints)
        if not folder.is_dir():
            return [checkpoints]
        inside = _candidates(folder)
        if (folder / "config.json").is_file() and not any(p.is_dir() for p in inside):
            return [folder]  # one network in several files
        numbered = [p for p in inside if _number(p) is not None]
        return numbered or inside
    if isinstance(checkpoints, Mapping):
        return list(checkpoints.values()) if _by_step(checkpoints) else [checkpoints]
    return list(checkpoints)


def _candidates(folder: Path) -> list[Path]:
    inside = [p for p in folder.iterdir() if p.suffix in ENDINGS or _is_model(p)]
    return sorted(inside, key=lambda p: natural(p.name))


def _is_model(path: Path) -> bool:
    return path.is_dir() and any(
        child.suffix in ENDINGS or child.name in ("config.json", "adapter_config.json")
        for child in path.iterdir()
    )


def _number(source: Any) -> float | None:
    """The last number in the name of a path or cache id."""
    if not isinstance(source, str | os.PathLike):
        return None
    text = os.fspath(source)
    name = Path(text).name if "@" not in text else text.rpartition("@")[2]
    for suffix in ENDINGS:
        name = name.removesuffix(suffix)
    digits = re.findall("[0-9]+", name)
    return float(digits[-1]) if digits else None


def _name(source: Any, place: int) -> str:
    if isinstance(source, str | os.PathLike):
        return Path(os.fspath(source)).name
    return f"{type(source).__name__} {place}"


def _files(path: Path) -> str:
    digest = hashlib.sha256(str(path).encode())
    for place in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if place.is_file():
            state = place.stat()
            digest.update(f"{place.name} {state.st_size} {state.st_mtime_ns}".encode())
    return digest.hexdigest()


def _values(source: Any) -> str:
    from strati.io.network import open as open_network

    network = open_network(source)
    digest = hashlib.sha256()
    for tensor in network.tensors:
        digest.update(f"{tensor.name} {tensor.shape} {tensor.dtype}".encode())
        digest.update(network.read(tensor.name).tobytes())
    return digest.hexdigest()


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


def data_identity(data: Any) -> str:
    """A hash that changes when the data do: of a file's name, size and time, or of all values in their order.

    Examples:
        >>> ones = data_identity(np.ones(3))
        >>> ones == data_identity([np.ones(3)]), ones == data_identity(np.zeros(3))
        (True, False)
    """
    if isinstance(data, str | os.PathLike):
        return Checkpoint(0, "data", data).identity()
    hasher = hashlib.sha256()
    for part in _leaves(getattr(data, "dataset", data)):  # a loader may shuffle; what it draws from stays
        hasher.update(part)
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
    if len(set(labels)) > MOST_GROUPS:
        raise BadInputError(
            name, f"holds {len(set(labels))} different values; groups are at most {MOST_GROUPS}"
        )
    return labels
