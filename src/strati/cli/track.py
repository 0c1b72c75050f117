"""``strati track``: a training run followed."""

from __future__ import annotations

from typing import Any

import click

from strati.cli import interrupts
from strati.cli.common import Output, emit, layers_option, output_options, seed_option
from strati.options import default
from strati.tracking.config import QUANTITIES, TrackConfig


@click.command(name="track")
@click.argument("checkpoints", nargs=-1, required=True, metavar="CHECKPOINT...")
@click.option("--data", metavar="DATA", help="Data, needed for everything but spectra.")
@click.option(
    "--out", metavar="DIR", required=True, help="Folder of the store; the same command resumes there."
)
@click.option("--what", default="", help=f"Quantities, separated by commas: {', '.join(QUANTITIES)}.")
@click.option(
    "--steps", default="", help="Training steps, separated by commas; default: the last number in each name."
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
    "--nbeta", type=float, default=default(TrackConfig, "nbeta"), help="Inverse temperature [n / ln n]."
)
@click.option(
    "--gamma",
    type=float,
    default=default(TrackConfig, "gamma"),
    help="Localisation of the learning coefficient.",
)
@click.option("--chains", type=int, default=default(TrackConfig, "chains"), help="Chains of every estimate.")
@click.option("--draws", type=int, default=default(TrackConfig, "draws"), help="Draws of every chain.")
@click.option(
    "--batch",
    type=int,
    default=default(TrackConfig, "batch"),
    help="Rows per minibatch of the sampler [256].",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=default(TrackConfig, "seconds"),
    help="Seconds to spend on each learning coefficient, roughly; the error falls with their square root.",
)
@click.option("--per-layer", is_flag=True, help="Learning coefficients of each layer too.")
@click.option(
    "--heads", default="", help="Learning coefficients of these attention heads too: 0.1,1.3 (block.head)."
)
@click.option(
    "--data-groups",
    default=default(TrackConfig, "data_groups"),
    metavar="COLUMN",
    help="Learning coefficients of groups of the data too, by this column (y: the targets).",
)
@click.option(
    "--activation",
    default=default(TrackConfig, "activation"),
    show_default=True,
    help="Nonlinearity of a plain MLP; files do not hold it.",
)
@click.option(
    "--level", type=float, default=default(TrackConfig, "level"), show_default=True, help="False-alarm rate."
)
@click.option("--engine", type=click.Choice(["local", "ray"]), default="local", show_default=True)
@click.option(
    "--workers",
    "--jobs",
    "-j",
    type=click.IntRange(0),
    default=default(TrackConfig, "workers"),
    show_default=True,
    help="Processes; 0: one per processor.",
)
@click.option("--address", help="Address of a Ray cluster.")
@click.option("--retry", is_flag=True, help="Try again what failed in an earlier run.")
@click.option("--estimate", is_flag=True, help="Show what the spectra would cost, and do nothing else.")
@seed_option
@output_options
def command(
    checkpoints: tuple[str, ...], steps: str, what: str, estimate: bool, output: Output, **options: Any
) -> None:
    """Follow a training run over its checkpoints: spectra, loss, learning coefficient; where it changes.

    Interrupted? Run the same command again to resume; add later checkpoints or quantities at any time.

    \b
    Example:
      strati track run/ckpt-* --out followed
      strati track run/ --data data.npz --what spectra,loss,llc --out followed
    """
    from strati.errors import BadInputError
    from strati.run.progress import progress
    from strati.tracking.track import track

    try:
        numbers = [float(word) for word in steps.split(",") if word.strip()] or None
    except ValueError:
        raise BadInputError("--steps", "must be numbers separated by commas") from None
    data, out = options.pop("data"), options.pop("out")
    options["layers"] = tuple(options.get("layers") or ())
    source: Any = checkpoints[0] if len(checkpoints) == 1 else list(checkpoints)
    if estimate:
        from strati.network.open import open as open_network
        from strati.network.select import select
        from strati.spectra.estimate import estimate_scan
        from strati.tracking.steps import in_order

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
