"""``strati degeneracy``: how many parameters a network really uses on given data."""

from __future__ import annotations

import warnings
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
    seed_option,
    show,
)
from strati.cli.landscape import LOSSES, sampling_options
from strati.jobs.progress import progress
from strati.landscape.llc.config import LLCConfig

if TYPE_CHECKING:
    from torch import nn


@click.command("degeneracy", cls=Command)
@click.argument("model", type=click.Path())
@data_options(required=True)
@activation_option()
@click.option(
    "--epsilon",
    type=float,
    metavar="EPS",
    help="Also count directions that change the outputs by less than EPS.",
)
@click.option(
    "--exact/--structural",
    "exact",
    default=None,
    help="Count exactly (slow) or use a fast lower bound.  [default: exact where it takes seconds]",
)
@click.option("--llc", "want_llc", is_flag=True, help="Sample the local learning coefficient.")
@click.option(
    "--scales", "want_scales", is_flag=True, help="Effective parameters over a ladder of loss scales."
)
@click.option(
    "--loss",
    type=click.Choice(LOSSES),
    help="Loss of --llc and --scales; mse and cross_entropy need targets y in the data.  "
    "[default: behavioural-kl for language models, else behavioural-mse]",
)
@sampling_options
@click.option(
    "--sample-rows",
    type=click.IntRange(min=2),
    metavar="N",
    help="Use only the first N rows for --llc and --scales.  [default: all]",
)
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
    epsilon: float | None,
    exact: bool | None,
    want_llc: bool,
    want_scales: bool,
    loss: str | None,
    sample_rows: int | None,
    layers: tuple[str, ...],
    device: str | None,
    seed: int,
    output: Output,
    **sampling: Any,
) -> None:
    """Count the parameters that MODEL uses on DATA, layer by layer.

    MODEL is a checkpoint of a multilayer perceptron (its architecture is inferred from the tensors) or a
    local Hugging Face directory; for other networks use strati.degeneracy in Python.

    \b
    Example:
      strati degeneracy model.safetensors --data data.npz
      strati degeneracy model.safetensors --data data.npz --epsilon 1e-3 --llc --json counts.json
      strati degeneracy model.safetensors --data data.npz --llc --loss cross_entropy --gamma 50 --draws 400
    """
    from strati.io.to_module import as_module

    config = LLCConfig(seed=seed, device=device, **sampling)
    network = as_module(model, activation=activation)
    arrays = read_inputs(data, inputs, targets, network)
    x, y = arrays.x, arrays.y
    from strati.landscape.counts.degeneracy import DegeneracyConfig, degeneracy

    with progress("counting", None, quiet=output.quiet) as tick:
        options = DegeneracyConfig(epsilon, exact, layers or None, seed, device)
        result = degeneracy(network, x, config=options, tick=tick)
    loss = loss or ("behavioural-kl" if hasattr(network, "save_pretrained") else "behavioural-mse")
    rows: Any = x[:sample_rows]
    if y is not None and not loss.startswith("behavioural"):
        rows = (rows, y[:sample_rows])
    if want_llc:
        result = replace(result, llc=_llc(network, loss, rows, config, output))
    if want_scales:
        result = replace(result, scales=_scales(network, loss, rows, config, output))
    emit(result, output)
    if not output.quiet and output.json != "-":
        arguments = f"{model} --data {data}"
        show(f"next: strati {'basis' if want_llc else 'llc'} {arguments}")


def _llc(network: nn.Module, loss: str, data: Any, config: LLCConfig, output: Output) -> Any:
    from strati.landscape.llc.estimate import NoEstimateWarning
    from strati.landscape.llc.llc import llc

    with progress("sampling", None, quiet=output.quiet) as tick, warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEstimateWarning)  # the summary says it
        return llc(network, loss, data, config=config, tick=tick)


def _scales(network: nn.Module, loss: str, data: Any, config: LLCConfig, output: Output) -> Any:
    from strati.landscape.llc.scales import effective_parameters

    with progress("loss scales", None, quiet=output.quiet) as tick:
        return effective_parameters(network, data, loss=loss, config=config, tick=tick)
