"""Units of work, and the engine that runs them one after the other in this process.

An engine takes units and a *body* (a function of one unit) and yields one outcome per unit, in any order. What a body
returns depends on its unit alone, so all engines (``process_engine``, ``ray_engine``) give the same values. A unit that
raises becomes a failed outcome with the reason, and the others continue.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from strati.core.display import printable
from strati.core.errors import BadInputError, StratiError

Reader = Callable[[], Any]
"""Reads the input of a unit on any machine that sees the same files; can be pickled."""

Load = Callable[[str], Any]
"""Returns the content of one of the unit's files (bytes), or what its reader returns, wherever the unit runs."""


@dataclass(frozen=True)
class Unit:
    """One unit of work.

    ``group``: units of one group share a cache, so an engine gives them to one worker if it can.
    ``files``: the input files, name -> path on the machine that started the run, or a reader of a part of one.
    """

    key: str
    name: str
    group: str
    config: Mapping[str, Any]
    files: Mapping[str, str | Reader] = field(default_factory=dict)


Body = Callable[[Unit, Load], Any]


@dataclass(frozen=True)
class Outcome:
    """The value of a unit, or the reason why it failed."""

    unit: Unit
    value: Any = None
    reason: str | None = None


Engine = Callable[[Body, Iterable[Unit]], Iterator[Outcome]]


def run_here(body: Body, units: Iterable[Unit]) -> Iterator[Outcome]:
    """Run the units one after the other in this process.

    Examples:
        >>> units = [Unit(k, k, "", {"x": x}) for k, x in (("a", 2.0), ("b", 0.0))]
        >>> [(o.value, o.reason) for o in run_here(lambda unit, load: 1 / unit.config["x"], units)]
        [(0.5, None), (None, 'ZeroDivisionError: float division by zero')]
    """
    for unit in units:
        yield attempt(body, unit, lambda name, unit=unit: read(unit.files[name]))  # type: ignore[misc]


def attempt(body: Body, unit: Unit, load: Load) -> Outcome:
    """Run one unit on one thread; an exception becomes the reason of a failed outcome."""
    try:
        with one_thread():
            return Outcome(unit, body(unit, load))
    except StratiError as error:
        return Outcome(unit, reason=str(error))
    except Exception as error:
        return Outcome(unit, reason=reason_of(error))


def reason_of(error: BaseException) -> str:
    """An exception in one line that is never empty: its text, or where it was raised.

    Examples:
        >>> reason_of(ValueError("bad"))
        'ValueError: bad'
    """
    kind, text = type(error).__name__, str(error).strip()
    if text:
        return printable(f"{kind}: {text}", 400)
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" at {Path(last[0].filename).name}:{last[0].lineno}, in {last[0].name}" if last else ""
    return f"{kind} without a message{where}"


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit BLAS and torch to one thread, because the last bits depend on the number of threads."""
    from threadpoolctl import threadpool_limits

    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else 0
    if torch is not None:
        torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        if torch is not None and before != 1:
            torch.set_num_threads(before)


def cores() -> int:
    """The number of processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read(path: str | Reader) -> Any:
    """A file's content, or what a reader returns.

    Raises:
        BadInputError: The file cannot be read.
    """
    if callable(path):
        return path()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadInputError(path, f"cannot be read ({error.strerror or error})") from None


T = TypeVar("T")
U = TypeVar("U")


def in_threads(work: Callable[[T], U], items: Sequence[T], count: int) -> list[U]:
    """The results of ``work`` on every item, ``count`` at once, in the items' order.

    Python handles a signal only between two of its own steps, and an eigenvalue solver is one step of many seconds.
    Here the main thread only waits, so Ctrl-C interrupts it at once; what the threads still compute is discarded.

    Examples:
        >>> in_threads(lambda x: x * x, [1, 2, 3], 2)
        [1, 4, 9]
    """
    if not items:
        return []
    pool = ThreadPoolExecutor(max(1, min(count, len(items))))
    wait = True
    try:
        return list(pool.map(work, items))
    except KeyboardInterrupt:
        wait = False
        raise
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)


def in_thread(work: Callable[[], U]) -> U:
    """The result of ``work``, computed on a thread so that Ctrl-C interrupts at once.

    Examples:
        >>> in_thread(lambda: 2 + 2)
        4
    """
    return in_threads(lambda body: body(), [work], 1)[0]
