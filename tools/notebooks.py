"""Run the notebooks and the gallery, and write pages and ``.ipynb`` files with what they print and draw.

    .venv/bin/python tools/notebooks.py [--check] [FILE...]

A notebook is a script of cells (``# %%``; ``# %% [markdown]`` for text) in ``docs/notebooks``; the gallery is one in
``docs/gallery``. The ``.ipynb`` file is made from the script and has the same cells. ``--check`` runs every cell. It
fails if a cell raises, or if a page differs from what its script prints by more than the last digits of numbers.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
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
NOTEBOOK = re.compile(r"\d_")
"""How the names of notebooks begin; the gallery is a page only."""


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
    """The cells of a notebook, executed one after the other in one namespace; figures are written to ``pictures``."""
    import pandas as pd

    names: dict[str, Any] = {"__name__": "__notebook__"}
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
    """The notebook as Markdown."""
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
    other = script.replace(".py", ".ipynb")
    parts.append(f"*This page was made by running [{script}]({script}). Download: [{other}]({other}).*"
                 if NOTEBOOK.match(script) else f"*This page was made by running [{script}]({script}).*")  # fmt: skip
    return "\n\n".join(parts) + "\n"


def notebook(done: list[Cell]) -> str:
    """The cells as a Jupyter notebook with what they printed."""
    made: list[dict[str, Any]] = []
    for number, cell in enumerate(done):
        entry: dict[str, Any] = {"cell_type": "code" if cell.code else "markdown", "id": f"cell-{number}"}
        entry |= {"metadata": {}, "source": cell.text}
        if cell.code:
            text = f"{cell.output}\n"
            printed = {"output_type": "stream", "name": "stdout", "text": text}
            entry |= {"execution_count": None, "outputs": [printed] if cell.output else []}
        made.append(entry)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return (
        json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"
    )


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
                done = run(path, Path(aside) if check else path.parent)
                made = page(done, path.name)
        except Exception:  # whatever a cell raises is shown and counted
            traceback.print_exc()
            print(f"{path.name}: a cell failed", file=sys.stderr)
            failed += 1
            continue
        target = path.with_suffix(".md")
        if not check:
            target.write_text(made)
            if NOTEBOOK.match(path.name):
                path.with_suffix(".ipynb").write_text(notebook(done))
            for old in path.parent.glob(f"{path.stem}-*.png"):
                if old.name not in made:
                    old.unlink()
        elif not alike(made, target.read_text()):
            print(f"{target.name}: is not what its script gives; run tools/notebooks.py", file=sys.stderr)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
