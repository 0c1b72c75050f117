"""Compute the spectra of layers one by one: on threads of this process, or through a store on any engine, resumable.

:func:`spectra` computes them in memory. :func:`stored_spectra` writes each layer's spectrum to a store as it is
finished, so that a run can be stopped anywhere and resumed, shared by several runs, and spread over processes or a Ray
cluster. Both give the same numbers to the last bit: a layer is always computed by one BLAS thread.

:func:`estimate_scan` says beforehand what that costs. Its seconds come from one Gram matrix and one solve of 1,024
columns on one thread, scaled by the number of operations: ``N M^2`` for the Gram matrix of an ``N x M`` matrix and
``4/3 M^3`` for its eigenvalues. Larger solves run at a somewhat higher rate; reading the file is not included.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strati.core.results import Flag, Result, Tick, jsonable, silent
from strati.core.rng import derive
from strati.io.quantised.rounding_error import Rounding
from strati.jobs.engine import Load, Outcome, Unit, cores, in_thread, in_threads
from strati.jobs.store import Finished, Run, run_cached, unit_key
from strati.spectra.eigenvalues import Eigenvalues, Gap, gram, pooled
from strati.spectra.marchenko_pastur import Bulk
from strati.spectra.noise_model import NoiseModel
from strati.spectra.noise_structure import Departure, Violation
from strati.spectra.spectrum import Spectrum, SpectrumConfig, spectrum
from strati.spectra.tails import EntryTail, Tail
from strati.spectra.tokens import note_unused_rows
from strati.spectra.verdicts import Cause, Phase, PhaseVerdict

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray
    from rich.console import RenderableType

    from strati.core.results import FloatArray
    from strati.io.layers import Layer
    from strati.io.network import Network

_COLUMNS = 1024  # of the solve that an estimate of time is made from
_PROCESS = 100 << 20  # what a worker needs before it has any matrix
_SETTINGS = ("quantization_config", "compression_config", "adapter_config")
STORE = "spectra.sqlite"
"""The store's file in the folder of a resumable run."""

LAYOUT = 7
"""Version of a stored spectrum: what a store of another version holds is not mixed with this one's."""


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

    largest = max((8 * layer.shape[0] * layer.shape[1] for layer in layers), default=0)
    budget = _MemoryBudget(2.7 * largest if workers == 0 else None)

    def compute(layer: Layer) -> Spectrum:
        with budget.reserve(memory(layer)):
            layer_spectrum = _spectrum(partial(matrices_of, layer), _describe(layer), options)
        tick(layer.name)
        return layer_spectrum

    with threadpool_limits(limits=1, user_api="blas"):
        # Threads suffice: LAPACK releases the interpreter's lock, and nothing is copied between processes.
        return in_threads(compute, layers, workers or os.cpu_count() or 1)


def stored_spectra(
    layers: Sequence[Layer], options: SpectrumConfig, *, out: str | Path, run: Run
) -> Iterator[tuple[Layer, Spectrum]]:
    """Compute the spectra of layers once each, write them to the folder ``out``, and yield them in order.

    Layers that the store has are not computed again, whichever run or process put them there; its keys are hashes of
    the layer's weights' identity and the options, so one folder may serve many networks. The rounding error of a
    quantised layer is stored too, so that the layer need not be decoded again.

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
    for layer, record in zip(layers, values, strict=True):
        layer.set_rounding(None if record["rounding"] is None else Rounding(**record["rounding"]))
        yield layer, from_record(record)


def default_workers(layers: Sequence[Layer], workers: int | None) -> int:
    """How many processes to use: as many as asked for, or one per processor as far as free memory goes."""
    if workers:
        return workers
    most = max((memory(layer) for layer in layers), default=1)
    free = _free_memory()
    affordable = len(layers) if free is None else max(int(0.7 * free / (most + _PROCESS)), 1)
    return max(min(cores(), affordable, len(layers)), 1)


def _free_memory() -> int | None:
    """Bytes that new processes may use, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return next(available, None)


