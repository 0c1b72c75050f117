"""``strati track``: the checkpoints of a training run."""

from __future__ import annotations

from typing import Any

import click

from strati.cli import interrupts
from strati.cli.common import Command, Output, emit, layers_option, output_options, seed_option
from strati.core.options import default
from strati.tracking.config import QUANTITIES, TrackConfig


@click.command("track", cls=Command)
@click.argument("checkpoints", nargs=-1, required=True, metavar="CHECKPOINT...")
@click.option(
    "--data",
    metavar="DATA",
    help="Data for everything but spectra: .npz, .npy, .csv, .txt or a folder of images.",
)
@click.option("--inputs", metavar="NAME", help="Array or columns of DATA that hold the inputs.  [default: x]")
@click.option("--targets", metavar="NAME", help="Array or column of DATA with the targets.  [default: y]")
@click.option(
    "--out", metavar="DIR", required=True, help="Directory for results; rerun the same command to resume."
)
@click.option(
    "--what",
    default="",
    help=f"What to measure, comma-separated: {', '.join(QUANTITIES)}.  "
    "[default: spectra, plus loss and llc with --data]",
)
@click.option(
    "--steps", default="", help="Training steps, comma-separated.  [default: the last number in each name]"
)
@layers_option
@click.option(
    "--loss",
    default=default(TrackConfig, "loss"),
    help="mse, cross_entropy, behavioural-mse or behavioural-kl.",
)
@click.option(
    "--rows", type=click.IntRange(0), default=default(TrackConfig, "rows"), help="Use only the first N rows."
)
@click.option(
    "--nbeta",
    type=float,
    default=default(TrackConfig, "nbeta"),
    help="Inverse temperature of the LLC sampler.  [default: n / ln n]",
)
@click.option(
    "--gamma",
    type=float,
    default=default(TrackConfig, "gamma"),
    help="Strength of the pull towards the checkpoint.  [default: automatic]",
)
@click.option(
    "--chains", type=int, default=default(TrackConfig, "chains"), help="Chains of every LLC estimate."
)
@click.option("--draws", type=int, default=default(TrackConfig, "draws"), help="Draws of every chain.")
@click.option(
    "--batch",
    type=int,
    default=default(TrackConfig, "batch"),
    help="Rows per minibatch of the LLC sampler.  [default: 256]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=default(TrackConfig, "seconds"),
    help="Time budget of each LLC estimate, in seconds.",
)
@click.option("--per-layer", is_flag=True, help="Also estimate the learning coefficient of each layer.")
@click.option(
    "--heads", default="", help="Also estimate that of these attention heads: 0.1,1.3 (block.head)."
)
@click.option(
    "--data-groups",
    default=default(TrackConfig, "data_groups"),
    metavar="COLUMN",
    help="Also estimate that of groups of the data, by this column (y: the targets).",
)
@click.option(
    "--activation",
    default=default(TrackConfig, "activation"),
    show_default=True,
    help="Activation function of an MLP (not stored in checkpoints).",
)
@click.option(
    "--level",
    type=float,
    default=default(TrackConfig, "level"),
    show_default=True,
    help="False-alarm rate of the change points, over all series.",
)
@click.option("--engine", type=click.Choice(["local", "ray"]), default="local", show_default=True)
@click.option(
    "--workers",
    "--jobs",
    "-j",
    type=click.IntRange(0),
    default=default(TrackConfig, "workers"),
    show_default=True,
    help="Number of parallel workers (0 = one per CPU).",
)
@click.option("--address", help="Address of a Ray cluster.")
@click.option("--retry", is_flag=True, help="Try again what failed in an earlier run.")
@click.option("--estimate", is_flag=True, help="Estimate time and memory of the spectra, then exit.")
@seed_option
@output_options
def command(
    checkpoints: tuple[str, ...], steps: str, what: str, estimate: bool, output: Output, **options: Any
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
    inputs, targets = options.pop("inputs"), options.pop("targets")
    if inputs is not None or targets is not None:
        from strati.io.data_files import read_data

        if data is None:
            raise BadInputError("--inputs, --targets", "name arrays of --data, which is missing")
        arrays = read_data(data, inputs=inputs, target=targets)
        data = arrays.x if arrays.y is None else (arrays.x, arrays.y)
    options["layers"] = tuple(options.get("layers") or ())
    source: Any = checkpoints[0] if len(checkpoints) == 1 else list(checkpoints)
    if estimate:
        from strati.io.layers import select
        from strati.io.network import open as open_network
        from strati.spectra.estimate import estimate_scan
        from strati.tracking.checkpoints import in_order

        ordered = in_order(source, numbers)
        layers = [x for c in ordered for x in select(open_network(c.source).layers(), options["layers"])]
        emit(estimate_scan(f"{len(ordered)} checkpoints", layers, workers=options["workers"]), output)
        return
    resume = interrupts.resume_command(kept=out is not None)
    with progress("track", None, quiet=output.quiet, resume=resume) as tick:
        found = track(
            source, data=data, out=out, steps=numbers, what=what, tick=tick, expect=tick.expect, **options
        )
    emit(found, output)
