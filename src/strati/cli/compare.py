"""``strati compare``: the same layers of two or more networks side by side."""

from __future__ import annotations

from pathlib import Path

import click

from strati.cli.common import Output, emit, output_options
from strati.run.progress import progress


@click.command("compare")
@click.argument("models", nargs=-1, required=True, metavar="A B [C...]")
@click.option("--series", is_flag=True, help="The networks are checkpoints of one training run, in order.")
@click.option("--eigenvalues", is_flag=True, help="Keep the eigenvalues in the JSON.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Layers analysed at once.")
@click.option("--export", metavar="FILE", help="Write the table as .csv or .parquet.")
@output_options
def command(
    models: tuple[str, ...], series: bool, eigenvalues: bool, jobs: int, export: str | None, output: Output
) -> None:
    """Compare the layers of two or more networks: what changed, and where.

    \b
    Example:
      strati compare base.safetensors tuned.safetensors
      strati compare --series step-*.safetensors --html run.html
    """
    from strati.network.open import open as open_network
    from strati.run.files import check_table, export_table
    from strati.spectra.comparing.compare import compare

    if len(models) < 2:
        raise click.UsageError("give two networks or more")
    if export is not None:
        check_table(export)
    networks = [open_network(Path(m)) for m in models]
    total = sum(len(n.layers()) for n in networks)
    with progress("compare", total, quiet=output.quiet) as tick:
        keep = eigenvalues or output.html is not None
        result = compare(*networks, series=series, eigenvalues=keep, jobs=jobs, tick=tick)
    if export is not None:
        export_table(result.frame(), export)
    emit(result, output)
