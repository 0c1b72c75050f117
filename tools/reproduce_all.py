"""Run reproductions, keep what full runs found in ``docs/reproduced``, and write the docs' page from it.

    .venv/bin/python tools/reproduce_all.py [--full] [NAME...]
    .venv/bin/python tools/reproduce_all.py --docs
    .venv/bin/python tools/reproduce_all.py --check

Quick variants by default, below ``out/reproduce``; a failure of one is reported and the rest goes on. A run goes on
where it was stopped. ``--docs`` takes the full runs that are there (a quick one never), with their cost and a checksum
of the code that made them, into ``docs/reproduced`` and writes ``docs/reproduced.md``; ``--check`` fails where that
page is not what the stored tables and the present code give.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from strati.errors import StratiError
from strati.papers.claims import CLAIMS
from strati.papers.registry import ENTRIES, reproduce, sources
from strati.papers.rows import cell, columns_used
from strati.run.files import write_atomic

OUT = Path("out/reproduce")
STORED = Path("docs/reproduced")
PAGE = Path("docs/reproduced.md")
HEAD = """# The papers reproduced

The paper's number beside ours, from full runs of `strati reproduce NAME`, put here by `tools/reproduce_all.py --docs`.
`paper` holds what the paper prints and nothing else; `theory` what a theorem gives; `before` what was measured earlier
by others. `error` is one standard error of ours. `agrees` is `yes` within two errors or the digits printed, `no` where
the note says why, `open` where nobody knows yet. A dash is where there is no number.

## May I rely on it?

| paper | claim | here | may I rely on it? |
| --- | --- | --- | --- |
"""
STALE = "*The code of this entry has changed since this full run: its numbers may change with the next one.*"


def main(words: list[str]) -> int:
    """Run those named, or all; or write or check the page."""
    if "--docs" in words:
        collect()
        write_atomic(PAGE, page(stored()))
        return 0
    if "--check" in words:
        return check()
    full = "--full" in words
    names = [w for w in words if not w.startswith("--")] or list(ENTRIES)
    failed = 0
    for name in names:
        began = time.process_time(), time.perf_counter()
        try:
            result = reproduce(name, quick=not full, folder=OUT)
        except StratiError as error:
            print(f"{name}: failed: {error}", flush=True)
            failed += 1
            continue
        OUT.mkdir(parents=True, exist_ok=True)
        result.to_json(OUT / f"{name}.json")
        seconds = time.perf_counter() - began[1]
        cost = {"seconds": round(seconds, 1), "cpu_seconds": round(time.process_time() - began[0], 1)}
        write_atomic(OUT / f"{name}.cost.json", json.dumps(cost) + "\n")
        print(f"{name}: {len(result.rows)} rows in {seconds:.0f} s", flush=True)
    return 1 if failed else 0


def collect() -> None:
    """Take the full runs below ``out/reproduce`` into the docs: rows, cost, and small pictures."""
    STORED.mkdir(parents=True, exist_ok=True)
    for name in ENTRIES:
        file = OUT / f"{name}.json"
        if not file.is_file():
            continue
        result = json.loads(file.read_text())
        if result.get("mode") != "full":
            print(f"{name}: a quick run; not taken", flush=True)
            continue
        cost = OUT / f"{name}.cost.json"
        result["cost"] = json.loads(cost.read_text()) if cost.is_file() else None
        result["figures"] = [_picture(Path(p), name) for p in result["figures"] if p.endswith(".png")]
        write_atomic(STORED / f"{name}.json", json.dumps(result, indent=1) + "\n")


def _picture(file: Path, name: str) -> str:
    target = STORED / f"{name}-{file.name}"
    shutil.copyfile(file, target)
    return target.name


def stored() -> dict[str, dict[str, Any]]:
    """The tables in the docs by name, in the order of the entries."""
    return {
        n: json.loads((STORED / f"{n}.json").read_text()) for n in ENTRIES if (STORED / f"{n}.json").is_file()
    }


def page(tables: dict[str, dict[str, Any]]) -> str:
    """The docs' page: claims with their verdicts, then every table with its pictures.

    Raises:
        ValueError: A table is of a quick run.
    """
    quick = [name for name, table in tables.items() if table["mode"] != "full"]
    if quick:
        raise ValueError(f"quick results do not go into the docs: {', '.join(quick)}")
    lines = []
    for claim in CLAIMS:
        found = tables.get(claim.entry or "")
        verdict = claim.verdict(found["rows"] if found else None)
        link = f"[{verdict}](#{claim.entry})" if found else verdict
        lines.append(f"| {claim.paper} | {_safe(claim.says)} | {link} | {claim.advice(verdict)} |")
    parts = [HEAD + "\n".join(lines) + "\n"]
    parts += [section(name, table) for name, table in tables.items()]
    rest = [f"`{name}`" for name in ENTRIES if name not in tables]
    if rest:
        parts.append(f"## Without a full run yet\n\n{', '.join(rest)}\n")
    return "\n".join(parts)


def section(name: str, table: dict[str, Any]) -> str:
    """One reproduction: what it cost, whether its code is still this, its pictures and its rows."""
    cost = table.get("cost")
    spent = (
        f", {cost['seconds'] / 60:.1f} minutes ({cost['cpu_seconds'] / 60:.1f} of the processor)"
        if cost
        else ""
    )
    lines = [f"## {table['title']} {{ #{name} }}", ""]
    lines += [
        f"`strati reproduce {name}` ({ENTRIES[name].paper}): full run, seed {table['seed']}{spent}.",
        "",
    ]
    if table.get("sources") != sources(name):
        lines += [STALE, ""]
    for figure in table["figures"]:
        lines += [f"![{Path(figure).stem.removeprefix(name + '-')}](reproduced/{figure})", ""]
    used = columns_used(table["rows"])
    lines.append("| " + " | ".join(used) + " |")
    lines.append("| " + " | ".join("---" if n in ("what", "agrees", "note") else "---:" for n in used) + " |")
    lines += ["| " + " | ".join(_safe(cell(row.get(n))) for n in used) + " |" for row in table["rows"]]
    return "\n".join(lines) + "\n"


def check() -> int:
    """Whether the page is what the stored tables and the present code give."""
    if PAGE.read_text() == page(stored()):
        return 0
    print(
        "docs/reproduced.md is not what its tables give; run tools/reproduce_all.py --docs", file=sys.stderr
    )
    return 1


def _safe(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
