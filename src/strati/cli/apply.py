"""``strati apply``: the network that a plan makes, written and measured."""

from __future__ import annotations

import click

from strati.cli.common import Output, emit, output_options


@click.command("apply")
@click.argument("plan", metavar="PLAN")
@click.argument("model", metavar="MODEL")
@click.option("--out", "folder", required=True, metavar="DIR", help="A new folder for the network.")
@click.option("--data", metavar="DATA", help="Data to measure on; default: the study's own.")
@click.option(
    "--factored", is_flag=True, help="Truncated layers as two matrices (load with strati.load_factored)."
)
@output_options
def command(plan: str, model: str, folder: str, data: str | None, factored: bool, output: Output) -> None:
    """Write the network that PLAN (the JSON of strati plan) makes of MODEL, then measure it.

    The network keeps its format; a Hugging Face directory's tokenizer and config come along. The original is only read.

    \b
    Example:
      strati plan measured --action truncate --budget parameters=0.8 --json plan.json
      strati apply plan.json model/ --out small
    """
    from strati.intervene.apply import apply

    emit(apply(plan, model, out=folder, data=data, factored=factored), output)
