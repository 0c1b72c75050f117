"""``strati compare``: the same layers of two or more networks side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from strati.cli import common, interrupts
from strati.comparison.compare import CompareConfig
from strati.core.errors import BadInputError
from strati.jobs.progress import progress

if TYPE_CHECKING:
    from strati.core.display import TableOptions


@click.command("compare", cls=common.Command)
@click.argument("models", nargs=-1, required=True, metavar="A B [C...]")
@common.option("--series", "The networks are checkpoints of one training run, in order.")
@common.option("--merge", "The last network is a merge of the others: estimate the mixture.")
@common.option("--align OUT", "Write the last network with its units numbered as in the first (new path).")
@common.option(
    "--extract OUT",
    "Write the change from A to B as a PEFT adapter of A, with the ranks that lie beyond noise (new path).",
)
@common.option("--path along", "Also the loss along the straight line between A and B; needs --data.")
@common.data_options(required=False)
@common.activation_option(None)
@common.option("--eigenvalues", "Keep the eigenvalues in the JSON.")
@common.option("--heads", "Also QK and OV of every attention head, whatever basis they are stored in.")
@common.layers_option
@common.work_options()
@common.export_option
@common.estimate_option
@common.table_options
@common.seed_option
@common.output_options
def command(
    models: tuple[str, ...],
    align: str | None,
    extract: str | None,
    along: bool,
    data: str | None,
    inputs: str | None,
    targets: str | None,
    out: str | None,
    engine: str,
    address: str | None,
    estimate: bool,
    table: TableOptions,
    output: common.Output,
    **options: Any,
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
    from strati.interventions.compress.rewrite_checkpoint import write_renumbered
    from strati.io.network import open as open_network

    options["eigenvalues"] |= output.html is not None
    config = CompareConfig(**options)
    several = config.series or config.merge
    if len(models) < 2 + config.merge:
        raise click.UsageError(
            "give the parents, then the merged network" if config.merge else "give two networks or more"
        )
    if align is not None and several:
        raise click.UsageError("--align compares two networks; leave out --series and --merge")
    if extract is not None and (len(models) > 2 or several):
        raise click.UsageError("--extract takes two networks, the base and its fine-tune")
    for path in (align, extract):
        if path is not None and Path(path).exists():
            raise BadInputError(path, "exists already; give a new path")
    if along != (data is not None):
        raise click.UsageError(
            "--path and --data go together: the loss along the path is measured on the data"
        )
    if along and (len(models) > 2 or several):
        raise click.UsageError("--path leads from one network to one other; give two")
    networks = [open_network(m) for m in models]
    if estimate:
        from strati.io.layers import select
        from strati.spectra.layerwise import estimate_scan

        layer_lists = [select(n.layers(), config.layers) for n in networks]
        # Each network's own spectra, and those of what changed between the first and each of the others.
        work = [layer for part in (*layer_lists, *layer_lists[1:]) for layer in part]
        cost = estimate_scan(", ".join(models), work, workers=config.workers, resumable=out is not None)
        common.emit(cost, replace(output, export=None))
        return
    total = sum(len(n.layers()) for n in networks)
    resume = interrupts.resume_command(kept=out is not None)
    with progress("compare", total, quiet=output.quiet, resume=resume) as tick:
        result = compare(*networks, config=config, out=out, engine=engine, address=address, tick=tick)
    if along:
        from strati.tracking.measure import loss_path

        rows = common.named_data(data, inputs, targets)
        result = replace(result, path=loss_path(networks[0], networks[1], rows, activation=config.activation))
    if align is not None:
        write_renumbered(networks[-1], result.unit_order, align)
    common.emit(replace(result, view=table), output)
    if extract is not None:
        from strati.comparison.extract_adapter import extract_adapter
        from strati.core.display import Paragraph

        adapter = extract_adapter(networks[0], networks[1], extract, seed=config.seed)
        if output.speaks:
            common.show(Paragraph(adapter.text()))
