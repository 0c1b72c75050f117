"""One file, whatever its format: detected from its content, read by a module in ``formats/`` or by another package."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

from strati.core import plugins
from strati.core.errors import BadInputError, StratiError, UnsupportedError
from strati.io.detect_format import sniff, wrong_ending
from strati.io.mapped_file import MappedFile
from strati.io.raw_checkpoint import MAX_TENSORS, RawCheckpoint

_READERS = {
    "gguf": "gguf_file",
    "keras": "keras_hdf5",
    "keras_archive": "keras_archive",
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
    found: RawCheckpoint = read(source)
    if len(found.tensors) > MAX_TENSORS:
        raise BadInputError(
            path,
            f"lists {len(found.tensors):,} tensors, more than the limit of {MAX_TENSORS:,};"
            " the header is probably corrupt",
        )
    for name in [tensor.name for tensor in found.tensors] + [skipped.name for skipped in found.unread]:
        if not name.isascii() and name.encode("utf-8", "ignore").decode() != name:
            # Half a surrogate pair: tables and other programs take no such text, and no framework writes it.
            raise BadInputError(path, f"the name {name} is not Unicode text; re-save the file")
    warnings = found.warnings + wrong_ending(source, kind)
    return replace(found, warnings=warnings, files=(path, *found.files))


def _of_other_packages(path: Path) -> RawCheckpoint | None:
    """The tensors that a format of another installed package reads from a file; ``None`` where none recognises it."""
    from strati.io.in_memory import mapping_contents

    for name, read in plugins.load_all(plugins.FORMATS).items():
        try:
            tensors = read(path)
        except StratiError:
            raise
        except Exception as error:  # a reader of somebody else may fail in any way
            raise BadInputError(
                path, f"the format {name} cannot read it: {type(error).__name__}: {error}"
            ) from error
        if tensors is not None:
            return replace(mapping_contents(tensors), format=name)
    return None
