"""``strati degeneracy``: how many parameters a network really uses on given data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from strati.cli import common
from strati.cli.landscape import LOSSES, sampling_options
from strati.jobs.progress import progress
from strati.landscape.llc.config import LLCConfig


@click.command("degeneracy", cls=common.Command)
@common.source_options
@common.option("--epsilon EPS", "Also count directions that change the outputs by less than EPS.", float)
@click.option(
    "--exact/--structural",
    "exact",
    default=None,
    help="Count exactly (slow) or use a fast lower bound.  [default: exact where it takes seconds]",
)
@common.option("--llc want_llc", "Sample the local learning coefficient.")
@common.option("--scales want_scales", "Effective parameters over a ladder of loss scales.")
@common.option(
    "--loss",
    "Loss of --llc and --scales; mse and cross_entropy need targets y in the data.  "
    "[default: behavioural-kl for language models, else behavioural-mse]",
    LOSSES,
)
@sampling_options
@common.option(
    "--sample-rows", "Use only the first N rows for --llc and --scales.  [default: all]", click.IntRange(2)
)
@common.layers_option
@common.device_option
@common.seed_option
@common.output_options
def command(
    source: common.Source,
    epsilon: float | None,
    exact: bool | None,
    want_llc: bool,
    want_scales: bool,
    loss: str | None,
    sample_rows: int | None,
    layers: tuple[str, ...] | None,
    output: common.Output,
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
    config = LLCConfig(**sampling)
    network, arrays = source.read()
    from strati.landscape.counts.degeneracy import DegeneracyConfig, degeneracy

    with progress("counting", None, quiet=output.quiet) as tick:
        options = DegeneracyConfig(epsilon, exact, layers, config.seed, config.device)
        result = degeneracy(network, arrays.x, config=options, tick=tick)
    loss = loss or ("behavioural-kl" if hasattr(network, "save_pretrained") else "behavioural-mse")
    problem = common.Problem(network, loss, common.labelled(arrays, loss, sample_rows))
    if want_llc:
        result = replace(result, llc=common.sample_llc(problem, output, config=config))
    if want_scales:
        from strati.landscape.llc.scales import effective_parameters

        with progress("loss scales", None, quiet=output.quiet) as tick:
            scales = effective_parameters(network, problem.data, loss=loss, config=config, tick=tick)
        result = replace(result, scales=scales)
    common.emit(result, output, f"strati {'basis' if want_llc else 'llc'} {source}")
