"""``strati llc``: the local learning coefficient of a network on given data."""

from __future__ import annotations

import warnings
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
    rows_option,
    seed_option,
    show,
)
from strati.cli.landscape import loss_option, read_problem, sampling_options
from strati.jobs.progress import progress
from strati.landscape.llc.config import LLCConfig

if TYPE_CHECKING:
    from strati.landscape.llc.estimate import LearningCoefficient


@click.command("llc", cls=Command)
@click.argument("model", type=click.Path())
@data_options(required=True)
@activation_option()
@loss_option
@rows_option
@click.option("--per-layer", is_flag=True, help="One coefficient for each layer, the others fixed.")
@sampling_options
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
    loss: str | None,
    rows: int | None,
    per_layer: bool,
    layers: tuple[str, ...],
    device: str | None,
    seed: int,
    output: Output,
    **sampling: Any,
) -> None:
    """Estimate the local learning coefficient of MODEL on DATA, with its error.

    The amount of work depends on the problem alone and goes on until the chains have mixed, up to a limit;
    --seconds sets a time budget instead. For a language model token ids are enough: the targets are the
    next tokens.

    \b
    Example:
      strati llc model.safetensors --data train.npz
      strati llc model.safetensors --data train.npz --seconds 60 --json llc.json
      strati llc gpt2/ --data tokens.npy --gamma 1000
    """
    from strati.landscape.llc.estimate import LearningCoefficient, NoEstimateWarning
    from strati.landscape.llc.llc import llc

    config = LLCConfig(seed=seed, device=device, **sampling)
    network, loss, rows_used = read_problem(
        model, data, inputs, targets, activation=activation, loss=loss, rows=rows
    )
    with progress("sampling", None, quiet=output.quiet) as tick, warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEstimateWarning)  # the summary says it
        coefficient: Any = llc(
            network, loss, rows_used, config=config, layers=layers or None, per_layer=per_layer, tick=tick
        )
    emit(coefficient, output)
    if not output.quiet and output.json != "-" and isinstance(coefficient, LearningCoefficient):
        named = "".join(f" --{n} {v}" for n, v in (("inputs", inputs), ("targets", targets)) if v is not None)
        show(f"next: {next_command(coefficient, model, data + named, loss)}")


def next_command(coefficient: LearningCoefficient, model: str, data: str, loss: str) -> str:
    """What to run next: a longer run, the same question without targets, or the count."""
    from strati.landscape.llc.estimate import NoEstimate

    base = f"strati llc {model} --data {data}"
    if coefficient.estimate is not None:
        return f"strati degeneracy {model} --data {data}"
    if coefficient.missing is NoEstimate.OFF_MINIMUM and not loss.startswith("behavioural"):
        return f"{base} --loss {'behavioural-kl' if loss == 'cross_entropy' else 'behavioural-mse'}"
    if coefficient.missing in (NoEstimate.TOO_SHORT, NoEstimate.NOT_MIXED, NoEstimate.DRIFTING):
        return f"{base} --draws {4 * max(coefficient.draws, 50)}"
    return f"{base} --gamma {10 * coefficient.gamma:.3g}"
