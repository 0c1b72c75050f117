"""Which results the page can draw, and the least each must hold to be drawn.

The full contract of each verb is its own; here lives only what keeps a foreign or broken JSON file from
reaching the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from strati.core.errors import BadInputError

ROWS: dict[str, tuple[str, ...]] = {
    "scan": ("layers", "skipped"),
    "inspect": ("layers", "skipped"),
    "compare": ("layers",),
    "study": (),
    "audit": ("metrics", "layers", "verdicts", "points"),
    "degeneracy": ("layers", "scales"),
    "basis": ("layers", "edges", "modules"),
    "interaction-basis": ("layers", "edges", "modules"),
    "interaction-graph": ("layers", "edges", "modules"),
    "reassemble": ("rounds", "progression"),
    "reproduce": ("rows", "pictures"),
    "llc": ("ladder",),
    "curvature": ("density", "effective"),
    "scales": ("scales",),
    "sparsify": ("layers",),
    "reassemble-make": (),
    "shuffle": (),
    "shuffle-transformer": ("blocks",),
    "reassemble-transformer": ("blocks", "pairs"),
    "correspond": ("correspond",),
    "identify": ("candidates", "correspond"),
    "track": ("series", "changes"),
    "plan": ("layers",),
    "apply": (),
    "check": ("found",),
    "lineage": ("pairs", "tree"),
    "llc-parts": ("parts",),
    "estimate": (),
    "demo": ("steps",),
}
"""Verb -> fields that are lists of records."""

_NEEDED = {
    "study": "units",
    "audit": "metrics",
    "reassemble": "permutation",
    "reassemble-make": "permutation",
    "shuffle": "schema",
    "shuffle-transformer": "blocks",
    "reassemble-transformer": "blocks",
    "correspond": "correspond",
    "identify": "schema",
    "reproduce": "rows",
    "llc": "estimate",
    "curvature": "top",
    "scales": "scales",
    "track": "series",
    "apply": "written",
    "check": "found",
    "lineage": "pairs",
    "llc-parts": "parts",
    "estimate": "seconds",
    "demo": "steps",
}
"""The field without which a result cannot be drawn, where it is not ``layers``."""

_DEEPEST = 32
_LARGEST = 10**300


def check_result(result: Any, what: object) -> str:
    """Refuse what is not a result of strati, or is one that the page does not know.

    Args:
        result: A parsed JSON document.
        what: Where it came from, for the error message.

    Returns:
        The verb that made it.

    Raises:
        BadInputError: Another schema, a field of the wrong kind, or values JSON does not have.

    Examples:
        >>> check_result({"schema": "strati.scan/1", "layers": []}, "scan.json")
        'scan'
    """
    if not isinstance(result, Mapping):
        raise BadInputError(what, "is not a result of strati; give a JSON result that strati wrote")
    schema = result.get("schema")
    match = re.fullmatch(r"strati\.([a-z-]+)/(\d+)", schema) if isinstance(schema, str) else None
    if match is None:
        raise BadInputError(what, "has no schema of strati; give a JSON result that strati wrote")
    verb, version = match.groups()
    if verb not in ROWS or version != "1":
        readable = ", ".join(f"strati.{name}/1" for name in ROWS)
        raise BadInputError(what, f"holds {schema}, which this version cannot draw; it knows {readable}")
    needed = _NEEDED.get(verb, "layers")
    if needed not in result:
        raise BadInputError(what, f"lacks {needed!r}; the file was changed, write the result again")
    for field in ROWS[verb]:
        _check_rows(result.get(field), field, what)
    for path, value in _leaves(result, (), what):
        _check_leaf(path, value, what)
    return verb


def _check_rows(rows: Any, field: str, what: object) -> None:
    if rows is None:
        return
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise BadInputError(what, f"{field!r} is not a list of records; the file was changed or is damaged")


def _check_leaf(path: tuple[str, ...], value: Any, what: object) -> None:
    name = path[-1] if path else ""
    if name.endswith("eigenvalues") and value is not None and not isinstance(value, int | float):
        raise BadInputError(what, f"{name!r} holds what is not a number; the file is damaged")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise BadInputError(what, f"{name!r} is out of range; the file is damaged")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInputError(what, f"{name!r} is not finite; strati writes null there")


def _leaves(value: Any, path: tuple[str, ...], what: object) -> Iterator[tuple[tuple[str, ...], Any]]:
    if len(path) > _DEEPEST:
        raise BadInputError(what, "is nested deeper than any result of strati")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise BadInputError(what, "has a key that is not text; pass what to_dict() returns")
            yield from _leaves(item, (*path, key), what)
    elif isinstance(value, list | tuple):
        # A list's items keep the list's name; the repeat counts towards the depth.
        inner = (*path, path[-1] if path else "")
        for item in value:
            if isinstance(item, list | tuple | Mapping):
                yield from _leaves(item, inner, what)
            else:
                yield inner, item
    elif value is None or isinstance(value, str | int | float):
        yield path, value
    else:
        raise BadInputError(what, f"holds a {type(value).__name__}; pass what to_dict() returns")
