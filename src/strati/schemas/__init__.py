"""JSON Schemas of every result: one file per result and version, shipped with the package.

``VERB-1.json`` describes what starts ``{"schema": "strati.VERB/1", ...}``. Fields may be added within a version; a
field that is listed as required stays, with its type.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strati.core.errors import BadInputError

HOME = Path(__file__).resolve().parent


def names() -> tuple[str, ...]:
    """The results that have a schema, as ``strati.VERB/1``.

    Examples:
        >>> "strati.scan/1" in names()
        True
    """
    parts = (path.stem.rpartition("-") for path in sorted(HOME.glob("*.json")))
    return tuple(f"strati.{verb}/{version}" for verb, _, version in parts)


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of a result.

    Args:
        name: What the result has under ``schema``, such as ``strati.scan/1``.

    Raises:
        BadInputError: There is none of that name.

    Examples:
        >>> schema("strati.scan/1")["properties"]["schema"]
        {'const': 'strati.scan/1'}
    """
    if name not in names():
        raise BadInputError(name, f"no such schema; there are: {', '.join(names())}")
    verb, _, version = name.removeprefix("strati.").partition("/")
    loaded: dict[str, Any] = json.loads((HOME / f"{verb}-{version}.json").read_text(encoding="utf-8"))
    return loaded
