"""What a terminal shows of a degeneracy count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strati.tables import Column, table
from strati.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strati.landscape.counts.result import Degeneracy


TOTAL = "free\n(total)"
"""Heading of the column that counts every free direction once."""


def degeneracy_summary(result: Degeneracy) -> RenderableType:
    """A table per layer, the totals, and the sentence."""
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
        title="Free directions of each layer's weights and bias",
    )
    lines = [
        f"{result.parameters:,} parameters, {result.free:,} free ({_how(result)}), {result.data:,} data",
        result.sentence,
    ]
    lines += [f"not analysed: {printable(name)}: {reason}" for name, reason in result.skipped[:5]]
    if len(result.skipped) > 5:
        lines.append(f"not analysed: {len(result.skipped) - 5} more")
    lines += [f"note: {flag.text}" for flag in result.warnings]
    parts: list[RenderableType] = [drawn, *(Text(line) for line in lines)]
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


def _totals(result: Degeneracy, columns: list[str]) -> list[list[str]]:
    """What is free beside the layers, and the sum of the column: it is the total below the table."""
    rest = {
        "(parameters outside these layers)": result.free_elsewhere,
        "(fewer output values than parameters)": result.free_from_few_data,
    }
    rows = [(name, free) for name, free in rest.items() if free]
    if len(result.layers) + len(rows) < 2:
        return []
    return [
        [name, *(f"{free:,}" if heading == TOTAL else "" for heading in columns)]
        for name, free in (*rows, ("total", result.free))
    ]


def _how(result: Degeneracy) -> str:
    if result.method == "exact":
        return f"exact: N - rank of the Hessian; {result.structural_free:,} by structure alone"
    if result.free_at_most is not None:
        return f"at least; at most {result.free_at_most:,}: rounding leaves the exact rank open"
    return "by structure, a lower bound"
