"""What ``llc``, ``degeneracy``, ``curvature`` and ``influence`` share: losses, problems, the sampler's options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from strati.cli.common import read_inputs
from strati.core.options import default
from strati.landscape.llc.config import LLCConfig, Sampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from strati.io.data_files import Data

F = TypeVar("F", bound="Callable[..., Any]")

LOSSES = ("behavioural-mse", "behavioural-kl", "mse", "cross_entropy")


loss_option = click.option(
    "--loss",
    type=click.Choice(LOSSES),
    help="Loss of the network.  [default: cross_entropy for classes and tokens, mse for other targets, "
    "behavioural-mse without targets]",
)


class Problem(NamedTuple):
    """A network, the name of a loss, and data as the functions of the landscape take them."""

    network: nn.Module
    loss: str
    data: Any


def read_problem(
    model: str,
    data: str,
    inputs: str | None,
    targets: str | None,
    *,
    activation: Any,
    loss: str | None,
    rows: int | None,
) -> Problem:
    """Open a network and read its data; the loss is :func:`default_loss` unless it is given."""
    from strati.io.to_module import as_module

    network = as_module(model, activation=activation)
    arrays = read_inputs(data, inputs, targets, network)
    loss = loss or default_loss(network, arrays)
    return Problem(network, loss, labelled(arrays, loss, rows))


def labelled(arrays: Data, loss: str, rows: int | None = None) -> Any:
    """The first rows of data, with their targets if the loss needs them."""
    if arrays.y is None or loss.startswith("behavioural"):
        return arrays.x[:rows]
    return arrays.x[:rows], arrays.y[:rows]


def default_loss(network: nn.Module, data: Data) -> str:
    """The training loss where the data have targets or are tokens, else the behavioural one."""
    from strati.evaluate.models import predicts_next

    if predicts_next(network):
        return "cross_entropy"
    if data.y is None:
        return "behavioural-mse"
    integral = data.y.ndim == 1 and bool((data.y == data.y.round()).all()) and bool((data.y >= 0).all())
    return "cross_entropy" if integral else "mse"


def sampling_options(function: F) -> F:
    """Add the options of the sampler; names and defaults are those of ``LLCConfig``."""

    def option(name: str, kind: Any, text: str, without: str | None = None) -> Any:
        value = default(LLCConfig, name)
        default_options = {"show_default": True, "default": value} if without is None else {}
        note = "" if without is None else f"  [default: {without}]"
        flag = "--" + name.replace("_", "-")
        metavar = None if isinstance(kind, click.Choice) else "N" if isinstance(kind, click.IntRange) else "X"
        return click.option(flag, type=kind, metavar=metavar, help=text + note, **default_options)

    positive = click.FloatRange(min=0, min_open=True)
    options = (
        option("sampler", click.Choice([str(s) for s in Sampler]), "How the posterior is sampled."),
        option("chains", click.IntRange(min=2), "Independent chains.", "4 to 64, by the size of the problem"),
        option(
            "draws", click.IntRange(min=4), "Draws kept per chain.", "as many as mixing takes, up to a limit"
        ),
        option(
            "warmup", click.IntRange(min=1), "Rounds before the first kept draw.", "until the chains arrive"
        ),
        option("nbeta", positive, "Inverse temperature of the sampler.", "n / ln n"),
        option(
            "gamma",
            positive,
            "Strength of the pull towards the parameters.",
            "max(1, min(1, N/2500) N / |theta*|^2)",
        ),
        option("seconds", positive, "Time budget, calibration included.", "a fixed amount of work"),
        option("batch", click.IntRange(min=1), "Rows per minibatch of SGLD.", "256; fewer of long sequences"),
        option("step", positive, "Step size of SGLD.", "calibrated"),
        option("max_rhat", positive, "Refuse estimates whose R-hat exceeds X."),
    )
    for add in reversed(options):
        function = add(function)
    return function
