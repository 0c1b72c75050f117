"""``strati demo``: nine commands on an embedded transformer, one line each, ending in a report.

The demo copies the network, its initial weights, an adapter and a text into its folder, so that you can type every
command that it runs. Each command writes its JSON there; the line shown is the first sentence of that result.
"""

from __future__ import annotations

import json
import shlex
import shutil
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import click

from strati.cli.common import Command, Output, emit, option, output_options, screen_width, seed_option, show
from strati.core.display import NextCommand, command_path
from strati.core.errors import BadInputError
from strati.core.files import write_atomic
from strati.core.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

CHARACTERS = 8_000
"""Length of the text that the commands measure on: enough for an interval, short enough for a demo."""


@dataclass(frozen=True)
class Step:
    """One command of the demo, the first sentence of its result, and its time."""

    title: str
    command: str
    answer: str
    seconds: float


@dataclass(frozen=True)
class Tour(Result):
    """What the demo ran, and where its report is."""

    verb: ClassVar[str] = "demo"

    folder: str
    report: str
    steps: tuple[Step, ...]

    def frame(self) -> pd.DataFrame:
        """One row per step."""
        import pandas as pd

        return pd.DataFrame([vars(step) for step in self.steps])

    def summary(self) -> RenderableType:
        """The path of the report and the first command on your own model."""
        from rich.console import Group

        total = sum(step.seconds for step in self.steps)
        return Group(
            f"{len(self.steps)} steps in {total:.0f} s. Open {self.report} in a browser.",
            NextCommand(("strati scan YOUR-MODEL.safetensors",)),
        )


@click.command("demo", cls=Command)
@option(
    "--out folder DIR", "Folder for the copied network, the results and the report.", default="strati-demo"
)
@option("-v --verbose", "Show every command with its whole output.")
@seed_option
@output_options
def command(folder: str, verbose: bool, seed: int, output: Output) -> None:
    """Show what strati does on an embedded transformer, in about 40 seconds, ending in a report.

    The network is a character-level language model of 526,560 parameters, trained on Shakespeare.
    Interrupted? Run the same command again: finished measurements are kept.

    \b
    Example:
      strati demo
      strati demo --out tour -v
    """
    home = Path(folder)
    _prepare(home)
    steps = []
    for title, words in plan(home, seed):
        steps.append(_run(title, words, verbose and output.speaks))
        if output.speaks and not verbose:
            show(_line(steps[-1]))
    report = home / "report.html"
    if output.html is not None:
        write_atomic(output.html, report.read_text())
    emit(Tour(str(home), command_path(report), tuple(steps)), Output(output.json, None, output.quiet))


def plan(home: Path, seed: int) -> list[tuple[str, list[str]]]:
    """The commands of the demo, in order; each but the last writes its result as JSON."""
    model, initial, adapter, text, study, small = (
        str(home / name)
        for name in ("shakespeare", "shakespeare-init", "shakespeare-lora", "tempest.txt", "study", "small")
    )
    measured = ("--data", text)
    # Only the matrices of the MLPs, three ranks each: a study of everything takes minutes.
    cut = ("--layers", "role:mlp.*", "--truncate", "rank=8,16,32", "--seed", str(seed))
    commands = [
        ("Is the file intact?", ["check", model]),
        ("What is in it?", ["scan", model, "--eigenvalues"]),
        ("What did fine-tuning change?", ["compare", model, adapter, "--eigenvalues"]),
        ("Where does it come from?", ["lineage", model, initial, adapter]),
        ("Which layers matter?", ["study", model, *measured, "--out", study, *cut]),
        ("How small can it get?", ["plan", study, "--budget", "loss=+2%"]),
        ("Write the smaller model", ["apply", str(home / "plan.json"), model, "--out", small]),
        (
            "How did training go?",
            ["track", initial, model, *measured, "--what", "spectra,loss", "--out", str(home / "track")],
        ),
    ]
    steps = [(title, [*words, "--json", str(home / f"{words[0]}.json")]) for title, words in commands]
    results = [str(home / f"{words[0]}.json") for _, words in commands]
    return [*steps, ("Everything on one page", ["report", *results, study, "-o", str(home / "report.html")])]


def _prepare(home: Path) -> None:
    """Copy the network and its text into the folder, which is new, empty or that of an earlier demo."""
    from strati import embedded

    marker = home / "shakespeare" / "config.json"
    try:
        if home.is_dir() and any(home.iterdir()) and not marker.is_file():
            raise BadInputError(home, "is not empty and holds no earlier demo; give another --out")
        for name in ("shakespeare", "shakespeare-init", "shakespeare-lora"):
            source = embedded.path(name)
            # The marker comes first, so that an interrupted copy is taken up again.
            for file in sorted(source.iterdir(), key=lambda path: path.name != marker.name):
                target = home / name / file.name
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.is_file() or target.stat().st_size != file.stat().st_size:
                    shutil.copyfile(file, target)
        write_atomic(home / "tempest.txt", embedded.path("tempest.txt").read_text("utf-8")[:CHARACTERS])
        shutil.rmtree(home / "small", ignore_errors=True)  # `apply` writes into a new folder only
    except OSError as error:
        raise BadInputError(home, f"cannot be written ({error.strerror}); give another --out") from None


def _run(title: str, words: list[str], verbose: bool) -> Step:
    from strati.cli.main import strati

    command_line = shlex.join(["strati", *words])
    if verbose:
        show(f"\n{title}\n$ {command_line}")
    start = time.perf_counter()
    strati.main(words + ([] if verbose else ["--quiet"]), prog_name="strati", standalone_mode=False)
    seconds = time.perf_counter() - start
    if words[0] == "report":
        return Step(title, command_line, f"Wrote {command_path(words[-1])}.", seconds)
    answer, *numbers = json.loads(Path(words[-1]).read_text("utf-8"))["summary"]
    # The first line of `apply` names the folder; what was measured is on the second.
    return Step(title, command_line, numbers[0] if words[0] == "apply" and numbers else answer, seconds)


def _line(step: Step) -> str:
    """The command's name, its time and its answer; wrapped below the answer where the screen is narrow."""
    name = f"{step.command.split()[1]:<8}{step.seconds:5.1f} s  "
    return textwrap.fill(name + step.answer, screen_width(), subsequent_indent=" " * len(name))
