"""``strati apply``: write the network that a plan makes, and measure it."""

from __future__ import annotations

import click

from strati.cli.common import (
    Command,
    Output,
    calibration_option,
    data_options,
    emit,
    named_data,
    output_options,
    show,
)
from strati.jobs.progress import progress


@click.command("apply", cls=Command)
@click.argument("plan", metavar="PLAN")
@click.argument("model", metavar="MODEL")
@click.option("--out", "folder", required=True, metavar="DIR", help="A new folder for the network.")
@data_options(required=False)
@calibration_option
@click.option(
    "--factored",
    is_flag=True,
    help="Store truncated layers as two smaller matrices (load with strati.load_factored).",
)
@click.option(
    "--packed",
    is_flag=True,
    help="Store quantised layers as packed integers (compressed-tensors; transformers and vLLM load them).",
)
@click.option(
    "--heal",
    type=click.IntRange(1),
    metavar="STEPS",
    help="Train a LoRA on the data for so many steps; reports the loss on held-out rows before and after.",
)
@output_options
def command(
    plan: str,
    model: str,
    folder: str,
    data: str | None,
    inputs: str | None,
    targets: str | None,
    calibration: str | None,
    factored: bool,
    packed: bool,
    heal: int | None,
    output: Output,
) -> None:
    """Write the network that PLAN (the JSON of strati plan) makes of MODEL, then measure it.

    The network keeps its format; a Hugging Face directory's tokenizer and config come along. The original is only read.

    \b
    Example:
      strati plan measured --action truncate --budget parameters=0.8 --json plan.json
      strati apply plan.json model/ --out small
    """
    from strati.interventions.compress.apply import apply

    measured_on = named_data(data, inputs, targets)
    with progress("apply", None if heal is None else heal + 2, quiet=output.quiet) as tick:
        written = apply(
            plan,
            model,
            out=folder,
            data=measured_on,
            factored=factored,
            packed=packed,
            heal=heal or 0,
            calibration=calibration,
            tick=tick,
        )
    emit(written, output)
    if not output.quiet and output.json != "-":
        show(f"next: strati compare {model} {folder}" if not factored else f"next: strati inspect {folder}")
