"""``strati reassemble``: recover the order of shuffled layers. Old spellings of shuffle and identify stay hidden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from strati.cli.common import Command, Output, emit, output_options, seed_option, show
from strati.core.errors import BadInputError
from strati.core.files import check_writable
from strati.core.options import default
from strati.jobs.progress import progress
from strati.reassembly.reassemble import ReassembleConfig

F = TypeVar("F", bound=Callable[..., Any])

ACTIVATIONS = ("relu", "gelu", "gelu-tanh", "tanh", "silu")
PAIRINGS = ("auto", "diagonal", "gram", "norms", "readout", "combined", "joint")
SEEDS = ("auto", "l1", "delta-norm", "frobenius")


def _option(name: str, **more: Any) -> Callable[[F], F]:
    """An option whose default stands in the config."""
    field = name.removeprefix("--").replace("-", "_")
    return click.option(name, default=default(ReassembleConfig, field), show_default=True, **more)


def _old_spellings(function: F) -> F:
    """The options that are now ``strati shuffle``, ``strati identify`` and, for experiments, ``--make``."""
    options = [click.option(f"--{name}", hidden=True) for name in ("drop", "identify", "correspond")]
    options += [
        click.option("--answer", metavar="FILE", hidden=True),
        click.option("--make", metavar="DIR", hidden=True),
    ]
    options += [click.option(f"--{name}", is_flag=True, hidden=True) for name in ("permute", "rescale")]
    for name, kind, initial in (
        ("blocks", click.IntRange(1), 12),
        ("width", click.IntRange(1), 24),
        ("hidden", click.IntRange(1), 48),
        ("outputs", click.IntRange(1), 1),
        ("epochs", click.IntRange(0), 30),
        ("rows", click.IntRange(2), 4000),
        ("lr", click.FloatRange(0, min_open=True), 1e-3),
        ("weight-decay", click.FloatRange(0), 0.0),
    ):
        options.append(click.option(f"--{name}", type=kind, default=initial, hidden=True))
    for option in options:
        function = option(function)
    return function


@click.command("reassemble", cls=Command)
@click.argument("pieces", required=False)
@click.argument("data", required=False)
@click.option(
    "--inputs", metavar="NAMES", help="Input columns (names or patterns, comma-separated) or array of DATA."
)
@click.option(
    "--targets",
    "--target",
    "target",
    metavar="NAMES",
    help="Columns or array with the network's recorded outputs.",
)
@_option("--activation", type=click.Choice(ACTIVATIONS), help="Activation function of residual blocks.")
@_option("--seconds", type=click.FloatRange(0), help="Time limit of the search with data.")
@click.option("--out", metavar="PATH", help="Write the rebuilt network.")
@click.option("--force", is_flag=True, help="Write --out even if the answer is not exact.")
@_option("--pairing", type=click.Choice(PAIRINGS), hidden=True)
@_option("--seed-order", type=click.Choice(SEEDS), hidden=True)
@_option("--tokens", type=click.IntRange(1), hidden=True)
@_old_spellings
@seed_option
@output_options
def command(pieces: str | None, data: str | None, output: Output, **options: Any) -> None:
    """Recover the order of the shuffled, unlabelled layers in the folder PIECES.

    The layers of a residual network need DATA: inputs and the network's recorded outputs, as CSV (measurement_* and
    pred by default) or .npz (x and y). The pieces of a transformer need none; text, token ids or images with recorded
    outputs in DATA settle what the weights leave open.

    \b
    Example:
      strati reassemble pieces data.csv --out model.safetensors
    """
    modes = [name for name in ("make", "drop", "identify", "correspond") if options[name] is not None]
    if len(modes) > 1:
        raise BadInputError(f"--{modes[1]}", f"cannot be used with --{modes[0]}")
    if modes in (["make"], ["drop"]) and pieces is not None:
        raise BadInputError(f"--{modes[0]}", "takes its value as an option; leave PIECES and DATA out")
    if modes == ["make"]:
        _make(options["make"], output, options)
    elif modes == ["drop"]:
        if options["out"] is None:
            raise BadInputError("--drop", "needs --out DIR, an empty or new folder for the pieces")
        from strati.cli.shuffle import shuffle_model

        settings = {name: options[name] for name in ("permute", "rescale", "seed")}
        shuffle_model(options["drop"], options["out"], options["answer"], output, **settings)
    elif pieces is None:
        raise click.UsageError("needs PIECES, a folder; strati shuffle MODEL --out DIR makes one")
    elif modes:
        from strati.cli.identify import identify_piece

        piece, model = (
            (options["identify"], pieces) if modes == ["identify"] else (pieces, options["correspond"])
        )
        identify_piece(piece, model, output)
    else:
        _reassemble(pieces, data, output, options)


def _reassemble(pieces: str, data: str | None, output: Output, options: dict[str, Any]) -> None:
    from strati.reassembly.reassemble import is_transformer, reassemble

    path = options["out"]
    transformer = is_transformer(pieces)
    if not transformer and data is None:
        raise click.UsageError("the pieces of a residual network need DATA (a file) as second argument")
    if path is not None:
        if transformer:
            from strati.reassembly.transformer.result import check_target

            check_target(Path(path))
        else:
            check_writable(path)
    names = {field.name for field in fields(ReassembleConfig)}
    config = ReassembleConfig(**{name: value for name, value in options.items() if name in names})
    with progress("reassemble", None, quiet=output.quiet) as tick:
        answer = reassemble(pieces, data, config=config, tick=tick)
    written = path is not None and (
        answer.exact or options["force"] or (transformer and answer.exact is None)
    )
    if written:
        answer.save(path)
    emit(answer, output)
    if output.quiet or output.json == "-":
        return
    if path is not None:
        show(f"wrote {path}" if written else f"{path} not written: not exact (--force writes it)")
    words = f"strati reassemble {pieces}" + (f" {data}" if data else "")
    if written:
        show(f"next: strati scan {path}")
    elif answer.exact is False:
        show(f"next: {words} --seconds {max(2 * config.seconds, 60):g}")
    else:
        show(f"next: {words} --out {'rebuilt' if transformer else 'model.safetensors'}")


def _make(folder: str, output: Output, options: dict[str, Any]) -> None:
    from strati.reassembly.residual.make import Recipe, make

    recipe = Recipe(**{field.name: options[field.name] for field in fields(Recipe) if field.name in options})
    with progress("training", recipe.epochs, quiet=output.quiet) as tick:
        made = make(Path(folder), recipe, tick=tick)
    emit(made, output)
    if not output.quiet and output.json != "-":
        show(f"next: strati reassemble {folder} {folder}/data.csv --activation {recipe.activation}")
