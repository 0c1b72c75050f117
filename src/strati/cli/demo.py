"""``strati demo``: every verb once, on the embedded network and data, ending in a report.

The demo types nothing that a user could not type: each step is a command line, shown before it runs.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from strati.cli.common import Command, Output, emit, output_options, seed_option, show
from strati.core.errors import BadInputError
from strati.core.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


@dataclass(frozen=True)
class Step:
    """One command of the tour."""

    title: str
    command: str
    seconds: float


@dataclass(frozen=True)
class Tour(Result):
    """What the demo ran, and where its page is."""

    verb: ClassVar[str] = "demo"

    folder: str
    report: str
    steps: tuple[Step, ...]

    def payload(self) -> dict[str, Any]:
        """The steps with their times, and the report's place."""
        return dict(vars(self))

    def frame(self) -> pd.DataFrame:
        """One row per step."""
        import pandas as pd

        return pd.DataFrame([vars(step) for step in self.steps])

    def summary(self) -> RenderableType:
        """Where the page is."""
        total = sum(step.seconds for step in self.steps)
        return f"\n{len(self.steps)} steps in {total:.0f} s. Open the page: {self.report}"


@click.command("demo", cls=Command)
@click.option(
    "--out", "folder", default="strati-demo", show_default=True, metavar="DIR", help="Results and page."
)
@seed_option
@output_options
def command(folder: str, seed: int, output: Output) -> None:
    """The whole tour on an embedded network (an MLP on handwritten digits), in minutes, ending in a report.

    \b
    Example:
      strati demo
      strati demo --out tour --quiet
    """
    home = Path(folder)
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(home, f"cannot be created ({error.strerror}); give another --out") from None
    steps = []
    for title, words in plan(home, seed):
        start = time.perf_counter()
        _run(title, words, output.quiet or output.json == "-")
        steps.append(Step(title, shlex.join(["strati", *words]), time.perf_counter() - start))
    result = Tour(str(home), str(home / "report.html"), tuple(steps))
    if output.html is not None:
        from strati.core.files import write_atomic

        write_atomic(output.html, (home / "report.html").read_text())
    emit(result, Output(output.json, None, output.quiet))


def plan(home: Path, seed: int) -> list[tuple[str, list[str]]]:
    """The commands of the tour, in order."""
    from strati import embedded

    model, initial, data = (
        str(embedded.path(name))
        for name in ("digits-mlp.safetensors", "digits-mlp-init.safetensors", "digits.npz")
    )
    chance = ["--seed", str(seed)]
    results = {
        name: str(home / f"{name}.json")
        for name in ("scan", "compare", "degeneracy", "basis", "audit", "pieces")
    }
    dropped, study = str(home / "dropped"), str(home / "study")
    return [
        ("What is in the file", ["inspect", model]),
        ("What each layer is", ["scan", model, "--eigenvalues", "--json", results["scan"]]),
        ("What training changed", ["compare", initial, model, "--eigenvalues", "--json", results["compare"]]),
        (
            "Which layers the network needs",
            [
                *("study", model, "--data", data, "--out", study),
                *("--reinitialise", "--initial", initial, "--rerandomise", "--draws", "10", *chance),
            ],
        ),
        ("Which metrics to trust", ["audit", study, "--json", results["audit"]]),
        (
            "How many parameters are used",
            [
                "degeneracy",
                model,
                "--data",
                data,
                "--llc",
                "--scales",
                "--sample-rows",
                "100",
                *chance,
                "--json",
                results["degeneracy"],
            ],
        ),
        ("Which directions interact", ["basis", model, "--data", data, *chance, "--json", results["basis"]]),
        ("A residual network, dropped", ["reassemble", "--make", dropped, "--blocks", "8", *chance]),
        (
            "... and put back together",
            ["reassemble", dropped, f"{dropped}/data.csv", "--json", results["pieces"]],
        ),
        ("All of it on one page", ["report", *results.values(), "-o", str(home / "report.html")]),
    ]


def _run(title: str, words: list[str], quiet: bool) -> None:
    from strati.cli.main import strati

    if not quiet:
        show(f"\n── {title}\n$ {shlex.join(['strati', *words])}")
    strati.main(words + (["--quiet"] if quiet else []), prog_name="strati", standalone_mode=False)
