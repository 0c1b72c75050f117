"""What a terminal shows of a degeneracy count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strati.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strati.landscape.count import Degeneracy


def degeneracy_summary(result: Degeneracy) -> RenderableType:
    """A table per layer, the totals, and the sentence."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Free directions of each layer's weights and bias", title_justify="left")
    table.add_column("layer", overflow="fold")
    for heading in (
        "matrix", "rank\nact.", "rank\nJac.", "dead", "sync.\nblocks",
        "free:\nact.", "free:\nJac.", "free:\nfiring", "free:\nsync.", "free\nonce",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    if result.epsilon is not None:
        table.add_column(f"free at\n{result.epsilon:g}", justify="right", no_wrap=True)
    for c in result.layers:
        cells = [
            printable(c.name, 48), f"{c.outputs}x{c.inputs}", str(c.activation_rank), str(c.jacobian_rank),
            str(c.dead), str(c.synchronised_blocks), f"{c.free_from_activations:,}", f"{c.free_from_jacobians:,}",
            f"{c.free_from_firing:,}", f"{c.free_from_synchrony:,}", f"{c.free:,}",
        ]  # fmt: skip
        if c.at_epsilon is not None:
            cells.append(f"{c.at_epsilon.free:,}")
        table.add_row(*(Text(cell) for cell in cells))
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


def _how(result: Degeneracy) -> str:
    if result.method == "exact":
        return f"exact: N - rank of the Hessian; {result.structural_free:,} by structure alone"
    return "by structure, a lower bound"
