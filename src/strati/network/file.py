"""One file, whatever its format: told by content, its header checked by the module in ``formats/`` that reads it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

from strati.errors import BadInputError
from strati.network.contents import MAX_TENSORS, Contents
from strati.network.sniff import sniff, wrong_ending
from strati.network.source import Source


def file_contents(path: Path) -> Contents:
    """The checked header of one file, whatever its format."""
    source = Source(path)
    kind = sniff(source)
    read = importlib.import_module(f"strati.network.formats.{kind}").contents
    found: Contents = read(source)
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
