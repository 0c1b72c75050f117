"""Run every reproduction and write its rows as JSON and as a Markdown table below ``out/reproduce``.

    .venv/bin/python tools/reproduce_all.py [--full] [NAME...]
    .venv/bin/python tools/reproduce_all.py --docs

Quick variants by default; a failure of one is reported and the rest goes on. ``--docs`` runs nothing: it puts the
tables that are there into ``docs/reproduced.md``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from strati.errors import StratiError
from strati.papers.registry import ENTRIES, Reproduction, reproduce
from strati.run.files import write_atomic

OUT = Path("out/reproduce")
HEAD = """# The papers reproduced

The paper's number beside ours, printed by `strati reproduce NAME` and put here by `tools/reproduce_all.py --docs`. A
dash is where a paper gives no number. Differences are explained in the notes.
"""


def markdown(result: Reproduction) -> str:
    """The rows as a table."""
    lines = [f"## {result.title}", "", "| what | paper | ours | note |", "| --- | ---: | ---: | --- |"]
    for row in result.rows:
        cells = (row.what, _cell(row.paper), _cell(row.ours), row.note)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> int:
    """Run those named, or all."""
    if "--docs" in words:
        return docs()
    full = "--full" in words
    names = [w for w in words if not w.startswith("--")] or list(ENTRIES)
    OUT.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names:
        start = time.perf_counter()
        try:
            result = reproduce(name, quick=not full, folder=OUT)
        except StratiError as error:
            print(f"{name}: failed: {error}", flush=True)
            failed += 1
            continue
        result.to_json(OUT / f"{name}.json")
        write_atomic(OUT / f"{name}.md", markdown(result))
        print(f"{name}: {len(result.rows)} rows in {time.perf_counter() - start:.0f} s", flush=True)
    return 1 if failed else 0


def docs() -> int:
    """All tables below ``out/reproduce`` as one page."""
    parts = [HEAD]
    for name, entry in ENTRIES.items():
        table = OUT / f"{name}.md"
        if table.is_file():
            title, _, rest = table.read_text().partition("\n")
            parts.append(f"{title}\n\n`strati reproduce {name}` ({entry.paper})\n{rest}")
    write_atomic("docs/reproduced.md", "\n".join(parts))
    return 0


def _cell(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.6g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
