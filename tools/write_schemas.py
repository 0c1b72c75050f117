"""Write src/strati/schemas/*.json: the JSON Schema of every result, from the types of its fields.

    .venv/bin/python tools/write_schemas.py

The fields are those of the TypedDict that ``payload`` returns, or those of the result's dataclass where it returns a
plain dict. Dataclasses and TypedDicts below become definitions of their own. A field whose metadata say
``optional`` may be absent.
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import enum
import importlib
import inspect
import json
import pkgutil
import re
import types
import typing
from pathlib import Path
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin, is_typeddict

import numpy as np

import strati
import strati_reproductions
from strati.core.results import Result, json_attributes

FOLDER = Path(strati.__file__).parent / "schemas"
PRIMITIVES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    Path: "string",
}
ANY: dict[str, Any] = {}
PACKAGES = (strati, strati_reproductions)


def results() -> dict[str, type[Result]]:
    """Every result class by the verb that its JSON names."""
    for package in PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not re.search(r"__main__|\.integrations\.|\.zoo", module.name):
                importlib.import_module(module.name)
    classes: set[type[Result]] = set()
    level = {Result}
    while level:
        level = {kind for parent in level for kind in parent.__subclasses__()}
        classes |= level
    names = {package.__name__ for package in PACKAGES}
    ours = [kind for kind in classes if kind.__module__.partition(".")[0] in names]
    ours = [
        kind for kind in ours if not any(base in ours and base.verb == kind.verb for base in kind.__bases__)
    ]
    by_verb = {kind.verb: kind for kind in ours}
    if len(by_verb) < len(ours):
        clashes = sorted(
            f"{kind.verb}: {kind.__qualname__}" for kind in ours if by_verb[kind.verb] is not kind
        )
        raise SystemExit(f"two results share a schema: {', '.join(clashes)}")
    return dict(sorted(by_verb.items()))


_NAMESPACES: dict[str, dict[str, Any]] = {}


def namespace(module_name: str) -> dict[str, Any]:
    """Names of a module, those imported for type checking among them."""
    if module_name in _NAMESPACES:
        return _NAMESPACES[module_name]
    module = importlib.import_module(module_name)
    names = _NAMESPACES[module_name] = {**vars(typing), **vars(collections.abc), **vars(module)}
    for node in ast.parse(inspect.getsource(module)).body:
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            continue
        for statement in node.body:
            if isinstance(statement, ast.ImportFrom) and str(statement.module).startswith("strati"):
                theirs = namespace(str(statement.module))
                imported = {alias.asname or alias.name: theirs.get(alias.name) for alias in statement.names}
                names.update((name, kind) for name, kind in imported.items() if kind is not None)
            else:
                exec(compile(ast.Module([statement], []), module_name, "exec"), names)  # our own source
    return names


def hints(kind: Any) -> dict[str, Any]:
    """Resolved annotations of a class, bases included."""
    annotations: dict[str, Any] = {}
    for base in reversed(getattr(kind, "__orig_bases__", ()) or kind.__mro__[1:]):
        if isinstance(base, type) and base is not object and base.__module__.startswith("strati"):
            annotations |= hints(base)
    return annotations | {
        name: evaluate(text, kind.__module__) for name, text in kind.__annotations__.items()
    }


def evaluate(annotation: Any, module_name: str) -> Any:
    """The type behind an annotation, which may be text."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    return (
        eval(annotation, namespace(module_name)) if isinstance(annotation, str) else annotation
    )  # our own source


