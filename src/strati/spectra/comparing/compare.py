"""The same layers of two or more networks side by side: what changed, where, and into what.

``compare(base, tuned)`` answers what fine-tuning did; ``compare(small, large)`` lays networks of different depth
beside each other; ``compare(*checkpoints, series=True)`` follows a training run; ``compare(a, b, merged,
merge=True)`` takes a merge apart. Networks are read layer by layer: never are two of them in memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from strati.errors import BadInputError
from strati.network.adapters.merge import is_adapter, merged
from strati.network.align import align
from strati.network.open import Network, Openable
from strati.network.open import open as open_network
from strati.network.select import as_patterns, select
from strati.options import resolve
from strati.rng import stream
from strati.spectra.comparing.matching import Unmatched, bare_names, match
from strati.spectra.comparing.mixture import Mixture, mixture
from strati.spectra.comparing.outliers import stand_out
from strati.spectra.comparing.results import (
    ComparedLayer,
    ComparedNetwork,
    Comparison,
    Movement,
    RoundingError,
)
from strati.spectra.comparing.role_differences import differences, distributions
from strati.spectra.comparing.series import Series, out_of_order, series_of
from strati.spectra.comparing.sides import Side, head_widths, sides_of, tied_heads
from strati.spectra.comparing.update import Update, relative_change, spectral_distance, update_between
from strati.spectra.comparing.update_rank import quantised_variance, within_rounding
from strati.types import Flag, Tick, silent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.network.align import Aligned
    from strati.network.layers import Layer
    from strati.types import FloatArray

    Matrix = NDArray[Any]

WORSE = 1.25
"""A quantised layer whose error is more than this many times the predicted one is named."""


@dataclass(frozen=True)
class CompareConfig:
    """Options of a comparison.

    Attributes:
        series: The networks are checkpoints of one training run, in order.
        merge: The last network is a merge of the others: estimate the mixture.
        layers: Patterns over the first network's names, roles and blocks; empty for all layers.
        eigenvalues: Put the eigenvalues into the JSON form.
        seed: Seed of the simulated rounding noise; every layer has a stream of its own.
        workers: Layers analysed at once; 0 for one per processor.
    """

    series: bool = False
    merge: bool = False
    layers: str | Sequence[str] | None = None
    eigenvalues: bool = False
    seed: int = 0
    workers: int = 0

    def __post_init__(self) -> None:
        """Refuse options that make no sense before any work is done."""
        if self.workers < 0:
            raise BadInputError("workers", "must be 0 (one per processor) or more")
        as_patterns(self.layers)
        if self.series and self.merge:
            raise BadInputError("compare", "series and merge are two questions; ask one at a time")


def compare(
    *networks: Openable, config: CompareConfig | None = None, tick: Tick = silent, **options: Any
) -> Comparison:
    r"""Lay networks side by side, layer by layer.

    Layers are matched by name, or by role, block and place in the block where names or depths differ. Weights stored
    in another order are brought to one (``aligned``). For layers of one shape the update ``B - A`` from the first to
    the last network is described: its relative size :math:`\|B - A\|_F / \|A\|_F`, its stable rank, how many
    directions lie beyond rounding and what kind of update that makes it, and the overlap of the leading singular
    subspaces (mean squared cosine of principal angles). Spectra are compared by the Wasserstein-1 distance of their
    log-eigenvalues.

    Args:
        networks: Two or more networks, whatever names them, in order; with ``merge`` the parents, then the merged one.
            A PEFT adapter after its base is compared as base and base with the adapter merged.
        config: Options; or give them by name.
        tick: Called after each layer of each network.
        **options: Fields of :class:`CompareConfig`; ``jobs`` is an alias of ``workers``.

    Raises:
        BadInputError: Too few networks, an unknown option, or none of their layers correspond.

    Examples:
        >>> from strati import embedded
        >>> c = compare(embedded.path("digits-mlp-init.safetensors"), embedded.path("digits-mlp.safetensors"))
        >>> [layer.name for layer in c.layers], c.movement.moved, c.layers[0].update_kind
        (['0.weight', '2.weight', '4.weight'], 6, 'dense')
    """
    if "jobs" in options:
        options["workers"] = options.pop("jobs")
    chosen = resolve(CompareConfig, config, options, of="compare")
    fewest = 3 if chosen.merge else 2
    if len(networks) < fewest:
        what = "needs the parents, then the merged network" if chosen.merge else "needs two networks or more"
        raise BadInputError("compare", what)
    opened = _with_adapters([open_network(n) for n in networks])
    sides = sides_of(opened, workers=chosen.workers, tick=tick)
    matching = match([side.layers for side in sides], [side.labels for side in sides])
    if not matching.rows:
        raise BadInputError(opened[-1].path, f"none of its layers corresponds to one of {opened[0].path}")
    rows = [[(side, side.layers[i]) for side, i in zip(sides, row, strict=True)] for row in matching.rows]
    wanted = {layer.name for layer in select([row[0][1] for row in rows], chosen.layers)}
    rows = [row for row in rows if row[0][1].name in wanted]
    heads, unmatched = tied_heads(sides, matching.unmatched)
    with threadpool_limits(limits=1):  # threads of BLAS would fight each other, and change the last bits
        layers = [_compare_layer(row, chosen, tied=False) for row in rows]
        layers += [_compare_layer(row, chosen, tied=True) for row in heads if not chosen.layers]
        series = _series(opened, rows, layers) if chosen.series else None
    tables = [[side.row(layer) for layer in side.layers] for side in sides]
    return Comparison(
        networks=tuple(
            ComparedNetwork(str(n.path), str(n.format), n.parameters, len(n.tensors)) for n in opened
        ),
        matched_by=matching.by,
        layers=tuple(layers),
        roles=tuple(distributions(t) for t in tables),
        role_differences=tuple(differences(t) for t in tables),
        movement=_movement(opened[0], opened[-1]),
        series=series,
        unmatched=unmatched,
        warnings=_flags(opened, unmatched, layers, chosen),
        stand_out=stand_out(layers),
        keep_eigenvalues=chosen.eigenvalues,
    )


def _with_adapters(networks: list[Network]) -> list[Network]:
    """An adapter beside its base stands for the base with the adapter merged; adapters alone stay as they are."""
    base = networks[0]
    if is_adapter(base):
        return networks
    return [merged(base, n) if n is not base and is_adapter(n) else n for n in networks]


def _compare_layer(row: Sequence[tuple[Side, Layer]], config: CompareConfig, *, tied: bool) -> ComparedLayer:
    (first_side, first), (last_side, last) = row[0], row[-1]
    metrics = [side.metrics(layer) for side, layer in row]
    shared = [k for k in metrics[0] if all(k in m for m in metrics) and _is_scalar(metrics[0][k])]
    flags = _spectrum_flags(row)
    update: Update | None = None
    rounding: RoundingError | None = None
    aligned = _aligned((first_side, first), (last_side, last))
    if aligned is None:
        flags.append(
            Flag("shapes-differ", f"{first.shape} against {last.shape}: the weights cannot be subtracted")
        )
    elif all(np.isfinite(m.astype(np.float64, copy=False)).all() for m in (aligned.first, aligned.second)):
        rng = stream(config.seed, "compare", first.name)
        versions = ((first, aligned.first), (last, aligned.second))
        noise = sum(_quantised(layer, m) for layer, m in versions if rounding_error(layer) > 0)
        update = update_between(aligned.first, aligned.second, rng=rng, variance=noise)
        rounding = _rounding(aligned, rounding_error(first) + rounding_error(last))
        flags += _extra_rows(aligned, row) + _rounded_worse(rounding)
    else:
        flags = [f for f in flags if f.code != "not-finite"]
        flags.append(Flag("not-finite", "NaN or infinite weights: no update is computed"))
    spectra = [side.spectrum(layer) for side, layer in row]
    how = [aligned.how] if aligned is not None and aligned.how is not None else []
    return ComparedLayer(
        name=first.name,
        partner=tuple(layer.name for _, layer in row[1:]),
        role=str(first.role),
        block=first.block,
        metrics={k: tuple(m[k] for m in metrics) for k in shared},
        spectral_distance=spectral_distance(spectra[0].eigenvalues, spectra[-1].eigenvalues),
        relative_change=update.relative_change if update else None,
        update_stable_rank=update.stable_rank if update else None,
        update_rank=update.rank.rank if update else None,
        update_rank_pvalue=update.rank.pvalue if update else None,
        update_kind=str(update.rank.kind) if update else None,
        subspace_overlap=update.subspace_overlap if update else None,
        overlap_by_chance=update.overlap_by_chance if update else None,
        subspace_directions=update.directions if update else None,
        aligned=", ".join([*how, *(["tied-head"] if tied else [])]) or None,
        rounding=rounding,
        mixture=_mixture(row) if config.merge else None,
        warnings=tuple(flags),
        update_eigenvalues=update.eigenvalues if update else None,
        eigenvalues=tuple(s.eigenvalues for s in spectra),
    )


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, int | float | str)


def _aligned(one: tuple[Side, Layer], other: tuple[Side, Layer]) -> Aligned | None:
    """The two versions of a layer in one order; kernels only where they are stored alike."""
    (first_side, first), (last_side, last) = one, other
    if first.count != last.count:
        return None
    widths = head_widths(first_side.network, first) or head_widths(last_side.network, last)
    a, b = whole(first), whole(last)
    return align(a, b, first.role if first.count == 1 else "", widths)


def whole(layer: Layer) -> Matrix:
    """All matrices of a layer side by side: a conv's slices become one matrix."""
    parts = list(layer.matrices())
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def rounding_error(layer: Layer) -> float:
    """Mean square of the error that quantisation left in a layer's entries; 0 where it is not quantised."""
    rounding = layer.network.contents.rounding
    if layer.quantisation is None or rounding is None:
        return 0.0
    return rounding(layer.tensor, layer.cut.index) or 0.0


