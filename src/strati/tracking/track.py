"""``strati.track`` and ``strati.Tracker``: follow a training run from its checkpoints, or inside the training loop.

One store holds one row per checkpoint and quantity: stop it, add later checkpoints, add a quantity, and only what is
missing is computed. Learning coefficients have the same data, temperature, localisation, step and random numbers at
every checkpoint, chosen once and kept in the store, so that they can be compared.

A tracker copies the weights to the CPU every ``every`` steps and scans them in a thread; if the last scan is not done,
the step is skipped and counted. Nothing raises into the loop: an error becomes a warning, once.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.results import Tick, silent
from strati.io.in_memory import is_module
from strati.io.to_module import as_module
from strati.jobs.engine import Outcome, Unit
from strati.jobs.store import Finished, Run, Store, drive, interruptible, open_store, shared_folder, unit_key
from strati.tracking.checkpoints import data_identity, grouped, in_order, left_out
from strati.tracking.config import METRICS, TrackConfig
from strati.tracking.measure import GROUPS, HEADS, LAYERS, Measurer, SeriesPoint
from strati.tracking.result import MeasuredUnit, Track, assemble

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from strati.core.option_types import TrackOptions
    from strati.io.network import Openable

STORE = "track.sqlite"
LAYOUT = 4

Log = Callable[[Mapping[str, float], int], object]
"""Takes ``(values, step)``; ``wandb.log`` is one."""


def track(
    checkpoints: Any,
    *,
    data: Any = None,
    out: str | Path | None = None,
    engine: str = "local",
    address: str | None = None,
    steps: Sequence[float] | None = None,
    model: Openable | None = None,
    config: TrackConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[TrackOptions],
) -> Track:
    """Follow a training run over its checkpoints.

    Args:
        checkpoints: Paths, cache ids, state dicts or modules; a mapping of steps to them; or the folder that holds
            them. The step of each is the last number in its name.
        data: Whatever names data; needed for everything but spectra.
        out: A folder whose store keeps what is done; the same call resumes from there.
        engine: Where the work is done: ``local`` (processes) or ``ray``.
        address: With ``engine="ray"``, an existing cluster.
        steps: The steps, where names do not tell.
        model: A network to load the weights into, where a file alone does not tell the architecture.
        config: Options; or give them by name.
        tick: Called after each unit of work.
        **options: Fields of :class:`TrackConfig`, on top of ``config``.

    Raises:
        BadInputError: No checkpoint can be read, an option makes no sense, or the folder holds another run.
        StoppedError: Ctrl-C.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> run = [{"fc.weight": rng.normal(size=(30, 20)) * (1 + t)} for t in range(3)]
        >>> followed = track(run, what="spectra")
        >>> followed.steps, [s.what for s in followed.curves if s.what == "spectral_norm"]
        ((0.0, 1.0, 2.0), ['spectral_norm'])
    """
    settled = resolve(TrackConfig, config, options, of=track)
    holder = None if model is None else as_module(model, activation=settled.activation)
    ordered = in_order(checkpoints, steps)
    default = ("spectra", "loss", "llc") if data is not None else ("spectra",)
    what = default if settled.what is None else tuple(settled.what)
    if data is None and set(what) - {"spectra"}:
        raise BadInputError("data", f"is needed for {', '.join(sorted(set(what) - {'spectra'}))}")
    with ExitStack() as stack:
        folder = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(shared_folder(folder))
        identity = unit_key({"work": "track", "seed": settled.seed})
        store = stack.enter_context(
            open_store(folder / STORE, identity=identity, layout=LAYOUT, about={"name": "track"}, kind="run")
        )
        run = Run(
            engine=engine,
            workers=1 if settled.workers is None else settled.workers,
            address=address,
            retry=settled.retry,
            tick=tick,
        )
        stack.enter_context(interruptible(lambda: len(store.keys()), run))
        used, labels = grouped(data, settled.data_groups)
        identity = data_identity(used) if set(what) - {"spectra"} else ""
        job = Measurer(ordered, used, holder, settled, labels)
        if "llc" in what:
            job = replace(job, settings=_settings(store, job, identity))
        units = list(_units(job, what, identity))
        done = store.keys(failed=not settled.retry)
        todo = [unit for unit in units if unit.key not in done]
        run.expect(len(todo))
        drive(store, job, todo, _keep, run)
        return assemble(
            _readings(store, units),
            ordered,
            job.settings,
            settled,
            store=None if out is None else str(folder / STORE),
            left_out=left_out(checkpoints),
        )


class Tracker:
    """Follows the spectra of a model while it trains.

    Args:
        model: The module; it is only read.
        every: Steps between two scans.
        out: A folder; ``track.jsonl`` in it gets one line per scan.
        log: Called with ``({"layer/metric": value}, step)`` after each scan, from the tracker's thread.
        layers: Patterns that choose layers (as ``layers=`` everywhere).
        metrics: Which numbers of a scan are kept.
        share: The largest share of the loop's time that it may take: copying the weights, which the loop waits for, and
            scanning them, which may hold it up. Beyond it scans are skipped.

    Attributes:
        skipped: Steps whose scan was left out because the last one was not done, or the share was used up.
        done: Number of scans.

    Examples:
        >>> import torch, tempfile
        >>> model = torch.nn.Linear(20, 30)
        >>> with Tracker(model, every=1, out=tempfile.mkdtemp()) as tracker:
        ...     tracker.step(0)
        >>> tracker.done
        1
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        out: str | Path | None = None,
        log: Log | None = None,
        layers: str | tuple[str, ...] | list[str] | None = None,
        metrics: tuple[str, ...] = METRICS,
        share: float = 0.05,
    ) -> None:
        if not is_module(model):
            raise BadInputError("model", f"is a {type(model).__name__}; give the nn.Module that is trained")
        if every < 1:
            raise BadInputError("every", "must be at least 1")
        if out is None and log is None:
            raise BadInputError("Tracker", "writes nowhere; give out= (a folder) or log= (a function)")
        self.model, self.every, self.log, self.layers, self.metrics = model, every, log, layers, metrics
        from strati.spectra.scan import scan  # now: an import in the thread would hold up the loop

        self._look = scan
        self.share = share
        self.skipped = 0
        self.done = 0
        self._path = None if out is None else Path(out) / "track.jsonl"
        self._thread: threading.Thread | None = None
        self._warned = False
        self._began = time.perf_counter()
        self._cost = 0.0
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def step(self, step: int) -> None:
        """Call it once per training step; most calls do nothing."""
        if step % self.every:
            return
        try:
            if self._thread is not None and self._thread.is_alive():
                self.skipped += 1
                return
            now = time.perf_counter()
            if self.done and self._cost > self.share * (now - self._began):
                self.skipped += 1
                return
            weights = _copied(self.model)
            self._cost += time.perf_counter() - now
            self._thread = threading.Thread(target=self._scan, args=(weights, step), daemon=True)
            self._thread.start()
        except Exception as error:  # nothing may stop the training: said once, as a warning
            self._warn(error)

    def close(self) -> None:
        """Wait for the scan that is under way."""
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scan(self, weights: Mapping[str, NDArray[Any]], step: int) -> None:
        began = time.perf_counter()
        try:
            scanned = self._look(weights, layers=self.layers, workers=1)
            rows = {item.layer.name: item.row() for item in scanned}
            values = {
                f"{name}/{metric}": float(row[metric])
                for name, row in rows.items()
                for metric in self.metrics
                if row.get(metric) is not None
            }
            self._cost += time.perf_counter() - began
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, "values": values}) + "\n")
            if self.log is not None:
                self.log(values, step)
            self.done += 1
        except Exception as error:  # as above
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            text = f"strati.Tracker: {type(error).__name__}: {error}; further errors are not shown, training goes on"
            warnings.warn(text, RuntimeWarning, stacklevel=3)


