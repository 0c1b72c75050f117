"""Write the fields of every JSON result into docs/schemas.md, from the JSON Schemas that ship with the package.

.venv/bin/python tools/schema_page.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strati.schemas import names, schema

PAGE = Path(__file__).resolve().parents[1] / "docs" / "schemas.md"
HEAD = """# JSON results and their schemas

This page lists the fields that `--json FILE` writes and `.to_json()` returns. Each result has a JSON Schema in the
package: `strati.schemas.schema("strati.scan/1")` returns one, and `strati.schemas.names()` lists all. Any validator
accepts them:

```python
import jsonschema
import strati

result = strati.scan("model.safetensors")
jsonschema.validate(result.to_dict(), strati.schemas.schema("strati.scan/1"))
```

Fields in bold are always present; the others are present where they apply. An undefined number is `null`, never NaN.
New fields may be added within a version, but a field that is always present keeps its name and type. `[]` is an entry
of a list.
"""


def text() -> str:
    """The page."""
    parts = [HEAD]
    for name in names():
        found = schema(name)
        rows = [f"| {path} | {kind} |" for path, kind in fields(resolved(found, found))]
        parts.append(
            f"## {name}\n\n{found['title']}.\n\n| field | type |\n| --- | --- |\n" + "\n".join(rows) + "\n"
        )
    return "\n".join(parts)


def resolved(node: Any, whole: dict[str, Any]) -> Any:
    """A schema with what it refers to (``#/$defs/...``) in place."""
    if isinstance(node, list):
        return [resolved(item, whole) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target: Any = whole
        for key in node["$ref"].removeprefix("#/").split("/"):
            target = target[key]
        return resolved(target, whole)
    return {key: resolved(value, whole) for key, value in node.items()}


def fields(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Path and type of every field, those inside of lists and objects after the one that holds them."""
    required = node.get("required", ())
    for key, value in node.get("properties", {}).items():
        path = f"{prefix}{key}"
        yield f"**`{path}`**" if key in required else f"`{path}`", kind(value)
        inner = value
        while isinstance(inner.get("items"), dict):
            inner, path = inner["items"], f"{path}[]"
        yield from fields(inner, f"{path}.")


def kind(value: dict[str, Any]) -> str:
    """The type of a field in words."""
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join("null" if v is None else f"`{v}`" for v in value["enum"])
    choices = value.get("anyOf") or value.get("oneOf")
    if choices:
        return " or ".join(dict.fromkeys(kind(choice) for choice in choices))
    types = value.get("type", "anything")
    return " or ".join([types] if isinstance(types, str) else types)


if __name__ == "__main__":
    PAGE.write_text(text())