def _quantised(layer: Layer, matrix: Matrix) -> FloatArray:
    group = layer.quantisation.group if layer.quantisation is not None else None
    return quantised_variance(matrix, rounding_error(layer), group)


def _rounding(aligned: Aligned, variance: float) -> RoundingError | None:
    if not variance > 0:
        return None
    step = aligned.second.astype(np.float64) - aligned.first.astype(np.float64)
    error, predicted = float(np.sqrt(np.square(step).mean())), float(np.sqrt(variance))
    return RoundingError(error, predicted, error / predicted)


def _rounded_worse(rounding: RoundingError | None) -> list[Flag]:
    if rounding is None or rounding.ratio <= WORSE:
        return []
    text = f"the error is {rounding.ratio:.2f} times what rounding to the nearest code of its step leaves"
    return [Flag("rounded-worse", text)]


def _spectrum_flags(row: Sequence[tuple[Side, Layer]]) -> list[Flag]:
    """The warnings of all networks: once where all share a code, else with the network's number."""
    own = [side.warnings(layer) for side, layer in row]
    flags: list[Flag] = []
    for code in dict.fromkeys(flag.code for found in own for flag in found):
        texts = [next((f.text for f in found if f.code == code), None) for found in own]
        if None not in texts and len(set(texts)) == 1:
            flags.append(Flag(code, str(texts[0])))
        else:
            flags += [Flag(code, f"network {n}: {text}") for n, text in enumerate(texts) if text is not None]
    return flags


