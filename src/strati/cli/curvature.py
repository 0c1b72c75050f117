"""``strati curvature``: eigenvalues, trace and effective parameters of a loss's curvature."""

from __future__ import annotations

from typing import Any

import click

from strati.cli import common
from strati.cli.landscape import loss_option
from strati.jobs.progress import progress


@click.command("curvature", cls=common.Command)
@common.source_options
@common.option(
    "--matrix",
    "Which matrix of second derivatives.",
    ("hessian", "gauss-newton", "fisher"),
    default="hessian",
)
@common.option("--top K", "Eigenvalues.", click.IntRange(1), default=10)
@common.option("--per-layer", "Also the diagonal block of each layer.")
@loss_option
@common.rows_option
@common.layers_option
@common.device_option
@common.seed_option
@common.output_options
def command(
    source: common.Source, loss: str | None, rows: int | None, output: common.Output, **options: Any
) -> None:
    """Spectrum of the curvature of MODEL's loss on DATA: top eigenvalues, trace, density, effective parameters.

    \b
    Example:
      strati curvature model.safetensors --data train.npz
      strati curvature model.safetensors --data train.npz --matrix gauss-newton --top 20 --json curvature.json
    """
    from strati.landscape.curvature import curvature

    problem = source.problem(loss, rows)
    with progress("curvature", None, quiet=output.quiet) as tick:
        spectrum = curvature(*problem, rows=rows, tick=tick, **options)
    common.emit(spectrum, output, f"strati llc {source}")
