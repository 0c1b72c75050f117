"""``strati scan``: the spectral survey of every weight matrix."""

from __future__ import annotations

from typing import Literal

import click

from strati.cli.common import Output, emit, output_options, seed_option
from strati.run.progress import progress


@click.command("scan")
@click.argument("model")
@click.option(
    "--level",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.01,
    show_default=True,
    help="Chance that the largest eigenvalue of pure noise passes for a spike (Tracy-Widom).",
)
@click.option(
    "--bootstrap",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Goodness-of-fit p-value of each tail from N samples, and rival laws.",
)
@click.option("--eigenvalues", is_flag=True, help="Put all eigenvalues into the JSON.")
@click.option("--split-qkv", is_flag=True, help="Fused query-key-value matrices as three layers.")
@click.option(
    "--conv",
    type=click.Choice(["pool", "flatten"]),
    default="pool",
    show_default=True,
    help="Kernels as their slices, eigenvalues pooled, or as one flattened matrix.",
)
@click.option(
    "--jobs",
    "-j",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Layers worked on at once; 0 for one per processor. The numbers do not depend on it.",
)
@click.option("--export", metavar="FILE", help="Write the table as .csv or .parquet.")
@seed_option
@output_options
def command(
    model: str,
    level: float,
    bootstrap: int,
    eigenvalues: bool,
    split_qkv: bool,
    conv: Literal["pool", "flatten"],
    jobs: int,
    export: str | None,
    seed: int,
    output: Output,
) -> None:
    """Survey every weight matrix of MODEL: norms, ranks, tail, bulk, spikes, quasi-null directions, phase.

    MODEL is a .safetensors file, a Hugging Face directory, a torch file (.pt, .pth, .bin), .npz, .onnx,
    .gguf or Keras .h5, told apart by content. No code from it is ever run.

    \b
    Example:
      strati scan model.safetensors
      strati scan model.safetensors --json scan.json --html scan.html
      strati scan gpt2/ --split-qkv --bootstrap 100 --export layers.csv
    """
    from strati.network.open import open as open_network
    from strati.run.files import check_table, export_table
    from strati.spectra.scan import ScanConfig, scan

    if export is not None:
        check_table(export)
    config = ScanConfig(
        split_qkv=split_qkv,
        conv=conv,
        level=level,
        bootstrap=bootstrap,
        eigenvalues=eigenvalues or output.html is not None,
        seed=seed,
        jobs=jobs,
    )
    network = open_network(model)
    total = len(network.layers(split_qkv=split_qkv, conv=conv))
    with progress("scan", total, quiet=output.quiet) as tick:
        result = scan(network, config, tick=tick)
    if export is not None:
        export_table(result.table, export)
    emit(result, output)
