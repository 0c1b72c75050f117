"""``strati shuffle``: a network as numbered, unlabelled pieces."""

from __future__ import annotations

from typing import Any

import click

from strati.cli import common
from strati.core.files import check_writable
from strati.jobs.progress import progress


@click.command("shuffle", cls=common.Command)
@click.argument("model")
@common.option("--out DIR", "New or empty folder for the pieces.", required=True)
@common.option("--answer FILE", "Write which piece is what to FILE.")
@common.option("--permute", "Also permute neurons and heads, block by block.")
@common.option("--rescale", "Also apply random rescalings and sign flips that leave the function unchanged.")
@common.seed_option
@common.output_options
def command(model: str, out: str, output: common.Output, **options: Any) -> None:
    """Take MODEL apart into numbered pieces without names, for strati reassemble.

    MODEL is a transformer, or a residual network as strati reassemble --out writes it.

    \b
    Example:
      strati shuffle stories15M/ --out pieces --answer answer.json
      strati reassemble pieces
    """
    from strati.reassembly.shuffle import ShuffledResidual, shuffle

    if options["answer"] is not None:
        check_writable(options["answer"])
    with progress("shuffle", None, quiet=output.quiet) as tick:
        shuffled = shuffle(model, out, tick=tick, **options)
    data = " DATA" if isinstance(shuffled, ShuffledResidual) else ""
    common.emit(shuffled, output, f"strati reassemble {out}{data}")
