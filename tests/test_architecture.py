"""Imports point one way, as docs/architecture.md says; modules stay small; torch stays out of the foundation."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "strati"

# Each package may import those of a lower rank, and itself. Packages of one rank do not know each other.
RANKS = {
    "_version": 0,
    "text": 0,
    "errors": 0,
    "files": 0,
    "types": 0,
    "rng": 0,
    "options": 0,
    "embedded": 0,
    "schemas": 0,
    "tables": 0,
    "run": 1,
    "architectures": 1,
    "network": 2,
    "zoo": 3,
    "spectra": 4,
    "landscape": 4,
    "reassembly": 4,
    "intervene": 5,
    "tracking": 6,
    "integrations": 7,
    "report": 6,
    "papers": 7,
    "cli": 8,
    "__init__": 9,
    "__main__": 9,
}
MODULES = sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


DRAWING = ("plot", "summary", "_repr_html_")
"""Methods of results that may import `report`: plots and pages are the one thing imported upwards, in the call."""


@dataclass(frozen=True)
class Import:
    """One import of a module: of what, in which function (``""`` at the top), and whether for type checking only."""

    name: str
    function: str
    checking: bool


def imports(tree: ast.AST, function: str = "", checking: bool = False) -> list[Import]:
    """Everything that a module imports, inside functions as well."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, function, checking) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative import"
            names = [node.module]
            if node.module.split(".")[0] == "strati":  # what is imported may itself be a module
                deeper = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [n if is_module(n) else node.module for n in deeper]
            found += [Import(name, function, checking) for name in names]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += imports(node, function or node.name, checking)
        elif isinstance(node, ast.If):
            only = "TYPE_CHECKING" in ast.dump(node.test)
            body = ast.Module(body=node.body, type_ignores=[])
            rest = ast.Module(body=node.orelse, type_ignores=[])
            found += imports(body, function, checking or only) + imports(rest, function, checking)
        else:
            found += imports(node, function, checking)
    return found


def is_module(name: str) -> bool:
    place = SOURCE.joinpath(*name.split(".")[1:])
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def at_run_time(path: Path) -> list[Import]:
    """The imports of strati's own modules that happen when the program runs, drawing left aside."""
    return [
        item
        for item in imports(ast.parse(path.read_text()))
        if item.name.split(".")[0] == "strati"
        and not item.checking
        and not (item.function in DRAWING and item.name.startswith("strati.report."))
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    """At the top of a module and inside its functions; only plots and pages of a result point up."""
    here = part_of(path)
    assert here in RANKS, f"{here} has no place in the house: give it one in docs/architecture.md"
    for item in at_run_time(path):
        words = item.name.split(".")
        if len(words) == 1:
            continue
        there = words[1]
        allowed = there == here or RANKS.get(there, 9) < RANKS[here] or RANKS.get(there) == RANKS[here] == 0
        assert allowed, f"{here} imports {item.name} in {item.function or 'the module'}"


def test_no_module_needs_itself():
    """No cycle of imports, not even one that is closed by an import inside a function."""
    needs = {}
    for path in MODULES:
        name = ".".join(["strati", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")
        needs[name] = sorted({item.name for item in at_run_time(path)} - {name})
    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name in done:
            return
        for other in needs.get(name, []):
            walk(other, (*above, name))
        done.add(name)

    for name in needs:
        walk(name, ())


@pytest.mark.parametrize("package", ["run", "network", "spectra", "reassembly", "cli", "report"])
def test_torch_stays_inside_functions(package):
    for path in sorted((SOURCE / package).rglob("*.py")):
        for item in imports(ast.parse(path.read_text())):
            heavy = item.name.split(".")[0] in ("torch", "transformers", "matplotlib", "ray", "peft")
            assert item.checking or item.function or not heavy, path


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_modules_are_small_and_say_what_lives_there(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 500, "past 500 lines it is two things"
    assert not text or ast.get_docstring(ast.parse(text)), "no docstring"


def test_no_two_classes_share_a_name() -> None:
    """One name for one thing. The callbacks of two trainers are the same thing; an underscore makes a name private."""
    homes: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if (
                isinstance(node, ast.ClassDef)
                and not node.name.startswith("_")
                and node.name != "StratiCallback"
            ):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
