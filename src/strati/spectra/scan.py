"""Scan a network: the spectrum of every weight matrix, layer by layer.

Layers are independent; :mod:`strati.spectra.layerwise` computes them in parallel and stores them where a run is to be
resumable. The rows come in the network's order and with the same numbers whatever finished first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

from strati.core.display import TableOptions
from strati.core.errors import BadInputError
from strati.core.options import nearest, resolve
from strati.core.results import Flag, Result, Tick, silent
from strati.io.roles import Role
from strati.jobs.store import Run
from strati.spectra.eigenvalues import torch_on
from strati.spectra.layerwise import default_workers, spectra, stored_spectra
from strati.spectra.spectrum import Spectrum, SpectrumConfig
from strati.spectra.tokens import UnderTrainedToken, under_trained_tokens
from strati.spectra.verdicts import LayerState, decide_state

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.core.option_types import ScanOptions
    from strati.io.checkpoint_file import Skipped
    from strati.io.layers import Layer
    from strati.io.network import Network, Openable
    from strati.schemas.json_types import NetworkFields, ScannedLayer
    from strati.spectra.head_pairs import Composition
    from strati.spectra.heads import HeadMatrix, ScannedHead


@dataclass(frozen=True)
class ScanConfig:
    """Options of a scan.

    Attributes:
        split_qkv: Take fused attention projections apart.
        conv: Pool the slices of a convolution kernel, or flatten it into one matrix.
        level: Chance that the largest eigenvalue of pure noise passes for a spike.
        bootstrap: Samples of the tail's goodness-of-fit test; 0 leaves it out.
        eigenvalues: Put the eigenvalues into the JSON form.
        htsr: Compute the further numbers of heavy-tailed self-regularisation (traps, ``erg_gap``, ...).
        heads: Add two rows for every attention head: QK and OV.
        composition: Score how strongly heads read what heads of earlier blocks write.
        tokens: List the under-trained tokens of embedding and head.
        seed: Seed of the bootstrap; every layer has a stream of its own.
        workers: Layers worked on at once; 0 for one per processor. Default: one per processor, as far as memory goes.
        device: Solve on this torch device, in float64; by default with LAPACK.
    """

    split_qkv: bool = False
    conv: Literal["pool", "flatten"] = "pool"
    level: float = 0.01
    bootstrap: int = 0
    eigenvalues: bool = False
    htsr: bool = False
    heads: bool = False
    composition: bool = False
    tokens: bool = False
    seed: int = 0
    workers: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        """Refuse options that make no sense before any work is done."""
        if not 0 < self.level < 1:
            raise BadInputError("level", "a probability lies strictly between 0 and 1; 0.01 is usual")
        if self.conv not in ("pool", "flatten"):
            raise BadInputError("conv", "is 'pool' or 'flatten'")
        if self.workers is not None and self.workers < 0:
            raise BadInputError("workers", "must be 0 (one per processor) or more")
        if self.bootstrap < 0:
            raise BadInputError("bootstrap", "must be 0 or more")

    def spectrum(self) -> SpectrumConfig:
        """What a layer's spectrum depends on."""
        return SpectrumConfig(self.level, self.bootstrap, self.htsr, self.seed, self.device)


@dataclass(frozen=True)
class Scanned:
    """One layer and its spectrum."""

    layer: Layer
    spectrum: Spectrum

    @property
    def state(self) -> LayerState:
        """The layer's state; empty rows and a low rank are usual in an embedding."""
        sp = self.spectrum
        codes = (flag.code for flag in sp.warnings)
        return decide_state(
            codes, sp.verdict, sp.eigenvalues.size, embedding=self.layer.role == Role.EMBEDDING
        )

    def row(self) -> dict[str, Any]:
        """The layer's fields of the JSON form, in order, without eigenvalues."""
        layer, metrics = self.layer, self.spectrum.metrics()
        flags = (*self.spectrum.warnings, *_storage_flags(layer, self.spectrum))
        metrics["state"] = str(self.state)
        storage = layer.storage_fields()
        if "quantisation" in storage:
            storage["quantisation"]["noise_floor"] = layer.noise_floor()
        return layer.identity_fields() | metrics | {"view": layer.view} | storage | {"warnings": flags}


