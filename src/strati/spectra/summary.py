"""The table that a terminal shows of a scan: network order, the layers to look at first marked and named."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

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
_RANGE = (2.0, 6.0)
_MOST = 400


def summarise(scan: Scan) -> RenderableType:
    """The table, then what stands out and what was left out."""
    rows = [item.row() for item in scan.layers]
    bootstrap = scan.config.bootstrap > 0
    title = f"{printable(scan.path)}: {scan.parameters:,} parameters, {len(rows)} matrices of {scan.tensors} tensors"
    table = Table(
        title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("")
    table.add_column("layer", overflow="fold", min_width=20)
    table.add_column("role", no_wrap=True)
    for name in ("shape", "rank", "stable", "alpha", "KS", *(["p"] if bootstrap else []), "spikes", "null"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("phase", no_wrap=True)
    table.add_column("warnings", overflow="fold")
    shown = rows
    if len(rows) > _MOST:  # the ones that ask for attention first, still in the network's order
        urgent = sorted(range(len(rows)), key=lambda i: -severity(rows[i])[0])[:_MOST]
        shown = [rows[i] for i in sorted(urgent)]
        table.caption = f"{len(rows) - _MOST} more layers in --json and --export"
    for row in shown:
        mark, style = _MARKS[severity(row)[0]]
        table.add_row(Text(mark, style), *_cells(row, bootstrap))
    return Group(table, *_footer(scan, rows))


def severity(row: dict[str, Any]) -> tuple[int, str]:
    """How much a layer asks for attention, 0 to 3, and why."""
    codes = {flag.code for flag in row["warnings"]}
    for code in ("not-finite", "out-of-range", "constant", "empty"):
        if code in codes:
            return 3, code
    if row["phase"] == "rank-collapse":
        return 3, "rank-collapse"
    if "noise-like" in codes:
        return 2, "noise-like: no trace of training in the spectrum"
    alpha = row["alpha"]
    if alpha is not None and "short-tail" not in codes and not _RANGE[0] <= alpha <= _RANGE[1]:
        return 2, f"alpha {alpha:.1f}"
    if row["quasi_null"] and row["quasi_null"] > 0.01 * min(row["rows"], row["cols"]):
        return 1, f"{row['quasi_null']} quasi-null directions"
    return (1, next(iter(sorted(codes)))) if codes - {"quantised", "coarse-dtype"} else (0, "")


def _cells(row: dict[str, Any], bootstrap: bool) -> list[Text]:
    alpha, error = row["alpha"], row["alpha_stderr"]
    rank, full = row["hard_rank"], min(row["rows"], row["cols"])
    lost = rank is not None and rank < full
    noise = any(flag.code == "noise-like" for flag in row["warnings"])
    inside = alpha is not None and _RANGE[0] <= alpha <= _RANGE[1]
    phase = row["phase"] or "-"
    cells = [
        Text(printable(row["name"].removesuffix(".weight"), 60)),
        Text(row["role"]),
        Text(f"{row['rows']}x{row['cols']}"),
        Text(_number(rank, "d"), "red" if lost else ""),
        Text(_number(row["stable_rank"], ".1f")),
        Text(
            "-" if alpha is None else f"{alpha:.2f}±{error:.2f}",
            "dim" if noise else "" if inside else "yellow",
        ),
        Text(_number(row["ks_distance"], ".3f")),
    ]
    if bootstrap:
        cells.append(Text(_number(row.get("tail_pvalue"), ".2f")))
    nulls = row["quasi_null"]
    return [
        *cells,
        Text(_number(row["spikes"], "d")),
        Text(_number(nulls, "d"), "yellow" if nulls else ""),
        Text(phase, _PHASES.get(phase, "dim")),
        Text(" ".join(flag.code for flag in row["warnings"]), "dim"),
    ]


def _footer(scan: Scan, rows: list[dict[str, Any]]) -> list[Text]:
    lines = []
    phases = Counter(row["phase"] or "undecided" for row in rows)
    if rows:
        lines.append(Text("phases: " + ", ".join(f"{count} {name}" for name, count in phases.most_common())))
    worst = sorted((row for row in rows if severity(row)[0] >= 2), key=lambda row: -severity(row)[0])
    if worst:
        named = "; ".join(f"{printable(row['name'], 60)} ({severity(row)[1]})" for row in worst[:5])
        more = f"; and {len(worst) - 5} more" if len(worst) > 5 else ""
        lines.append(Text(f"look first at: {named}{more}", "yellow"))
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
