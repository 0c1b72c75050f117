"""``strati lineage``: whether networks are related, how, and as a tree."""

from __future__ import annotations

import click

from strati.cli import interrupts
from strati.cli.common import (
    Command,
    Output,
    emit,
    export_option,
    output_options,
    seed_option,
    work_options,
)
from strati.comparison.lineage import LineageConfig
from strati.core.options import default
from strati.jobs.progress import progress


@click.command("lineage", cls=Command)
@click.argument("models", nargs=-1, required=True, metavar="A B [C...]")
@click.option(
    "--level",
    type=float,
    default=default(LineageConfig, "level"),
    show_default=True,
    help="Two networks count as related at or below this p-value.",
)
@export_option
@work_options()
@seed_option
@output_options
def command(
    models: tuple[str, ...],
    level: float,
    export: str | None,
    out: str | None,
    engine: str,
    address: str | None,
    workers: int | None,
    seed: int,
    output: Output,
) -> None:
    """Find out whether networks were trained independently, and if not, what lies between them.

    Give two networks or more, or a folder of checkpoints.

    \b
    Example:
      strati lineage base.safetensors other.safetensors
      strati lineage checkpoints/ --json family.json
      strati lineage checkpoints/ --out family --workers 8
    """
    from strati.comparison.lineage import expanded, lineage
    from strati.core.files import check_table, export_table
    from strati.io.network import open as open_network

    if export is not None:
        check_table(export)
    config = LineageConfig(level=level, seed=seed, workers=workers)
    networks = [open_network(model) for model in expanded(models)]
    pairs = len(networks) * (len(networks) - 1) // 2
    resume = interrupts.resume_command(kept=out is not None)
    with progress("lineage", pairs, quiet=output.quiet or pairs < 2, resume=resume) as tick:
        family = lineage(*networks, config=config, out=out, engine=engine, address=address, tick=tick)
    if export is not None:
        export_table(family.frame(), export)
    emit(family, output)
