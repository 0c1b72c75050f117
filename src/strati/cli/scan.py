"""``strati scan``: the spectral survey of every weight matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from strati.cli import common, interrupts
from strati.core.errors import StoppedError
from strati.jobs.progress import Sizes, progress
from strati.spectra.scan import ScanConfig

if TYPE_CHECKING:
    from strati.core.display import TableOptions


@click.command("scan", cls=common.Command)
@click.argument("model")
@common.option("--level", "False-positive rate of the spike test.", common.PROBABILITY, ScanConfig)
@common.option(
    "--bootstrap",
    "Test the power-law fit with N bootstrap samples and compare it with other distributions.",
    click.IntRange(0),
    ScanConfig,
)
@common.option("--eigenvalues", "Put all eigenvalues into the JSON.")
@common.option("--htsr", "Also traps, erg_gap, Hill and FARMS exponents, localisation and more.")
@common.option("--heads", "Add two rows for every attention head: QK and OV.")
@common.option("--composition", "With p-values: which heads read what earlier heads write.")
@common.option("--tokens", "List the under-trained tokens of embedding and head.")
@common.option("--split-qkv", "Treat fused query-key-value matrices as three layers.")
@common.conv_option
@common.layers_option
@common.work_options()
@common.device_option
@common.estimate_option
@common.export_option
@common.table_options
@common.seed_option
@common.output_options
def command(
    model: str,
    layers: tuple[str, ...] | None,
    out: str | None,
    engine: str,
    address: str | None,
    estimate: bool,
    table: TableOptions,
    output: common.Output,
    **options: Any,
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
    from strati.io.network import open as open_network
    from strati.spectra.htsr import FIELDS
    from strati.spectra.layerwise import estimate_scan, stored_bytes, work
    from strati.spectra.scan import scan, select_matrices

    options["eigenvalues"] |= output.html is not None
    options["htsr"] |= table.columns == ("all",) or not set(FIELDS).isdisjoint(table.columns)
    config = ScanConfig(**options)
    network = open_network(model)
    selected, _ = select_matrices(network, config, layers)
    if estimate:
        cost = estimate_scan(model, selected, workers=config.workers, resumable=out is not None)
        common.emit(cost, replace(output, export=None))
        return
    resume = interrupts.resume_command(kept=out is not None)
    sizes = Sizes(
        work={layer.name: sum(work(layer)) for layer in selected},
        bytes={layer.name: stored_bytes(layer) for layer in selected},
    )
    try:
        with progress("scan", len(selected), quiet=output.quiet, sizes=sizes, resume=resume) as tick:
            network_scan = scan(
                network, config=config, layers=layers, out=out, engine=engine, address=address, tick=tick
            )
    except KeyboardInterrupt:
        if out is None:
            raise
        raise StoppedError("stopped before the first layer was done", f"resume with {resume}") from None
    common.emit(replace(network_scan, view=table), output)
