"""``strati degeneracy``: how many parameters a network really uses on given data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from strati.cli.common import Output, emit, output_options, seed_option
from strati.run.progress import progress

if TYPE_CHECKING:
    from torch import nn

_NAMES = ("relu", "leaky_relu", "tanh", "sigmoid", "gelu", "silu", "identity")


@click.command("degeneracy")
@click.argument("model", type=click.Path())
@click.option(
    "--data", required=True, type=click.Path(), help="Inputs: .npz (x), .npy or CSV; token ids for LMs."
)
@click.option(
    "--activation", type=click.Choice(_NAMES), default="relu", show_default=True, help="Of an MLP's layers."
)
@click.option(
    "--epsilon", type=float, metavar="EPS", help="Also count at this scale of the behavioural loss."
)
@click.option(
    "--exact/--structural",
    "exact",
    default=None,
    help="Exact count (slow), or the cheaper lower bound.  [default: exact where it takes seconds]",
)
@click.option(
    "--llc", "want_llc", is_flag=True, help="Sample the local learning coefficient of the behavioural loss."
)
@click.option(
    "--scales", "want_scales", is_flag=True, help="Effective parameters over a ladder of loss scales."
)
@click.option(
    "--sample-rows",
    type=click.IntRange(min=2),
    metavar="N",
    help="Rows that --llc and --scales look at, the first N.  [default: all]",
)
@seed_option
@output_options
def command(
    model: str,
    data: str,
    activation: Any,
    epsilon: float | None,
    exact: bool | None,
    want_llc: bool,
    want_scales: bool,
    sample_rows: int | None,
    seed: int,
    output: Output,
) -> None:
    """Count the parameters that MODEL uses on DATA, layer by layer.

    MODEL is a checkpoint of a multilayer perceptron (its architecture is inferred from the tensors) or a
    local Hugging Face directory; for other networks use strati.degeneracy in Python.

    \b
    Example:
      strati degeneracy model.safetensors --data data.npz
      strati degeneracy model.safetensors --data data.npz --epsilon 1e-3 --llc --json counts.json
    """
    from strati.network.data import read_data
    from strati.network.module import as_module

    x = read_data(data).x
    network = as_module(model, activation=activation)
    x = _fitting(x, tokens=hasattr(network, "get_input_embeddings"))
    from strati.landscape.counts.count import degeneracy

    with progress("counting", None, quiet=output.quiet) as tick:
        result = degeneracy(network, x, epsilon=epsilon, exact=exact, seed=seed, tick=tick)
    if want_llc:
        result = replace(result, llc=_llc(network, x[:sample_rows], seed, output))
    if want_scales:
        result = replace(result, scales=_scales(network, x[:sample_rows], seed, output))
    emit(result, output)


def _fitting(x: Any, *, tokens: bool) -> Any:
    """Whole numbers are tokens to a transformer (CSV has them as real numbers), pixels and the like to others."""
    if tokens:
        whole = x.ndim == 2 and x.dtype.kind == "f" and bool((x == x.round()).all())
        return x.astype("int64") if whole else x
    return x.astype("float32") if x.dtype.kind in "iub" else x


def _llc(network: nn.Module, x: Any, seed: int, output: Output) -> Any:
    from strati.landscape.sampling.llc import llc

    loss = "behavioural-kl" if hasattr(network, "save_pretrained") else "behavioural-mse"
    with progress("sampling", None, quiet=output.quiet) as tick:
        return llc(network, loss, x, seed=seed, tick=tick)


def _scales(network: nn.Module, x: Any, seed: int, output: Output) -> Any:
    from strati.landscape.sampling.scales import effective_parameters

    kind = "kl" if hasattr(network, "save_pretrained") else "mse"
    with progress("loss scales", None, quiet=output.quiet) as tick:
        return effective_parameters(network, x, kind=kind, seed=seed, tick=tick)
