"""The rebuilt network as files: a Hugging Face directory that loads and generates, or one safetensors file."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strati.errors import BadInputError
from strati.run.files import check_writable, write_atomic

if TYPE_CHECKING:
    from strati.reassembly.transformer.result import TransformerReassembly

_OWN = ("config.json", "blueprint.json")


def save(found: TransformerReassembly, path: Path) -> None:
    """Write the network; whole or not at all.

    Args:
        found: The reassembly.
        path: A new or empty folder, or a file ending in ``.safetensors``.

    Raises:
        BadInputError: The folder is not empty, or nothing can be written there.
    """
    from safetensors.numpy import save as to_bytes
    from safetensors.numpy import save_file

    check_target(path)
    tensors = {name: np.ascontiguousarray(values) for name, values in found.tensors().items()}
    if path.suffix == ".safetensors":
        write_atomic(path, to_bytes(tensors, metadata={"format": "pt"}))
        return
    with tempfile.TemporaryDirectory(dir=path.resolve().parent, prefix=f".{path.name}.") as scratch:
        made = Path(scratch) / "network"
        made.mkdir()
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        write_atomic(made / "config.json", json.dumps(dict(found.pieces.config), indent=1) + "\n")
        folder = found.pieces.folder
        for file in sorted(folder.iterdir()) if folder is not None else []:
            if (
                file.suffix in (".json", ".txt", ".model", ".bin")
                and "piece" not in file.name
                and file.name not in _OWN
            ):
                shutil.copyfile(file, made / file.name)  # the tokenizer
        made.replace(path)


def check_target(path: Path) -> None:
    """Refuse a place that cannot take the network.

    Raises:
        BadInputError: It is a folder with something in it, or cannot be written.
    """
    if path.suffix == ".safetensors":
        check_writable(path)
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise BadInputError(path, "is not an empty folder; give a new one for the network")
    elif not path.exists():
        check_writable(path)
