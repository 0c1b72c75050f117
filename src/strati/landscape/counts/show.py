"""What a terminal shows of a degeneracy count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strati.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strati.landscape.counts.result import Degeneracy


TOTAL = "free\n(total)"
"""Heading of the column that counts every free direction once."""


def degeneracy_summary(result: Degeneracy) -> RenderableType:
    """A table per layer, the totals, and the sentence."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Free directions of each layer's weights and bias", title_justify="left")
    table.add_column("layer", overflow="fold", min_width=12)
    columns = _columns(result)
    for heading in columns:
        table.add_column(heading, justify="right", overflow="fold")
    for index, layer in enumerate(result.layers):
        cells = [printable(layer.name, 48), *(values[index] for values in columns.values())]
        table.add_row(*(Text(cell) for cell in cells))
    _add_totals(table, result, list(columns))
    lines = [
        f"{result.parameters:,} parameters, {result.free:,} free ({_how(result)}), {result.data:,} data",
        result.sentence,
    ]
    lines += [f"not analysed: {printable(name)}: {reason}" for name, reason in result.skipped[:5]]
    if len(result.skipped) > 5:
        lines.append(f"not analysed: {len(result.skipped) - 5} more")
    lines += [f"note: {flag.text}" for flag in result.warnings]
    parts: list[RenderableType] = [table, *(Text(line) for line in lines)]
    for more in (result.llc, result.scales):
        if more is not None:
            parts.append(more.summary())
    return Group(*parts)


def _columns(result: Degeneracy) -> dict[str, list[str]]:
    """Headings and cells; columns that are zero in all layers are left out, so that the table stays narrow."""
    layers = result.layers
    columns = {
        "matrix": [f"{c.outputs}x{c.inputs}{'+b' if c.bias else ''}" for c in layers],
        "rank\nact.": [f"{c.activation_rank:,}" for c in layers],
        "rank\nJac.": [f"{c.jacobian_rank:,}" for c in layers],
    }
    optional = {
        "dead": [c.dead for c in layers],
        "sync.\nblocks": [c.synchronised_blocks for c in layers],
        "free:\nact.": [c.free_from_activations for c in layers],
        "free:\nJac.": [c.free_from_jacobians for c in layers],
        "free:\nfiring": [c.free_from_firing for c in layers],
        "free:\nsync.": [c.free_from_synchrony for c in layers],
    }
    for heading, values in optional.items():
        if any(values):
            columns[heading] = [f"{v:,}" for v in values]
    columns[TOTAL] = [f"{c.free:,}" for c in layers]
    if result.epsilon is not None:
        there = [c.at_epsilon.free for c in layers if c.at_epsilon is not None]
        columns[f"free at\n{result.epsilon:g}"] = [f"{v:,}" for v in there]
    return columns


def _add_totals(table: Any, result: Degeneracy, columns: list[str]) -> None:
    """What is free beside the layers, and the sum of the column: it is the total below the table."""
    rest = {
        "(parameters outside these layers)": result.free_elsewhere,
        "(fewer output values than parameters)": result.free_from_few_data,
    }
    rows = [(name, free) for name, free in rest.items() if free]
    if len(result.layers) + len(rows) < 2:
        return
    table.add_section()
    for name, free in (*rows, ("total", result.free)):
        table.add_row(name, *(f"{free:,}" if heading == TOTAL else "" for heading in columns))


def _how(result: Degeneracy) -> str:
    if result.method == "exact":
        return f"exact: N - rank of the Hessian; {result.structural_free:,} by structure alone"
    if result.free_at_most is not None:
        return f"at least; at most {result.free_at_most:,}: rounding leaves the exact rank open"
    return "by structure, a lower bound"
