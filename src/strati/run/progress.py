"""Progress on a terminal's standard error, and nowhere else.

Numerics never draw: they call a :data:`strati.types.Tick`; this module supplies one that moves a bar.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from strati.text import printable
from strati.types import Tick, silent


class Ticker:
    """A :data:`strati.types.Tick` that can also be told, once it is known, how many units there will be."""

    def __init__(self, tick: Tick = silent, expect: Callable[[int], None] = lambda total: None) -> None:
        self._tick = tick
        self.expect = expect

    def __call__(self, name: str) -> None:
        """One unit is done."""
        self._tick(name)


@contextmanager
def progress(label: str, total: int | None, *, quiet: bool = False) -> Iterator[Ticker]:
    """A bar with the unit's name and the time left; silent unless standard error is a terminal.

    Args:
        label: What is being done.
        total: Number of units, ``None`` when unknown.
        quiet: Show nothing.

    Yields:
        A tick to call after each unit, with its name.
    """
    if quiet or total == 0 or not sys.stderr.isatty():
        yield Ticker()
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

        yield Ticker(tick, lambda expected: bar.update(task, total=expected))
