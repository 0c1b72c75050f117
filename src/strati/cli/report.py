"""``strati report``: one page from JSON results and study folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import click

from strati.cli import common
from strati.core.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


@dataclass(frozen=True)
class Page(Result):
    """The page that was written."""

    verb: ClassVar[str] = "report"

    file: str
    size: int
    results: tuple[str, ...]

    def frame(self) -> pd.DataFrame:
        """One row per result on the page."""
        import pandas as pd

        return pd.DataFrame({"schema": self.results})

    def summary(self) -> RenderableType:
        """Where it is and how large, and how to open it."""
        from rich.console import Group

        from strati.core.display import NextCommand, Paragraph, command_path

        count = f"{len(self.results)} result{'s' if len(self.results) != 1 else ''}"
        return Group(
            Paragraph(f"Wrote {self.file} ({count}, {self.size / 1e6:.2f} MB)."),
            NextCommand((f"python -m webbrowser {command_path(self.file)}", "strati report --help")),
        )


@click.command("report", cls=common.Command)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@common.option("--output -o --html target FILE.html", "The page to write.", required=True)
@common.option("--json json_ FILE", "Write what is on the page as JSON ('-' for stdout).")
@common.option("--quiet -q", "Say nothing.")
@common.option("--debug", "Show the traceback of an error.", expose_value=False)
def command(runs: tuple[str, ...], target: str, json_: str | None, quiet: bool) -> None:
    """Draw RUN... as one self-contained interactive page.

    RUN is a JSON result of any verb (written with --json) or the folder of a study, which is audited first.
    The page opens from disk, asks the network for nothing, and can be mailed.

    \b
    Example:
      strati scan model.safetensors --eigenvalues --json scan.json
      strati report scan.json -o report.html
    """
    from strati.report.page import write_report

    common.Output(json_, target).check()
    common.guard_outputs(click.get_current_context())
    results = write_report(runs, target)
    page = Page(target, Path(target).stat().st_size, tuple(r["schema"] for r in results))
    common.emit(page, common.Output(json_, quiet=quiet))
