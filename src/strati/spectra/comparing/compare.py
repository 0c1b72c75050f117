"""The same layers of two or more networks side by side: what changed, where, and into what.

``compare(base, tuned)`` answers what fine-tuning did; ``compare(small, large)`` lays networks of different depth beside
each other; ``compare(*checkpoints, series=True)`` follows a training run. Each network is scanned once; the weights
themselves are compared where two networks have a layer of the same shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from threadpoolctl import threadpool_limits

from strati.errors import BadInputError
from strati.network.open import Network
from strati.network.open import open as open_network
from strati.spectra.comparing import text as comparison_text
from strati.spectra.comparing.matching import Unmatched, match
from strati.spectra.comparing.role_differences import Difference, Distribution, differences, distributions
from strati.spectra.comparing.series import Series, out_of_order, series_of
from strati.spectra.comparing.update import Update, relative_change, spectral_distance, update_between
from strati.spectra.scan import scan
from strati.types import Flag, Result, Tick, silent

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.network.layers import Layer
    from strati.spectra.spectrum import Spectrum
    from strati.types import FloatArray


@dataclass(frozen=True)
class ComparedNetwork:
    """One of the networks."""

    path: str
    format: str
    parameters: int
    tensors: int


@dataclass(frozen=True)
class ComparedLayer:
    """One layer in every network.

    ``metrics`` has a value per network; the other numbers lead from the first network to the last. They are ``None``
    where the shapes differ (all but ``spectral_distance``) or a value is not defined.
    """

    name: str
    names: tuple[str, ...]
    role: str
    block: int | None
    metrics: dict[str, tuple[Any, ...]]
    spectral_distance: float | None
    relative_change: float | None
    update_stable_rank: float | None
    update_hard_rank: int | None
    subspace_overlap: float | None
    overlap_by_chance: float | None
    subspace_directions: int | None
    warnings: tuple[Flag, ...] = ()
    update_eigenvalues: FloatArray | None = None
    eigenvalues: tuple[FloatArray, ...] = ()


@dataclass(frozen=True)
class Movement:
    """All tensors that two networks share, of whatever dimension: how many moved, and how far."""

    shared: int
    moved: int
    median_relative_change: float | None
    untouched: tuple[str, ...]


@dataclass(frozen=True)
class Comparison(Result):
    """Networks side by side."""

    verb: ClassVar[str] = "compare"

    networks: tuple[ComparedNetwork, ...]
    matched_by: str
    layers: tuple[ComparedLayer, ...]
    roles: tuple[tuple[Distribution, ...], ...]
    role_differences: tuple[tuple[Difference, ...], ...]
    movement: Movement | None
    series: Series | None
    unmatched: tuple[Unmatched, ...]
    warnings: tuple[Flag, ...]
    keep_eigenvalues: bool = field(default=False, repr=False)

    def payload(self) -> dict[str, Any]:
        """Networks, layers, roles, series, and what could not be compared."""
        layers = []
        for layer in self.layers:
            fields = dict(vars(layer))
            if not self.keep_eigenvalues:
                del fields["eigenvalues"], fields["update_eigenvalues"]
            layers.append(fields)
        return {
            "networks": self.networks,
            "matched_by": self.matched_by,
            "layers": layers,
            "roles": self.roles,
            "role_differences": self.role_differences,
            "movement": self.movement,
            "series": self.series,
            "unmatched": self.unmatched,
            "warnings": self.warnings,
            "summary_text": self.text(),
        }

    def text(self) -> str:
        """What changed and where, in a few sentences."""
        return comparison_text.sentences(self)

    def frame(self) -> pd.DataFrame:
        """One row per layer: the changes, then each metric once per network (``alpha_0``, ``alpha_1``, ...)."""
        import pandas as pd

        keep = (
            "name",
            "role",
            "block",
            "spectral_distance",
            "relative_change",
            "update_stable_rank",
            "subspace_overlap",
        )
        rows = []
        for layer in self.layers:
            row = {key: getattr(layer, key) for key in keep}
            for name, values in layer.metrics.items():
                row |= {f"{name}_{i}": value for i, value in enumerate(values)}
            rows.append(row)
        return pd.DataFrame(rows)

    def summary(self) -> RenderableType:
        """The sentences, the layers, and the roles' differences."""
        return comparison_text.renderable(self)

    def plot(self, **options: Any) -> Any:
        """Alpha and change over depth for two networks; phases over training for a series."""
        from strati.report.plots.compare import plot_comparison

        return plot_comparison(self, **options)


