"""What a terminal shows of a degeneracy count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strati.core.display import Column, printable, table, without_shared_prefix

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
        [name, *(values[index] for values in columns.values())] for index, name in enumerate(_names(result))
    ]
    drawn = table(
        [Column("layer", keep=True), *(Column(name, right=True, keep=name == TOTAL) for name in columns)],
        [*rows, *_totals(result, list(columns))],
    )
    lines = [result.sentence + ".", *_details(result)]
    notes = [f"not analysed: {printable(name)}: {reason}" for name, reason in result.skipped[:1]]
    if len(result.skipped) > 1:
        notes = [
            f"{len(result.skipped)} layers are not analysed (tied or elementwise weights); --json lists them"
        ]
    notes += [f"note: {flag.text}" for flag in result.warnings if flag.code not in ("few-data", "probes")]
    parts: list[RenderableType] = [*(Text(line) for line in lines), drawn, *(Text(note) for note in notes)]
    for more in (result.llc, result.scales):
        if more is not None:
            parts.append(more.summary())
    return Group(*parts)


def _details(result: Degeneracy) -> list[str]:
    """What is free and how it was counted; where most of it lies; dead neurons."""
    lines = []
    if result.values is not None and result.bounded_by_data:
        lines.append(f"Give at least {-(-result.parameters * result.data // result.values):,} rows.")
        structural = result.free_by_structure
        share = f"{structural / result.parameters:.0%}"
        lines.append(f"By structure alone {structural:,} parameters ({share}) are free{_where(result)}.")
    else:
        share = f"{result.free / result.parameters:.0%}"
        lines.append(
            f"{result.free:,} ({share}) are free on {result.data:,} rows ({_how(result)}){_where(result)}."
        )
    if result.effective_at_epsilon is not None:
        lines.append(f"At a loss scale of {result.epsilon:g} about {result.effective_at_epsilon:,} are used.")
    dead = {name: layer.dead for name, layer in zip(_names(result), result.layers, strict=True) if layer.dead}
    if dead:
        places = ", ".join(f"{count} in {name}" for name, count in list(dead.items())[:4])
        lines.append(f"{sum(dead.values()):,} dead neurons: {places}{', ...' if len(dead) > 4 else ''}.")
    return lines


def _where(result: Degeneracy) -> str:
    counts = [(free, name) for free, name in zip(_free(result), _names(result), strict=True) if free]
    if len(counts) < 2:
        return ""
    largest = sorted(counts, key=lambda pair: -pair[0])[:4]
    return ": " + ", ".join(f"{name} {free:,}" for free, name in largest)


def _names(result: Degeneracy) -> list[str]:
    return [printable(name, 48) for name in without_shared_prefix([layer.name for layer in result.layers])]


def _free(result: Degeneracy) -> list[int]:
    """What each layer leaves free; by structure where the number of data limits the exact rank."""
    return [c.structural_free if result.bounded_by_data else c.free for c in result.layers]


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
    columns[TOTAL] = [f"{free:,}" for free in _free(result)]
    return columns


def _totals(result: Degeneracy, columns: list[str]) -> list[list[str]]:
    """What is free beside the layers, and the sum of the column."""
    few, elsewhere = result.free_from_few_data, result.free_elsewhere
    if result.bounded_by_data:
        few = result.free - result.free_by_structure
        elsewhere = result.free_by_structure - sum(_free(result))
    beside = {"(other parameters)": elsewhere, "(too few data)": few}
    rows = [(name, free) for name, free in beside.items() if free]
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
