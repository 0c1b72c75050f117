"""``strati track``: the checkpoints of a training run."""

from __future__ import annotations

from typing import Any

import click

from strati.cli import interrupts
from strati.cli.common import (
    Command,
    Output,
    activation_option,
    data_options,
    emit,
    estimate_option,
    layers_option,
    named_data,
    output_options,
    retry_option,
    rows_option,
    seed_option,
    work_options,
)
from strati.cli.landscape import LOSSES
from strati.core.options import default
from strati.tracking.config import QUANTITIES, TrackConfig

_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command("track", cls=Command)
@click.argument("checkpoints", nargs=-1, required=True, metavar="CHECKPOINT...")
@data_options(required=False)
@activation_option()
@work_options(required=True)
@click.option(
    "--what",
    metavar="NAMES",
    help=f"What to measure, comma-separated: {', '.join(QUANTITIES)}.  "
    "[default: spectra, plus loss and llc with --data]",
)
@click.option(
    "--steps",
    default="",
    metavar="NUMBERS",
    help="Training steps, comma-separated.  [default: the last number in each name]",
)
@layers_option
@click.option(
    "--loss",
    type=click.Choice(LOSSES),
    help="Loss to measure.  [default: cross_entropy for classes, mse for other targets, behavioural-mse without]",
)
@rows_option
@click.option("--nbeta", type=_POSITIVE, help="Inverse temperature of the LLC sampler.  [default: n / ln n]")
@click.option(
    "--gamma", type=_POSITIVE, help="Strength of the pull towards the checkpoint.  [default: automatic]"
)
@click.option(
    "--chains", type=click.IntRange(2), metavar="N", help="Chains of every LLC estimate.  [default: 4]"
)
@click.option("--draws", type=click.IntRange(4), metavar="N", help="Draws of every chain.  [default: 400]")
@click.option(
    "--batch",
    type=click.IntRange(1),
    metavar="N",
    help="Rows per minibatch of the LLC sampler.  [default: 256]",
)
@click.option(
    "--seconds", type=_POSITIVE, help="Time budget of each LLC estimate, in seconds.  [default: none]"
)
@click.option("--per-layer", is_flag=True, help="Also estimate the learning coefficient of each layer.")
@click.option(
    "--heads", metavar="HEADS", help="Also estimate that of these attention heads: 0.1,1.3 (block.head)."
)
@click.option(
    "--data-groups",
    metavar="COLUMN",
    help="Also estimate that of groups of the data, by this column (y: the targets).",
)
@click.option(
    "--level",
    type=float,
    default=default(TrackConfig, "level"),
    show_default=True,
    help="False-alarm rate of the change points, over all series.",
)
@retry_option
@estimate_option
@seed_option
@output_options
def command(
    checkpoints: tuple[str, ...], steps: str, what: str | None, estimate: bool, output: Output, **options: Any
) -> None:
    """Measure every checkpoint of a training run and detect change points.

    Interrupted? Run the same command again to resume; add later checkpoints or quantities at any time.

    \b
    Example:
      strati track run/ckpt-* --out followed
      strati track run/ --data data.npz --what spectra,loss,llc --out followed
    """
    from strati.core.errors import BadInputError
    from strati.jobs.progress import progress
    from strati.tracking.track import track

    try:
        numbers = [float(word) for word in steps.split(",") if word.strip()] or None
    except ValueError:
        raise BadInputError("--steps", "must be numbers separated by commas") from None
    data, out = options.pop("data"), options.pop("out")
    data = named_data(data, options.pop("inputs"), options.pop("targets"))
    options["layers"] = options.get("layers") or None
    source: Any = checkpoints[0] if len(checkpoints) == 1 else list(checkpoints)
    if estimate:
        from strati.io.layers import select
        from strati.io.network import open as open_network
        from strati.spectra.layerwise import estimate_scan
        from strati.tracking.checkpoints import in_order

        ordered = in_order(source, numbers)
        layers = [x for c in ordered for x in select(open_network(c.source).layers(), options["layers"])]
        emit(estimate_scan(f"{len(ordered)} checkpoints", layers, workers=options["workers"]), output)
        return
    resume = interrupts.resume_command(kept=out is not None)
    with progress("track", None, quiet=output.quiet, resume=resume) as tick:
        trajectory = track(source, data=data, out=out, steps=numbers, what=what, tick=tick, **options)
    emit(trajectory, output)
