"""The spectra of layers one by one: in this process on threads, or through a store on any engine, resumable.

:func:`spectra` computes them in memory; :func:`stored_spectra` keeps each layer's in a store as it is finished, so that
a run can be stopped anywhere and resumed, shared by several runs, and spread over processes or a Ray cluster. Both give
the same numbers to the last bit: a layer is always worked on by one BLAS thread.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.results import Tick, silent
from strati.core.rng import derive
from strati.io.quantised.rounding_error import Rounding
from strati.jobs.driver import Run, run_cached
from strati.jobs.engine import Load, Outcome, Unit, cores, in_thread, in_threads
from strati.jobs.store import Finished, unit_key
from strati.spectra.record import LAYOUT, from_record, to_record
from strati.spectra.spectrum import Spectrum, SpectrumConfig, spectrum
from strati.spectra.stored import matrices_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.layers import Layer
    from strati.io.network import Network

_PROCESS = 100 << 20  # what a worker needs before it has any matrix
_SETTINGS = ("quantization_config", "compression_config", "adapter_config")
STORE = "spectra.sqlite"
"""The store's file in the folder of a resumable run."""


def spectra(
    layers: Sequence[Layer], options: SpectrumConfig, *, workers: int | None = None, tick: Tick = silent
) -> list[Spectrum]:
    """The spectra of layers, in their order.

    Args:
        layers: The layers.
        options: What to compute.
        workers: Layers worked on at once; 0 for one per processor, as far as memory of 2.7 times the largest matrix
            in float64 goes.
        tick: Called after each layer with its name.
    """
    from threadpoolctl import threadpool_limits

    room = _Room(2.7 * max((8 * shape_size(layer) for layer in layers), default=0) if workers == 0 else None)

    def one(layer: Layer) -> Spectrum:
        with room.for_bytes(memory(layer)):
            found = _spectrum(partial(matrices_of, layer), layer.name, _dtype(layer), options)
        tick(layer.name)
        return found

    with threadpool_limits(limits=1, user_api="blas"):
        # Threads suffice: LAPACK releases the interpreter's lock, and nothing is copied between processes.
        return in_threads(one, layers, workers or os.cpu_count() or 1)


def stored_spectra(
    layers: Sequence[Layer], options: SpectrumConfig, *, out: str | Path, run: Run
) -> Iterator[tuple[Layer, Spectrum]]:
    """The layers with their spectra, in their order, each computed once and kept in the folder ``out``.

    Layers that the store has are not computed again, whichever run or process put them there; its keys are hashes of
    the layer's weights' identity and the options, so one folder may serve many networks. What rounding did to a layer
    is kept too, so that a quantised one need not be decoded again to say it.

    Args:
        layers: The layers; of one network or of several.
        options: What to compute.
        out: The folder; made if it is not there.
        run: Where the work is done.

    Raises:
        BadInputError: The folder holds something else or cannot be written, or a layer cannot be read.
        StoppedError: Ctrl-C; what was finished is kept.
    """
    files: dict[int, Any] = {}
    units = [_unit(layer, options, files) for layer in layers]
    body = partial(_work, options=options)
    values = run_cached(Path(out) / STORE, units, body, _keep, run, holds="spectra", layout=LAYOUT)
    for layer, value in zip(layers, values, strict=True):
        layer.set_rounding(None if value["rounding"] is None else Rounding(**value["rounding"]))
        yield layer, from_record(value)


def at_once(layers: Sequence[Layer], workers: int | None) -> int:
    """How many processes to use: as many as asked for, or one per processor as far as free memory goes."""
    if workers:
        return workers
    most = max((memory(layer) for layer in layers), default=1)
    free = _free_memory()
    room = len(layers) if free is None else max(int(0.7 * free / (most + _PROCESS)), 1)
    return max(min(cores(), room, len(layers)), 1)


