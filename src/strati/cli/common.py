"""What every verb shares: output options, and showing, saving and drawing a result."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from strati.cli.guard import guard_outputs
from strati.core.errors import BadInputError, require
from strati.core.options import default
from strati.core.results import Result
from strati.core.text import visible
from strati.jobs.outputs import check_writable

F = TypeVar("F", bound=Callable[..., Any])

NEXT = "next: "
"""Begin of the last line of a summary, the command to run next."""


GROUPS = {
    "Input": (
        "data",
        "inputs",
        "targets",
        "layers",
        "base",
        "steps",
        "activation",
        "split_qkv",
        "conv",
        "rows",
    ),
    "Output": (
        "json_",
        "html",
        "plot",
        "export",
        "columns",
        "sort",
        "wide",
        "quiet",
        "debug",
        "force",
        "help",
    ),
    "Large models": ("out", "workers", "engine", "address", "estimate", "device", "retry"),
}
"""Groups of options in the help of a command, by parameter name; all others are "What to compute"."""

TITLES = ("Input", "What to compute", "Output", "Large models")


def _title(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Argument):
        return "Input"
    if "--help" in parameter.opts:
        return "Output"
    return next((title for title, names in GROUPS.items() if parameter.name in names), "What to compute")


class Command(click.Command):
    """A command whose help lists its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups in the order Input, What to compute, Output, Large models."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in TITLES}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups[_title(parameter)].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


@dataclass(frozen=True)
class Output:
    """Where a result goes."""

    json: str | None = None
    html: str | None = None
    quiet: bool = False
    plot: str | None = None

    def check(self) -> None:
        """Refuse output paths that cannot be written, before any work is done."""
        if self.json is not None and self.json != "-":
            check_writable(self.json)
        if self.html is not None:
            check_page(self.html)
        if self.plot is not None:
            check_picture(self.plot)


def check_page(path: str) -> None:
    """Refuse the path of a page that cannot be written; ``-`` too, which would be a file of that name.

    Raises:
        BadInputError: Nothing can be written there.
    """
    if path == "-":
        raise BadInputError("-", "only JSON goes to standard output; give the page the name of a file")
    check_writable(path)


def check_picture(path: str) -> None:
    """Refuse the path of a picture that cannot be written or whose format is not PNG, SVG or PDF.

    Raises:
        BadInputError: The ending is another one, or nothing can be written there.
    """
    if not path.lower().endswith((".png", ".svg", ".pdf")):
        raise BadInputError(path, "a picture is a .png, .svg or .pdf file")
    check_writable(path)


def output_options(function: F) -> F:
    """Add ``--json``, ``--html``, ``--plot``, ``--quiet`` and ``--debug``; the command receives one ``output``."""

    @click.option("--json", "json_", metavar="FILE", help="Write the result as JSON ('-' for stdout).")
    @click.option("--html", metavar="FILE", help="Write one self-contained interactive page.")
    @click.option("--plot", metavar="FILE", help="Draw the result as a picture (.png, .svg or .pdf).")
    @click.option("--quiet", "-q", is_flag=True, help="Print nothing except errors.")
    @click.option("--debug", is_flag=True, expose_value=False, hidden=True)
    @functools.wraps(function)
    def wrapped(
        *args: Any, json_: str | None, html: str | None, plot: str | None, quiet: bool, **options: Any
    ) -> Any:
        output = Output(json_, html, quiet, plot)
        output.check()
        guard_outputs(click.get_current_context())
        return function(*args, output=output, **options)

    return wrapped  # type: ignore[return-value]


def seed_option(function: F) -> F:
    """Add ``--seed``."""
    return click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Random seed.")(
        function
    )


def layers_option(function: F) -> F:
    """Add ``--layers``, repeatable; the verb receives ``layers``, a tuple of patterns, to hand to ``layers=``."""
    return click.option(
        "--layers",
        multiple=True,
        metavar="PATTERN",
        help="Select layers by name, role or block: 'fc*', 'role:mlp.*', 'block:3-7'. Prefix with '!' to exclude. "
        "Repeatable.",
    )(function)


def workers_option(config: type) -> Callable[[F], F]:
    """Add ``--workers`` (and its aliases ``--jobs``, ``-j``) with a config's default; the verb receives ``workers``."""
    return click.option(
        "--workers",
        "--jobs",
        "-j",
        "workers",
        type=click.IntRange(0),
        default=default(config, "workers"),
        metavar="N",
        help="Number of parallel workers (0 = one per CPU).",
    )


