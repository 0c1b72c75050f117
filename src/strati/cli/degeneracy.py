"""``strati degeneracy``: how many parameters a network really uses on given data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import click

from strati.cli.common import Output, device_option, emit, layers_option, output_options, seed_option
from strati.landscape.sampling.config import LLCConfig, Sampler
from strati.network.module import ActivationName, ModuleConfig
from strati.options import default
from strati.run.progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_LOSSES = ("behavioural-mse", "behavioural-kl", "mse", "cross_entropy")
_NAMES = get_args(ActivationName)


def sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of ``--llc`` and ``--scales``; names and defaults are those of ``LLCConfig``."""

    def option(name: str, kind: Any, text: str, without: str | None = None) -> Any:
        value = default(LLCConfig, name)
        shown = {"show_default": True, "default": value} if without is None else {}
        note = "" if without is None else f"  [default: {without}]"
        flag = "--" + name.replace("_", "-")
        metavar = None if isinstance(kind, click.Choice) else "N" if isinstance(kind, click.IntRange) else "X"
        return click.option(flag, type=kind, metavar=metavar, help=text + note, **shown)

    positive = click.FloatRange(min=0, min_open=True)
    options = (
        option("sampler", click.Choice([str(s) for s in Sampler]), "How --llc and --scales sample."),
        option("chains", click.IntRange(min=2), "Independent chains.", "4 to 64, as affordable"),
        option("draws", click.IntRange(min=10), "Draws kept per chain.", "from 100 on, as affordable"),
        option("warmup", click.IntRange(min=10), "Iterations before the first kept draw."),
        option("nbeta", positive, "Inverse temperature of --llc.", "n / ln n"),
        option(
            "gamma",
            positive,
            "Localisation; set it to compare networks.",
            "1; above 2,500 parameters N / |theta*|^2",
        ),
        option("seconds", positive, "Sampling time to aim at; more seconds, smaller error.", "8 to 32"),
        option("batch", click.IntRange(min=1), "Rows per minibatch of SGLD."),
        option("step", positive, "Step size of SGLD.", "calibrated"),
        option("max_rhat", positive, "Give no value above this R-hat."),
    )
    for add in reversed(options):
        function = add(function)
    return function


@click.command("degeneracy")
@click.argument("model", type=click.Path())
@click.option(
    "--data", required=True, type=click.Path(), help="Inputs: .npz (x), .npy or CSV; token ids for LMs."
)
@click.option(
    "--activation",
    type=click.Choice(_NAMES),
    default=default(ModuleConfig, "activation"),
    show_default=True,
    help="Nonlinearity of an MLP; files do not hold it.",
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
@click.option("--llc", "want_llc", is_flag=True, help="Sample the local learning coefficient.")
@click.option(
    "--scales", "want_scales", is_flag=True, help="Effective parameters over a ladder of loss scales."
)
@click.option(
    "--loss",
    type=click.Choice(_LOSSES),
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
    from strati.network.data import read_data
    from strati.network.module import as_module

    config = LLCConfig(seed=seed, device=device, **sampling)
    read = read_data(data)
    x, y = read.x, read.y
    network = as_module(model, activation=activation)
    from strati.landscape.counts.count import DegeneracyConfig, degeneracy

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


def _llc(network: nn.Module, loss: str, data: Any, config: LLCConfig, output: Output) -> Any:
    from strati.landscape.sampling.llc import llc

    with progress("sampling", None, quiet=output.quiet) as tick:
        return llc(network, loss, data, config=config, tick=tick)


def _scales(network: nn.Module, loss: str, data: Any, config: LLCConfig, output: Output) -> Any:
    from strati.landscape.sampling.scales import effective_parameters

    with progress("loss scales", None, quiet=output.quiet) as tick:
        return effective_parameters(network, data, loss=loss, config=config, tick=tick)
