"""The table that a terminal shows of a scan: network order, the layers to look at first marked and named."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from strati.text import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult

    from strati.spectra.scan import Scan

_MARKS = {3: ("!!", "bold red"), 2: ("!", "yellow"), 1: ("", "dim"), 0: ("", "")}
_PHASES = {
    "random-like": "yellow",
    "bleeding-out": "cyan",
    "bulk+spikes": "cyan",
    "bulk-decay": "green",
    "heavy-tailed": "green",
    "rank-collapse": "bold red",
}
_COLUMNS = (
    *(
        "",
        "layer",
        "role",
        "shape",
        "rank",
        "stable",
        "alpha",
        "KS",
        "p",
        "spikes",
        "null",
        "phase",
        "warnings",
    ),
)
_GIVE_WAY = ("KS", "stable", "role", "rank", "p", "null", "shape", "spikes", "alpha", "phase")
_RANGE = (2.0, 6.0)
_MOST = 400


def summarise(scan: Scan) -> RenderableType:
    """The table, then what stands out and what was left out."""
    rows = [item.row() for item in scan.layers]
    return Group(_LayerTable(scan, rows), *_footer(scan, rows))


@dataclass(frozen=True)
class _LayerTable:
    """One row per layer, fitted to the width at hand: names and warnings stay, numbers give way."""

    scan: Scan
    rows: list[dict[str, Any]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        titles = [title for title in _COLUMNS if title != "p" or self.scan.config.bootstrap]
        shown, more = self._shown()
        cells = [_cells(row) for row in shown]
        widths = {
            title: max([cell_len(title), *(cell_len(cell[title].plain) for cell in cells)])
            for title in titles
        }
        # A warning's codes may stand below each other.
        codes = (code for cell in cells for code in cell["warnings"].plain.split())
        widths["warnings"] = max([len("warnings"), *(cell_len(code) for code in codes)])
        room = options.max_width - 1
        dropped: list[str] = []
        for title in _GIVE_WAY:
            if sum(widths[title] + 1 for title in titles) <= room:
                break
            if title in titles:
                titles.remove(title)
                dropped.append(title)
        scan = self.scan
        table = Table(
            title=f"{printable(scan.path)}: {scan.parameters:,} parameters, {len(self.rows)} matrices of "
            f"{scan.tensors} tensors",
            title_justify="left",
            header_style="bold",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        rest = room - sum(widths[title] + 1 for title in titles if title != "layer") - 1
        for title in titles:
            if title == "layer":
                table.add_column(title, overflow="fold", width=max(min(widths[title], rest), 12))
            elif title == "warnings":
                table.add_column(title, overflow="fold", no_wrap=False, min_width=widths[title])
            else:
                side: JustifyMethod = "left" if title in ("", "role", "phase") else "right"
                table.add_column(title, justify=side, no_wrap=True)
        for cell in cells:
            table.add_row(*(cell[title] for title in titles))
        notes = [f"{more} more layers in --json and --export"] if more else []
        if dropped:
            notes.append(f"too narrow for: {', '.join(dropped)} (--json and --export have them)")
        table.caption = "; ".join(notes) or None
        # Warnings may wrap though long lines elsewhere must not.
        yield from console.render(table, options.update(no_wrap=False, overflow="fold"))

    def _shown(self) -> tuple[list[dict[str, Any]], int]:
        """The rows shown, those that ask for attention first if they are too many, still in the network's order."""
        rows = self.rows
        if len(rows) <= _MOST:
            return rows, 0
        urgent = sorted(range(len(rows)), key=lambda i: -severity(rows[i])[0])[:_MOST]
        return [rows[i] for i in sorted(urgent)], len(rows) - _MOST


def severity(row: dict[str, Any]) -> tuple[int, str]:
    """How much a layer asks for attention, 0 to 3, and why."""
    codes = {flag.code for flag in row["warnings"]}
    for code in ("not-finite", "out-of-range", "constant", "empty"):
        if code in codes:
            return 3, code
    if row["phase"] == "rank-collapse":
        return 3, "rank-collapse"
    if "noise-like" in codes:
        return 2, "noise-like: indistinguishable from random weights"
    alpha = row["alpha"]
    if alpha is not None and "short-tail" not in codes and not _RANGE[0] <= alpha <= _RANGE[1]:
        return 2, f"alpha {alpha:.1f}"
    if row["quasi_null"] and row["quasi_null"] > 0.01 * min(row["rows"], row["cols"]):
        return 1, f"{row['quasi_null']} quasi-null directions"
    serious = sorted(codes - {"quantised", "coarse-dtype", "gradual-tail"})
    return (1, serious[0]) if serious else (0, "")


def _cells(row: dict[str, Any]) -> dict[str, Text]:
    alpha, error = row["alpha"], row["alpha_stderr"]
    rank, full = row["hard_rank"], min(row["rows"], row["cols"])
    lost = rank is not None and rank < full
    noise = any(flag.code in ("noise-like", "null-in-noise") for flag in row["warnings"])
    inside = alpha is not None and _RANGE[0] <= alpha <= _RANGE[1]
    phase = row["phase"] or "-"
    nulls = row["quasi_null"]
    return {
        "": Text(*_MARKS[severity(row)[0]]),
        "layer": Text(printable(row["name"].removesuffix(".weight"), 60)),
        "role": Text(row["role"]),
        "shape": Text(f"{row['rows']}x{row['cols']}"),
        "rank": Text(_number(rank, "d"), "red" if lost else ""),
        "stable": Text(_number(row["stable_rank"], ".1f")),
        "alpha": Text(
            "-" if alpha is None else f"{alpha:.2f}±{error:.2f}",
            "dim" if noise else "" if inside else "yellow",
        ),
        "KS": Text(_number(row["ks_distance"], ".3f")),
        "p": Text(_number(row.get("tail_pvalue"), ".2f")),
        "spikes": Text(_number(row["spikes"], "d")),
        "null": Text(_number(nulls, "d"), "yellow" if nulls else ""),
        "phase": Text(phase, _PHASES.get(phase, "dim")),
        "warnings": Text(" ".join(flag.code for flag in row["warnings"]), "dim"),
    }


def _footer(scan: Scan, rows: list[dict[str, Any]]) -> list[Text]:
    lines = []
    phases = Counter(row["phase"] or "undecided" for row in rows)
    if rows:
        lines.append(Text("phases: " + ", ".join(f"{count} {name}" for name, count in phases.most_common())))
    worst = sorted((row for row in rows if severity(row)[0] >= 2), key=lambda row: -severity(row)[0])
    if worst:
        named = "; ".join(f"{printable(row['name'], 60)} ({severity(row)[1]})" for row in worst[:5])
        more = f"; and {len(worst) - 5} more" if len(worst) > 5 else ""
        lines.append(Text(f"check first: {named}{more}", "yellow"))
    if scan.skipped:
        reasons = Counter(item.reason for item in scan.skipped)
        told = "; ".join(f"{count} {printable(reason, 60)}" for reason, count in reasons.most_common(4))
        lines.append(Text(f"skipped {len(scan.skipped)} tensors ({told}); --json lists them", "dim"))
    lines.extend(Text(f"note: {printable(flag.text, 200)}", "yellow") for flag in scan.warnings)
    lines.append(
        Text(
            "alpha from 2 to 6 is called well trained in the literature; that is a claim, and it fails when a layer "
            "is replaced (strati audit)",
            "dim",
        )
    )
    return lines


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
