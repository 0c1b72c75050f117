"""Progress on a terminal's standard error, and nowhere else.

Numerics never draw: they call a :data:`strati.types.Tick`; this module supplies one that moves a bar.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from strati.text import printable
from strati.types import Tick, silent


@contextmanager
def progress(label: str, total: int | None, *, quiet: bool = False) -> Iterator[Tick]:
    """A bar with the unit's name and the time left; silent unless standard error is a terminal.

    Args:
        label: What is being done.
        total: Number of units, ``None`` when unknown.
        quiet: Show nothing.

    Yields:
        A tick to call after each unit, with its name.
    """
    if quiet or total == 0 or not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[unit]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, unit="")

        def tick(name: str) -> None:
            bar.update(task, advance=1, unit=escape(printable(name, limit=48)))

        yield tick
