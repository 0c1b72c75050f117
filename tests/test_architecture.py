"""Imports point one way, as docs/architecture.md says; modules stay small; torch stays out of the foundation."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "strati"

# Each package may import those of a lower rank, and itself. Packages of one rank do not know each other.
RANKS = {
    "_version": 0,
    "text": 0,
    "errors": 0,
    "types": 0,
    "rng": 0,
    "options": 0,
    "embedded": 0,
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
    "report": 7,
    "papers": 7,
    "cli": 8,
    "__init__": 9,
    "__main__": 9,
}
MODULES = sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imports(tree: ast.AST) -> list[tuple[str, bool]]:
    """The strati modules that a module imports at its top level, and whether only for type checking."""
    found = []
    for node in ast.iter_child_nodes(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative import"
            names = [node.module]
            if node.module == "strati":
                names = [f"strati.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.If):
            checking = "TYPE_CHECKING" in ast.dump(node.test)
            found += [(name, checking) for name, _ in imports(node)]
        elif isinstance(node, ast.Try):
            found += imports(node)
        found += [(name, False) for name in names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    """Imports inside functions are free: plots and pages of a result are imported in the call."""
    here = part_of(path)
    assert here in RANKS, f"{here} has no place in the house: give it one in docs/architecture.md"
    for name, checking in imports(ast.parse(path.read_text())):
        words = name.split(".")
        if words[0] != "strati" or len(words) == 1 or checking:
            continue
        there = words[1]
        allowed = there == here or RANKS.get(there, 9) < RANKS[here] or RANKS.get(there) == RANKS[here] == 0
        assert allowed, f"{here} imports {name}"


@pytest.mark.parametrize("package", ["run", "network", "spectra", "reassembly", "cli", "report"])
def test_torch_stays_inside_functions(package):
    for path in sorted((SOURCE / package).rglob("*.py")):
        for name, checking in imports(ast.parse(path.read_text())):
            assert checking or name.split(".")[0] not in ("torch", "transformers", "matplotlib", "ray"), path


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_modules_are_small_and_say_what_lives_there(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 500, "past 500 lines it is two things"
    assert not text or ast.get_docstring(ast.parse(text)), "no docstring"