def memory(layer: Layer) -> int:
    """Bytes that the spectrum of a layer needs at once: a strip of rows and the Gram matrix, in float64."""
    rows, columns = max(layer.shape), min(layer.shape)
    return 8 * columns * (min(rows, max(4096, columns)) + columns)


def work(layer: Layer) -> tuple[float, float]:
    """Floating-point operations of a layer's Gram matrices and of their eigenvalues."""
    n, m = float(max(layer.shape)), float(min(layer.shape))
    return layer.count * n * m**2, layer.count * 4 / 3 * m**3


def stored_bytes(layer: Layer) -> int:
    """Bytes of a layer as it is stored."""
    size = next((t for t in layer.network.tensors if t.name == layer.tensor and t.size), None)
    return 4 * layer.parameters if size is None else round(size.nbytes * layer.parameters / size.size)


def matrices_of(layer: Layer) -> Iterator[NDArray[Any]]:
    """The layer's matrices; of an adapter the small core, which has the singular values of the whole update."""
    return layer.matrices() if layer.adapter is None else iter((layer.adapter.core(),))


@dataclass(frozen=True)
class Values:
    """The values of a layer.

    Attributes:
        matrices: Views of the file where it stores them plainly.
        rounding: Their rounding error; ``None`` where they were not rounded.
    """

    matrices: list[NDArray[Any]]
    rounding: Rounding | None

    def __call__(self) -> Values:
        """The values themselves: they take the place of a reader."""
        return self

    def for_pickle(self) -> tuple[Any, tuple[Any, ...]]:
        """What a reader of a network in memory is pickled as: a copy of the values."""
        return Values, ([np.ascontiguousarray(matrix) for matrix in self.matrices], self.rounding)


@dataclass(frozen=True)
class LayerReader:
    """Reads a layer in any process; layers in memory are sent as their values."""

    layer: Layer = field(repr=False)

    def __call__(self) -> Values:
        """The layer's matrices, of an adapter the core."""
        return Values(list(matrices_of(self.layer)), self.layer.rounding())

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if self.layer.network.in_memory:
            return self().for_pickle()
        return LayerReader, (self.layer,)


def _unit(layer: Layer, options: SpectrumConfig, files: dict[int, Any]) -> Unit:
    config = _describe(layer)
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
    work = partial(_spectrum, lambda: iter(values.matrices), unit.config, options)
    rounding = None if values.rounding is None else asdict(values.rounding)
    return to_record(in_thread(work)) | {"rounding": rounding}


def _keep(outcome: Outcome) -> Finished:
    return Finished(outcome.unit.key, outcome.unit.name, outcome.value, outcome.reason)


def _describe(layer: Layer) -> dict[str, Any]:
    """What the spectrum of a layer depends on beside its weights and the options."""
    # A quantised layer comes as what it is decoded to, so it has no dtype of its own.
    dtype = None if layer.quantised else layer.dtype
    return {"name": layer.name, "dtype": dtype, "tokens": layer.has_token_rows}


def _spectrum(source: Any, layer: Mapping[str, Any], options: SpectrumConfig) -> Spectrum:
    seed = derive(options.seed, "scan", layer["name"]) if options.bootstrap or options.htsr else 0
    layer_spectrum = spectrum(source, dtype=layer["dtype"], config=options, seed=seed)
    return note_unused_rows(layer_spectrum, source) if layer["tokens"] else layer_spectrum


def weights_identity(layer: Layer, files: dict[int, Any]) -> Any:
    """What identifies a layer's weights without reading them all; of a network in memory their hash.

    Args:
        layer: The layer.
        files: Cache of the identities of files, by the network's ``id``; filled here.
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
    """Where a network's weights come from: its files, and the settings by which they are decoded and scaled."""
    config = network.config or {}
    return [network.contents.stamp(), {key: config[key] for key in _SETTINGS if key in config}]