class Writer:
    """Builds one schema and collects its definitions."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}

    def of(self, kind: Any, module: str) -> dict[str, Any]:
        """The schema of a type that is used in a module."""
        kind = evaluate(kind, module)
        origin, parts = get_origin(kind), get_args(kind)
        if kind in PRIMITIVES:
            return {"type": PRIMITIVES[kind]}
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return {"enum": [member.value for member in kind]}
        if origin is Literal:
            return {"enum": list(parts)}
        if origin in (Union, types.UnionType):
            return union([self.of(part, module) for part in parts])
        if origin in (Required, NotRequired):
            return self.of(parts[0], module)
        if dataclasses.is_dataclass(kind) or is_typeddict(kind):
            return self.reference(kind)
        if origin in (dict, collections.abc.Mapping) and parts[1] is not Any:
            return {"type": "object", "additionalProperties": self.of(parts[1], module)}
        if kind is dict or origin in (dict, collections.abc.Mapping):
            return {"type": "object"}
        if origin in (list, collections.abc.Sequence) or (origin is tuple and parts[-1] is ...):
            items = self.of(parts[0], module)
            return {"type": "array", "items": items} if items else {"type": "array"}
        if origin is tuple:
            return {"type": "array", "prefixItems": [self.of(part, module) for part in parts], "items": False}
        if origin is np.ndarray or kind in (list, tuple, np.ndarray):
            return {"type": "array"}
        if kind is Any or kind is object:
            return ANY
        raise TypeError(f"{module}: no JSON for {kind!r}")

    def reference(self, kind: Any) -> dict[str, Any]:
        """A reference to the definition of a record, which is added."""
        if kind.__name__ not in self.definitions:
            self.definitions[kind.__name__] = {}
            self.definitions[kind.__name__] = self.record(kind)
        return {"$ref": f"#/$defs/{kind.__name__}"}

    def record(self, kind: Any) -> dict[str, Any]:
        """The schema of a dataclass or a TypedDict."""
        properties, required = {}, []
        if is_typeddict(kind):
            for name, annotation in hints(kind).items():
                properties[name] = self.of(annotation, kind.__module__)
                if get_origin(evaluate(annotation, kind.__module__)) is not NotRequired:
                    required.append(name)
        else:
            fields = {field.name: field for field in dataclasses.fields(kind)}
            optional = getattr(kind, "optional", ())
            for name, attribute in json_attributes(kind).items():
                if attribute in fields:
                    owner = next(base for base in kind.__mro__ if attribute in inspect.get_annotations(base))
                    properties[name] = self.of(fields[attribute].type, owner.__module__)
                    optional = (*optional, name) if fields[attribute].metadata.get("optional") else optional
                else:
                    getter = inspect.getattr_static(kind, attribute).fget
                    properties[name] = self.of(getter.__annotations__["return"], kind.__module__)
            required = [name for name in properties if name not in optional]
        return {"type": "object", "required": required, "properties": properties}


def union(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """One schema for several: a list of types where that is enough."""
    if ANY in choices:
        return ANY
    if all(list(choice) == ["type"] for choice in choices):
        kinds = list(dict.fromkeys(choice["type"] for choice in choices))
        kinds = [kind for kind in kinds if not (kind == "integer" and "number" in kinds)]
        return {"type": kinds if len(kinds) > 1 else kinds[0]}
    return {"anyOf": choices}


def schema_of(verb: str, kind: type[Result]) -> dict[str, Any]:
    """The schema of a result."""
    writer = Writer()
    annotation = evaluate(kind.payload.__annotations__["return"], kind.payload.__module__)
    shape = annotation if is_typeddict(annotation) else kind
    record = writer.record(shape)
    head = {
        "schema": {"const": f"strati.{verb}/1"},
        "strati": {"type": "string"},
        "summary": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    }
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"strati.{verb}/1",
        "title": (inspect.getdoc(kind) or verb).partition("\n")[0].rstrip("."),
        "type": "object",
        "required": ["schema", "strati", *record["required"]],
        "properties": head | record["properties"],
    }
    return schema | ({"$defs": writer.definitions} if writer.definitions else {})


def texts() -> dict[Path, str]:
    """Path and text of every schema file."""
    return {
        FOLDER / f"{verb}-1.json": json.dumps(schema_of(verb, kind), indent=1) + "\n"
        for verb, kind in results().items()
    }


if __name__ == "__main__":
    written = texts()
    for path in FOLDER.glob("*.json"):
        if path not in written:
            path.unlink()
    for path, text in written.items():
        path.write_text(text)
