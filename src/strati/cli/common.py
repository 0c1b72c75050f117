"""What every verb shares: output options, and showing, saving and drawing a result."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from strati.cli.guard import guard_outputs
from strati.errors import BadInputError
from strati.options import default
from strati.run.files import check_writable
from strati.text import visible
from strati.types import Result

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Output:
    """Where a result goes."""

    json: str | None = None
    html: str | None = None
    quiet: bool = False

    def check(self) -> None:
        """Refuse output paths that cannot be written, before any work is done."""
        if self.json is not None and self.json != "-":
            check_writable(self.json)
        if self.html is not None:
            check_page(self.html)


def check_page(path: str) -> None:
    """Refuse the path of a page that cannot be written; ``-`` too, which would be a file of that name.

    Raises:
        BadInputError: Nothing can be written there.
    """
    if path == "-":
        raise BadInputError("-", "only JSON goes to standard output; give the page the name of a file")
    check_writable(path)


def output_options(function: F) -> F:
    """Add ``--json``, ``--html``, ``--quiet`` and ``--debug``; the verb receives one ``output``."""

    @click.option("--json", "json_", metavar="FILE", help="Write the result as JSON ('-' for stdout).")
    @click.option("--html", metavar="FILE", help="Write one self-contained interactive page.")
    @click.option("--quiet", "-q", is_flag=True, help="No summary, no progress.")
    @click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
    @functools.wraps(function)
    def wrapped(*args: Any, json_: str | None, html: str | None, quiet: bool, **options: Any) -> Any:
        output = Output(json_, html, quiet)
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
        help="Only these layers (repeatable): 'fc*', 'role:mlp.*', 'block:3-7'; a leading '!' leaves out.",
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
        help="Units of work done at once; 0 (default): one per processor.",
    )


def resume_options(function: F) -> F:
    """Add ``--out``, ``--engine`` and ``--address`` of verbs that can keep each finished layer in a folder."""
    options = (
        click.option(
            "--out",
            metavar="DIR",
            help="Keep each finished layer here. Interrupted? Run the same command again to resume.",
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


def estimate_option(function: F) -> F:
    """Add ``--estimate``; the verb receives ``estimate``."""
    return click.option(
        "--estimate", is_flag=True, help="Show what it would cost (time, memory), and do nothing else."
    )(function)


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
    if not output.quiet and output.json != "-":
        show(result.summary())
        for path in (output.json, output.html):
            if path is not None:
                show(f"wrote {path}")


def show(renderable: Any) -> None:
    """Print to standard output; full width when it is not a terminal, so that nothing is cut.

    Whatever a file's names hold, it is text: no markup of rich's, and nothing that a terminal would act upon.
    """
    from rich.console import Console
    from rich.segment import Segment, Segments

    width = None if sys.stdout.isatty() else 160
    console = Console(width=width, highlight=False, markup=False, emoji=False, soft_wrap=True)
    drawn = console.render_str(renderable) if isinstance(renderable, str) else renderable
    options = console.options.update(no_wrap=True, overflow="ignore")
    pieces = [
        piece if piece.control else Segment(visible(piece.text), piece.style)
        for piece in console.render(drawn, options)
    ]
    console.print(Segments(pieces), end="")