def _storage_flags(layer: Layer, spectrum: Spectrum) -> tuple[Flag, ...]:
    """Warnings about numbers at the floor of rounding, and about adapters that were never trained.

    Rounding to codes adds noise of a known size to a weight; eigenvalues below the largest that such noise has (the
    *floor*) say nothing about the weights before they were rounded.
    """
    flags = []
    if layer.quantised:
        text = "the weights are dequantised: what is below the quantisation step is not theirs"
        flags.append(Flag("quantised", text))
    floor = layer.noise_floor()
    if floor is not None:
        names = _metrics_at_floor(spectrum, floor)
        if names:
            text = f"{', '.join(names)} may come from rounding alone, whose eigenvalues reach {floor:.3g}"
            flags.append(Flag("rounding-floor", text))
    if layer.adapter is not None and layer.adapter.used_rank() == 0:
        flags.append(Flag("untouched", "the update is zero: the adapter was not trained"))
    return tuple(flags)


def _metrics_at_floor(spectrum: Spectrum, floor: float) -> list[str]:
    """The numbers of a layer that rounding alone would give."""
    values, metrics = spectrum.eigenvalues, spectrum.metrics()
    names = []
    null = metrics.get("quasi_null") or 0
    if null and values[min(null, values.size) - 1] <= floor:
        names.append("quasi_null")
    rank = metrics.get("hard_rank") or 0
    if rank and values[values.size - rank] <= floor:
        names.append("hard_rank")
    edge = metrics.get("mp_lambda_plus")
    if edge is not None and edge <= floor:
        names.append("mp_sigma")
    return names


@dataclass(frozen=True)
class Scan(Result):
    """The spectra of a network's layers, in the network's order.

    ``scan["layer.name"]`` is the :class:`~strati.spectra.spectrum.Spectrum` of a layer; ``scan.table`` a data
    frame of the key columns with one row per layer, ``scan.frame()`` one of all columns.
    """

    verb: ClassVar[str] = "scan"
    key_columns: ClassVar[tuple[str, ...]] = (
        *("name", "role", "rows", "cols", "parameters", "state", "spikes", "stable_rank"),
        *("alpha", "alpha_stderr", "phase", "warnings"),
    )
    omitted: ClassVar[tuple[str, ...]] = ("path", "format", "parameters", "tensors", "config", "view")
    computed: ClassVar[Mapping[str, str]] = {"network": "network", "layers": "rows"}
    optional: ClassVar[tuple[str, ...]] = ("tokens", "composition")

    path: str
    format: str
    parameters: int
    tensors: int
    layers: tuple[Scanned | ScannedHead, ...]
    skipped: tuple[Skipped, ...]
    warnings: tuple[Flag, ...] = ()
    tokens: tuple[UnderTrainedToken, ...] | None = None
    composition: tuple[Composition, ...] | None = None
    config: ScanConfig = field(default_factory=ScanConfig)
    view: TableOptions = field(default_factory=TableOptions)

    def __getitem__(self, name: str) -> Spectrum:
        """The spectrum of a layer by its name, or by that of its module: ``fc1`` is ``fc1.weight``.

        Raises:
            BadInputError: No layer has that name; the nearest one is named.
        """
        scanned = self._find(name)
        if scanned is None:
            raise BadInputError(name, f"no such layer in this scan; {nearest(str(name), self._by_name)}")
        return scanned.spectrum

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    def _find(self, name: str) -> Scanned | ScannedHead | None:
        return self._by_name.get(name) or self._by_name.get(f"{name}.weight")

    def __iter__(self) -> Iterator[Scanned | ScannedHead]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @cached_property
    def _by_name(self) -> dict[str, Scanned | ScannedHead]:
        return {scanned.layer.name: scanned for scanned in self.layers}

    def frame(self) -> pd.DataFrame:
        """Every field of the JSON, one row per layer; warnings as their codes, the phase's evidence as its reason."""
        import pandas as pd

        rows = []
        for scanned in self.layers:
            row = scanned.row()
            evidence = row.pop("phase_evidence")
            row["phase_evidence"] = evidence["reason"] if evidence else None
            row["warnings"] = " ".join(flag.code for flag in row["warnings"])
            for name, against in (row.pop("tail_alternatives", None) or {}).items():
                row[f"tail_vs_{name}"] = against["ratio"]
            rows.append(row)
        return pd.DataFrame(rows) if rows else pd.DataFrame(columns=list(self.key_columns))

    @property
    def network(self) -> NetworkFields:
        """The network, as in the JSON form."""
        return {
            "path": self.path,
            "format": self.format,
            "parameters": self.parameters,
            "tensors": self.tensors,
        }

    @property
    def rows(self) -> Sequence[ScannedLayer]:
        """The layers' fields of the JSON form, with eigenvalues if they were asked for."""
        rows: list[Any] = [scanned.row() for scanned in self.layers]
        if self.config.eigenvalues:
            for row, scanned in zip(rows, self.layers, strict=True):
                row["eigenvalues"] = scanned.spectrum.eigenvalues
        return rows

    def summary(self) -> RenderableType:
        """What a terminal shows: the answer, a table with what is wrong marked, the next command."""
        from strati.spectra.summary import summarise

        return summarise(self, self.view)

    def plot(self, **options: Any) -> Any:
        """Draw alpha, ranks and phases over depth, coloured by role."""
        from strati.report.plots.spectra import plot_scan

        return plot_scan(self, **options)


