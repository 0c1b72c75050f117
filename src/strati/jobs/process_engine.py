"""The engine of several processes on one machine.

Each worker is a process of its own with a pipe of its own, so a worker that is killed costs its one unit a try
and nothing else: pools of the standard library lose all pending units, or hang. No worker outlives the process
that started it, however that one ends. The script that is running is not imported again by workers, so it needs no
guard: what of it the work uses travels by value.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from strati.core.errors import UnsupportedError
from strati.jobs.engine import Body, Outcome, Unit, attempt, read

_START_FAILURES = 3


def run_processes(body: Body, units: Iterable[Unit], *, workers: int, tries: int = 3) -> Iterator[Outcome]:
    """Run the units on ``workers`` processes of this machine.

    Args:
        body: What to do with a unit; it travels to the workers once.
        units: The work.
        workers: Number of processes.
        tries: How often a unit is given to a worker before its workers' deaths make it a failed unit.

    Yields:
        Outcomes in the order in which they come in.

    Raises:
        UnsupportedError: Workers cannot be started, or the body cannot be sent to them.
    """
    waiting = list(units)
    if not waiting:
        return
    crew = _WorkerPool(_packed(body), min(workers, len(waiting)))
    lost: Counter[str] = Counter()
    try:
        while waiting or crew.busy():
            crew.fill(waiting)
            for worker in crew.heard():
                outcome = worker.listen()
                if outcome is not None:
                    yield outcome
                elif not worker.alive:
                    unit, worker.unit = worker.unit, None
                    crew.bury(worker)
                    if unit is None:
                        continue
                    lost[unit.key] += 1
                    if lost[unit.key] < tries:
                        waiting.insert(0, unit)
                    else:
                        yield Outcome(
                            unit, reason=f"its worker died {tries} times, the last time by {worker.end()}"
                        )
    finally:
        crew.dismiss()


class _Worker:
    """A worker process, the pipe to it and the unit it has."""

    def __init__(self, payload: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_work, args=(theirs, payload), daemon=True)
        with _interrupts_held(), _script_hidden():
            self.process.start()
        theirs.close()
        self.ready = False
        self.alive = True
        self.unit: Unit | None = None
        self.group: str | None = None

    def give(self, unit: Unit) -> None:
        self.unit, self.group = unit, unit.group
        with suppress(
            OSError
        ):  # it just died: listen() sees the end of the pipe and the unit gets another try
            self.pipe.send(unit)

    def listen(self) -> Outcome | None:
        try:
            message: Any = self.pipe.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            self.alive = False
            return None
        if not self.ready:
            self.ready = True
            return None
        self.unit = None
        outcome: Outcome = message
        return outcome

    def end(self) -> str:
        self.process.join(5)
        code = self.process.exitcode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


class _WorkerPool:
    """The workers: started, given work by preference for their group, replaced when they die."""

    def __init__(self, payload: bytes, size: int) -> None:
        self._payload, self._size = payload, size
        self._workers: list[_Worker] = []
        self._stillborn = 0

    def busy(self) -> bool:
        return any(worker.unit is not None for worker in self._workers)

    def fill(self, waiting: list[Unit]) -> None:
        while waiting and len(self._workers) < self._size:
            self._workers.append(_Worker(self._payload))
        taken = {worker.group for worker in self._workers}
        for worker in self._workers:
            if worker.ready and worker.alive and worker.unit is None and waiting:
                same_group = (i for i, unit in enumerate(waiting) if unit.group == worker.group)
                free = (i for i, unit in enumerate(waiting) if unit.group not in taken)
                unit = waiting.pop(next(same_group, next(free, 0)))
                worker.give(unit)
                taken.add(unit.group)

    def heard(self) -> list[_Worker]:
        speaking = wait([worker.pipe for worker in self._workers])
        return [worker for worker in self._workers if worker.pipe in speaking]

    def bury(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.pipe.close()
        how = worker.end()
        self._stillborn = 0 if worker.ready else self._stillborn + 1
        if self._stillborn >= _START_FAILURES:
            why = f"they die when started ({how}); run with --workers 1"
            raise UnsupportedError("worker processes", why)

    def dismiss(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(5)
            worker.pipe.close()
            worker.process.close()


def _packed(body: Body) -> bytes:
    """The body as bytes; functions defined in a call, a notebook or the running script need cloudpickle."""
    first: Exception | None = None
    try:
        packed = pickle.dumps(body)
        if b"__main__" not in packed:
            return packed
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        first = error
    try:
        packed = bytes(importlib.import_module("cloudpickle").dumps(body))
    except (ImportError, TypeError, AttributeError, pickle.PicklingError) as error:
        why = f"cannot be sent to other processes ({first or error}); run it with one worker, in this process"
        raise UnsupportedError("this work", why) from None
    return packed


@contextmanager
def _script_hidden() -> Iterator[None]:
    """Start a child that does not import the running script again: without a guard it would start its work anew."""
    main = sys.modules["__main__"].__dict__
    names = ("__file__", "__spec__")
    hidden = {name: main.pop(name) for name in names if name in main}
    main["__spec__"] = None  # multiprocessing reads it
    try:
        yield
    finally:
        del main["__spec__"]
        main.update(hidden)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Start a child with interrupts blocked: a Ctrl-C while it is still starting must not kill it with a traceback.

    It reaches the parent when this ends.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # its same_group start would lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection, payload: bytes) -> None:
    """The life of a worker: ready, then one unit after the other until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_follow_parent, daemon=True).start()
    body: Body = pickle.loads(payload)
    pipe.send("ready")
    while True:
        try:
            unit: Unit = pipe.recv()
        except EOFError:
            return
        pipe.send(attempt(body, unit, partial(_load, unit)))


def _load(unit: Unit, name: str) -> Any:
    return read(unit.files[name])


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
