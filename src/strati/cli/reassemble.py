"""``strati reassemble``: unlabelled layers back in order, or (``--make``) a network trained and dropped."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from strati.cli.common import Output, emit, output_options, seed_option, show
from strati.errors import BadInputError
from strati.options import default
from strati.reassembly.config import ReassembleConfig
from strati.run.files import check_writable
from strati.run.progress import progress

ACTIVATIONS = ("relu", "gelu", "gelu-tanh", "tanh", "silu")
PAIRINGS = ("auto", "diagonal", "cosine", "gram", "norms", "readout", "combined", "joint")
SEEDS = ("auto", "delta-norm", "delta-norm-no-bias", "frobenius", "l1", "spread", "consensus")


@click.command("reassemble")
@click.argument("pieces", required=False)
@click.argument("data", required=False)
@click.option(
    "--inputs", metavar="COLUMNS", help="Input columns (names or patterns, comma-separated) or array."
)
@click.option("--target", metavar="COLUMNS", help="The network's recorded outputs: column(s) or array.")
@click.option(
    "--activation",
    type=click.Choice(ACTIVATIONS),
    default=default(ReassembleConfig, "activation"),
    show_default=True,
)
@click.option(
    "--pairing",
    type=click.Choice(PAIRINGS),
    default=default(ReassembleConfig, "pairing"),
    show_default=True,
    help="What pairs pieces.",
)
@click.option(
    "--seed-order",
    type=click.Choice(SEEDS),
    default=default(ReassembleConfig, "seed_order"),
    show_default=True,
    help="The first order.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    default=default(ReassembleConfig, "seconds"),
    show_default=True,
    help="Time limit of the search with data.",
)
@click.option("--out", metavar="FILE", help="Write the rebuilt network as safetensors, if it is exact.")
@click.option("--force", is_flag=True, help="Write --out even if the answer is not exact.")
@click.option("--make", metavar="DIR", help="Train a network and drop it into DIR instead (needs torch).")
@click.option("--blocks", type=click.IntRange(1), default=12, show_default=True, help="With --make.")
@click.option("--width", type=click.IntRange(1), default=24, show_default=True, help="With --make.")
@click.option("--hidden", type=click.IntRange(1), default=48, show_default=True, help="With --make.")
@click.option("--outputs", type=click.IntRange(1), default=1, show_default=True, help="With --make.")
@click.option("--epochs", type=click.IntRange(0), default=30, show_default=True, help="With --make.")
@click.option("--rows", type=click.IntRange(2), default=4000, show_default=True, help="With --make.")
@click.option(
    "--lr", type=click.FloatRange(0, min_open=True), default=1e-3, show_default=True, help="With --make."
)
@click.option("--weight-decay", type=click.FloatRange(0), default=0.0, show_default=True, help="With --make.")
@seed_option
@output_options
def command(pieces: str | None, data: str | None, make: str | None, output: Output, **options: Any) -> None:
    """Put the unlabelled layers in the folder PIECES back in order, using the recorded rows in DATA.

    DATA holds inputs and what the network answered to them: CSV (measurement_*, pred by default), .npz (x, y).
    The answer is exact when the network reproduces its outputs to rounding; if it is not, that is said.

    \b
    Example:
      strati reassemble --make dropped --blocks 8
      strati reassemble dropped dropped/data.csv --out model.safetensors
    """
    if make is not None:
        if pieces is not None:
            raise BadInputError("--make", "trains a network of its own; leave PIECES and DATA out")
        _make(make, output, options)
        return
    if pieces is None or data is None:
        raise click.UsageError("needs PIECES (a folder) and DATA (a file), or --make DIR")
    _reassemble(pieces, data, output, options)


def _reassemble(pieces: str, data: str, output: Output, options: dict[str, Any]) -> None:
    from strati.reassembly.reassemble import reassemble

    out = options["out"]
    if out is not None:
        check_writable(out)
    chosen = ReassembleConfig(
        **{field.name: options[field.name] for field in fields(ReassembleConfig) if field.name in options}
    )
    with progress("reassemble", None, quiet=output.quiet) as tick:
        result = reassemble(pieces, data, config=chosen, tick=tick)
    written = out is not None and (result.exact or options["force"])
    if written:
        result.save(out)
    emit(result, output)
    if out is not None and not output.quiet and output.json != "-":
        show(f"wrote {out}" if written else f"{out} not written: not exact (--force writes it)")


def _make(folder: str, output: Output, options: dict[str, Any]) -> None:
    from strati.reassembly.make import Recipe, make

    names = (
        "blocks",
        "width",
        "hidden",
        "outputs",
        "epochs",
        "rows",
        "lr",
        "weight_decay",
        "activation",
        "seed",
    )
    recipe = Recipe(**{name: options[name] for name in names})
    with progress("training", recipe.epochs, quiet=output.quiet) as tick:
        made = make(Path(folder), recipe, tick=tick)
    emit(made, output)
