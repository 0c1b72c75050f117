"""Run reproductions, store the results of full runs in ``docs/reproduced``, and write the docs' pages from them.

    .venv/bin/python tools/reproduce_all.py [--full] [--again] [--seed N] [NAME...]
    .venv/bin/python tools/reproduce_all.py --docs
    .venv/bin/python tools/reproduce_all.py --check
    .venv/bin/python tools/reproduce_all.py --show NAME [WORDS...]

Quick variants run by default, below ``out/reproduce/quick``; full ones below ``out/reproduce``. A failure of one is
reported and the others run. A run continues where it was stopped, and an entry whose present revision has already run
is skipped (``--again`` runs it once more). ``--docs`` copies the full runs of the present revisions, with their cost,
their pictures and the pictures' data (where these are small), into ``docs/reproduced``, drops tables of other
revisions, and writes every table as CSV, ``docs/reproduced.md`` and one page per paper. ``--check`` fails where a page
is not what the stored tables give, where one of them is of a quick run, and where one is of another revision. A
revision is a number in ``registry.py``, raised by hand. ``--show`` prints the rows of a stored table whose names begin
with one of the words: other pages of the docs quote them this way.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from strati.core.errors import StratiError
from strati.core.files import write_atomic
from strati_reproductions.claims import CLAIMS, Claim, Verdict
from strati_reproductions.registry import ENTRIES, PAPERS, reproduce
from strati_reproductions.rows import HEADINGS, caption, cell, columns_used

OUT = Path("out/reproduce")
STORED = Path("docs/reproduced")
DOCS = Path("docs")
LARGEST_CSV = 32_768
"""Bytes of a picture's data up to which they are stored; a run writes them at any size."""
ROWS_SHOWN = 24
"""Rows of a table that a page shows; the CSV has all of them."""
HEADINGS_OF_VERDICTS = {
    Verdict.HELD: "Held",
    Verdict.IN_PART: "Held in part",
    Verdict.FAILED: "Did not hold",
    Verdict.NOT_TESTED: "Not tested",
}
HEAD = """# The papers reproduced

Each page compares a paper's numbers with those measured here, from full runs of `strati reproduce NAME` (the command
comes with the package `strati-reproductions`):

{papers}

## Which claims hold?

| paper | claim | here | what it means |
| --- | --- | --- | --- |
{claims}

Claims in italics are questions that the paper does not ask and that are answered here.

## How to read the tables

- `paper` is what the paper prints; `theory` is what a theorem gives; `before` is what others measured earlier.
- `ours` is measured here on networks that are available. Where a matrix of the paper's own network is available, its
  number has a column of its own.
- `error` is one standard error of our number. `seeds` counts the independent networks, draws or trainings.
- `agrees` is `yes` within two errors or the digits printed, `no` where the note gives the reason, `open` where the
  reason is not known.
- A dash means that there is no number. The CSV file of a table has all of its rows. Small tables of a picture's data
  are linked as CSV; the command writes all of them.
"""


