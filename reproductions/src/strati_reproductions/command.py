"""``strati reproduce``: compare a paper's numbers with ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from strati.cli.common import Output, emit, output_options, seed_option, show
from strati.core.display import Column, table
from strati.core.errors import BadInputError
from strati.jobs.progress import progress
from strati_reproductions.rows import Reproduction, Row

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


@dataclass(frozen=True)
class Catalogue(Reproduction):
    """The experiments that can be reproduced: rows with a paper and a summary, without numbers."""

    def frame(self) -> pd.DataFrame:
        """One line per experiment."""
        return super().frame()[["what", "paper", "note"]]

    def summary(self) -> RenderableType:
        """Names, papers, and what each experiment redoes."""
        rows = ((row.what, row.paper, row.note) for row in self.rows)
        return table([Column("name", keep=True), "paper", Column("what", keep=True)], rows)


def catalogue() -> Catalogue:
    """The list of all experiments."""
    from strati_reproductions.registry import ENTRIES

    rows = tuple(Row(name, entry.paper, None, entry.summary) for name, entry in ENTRIES.items())
    return Catalogue(None, "what can be reproduced", rows)


@click.command("reproduce")
@click.argument("name", required=False)
@click.option("--quick", is_flag=True, help="Fewer networks or draws: minutes instead of an hour.")
@click.option(
    "--out", "folder", default="out", show_default=True, metavar="DIR", help="Figures and resumable work."
)
@click.option(
    "--model",
    "models",
    metavar="MODEL",
    multiple=True,
    help="Your own network instead of those that can be fetched: one for pretrained, two for small-and-large.",
)
@click.option(
    "--data", metavar="DATA", help="pretrained: its data (text or token ids; images as .npz or a folder)."
)
@seed_option
@output_options
def command(
    name: str | None,
    quick: bool,
    folder: str,
    models: tuple[str, ...],
    data: str | None,
    seed: int,
    output: Output,
) -> None:
    """Redo a paper's table or figure NAME and compare the numbers; without NAME, list them.

    \b
    Example:
      strati reproduce
      strati reproduce alpha-of-random-layers --quick
      strati reproduce pretrained --model gpt2 --data wikitext/test.txt
      strati reproduce small-and-large --model gpt2 --model gpt2-large
    """
    from strati_reproductions.registry import reproduce

    if name is None:
        emit(catalogue(), output)
        return
    _check_own(name, models, data)
    with progress(f"reproduce {name}", None, quiet=output.quiet) as tick:
        place = Path(folder) / name
        if len(models) == 2:
            from strati_reproductions.eigenspectra.sizes import own_sizes

            reproduction = own_sizes(models[0], models[1], seed=seed, folder=place, tick=tick)
        elif models and data is not None:
            from strati_reproductions.robust_and_critical.user_model import pretrained_own

            reproduction = pretrained_own(models[0], data, quick=quick, seed=seed, folder=place, tick=tick)
        else:
            reproduction = reproduce(name, quick=quick, seed=seed, folder=folder, tick=tick)
    emit(reproduction, output)
    if not output.quiet and output.json != "-":
        for path in reproduction.figures:
            show(path)


def _check_own(name: str, models: tuple[str, ...], data: str | None) -> None:
    """Refuse networks and data of the user's that do not belong to this reproduction."""
    models_taken = {"pretrained": 1, "small-and-large": 2}.get(name, 0)
    if models and len(models) != models_taken:
        many = {0: "takes no --model", 1: "takes one --model and its --data", 2: "takes --model twice"}[
            models_taken
        ]
        raise BadInputError(name, many)
    if (data is not None) != (name == "pretrained" and bool(models)):
        raise BadInputError(name, "--model and --data belong together, and to `strati reproduce pretrained`")
