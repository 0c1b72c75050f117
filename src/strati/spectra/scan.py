"""The survey of a network: the spectrum of every weight matrix, layer by layer.

Layers are independent, so several are worked on at once, each with one BLAS thread; the rows come in the
network's order and with the same numbers whatever finished first. A matrix is read when its turn comes and
dropped afterwards; those at hand at one time are together hardly larger than the largest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from strati.errors import BadInputError
from strati.options import nearest
from strati.rng import derive
from strati.spectra.spectrum import Spectrum, spectrum
from strati.spectra.stored import matrices_of, stored_fields, stored_flags
from strati.types import Flag, Result, Tick, silent

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.network.contents import Skipped
    from strati.network.layers import Layer
    from strati.network.open import Network


@dataclass(frozen=True)
class ScanConfig:
    """Options of a scan.

    Attributes:
        split_qkv: Take fused attention projections apart.
        conv: Pool the slices of a convolution kernel, or flatten it into one matrix.
        level: Chance that the largest eigenvalue of pure noise passes for a spike.
        bootstrap: Samples of the tail's goodness-of-fit test; 0 leaves it out.
        eigenvalues: Put the eigenvalues into the JSON form.
        seed: Seed of the bootstrap; every layer has a stream of its own.
        jobs: Layers worked on at once; 0 for one per processor.
    """

    split_qkv: bool = False
    conv: Literal["pool", "flatten"] = "pool"
    level: float = 0.01
    bootstrap: int = 0
    eigenvalues: bool = False
    seed: int = 0
    jobs: int = 0

    def __post_init__(self) -> None:
        """Refuse options that make no sense before any work is done."""
        if not 0 < self.level < 1:
            raise BadInputError("level", "a probability lies strictly between 0 and 1; 0.01 is usual")
        if self.conv not in ("pool", "flatten"):
            raise BadInputError("conv", "is 'pool' or 'flatten'")
        if self.jobs < 0:
            raise BadInputError("jobs", "must be 0 (one per processor) or more")
        if self.bootstrap < 0:
            raise BadInputError("bootstrap", "must be 0 or more")


@dataclass(frozen=True)
class Scanned:
    """One layer and its spectrum."""

    layer: Layer
    spectrum: Spectrum

    def row(self) -> dict[str, Any]:
        """The layer's fields of the JSON form, in order, without eigenvalues."""
        layer, metrics = self.layer, self.spectrum.metrics()
        flags = (*self.spectrum.warnings, *stored_flags(layer, self.spectrum))
        head = {
            "name": layer.name,
            "role": str(layer.role),
            "block": layer.block,
            "kind": layer.kind,
            "rows": layer.shape[0],
            "cols": layer.shape[1],
            "aspect": max(layer.shape) / min(layer.shape) if min(layer.shape) else None,
            "parameters": layer.parameters,
        }
        return head | metrics | {"view": layer.view} | stored_fields(layer) | {"warnings": flags}


@dataclass(frozen=True)
class Scan(Result):
    """The spectra of a network's layers, in the network's order.

    ``scan["layer.name"]`` is the :class:`~strati.spectra.spectrum.Spectrum` of a layer; ``scan.table`` a data
    frame with one row per layer.
    """

    verb: ClassVar[str] = "scan"

    path: str
    format: str
    parameters: int
    tensors: int
    layers: tuple[Scanned, ...]
    skipped: tuple[Skipped, ...]
    warnings: tuple[Flag, ...] = ()
    config: ScanConfig = field(default_factory=ScanConfig)

    def __getitem__(self, name: str) -> Spectrum:
        """The spectrum of a layer by its name, or by that of its module: ``fc1`` is ``fc1.weight``.

        Raises:
            BadInputError: No layer has that name; the nearest one is named.
        """
        found = self._find(name)
        if found is None:
            raise BadInputError(name, f"no such layer in this scan; {nearest(name, self._by_name)}")
        return found.spectrum

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    def _find(self, name: str) -> Scanned | None:
        return self._by_name.get(name) or self._by_name.get(f"{name}.weight")

    def __iter__(self) -> Iterator[Scanned]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @cached_property
    def _by_name(self) -> dict[str, Scanned]:
        return {item.layer.name: item for item in self.layers}

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per layer; warnings as their codes, the phase's evidence as its reason."""
        import pandas as pd

        rows = []
        for item in self.layers:
            row = item.row()
            evidence = row.pop("phase_evidence")
            row["phase_evidence"] = evidence["reason"] if evidence else None
            row["warnings"] = " ".join(flag.code for flag in row["warnings"])
            for name, value in (row.pop("tail_alternatives", None) or {}).items():
                row[f"tail_vs_{name}"] = value["ratio"]
            rows.append(row)
        return pd.DataFrame(rows)

    def frame(self) -> pd.DataFrame:
        """The main table."""
        return self.table

    def payload(self) -> dict[str, Any]:
        """The fields of the JSON form."""
        layers = []
        for item in self.layers:
            row = item.row()
            if self.config.eigenvalues:
                row["eigenvalues"] = item.spectrum.eigenvalues
            layers.append(row)
        network = {
            "path": self.path,
            "format": self.format,
            "parameters": self.parameters,
            "tensors": self.tensors,
        }
        return {"network": network, "layers": layers, "skipped": self.skipped, "warnings": self.warnings}

    def summary(self) -> RenderableType:
        """The table a terminal shows, worst layers marked."""
        from strati.spectra.summary import summarise

        return summarise(self)

    def plot(self, **options: Any) -> Any:
        """Draw alpha, ranks and phases over depth, coloured by role."""
        from strati.report.plots.spectra import plot_scan

        return plot_scan(self, **options)


