"""``strati reproduce``: a paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import click

from strati.cli.common import Output, emit, output_options, seed_option, show
from strati.errors import require
from strati.run.progress import progress
from strati.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.papers.registry import Entry


@dataclass(frozen=True)
class Catalogue(Result):
    """What can be reproduced: rows as those of a reproduction, with no number of ours yet."""

    verb: ClassVar[str] = "reproduce"

    entries: Mapping[str, Entry]

    def payload(self) -> dict[str, Any]:
        """One row per name: the paper it is of, and what it redoes."""
        rows = [
            {"what": name, "paper": entry.paper, "ours": None, "note": entry.summary}
            for name, entry in self.entries.items()
        ]
        return {"name": None, "title": "what can be reproduced", "rows": rows}

    def frame(self) -> pd.DataFrame:
        """The rows."""
        import pandas as pd

        return pd.DataFrame(self.payload()["rows"])

    def summary(self) -> RenderableType:
        """Names, papers, and what each redoes."""
        from strati.tables import Column, table

        rows = ((name, entry.paper, entry.summary) for name, entry in self.entries.items())
        return table([Column("name", keep=True), "paper", Column("what", keep=True)], rows)


@click.command("reproduce")
@click.argument("name", required=False)
@click.option("--quick", is_flag=True, help="Fewer networks or draws: minutes instead of an hour.")
@click.option(
    "--out", "folder", default="out", show_default=True, metavar="DIR", help="Figures and resumable work."
)
@click.option("--plot", is_flag=True, help="Print where the figures are (PNG and SVG, below --out).")
@seed_option
@output_options
def command(name: str | None, quick: bool, folder: str, plot: bool, seed: int, output: Output) -> None:
    """Redo a paper's table or figure NAME, the paper's number beside ours; no NAME lists them.

    \b
    Example:
      strati reproduce
      strati reproduce alpha-of-random-layers --quick
    """
    from strati.papers.registry import ENTRIES, reproduce

    if name is None:
        emit(Catalogue(ENTRIES), output)
        return
    if plot:
        require("matplotlib", "plot", "drawing the figures of a reproduction")
    with progress(f"reproduce {name}", None, quiet=output.quiet) as tick:
        result = reproduce(name, quick=quick, seed=seed, folder=folder, tick=tick)
    emit(result, output)
    if plot:
        for path in result.figures:
            show(path)
