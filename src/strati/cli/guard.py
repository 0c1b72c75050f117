"""Outputs that must not overwrite inputs: one look at the words of a command before any work is done."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from strati.core.errors import BadInputError, StratiError

FORCE = "strati.force"
OUTPUTS = frozenset(
    {
        "--json",
        "--html",
        "--export",
        "--out",
        "--output",
        "--sparsify",
        "--make",
        "--answer",
        "--plot",
        "--figures",
        "--align",
    }
)
"""Options of any verb that name what is written; arguments and every other option that is a path are inputs."""

_RESULTS = (".html", ".csv", ".parquet")
_STORE = ".sqlite"


def guard_outputs(context: click.Context, *, also: Iterable[str | None] = ()) -> None:
    """Refuse to write over an input, or, without ``--force``, over a file that opens as a network.

    Args:
        context: The command with its words read.
        also: Paths that are read though no word of the command names them, such as those in a spec.

    Raises:
        BadInputError: An output is one of the inputs, is given twice, lies among the files that ``--out`` keeps, or is
            a network without ``--force``.
    """
    written = {parameter.name for parameter in context.command.params if is_output(parameter)}
    outputs = [Path(text) for name in written for text in _texts(context.params.get(name)) if text != "-"]
    words = [text for name, value in context.params.items() if name not in written for text in _texts(value)]
    named = [text for text in also if text is not None]
    inputs = [path for text in words + named if (path := _existing(text)) is not None]
    folders = [
        Path(text) for name in ("out", "folder") if name in written for text in _texts(context.params[name])
    ]
    force = bool(context.meta.get(FORCE) or context.params.get("force"))
    for number, output in enumerate(outputs):
        if output.absolute() in [other.absolute() for other in outputs[:number]]:
            raise BadInputError(output, "is given for two outputs; give each a name of its own")
        if any(_is_kept_in(output, folder) for folder in folders):
            raise BadInputError(output, "lies among the files that --out keeps; choose another name")
        if _existing(str(output)) is None:
            continue
        if any(_is_part_of(output, given) for given in inputs):
            raise BadInputError(output, "is one of the inputs and is not overwritten; choose another name")
        if output.is_file() and not force and _is_network(output):
            raise BadInputError(output, "exists and is a network; choose another name, or add --force")


def is_output(parameter: click.Parameter) -> bool:
    """Whether a parameter of a verb names what is written."""
    return isinstance(parameter, click.Option) and any(word in OUTPUTS for word in parameter.opts)


def _texts(value: Any) -> list[str]:
    if isinstance(value, tuple | list):
        return [text for item in value for text in _texts(item)]
    return [os.fspath(value)] if isinstance(value, str | os.PathLike) and os.fspath(value) else []


def _existing(text: str) -> Path | None:
    path = Path(text)
    try:
        return path if path.exists() else None
    except (OSError, ValueError):
        return None


def _is_kept_in(output: Path, folder: Path) -> bool:
    """Whether a file lies among those that a folder of work keeps: its store, or what an earlier run left there."""
    if not output.absolute().is_relative_to(folder.absolute()) or output.absolute() == folder.absolute():
        return False
    return output.suffix.lower() == _STORE or (output.is_file() and _is_part_of(output, folder))


def _is_part_of(output: Path, given: Path) -> bool:
    """Whether an existing output is an input, or a file of an input folder that is no earlier result."""
    if output.samefile(given):
        return True
    if not output.is_file():
        return False
    if given.name.endswith(".index.json"):  # its shards are inputs too
        return output.parent.samefile(given.parent) and _is_network(output)
    inside = given.is_dir() and output.resolve().is_relative_to(given.resolve())
    return inside and output.suffix.lower() not in _RESULTS and not _is_result(output)


def _is_result(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(19).startswith(b'{"schema": "strati.')


def _is_network(path: Path) -> bool:
    from strati.io.load import open as open_network

    try:
        open_network(path)
    except StratiError:
        return False
    return True
