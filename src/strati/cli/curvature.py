"""``strati curvature``: eigenvalues, trace and effective parameters of a loss's curvature."""

from __future__ import annotations

from typing import Any

import click

from strati.cli.common import (
    Command,
    Output,
    activation_option,
    data_options,
    device_option,
    emit,
    layers_option,
    output_options,
    rows_option,
    seed_option,
    show,
)
from strati.cli.landscape import loss_option, read_problem
from strati.jobs.progress import progress


@click.command("curvature", cls=Command)
@click.argument("model", type=click.Path())
@data_options(required=True)
@activation_option()
@click.option(
    "--matrix",
    type=click.Choice(["hessian", "gauss-newton", "fisher"]),
    default="hessian",
    show_default=True,
    help="Which matrix of second derivatives.",
)
@click.option(
    "--top", type=click.IntRange(min=1), default=10, show_default=True, metavar="K", help="Eigenvalues."
)
@click.option("--per-layer", is_flag=True, help="Also the diagonal block of each layer.")
@loss_option
@rows_option
@layers_option
@device_option
@seed_option
@output_options
def command(
    model: str,
    data: str,
    inputs: str | None,
    targets: str | None,
    activation: Any,
    loss: str | None,
    rows: int | None,
    layers: tuple[str, ...],
    output: Output,
    **options: Any,
) -> None:
    """Spectrum of the curvature of MODEL's loss on DATA: top eigenvalues, trace, density, effective parameters.

    \b
    Example:
      strati curvature model.safetensors --data train.npz
      strati curvature model.safetensors --data train.npz --matrix gauss-newton --top 20 --json curvature.json
    """
    from strati.landscape.curvature import curvature

    problem = read_problem(model, data, inputs, targets, activation=activation, loss=loss, rows=rows)
    with progress("curvature", None, quiet=output.quiet) as tick:
        spectrum = curvature(*problem, rows=rows, layers=layers or None, tick=tick, **options)
    emit(spectrum, output)
    if not output.quiet and output.json != "-":
        show(f"next: strati llc {model} --data {data}")
