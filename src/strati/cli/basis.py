"""``strati basis``: interaction basis, interaction graph and modules of a network on given data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
    read_inputs,
    rows_option,
    seed_option,
    show,
)
from strati.core.files import check_writable
from strati.jobs.progress import progress

if TYPE_CHECKING:
    from torch import nn

    from strati.io.data_files import Data

_POSITIVE = click.FloatRange(0, min_open=True)


@click.command("basis", cls=Command)
@click.argument("model", type=click.Path())
@data_options(required=True)
@activation_option()
@click.option(
    "--kind",
    type=click.Choice(["interaction", "local", "pca", "neuron"]),
    default="interaction",
    show_default=True,
    help="Basis: interaction, local, pca or neuron.",
)
@click.option("--epsilon", type=_POSITIVE, help="Cutoff on squared edges.  [default: 1e-3 of the strongest]")
@click.option("--modules", "number", type=click.IntRange(1), help="Force exactly N modules.", metavar="N")
@click.option(
    "--no-centre", "centre", flag_value=False, default=True, help="Do not subtract mean activations."
)
@click.option(
    "--sites",
    help="Where to read a network that is not an MLP: residual, mlp, or module names with commas "
    "(NAME:input for what goes in).",
)
@rows_option
@layers_option
@device_option
@click.option("--compare", is_flag=True, help="Compare with PCA and neuron bases.")
@click.option(
    "--sparsify",
    metavar="FILE",
    help="Write an equivalent checkpoint with more zero weights (same outputs on DATA).",
)
@seed_option
@output_options
def command(model: str, data: str, output: Output, sparsify: str | None, **options: Any) -> None:
    """Interaction basis, interaction graph and modules of MODEL on DATA.

    MODEL is a checkpoint of a multilayer perceptron or a local Hugging Face directory (DATA are then token
    numbers); for other networks use strati.interaction_basis in Python.

    \b
    Example:
      strati basis model.safetensors --data data.npz
      strati basis model.safetensors --data data.npz --compare --html basis.html
      strati basis model.safetensors --data data.npz --sparsify sparse.safetensors
    """
    if sparsify is not None:
        check_writable(sparsify)
    from strati.io.to_module import as_module

    network = as_module(model, activation=options["activation"])
    arrays = read_inputs(data, options["inputs"], options["targets"], network)
    inputs = _first(arrays, options["rows"])
    if sparsify is not None:
        _sparsify(network, inputs, sparsify, options, output)
    else:
        _survey(network, inputs, options, output)
        if not output.quiet and output.json != "-":
            following = "degeneracy" if options["compare"] else "basis"
            more = "" if options["compare"] else " --compare"
            show(f"next: strati {following} {model} --data {data}{more}")


def _survey(network: nn.Module, inputs: Data, options: dict[str, Any], output: Output) -> None:
    from strati.landscape.basis.ablation import compare_bases
    from strati.landscape.basis.basis import BasisConfig, interaction_basis
    from strati.landscape.basis.graph import interaction_graph
    from strati.landscape.basis.modules import modules

    sites, seed = _sites(options["sites"]), options["seed"]
    with progress("basis", None, quiet=output.quiet) as tick:
        basis = interaction_basis(
            network, inputs.x, options["kind"], centre=options["centre"], sites=sites, seed=seed,
            layers=options["layers"] or None, device=options["device"], tick=tick,
        )  # fmt: skip
        graph = interaction_graph(basis, tick=tick)
        network_modules = modules(
            graph, epsilon=options["epsilon"], number=options["number"], seed=seed, tick=tick
        )
    if options["compare"]:
        network_modules = replace(
            network_modules,
            comparison=compare_bases(network, inputs.x, labels=inputs.y, config=BasisConfig(sites=sites)),
        )
    emit(network_modules, output)


def _sparsify(network: nn.Module, inputs: Data, path: str, options: dict[str, Any], output: Output) -> None:
    from strati.landscape.basis.sparsify import sparsify

    with progress("sparsify", None, quiet=output.quiet) as tick:
        result = sparsify(
            network, inputs.x, layers=options["layers"] or None, device=options["device"], tick=tick
        )
    result.save(path)
    emit(result, output)
    if not output.quiet and output.json != "-":
        show(f"wrote {path}")


def _sites(text: str | None) -> str | list[str] | None:
    if text is None or text in ("residual", "mlp"):
        return text
    return [name.strip() for name in text.split(",") if name.strip()]


def _first(data: Data, rows: int | None) -> Data:
    if rows is None:
        return data
    from strati.evaluate.batches import CONTEXT

    if data.x.ndim == 1:  # token numbers in one line: rows are windows of them
        return replace(data, x=data.x[: rows * CONTEXT])
    return replace(data, x=data.x[:rows], y=None if data.y is None else data.y[:rows])
