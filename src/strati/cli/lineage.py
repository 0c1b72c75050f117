"""``strati lineage``: whether networks are related, how, and as a tree."""

from __future__ import annotations

from typing import Any

import click

from strati.cli import common, interrupts
from strati.comparison.lineage import LineageConfig
from strati.jobs.progress import progress


@click.command("lineage", cls=common.Command)
@click.argument("models", nargs=-1, required=True, metavar="A B [C...]")
@common.option("--level", "Two networks count as related at or below this p-value.", float, LineageConfig)
@common.export_option
@common.work_options()
@common.seed_option
@common.output_options
def command(
    models: tuple[str, ...],
    out: str | None,
    engine: str,
    address: str | None,
    output: common.Output,
    **options: Any,
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
    from strati.io.network import open as open_network

    config = LineageConfig(**options)
    networks = [open_network(model) for model in expanded(models)]
    pairs = len(networks) * (len(networks) - 1) // 2
    resume = interrupts.resume_command(kept=out is not None)
    with progress("lineage", pairs, quiet=output.quiet or pairs < 2, resume=resume) as tick:
        family = lineage(*networks, config=config, out=out, engine=engine, address=address, tick=tick)
    common.emit(family, output)
