"""HDF5 files read by h5py in a child process with limits on time and memory.

The HDF5 library hangs or crashes on some damaged files, and nothing outside it can predict that, so h5py does not run
in this process. The child (this module as a program) returns a list of datasets, or the bytes of one.

Only hard links to datasets inside the file are followed: an external or soft link, or an external or virtual dataset,
could return the bytes of any file of the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.plugins import require
from strati.io.checkpoint_file import FileSlice, MappedFile, MappedReader

if TYPE_CHECKING:
    from numpy.typing import NDArray

SECONDS = 8
MEMORY = 300_000_000  # bytes the child may use beyond what a dataset needs
MAX_DEPTH = 24
MAX_NAME = 4096
MAX_DATASETS = 100_000
MAX_ORDER = 10_000_000  # bytes of the list of layer names
_ABSENT, _DAMAGED = 3, 4  # exit codes of the child
_ROOT = "model_weights"


@dataclass(frozen=True)
class Hdf5Contents:
    """A dataset: its path, shape, type and location.

    Attributes:
        path: Below the group of the weights.
        shape: Its shape.
        dtype: numpy's text for its type, ``""`` if it holds no numbers.
        offset: Where its bytes are, if they are in one piece.
        stored: Bytes it occupies in the file.
        reason: Why it is not read, if so.
        elsewhere: Whether that is because it points out of its place or out of the file.
    """

    path: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    offset: int | None = None
    stored: int = 0
    reason: str | None = None
    elsewhere: bool = False


def listing(source: MappedFile) -> tuple[list[Hdf5Contents], list[str]]:
    """The datasets of a file, and its layers in the model's order where the file keeps it.

    Raises:
        BadInputError: The file is damaged.
        MissingExtraError: h5py is not installed.
    """
    table = json.loads(_child(source, ["list"]))
    datasets = [Hdf5Contents(**(fields | {"shape": tuple(fields["shape"])})) for fields in table["datasets"]]
    return datasets, table["order"]


def values(source: MappedFile, item: Hdf5Contents) -> NDArray[Any]:
    """The values of a dataset that is not stored in one piece.

    Raises:
        BadInputError: Its bytes are damaged.
    """
    dtype = np.dtype(item.dtype)
    needed = dtype.itemsize * int(np.prod(item.shape, dtype=object))
    raw = _child(source, ["read", item.path], needed)
    if len(raw) != needed:
        raise source.error(f"{item.path} does not hold what its shape says; the file is damaged")
    return np.frombuffer(raw, dtype).reshape(item.shape)


def _child(source: MappedFile, words: list[str], needed: int = 0) -> bytes:
    # The child is given the parent's paths, so that it finds the same strati and h5py.
    program = "from strati.io.formats.hdf5_process import main; main(sys.argv[1:])"
    start = f"import sys; sys.path[:] = {sys.path!r}; {program}"
    memory, seconds = MEMORY + 3 * needed, SECONDS + needed // 20_000_000
    place, offset = str(source.place.absolute()), str(source.offset)
    command = [
        sys.executable,
        "-I",
        "-c",
        start,
        str(memory),
        str(seconds),
        place,
        offset,
        str(source.size),
        *words,
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        raise source.error("its HDF5 structure leads in circles; damaged, save it again") from None
    if done.returncode == 0:
        return done.stdout
    if done.returncode == _ABSENT:
        require("h5py", "keras", "reading Keras .h5 files")
    # h5py's own messages are long and speak of its insides: they stay in the child.
    raise source.error("its HDF5 structure is damaged or truncated; download or save it again")


def main(words: list[str]) -> None:
    """The child's program: list the datasets as JSON, or write the bytes of one."""
    import resource

    memory, seconds, path, offset, size, verb, *arguments = words
    try:
        import h5py
    except ImportError:
        sys.exit(_ABSENT)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))
    try:
        # The file itself, or the part of it that is an HDF5 file of its own: an archive's entry stored as it is.
        outer = MappedFile(path)
        part = FileSlice(outer, outer.data[int(offset) : int(offset) + int(size)], offset=int(offset))
        stream = path if int(offset) == 0 else MappedReader(part, limit=int(size))
        with h5py.File(stream, "r", locking=False) as file:
            root = file[_ROOT] if _is_group(h5py, file, _ROOT) else file
            if verb == "list":
                datasets = [vars(dataset) for dataset in _walk(h5py, root, "", 0, set())]
                answer = json.dumps({"datasets": datasets, "order": _order(h5py, root)}).encode()
            else:
                answer = np.ascontiguousarray(root[arguments[0]][()]).tobytes()
    except Exception:
        # Whatever h5py raises here (it uses a dozen kinds), the file is at fault; the parent says so.
        sys.exit(_DAMAGED)
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()


def _is_group(h5py: Any, group: Any, name: str) -> bool:
    if name not in group or not isinstance(group.get(name, getlink=True), h5py.HardLink):
        return False
    return isinstance(group[name], h5py.Group)


def _walk(h5py: Any, group: Any, path: str, depth: int, visited: set[int]) -> Iterator[Hdf5Contents]:
    if depth > MAX_DEPTH or len(visited) > MAX_DATASETS or len(path) > MAX_NAME:
        raise ValueError("groups nested too deep, or too many")
    for name in group:
        place = f"{path}/{name}" if path else str(name)
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            yield Hdf5Contents(place, reason="a link out of its place, which is not followed", elsewhere=True)
            continue
        child = group[name]
        address = h5py.h5o.get_info(child.id).addr
        if address in visited:
            yield Hdf5Contents(place, reason="the same object again, under another name")
            continue
        visited.add(address)
        if isinstance(child, h5py.Group):
            yield from _walk(h5py, child, place, depth + 1, visited)
        elif isinstance(child, h5py.Dataset):
            yield _dataset(h5py, child, place)


def _dataset(h5py: Any, item: Any, path: str) -> Hdf5Contents:
    if item.shape is None or item.id.get_type().get_class() not in (h5py.h5t.INTEGER, h5py.h5t.FLOAT):
        return Hdf5Contents(path, reason="no numbers (text, records or nothing)")
    shape = tuple(int(side) for side in item.shape)
    if item.is_virtual or item.external:
        why = "its data are in other files, which are not opened"
        return Hdf5Contents(path, shape, item.dtype.str, reason=why, elsewhere=True)
    # Data in one piece are mapped where they are; filters only apply to chunks.
    offset = item.id.get_offset() if item.chunks is None else None
    return Hdf5Contents(path, shape, item.dtype.str, offset, int(item.id.get_storage_size()))


def _order(h5py: Any, root: Any) -> list[str]:
    if "layer_names" not in root.attrs:
        return []
    if h5py.h5a.open(root.id, b"layer_names").get_storage_size() > MAX_ORDER:
        return []
    names = root.attrs["layer_names"]
    return [n.decode("utf-8", "replace") if isinstance(n, bytes) else str(n) for n in names]
