"""``strati compare``: the same layers of two or more networks side by side."""

from __future__ import annotations

import click

from strati.cli import interrupts
from strati.cli.common import (
    Output,
    emit,
    estimate_option,
    layers_option,
    output_options,
    resume_options,
    seed_option,
    workers_option,
)
from strati.run.progress import progress
from strati.spectra.comparing.compare import CompareConfig


@click.command("compare")
@click.argument("models", nargs=-1, required=True, metavar="A B [C...]")
@click.option("--series", is_flag=True, help="The networks are checkpoints of one training run, in order.")
@click.option(
    "--merge", is_flag=True, help="The last network is a merge of the others: estimate the mixture."
)
@click.option("--eigenvalues", is_flag=True, help="Keep the eigenvalues in the JSON.")
@layers_option
@resume_options
@workers_option(CompareConfig)
@click.option("--export", metavar="FILE", help="Write the table as .csv or .parquet.")
@estimate_option
@seed_option
@output_options
def command(
    models: tuple[str, ...],
    series: bool,
    merge: bool,
    eigenvalues: bool,
    layers: tuple[str, ...],
    out: str | None,
    engine: str,
    address: str | None,
    workers: int,
    export: str | None,
    estimate: bool,
    seed: int,
    output: Output,
) -> None:
    """Compare the layers of two or more networks: what changed, and where.

    \b
    Example:
      strati compare base.safetensors tuned.safetensors
      strati compare --merge parent-a/ parent-b/ merged/
      strati compare base-7b/ tuned-7b/ --out compare-7b
      strati compare --series step-*.safetensors --html run.html
    """
    from strati.network.open import open as open_network
    from strati.run.files import check_table, export_table
    from strati.spectra.comparing.compare import compare

    if len(models) < 2 + merge:
        raise click.UsageError(
            "give the parents, then the merged network" if merge else "give two networks or more"
        )
    if export is not None:
        check_table(export)
    config = CompareConfig(
        series=series,
        merge=merge,
        eigenvalues=eigenvalues or output.html is not None,
        seed=seed,
        layers=layers,
        workers=workers,
    )
    networks = [open_network(m) for m in models]
    if estimate:
        from strati.network.select import select
        from strati.spectra.estimate import estimate_scan

        chosen = [select(n.layers(), layers) for n in networks]
        # Each network's own spectra, and those of what changed between the first and each of the others.
        work = [layer for part in (*chosen, *chosen[1:]) for layer in part]
        emit(estimate_scan(", ".join(models), work, workers=workers, resumable=out is not None), output)
        return
    total = sum(len(n.layers()) for n in networks)
    resume = interrupts.resume_command(kept=out is not None)
    with progress("compare", total, quiet=output.quiet, resume=resume) as tick:
        result = compare(*networks, config=config, out=out, engine=engine, address=address, tick=tick)
    if export is not None:
        export_table(result.frame(), export)
    emit(result, output)
