"""The engine of many machines: the same units on a Ray cluster.

Units travel with the files they read, so the machines need strati but no common disk. Ray starts a lost unit
again; when its tries are used up, that unit is failed and the rest goes on.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from strati.core.errors import BadInputError, UnsupportedError
from strati.core.plugins import require
from strati.jobs.engine import Body, Outcome, Reader, Unit, attempt, cores, read


def run_ray(
    body: Body,
    units: Iterable[Unit],
    *,
    address: str | None = None,
    workers: int | None = None,
    tries: int = 3,
) -> Iterator[Outcome]:
    """Run the units on a Ray cluster.

    Args:
        body: What to do with a unit.
        units: The work.
        address: An existing cluster (``"auto"``, ``"HOST:6379"``, ``"ray://HOST:10001"``); ``None`` starts one of
            several processes on this machine, for the time of the run.
        workers: Processes of a cluster started here; how many units are under way at once on an existing one
            (default: its processors).
        tries: How often a unit is started before its workers' deaths make it a failed unit.

    Yields:
        Outcomes in the order in which they come in.

    Raises:
        UnsupportedError: There is no cluster at the address.
        MissingExtraError: Ray is not installed.
    """
    waiting = deque(units)
    if not waiting:
        return
    ray = require("ray", "ray", "running on a Ray cluster")
    mine = not ray.is_initialized()
    if mine:
        _connect(ray, address, workers)
    try:
        run_one = ray.remote(num_cpus=1, max_retries=tries - 1)(_run_one)
        shared = _Shared(ray)
        body_there = ray.put(body)
        limit = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        running: dict[Any, Unit] = {}
        while waiting or running:
            while waiting and len(running) < 2 * limit:
                unit = waiting.popleft()
                names = list(unit.files)
                files = [shared.put(unit.files[name]) for name in names]
                # The files travel by themselves: a reader would look for them on a machine that has none.
                bare = replace(unit, files=dict.fromkeys(names, ""))
                running[run_one.remote(body_there, bare, names, *files)] = unit
                del files
            for reference in ray.wait(list(running), num_returns=1)[0]:
                unit = running.pop(reference)
                yield replace(_outcome(ray, reference, unit, tries), unit=unit)
    finally:
        if mine:
            ray.shutdown()


class _Shared:
    """Files put into the cluster's memory once, however many units read them; what a reader reads, for its unit."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._there: dict[str, Any] = {}

    def put(self, path: str | Reader) -> Any:
        if callable(path):
            return self._ray.put(path())
        if path not in self._there:
            self._there[path] = self._ray.put(read(path))
        return self._there[path]


def _connect(ray: Any, address: str | None, workers: int | None) -> None:
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        # Ray's default niceness yields to all other processes: on a busy machine workers would wait for minutes.
        os.environ.setdefault("RAY_worker_niceness", "0")
        options |= {"address": "local", "num_cpus": workers or cores(), "include_dashboard": False}
    else:
        options |= {"address": address}
    _check_answers(address)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray warns of its own future defaults
            ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        why = f"no Ray cluster answers there ({str(error).splitlines()[0]}); start one with: ray start --head"
        raise UnsupportedError(f"address {address}", why) from None


def _check_answers(address: str | None) -> None:
    """Try to connect first: Ray itself waits for minutes before it reports that no cluster answers."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host:
        return
    if not port.isdigit():
        raise BadInputError(f"address {address}", "not of the form HOST:PORT")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        why = f"no Ray cluster answers there ({error}); start one with: ray start --head"
        raise UnsupportedError(f"address {address}", why) from None


def _run_one(body: Body, unit: Unit, names: list[str], *files: Any) -> Outcome:
    there = dict(zip(names, files, strict=True))
    return attempt(body, unit, there.__getitem__)


def _outcome(ray: Any, reference: Any, unit: Unit, tries: int) -> Outcome:
    try:
        outcome: Outcome = ray.get(reference)
    except ray.exceptions.RayError as error:
        kind = type(error).__name__
        return Outcome(unit, reason=f"its Ray worker was lost {tries} times ({kind})")
    return outcome