def main(words: list[str]) -> int:
    """Run the named reproductions, or all; or write or check the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    for flag in ("--full", "--again", "--docs", "--check", "--show"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    if options.docs:
        collect()
        for name, text in pages(stored()).items():
            write_atomic(DOCS / name, text)
        for page in STORED.glob("*.md"):
            if page.stem not in PAPERS:
                page.unlink()
        return 0
    if options.check:
        return check()
    if options.show:
        names = sorted(file.stem for file in STORED.glob("*.json"))
        if not options.names or options.names[0] not in names:
            parser.error(f"--show needs a stored table; there are {', '.join(names)}")
        print(rows_as_text(*options.names))
        return 0
    unknown = [name for name in options.names if name not in ENTRIES]
    if unknown:
        parser.error(f"no entry {unknown[0]!r}; there are {', '.join(ENTRIES)}")
    failed = 0
    for name in options.names or ENTRIES:
        if not options.again and _done(name, OUT if options.full else OUT / "quick"):
            print(f"{name}: done before", flush=True)
            continue
        failed += not run(name, options.full, options.seed)
    return 1 if failed else 0


def run(name: str, full: bool, seed: int = 0) -> bool:
    """Run one reproduction and write its result and its cost; whether it succeeded."""
    folder = OUT if full else OUT / "quick"
    began, cost = _clocks(), Cost(folder / f"{name}.cost.json")
    try:
        reproduction = reproduce(name, quick=not full, seed=seed, folder=folder)
    except StratiError as error:
        print(f"{name}: failed: {error}", flush=True)
        return False
    finally:
        spent = [now - then for now, then in zip(_clocks(), began, strict=True)]
        cost.add(*spent)
    reproduction.to_json(folder / f"{name}.json")
    cost.finish()
    print(f"{name}: {len(reproduction.rows)} rows in {spent[0]:.0f} s", flush=True)
    return True


def _done(name: str, folder: Path) -> bool:
    file = folder / f"{name}.json"
    return file.is_file() and json.loads(file.read_text()).get("revision") == ENTRIES[name].revision


def _clocks() -> tuple[float, float]:
    """Wall-clock seconds, and processor seconds of this process and of finished workers."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Cost:
    """The cost of a reproduction: stopped runs are added up, and a run that only draws anew adds nothing."""

    def __init__(self, file: Path) -> None:
        self._file = file
        nothing = {"seconds": 0.0, "cpu_seconds": 0.0, "finished": False}
        self._before: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else nothing
        self._total = self._before

    def add(self, seconds: float, processor: float) -> None:
        """Add a run that may not have finished."""
        new = {"seconds": round(seconds, 1), "cpu_seconds": round(processor, 1)}
        if self._before["finished"]:  # most of it was stored and not computed again
            self._total = {key: max(new[key], self._before[key]) for key in new}
        else:
            self._total = {key: round(new[key] + self._before[key], 1) for key in new}
        self._write(finished=bool(self._before["finished"]))

    def finish(self) -> None:
        """Record that the run has finished."""
        self._write(finished=True)

    def _write(self, *, finished: bool) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._file, json.dumps(self._total | {"finished": finished}) + "\n")


def collect() -> None:
    """Copy full runs of the present revisions below ``out/reproduce`` into the docs; drop tables of other revisions."""
    STORED.mkdir(parents=True, exist_ok=True)
    for name in ENTRIES:
        file = OUT / f"{name}.json"
        if not file.is_file():
            continue
        table = json.loads(file.read_text())
        if table.get("mode") != "full":
            print(f"{name}: a quick run; not taken", flush=True)
        elif table.get("revision") != ENTRIES[name].revision:
            print(f"{name}: {_revisions(name, table)}; not taken", flush=True)
        else:
            _drop(name)
            cost = json.loads((OUT / f"{name}.cost.json").read_text())
            table["cost"] = {key: cost[key] for key in ("seconds", "cpu_seconds")}
            table["figures"] = [_picture(Path(p), name) for p in table["figures"] if p.endswith(".png")]
            write_atomic(STORED / f"{name}.json", json.dumps(table, indent=1) + "\n")
            write_atomic(STORED / f"{name}.csv", rows_as_csv(table))
    for name, table in outdated(stored()).items():
        print(f"{name}: {_revisions(name, table)}; dropped", flush=True)
        _drop(name)


def _revisions(name: str, table: dict[str, Any]) -> str:
    return f"the table has revision {table.get('revision')}, the experiment {ENTRIES[name].revision}"


def _drop(name: str) -> None:
    """Delete a stored table and the pictures that it names."""
    table = STORED / f"{name}.json"
    if table.is_file():
        for figure in json.loads(table.read_text())["figures"]:
            for suffix in (".png", ".csv"):
                (STORED / figure).with_suffix(suffix).unlink(missing_ok=True)
        table.with_suffix(".csv").unlink(missing_ok=True)
        table.unlink()


