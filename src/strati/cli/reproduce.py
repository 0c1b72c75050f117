"""``strati reproduce``: a paper's numbers beside ours."""

from __future__ import annotations

import click

from strati.cli.common import Output, emit, output_options, seed_option, show
from strati.run.progress import progress


@click.command("reproduce")
@click.argument("name", required=False)
@click.option("--quick", is_flag=True, help="Fewer networks or draws: minutes instead of an hour.")
@click.option(
    "--out", "folder", default="out", show_default=True, metavar="DIR", help="Figures and resumable work."
)
@seed_option
@output_options
def command(name: str | None, quick: bool, folder: str, seed: int, output: Output) -> None:
    """Redo a paper's table or figure NAME, the paper's number beside ours; no NAME lists them.

    \b
    Example:
      strati reproduce
      strati reproduce alpha-of-random-layers --quick
    """
    from strati.papers.registry import ENTRIES, reproduce

    if name is None:
        from rich.table import Table

        table = Table("name", "paper", "what")
        for key, entry in ENTRIES.items():
            table.add_row(key, entry.paper, entry.summary)
        show(table)
        return
    with progress(f"reproduce {name}", None, quiet=output.quiet) as tick:
        result = reproduce(name, quick=quick, seed=seed, folder=folder, tick=tick)
    emit(result, output)
