"""A followed run on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strati.tables import Column, Table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strati.tracking.track import Series, Track

_MOST = 30


def summarise(result: Track) -> RenderableType:
    """Series of the whole network, or the layers' medians, from first to last; then the changes."""
    from rich.console import Group
    from rich.text import Text

    whole = [series for series in result.curves if series.layer is None]
    rows = tuple(_row(series) for series in whole)
    span = f"{result.steps[0]:g} to {result.steps[-1]:g}" if result.steps else "none"
    columns = (
        Column("quantity", keep=True),
        Column("first", True),
        Column("last", True),
        Column("least", True),
    )
    head = Table(columns, rows, title=f"{len(result.steps)} checkpoints, steps {span}")
    parts: list[RenderableType] = [head] if rows else [Text(f"{len(result.steps)} checkpoints, steps {span}")]
    layers = {series.layer for series in result.curves if series.layer is not None}
    if layers:
        parts.append(Text(f"{len(layers)} layers followed; --json has every series"))
    parts.append(_changes(result) if result.breaks else Text("no change of course stands out from the noise"))
    parts += [Text(f"warning: {flag.text}") for flag in result.warnings]
    return Group(*parts)


def _row(series: Series) -> tuple[str, str, str, str]:
    known = [(v, e) for v, e in zip(series.values, series.stderr, strict=True) if v is not None]
    if not known:
        return (series.what, "-", "-", "-")
    return (series.what, _value(*known[0]), _value(*known[-1]), f"{min(v for v, _ in known):.4g}")


def _value(value: float, error: float | None) -> str:
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"


def _changes(result: Track) -> Table:
    columns = (
        Column("change of", keep=True),
        Column("layer", keep=True),
        Column("at step", True),
        Column("95 % interval", True),
        Column("p", True),
    )
    rows = tuple(
        (
            row["what"],
            row["layer"] or "(network)",
            f"{row['step']:.0f}",
            f"{row['low']:.0f}..{row['high']:.0f}",
            f"{row['pvalue']:.2g}",
        )
        for row in result.breaks[:_MOST]
    )
    left = len(result.breaks) - len(rows)
    notes = (f"{left} more changes: --json has them",) if left > 0 else ()
    return Table(columns, rows, title="where the run changes its course", notes=notes)
