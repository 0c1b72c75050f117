"""Run reproductions, keep what full runs found in ``docs/reproduced``, and write the docs' page from it.

    .venv/bin/python tools/reproduce_all.py [--full] [--again] [--seed N] [NAME...]
    .venv/bin/python tools/reproduce_all.py --docs
    .venv/bin/python tools/reproduce_all.py --check
    .venv/bin/python tools/reproduce_all.py --show NAME [WORDS...]

Quick variants by default, below ``out/reproduce/quick``; full ones below ``out/reproduce``. A failure of one is
reported and the rest goes on. A run goes on where it was stopped, and an entry that the present code has already run is
left alone (``--again`` runs it once more). ``--docs`` takes the full runs of the present code (a quick one or an older
one never), with their cost, a checksum of the code that made them, their pictures and the pictures' data into
``docs/reproduced``, drops tables whose code has changed since, and writes ``docs/reproduced.md``. ``--check`` fails
where that page is not what the stored tables give, where one of them is of a quick run, and where one is older than the
code that makes it. ``--show`` prints the rows of a stored table whose names begin with one of the words: other pages of
the docs quote them this way.
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

from strati.errors import StratiError
from strati.papers.claims import CLAIMS
from strati.papers.registry import ENTRIES, reproduce, sources
from strati.papers.rows import caption, cell, columns_used
from strati.run.files import write_atomic

OUT = Path("out/reproduce")
STORED = Path("docs/reproduced")
PAGE = Path("docs/reproduced.md")
HEAD = """# The papers reproduced

The paper's number beside ours, from full runs of `strati reproduce NAME`, put here by `tools/reproduce_all.py --docs`.
`paper` holds what the paper prints and nothing else; `theory` what a theorem gives; `before` what was measured earlier
by others. `error` is one standard error of ours, `seeds` how many independent networks, draws or trainings stand
behind it. `agrees` is `yes` within two errors or the digits printed, `no` where the note says why, `open` where nobody
knows yet. A dash is where there is no number. Every picture has its data beside it as CSV.

## May I rely on it?