def compare(
    *networks: Network | str | Path,
    series: bool = False,
    eigenvalues: bool = False,
    jobs: int = 1,
    tick: Tick = silent,
) -> Comparison:
    """Lay networks side by side, layer by layer.

    Layers are matched by name, or by role and relative depth where names do not match. For layers of one shape the
    update ``B - A`` from the first to the last network is described: its relative size ``||B - A||_F / ||A||_F``, its
    stable and hard rank, and the overlap of the leading singular subspaces (mean squared cosine of principal angles).
    Spectra are compared by the Wasserstein-1 distance of their log-eigenvalues.

    Args:
        networks: Two or more networks or paths, in order.
        series: They are checkpoints of one training run.
        eigenvalues: Keep the eigenvalues in the JSON form.
        jobs: Layers analysed at once.
        tick: Called after each layer of each network.

    Raises:
        BadInputError: Fewer than two networks, or none of their layers correspond.

    Examples:
        >>> from strati import embedded
        >>> c = compare(embedded.path("digits-mlp-init.safetensors"), embedded.path("digits-mlp.safetensors"))
        >>> [layer.name for layer in c.layers], c.movement.moved
        (['0.weight', '2.weight', '4.weight'], 6)
    """
    if len(networks) < 2:
        raise BadInputError("compare", "needs two networks or more")
    opened = [n if isinstance(n, Network) else open_network(n) for n in networks]
    scans = [scan(n, jobs=jobs, tick=tick) for n in opened]
    analysed = [n.layers() for n in opened]
    matching = match(analysed)
    if not matching.rows:
        raise BadInputError(opened[-1].path, f"none of its layers corresponds to one of {opened[0].path}")
    layers = []
    with threadpool_limits(limits=1):  # threads of BLAS would fight each other, and change the last bits
        for row in matching.rows:
            versions = [analysed[n][i] for n, i in enumerate(row)]
            layers.append(_compare_layer(versions, [s[v.name] for s, v in zip(scans, versions, strict=True)]))
    rows = [[_role_row(layer, s[layer.name]) for layer in ls] for ls, s in zip(analysed, scans, strict=True)]
    flags = _flags(matching.unmatched, layers, [n.path for n in opened] if series else [])
    return Comparison(
        networks=tuple(
            ComparedNetwork(str(n.path), str(n.format), n.parameters, len(n.tensors)) for n in opened
        ),
        matched_by=matching.by,
        layers=tuple(layers),
        roles=tuple(distributions(r) for r in rows),
        role_differences=tuple(differences(r) for r in rows),
        movement=_movement(opened[0], opened[-1]),
        series=_series(opened, matching.rows, analysed, layers) if series else None,
        unmatched=matching.unmatched,
        warnings=flags,
        keep_eigenvalues=eigenvalues,
    )