def _picture(file: Path, name: str) -> str:
    target = STORED / f"{name}-{file.name}"
    shutil.copyfile(file, target)
    numbers = file.with_suffix(".csv")
    if numbers.is_file() and numbers.stat().st_size <= LARGEST_CSV:
        shutil.copyfile(numbers, target.with_suffix(".csv"))
    return target.name


def stored() -> dict[str, dict[str, Any]]:
    """The tables in the docs by name, in the order of the entries."""
    return {
        n: json.loads((STORED / f"{n}.json").read_text()) for n in ENTRIES if (STORED / f"{n}.json").is_file()
    }


def rows_as_text(name: str, *starts: str) -> str:
    """Rows of a stored table as plain text: what, our number, its error and the note."""
    table = json.loads((STORED / f"{name}.json").read_text())
    rows = [r for r in table["rows"] if not starts or r["what"].startswith(starts)]
    cells = [[cell(r.get(n)) for n in ("what", "ours", "error", "note")] for r in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    return "\n".join(
        f"{w:<{widths[0]}}  {o:>{widths[1]}}  {'' if e == '-' else '+- ' + e:<{widths[2] + 3}}  {n}".rstrip()
        for w, o, e, n in cells
    )


def rows_as_csv(table: dict[str, Any]) -> str:
    """All rows of a stored table, without empty columns."""
    text = io.StringIO()
    used = columns_used(table["rows"])
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(used)
    writer.writerows([row.get(n) for n in used] for row in table["rows"])
    return text.getvalue()


def outdated(tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The tables whose revision is not the experiment's present one."""
    return {n: table for n, table in tables.items() if table.get("revision") != ENTRIES[n].revision}


def pages(tables: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The docs' pages by file: claims with their verdicts, and for each paper its tables and pictures.

    Raises:
        ValueError: A table is of a quick run, or of another revision of its experiment.
    """
    quick = [name for name, table in tables.items() if table["mode"] != "full"]
    if quick:
        raise ValueError(f"quick results do not go into the docs: {', '.join(quick)}")
    if outdated(tables):
        raise ValueError(
            f"tables of another revision: {', '.join(outdated(tables))}; run tools/reproduce_all.py --full NAME "
            "and then --docs (which drops the table where there is no new run)"
        )
    papers = "\n".join(f"- [{title}](reproduced/{name}.md)" for name, title in PAPERS.items())
    files = {"reproduced.md": HEAD.format(papers=papers, claims="\n".join(_claim_lines(tables)))}
    return files | {f"reproduced/{name}.md": _paper_page(name, tables) for name in PAPERS}


def _claim_lines(tables: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for claim, verdict in _verdicts(tables):
        paper = ENTRIES[claim.entry].paper
        link = f"[{verdict}](reproduced/{paper}.md#{claim.entry})" if claim.entry in tables else verdict
        says = _safe(claim.says) if claim.by_paper else f"*{_safe(claim.says)}*"
        lines.append(f"| {paper} | {says} | {link} | {claim.meaning(verdict)} |")
    return lines


def _table_link(entry: str, tables: dict[str, dict[str, Any]]) -> str:
    return f" ([table](#{entry}))" if entry in tables else ""


def _verdicts(tables: dict[str, dict[str, Any]]) -> list[tuple[Claim, Verdict]]:
    return [
        (claim, claim.verdict(tables[claim.entry]["rows"] if claim.entry in tables else None))
        for claim in CLAIMS
    ]


def _paper_page(name: str, tables: dict[str, dict[str, Any]]) -> str:
    """What held, what did not and what it means; then every reproduction with its pictures and rows."""
    lines = [f"# {PAPERS[name]}", "", "## What held up, what did not, what it means", ""]
    verdicts = [(c, v) for c, v in _verdicts(tables) if ENTRIES[c.entry].paper == name]
    for verdict, heading in HEADINGS_OF_VERDICTS.items():
        claims = [claim for claim, reached in verdicts if reached == verdict]
        if claims:
            lines += [f"**{heading}**", ""]
            lines += [
                f"- {c.says}{'' if c.by_paper else ' (asked here)'}{_table_link(c.entry, tables)}. {c.meaning(verdict)}"
                for c in claims
            ]
            lines.append("")
    if not verdicts:
        lines += ["These are measurements of strati itself; no claim of a paper is tested.", ""]
    entries = [entry for entry in ENTRIES if ENTRIES[entry].paper == name]
    lines += [section(entry, tables[entry]) for entry in entries if entry in tables]
    missing = [
        f"- `{e}`: {ENTRIES[e].summary}. {ENTRIES[e].needs}".rstrip() for e in entries if e not in tables
    ]
    if missing:
        lines += ["## No full run is stored", "", *missing]
    return "\n".join(lines).rstrip() + "\n"


def section(name: str, table: dict[str, Any]) -> str:
    """One reproduction: its cost, its pictures and its rows."""
    cost = table.get("cost")
    spent = (
        f", {cost['seconds'] / 60:.1f} minutes ({cost['cpu_seconds'] / 60:.1f} of the processor)"
        if cost
        else ""
    )
    run = f"full run, revision {table['revision']}, seed {table['seed']}{spent}"
    lines = [f"## {table['title']} {{ #{name} }}", ""]
    lines += [f"`strati reproduce {name}` ({ENTRIES[name].paper}): {run}.", ""]
    for warning in table.get("warnings", []):
        lines += [f"*{warning['code']}*: {warning['text']}", ""]
    for figure in table["figures"]:
        lines += _figure_lines(name, figure, table.get("captions", {}))
    lines += _table_lines(name, table["rows"])
    return "\n".join(lines) + "\n"


def _table_lines(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """The rows that compare with a paper or a theory, or the first ones; a link to the CSV with all of them."""
    comparing = [row for row in rows if any(row.get(n) is not None for n in ("paper", "theory", "before"))]
    shown = (comparing or rows)[:ROWS_SHOWN]
    used = [n for n in columns_used(shown) if n != "mode"]  # all are full runs
    left = ("what", "agrees", "note")
    count = f"{len(shown)} of {len(rows)} rows" if len(shown) < len(rows) else f"{len(rows)} rows"
    return [
        f'<details markdown="1"><summary>{count}</summary>',
        "",
        "| " + " | ".join(HEADINGS.get(n, n) for n in used) + " |",
        "| " + " | ".join("---" if n in left else "---:" for n in used) + " |",
        *("| " + " | ".join(_safe(cell(row.get(n))) for n in used) + " |" for row in shown),
        "",
        "</details>",
        "",
        f"[All rows as CSV]({name}.csv)",
    ]


def _figure_lines(name: str, figure: str, captions: dict[str, str]) -> list[str]:
    """A picture, what to see in it, and a link to its data where they are stored."""
    stem = Path(figure).stem
    label = stem.removeprefix(f"{name}-")
    link = f" ([data]({stem}.csv))" if (STORED / f"{stem}.csv").is_file() else ""
    return [f"![{label}]({figure})", "", f"*{label.replace('-', ' ')}*: {caption(label, captions)}{link}", ""]


def check() -> int:
    """Whether the pages are what the stored tables give, all of them full runs of the present revisions."""
    try:
        expected = pages(stored())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    expected |= {f"reproduced/{n}.csv": rows_as_csv(table) for n, table in stored().items()}
    stale = [n for n, text in expected.items() if not (DOCS / n).is_file() or (DOCS / n).read_text() != text]
    if stale:
        print(
            f"not what the tables give: {', '.join(stale)}; run tools/reproduce_all.py --docs",
            file=sys.stderr,
        )
    return 1 if stale else 0


def _safe(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
