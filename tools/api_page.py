"""Write the list of public names into docs/api.md and docs/stability.md, from the stubs that define them.

    .venv/bin/python tools/api_page.py

The text before the first heading of names is written by hand and stays.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
STABLE = ROOT / "docs" / "stability.md"
START = "## Networks\n"
GROUPS = {
    "io": "Networks",
    "spectra": "Spectra",
    "comparison": "Comparison, integrity and lineage",
    "interventions": "Interventions and compression",
    "landscape": "Loss landscape",
    "tracking": "Training runs",
    "reassembly": "Reassembly",
    "report": "Report",
    "core": "Errors",
}
"""Heading of the names that live in a package."""


def imported(stub: str) -> Iterator[tuple[str, str]]:
    """Module (below ``strati``) and name of everything that a stub imports from a module."""
    tree = ast.parse((ROOT / "src" / "strati" / stub).read_text())
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, alias.name) for alias in node.names if not alias.name.startswith("_"))


def listing(line_of: str = "::: strati.{home}.{name}", *, public: str = "strati") -> str:
    """A heading per group of names, and a line per name."""
    groups: dict[str, list[str]] = {title: [] for title in GROUPS.values()}
    top_level = list(imported("__init__.pyi"))
    for home, name in top_level:
        line = line_of.format(home=home, name=name, public=public)
        groups[GROUPS[home.split(".")[0]]].append(line)
    groups["Interventions as settings and context managers"] = [
        line_of.format(home=home.removeprefix("strati."), name=name, public=f"{public}.interventions")
        for home, name in interventions()
    ]
    groups["Configs"] = [
        line_of.format(home=home, name=name, public=f"{public}.configs")
        for home, name in imported("configs.pyi")
        if (home, name) not in top_level
    ]
    return "\n".join(f"## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in groups.items())


def interventions() -> Iterator[tuple[str, str]]:
    """Module and name of everything in ``strati.interventions``."""
    return ((f"interventions.{module}", name) for module, name in imported("interventions/__init__.pyi"))


SCHEMAS = "\n## Schemas\n\n::: strati.schemas.schema\n::: strati.schemas.names\n"


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(START)] + listing() + SCHEMAS)
    text = STABLE.read_text()
    STABLE.write_text(text[: text.index(START)] + listing("- `{public}.{name}`"))
