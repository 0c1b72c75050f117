"""``strati reassemble``: recover the order of shuffled layers. The old spelling of shuffle stays hidden."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from strati.cli import common
from strati.core.errors import BadInputError
from strati.core.files import check_writable
from strati.jobs.progress import progress
from strati.reassembly.reassemble import ReassembleConfig
from strati.reassembly.residual.make import Recipe

ACTIVATIONS = ("relu", "gelu", "gelu-tanh", "tanh", "silu")
PAIRINGS = ("auto", "diagonal", "gram", "norms", "readout", "combined", "joint")
SEEDS = ("auto", "l1", "delta-norm", "frobenius")

_RECIPE = [field.name for field in fields(Recipe) if field.name not in ("activation", "batch", "seed")]
_make_options = common.options(
    *(
        common.option(f"--{name.replace('_', '-')}", "", kind, Recipe, hidden=True)
        for name in _RECIPE
        for kind in [click.FloatRange(0) if name in ("lr", "weight_decay") else click.IntRange(1)]
    )
)
"""The sizes and the training of the network that ``--make`` makes."""


@click.command("reassemble", cls=common.Command)
@click.argument("pieces", required=False)
@click.argument("data", required=False)
@common.option("--inputs NAMES", "Input columns (names or patterns, comma-separated) or array of DATA.")
@common.option("--targets --target target NAMES", "Columns or array with the network's recorded outputs.")
@common.option("--activation", "Activation function of residual blocks.", ACTIVATIONS, ReassembleConfig)
@common.option("--seconds", "Time limit of the search with data.", click.FloatRange(0), ReassembleConfig)
@common.option("--out PATH", "Write the rebuilt network.")
@common.option("--force", "Write --out even if the answer is not exact.")
@common.option("--pairing", "", PAIRINGS, ReassembleConfig, hidden=True)
@common.option("--seed-order", "", SEEDS, ReassembleConfig, hidden=True)
@common.option("--tokens", "", click.IntRange(1), ReassembleConfig, hidden=True)
@common.option("--drop MODEL", "", hidden=True)
@common.option("--answer FILE", "", hidden=True)
@common.option("--make DIR", "", hidden=True)
@_make_options
@common.seed_option
@common.output_options
def command(pieces: str | None, data: str | None, output: common.Output, **options: Any) -> None:
    """Recover the order of the shuffled, unlabelled layers in the folder PIECES.

    The layers of a residual network need DATA: inputs and the network's recorded outputs, as CSV (measurement_* and
    pred by default) or .npz (x and y). The pieces of a transformer need none; text, token ids or images with recorded
    outputs in DATA settle what the weights leave open.

    \b
    Example:
      strati reassemble pieces data.csv --out model.safetensors
    """
    modes = [name for name in ("make", "drop") if options[name] is not None]
    if len(modes) > 1:
        raise BadInputError("--drop", "cannot be used with --make")
    if modes and pieces is not None:
        raise BadInputError(f"--{modes[0]}", "takes its value as an option; leave PIECES and DATA out")
    if modes == ["make"]:
        _make(options["make"], output, options)
    elif modes == ["drop"]:
        if options["out"] is None:
            raise BadInputError("--drop", "needs --out DIR, an empty or new folder for the pieces")
        from strati.cli.shuffle import command as shuffle

        shuffle_options = {name: options[name] for name in ("out", "answer", "seed")}
        files = {"json_": output.json, "html": output.html, "plot": output.plot, "quiet": output.quiet}
        click.get_current_context().invoke(shuffle, model=options["drop"], **shuffle_options, **files)
    elif pieces is None:
        raise click.UsageError("needs PIECES, a folder; strati shuffle MODEL --out DIR makes one")
    else:
        _reassemble(pieces, data, output, options)


def _reassemble(pieces: str, data: str | None, output: common.Output, options: dict[str, Any]) -> None:
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
    common.emit(answer, output)
    if not output.speaks:
        return
    if path is not None:
        common.show(f"wrote {path}" if written else f"{path} not written: not exact (--force writes it)")
    words = f"strati reassemble {pieces}" + (f" {data}" if data else "")
    if written:
        common.show(f"next: strati scan {path}")
    elif answer.exact is False:
        common.show(f"next: {words} --seconds {max(2 * config.seconds, 60):g}")
    else:
        common.show(f"next: {words} --out {'rebuilt' if transformer else 'model.safetensors'}")


def _make(folder: str, output: common.Output, options: dict[str, Any]) -> None:
    from strati.reassembly.residual.make import make

    recipe = Recipe(**{name: options[name] for name in (*_RECIPE, "activation", "seed")})
    with progress("training", recipe.epochs, quiet=output.quiet) as tick:
        made = make(Path(folder), recipe, tick=tick)
    solve = f"strati reassemble {folder} {folder}/data.csv --activation {recipe.activation}"
    common.emit(made, output, solve)