def scan(
    model: Openable,
    *,
    config: ScanConfig | None = None,
    layers: str | Iterable[str] | None = None,
    out: str | Path | None = None,
    engine: str = "local",
    address: str | None = None,
    tick: Tick = silent,
    **options: Unpack[ScanOptions],
) -> Scan:
    """Compute the spectrum of every weight matrix of a network.

    Args:
        model: Whatever names a network: a path, a cache id, a :class:`Network`, a state dict, a module.
        config: Options; keywords win over it.
        layers: Only these layers, as ``--layers``: ``"fc*"``, ``"role:mlp.*"``, ``"block:3-7"``, ``"!head"``.
        out: A folder that keeps every layer's spectrum as it is finished. Interrupted? The same call resumes; layers
            that the folder has are never computed again, and several runs may share it.
        engine: With ``out``, where the work is done: ``local`` (processes) or ``ray``.
        address: With ``engine="ray"``, an existing cluster.
        tick: Called after each layer with its name.
        **options: Fields of :class:`ScanConfig` (``jobs`` is ``workers``).

    Returns:
        One :class:`Spectrum` per layer, and what was skipped and why.

    Raises:
        StratiError: The file cannot be read, or an option makes no sense.
        StoppedError: Ctrl-C with ``out``.

    Examples:
        >>> import numpy as np, strati
        >>> W = np.random.default_rng(0).normal(size=(60, 40)).astype(np.float32)
        >>> s = strati.scan({"fc.weight": W})
        >>> s.table["phase"].tolist(), str(s["fc"].phase)
        (['random-like'], 'random-like')
    """
    from strati.io.network import open as open_network

    settings = resolve(ScanConfig, config, options, of=scan)
    if out is None and (engine != "local" or address is not None):
        raise BadInputError("engine", "other machines need a folder to keep results in; give out=")
    if settings.device is not None:
        torch_on(settings.device)  # refuses a device that is not there before any work is done
    opened = open_network(model)
    selected, heads = select_matrices(opened, settings, layers)
    if out is None:
        pairs: Iterable[tuple[Layer, Spectrum]] = zip(
            selected, spectra(selected, settings.spectrum(), workers=settings.workers, tick=tick), strict=True
        )
    else:
        run = Run(engine, default_workers(selected, settings.workers), address, tick=tick)
        pairs = stored_spectra(selected, settings.spectrum(), out=out, run=run)
    scanned: list[Scanned | ScannedHead] = [Scanned(layer, layer_spectrum) for layer, layer_spectrum in pairs]
    if heads:
        from strati.spectra.head_pairs import composition
        from strati.spectra.heads import scan_heads

        scanned += scan_heads(opened, heads, level=settings.level, seed=settings.seed)
    return Scan(
        path=str(opened.path),
        format=opened.format,
        parameters=opened.parameters,
        tensors=len(opened.tensors),
        layers=tuple(scanned),
        skipped=opened.skipped(split_qkv=settings.split_qkv, conv=settings.conv),
        warnings=opened.warnings,
        tokens=under_trained_tokens(opened, selected, level=settings.level) if settings.tokens else None,
        composition=composition(heads) if settings.composition else None,
        config=settings,
    )


def select_matrices(
    network: Network, settings: ScanConfig, patterns: str | Iterable[str] | None
) -> tuple[tuple[Layer, ...], tuple[HeadMatrix, ...]]:
    """The layers and the products of heads that a scan measures."""
    from strati.io.layers import select

    layers = network.layers(split_qkv=settings.split_qkv, conv=settings.conv)
    if not (settings.heads or settings.composition):
        return select(layers, patterns), ()
    from strati.spectra.heads import HeadMatrix, head_matrices

    candidates: list[Any] = [*layers, *head_matrices(network)]
    selected = select(candidates, patterns)
    heads = tuple(matrix for matrix in selected if isinstance(matrix, HeadMatrix))
    return tuple(layer for layer in selected if not isinstance(layer, HeadMatrix)), heads
