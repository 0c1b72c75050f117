"""``strati compare``: the same layers of two or more networks side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from strati.cli import interrupts
from strati.cli.common import (
    Command,
    Output,
    activation_option,
    data_options,
    emit,
    estimate_option,
    export_option,
    layers_option,
    named_data,
    output_options,
    seed_option,
    show,
    table_options,
    work_options,
)
from strati.comparison.compare import CompareConfig
from strati.core.errors import BadInputError
from strati.jobs.progress import progress

if TYPE_CHECKING:
    from strati.core.display import TableOptions


@click.command("compare", cls=Command)
@click.argument("models", nargs=-1, required=True, metavar="A B [C...]")
@click.option("--series", is_flag=True, help="The networks are checkpoints of one training run, in order.")
@click.option(
    "--merge", is_flag=True, help="The last network is a merge of the others: estimate the mixture."
)
@click.option(
    "--align",
    metavar="OUT",
    help="Write the last network with its units numbered as in the first (new path).",
)
@click.option(
    "--extract",
    metavar="OUT",
    help="Write the change from A to B as a PEFT adapter of A, with the ranks that lie beyond noise (new path).",
)
@click.option(
    "--path",
    "along",
    is_flag=True,
    help="Also the loss along the straight line between A and B; needs --data.",
)
@data_options(required=False)
@activation_option(None)
@click.option("--eigenvalues", is_flag=True, help="Keep the eigenvalues in the JSON.")
@click.option(
    "--heads", is_flag=True, help="Also QK and OV of every attention head, whatever basis they are stored in."
)
@layers_option
@work_options()
@export_option
@estimate_option
@table_options
@seed_option
@output_options
def command(
    models: tuple[str, ...],
    series: bool,
    merge: bool,
    align: str | None,
    extract: str | None,
    along: bool,
    data: str | None,
    inputs: str | None,
    targets: str | None,
    activation: str | None,
    eigenvalues: bool,
    heads: bool,
    layers: tuple[str, ...],
    out: str | None,
    engine: str,
    address: str | None,
    workers: int | None,
    export: str | None,
    estimate: bool,
    table: TableOptions,
    seed: int,
    output: Output,
) -> None:
    """Compare the layers of two or more networks: what changed, and where.

    \b
    Example:
      strati compare base.safetensors tuned.safetensors
      strati compare --merge parent-a/ parent-b/ merged/
      strati compare base-7b/ tuned-7b/ --out compare-7b
      strati compare a.safetensors b.safetensors --align b-as-a.safetensors
      strati compare base/ tuned/ --extract adapter
      strati compare base/ tuned/ --heads
      strati compare a.safetensors b.safetensors --path --data data.npz
      strati compare --series step-*.safetensors --html run.html
    """
    from strati.comparison.compare import compare
    from strati.core.files import check_table, export_table
    from strati.interventions.compress.rewrite_checkpoint import write_renumbered
    from strati.io.network import open as open_network

    if len(models) < 2 + merge:
        raise click.UsageError(
            "give the parents, then the merged network" if merge else "give two networks or more"
        )
    if export is not None:
        check_table(export)
    if align is not None and (series or merge):
        raise click.UsageError("--align compares two networks; leave out --series and --merge")
    if align is not None and Path(align).exists():
        raise BadInputError(align, "exists already; give a new path")
    if extract is not None and (len(models) > 2 or series or merge):
        raise click.UsageError("--extract takes two networks, the base and its fine-tune")
    if extract is not None and Path(extract).exists():
        raise BadInputError(extract, "exists already; give a new path")
    if along != (data is not None):
        raise click.UsageError(
            "--path and --data go together: the loss along the path is measured on the data"
        )
    if along and (len(models) > 2 or series or merge):
        raise click.UsageError("--path leads from one network to one other; give two")
    config = CompareConfig(
        series=series,
        merge=merge,
        eigenvalues=eigenvalues or output.html is not None,
        heads=heads,
        activation=activation,
        seed=seed,
        layers=layers,
        workers=workers,
    )
    networks = [open_network(m) for m in models]
    if estimate:
        from strati.io.layers import select
        from strati.spectra.layerwise import estimate_scan

        layer_lists = [select(n.layers(), layers) for n in networks]
        # Each network's own spectra, and those of what changed between the first and each of the others.
        work = [layer for part in (*layer_lists, *layer_lists[1:]) for layer in part]
        emit(estimate_scan(", ".join(models), work, workers=workers, resumable=out is not None), output)
        return
    total = sum(len(n.layers()) for n in networks)
    resume = interrupts.resume_command(kept=out is not None)
    with progress("compare", total, quiet=output.quiet, resume=resume) as tick:
        result = compare(*networks, config=config, out=out, engine=engine, address=address, tick=tick)
    if along:
        from strati.tracking.measure import loss_path

        result = replace(
            result,
            path=loss_path(
                networks[0], networks[1], named_data(data, inputs, targets), activation=activation
            ),
        )
    if align is not None:
        write_renumbered(networks[-1], result.unit_order, align)
    if export is not None:
        export_table(result.frame(), export)
    emit(replace(result, view=table), output)
    if extract is not None:
        from strati.comparison.extract_adapter import extract_adapter
        from strati.core.display import Paragraph

        adapter = extract_adapter(networks[0], networks[1], extract, seed=seed)
        if not output.quiet and output.json != "-":
            show(Paragraph(adapter.text()))