def scan(
    net: Network | str | Path, config: ScanConfig | None = None, *, tick: Tick = silent, **options: Any
) -> Scan:
    """The spectral survey of every weight matrix of a network.

    Args:
        net: A network, or the path of one.
        config: Options; or give them by name.
        tick: Called after each layer with its name.
        **options: Fields of :class:`ScanConfig`.

    Returns:
        One :class:`Spectrum` per layer, and what was skipped and why.

    Raises:
        StratiError: The file cannot be read, or an option makes no sense.

    Examples:
        >>> import tempfile, numpy as np, strati
        >>> file = Path(tempfile.mkdtemp()) / "small.npz"
        >>> W = np.random.default_rng(0).normal(size=(60, 40)).astype(np.float32)
        >>> np.savez(file, **{"fc.weight": W})
        >>> s = strati.scan(file)
        >>> s.table["phase"].tolist(), str(s["fc.weight"].phase)
        (['random-like'], 'random-like')
    """
    from strati.network.open import Network
    from strati.network.open import open as open_network

    if config is not None and options:
        raise BadInputError("scan", "give a config or options by name, not both")
    chosen = config if config is not None else ScanConfig(**options)
    network = net if isinstance(net, Network) else open_network(net)
    layers = network.layers(split_qkv=chosen.split_qkv, conv=chosen.conv)
    found = _run(layers, chosen, tick)
    return Scan(
        path=str(network.path),
        format=network.format,
        parameters=network.parameters,
        tensors=len(network.tensors),
        layers=tuple(Scanned(layer, item) for layer, item in zip(layers, found, strict=True)),
        skipped=network.skipped(split_qkv=chosen.split_qkv, conv=chosen.conv),
        warnings=network.warnings,
        config=chosen,
    )


def _run(layers: tuple[Layer, ...], config: ScanConfig, tick: Tick) -> list[Spectrum]:
    from threadpoolctl import threadpool_limits

    room = _Room(max((_bytes(layer) for layer in layers), default=0))

    def one(layer: Layer) -> Spectrum:
        seed = derive(config.seed, "scan", layer.name) if config.bootstrap else 0
        dtype = None if layer.quantised else layer.dtype  # a quantised layer comes as what it is decoded to
        with room.for_bytes(_bytes(layer)):
            source = partial(matrices_of, layer)
            found = spectrum(source, dtype, level=config.level, bootstrap=config.bootstrap, seed=seed)
        tick(layer.name)
        return found

    workers = min(config.jobs or os.cpu_count() or 1, len(layers))
    # One BLAS thread per layer whatever the number of jobs: sums are then taken in the same order, and the
    # numbers are the same to the last bit.
    with threadpool_limits(limits=1, user_api="blas"):
        if workers < 2:
            return [one(layer) for layer in layers]
        # Threads suffice: LAPACK releases the interpreter's lock, and nothing is copied between processes.
        pool = ThreadPoolExecutor(workers)
        try:
            return list(pool.map(one, layers))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _bytes(layer: Layer) -> int:
    return 8 * layer.shape[0] * layer.shape[1]


class _Room:
    """Lets layers in while their matrices together are hardly larger than the largest one alone."""

    def __init__(self, largest: int) -> None:
        self._limit = 1.35 * largest
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
