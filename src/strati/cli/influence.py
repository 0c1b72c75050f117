"""``strati influence``: which rows of data influence one another, and which parts of a network respond to them."""

from __future__ import annotations

from typing import Any

import click

from strati.cli import common
from strati.cli.landscape import loss_option, sampling_options
from strati.jobs.progress import progress
from strati.landscape.llc.config import LLCConfig


@click.command("influence", cls=common.Command)
@common.source_options
@common.option(
    "--kind",
    "Covariances of rows, their correlations, or covariances of parts with rows.",
    ("influence", "kernel", "susceptibility"),
    default="influence",
)
@common.option(
    "--parts PARTS",
    "Parts of susceptibilities, by commas: heads, layers, or patterns of parameters.  [default: layers]",
)
@common.option("--queries DATA", "Rows whose loss is influenced.  [default: the rows of DATA]")
@common.option("--by", "One column per row or per token.", ("row", "token"), default="row")
@common.option("--losses FILE", "Write the loss of every row at every draw to a .parquet file.")
@loss_option
@common.rows_option
@sampling_options
@common.layers_option
@common.device_option
@common.seed_option
@common.output_options
def command(
    source: common.Source,
    kind: str,
    parts: str | None,
    queries: str | None,
    by: str,
    losses: str | None,
    loss: str | None,
    rows: int | None,
    layers: tuple[str, ...] | None,
    output: common.Output,
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

    options: dict[str, Any] = {
        "kind": kind,
        "parts": parts,
        "by": by,
        "layers": layers,
        "losses_file": losses,
    }
    options["config"] = LLCConfig(**sampling)
    problem = source.problem(loss, rows)
    if queries is not None:
        options["queries"] = common.labelled(source.arrays(problem.network, queries), problem.loss)
    with progress("sampling", None, quiet=output.quiet) as tick:
        estimates = influence(*problem, tick=tick, **options)
    longer = f"strati influence {source} --kind {kind} --draws {4 * estimates.settings['draws']}"
    common.emit(estimates, output, longer if estimates.reason else f"strati llc {source}")
