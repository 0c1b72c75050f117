"""The format of a file, detected from its content, and its reader: a module in ``formats/`` or another package."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from strati.core import plugins
from strati.core.errors import BadInputError, StratiError, UnsupportedError
from strati.core.results import Flag
from strati.io.checkpoint_file import MAX_TENSORS, MappedFile, RawCheckpoint, ZipArchive

if TYPE_CHECKING:
    from strati.io.checkpoint_file import MappedFile


_READERS = {
    "gguf": "gguf_file",
    "keras": "keras_file",
    "keras_archive": "keras_file",
    "msgpack": "flax_msgpack",
    "npz": "numpy_file",
    "onnx": "onnx_file",
    "safetensors": "safetensors_file",
    "torch": "torch_file",
}


def file_contents(path: Path) -> RawCheckpoint:
    """The checked header of one file, whatever its format."""
    source = MappedFile(path)
    try:
        kind = sniff(source)
    except UnsupportedError:
        added = _of_other_packages(path)
        if added is None:
            raise
        return replace(added, files=(path,))
    read = importlib.import_module(f"strati.io.formats.{_READERS[kind]}").contents
    contents: RawCheckpoint = read(source)
    if len(contents.tensors) > MAX_TENSORS:
        raise BadInputError(
            path,
            f"lists {len(contents.tensors):,} tensors, more than the limit of {MAX_TENSORS:,};"
            " the header is probably corrupt",
        )
    for name in [tensor.name for tensor in contents.tensors] + [skipped.name for skipped in contents.unread]:
        if not name.isascii() and name.encode("utf-8", "ignore").decode() != name:
            # Half a surrogate pair: tables and other programs take no such text, and no framework writes it.
            raise BadInputError(path, f"the name {name} is not Unicode text; re-save the file")
    warnings = contents.warnings + wrong_ending(source, kind)
    return replace(contents, warnings=warnings, files=(path, *contents.files))


def _of_other_packages(path: Path) -> RawCheckpoint | None:
    """The tensors that a format of another installed package reads from a file; ``None`` where none recognises it."""
    from strati.io.in_memory import mapping_contents

    for name, read in plugins.load_all(plugins.FORMATS).items():
        try:
            tensors = read(path)
        except StratiError:
            raise
        except Exception as error:  # a reader of another package may fail in any way
            raise BadInputError(
                path, f"the format {name} cannot read it: {type(error).__name__}: {error}"
            ) from error
        if tensors is not None:
            return replace(mapping_contents(tensors), format=name)
    return None


ENDINGS = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".th": "torch",
    ".ckpt": "torch",
    ".npz": "npz",
    ".npy": "npz",
    ".onnx": "onnx",
    ".gguf": "gguf",
    ".h5": "keras",
    ".hdf5": "keras",
    ".keras": "keras_archive",
    ".msgpack": "msgpack",
}
READABLE = "safetensors, torch (.pt, .pth, .bin), .npz, .onnx, .gguf, Keras (.h5, .keras) and Flax (.msgpack)"

DISTRIBUTED = (
    "is a torch distributed checkpoint; convert it with: "
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt"
)
_PROTOCOL_0 = re.compile(rb"[(\]}dlt]{0,3}c([\w.]{1,200})\n([\w.]{1,200})\n")
_TEXT = re.compile(rb"\s*(<!doctype html|<html|<\?xml)", re.IGNORECASE)


def sniff(source: MappedFile) -> str:
    """The name of the module in ``formats/`` that reads this file.

    Raises:
        UnsupportedError: The content is none that strati reads; the message names it where it is known.
    """
    head = source.head(1024)
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        raise UnsupportedError(
            source.path, "is a Git LFS pointer, not the weights themselves; fetch them with: git lfs pull"
        )
    if source.path.suffix == ".distcp" or b"torch.distributed.checkpoint" in head:
        raise UnsupportedError(source.path, f"is a part of a folder that {DISTRIBUTED}")
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip(source)
    if head.startswith(b"GGUF"):
        return "gguf"
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return "keras"
    if head.startswith(b"\x93NUMPY"):
        return "npz"
    if head[257:262] == b"ustar":
        raise UnsupportedError(
            source.path,
            "is a tar archive, as torch wrote before 2017; load it with an old torch and save its state dict again",
        )
    if len(head) > 8 and head[8:9] == b"{" and head[:1] != b"{":
        return "safetensors"
    if head[:1] == b"\x80" and head[1:2] and head[1] <= 5:
        return "torch"
    if _onnx(head):
        return "onnx"
    if _msgpack(head):
        return "msgpack"
    if _TEXT.match(head):
        raise UnsupportedError(source.path, "is a web page, not a model; the download went wrong")
    named = _PROTOCOL_0.match(head)
    if named:
        symbol = b".".join(named.groups()).decode("ascii", "replace")
        raise UnsupportedError(
            source.path, f"is a pickle that asks for {symbol}, which is not a tensor: refused"
        )
    by_ending = ENDINGS.get(source.path.suffix.lower())
    if by_ending == "torch" and head[:1] in (b"(", b"]", b"}"):
        return by_ending  # a pickle of the first protocols, which have no signature: the reader names what it asks for
    if by_ending in ("safetensors", "onnx"):
        return by_ending  # these have no signature: let the reader say what is wrong
    claim = f", although its ending says {by_ending}" if by_ending else ""
    raise UnsupportedError(source.path, f"unsupported format{claim}: expected {READABLE}")


def wrong_ending(source: MappedFile, kind: str) -> tuple[Flag, ...]:
    """A flag if the ending belongs to another format."""
    claimed = ENDINGS.get(source.path.suffix.lower())
    if claimed is None or claimed == kind:
        return ()
    return (Flag("wrong-ending", f"its ending says {claimed}, its content is {kind}"),)


def _zip(source: MappedFile) -> str:
    names = ZipArchive.of(source).entries
    if any(n == "data.pkl" or n.endswith("/data.pkl") for n in names):
        return "torch"
    if any(n.endswith(".npy") for n in names):
        return "npz"
    if "model.weights.h5" in names:
        return "keras_archive"
    raise UnsupportedError(source.path, f"is a zip file without a network in it; strati reads {READABLE}")


def _msgpack(head: bytes) -> bool:
    # A table (fixmap, map 16, map 32) whose first key is text.
    after = {0xDE: 3, 0xDF: 5}.get(head[0] if head else 0, 1)
    starts = bool(head) and (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF))
    return starts and len(head) > after and (0xA1 <= head[after] <= 0xBF or head[after] in (0xD9, 0xDA, 0xDB))


def _onnx(head: bytes) -> bool:
    # ModelProto starts with ir_version (field 1, a small number), then producer, opset or graph.
    return (
        len(head) > 3
        and head[0] == 0x08
        and 1 <= head[1] <= 30
        and head[2] in b"\x12\x1a\x22\x28\x32\x3a\x42"
    )