class _MemoryBudget:
    """Lets threads wait until the memory that they need together stays within a limit; one alone always fits."""

    def __init__(self, limit: float | None) -> None:
        self._limit = float("inf") if limit is None else limit
        self._taken = 0
        self._changed = Condition()

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._taken == 0 or self._taken + size <= self._limit)
            self._taken += size
        try:
            yield
        finally:
            with self._changed:
                self._taken -= size
                self._changed.notify_all()


def to_record(spectrum: Spectrum) -> dict[str, Any]:
    """Everything that a spectrum holds, to the last bit, as plain values of JSON.

    Examples:
        >>> sp = spectrum(np.random.default_rng(0).normal(size=(60, 40)))
        >>> from_record(to_record(sp)).to_json() == sp.to_json()
        True
    """
    fields = {field.name: getattr(spectrum, field.name) for field in dataclasses.fields(spectrum)}
    eigenvalues = {name: getattr(spectrum.pooled, name) for name in _EIGENVALUE_FIELDS}
    parts = [_packed(part) for part in spectrum.pooled.parts]
    plain: dict[str, Any] = jsonable(fields | {"pooled": eigenvalues | {"parts": parts}})
    return plain


def from_record(record: dict[str, Any]) -> Spectrum:
    """The spectrum that a record was made of."""
    from strati.spectra.htsr import HeavyTailMetrics
    from strati.spectra.tail_tests import Goodness

    fields = record["pooled"]
    parts = tuple(map(_unpacked, fields["parts"]))
    tuples = {"parts": parts, "empty": tuple(fields["empty"]), "extents": tuple(fields["extents"])}
    values = pooled(parts, fields["problem"])
    mu = record["entries"]["mu"]
    return Spectrum(
        pooled=Eigenvalues(**(fields | tuples), values=values),
        tail=_optional(Tail, record["tail"]),
        noise=_optional(_noise_from_record, record["noise"]),
        verdict=_optional(_verdict_from_record, record["verdict"]),
        gap=Gap(**record["gap"]),
        entries=EntryTail(**(record["entries"] | {"mu": float("nan") if mu is None else mu})),
        quasi_null=record["quasi_null"],
        warnings=tuple(Flag(**flag) for flag in record["warnings"]),
        goodness=_optional(Goodness, record["goodness"]),
        heavy_tail=_optional(HeavyTailMetrics, record["heavy_tail"]),
    )


_EIGENVALUE_FIELDS = tuple(
    field.name for field in dataclasses.fields(Eigenvalues) if field.name not in ("values", "parts")
)


def _optional(make: Any, fields: dict[str, Any] | None) -> Any:
    return None if fields is None else make(**fields)


def _verdict_from_record(phase: str, cause: str, noise: bool) -> PhaseVerdict:
    return PhaseVerdict(Phase(phase), Cause(cause), noise)


def _noise_from_record(bulk: dict[str, Any], violations: list[dict[str, Any]], **fields: Any) -> NoiseModel:
    departures = (Departure(**(entry | {"violation": Violation(entry["violation"])})) for entry in violations)
    variances = tuple(fields.pop("slice_variances"))
    return NoiseModel(bulk=Bulk(**bulk), violations=tuple(departures), slice_variances=variances, **fields)


def _packed(values: FloatArray) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype="<f8").tobytes()).decode("ascii")


def _unpacked(text: str) -> FloatArray:
    return np.frombuffer(base64.b64decode(text), dtype="<f8").astype(np.float64)


