"""Messages advise what exists: options that they name are there, and only the command line speaks of its flags."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

import strati
import strati.interventions
from strati.cli.main import COMMANDS
from strati.cli.main import strati as group

SOURCE = Path(strati.__file__).parent
FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z-]+)")
KEYWORD = re.compile(r"(?<![\w.=<>!{/])([a-z][a-z_]+)=(?![=\s>])")
OTHERS = re.compile(r"(hf download|pip install|git lfs|apt-get)[^;]*")
"""Commands of other programs, whose options are not ours."""


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Text that a user may see: arguments of errors and flags, and what is raised by ``source.bad``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name.endswith("Error") or name in ("Flag", "bad", "Skipped", "require"):
            for argument in node.args:
                yield node.lineno, OTHERS.sub("", "".join(texts(argument)))


def texts(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def flags() -> set[str]:
    context = click.Context(group)
    commands = [group, *(group.get_command(context, verb) for verb in COMMANDS)]
    found = {"--help", "--version"}
    for command in commands:
        for parameter in command.params:
            found |= set(parameter.opts) | set(parameter.secondary_opts)
    return found


def keywords() -> set[str]:
    """Parameters of public functions and classes, and fields of their configs."""
    found: set[str] = set()
    public = [*vars(strati.interventions).values(), *(getattr(strati, name) for name in strati.__dir__())]
    for thing in public:
        if callable(thing):
            found |= set(inspect.signature(thing).parameters)
    for name in strati.interventions.__all__:
        found |= set(inspect.signature(getattr(strati.interventions, name)).parameters)
    for path in SOURCE.rglob("*.py"):
        module = ".".join(["strati", *path.relative_to(SOURCE).with_suffix("").parts])
        if module.endswith("__main__") or ".integrations." in module:  # these need what they integrate with
            continue
        for thing in vars(importlib.import_module(module.removesuffix(".__init__"))).values():
            if isinstance(thing, type) and dataclasses.is_dataclass(thing):
                found |= {field.name for field in dataclasses.fields(thing)}
    return found


MODULES = sorted(SOURCE.rglob("*.py"))
CORE = [path for path in MODULES if path.relative_to(SOURCE).parts[0] not in ("cli", "zoo")]


def test_messages_of_the_core_name_no_command_line_options() -> None:
    named = [
        f"{path.relative_to(SOURCE)}:{line}: {flag}"
        for path in CORE
        for line, text in messages(path)
        for flag in FLAG.findall(text)
    ]
    assert named == []


def test_flags_that_the_command_line_names_are_there():
    known = flags() | {"--device"}  # shared by the torch verbs; here whether or not one has taken it up
    for path in (SOURCE / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                unknown = set(FLAG.findall(OTHERS.sub("", node.value))) - known
                assert not unknown, f"{path.name}: {node.value[:80]}"


def test_keywords_that_messages_name_are_there():
    known = keywords()
    for path in MODULES:
        for line, text in messages(path):
            unknown = set(KEYWORD.findall(text)) - known
            assert not unknown, f"{path.relative_to(SOURCE)}:{line}: {text[:100]}"