| paper | claim | here | may I rely on it? |
| --- | --- | --- | --- |
"""


def main(words: list[str]) -> int:
    """Run those named, or all; or write or check the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    for flag in ("--full", "--again", "--docs", "--check", "--show"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(words)
    if asked.docs:
        collect()
        write_atomic(PAGE, page(stored()))
        return 0
    if asked.check:
        return check()
    if asked.show:
        kept = sorted(file.stem for file in STORED.glob("*.json"))
        if not asked.names or asked.names[0] not in kept:
            parser.error(f"--show needs a stored table; there are {', '.join(kept)}")
        print(shown(*asked.names))
        return 0
    unknown = [name for name in asked.names if name not in ENTRIES]
    if unknown:
        parser.error(f"no entry {unknown[0]!r}; there are {', '.join(ENTRIES)}")
    failed = 0
    for name in asked.names or ENTRIES:
        if not asked.again and _done(name, OUT if asked.full else OUT / "quick"):
            print(f"{name}: done before", flush=True)
            continue
        failed += not run(name, asked.full, asked.seed)
    return 1 if failed else 0


def run(name: str, full: bool, seed: int = 0) -> bool:
    """Run one, and keep its result and its cost; whether it went well."""
    place = OUT if full else OUT / "quick"
    began, cost = _clocks(), Cost(place / f"{name}.cost.json")
    try:
        result = reproduce(name, quick=not full, seed=seed, folder=place)
    except StratiError as error:
        print(f"{name}: failed: {error}", flush=True)
        return False
    finally:
        spent = [now - then for now, then in zip(_clocks(), began, strict=True)]
        cost.add(*spent)
    result.to_json(place / f"{name}.json")
    cost.finish()
    print(f"{name}: {len(result.rows)} rows in {spent[0]:.0f} s", flush=True)
    return True


def _done(name: str, place: Path) -> bool:
    file = place / f"{name}.json"
    return file.is_file() and json.loads(file.read_text()).get("sources") == sources(name)


def _clocks() -> tuple[float, float]:
    """The time of the wall, and of the processor, with that of finished workers."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(u.ru_utime + u.ru_stime for u in used)


class Cost:
    """What a reproduction has cost: runs that were stopped count as well, and one that only drew anew does not."""

    def __init__(self, file: Path) -> None:
        self._file = file
        nothing = {"seconds": 0.0, "cpu_seconds": 0.0, "finished": False}
        self._before: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else nothing
        self._own = self._before

    def add(self, seconds: float, processor: float) -> None:
        """Write down a run that may not have finished."""
        new = {"seconds": round(seconds, 1), "cpu_seconds": round(processor, 1)}
        if self._before["finished"]:  # most of it was kept and not computed again
            self._own = {key: max(new[key], self._before[key]) for key in new}
        else:
            self._own = {key: round(new[key] + self._before[key], 1) for key in new}
        self._write(finished=bool(self._before["finished"]))

    def finish(self) -> None:
        """Write down that it did."""
        self._write(finished=True)

    def _write(self, *, finished: bool) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._file, json.dumps(self._own | {"finished": finished}) + "\n")


def collect() -> None:
    """Take the full runs of the present code below ``out/reproduce`` into the docs, and drop tables of older code."""
    STORED.mkdir(parents=True, exist_ok=True)
    for name in ENTRIES:
        file = OUT / f"{name}.json"
        if not file.is_file():
            continue
        result = json.loads(file.read_text())
        if result.get("mode") != "full":
            print(f"{name}: a quick run; not taken", flush=True)
        elif result.get("sources") != sources(name):
            print(f"{name}: its code has changed since that run; not taken", flush=True)
        else:
            _drop(name)
            cost = json.loads((OUT / f"{name}.cost.json").read_text())
            result["cost"] = {key: cost[key] for key in ("seconds", "cpu_seconds")}
            result["figures"] = [_picture(Path(p), name) for p in result["figures"] if p.endswith(".png")]
            write_atomic(STORED / f"{name}.json", json.dumps(result, indent=1) + "\n")
    for name in old(stored()):
        print(f"{name}: the stored table is older than its code; dropped", flush=True)
        _drop(name)


def _drop(name: str) -> None:
    """Take a stored table out, with the pictures that it names."""
    table = STORED / f"{name}.json"
    if table.is_file():
        for figure in json.loads(table.read_text())["figures"]:
            for suffix in (".png", ".csv"):
                (STORED / figure).with_suffix(suffix).unlink(missing_ok=True)
        table.unlink()


def _picture(file: Path, name: str) -> str:
    target = STORED / f"{name}-{file.name}"
    shutil.copyfile(file, target)
    if file.with_suffix(".csv").is_file():
        shutil.copyfile(file.with_suffix(".csv"), target.with_suffix(".csv"))
    return target.name


def stored() -> dict[str, dict[str, Any]]:
    """The tables in the docs by name, in the order of the entries."""
    return {
        n: json.loads((STORED / f"{n}.json").read_text()) for n in ENTRIES if (STORED / f"{n}.json").is_file()
    }


def shown(name: str, *starts: str) -> str:
    """Rows of a stored table as plain text: what, ours, its error and the note."""
    table = json.loads((STORED / f"{name}.json").read_text())
    rows = [r for r in table["rows"] if not starts or r["what"].startswith(starts)]
    cells = [[cell(r.get(n)) for n in ("what", "ours", "error", "note")] for r in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    return "\n".join(
        f"{w:<{widths[0]}}  {o:>{widths[1]}}  {'' if e == '-' else '+- ' + e:<{widths[2] + 3}}  {n}".rstrip()
        for w, o, e, n in cells
    )


def old(tables: dict[str, dict[str, Any]]) -> list[str]:
    """The tables that are older than the code that makes them."""
    return [name for name, table in tables.items() if table.get("sources") != sources(name)]


def page(tables: dict[str, dict[str, Any]]) -> str:
    """The docs' page: claims with their verdicts, then every table with its pictures.

    Raises:
        ValueError: A table is of a quick run, or older than the code that makes it.
    """
    quick = [name for name, table in tables.items() if table["mode"] != "full"]
    if quick:
        raise ValueError(f"quick results do not go into the docs: {', '.join(quick)}")
    if old(tables):
        raise ValueError(
            f"older than the code that makes them: {', '.join(old(tables))}; run tools/reproduce_all.py --full "
            "NAME and then --docs (which without a new run takes the old table out)"
        )
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
    for figure in table["figures"]:
        lines += _shown(name, figure, table.get("captions", {}))
    used = columns_used(table["rows"])
    lines.append("| " + " | ".join(used) + " |")
    left = ("what", "agrees", "mode", "note")
    lines.append("| " + " | ".join("---" if n in left else "---:" for n in used) + " |")
    lines += ["| " + " | ".join(_safe(cell(row.get(n))) for n in used) + " |" for row in table["rows"]]
    return "\n".join(lines) + "\n"


def _shown(name: str, figure: str, captions: dict[str, str]) -> list[str]:
    """A picture, what to see in it, and where its data are."""
    stem = Path(figure).stem
    own = stem.removeprefix(f"{name}-")
    data = f" ([data](reproduced/{stem}.csv))" if (STORED / f"{stem}.csv").is_file() else ""
    words = caption(own, captions)
    return [f"![{own}](reproduced/{figure})", "", f"*{own.replace('-', ' ')}*: {words}{data}", ""]


def check() -> int:
    """Whether the page is what the stored tables give, all of them full runs of the present code."""
    try:
        wanted = page(stored())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if PAGE.read_text() == wanted:
        return 0
    print(
        "docs/reproduced.md is not what its tables give; run tools/reproduce_all.py --docs", file=sys.stderr
    )
    return 1


def _safe(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
