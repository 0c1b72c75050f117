"""``strati influence``: which rows of data influence one another, and which parts of a network respond to them."""

from __future__ import annotations

from typing import Any

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
from strati.cli.landscape import labelled, loss_option, read_problem, sampling_options
from strati.jobs.progress import progress
from strati.landscape.llc.config import LLCConfig


@click.command("influence", cls=Command)
@click.argument("model", type=click.Path())
@data_options(required=True)
@activation_option()
@click.option(
    "--kind",
    type=click.Choice(["influence", "kernel", "susceptibility"]),
    default="influence",
    show_default=True,
    help="Covariances of rows, their correlations, or covariances of parts with rows.",
)
@click.option(
    "--parts",
    metavar="PARTS",
    help="Parts of susceptibilities, by commas: heads, layers, or patterns of parameters.  [default: layers]",
)
@click.option("--queries", metavar="DATA", help="Rows whose loss is influenced.  [default: the rows of DATA]")
@click.option(
    "--by",
    type=click.Choice(["row", "token"]),
    default="row",
    show_default=True,
    help="One column per row or per token.",
)
@click.option(
    "--losses", metavar="FILE", help="Write the loss of every row at every draw to a .parquet file."
)
@loss_option
@rows_option
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
    kind: str,
    parts: str | None,
    queries: str | None,
    by: str,
    losses: str | None,
    loss: str | None,
    rows: int | None,
    layers: tuple[str, ...],
    device: str | None,
    seed: int,
    output: Output,
    **sampling: Any,
) -> None:
    """Estimate how rows of DATA influence one another through MODEL, from draws of the local posterior.

    Values are covariances of the rows' losses, each with its error; WAIC and the singular fluctuation come from the
    same draws. The number of entries is the square of the number of rows: limit it with --rows or --queries.

    \b
    Example:
      strati influence model.safetensors --data train.npz --rows 200
      strati influence model.safetensors --data train.npz --queries test.npz --json influence.json
      strati influence gpt2/ --data tokens.npy --kind susceptibility --parts heads
    """
    from strati.landscape.influence.influence import influence

    config = LLCConfig(seed=seed, device=device, **sampling)
    problem = read_problem(model, data, inputs, targets, activation=activation, loss=loss, rows=rows)
    others = None
    if queries is not None:
        others = labelled(read_inputs(queries, inputs, targets, problem.network), problem.loss)
    with progress("sampling", None, quiet=output.quiet) as tick:
        estimates = influence(
            *problem,
            kind=kind,
            parts=parts,
            queries=others,
            by=by,
            layers=layers or None,
            losses_file=losses,
            config=config,
            tick=tick,
        )
    emit(estimates, output)
    if not output.quiet and output.json != "-":
        more = f" --draws {4 * estimates.settings['draws']}" if estimates.reason else ""
        following = (
            f"influence {model} --data {data} --kind {kind}{more}" if more else f"llc {model} --data {data}"
        )
        show(f"next: strati {following}")
