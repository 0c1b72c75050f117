"""Run the tutorials and the gallery and write them, with what they print and draw, as pages of the docs.

    .venv/bin/python tools/notebooks.py [--check] [FILE...]

A tutorial is a script of cells (``# %%``; ``# %% [markdown]`` for text) in ``docs/notebooks``, the gallery one in
``docs/gallery``; it opens as notebook in
any editor that knows the form. ``--check`` runs every cell and fails where one raises, or where a page is not what its
script prints; the last digits of numbers, which differ from machine to machine, are no failure.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "docs" / "notebooks"
GALLERY = ROOT / "docs" / "gallery"


@dataclass(frozen=True)
class Cell:
    """Text, or code with what it printed and the picture that it drew."""

    text: str
    code: bool
    output: str = ""
    picture: str = ""


def cells(script: str) -> list[Cell]:
    """The cells of a script."""
    found = []
    for part in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
            found.append(Cell("\n".join(lines), False))
        else:
            found.append(Cell(body.strip(), True))
    return found


def run(path: Path, pictures: Path) -> list[Cell]:
    """The cells of a tutorial, executed one after the other in one namespace; figures are written to ``pictures``."""
    import pandas as pd

    names: dict[str, Any] = {"__name__": "__tutorial__"}
    done = []
    wide = {"COLUMNS": "100", "LINES": "50"}  # tables are as wide as the terminal, wherever this runs
    with (
        pd.option_context("display.width", 110, "display.max_columns", 20, "display.precision", 3),
        mock.patch.dict("os.environ", wide),
    ):
        for number, cell in enumerate(cells(path.read_text())):
            if not cell.code:
                done.append(cell)
                continue
            names.pop("figure", None)
            printed = io.StringIO()
            tree = ast.parse(cell.text)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            with contextlib.redirect_stdout(printed):
                exec(compile(tree, str(path), "exec"), names)
                if isinstance(last, ast.Expr):
                    value = eval(compile(ast.Expression(last.value), str(path), "eval"), names)
                    if value is not None:
                        print(value)
            picture = ""
            if "figure" in names:
                picture = f"{path.stem}-{number}.png"
                names["figure"].savefig(pictures / picture, dpi=90)
            text = "\n".join(line.rstrip() for line in printed.getvalue().rstrip().splitlines())
            done.append(Cell(cell.text, True, text, picture))
    return done


def page(done: list[Cell], script: str) -> str:
    """The tutorial as Markdown."""
    parts = []
    for cell in done:
        if not cell.code:
            parts.append(cell.text)
            continue
        parts.append(f"```python\n{cell.text}\n```")
        if cell.output:
            parts.append(f"```text\n{cell.output}\n```")
        if cell.picture:
            parts.append(f"![what the cell draws]({cell.picture})")
    parts.append(f"*This page is [{script}]({script}), run as it stands.*")
    return "\n\n".join(parts) + "\n"


_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")


def alike(made: str, kept: str) -> bool:
    """Whether two pages are the same but for the last digits of numbers, which differ from machine to machine.

    Blanks do not count, as columns are as wide as their numbers.

    Examples:
        >>> alike("alpha  1.765 of 64", "alpha 1.764 of 64"), alike("alpha 15.02", "alpha 11.93"), alike("a 1", "b 1")
        (True, False, False)
    """
    if _NUMBER.sub("#", made).split() != _NUMBER.sub("#", kept).split():
        return False
    pairs = zip(_NUMBER.findall(made), _NUMBER.findall(kept), strict=True)
    values = ((float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs)
    return all(abs(a - b) <= 0.005 + 0.02 * max(abs(a), abs(b)) for a, b in values)


def main(words: list[str]) -> int:
    """Run and write, or run and check."""
    check = "--check" in words
    failed = 0
    scripts = [*sorted(HOME.glob("[0-9]*.py")), *sorted(GALLERY.glob("*.py"))]
    for path in [Path(w) for w in words if not w.startswith("--")] or scripts:
        try:
            with tempfile.TemporaryDirectory() as aside:
                made = page(run(path, Path(aside) if check else path.parent), path.name)
        except Exception:  # whatever a cell raises is shown and counted
            traceback.print_exc()
            print(f"{path.name}: a cell failed", file=sys.stderr)
            failed += 1
            continue
        target = path.with_suffix(".md")
        if not check:
            target.write_text(made)
            for old in path.parent.glob(f"{path.stem}-*.png"):
                if old.name not in made:
                    old.unlink()
        elif not alike(made, target.read_text()):
            print(f"{target.name}: is not what its script gives; run tools/notebooks.py", file=sys.stderr)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
