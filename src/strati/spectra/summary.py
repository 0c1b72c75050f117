"""The table that a terminal shows of a scan: network order, the layers to look at first marked and named."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from strati.tables import MOST_ROWS, Column, Table, table
from strati.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

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
_GIVE_WAY = ("phase", "alpha", "spikes", "shape", "null", "p", "rank", "role", "stable", "KS")
_COLUMNS = tuple(
    Column(
        name,
        right=name not in ("", "layer", "role", "phase", "warnings"),
        keep=name not in _GIVE_WAY,
        gives=_GIVE_WAY.index(name) if name in _GIVE_WAY else 0,
        words=name == "warnings",
        least=12 if name == "layer" else 0,
    )
    for name in (
        *("", "layer", "role", "shape", "rank", "stable", "alpha", "KS", "p", "spikes", "null", "phase"),
        "warnings",
    )
)
"""The columns of the table; on a narrow terminal numbers give way, the last named above first."""

_RANGE = (2.0, 6.0)


def summarise(scan: Scan) -> RenderableType:
    """The table, then what stands out and what was left out."""
    rows = [item.row() for item in scan.layers]
    return Group(_table(scan, rows), *_footer(scan, rows))


def _table(scan: Scan, rows: list[dict[str, Any]]) -> Table:
    """One row per layer; of too many those that ask for attention, still in the network's order."""
    shown = rows
    if len(rows) > MOST_ROWS:
        urgent = sorted(range(len(rows)), key=lambda i: -severity(rows[i])[0])[:MOST_ROWS]
        shown = [rows[i] for i in sorted(urgent)]
    columns = [column for column in _COLUMNS if column.name != "p" or scan.config.bootstrap]
    cells = [_cells(row) for row in shown]
    more = len(rows) - len(shown)
    return table(
        columns,
        ([cell[column.name] for column in columns] for cell in cells),
        title=f"{printable(scan.path)}: {scan.parameters:,} parameters, {len(rows)} matrices of "
        f"{scan.tensors} tensors",
        notes=[f"{more} more layers in --json and --export"] if more else [],
    )


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