def _extra_rows(aligned: Aligned, row: Sequence[tuple[Side, Layer]]) -> list[Flag]:
    if aligned.extra is None:
        return []
    which, start, stop = aligned.extra
    number = 0 if which == 0 else len(row) - 1
    rows = f"row {start}" if start == stop else f"rows {start} to {stop}"
    text = (
        f"only network {number} has {rows} ({stop - start + 1} tokens): the first {start} rows are compared"
    )
    return [Flag("vocabulary-resized", text)]


def _mixture(row: Sequence[tuple[Side, Layer]]) -> Mixture:
    merged = row[-1]
    parents = [_aligned(merged, parent) for parent in row[:-1]]
    usable = [p for p in parents if p is not None]
    nothing = Mixture((None,) * len(parents), (None,) * len(parents), None)
    if len(usable) < len(parents):
        return nothing
    rows = min(p.first.shape[0] for p in usable)
    target = usable[0].first[:rows]
    versions = [p.second[:rows] for p in usable]
    if not all(np.isfinite(m.astype(np.float64)).all() for m in (target, *versions)):
        return nothing
    return mixture(versions, target)


def _movement(first: Network, last: Network) -> Movement | None:
    changes: dict[str, float | None] = {}
    layers = {layer.tensor for layer in first.layers()}
    vectors = 0
    for name, a, b in _shared_tensors(first, last):
        scale = float(np.linalg.norm(a.astype(np.float64)))
        step = float(np.linalg.norm(b.astype(np.float64) - a.astype(np.float64)))
        changes[name] = step / scale if scale > 0 else (0.0 if step == 0 else None)
        vectors += name not in layers and step > 0 and not within_rounding(a, b)
    if not changes:
        return None
    moved = [c for c in changes.values() if c is None or c > 0]
    known = [c for c in moved if c is not None]
    return Movement(
        shared=len(changes),
        moved=len(moved),
        median_relative_change=float(np.median(known)) if known else None,
        untouched=tuple(name for name, c in changes.items() if c == 0),
        vectors_moved=vectors,
    )


