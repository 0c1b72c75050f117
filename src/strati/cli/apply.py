"""``strati apply``: write the network that a plan makes, and measure it."""

from __future__ import annotations

from typing import Any

import click

from strati.cli import common
from strati.jobs.progress import progress


@click.command("apply", cls=common.Command)
@click.argument("plan", metavar="PLAN")
@click.argument("model", metavar="MODEL")
@common.option("--out folder DIR", "A new folder for the network.", required=True)
@common.data_options(required=False)
@common.calibration_option
@common.option(
    "--factored", "Store truncated layers as two smaller matrices (load with strati.load_factored)."
)
@common.option(
    "--packed",
    "Store quantised layers as packed integers (compressed-tensors; transformers and vLLM load them).",
)
@common.option(
    "--heal STEPS",
    "Train a LoRA on the data for so many steps; reports the loss on held-out rows before and after.",
    click.IntRange(1),
)
@common.output_options
def command(
    plan: str,
    model: str,
    folder: str,
    data: str | None,
    inputs: str | None,
    targets: str | None,
    heal: int | None,
    output: common.Output,
    **options: Any,
) -> None:
    """Write the network that PLAN (the JSON of strati plan) makes of MODEL, then measure it.

    The network keeps its format; a Hugging Face directory's tokenizer and config come along. The original is only read.

    \b
    Example:
      strati plan measured --action truncate --budget parameters=0.8 --json plan.json
      strati apply plan.json model/ --out small
    """
    from strati.interventions.compress.apply import apply

    rows = common.named_data(data, inputs, targets)
    with progress("apply", None if heal is None else heal + 2, quiet=output.quiet) as tick:
        written = apply(plan, model, out=folder, data=rows, heal=heal or 0, tick=tick, **options)
    following = f"inspect {folder}" if options["factored"] else f"compare {model} {folder}"
    common.emit(written, output, f"strati {following}")
