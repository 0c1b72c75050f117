"""``strati explain``: what a code, state, phase, metric or column means."""

from __future__ import annotations

import click

from strati.cli.common import Command, Output, emit, output_options


@click.command("explain", cls=Command)
@click.argument("name", required=False)
@output_options
def command(name: str | None, output: Output) -> None:
    """Explain NAME: a warning's code, a layer's state or phase, a metric or a column of a table.

    Says what it is, what to do about it, how reliable it is and where it is documented. Without NAME it lists every
    name.

    \b
    Example:
      strati explain noise-like
      strati explain alpha
      strati explain
    """
    from strati.explain import explain

    emit(explain(name), output)
