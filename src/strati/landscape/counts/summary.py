"""What a terminal shows of a degeneracy count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strati.core.display import Column, printable, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strati.landscape.counts.result import Degeneracy


TOTAL = "free"
"""Heading of the column that counts every free direction once."""


def degeneracy_summary(result: Degeneracy) -> RenderableType:
    """The answer in words, what structure alone leaves free, a table per layer, then what a reader must know."""
    from rich.console import Group
    from rich.text import Text

    columns = _columns(result)
    rows = [
        [printable(layer.name, 48), *(values[index] for values in columns.values())]
        for index, layer in enumerate(result.layers)
    ]
    drawn = table(
        [Column("layer", keep=True), *(Column(name, right=True, keep=name == TOTAL) for name in columns)],
        [*rows, *_totals(result, list(columns))],
    )
    lines = [result.sentence + ".", *_details(result)]
    notes = [f"not analysed: {printable(name)}: {reason}" for name, reason in result.skipped[:5]]
    if len(result.skipped) > 5:
        notes.append(f"not analysed: {len(result.skipped) - 5} more")
    notes += [f"note: {flag.text}" for flag in result.warnings if flag.code != "few-data"]
    parts: list[RenderableType] = [*(Text(line) for line in lines), drawn, *(Text(note) for note in notes)]
    for more in (result.llc, result.scales):
        if more is not None:
            parts.append(more.summary())
    return Group(*parts)


def _details(result: Degeneracy) -> list[str]:
    """What is free and how it was counted; where most of it lies; dead neurons."""
    lines = []
    if result.values is not None and result.free_from_few_data > 0:
        structural = result.free - result.free_from_few_data
        lines.append(f"Give at least {-(-result.parameters * result.data // result.values):,} rows.")
        share = f"{structural / result.parameters:.0%}"
        lines.append(f"By structure alone {structural:,} parameters ({share}) are free{_where(result)}.")
    else:
        share = f"{result.free / result.parameters:.0%}"
        lines.append(
            f"{result.free:,} ({share}) are free on {result.data:,} rows ({_how(result)}){_where(result)}."
        )
    if result.effective_at_epsilon is not None:
        lines.append(f"At a loss scale of {result.epsilon:g} about {result.effective_at_epsilon:,} are used.")
    dead = {layer.name: layer.dead for layer in result.layers if layer.dead}
    if dead:
        places = ", ".join(f"{count} in {printable(name, 48)}" for name, count in list(dead.items())[:4])
        lines.append(f"{sum(dead.values()):,} dead neurons: {places}{', ...' if len(dead) > 4 else ''}.")
    return lines


def _where(result: Degeneracy) -> str:
    largest = sorted((layer for layer in result.layers if layer.free), key=lambda c: -c.free)[:4]
    if len(largest) < 2:
        return ""
    return ": " + ", ".join(f"{printable(layer.name, 48)} {layer.free:,}" for layer in largest)


def _columns(result: Degeneracy) -> dict[str, list[str]]:
    """Headings and cells: at most six columns with the layer's; JSON and Python have the rest."""
    layers = result.layers
    columns = {
        "matrix": [f"{c.outputs}x{c.inputs}{'+b' if c.bias else ''}" for c in layers],
        "input rank": [f"{c.activation_rank:,}" for c in layers],
        "output rank": [f"{c.jacobian_rank:,}" for c in layers],
    }
    if any(c.dead for c in layers):
        columns["dead"] = [f"{c.dead:,}" for c in layers]
    if result.epsilon is not None:
        there = [c.at_epsilon.free for c in layers if c.at_epsilon is not None]
        columns.pop("dead", None)
        columns[f"free at {result.epsilon:g}"] = [f"{v:,}" for v in there]
    columns[TOTAL] = [f"{c.free:,}" for c in layers]
    return columns


def _totals(result: Degeneracy, columns: list[str]) -> list[list[str]]:
    """What is free beside the layers, and the sum of the column."""
    rest = {"(other parameters)": result.free_elsewhere, "(too few data)": result.free_from_few_data}
    rows = [(name, free) for name, free in rest.items() if free]
    if len(result.layers) + len(rows) < 2:
        return []
    return [
        [name, *(f"{free:,}" if heading == TOTAL else "" for heading in columns)]
        for name, free in (*rows, ("total", result.free))
    ]


def _how(result: Degeneracy) -> str:
    if result.method == "exact":
        return "exact: N - rank of the Hessian"
    if result.free_at_most is not None:
        return f"a lower bound; at most {result.free_at_most:,}"
    return "by structure, a lower bound"
