"""Checkpoints rewritten tensor by tensor: the same format, names, precision and metadata, some tensors new.

Reads are streamed; what is not changed is copied byte for byte. Nothing here decides what changes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from strati.core.errors import BadInputError, UnsupportedError
from strati.io.formats.state_dict import WRAPPERS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.comparison.unit_alignment import Renumbering, UnitOrder
    from strati.io.layers import Layer
    from strati.io.network import Network

DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
_NAMES: dict[Any, str] = {np.dtype(kind): name for name, kind in DTYPES.items()} | {
    np.dtype(np.bool_): "BOOL",
    **{np.dtype(f"int{bits}"): f"I{bits}" for bits in (8, 16, 32, 64)},
    **{np.dtype(f"uint{bits}"): f"U{bits}" for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True)
class Rewrite:
    """What becomes of a checkpoint's tensors.

    Attributes:
        replace: Tensor -> its new values by name: one of the same name, or two factors in its place.
        rename: What another tensor is called afterwards; ``None`` leaves it out.
    """

    replace: Mapping[str, Mapping[str, NDArray[Any]]]
    rename: Callable[[str], str | None]

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, str, NDArray[Any] | None]]:
        """Old name, new name and new values of every tensor that is left; without values it stays as it is."""
        for name in names:
            if name in self.replace:
                yield from ((name, other, values) for other, values in self.replace[name].items())
            else:
                other_name = self.rename(name)
                if other_name is not None:
                    yield name, other_name, None


def rewrite_file(network: Network, target: Path, rewrite: Rewrite) -> None:
    """Write the file of a network again, in its own format.

    Raises:
        UnsupportedError: That format is not written.
    """
    source, names = Path(network.path), [t.name for t in network.tensors]
    if network.format == "safetensors":
        rewrite_safetensors(source, target, rewrite)
    elif network.format == "npz":
        rewrite_npz(source, target, rewrite)
    elif network.format.startswith("torch"):
        rewrite_torch(source, target, rewrite, names)
    else:
        why = f"is {network.format}; safetensors, torch and .npz files and directories of safetensors are written"
        raise UnsupportedError(source, why)


def rewrite_safetensors(source: Path, target: Path, rewrite: Rewrite) -> list[str]:
    """Write a safetensors file again with some tensors changed; returns the names it holds."""
    with source.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        start = 8 + size
        metadata = header.pop("__metadata__", None)
        new: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
        parts: list[tuple[int, int] | bytes] = []
        place = 0
        ordered = sorted(header, key=lambda name: header[name]["data_offsets"][0])
        for name, other, values in rewrite.tensors(ordered):
            about = header[name]
            first, last = about["data_offsets"]
            part: tuple[int, int] | bytes = (start + first, last - first)
            if values is not None:
                stored = cast(values, about["dtype"], name)
                part, first, last = stored.tobytes(), 0, stored.nbytes
                about = {"dtype": _NAMES[stored.dtype], "shape": list(values.shape)}
            new[other] = about | {"data_offsets": [place, place + last - first]}
            parts.append(part)
            place += last - first
        with target.open("wb") as out:
            out.write(_header(new))
            for part in parts:
                if isinstance(part, bytes):
                    out.write(part)
                    continue
                file.seek(part[0])
                left = part[1]
                while left:
                    chunk = file.read(min(left, 16 << 20))
                    out.write(chunk)
                    left -= len(chunk)
    return [name for name in new if name != "__metadata__"]


def write_safetensors(target: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays by name as a new safetensors file, one after the other.

    A full disk is the operating system's own error here; the library's writer would hide it in one of its own.
    """
    header: dict[str, Any] = {}
    place = 0
    for name, value in tensors.items():
        if value.dtype not in _NAMES:
            raise UnsupportedError(name, f"is {value.dtype}; safetensors has no such type")
        ends = [place, place + value.nbytes]
        header[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": ends}
        place = ends[1]
    with target.open("wb") as out:
        out.write(_header(header))
        for value in tensors.values():
            out.write(np.ascontiguousarray(value).tobytes())


def _header(header: Mapping[str, Any]) -> bytes:
    """A safetensors header, its length first; padded, so that the tensors start at a multiple of eight."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def cast(values: NDArray[Any], dtype: str, name: str) -> NDArray[Any]:
    """Values in the precision the file had them in; integers stay as they are.

    Raises:
        UnsupportedError: The tensor is stored in a form that real values cannot be put back into.
    """
    if values.dtype.kind in "iu":
        return np.ascontiguousarray(values)
    if dtype not in DTYPES:
        raise UnsupportedError(name, f"is stored as {dtype}; apply writes F64, F32, F16 and BF16 tensors")
    return np.ascontiguousarray(values.astype(DTYPES[dtype]))


def rewrite_npz(source: Path, target: Path, rewrite: Rewrite) -> None:
    """Write an ``.npz`` again with some arrays changed."""
    with np.load(source, allow_pickle=False) as file:
        arrays: dict[str, Any] = {
            other: file[name] if values is None else values.astype(file[name].dtype)
            for name, other, values in rewrite.tensors(file.files)
        }
    with target.open("wb") as out:
        np.savez(out, **arrays)


def rewrite_torch(source: Path, target: Path, rewrite: Rewrite, names: Sequence[str]) -> None:
    """Write a torch checkpoint again: the table that holds all tensors of ``names`` changed, the rest as it was.

    Names may have a wrapper's prefix in the file (``module.``), which they keep.

    Raises:
        UnsupportedError: The tensors do not lie in one table.
    """
    import torch

    checkpoint: Any = torch.load(source, map_location="cpu", weights_only=True)
    place = _holder(checkpoint, names)
    if place is None:
        why = "its tensors do not lie in one table; save the network's state_dict() alone, or as safetensors"
        raise UnsupportedError(source, why)
    state, prefix = place
    named = {str(key).removeprefix(prefix): value for key, value in state.items()}
    new: dict[str, Any] = {}
    for name, other, values in rewrite.tensors(named):
        old = named[name]
        array = None if values is None else np.ascontiguousarray(values, dtype=np.float32)
        new[f"{prefix}{other}"] = old if array is None else torch.from_numpy(array).to(old.dtype)
    try:
        with target.open("wb") as out:
            torch.save(_with(checkpoint, state, new), out)
    except RuntimeError as error:  # torch hides what the operating system said behind its own error
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _holder(tree: Any, names: Sequence[str], depth: int = 8) -> tuple[dict[Any, Any], str] | None:
    """The table in which all names lie, and the prefix they have there."""
    if not isinstance(tree, dict) or depth == 0:
        return None
    for prefix in ("", *WRAPPERS, *(a + b for a in WRAPPERS for b in WRAPPERS)):
        if all(f"{prefix}{name}" in tree for name in names):
            return tree, prefix
    inner = (_holder(value, names, depth - 1) for value in tree.values())
    return next((holder for holder in inner if holder is not None), None)


def _with(tree: Any, old: dict[Any, Any], new: dict[str, Any]) -> Any:
    """A tree of tables with one of them replaced."""
    if tree is old:
        return new
    return {key: _with(value, old, new) for key, value in tree.items()} if isinstance(tree, dict) else tree


def rewrite_directory(source: Path, target: Path, rewrite: Rewrite) -> None:
    """Copy a Hugging Face directory, its safetensors shards rewritten and their index to match.

    Raises:
        UnsupportedError: It holds weights in another format.
    """
    import shutil

    shards = sorted(source.glob("*.safetensors"))
    if not shards:
        raise UnsupportedError(
            source, "holds no safetensors weights; convert it first: pickled weights are not written"
        )
    places: dict[str, str] = {}
    for shard in shards:
        for name in rewrite_safetensors(shard, target / shard.name, rewrite):
            places[name] = shard.name
    for other in sorted(source.iterdir()):
        if other.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"):
            continue
        if other.is_dir():
            continue  # caches and other exports are not part of the model
        if other.name.endswith(".safetensors.index.json"):
            index = json.loads(other.read_text("utf-8"))
            index["weight_map"] = places
            total = sum((target / s.name).stat().st_size for s in shards)
            index.setdefault("metadata", {})["total_size"] = total
            (target / other.name).write_text(json.dumps(index, indent=2), "utf-8")
            continue
        shutil.copyfile(other, target / other.name)


def find_tensor(
    layer: str,
    weight: NDArray[Any],
    names: Mapping[str, tuple[int, ...]],
    read: Callable[[str], NDArray[Any]],
) -> tuple[str, bool]:
    """Which tensor of a file is a layer's weight, and whether it is stored transposed.

    By name first, then by value: modules rebuilt from plain files rename their layers.

    Raises:
        BadInputError: None is.
    """

    def same(name: str, turned: bool) -> bool:
        there = np.asarray(read(name)).astype(np.float32)
        return bool(np.array_equal(there.T if turned else there, weight))

    shapes = [(False, weight.shape)] + ([(True, weight.shape[::-1])] if weight.ndim == 2 else [])
    weight_name = f"{layer}.weight"
    close = [
        n for n in names if n == weight_name or n.endswith(f".{weight_name}") or weight_name.endswith(f".{n}")
    ]
    plain = re.sub(r"[^0-9a-z]", "", layer.lower())
    close += [n for n in names if n not in close and re.sub(r"[^0-9a-z]", "", n.lower()).startswith(plain)]
    for name in [*close, *(n for n in names if n not in close)]:
        for turned, shape in shapes:
            if names[name] == shape and same(name, turned):
                return name, turned
    raise BadInputError(
        layer, "no tensor of the file holds this layer's weights; the plan is for another network"
    )


def write_renumbered(network: Network, order: UnitOrder | None, target: str | Path) -> None:
    """Write a network with its units renumbered, in the format it is stored in; nothing is left half-written.

    Args:
        network: A safetensors, torch or ``.npz`` file, or a directory of safetensors files.
        order: Renumberings of its layers and vectors; without any the network is written as it is.
        target: A new path.

    Raises:
        UnsupportedError: Its format is not written, or a layer is part of a fused tensor.
    """
    changed = {} if order is None else renumbered_tensors(network, order)
    rewrite = Rewrite({name: {name: values} for name, values in changed.items()}, lambda name: name)
    source, place = Path(network.path), Path(target)
    folder = Path(mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        if source.is_dir():
            rewrite_directory(source, folder, rewrite)
            folder.chmod(0o755)
            folder.replace(place)
            return
        new = folder / place.name
        rewrite_file(network, new, rewrite)
        new.replace(place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def renumbered_tensors(network: Network, order: UnitOrder) -> dict[str, NDArray[Any]]:
    """The tensors that an order of units changes, as they are stored.

    Raises:
        UnsupportedError: A layer is part of a fused tensor.
    """
    changed = {}
    for layer in network.layers():
        if layer.name in order.layers:
            stored = network.read(layer.tensor)
            changed[layer.tensor] = _renumbered(layer, stored, order.layers[layer.name])
    for name, renumbering in order.vectors.items():
        changed[name] = renumbering.apply(network.read(name))
    return changed


def _renumbered(layer: Layer, stored: NDArray[Any], renumbering: Renumbering) -> NDArray[Any]:
    """The stored tensor renumbered; kernels keep their taps behind outputs and inputs."""
    matrices = list(layer.matrices())
    new = np.stack([renumbering.apply(matrix) for matrix in matrices], axis=-1)
    old = np.stack(matrices, axis=-1)
    for axes in ((0, 1), (1, 0), (-1, -2)):  # outputs and inputs: torch, Conv1D, channels last
        moved = np.moveaxis(stored, axes, (0, 1))
        if np.array_equal(moved.reshape(*moved.shape[:2], -1), old):
            return np.ascontiguousarray(np.moveaxis(new.reshape(moved.shape), (0, 1), axes))
    raise UnsupportedError(
        layer.name, f"is one part of {layer.tensor}; fused tensors are not renumbered in files"
    )
