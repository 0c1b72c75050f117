"""Progress bars on standard error, only on a terminal and only for work of more than two seconds.

Numerical code never draws: it calls a :data:`strati.core.results.Tick`, and this module supplies one that moves a bar.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from strati.core.display import printable
from strati.core.results import Tick, silent

PATIENCE = 2.0
"""Seconds of work before a bar appears."""


class Ticker:
    """A :data:`strati.core.results.Tick` that also accepts the number of units once it is known.

    Args:
        tick: Called with the name of a finished unit.
        expect: Called with the number of units.
        resume: The command that resumes the work after a stop.
    """

    def __init__(
        self, tick: Tick = silent, expect: Callable[[int], None] = lambda total: None, resume: str = ""
    ) -> None:
        self._tick = tick
        self.expect = expect
        self.resume = resume or "the same call and folder"

    def __call__(self, name: str) -> None:
        """One unit is done."""
        self._tick(name)


def as_ticker(tick: Tick) -> Ticker:
    """The tick itself if it is a :class:`Ticker`, else one that only counts."""
    return tick if isinstance(tick, Ticker) else Ticker(tick)


@dataclass(frozen=True)
class Sizes:
    """The cost of units of unequal size, by name; the bar and the estimated time then follow the work done.

    Attributes:
        work: Work of each unit, in any one measure.
        bytes: Bytes that each unit reads.
    """

    work: Mapping[str, float]
    bytes: Mapping[str, int]


@contextmanager
def progress(
    label: str, total: int | None, *, quiet: bool = False, sizes: Sizes | None = None, resume: str = ""
) -> Iterator[Ticker]:
    """A bar with the unit's name and the time left; silent unless standard error is a terminal.

    Args:
        label: What is being done.
        total: Number of units, ``None`` when unknown.
        quiet: Show nothing.
        sizes: The cost of each unit if they differ much; the bytes are shown next to the number of units.
        resume: The command that resumes the work after a stop.

    Yields:
        A tick to call after each unit, with its name.
    """
    if quiet or total == 0 or not sys.stderr.isatty():
        yield Ticker(resume=resume)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[unit]}"),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    delay = threading.Timer(PATIENCE, bar.start)  # short work shows no bar
    delay.daemon = True
    delay.start()
    try:
        count = _Count(total, sizes)
        task = bar.add_task(label, total=count.work_total, unit="", count=count.text())

        def tick(name: str) -> None:
            work = count.add(name)
            bar.update(
                task,
                total=count.work_total,
                advance=work,
                count=count.text(),
                unit=escape(printable(name, limit=48)),
            )

        def expect(expected: int) -> None:
            count.expect(expected)
            bar.update(task, total=count.work_total, completed=count.work_done, count=count.text())

        yield Ticker(tick, expect, resume)
    finally:
        delay.cancel()
        delay.join()
        bar.stop()


class _Count:
    """Units, bytes and work, done and to do."""

    def __init__(self, total: int | None, sizes: Sizes | None) -> None:
        self._sizes = sizes
        self._total, self._done, self._bytes = total, 0, 0
        self.work_done = 0.0

    @property
    def work_total(self) -> float | None:
        return self._total if self._sizes is None else sum(self._sizes.work.values())

    def expect(self, total: int) -> None:
        """Set the number of units to come; with known sizes, those of an earlier run count as done."""
        if self._sizes is not None and self._total is not None and self._done == 0:
            self._done = max(self._total - total, 0)
            mean = sum(self._sizes.work.values()) / max(self._total, 1)
            self.work_done = mean * self._done
            self._bytes = round(sum(self._sizes.bytes.values()) / max(self._total, 1) * self._done)
        else:
            self._total = total

    def add(self, name: str) -> float:
        self._done += 1
        if self._total is not None:
            self._total = max(self._total, self._done)
        if self._sizes is None:
            self.work_done += 1.0
            return 1.0
        self._bytes += self._sizes.bytes.get(name, 0)
        work = self._sizes.work.get(name, 0.0)
        self.work_done += work
        return work

    def text(self) -> str:
        units = f"{self._done}/{self._total if self._total is not None else '?'}"
        if self._sizes is None:
            return units
        total = sum(self._sizes.bytes.values())
        return f"{units} layers, {min(self._bytes, total) / 1e9:.2f}/{total / 1e9:.2f} GB"
