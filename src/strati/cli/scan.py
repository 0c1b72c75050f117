"""``strati scan``: the spectral survey of every weight matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import click

from strati.cli import interrupts
from strati.cli.common import (
    Command,
    Output,
    device_option,
    emit,
    estimate_option,
    export_option,
    layers_option,
    output_options,
    seed_option,
    table_options,
    work_options,
)
from strati.core.errors import StoppedError
from strati.core.options import default
from strati.jobs.progress import Sizes, progress
from strati.spectra.scan import ScanConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strati.core.display import TableOptions
    from strati.io.layers import Layer


@click.command("scan", cls=Command)
@click.argument("model")
@click.option(
    "--level",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=default(ScanConfig, "level"),
    show_default=True,
    help="False-positive rate of the spike test.",
)
@click.option(
    "--bootstrap",
    type=click.IntRange(0),
    default=default(ScanConfig, "bootstrap"),
    metavar="N",
    help="Test the power-law fit with N bootstrap samples and compare it with other distributions.",
)
@click.option("--eigenvalues", is_flag=True, help="Put all eigenvalues into the JSON.")
@click.option(
    "--htsr", is_flag=True, help="Also traps, erg_gap, Hill and FARMS exponents, localisation and more."
)
@click.option("--heads", is_flag=True, help="Add two rows for every attention head: QK and OV.")
@click.option("--composition", is_flag=True, help="With p-values: which heads read what earlier heads write.")
@click.option("--tokens", is_flag=True, help="List the under-trained tokens of embedding and head.")
@click.option("--split-qkv", is_flag=True, help="Treat fused query-key-value matrices as three layers.")
@click.option(
    "--conv",
    type=click.Choice(["pool", "flatten"]),
    default=default(ScanConfig, "conv"),
    show_default=True,
    help="Convolutions: pool the k x k slices, or flatten to one matrix.",
)
@layers_option
@work_options()
@device_option
@estimate_option
@export_option
@table_options
@seed_option
@output_options
def command(
    model: str,
    level: float,
    bootstrap: int,
    eigenvalues: bool,
    htsr: bool,
    heads: bool,
    composition: bool,
    tokens: bool,
    split_qkv: bool,
    conv: Literal["pool", "flatten"],
    layers: tuple[str, ...],
    out: str | None,
    engine: str,
    address: str | None,
    workers: int | None,
    device: str | None,
    estimate: bool,
    export: str | None,
    table: TableOptions,
    seed: int,
    output: Output,
) -> None:
    """Say which weight matrices of MODEL have learned, look random or are broken, and measure each one.

    MODEL is a .safetensors file, a Hugging Face directory, a torch file (.pt, .pth, .bin), .npz, .onnx, .gguf or Keras
    .h5 (the format is detected automatically; the file is never executed), or [ORG/]NAME[@REVISION] in the local
    Hugging Face cache.

    \b
    Example:
      strati scan model.safetensors
      strati scan model.safetensors --json scan.json --html scan.html
      strati scan model.safetensors --columns all --sort -stable_rank
      strati scan gpt2/ --split-qkv --bootstrap 100 --export layers.csv
      strati scan gpt2/ --heads --layers block:3
      strati scan gpt2/ --tokens
      strati scan llama-7b/ --estimate
      strati scan llama-7b/ --out scan-7b --workers 8
    """
    from strati.core.files import check_table, export_table
    from strati.io.network import open as open_network
    from strati.spectra.htsr import FIELDS
    from strati.spectra.scan import scan, select_matrices

    if export is not None:
        check_table(export)
    config = ScanConfig(
        split_qkv=split_qkv,
        conv=conv,
        level=level,
        bootstrap=bootstrap,
        eigenvalues=eigenvalues or output.html is not None,
        htsr=htsr or table.columns == ("all",) or not set(FIELDS).isdisjoint(table.columns),
        heads=heads,
        composition=composition,
        tokens=tokens,
        seed=seed,
        workers=workers,
        device=device,
    )
    network = open_network(model)
    selected, _ = select_matrices(network, config, layers)
    if estimate:
        from strati.spectra.layerwise import estimate_scan

        emit(estimate_scan(model, selected, workers=workers, resumable=out is not None), output)
        return
    resume = interrupts.resume_command(kept=out is not None)
    try:
        with progress(
            "scan", len(selected), quiet=output.quiet, sizes=_sizes(selected), resume=resume
        ) as tick:
            network_scan = scan(
                network, config=config, layers=layers, out=out, engine=engine, address=address, tick=tick
            )
    except KeyboardInterrupt:
        if out is None:
            raise
        raise StoppedError("stopped before the first layer was done", f"resume with {resume}") from None
    if export is not None:
        export_table(network_scan.frame(), export)
    emit(replace(network_scan, view=table), output)


def _sizes(layers: Sequence[Layer]) -> Sizes:
    from strati.spectra.layerwise import stored_bytes, work

    return Sizes(
        work={layer.name: sum(work(layer)) for layer in layers},
        bytes={layer.name: stored_bytes(layer) for layer in layers},
    )