def _shared_tensors(first: Network, last: Network) -> Iterator[tuple[str, Matrix, Matrix]]:
    """Tensors of one name (wrappers' prefixes aside) and shape."""
    here = dict(zip(bare_names([t.name for t in first.tensors]), first.tensors, strict=True))
    there = dict(zip(bare_names([t.name for t in last.tensors]), last.tensors, strict=True))
    for key, tensor in here.items():
        other = there.get(key)
        if other is not None and other.shape == tensor.shape:
            a, b = first.read(tensor.name), last.read(other.name)
            if all(v.dtype.kind in "fV" for v in (a, b)):
                yield tensor.name, a, b


def _series(
    networks: Sequence[Network],
    rows: Sequence[Sequence[tuple[Side, Layer]]],
    layers: Sequence[ComparedLayer],
) -> Series:
    changes = []
    for row in rows:
        start = whole(row[0][1])
        changes.append(tuple(relative_change(start, whole(layer)) for _, layer in row))
    return series_of([Path(n.path) for n in networks], layers, changes)


def _flags(
    networks: Sequence[Network],
    unmatched: Sequence[Unmatched],
    layers: Sequence[ComparedLayer],
    config: CompareConfig,
) -> tuple[Flag, ...]:
    flags = [Flag(f.code, f"network {n}: {f.text}") for n, net in enumerate(networks) for f in net.warnings]
    if unmatched:
        flags.append(Flag("unmatched-layers", f"{len(unmatched)} layers have no partner and are left out"))
    differ = sum(any(f.code == "shapes-differ" for f in layer.warnings) for layer in layers)
    if differ:
        flags.append(
            Flag("shapes-differ", f"{differ} layers have different shapes: only their spectra are compared")
        )
    if config.series and out_of_order([Path(n.path) for n in networks]):
        flags.append(
            Flag("out-of-order", "the numbers in the checkpoints' names do not ascend; is the order right?")
        )
    return tuple(flags)
