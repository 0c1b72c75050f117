"""``strati track``: the checkpoints of a training run."""

from __future__ import annotations

from typing import Any

import click

from strati.cli import common, interrupts
from strati.cli.landscape import LOSSES
from strati.tracking.config import QUANTITIES, TrackConfig


@click.command("track", cls=common.Command)
@click.argument("checkpoints", nargs=-1, required=True, metavar="CHECKPOINT...")
@common.data_options(required=False)
@common.activation_option()
@common.work_options(required=True)
@common.option(
    "--what NAMES",
    f"What to measure, comma-separated: {', '.join(QUANTITIES)}.  "
    "[default: spectra, plus loss and llc with --data]",
)
@common.option(
    "--steps NUMBERS", "Training steps, comma-separated.  [default: the last number in each name]", default=""
)
@common.layers_option
@common.option(
    "--loss",
    "Loss to measure.  [default: cross_entropy for classes, mse for other targets, behavioural-mse without]",
    LOSSES,
)
@common.rows_option
@common.option("--nbeta", "Inverse temperature of the LLC sampler.  [default: n / ln n]", common.POSITIVE)
@common.option(
    "--gamma", "Strength of the pull towards the checkpoint.  [default: automatic]", common.POSITIVE
)
@common.option("--chains", "Chains of every LLC estimate.  [default: 4]", click.IntRange(2))
@common.option("--draws", "Draws of every chain.  [default: 400]", click.IntRange(4))
@common.option("--batch", "Rows per minibatch of the LLC sampler.  [default: 256]", click.IntRange(1))
@common.option("--seconds", "Time budget of each LLC estimate, in seconds.  [default: none]", common.POSITIVE)
@common.option("--per-layer", "Also estimate the learning coefficient of each layer.")
@common.option("--heads HEADS", "Also estimate that of these attention heads: 0.1,1.3 (block.head).")
@common.option(
    "--data-groups COLUMN", "Also estimate that of groups of the data, by this column (y: the targets)."
)
@common.option("--level", "False-alarm rate of the change points, over all series.", float, TrackConfig)
@common.retry_option
@common.estimate_option
@common.seed_option
@common.output_options
def command(
    checkpoints: tuple[str, ...],
    steps: str,
    what: str | None,
    estimate: bool,
    output: common.Output,
    **options: Any,
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
    data = common.named_data(data, options.pop("inputs"), options.pop("targets"))
    source: Any = checkpoints[0] if len(checkpoints) == 1 else list(checkpoints)
    if estimate:
        from strati.io.layers import select
        from strati.io.network import open as open_network
        from strati.spectra.layerwise import estimate_scan
        from strati.tracking.checkpoints import in_order

        ordered = in_order(source, numbers)
        layers = [x for c in ordered for x in select(open_network(c.source).layers(), options["layers"])]
        common.emit(estimate_scan(f"{len(ordered)} checkpoints", layers, workers=options["workers"]), output)
        return
    resume = interrupts.resume_command(kept=out is not None)
    with progress("track", None, quiet=output.quiet, resume=resume) as tick:
        trajectory = track(source, data=data, out=out, steps=numbers, what=what, tick=tick, **options)
    common.emit(trajectory, output)
