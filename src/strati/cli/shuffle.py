"""``strati shuffle``: a network as numbered, unlabelled pieces."""

from __future__ import annotations

import click

from strati.cli.common import Command, Output, emit, output_options, seed_option, show
from strati.core.files import check_writable
from strati.jobs.progress import progress


@click.command("shuffle", cls=Command)
@click.argument("model")
@click.option("--out", metavar="DIR", required=True, help="New or empty folder for the pieces.")
@click.option("--answer", metavar="FILE", help="Write which piece is what to FILE.")
@click.option("--permute", is_flag=True, help="Also permute neurons and heads, block by block.")
@click.option(
    "--rescale",
    is_flag=True,
    help="Also apply random rescalings and sign flips that leave the function unchanged.",
)
@seed_option
@output_options
def command(
    model: str, out: str, answer: str | None, permute: bool, rescale: bool, seed: int, output: Output
) -> None:
    """Take MODEL apart into numbered pieces without names, for strati reassemble.

    MODEL is a transformer, or a residual network as strati reassemble --out writes it.

    \b
    Example:
      strati shuffle stories15M/ --out pieces --answer answer.json
      strati reassemble pieces
    """
    shuffle_model(model, out, answer, output, permute=permute, rescale=rescale, seed=seed)


def shuffle_model(
    model: str, out: str, answer: str | None, output: Output, *, permute: bool, rescale: bool, seed: int
) -> None:
    """Shuffle, show what was written, and name the command that solves the puzzle."""
    from strati.reassembly.shuffle import ShuffledResidual, shuffle

    if answer is not None:
        check_writable(answer)
    with progress("shuffle", None, quiet=output.quiet) as tick:
        shuffled = shuffle(model, out, answer=answer, permute=permute, rescale=rescale, seed=seed, tick=tick)
    emit(shuffled, output)
    if not output.quiet and output.json != "-":
        data = " DATA" if isinstance(shuffled, ShuffledResidual) else ""
        show(f"next: strati reassemble {out}{data}")
