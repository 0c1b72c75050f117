"""Run units of work and store each outcome, so that a run can be stopped at any time and resumed.

``scan``, ``compare``, ``study`` and ``track`` share where the work runs (:class:`Run`), the loop that stores outcomes
(:func:`drive`), and the folder with its store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from strati.core.errors import BadInputError, StoppedError
from strati.core.files import lock
from strati.core.results import Tick, silent
from strati.jobs.engine import Body, Engine, Outcome, Unit, cores, run_here
from strati.jobs.progress import as_ticker
from strati.jobs.store import Finished, Store


@dataclass(frozen=True)
class Run:
    """Where and how the units of a long run are worked on.

    Args:
        engine: ``local`` or ``ray``.
        workers: Processes; with one, ``local`` works in this process; 0 for one per processor.
        address: The Ray cluster; ``None`` starts one here.
        retry: Try again the units that failed in an earlier run.
        tick: Called after each unit. A :class:`~strati.jobs.progress.Ticker` also gets the number of units, and knows
            the command that resumes the run.
    """

    engine: str = "local"
    workers: int = 1
    address: str | None = None
    retry: bool = False
    tick: Tick = silent

    def expect(self, total: int) -> None:
        """Announce how many units there will be."""
        as_ticker(self.tick).expect(total)

    def make_engine(self) -> Engine:
        """The function that runs units.

        Raises:
            BadInputError: No such engine, or options that do not go together.
        """
        if self.workers < 0:
            raise BadInputError("workers", "must be 0 (one per processor) or more")
        workers = self.workers or cores()
        if self.engine == "ray":
            from strati.jobs.ray_engine import run_ray

            return partial(run_ray, address=self.address, workers=workers if self.address is None else None)
        if self.engine != "local":
            raise BadInputError(self.engine, "no such engine; there are local and ray")
        if self.address is not None:
            raise BadInputError("address", "is the address of a Ray cluster; choose the engine ray")
        if workers == 1:
            return run_here
        from strati.jobs.process_engine import run_processes

        return partial(run_processes, workers=workers)


Keep = Callable[[Outcome], Finished]
"""Turns an outcome into the row to store; it may write files first."""


def drive(store: Store, body: Body, todo: Sequence[Unit], keep: Keep, run: Run) -> None:
    """Run units and store each outcome as it comes; units that another run finishes meanwhile are skipped."""
    for outcome in run.make_engine()(body, _unless_done(todo, store, run)):
        store.put(keep(outcome))
        run.tick(outcome.unit.name)


def _unless_done(todo: Sequence[Unit], store: Store, run: Run) -> Iterator[Unit]:
    before = store.keys()
    for unit in todo:
        if unit.key in before or unit.key not in store:
            yield unit
        else:
            run.tick(unit.name)


@contextmanager
def interruptible(count: Callable[[], int], run: Run) -> Iterator[None]:
    """Turn Ctrl-C into an error that says how many units are done and how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedError(f"stopped, {count()} done", f"resume with {as_ticker(run.tick).resume}") from None


@contextmanager
def shared_folder(folder: Path) -> Iterator[bool]:
    """Create the folder; yields whether no other process works in it.

    Raises:
        BadInputError: The folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise BadInputError(
            folder, f"cannot be written to ({error.strerror or error}); choose another folder"
        ) from None
    try:
        yield lock(handle, wait=False)
    finally:
        os.close(handle)


def open_store(
    path: Path, *, identity: str, layout: int, about: dict[str, Any], kind: str = "study"
) -> Store:
    """Open or create the store of a resumable run.

    Args:
        path: The store's file.
        identity: Hash of everything that the rows depend on; a store with another identity holds another run.
        layout: Version of the rows' meaning and columns; rows of another version are refused.
        about: Further facts to record in the store.
        kind: What the store holds, for messages.

    Raises:
        BadInputError: The folder holds another run, or one whose rows another strati wrote with other meanings.
    """
    store = Store(path, about=about | {"identity": identity, "format": layout})
    there = store.about()
    if there.get("format", 1) != layout:
        store.close()
        why = (
            f"holds rows of format {there.get('format', 1)}, this strati writes format {layout}; "
            "choose another folder, or delete this one"
        )
        raise BadInputError(path.parent, why)
    if there.get("identity") != identity:
        store.close()
        why = (
            f"holds another {kind} (its spec, seed or data differ); choose another folder, or delete this one"
        )
        raise BadInputError(path.parent, why)
    return store


def run_cached(
    path: Path, units: Sequence[Unit], body: Body, keep: Keep, run: Run, *, holds: str, layout: int
) -> Iterator[Any]:
    """The values of units in their order, each computed once and stored; several runs may share the store.

    A second run at the same time starts at the other end, so that the two meet in the middle.

    Args:
        path: The store's file; its folder is created if necessary.
        units: The work; a unit whose key is in the store is not computed again.
        body: Computes one unit.
        keep: Turns an outcome into the row to store.
        run: Where the work is done.
        holds: What the store is for; a store for something else is refused.
        layout: Version of the values' meaning.

    Raises:
        BadInputError: The folder holds something else or cannot be written, or a unit failed.
        StoppedError: Ctrl-C; finished units are stored.
    """
    keys = {unit.key for unit in units}
    with (
        shared_folder(path.parent) as alone,
        open_store(path, identity=holds, layout=layout, about={"holds": holds}, kind="run") as store,
        interruptible(lambda: len(store.keys(failed=False) & keys), run),
    ):
        done = store.keys(failed=False)
        todo = [unit for unit in units if unit.key not in done]
        run.expect(len(todo))
        drive(store, body, todo if alone else todo[::-1], keep, run)
        for unit in units:
            finished = store.get(unit.key)
            if finished is None or finished.reason is not None:
                why = (
                    finished.reason
                    if finished is not None and finished.reason
                    else "was not computed; run it again"
                )
                raise BadInputError(unit.name, why)
            yield finished.value