_DEPENDS = {
    "spectra": ("layers",),
    "loss": ("loss", "rows", "activation"),
    "scales": ("rows", "activation", "scales"),
    "curvature": ("loss", "rows", "activation"),
    "counts": ("rows", "activation"),
    "interventions": ("rows", "activation", "layers"),
    "llc": ("activation",),
    LAYERS: ("activation", "layers"),
    HEADS: ("activation", "heads"),
    GROUPS: ("activation",),
}
"""The options that each quantity's numbers depend on, besides the seed; those of the sampler are in the settings."""


def _units(job: Measurer, what: Sequence[str], data: str) -> Iterator[Unit]:
    """One unit per checkpoint and quantity, identified by all that its numbers depend on."""
    config = job.config
    quantities: list[str] = []
    for quantity in what:
        quantities.append(quantity)
        if quantity == "llc":
            requested = {LAYERS: config.per_layer, HEADS: bool(config.heads), GROUPS: job.labels is not None}
            quantities += [part for part, is_requested in requested.items() if is_requested]
    for place, checkpoint in enumerate(job.checkpoints):
        identity = checkpoint.identity()
        for quantity in quantities:
            depends: dict[str, Any] = {name: getattr(config, name) for name in _DEPENDS[quantity]}
            depends |= {
                "checkpoint": identity,
                "step": checkpoint.step,
                "quantity": quantity,
                "layout": LAYOUT,
            }
            if quantity != "spectra":
                depends["data"] = data
            if quantity.startswith("llc"):
                depends["settings"] = dict(job.settings)
            if quantity == GROUPS:
                depends["labels"] = job.labels
            where = {"place": place, "quantity": quantity}
            yield Unit(unit_key(depends), f"{checkpoint.name}: {quantity}", identity, where)


def _keep(outcome: Outcome) -> Finished:
    unit = outcome.unit
    points = [list(point) for point in outcome.value] if outcome.reason is None else []
    return Finished(unit.key, unit.name, {"points": points}, outcome.reason)


def _readings(store: Store, units: Sequence[Unit]) -> Iterator[MeasuredUnit]:
    stored = {unit.key: unit for unit in store.units()}
    for unit in units:
        if row := stored.get(unit.key):
            points = [SeriesPoint(*point) for point in row.value.get("points", ())]
            yield MeasuredUnit(unit.config["place"], unit.config["quantity"], points, row.reason)


def _settings(store: Store, job: Measurer, data: str) -> dict[str, Any]:
    """Temperature, localisation, step, chains and draws for every checkpoint, chosen once and kept in the store."""
    names = ("loss", "rows", "nbeta", "gamma", "chains", "draws", "batch", "seconds", "activation")
    options = {name: getattr(job.config, name) for name in names}
    key = unit_key({"work": "track settings", "layout": LAYOUT, "data": data, "options": options})
    for unit in store.units():
        if unit.key == key:
            return dict(unit.value["settings"])
    settings = job.shared_settings() | {"data": data}
    store.put(Finished(key, "settings", {"settings": settings, "points": []}))
    return settings


def _copied(model: nn.Module) -> dict[str, NDArray[Any]]:
    """The weights on the CPU, as numpy arrays of their own; no tensor of the model is kept."""
    import torch

    arrays: dict[str, NDArray[Any]] = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.ndim >= 2:
            plain = tensor.detach().to("cpu", torch.float32, copy=True)
            arrays[name] = np.asarray(plain.numpy())
    return arrays
