"""The checkpoints of a run in order: what each is, and at which training step it was taken."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strati.core.display import natural
from strati.core.errors import BadInputError

_NUMBER = re.compile(r"[0-9]+")
ENDINGS = (
    ".safetensors",
    ".pt",
    ".pth",
    ".bin",
    ".npz",
    ".gguf",
    ".onnx",
    ".h5",
    ".keras",
    ".msgpack",
    ".ckpt",
)


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
    if steps is not None:
        if not isinstance(steps, Iterable):
            raise BadInputError("steps", "must be a list of numbers, one for each checkpoint")
        if len(steps) != len(listed):
            raise BadInputError("steps", f"there are {len(steps)} for {len(listed)} checkpoints")
        numbers: list[float | None] = [float(step) for step in steps]
    else:
        numbers = [_number(source) for source in listed]
        if any(number is None for number in numbers):
            numbers = [float(place) for place in range(len(listed))]
    pairs = [
        Checkpoint(float(step or 0.0), _name(source, place), source)
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
    if not isinstance(source, str | os.PathLike):
        return None
    text = os.fspath(source)
    name = Path(text).name if "@" not in text else text.rpartition("@")[2]
    for suffix in ENDINGS:
        name = name.removesuffix(suffix)
    digits = _NUMBER.findall(name)
    return float(digits[-1]) if digits else None


def _name(source: Any, place: int) -> str:
    if isinstance(source, str | os.PathLike):
        return Path(os.fspath(source)).name
    return f"{type(source).__name__} {place}"


def _files(path: Path) -> str:
    digest = hashlib.sha256(str(path).encode())
    places = sorted(path.rglob("*")) if path.is_dir() else [path]
    for place in places:
        try:
            state = place.stat()
        except OSError:
            continue
        if place.is_file():
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
