"""``strati reassemble``: unlabelled pieces back into a network; or (``--make``, ``--drop``) a network into pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from strati.cli.common import Output, emit, output_options, seed_option, show
from strati.errors import BadInputError
from strati.options import default
from strati.reassembly.config import ReassembleConfig
from strati.run.files import check_writable
from strati.run.progress import progress

F = TypeVar("F", bound=Callable[..., Any])

ACTIVATIONS = ("relu", "gelu", "gelu-tanh", "tanh", "silu")
PAIRINGS = ("auto", "diagonal", "cosine", "gram", "norms", "readout", "combined", "joint")
SEEDS = ("auto", "delta-norm", "delta-norm-no-bias", "frobenius", "l1", "spread", "consensus")


def _option(name: str, **more: Any) -> Callable[[F], F]:
    """An option whose default stands in the config."""
    field = name.removeprefix("--").replace("-", "_")
    return click.option(name, default=default(ReassembleConfig, field), show_default=True, **more)


@click.command("reassemble")
@click.argument("pieces", required=False)
@click.argument("data", required=False)
@click.option(
    "--inputs", metavar="COLUMNS", help="Input columns (names or patterns, comma-separated) or array."
)
@click.option("--target", metavar="COLUMNS", help="The network's recorded outputs: column(s) or array.")
@_option("--activation", type=click.Choice(ACTIVATIONS), help="Of a residual network's blocks.")
@_option("--pairing", type=click.Choice(PAIRINGS), help="What pairs the layers of a residual network.")
@_option("--seed-order", type=click.Choice(SEEDS), help="First order of a residual network's blocks.")
@_option("--seconds", type=click.FloatRange(0), help="Time limit of the search with data.")
@_option("--tokens", type=click.IntRange(1), help="Verify a transformer with the first N tokens or images.")
@click.option(
    "--out", metavar="PATH", help="Write the rebuilt network; with --drop, the folder for the pieces."
)
@click.option("--force", is_flag=True, help="Write --out even if the answer is not exact.")
@click.option(
    "--drop", metavar="MODEL", help="Take a transformer apart into numbered pieces (with --out DIR)."
)
@click.option("--answer", metavar="FILE", help="With --drop: write which piece is what to FILE.")
@click.option("--hide-roles", is_flag=True, help="With --drop: do not tell the pieces' roles.")
@click.option("--permute", is_flag=True, help="With --drop: permute neurons and heads block by block.")
@click.option(
    "--rescale", is_flag=True, help="With --drop: change scales and signs that the network does not notice."
)
@click.option(
    "--identify", metavar="PIECE", help="Name the block and role of a stray matrix of MODEL (the argument)."
)
@click.option("--correspond", metavar="MODEL", help="Match the blocks of MODEL with those of the argument.")
@click.option(
    "--make", metavar="DIR", help="Train a residual network and drop it into DIR instead (needs torch)."
)
@click.option(
    "--blocks", type=click.IntRange(1), default=12, show_default=True, help="Residual blocks to train."
)
@click.option("--width", type=click.IntRange(1), default=24, show_default=True, help="Their width.")
@click.option("--hidden", type=click.IntRange(1), default=48, show_default=True, help="Their hidden width.")
@click.option("--outputs", type=click.IntRange(1), default=1, show_default=True, help="Outputs to train.")
@click.option("--epochs", type=click.IntRange(0), default=30, show_default=True, help="Epochs to train.")
@click.option("--rows", type=click.IntRange(2), default=4000, show_default=True, help="Rows to train on.")
@click.option(
    "--lr", type=click.FloatRange(0, min_open=True), default=1e-3, show_default=True, help="Learning rate."
)
@click.option(
    "--weight-decay", type=click.FloatRange(0), default=0.0, show_default=True, help="Weight decay."
)
@seed_option
@output_options
def command(pieces: str | None, data: str | None, output: Output, **options: Any) -> None:
    """Put the unlabelled pieces in the folder PIECES back together.

    The layers of a residual network need DATA: inputs and what the network answered to them, CSV
    (measurement_*, pred by
    default) or .npz (x, y). The matrices of a transformer need none; a text file, token ids or images in DATA
    verify and repair.

    \b
    Example:
      strati reassemble --drop stories15M/ --out pieces --answer answer.json
      strati reassemble pieces --out rebuilt
    """
    modes = [name for name in ("make", "drop", "identify", "correspond") if options[name] is not None]
    if len(modes) > 1:
        raise BadInputError(f"--{modes[1]}", f"cannot be used with --{modes[0]}")
    if options["make"] is not None:
        if pieces is not None:
            raise BadInputError("--make", "trains a network of its own; leave PIECES and DATA out")
        _make(options["make"], output, options)
    elif options["drop"] is not None:
        _drop(pieces, output, options)
    elif pieces is None:
        raise click.UsageError("needs PIECES (a folder), or --drop MODEL --out DIR, or --make DIR")
    elif options["identify"] is not None:
        from strati.reassembly.transformer.identify import identify

        emit(identify(options["identify"], pieces), output)
    elif options["correspond"] is not None:
        from strati.reassembly.transformer.identify import correspond

        emit(correspond(pieces, options["correspond"]), output)
    else:
        _reassemble(pieces, data, output, options)


def _reassemble(pieces: str, data: str | None, output: Output, options: dict[str, Any]) -> None:
    from strati.reassembly.reassemble import reassemble
    from strati.reassembly.transformer.pieces import is_transformer
    from strati.reassembly.transformer.rebuild import check_target

    out = options["out"]
    transformer = is_transformer(Path(pieces))
    if not transformer and data is None:
        raise click.UsageError("the pieces of a residual network need DATA (a file) as second argument")
    if out is not None:
        check_target(Path(out)) if transformer else check_writable(out)
    names = {field.name for field in fields(ReassembleConfig)}
    chosen = ReassembleConfig(**{name: value for name, value in options.items() if name in names})
    with progress("reassemble", None, quiet=output.quiet) as tick:
        result = reassemble(pieces, data, config=chosen, tick=tick)
    written = out is not None and (result.exact or options["force"] or (transformer and result.exact is None))
    if written:
        result.save(out)
    emit(result, output)
    if out is not None and not output.quiet and output.json != "-":
        show(f"wrote {out}" if written else f"{out} not written: not exact (--force writes it)")


def _drop(pieces: str | None, output: Output, options: dict[str, Any]) -> None:
    from strati.reassembly.transformer.drop import DropConfig, drop

    if pieces is not None:
        raise BadInputError("--drop", "takes the network as its value; leave PIECES and DATA out")
    if options["out"] is None:
        raise BadInputError("--drop", "needs --out DIR, an empty or new folder for the pieces")
    if options["answer"] is not None:
        check_writable(options["answer"])
    chosen = DropConfig(**{field.name: options[field.name] for field in fields(DropConfig)})
    with progress("drop", None, quiet=output.quiet) as tick:
        made = drop(options["drop"], options["out"], answer=options["answer"], config=chosen, tick=tick)
    emit(made, output)


def _make(folder: str, output: Output, options: dict[str, Any]) -> None:
    from strati.reassembly.make import Recipe, make

    recipe = Recipe(**{field.name: options[field.name] for field in fields(Recipe) if field.name in options})
    with progress("training", recipe.epochs, quiet=output.quiet) as tick:
        made = make(Path(folder), recipe, tick=tick)
    emit(made, output)