def _free_memory() -> int | None:
    """Bytes that new processes may use, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def memory(layer: Layer) -> int:
    """Bytes that the spectrum of a layer needs at once: a strip of rows and the Gram matrix, in float64."""
    rows, columns = max(layer.shape), min(layer.shape)
    return 8 * columns * (min(rows, max(4096, columns)) + columns)


def shape_size(layer: Layer) -> int:
    """Entries of one matrix of a layer."""
    return layer.shape[0] * layer.shape[1]


@dataclass(frozen=True)
class Values:
    """A layer read.

    Attributes:
        matrices: Views of the file where it stores them plainly.
        rounding: What rounding did to them; ``None`` where they were not rounded.
    """

    matrices: list[NDArray[Any]]
    rounding: Rounding | None

    def __call__(self) -> Values:
        """What a reader of these values gives."""
        return self

    def travelling(self) -> tuple[Any, tuple[Any, ...]]:
        """What a reader of a network in memory is pickled as: the values themselves, in memory of their own."""
        return Values, ([np.ascontiguousarray(matrix) for matrix in self.matrices], self.rounding)


@dataclass(frozen=True)
class LayerReader:
    """Reads a layer wherever it is called; layers in memory travel as their values."""

    layer: Layer = field(repr=False)

    def __call__(self) -> Values:
        """The layer's matrices, of an adapter the core."""
        return Values(list(matrices_of(self.layer)), self.layer.rounding())

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if self.layer.network.in_memory:
            return self().travelling()
        return LayerReader, (self.layer,)


def _unit(layer: Layer, options: SpectrumConfig, files: dict[int, Any]) -> Unit:
    config = {"name": layer.name, "dtype": _dtype(layer)}
    identity = {
        "options": options,
        "layer": config,
        "view": layer.view,
        "shape": layer.shape,
        "weights": weights_identity(layer, files),
        "layout": LAYOUT,
    }
    return Unit(unit_key(identity), layer.name, "", config, {"matrices": LayerReader(layer)})


def _work(unit: Unit, load: Load, *, options: SpectrumConfig) -> dict[str, Any]:
    values: Values = load("matrices")
    config = unit.config
    work = partial(_spectrum, lambda: iter(values.matrices), config["name"], config["dtype"], options)
    rounding = None if values.rounding is None else asdict(values.rounding)
    return to_record(in_thread(work)) | {"rounding": rounding}


def _keep(outcome: Outcome) -> Finished:
    return Finished(outcome.unit.key, outcome.unit.name, outcome.value, outcome.reason)


def _spectrum(source: Any, name: str, dtype: str | None, options: SpectrumConfig) -> Spectrum:
    seed = derive(options.seed, "scan", name) if options.bootstrap else 0
    return spectrum(source, dtype=dtype, config=options, seed=seed)


def _dtype(layer: Layer) -> str | None:
    """The dtype that the weights are stored in; a quantised layer comes as what it is decoded to."""
    return None if layer.quantised else layer.dtype


def weights_identity(layer: Layer, files: dict[int, Any]) -> Any:
    """What tells a layer's weights from others without reading them all; of a network in memory their hash.

    Args:
        layer: The layer.
        files: What is known of the files of networks, by the network's ``id``; filled here.
    """
    network = layer.network
    if network.in_memory:
        digest = hashlib.sha256()
        for matrix in matrices_of(layer):
            digest.update(np.ascontiguousarray(matrix).tobytes())
        return digest.hexdigest()
    if id(network) not in files:
        files[id(network)] = [_source(part) for part in network.parts or (network,)]
    return {"tensor": layer.tensor, "files": files[id(network)]}


def _source(network: Network) -> Any:
    """Where a network's weights come from: its files, and the settings that say how they are decoded and scaled."""
    config = network.config or {}
    told = {key: config[key] for key in _SETTINGS if key in config}
    return [network.contents.stamp(), told]


class _Room:
    """Lets layers in while what they need together stays within a limit; one alone always fits."""

    def __init__(self, limit: float | None) -> None:
        self._limit = float("inf") if limit is None else limit
        self._taken = 0
        self._changed = Condition()

    @contextmanager
    def for_bytes(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._taken == 0 or self._taken + size <= self._limit)
            self._taken += size
        try:
            yield
        finally:
            with self._changed:
                self._taken -= size
                self._changed.notify_all()
