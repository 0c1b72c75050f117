"""What ``strati report`` takes: JSON files of results, study folders, and results in memory, as plain dictionaries.

A result is compared with its JSON Schema as far as the page depends on it, so that no foreign or broken file reaches
the page: its schema is known, its most important field is there, and its tables are lists of records.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from strati.core.errors import BadInputError
from strati.core.results import Result
from strati.io.checkpoint_file import MappedFile
from strati.schemas import names, schema

_LARGEST = 512 * 2**20
_UNCHECKED = 32 * 2**20
_LARGEST_PICTURE = 8 * 2**20
_MOST_LINES = 2000
_PNG = b"\x89PNG\r\n\x1a\n"
_DEEPEST = 32
_LARGEST_NUMBER = 10**300
_HEAD = b'{"schema": "strati.'


def read_run(run: Result | Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """One result as its JSON form: a result in memory, a JSON file, or a study folder (its audit).

    Raises:
        BadInputError: None of these, or a damaged one.
    """
    if isinstance(run, Result):
        return with_pictures(run.to_dict(), None)
    if isinstance(run, Mapping):
        check_result(run, "result")
        return dict(run)
    path = Path(run)
    if path.is_dir():
        from strati.interventions.audit.audit import audit

        return audit(path).to_dict()
    result = _read_json(path)
    check_result(result, path)
    return with_pictures(dict(result), path.resolve().parent)


def drawable() -> frozenset[str]:
    """The commands whose results the page can draw."""
    return frozenset(name[len("strati.") : -len("/1")] for name in names()) - {"explain", "report"}


def check_result(result: Any, what: object) -> str:
    """Refuse what is not a result of strati, or is one that the page cannot draw.

    Args:
        result: A parsed JSON document.
        what: Where it came from, for the error message.

    Returns:
        The command that made it.

    Raises:
        BadInputError: Another schema, a field of the wrong kind, or values JSON does not have.

    Examples:
        >>> check_result({"schema": "strati.scan/1", "layers": []}, "scan.json")
        'scan'
    """
    if not isinstance(result, Mapping):
        raise BadInputError(what, "is not a result of strati; give a JSON result that strati wrote")
    name = result.get("schema")
    match = re.fullmatch(r"strati\.([a-z-]+)/\d+", name) if isinstance(name, str) else None
    if match is None:
        raise BadInputError(what, "has no schema of strati; give a JSON result that strati wrote")
    if match[1] not in drawable() or name not in names():
        raise BadInputError(what, f"holds {name}, which this version cannot draw; update strati")
    tables, needed = _fields(match[0])
    if not any(field in result for field in needed):
        raise BadInputError(what, f"lacks {needed[0]!r}; the file was changed, write the result again")
    for field in tables:
        _check_rows(result.get(field), field, what)
    for path, value in _leaves(result, (), what):
        _check_leaf(path, value, what)
    return match[1]


@cache
def _fields(name: str) -> tuple[list[str], list[str]]:
    """The fields of a schema that are lists of records, and those of which one must be there to draw the result."""
    described = schema(name)
    records = {
        f"#/$defs/{kind}" for kind, node in described.get("$defs", {}).items() if node.get("type") == "object"
    }

    def is_table(node: Mapping[str, Any]) -> bool:
        entries = node.get("items")
        if isinstance(entries, Mapping) and (
            entries.get("$ref") in records or entries.get("type") == "object"
        ):
            return True
        return any(map(is_table, node.get("anyOf", ())))

    tables = [field for field, node in described["properties"].items() if is_table(node)]
    required = [field for field in described["required"] if field not in ("schema", "strati", "summary")]
    required.sort(key=lambda field: field != "layers")
    return [*tables, "pictures"], required


def _check_rows(rows: Any, field: str, what: object) -> None:
    if rows is None:
        return
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise BadInputError(what, f"{field!r} is not a list of records; the file was changed or is damaged")


def _check_leaf(path: tuple[str, ...], value: Any, what: object) -> None:
    name = path[-1] if path else ""
    if name.endswith("eigenvalues") and value is not None and not isinstance(value, int | float):
        raise BadInputError(what, f"{name!r} holds what is not a number; the file is damaged")
    if isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
        raise BadInputError(what, f"{name!r} is out of range; the file is damaged")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInputError(what, f"{name!r} is not finite; strati writes null there")


def _leaves(value: Any, path: tuple[str, ...], what: object) -> Iterator[tuple[tuple[str, ...], Any]]:
    if len(path) > _DEEPEST:
        raise BadInputError(what, "is nested deeper than any result of strati")
    if isinstance(value, Mapping):
        for key, child in value.items():
            if not isinstance(key, str):
                raise BadInputError(what, "has a key that is not text; pass what to_dict() returns")
            yield from _leaves(child, (*path, key), what)
    elif isinstance(value, list | tuple):
        # The entries of a list keep the list's name; the repeat counts towards the depth.
        inner = (*path, path[-1] if path else "")
        for entry in value:
            if isinstance(entry, list | tuple | Mapping):
                yield from _leaves(entry, inner, what)
            else:
                yield inner, entry
    elif value is None or isinstance(value, str | int | float):
        yield path, value
    else:
        raise BadInputError(what, f"holds a {type(value).__name__}; pass what to_dict() returns")


def with_pictures(result: dict[str, Any], home: Path | None) -> dict[str, Any]:
    """The figures that a reproduction names and their data, put into the result, so that the page holds them.

    Only PNG and SVG files and the CSV of the same name are taken, and, for a JSON file from anywhere, only those in its
    own folder or below: a result must not bring other files of the reader's machine onto a page.

    Args:
        result: A result in its JSON form.
        home: The folder of the JSON file it came from; ``None`` for one that was made here.
    """
    names = result.get("figures")
    if result["schema"] != "strati.reproduce/1" or not isinstance(names, list) or "pictures" in result:
        return result
    pictures = []
    drawn = {Path(str(name)).with_suffix("") for name in names if str(name).endswith(".png")}
    for name in names:
        if str(name).endswith(".svg") and Path(str(name)).with_suffix("") in drawn:
            continue  # the same picture twice
        file = _picture(str(name), home)
        if file is not None:
            kind = "svg+xml" if file.suffix == ".svg" else "png"
            data = base64.b64encode(file.read_bytes()).decode()
            pictures.append({"name": file.name, "kind": kind, "data": data, **_table(file, home)})
    return result | {"pictures": pictures} if pictures else result


def _table(picture: Path, home: Path | None) -> dict[str, Any]:
    """The data of a picture, from the CSV of the same name beside it: columns, first rows, and how many there are."""
    file = _small_file(picture.with_suffix(".csv"), home)
    try:
        lines = [] if file is None else list(csv.reader(io.StringIO(file.read_text("utf-8"))))
    except (OSError, ValueError, csv.Error):
        return {}
    even = [line for line in lines[1:] if len(line) == len(lines[0])]
    return {"columns": lines[0], "rows": even[:_MOST_LINES], "lines": len(even)} if even else {}


def _picture(name: str, home: Path | None) -> Path | None:
    for place in [Path(name)] if home is None else [home / name, home / Path(name).name, Path(name)]:
        file = _small_file(place, home)
        if file is None:
            continue
        with file.open("rb") as opened:
            head = opened.read(1024)
        if head.startswith(_PNG) if file.suffix == ".png" else file.suffix == ".svg" and b"<svg" in head:
            return file
    return None


def _small_file(place: Path, home: Path | None) -> Path | None:
    """The file behind a path, if it lies in the folder and is not larger than a picture."""
    try:
        file = place.resolve(strict=True)
        inside = home is None or file.is_relative_to(home)
        return file if inside and file.is_file() and file.stat().st_size <= _LARGEST_PICTURE else None
    except (OSError, ValueError):
        return None


def _read_json(path: Path) -> Any:
    source = MappedFile(path)
    if source.size > _LARGEST:
        raise BadInputError(
            path, f"is larger than {_LARGEST >> 20} MB; write the result without its eigenvalues"
        )
    # A parsed document takes ten times its size: a large file must at least begin like one of ours.
    if source.size > _UNCHECKED and source.head(len(_HEAD)) != _HEAD:
        raise BadInputError(
            path, "does not begin like a result of strati; give a JSON result that strati wrote"
        )
    try:
        return json.loads(source.head(source.size).decode("utf-8-sig"), parse_constant=_refuse)
    except UnicodeDecodeError:
        raise BadInputError(
            path, "is not text; give a JSON result, or the model to `strati scan` first"
        ) from None
    except RecursionError:
        raise BadInputError(path, "is nested deeper than any result of strati") from None
    except ValueError as error:
        raise BadInputError(path, f"is not valid JSON ({error}); write it again") from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
