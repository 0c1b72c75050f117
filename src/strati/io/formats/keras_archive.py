"""``.keras`` archives: a zip with ``model.weights.h5``, read by ``keras``, and ``config.json``, which names the layers.

Layers are never built; one that holds Python code (``Lambda``) is named in a warning, and its code not looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strati.core.results import Flag
from strati.io.formats import keras_hdf5 as keras
from strati.io.formats.safetensors_file import strict_json
from strati.io.raw_checkpoint import RawCheckpoint
from strati.io.zip_archive import ZipArchive

if TYPE_CHECKING:
    from strati.io.mapped_file import MappedFile

WEIGHTS = "model.weights.h5"
MAX_CONFIG = 25_000_000
MAX_DEPTH = 40


def contents(source: MappedFile) -> RawCheckpoint:
    """List the weights of a Keras archive; they stay in the file.

    Raises:
        BadInputError: The archive or the weights in it are damaged.
    """
    archive = ZipArchive.of(source)
    found = keras.contents(archive.part(WEIGHTS))
    config: Any = None
    if "config.json" in archive.entries:
        config = strict_json(source, archive.small("config.json", limit=MAX_CONFIG), "its config.json")
    if not isinstance(config, dict):
        return found
    code = sorted(_lambdas(config, 0))
    flags: tuple[Flag, ...] = ()
    if code:
        names = ", ".join(code[:3]) + (", ..." if len(code) > 3 else "")
        flags = (Flag("lambda-layer", f"has layers made of Python code ({names}); the code is not run"),)
    return RawCheckpoint(**(vars(found) | {"warnings": found.warnings + flags, "config": config}))


def _lambdas(node: Any, depth: int) -> set[str]:
    """Names of the layers that hold code."""
    if depth > MAX_DEPTH:
        return set()
    if isinstance(node, list):
        return set().union(*(_lambdas(child, depth + 1) for child in node)) if node else set()
    if not isinstance(node, dict):
        return set()
    found = set().union(*(_lambdas(child, depth + 1) for child in node.values())) if node else set()
    if node.get("class_name") == "Lambda":
        inner = node.get("config")
        name = inner.get("name") if isinstance(inner, dict) else None
        found.add(str(name or "Lambda"))
    return found
