"""Run reproductions, keep what full runs found in ``docs/reproduced``, and write the docs' page from it.

    .venv/bin/python tools/reproduce_all.py [--full] [--again] [--seed N] [NAME...]
    .venv/bin/python tools/reproduce_all.py --docs
    .venv/bin/python tools/reproduce_all.py --check
    .venv/bin/python tools/reproduce_all.py --show NAME [WORDS...]

Quick variants run by default, below ``out/reproduce/quick``; full ones below ``out/reproduce``. A failure of one is
reported and the others run. A run continues where it was stopped, and an entry whose present revision has already run
is skipped (``--again`` runs it once more). ``--docs`` copies the full runs of the present revisions, with their cost,
their pictures and the pictures' data (where these are small), into ``docs/reproduced``, drops tables of other
revisions, and writes ``docs/reproduced.md`` and one page per paper. ``--check`` fails where a page is not what the
stored tables give, where one of them is of a quick run, and where one is of another revision. A revision is a number
in ``registry.py``, raised by hand. ``--show`` prints the rows of a stored table whose names begin with one of the
words: other pages of the docs quote them this way.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from strati.core.errors import StratiError
from strati.core.files import write_atomic
from strati_reproductions.claims import CLAIMS, Claim
from strati_reproductions.registry import ENTRIES, reproduce
from strati_reproductions.rows import HEADINGS, caption, cell, columns_used

OUT = Path("out/reproduce")
STORED = Path("docs/reproduced")
DOCS = Path("docs")
PAPERS = {
    "robust-and-critical-layers": "Robust and critical layers",
    "top-down-eigenspectra": "Top-down eigenspectra",
    "degeneracy-in-the-loss-landscape": "Degeneracy in the loss landscape",
    "dropped-neural-net": "I dropped a neural net",
    "development": "Training runs followed from start to end",
    "plans": "Plans measured on unseen data",
}
"""The pages, and their titles."""
LARGEST_CSV = 32_768
"""Bytes of a picture's data that are stored with it; a run writes them whatever their size."""
HEAD = """# The papers reproduced

Each page compares the paper's numbers with those measured here, from full runs of `strati reproduce NAME` (the command
comes with the package `strati-reproductions`):

{papers}

## May I rely on it?

| paper | claim | here | may I rely on it? |
| --- | --- | --- | --- |
{claims}

## How to read the tables

- `paper` is what the paper prints; `theory` is what a theorem gives; `before` is what others measured earlier.
- `ours` is measured here on networks that are available. Where a matrix of the paper's own network is available, its
  number has a column of its own.
- `error` is one standard error of our number. `seeds` counts the independent networks, draws or trainings.
- `agrees` is `yes` within two errors or the digits printed, `no` where the note says why, `open` where the reason is
  not known.
- A dash means that there is no number. Small tables of a picture's data are linked as CSV; the command writes all of
  them.
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


def outdated(tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The tables whose revision is not the experiment's present one."""
    return {n: table for n, table in tables.items() if table.get("revision") != ENTRIES[n].revision}


def page_of(entry: str) -> str:
    """The page that shows a reproduction."""
    paper = ENTRIES[entry].paper
    return paper if paper in PAPERS else "plans" if paper == "strati" else "development"


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
        link = verdict
        if claim.entry in tables:
            link = f"[{verdict}](reproduced/{page_of(claim.entry)}.md#{claim.entry})"
        lines.append(f"| {claim.paper} | {_safe(claim.says)} | {link} | {claim.advice(verdict)} |")
    return lines


def _verdicts(tables: dict[str, dict[str, Any]]) -> list[tuple[Claim, str]]:
    return [
        (claim, claim.verdict(tables[claim.entry]["rows"] if claim.entry in tables else None))
        for claim in CLAIMS
    ]


def _paper_page(name: str, tables: dict[str, dict[str, Any]]) -> str:
    """What held up, what did not and what it means; then every reproduction, its table collapsed."""
    lines = [f"# {PAPERS[name]}", "", "## What held up, what did not, what it means", ""]
    verdicts = [(c, v) for c, v in _verdicts(tables) if c.entry is not None and page_of(c.entry) == name]
    for verdict, heading in (
        ("held", "Held up"),
        ("partly held", "Held up in part"),
        ("not held", "Did not hold up"),
        ("not run", "Not run yet"),
    ):
        claims = [claim for claim, reached in verdicts if reached == verdict]
        if claims:
            lines += [f"**{heading}**", ""]
            lines += [f"- {c.says} ([table](#{c.entry})). *{c.advice(verdict)}*" for c in claims]
            lines.append("")
    if not verdicts:
        lines += ["No claim of a paper is tested here: these are measurements of strati itself.", ""]
    entries = [entry for entry in ENTRIES if page_of(entry) == name]
    lines += [section(entry, tables[entry]) for entry in entries if entry in tables]
    missing = [f"`{entry}`" for entry in entries if entry not in tables]
    if missing:
        lines += [f"## Without a full run yet\n\n{', '.join(missing)}\n"]
    return "\n".join(lines).rstrip() + "\n"


def section(name: str, table: dict[str, Any]) -> str:
    """One reproduction: what it cost, its pictures and its rows."""
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
    used = [name for name in columns_used(table["rows"]) if name != "mode"]  # all are full runs
    lines += [f'<details markdown="1"><summary>{len(table["rows"])} rows</summary>', ""]
    lines.append("| " + " | ".join(HEADINGS.get(n, n) for n in used) + " |")
    left = ("what", "agrees", "note")
    lines.append("| " + " | ".join("---" if n in left else "---:" for n in used) + " |")
    lines += ["| " + " | ".join(_safe(cell(row.get(n))) for n in used) + " |" for row in table["rows"]]
    lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


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