@dataclass(frozen=True)
class ScanEstimate(Result):
    """What a scan would cost.

    Attributes:
        path: The network.
        matrices: Matrices to solve (the slices of a convolution one by one).
        bytes: Bytes of weights to read, as they are stored.
        flops: Floating-point operations.
        seconds: On this machine with ``workers`` at once.
        workers: Layers worked on at once.
        memory: Bytes needed at most, besides the interpreter's own.
        largest: Name, rows and columns of the layer that costs most.
    """

    verb: ClassVar[str] = "estimate"

    path: str
    matrices: int
    bytes: int
    flops: float
    seconds: float
    workers: int
    memory: int
    largest: tuple[str, int, int] | None

    def frame(self) -> pd.DataFrame:
        """One row."""
        import pandas as pd

        return pd.DataFrame([self.payload()])

    def summary(self) -> RenderableType:
        """The time first, then what has to be read and kept in memory."""
        from rich.console import Group
        from rich.text import Text

        from strati.core.display import byte_size, printable

        workers = f"{self.workers} worker{'s' if self.workers != 1 else ''}"
        lines = [
            f"About {duration(self.seconds)} on this machine with {workers}, estimated from one small run.",
            f"{printable(self.path)}: {self.matrices:,} matrices, {byte_size(self.bytes)} of weights to read",
            f"memory: at most {byte_size(self.memory)} besides the interpreter",
            f"{self.flops:.2g} floating-point operations",
        ]
        if self.largest is not None:
            name, rows, columns = self.largest
            lines.append(f"largest: {printable(name, 60)}, {rows} x {columns}")
        return Group(*(Text(line) for line in lines))


def estimate_scan(
    path: str, layers: Sequence[Layer], *, workers: int | None = None, resumable: bool = False
) -> ScanEstimate:
    """What the scan of these layers would cost.

    Args:
        path: The network's name, for the summary.
        layers: The layers.
        workers: As in the scan; ``None`` for one per processor.
        resumable: Whether it would run through a store, each worker a process of its own.

    Examples:
        >>> import strati
        >>> net = strati.open({"fc.weight": np.zeros((300, 200))})
        >>> found = estimate_scan("small", net.layers(), workers=1)
        >>> found.matrices, round(found.flops), found.memory
        (1, 22666667, 800000)
    """
    count = default_workers(layers, workers)
    needs = sorted((memory(layer) for layer in layers), reverse=True)
    together = sum(needs[:count])
    if not resumable and workers is None:  # threads share one budget, see layerwise.spectra
        largest = max((8 * layer.shape[0] * layer.shape[1] for layer in layers), default=0)
        together = min(together, max(round(2.7 * largest), needs[0] if needs else 0))
    rate = rates()
    costs = [work(layer) for layer in layers]
    seconds = [gram / rate[0] + solve / rate[1] for gram, solve in costs]
    total = sum(seconds)
    worst = max(zip(seconds, layers, strict=True), key=lambda pair: pair[0])[1] if layers else None
    return ScanEstimate(
        path=path,
        matrices=sum(layer.count for layer in layers),
        bytes=sum(stored_bytes(layer) for layer in layers),
        flops=float(sum(gram + solve for gram, solve in costs)),
        seconds=max(total / count, max(seconds, default=0.0)),
        workers=count,
        memory=together,
        largest=None if worst is None else (worst.name, *worst.shape),
    )


@lru_cache(maxsize=1)
def rates() -> tuple[float, float]:
    """Operations per second of a Gram matrix and of a solve, one thread, measured once."""
    from threadpoolctl import threadpool_limits

    sample = np.random.default_rng(0).normal(size=(_COLUMNS, _COLUMNS))
    with threadpool_limits(limits=1, user_api="blas"):
        np.linalg.eigvalsh(np.eye(_COLUMNS))  # libraries loaded
        start = time.perf_counter()
        square = gram(sample)
        middle = time.perf_counter()
        np.linalg.eigvalsh(square)
        end = time.perf_counter()
    return _COLUMNS**3 / (middle - start), 4 / 3 * _COLUMNS**3 / (end - middle)


def duration(seconds: float) -> str:
    """A time in the unit that suits it.

    Examples:
        >>> duration(0.2), duration(90), duration(7300), duration(200_000)
        ('0.2 s', '1.5 minutes', '2.0 hours', '2.3 days')
    """
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "minutes"), (86400, 3600, "hours")):
        if seconds < limit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds / 86400:.1f} days"