def _compare_layer(versions: Sequence[Layer], spectra: Sequence[Spectrum]) -> ComparedLayer:
    first, last = versions[0], versions[-1]
    metrics = [s.metrics() for s in spectra]
    shared = [k for k in metrics[0] if all(k in m for m in metrics) and _is_scalar(metrics[0][k])]
    flags: list[Flag] = []
    update: Update | None = None
    if first.shape != last.shape:
        flags.append(
            Flag("shapes-differ", f"{first.shape} against {last.shape}: the weights cannot be subtracted")
        )
    else:
        matrices = [_whole(layer) for layer in (first, last)]
        if all(np.isfinite(m.astype(np.float64, copy=False)).all() for m in matrices):
            update = update_between(*matrices)
        else:
            flags.append(Flag("not-finite", "NaN or infinite weights: no update is computed"))
    return ComparedLayer(
        name=first.name,
        names=tuple(v.name for v in versions),
        role=str(first.role),
        block=first.block,
        metrics={k: tuple(m[k] for m in metrics) for k in shared},
        spectral_distance=spectral_distance(spectra[0].eigenvalues, spectra[-1].eigenvalues),
        relative_change=update.relative_change if update else None,
        update_stable_rank=update.stable_rank if update else None,
        update_hard_rank=update.hard_rank if update else None,
        subspace_overlap=update.subspace_overlap if update else None,
        overlap_by_chance=update.overlap_by_chance if update else None,
        subspace_directions=update.directions if update else None,
        warnings=tuple(flags),
        update_eigenvalues=update.eigenvalues if update else None,
        eigenvalues=tuple(s.eigenvalues for s in spectra),
    )


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, int | float | str)


def _whole(layer: Layer) -> np.ndarray[Any, Any]:
    """All matrices of a layer side by side: a conv's slices become one matrix."""
    parts = list(layer.matrices())
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _role_row(layer: Layer, spectrum: Spectrum) -> dict[str, object]:
    metrics = dict(spectrum.metrics())
    count = spectrum.eigenvalues.size
    for name in ("spikes", "quasi_null"):
        value = metrics.get(name)
        metrics[f"{name}_share"] = value / count if isinstance(value, int) and count else None
    return {"role": str(layer.role)} | metrics


def _movement(first: Network, last: Network) -> Movement | None:
    changes = {}
    for name, a, b in _shared_tensors(first, last):
        scale = float(np.linalg.norm(a))
        step = float(np.linalg.norm(b - a))
        changes[name] = step / scale if scale > 0 else (0.0 if step == 0 else None)
    if not changes:
        return None
    moved = [c for c in changes.values() if c is None or c > 0]
    known = [c for c in moved if c is not None]
    return Movement(
        shared=len(changes),
        moved=len(moved),
        median_relative_change=float(np.median(known)) if known else None,
        untouched=tuple(name for name, c in changes.items() if c == 0),
    )


def _shared_tensors(first: Network, last: Network) -> Iterator[tuple[str, FloatArray, FloatArray]]:
    shapes = {t.name: t.shape for t in last.tensors}
    for tensor in first.tensors:
        if shapes.get(tensor.name) == tensor.shape:
            a, b = first.read(tensor.name), last.read(tensor.name)
            if all(v.dtype.kind in "fV" for v in (a, b)):
                yield tensor.name, a.astype(np.float64), b.astype(np.float64)


def _series(
    networks: Sequence[Network],
    rows: Sequence[tuple[int, ...]],
    analysed: Sequence[Sequence[Layer]],
    layers: Sequence[ComparedLayer],
) -> Series:
    changes = []
    for row in rows:
        start = _whole(analysed[0][row[0]])
        changes.append(tuple(relative_change(start, _whole(analysed[n][i])) for n, i in enumerate(row)))
    return series_of([Path(n.path) for n in networks], layers, changes)


def _flags(
    unmatched: Sequence[Unmatched], layers: Sequence[ComparedLayer], series: Sequence[str | Path]
) -> tuple[Flag, ...]:
    flags = []
    if unmatched:
        flags.append(Flag("unmatched-layers", f"{len(unmatched)} layers have no partner and are left out"))
    differ = sum(any(f.code == "shapes-differ" for f in layer.warnings) for layer in layers)
    if differ:
        flags.append(
            Flag("shapes-differ", f"{differ} layers have different shapes: only their spectra are compared")
        )
    if out_of_order([Path(p) for p in series]):
        flags.append(
            Flag("out-of-order", "the numbers in the checkpoints' names do not ascend; is the order right?")
        )
    return tuple(flags)
