"""The engines: the same values from each, and a lost worker costs one unit at most."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from strati.core.errors import BadInputError, UnsupportedError
from strati.jobs.engine import Load, Outcome, Unit, run_here
from strati.jobs.process_engine import run_processes
from strati.jobs.ray_engine import run_ray

HERE = Path(__file__)


@pytest.fixture(autouse=True)
def _travels(request: pytest.FixtureRequest) -> Iterator[None]:
    """This module is not installed on a cluster's machines: its functions travel whole."""
    if request.node.get_closest_marker("ray") is None:
        yield
        return
    ray_pickle = sys.modules.get("ray.cloudpickle")
    if ray_pickle is None:
        from ray import cloudpickle as ray_pickle
    ray_pickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray_pickle.unregister_pickle_by_value(sys.modules[__name__])


def body(unit: Unit, load: Load) -> Any:
    """Does what the unit says; the killer kills its own worker as often as its file allows."""
    import numpy as np

    what = unit.config["do"]
    if what == "raise":
        raise ValueError("no such luck")
    if what == "refuse":
        raise BadInputError("data", "too few")
    if what == "kill":
        marks = Path(unit.config["marks"])
        tries = len(list(marks.iterdir()))
        (marks / str(tries)).touch()
        if tries < unit.config["times"]:
            os.kill(os.getpid(), signal.SIGKILL)
    if what == "file":
        return "".join(load(name).decode() for name in unit.files)
    return float(np.random.default_rng(unit.config["seed"]).random())


def units(*configs: dict[str, Any]) -> list[Unit]:
    return [
        Unit(f"k{i}", f"unit {i}", str(i % 2), config, {"file": str(HERE)})
        for i, config in enumerate(configs)
    ]


def by_name(outcomes: Any) -> dict[str, Outcome]:
    return {outcome.unit.name: outcome for outcome in outcomes}


ENGINES = [
    run_here,
    partial(run_processes, workers=2),
    pytest.param(partial(run_ray, workers=2), marks=pytest.mark.ray),
]


@pytest.mark.filterwarnings("ignore")  # Ray leaves sockets to the garbage collector
@pytest.mark.parametrize("engine", ENGINES, ids=["here", "processes", "ray"])
def test_every_engine_gives_the_same(engine: Callable[..., Any]) -> None:
    work = units(
        *({"do": "draw", "seed": i} for i in range(6)), {"do": "raise"}, {"do": "refuse"}, {"do": "file"}
    )
    want, found = by_name(run_here(body, work)), by_name(engine(body, work))
    assert found == want
    assert found["unit 6"].reason == "ValueError: no such luck"
    assert found["unit 7"].reason == "data: too few"
    assert found["unit 8"].value == HERE.read_text()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ENGINES[1:], ids=["processes", "ray"])
@pytest.mark.parametrize(("times", "survives"), [(1, True), (99, False)])
def test_a_killed_worker_costs_its_unit_only(
    engine: Callable[..., Any], times: int, survives: bool, tmp_path: Path
) -> None:
    work = units(
        {"do": "draw", "seed": 0},
        {"do": "kill", "seed": 1, "times": times, "marks": str(tmp_path)},
        *({"do": "draw", "seed": i} for i in range(2, 8)),
    )
    found = by_name(engine(body, work))
    assert len(found) == 8
    lost = found.pop("unit 1")
    assert (lost.reason is None) == survives
    assert survives or "3 times" in str(lost.reason)
    assert all(outcome.reason is None for outcome in found.values())


def test_a_body_that_cannot_travel_is_said_so() -> None:
    lock = __import__("threading").Lock()
    with pytest.raises(UnsupportedError, match="cannot be sent"):
        list(run_processes(lambda unit, load: lock, units({"do": "draw", "seed": 0}), workers=2))


def test_a_closure_travels() -> None:
    factor = 3.0
    found = list(
        run_processes(lambda unit, load: factor * unit.config["seed"], units({"seed": 2}), workers=2)
    )
    assert found[0].value == 6.0


def test_no_units_no_work() -> None:
    assert list(run_processes(body, [], workers=2)) == []
    assert list(run_ray(body, [])) == []


def test_stopping_early_leaves_no_worker() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    work = run_processes(body, units(*({"do": "draw", "seed": i} for i in range(50))), workers=2)
    next(work)
    work.close()  # type: ignore[attr-defined]
    left = [
        c
        for c in psutil.Process().children(recursive=True)
        if c.pid not in before and "spawn_main" in " ".join(c.cmdline())
    ]
    assert left == []


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    """Workers do not import the running script again; what of it they need travels by value."""
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent("""
        from dataclasses import dataclass
        from strati.jobs.engine import Unit
        from strati.jobs.process_engine import run_processes

        print("begun", flush=True)
        FACTOR = 3

        @dataclass
        class Body:
            shift: int

            def __call__(self, unit, load):
                return times(unit.config["value"]) + self.shift

        def times(value):
            return FACTOR * value

        units = [Unit(str(i), str(i), "", {"value": i}) for i in range(4)]
        print(sorted(outcome.value for outcome in run_processes(Body(1), units, workers=2)), flush=True)
        print(__file__.endswith("unguarded.py"))
    """)
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == ["begun", "[1, 4, 7, 10]", "True"], done.stderr


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import time
        from strati.jobs.engine import Unit
        from strati.jobs.process_engine import run_processes

        def body(unit, load):
            time.sleep(unit.config["seconds"])

        if __name__ == "__main__":
            units = [Unit(str(i), str(i), "", {"seconds": 0.01 if i == 0 else 120.0}) for i in range(3)]
            for outcome in run_processes(body, units, workers=2):
                print("one", flush=True)
    """)
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "one\n"
    workers = psutil.Process(parent.pid).children(recursive=True)
    assert len(workers) >= 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 10
    while (
        any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers) and time.monotonic() < end
    ):
        time.sleep(0.05)
    assert not any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers)


def test_a_file_that_is_gone_is_a_reason() -> None:
    unit = Unit("k", "unit", "", {"do": "file"}, {"file": "/nowhere/at/all"})
    assert "cannot be read" in str(next(run_here(body, [unit])).reason)


@pytest.mark.ray
def test_no_cluster_there_is_one_line() -> None:
    with pytest.raises(UnsupportedError, match="no Ray cluster answers"):
        list(run_ray(body, units({"do": "draw", "seed": 0}), address="127.0.0.1:1"))