def resume_options(function: F) -> F:
    """Add ``--out``, ``--engine`` and ``--address`` of verbs that can keep each finished layer in a folder."""
    options = (
        click.option(
            "--out",
            metavar="DIR",
            help="Save progress in DIR so that an interrupted run can be resumed.",
        ),
        click.option(
            "--engine",
            type=click.Choice(["local", "ray"]),
            default="local",
            show_default=True,
            help="With --out: work in processes on this machine, or on a Ray cluster.",
        ),
        click.option("--address", metavar="HOST:PORT", help="With --engine ray: an existing cluster."),
    )
    for option in reversed(options):
        function = option(function)
    return function


_WIDE, _WIDEST = "strati.wide", 4000


def table_options(function: F) -> F:
    """Add ``--columns``, ``--sort`` and ``--wide``; the verb receives ``table``, a :class:`TableOptions`."""

    @click.option(
        "--columns", metavar="NAMES", help="Columns of the table: names of JSON fields, by commas, or 'all'."
    )
    @click.option("--sort", metavar="NAME", help="Sort by this column; '-NAME' puts the largest first.")
    @click.option("--wide", is_flag=True, help="Show every column, however wide the terminal.")
    @functools.wraps(function)
    def wrapped(*args: Any, columns: str | None, sort: str | None, wide: bool, **options: Any) -> Any:
        from strati.core.tables import TableOptions

        names = tuple(name.strip() for name in (columns or "").split(",") if name.strip())
        click.get_current_context().meta[_WIDE] = wide
        return function(*args, table=TableOptions(names, sort), **options)

    return wrapped  # type: ignore[return-value]


def estimate_option(function: F) -> F:
    """Add ``--estimate``; the verb receives ``estimate``."""
    return click.option("--estimate", is_flag=True, help="Estimate time and memory, then exit.")(function)


def device_option(function: F) -> F:
    """Add ``--device``; the verb receives ``device``, a text for torch, or ``None``: where the model is."""
    return click.option(
        "--device", metavar="DEVICE", help="Compute on this torch device (cpu, cuda, cuda:1, mps)."
    )(function)


def emit(result: Result, output: Output) -> None:
    """Show the summary, write the JSON, draw the page, as asked."""
    if output.json == "-":
        print(result.to_json())
    elif output.json is not None:
        result.to_json(output.json)
    if output.html is not None:
        from strati.report.page import write_report

        write_report(result, output.html)
    if output.plot is not None:
        _draw(result, output.plot)
    if not output.quiet and output.json != "-":
        written = [path for path in (output.json, output.html, output.plot) if path is not None]
        show(result.summary(), notes=[f"wrote {path}" for path in written])


def _draw(result: Result, path: str) -> None:
    require("matplotlib", "plot", "--plot").use("Agg")
    figure = result.plot()
    getattr(figure, "figure", figure).savefig(path, dpi=150, bbox_inches="tight")


def screen_width() -> int:
    """Columns of the output: ``COLUMNS`` if set, else the terminal's, else 160, so that a pipe gets whole tables.

    With ``--wide`` as many as any table needs.
    """
    context = click.get_current_context(silent=True)
    if context is not None and context.meta.get(_WIDE):
        return _WIDEST
    return max(shutil.get_terminal_size((160 if not sys.stdout.isatty() else 80, 24)).columns, 40)


def show(renderable: Any, *, notes: Sequence[str] = ()) -> None:
    """Print to standard output, no line wider than :func:`screen_width`.

    Whatever a file's names hold, it is text: no markup of rich's, and nothing that a terminal would act upon.

    Args:
        renderable: What to print.
        notes: Lines below it, but above the next command, which stays last.
    """
    from rich.console import Console
    from rich.segment import Segment, Segments

    from strati.core.tables import NextCommand

    console = Console(width=screen_width(), highlight=False, markup=False, emoji=False)

    def lines_of(part: Any) -> list[list[Segment]]:
        if isinstance(part, str) and part.startswith(NEXT):
            # A command stays on one line, so that it can be copied, with paths from the present folder.
            command = part.removeprefix(NEXT).replace(f"{Path.cwd()}{os.sep}", "")
            return [[Segment(NextCommand((command,)).line(console.width))]]
        drawn = console.render_str(part) if isinstance(part, str) else part
        return list(Segment.split_lines(console.render(drawn)))  # not cropped: a command stays whole

    def text_of(line: list[Segment]) -> str:
        return "".join(piece.text for piece in line)

    lines = lines_of(renderable)
    starts = [i for i, line in enumerate(lines) if text_of(line).startswith(NEXT)]
    place = starts[-1] if starts else len(lines)
    lines[place:place] = [line for note in notes for line in lines_of(note)]
    pieces = [
        piece if piece.control else Segment(visible(piece.text), piece.style)
        for line in lines
        for piece in [*line, Segment.line()]
    ]
    console.print(Segments(pieces), end="", soft_wrap=True)
