"""``compare``: the same layers of two or more networks, what changed, where, and into what.

``compare(base, tuned)`` answers what fine-tuning did; ``compare(small, large)`` compares networks of different depth;
``compare(base, tuned1, tuned2)`` also says whether the two updates oppose each other; ``compare(*checkpoints,
series=True)`` follows a training run; ``compare(a, b, merged, merge=True)`` finds the weights of a merge. Networks are
read layer by layer; two of them are never in memory at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from strati.comparison.layer_statistics import (
    differences,
    distributions,
    out_of_order,
    series_of,
    stand_out,
)
from strati.comparison.matching import Matching, Unmatched, match
from strati.comparison.pair_update import PairedRow, PairUpdate, changes_from_first, updates
from strati.comparison.results import ComparedLayer, ComparedNetwork, Comparison, Movement
from strati.comparison.unit_alignment import UnitOrder, unit_order
from strati.comparison.update import spectral_distance
from strati.comparison.vectors import compare_vectors, folded_gains, movement, pair_vectors
from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.results import Flag, Tick, silent
from strati.io.adapters.merge import carries_adapter, is_adapter, merged, unwrapped
from strati.io.align import split_like, unfused
from strati.io.layers import as_patterns, select
from strati.io.network import Network, Openable
from strati.io.network import open as open_network
from strati.io.roles import Role
from strati.jobs.progress import Ticker, as_ticker
from strati.jobs.store import Run
from strati.spectra.layerwise import default_workers, spectra, stored_spectra
from strati.spectra.scan import Scanned
from strati.spectra.spectrum import Spectrum, SpectrumConfig

if TYPE_CHECKING:
    from strati.core.option_types import CompareOptions
    from strati.io.layers import Layer
    from strati.spectra.head_pairs import ComparedHead

    Version = tuple["NetworkLayers", Layer]

_NOT_BY_CHANCE = 5.0  # standard deviations; chance exceeds it once in three million layers
_SAME_SPECTRA = 0.02  # distance of log-eigenvalues
_SAME_DIRECTION = 0.9  # cosine of the sketches of two directions
_ENOUGH_ENTRIES = 2500  # a cosine of 0.2, less than training leaves, is then ten standard deviations


@dataclass(frozen=True)
class CompareConfig:
    """Options of a comparison.

    Attributes:
        series: The networks are checkpoints of one training run, in order.
        merge: The last network is a merge of the others: estimate the mixture.
        layers: Patterns over the first network's names, roles and blocks; empty for all layers.
        eigenvalues: Put the eigenvalues into the JSON form.
        heads: Also compare QK and OV of every attention head of the first and the last network.
        activation: Between plain linear layers, where the network's settings do not say: decides whether units may
            differ in scale (``relu``, the default) or sign (``tanh``).
        seed: Seed of the simulated rounding noise; every layer has a stream of its own.
        workers: Layers analysed at once; 0 or ``None`` for one per processor.
    """

    series: bool = False
    merge: bool = False
    layers: str | Sequence[str] | None = None
    eigenvalues: bool = False
    heads: bool = False
    activation: str | None = None
    seed: int = 0
    workers: int | None = None

    def __post_init__(self) -> None:
        """Refuse options that make no sense before any work is done."""
        if self.workers is not None and self.workers < 0:
            raise BadInputError("workers", "must be 0 (one per processor) or more")
        as_patterns(self.layers)
        if self.series and self.merge:
            raise BadInputError("compare", "series and merge are two questions; ask one at a time")


def compare(
    *models: Openable,
    config: CompareConfig | None = None,
    out: str | Path | None = None,
    engine: str = "local",
    address: str | None = None,
    tick: Tick = silent,
    **options: Unpack[CompareOptions],
) -> Comparison:
    r"""Lay networks side by side, layer by layer.

    Layers are matched by name, or by role, block and place in the block where names or depths differ. Weights stored
    in another order are brought to one (``aligned``). For layers of one shape the update ``B - A`` from the first to
    the last network is described: its relative size :math:`\|B - A\|_F / \|A\|_F`, its stable rank, how many
    directions lie beyond rounding and what kind of update that makes it, and the overlap of the leading singular
    subspaces (mean squared cosine of principal angles). Spectra are compared by the Wasserstein-1 distance of their
    log-eigenvalues.

    Args:
        models: Two or more networks, whatever names them, in order; with ``merge`` the parents, then the merged one.
            A PEFT adapter after its base is compared as base and base with the adapter merged.
        config: Options; or give them by name.
        out: A folder that keeps every layer's spectra and update as they are finished. Interrupted? The same call
            resumes, and nothing that the folder has is computed again.
        engine: With ``out``, where the work is done: ``local`` (processes) or ``ray``.
        address: With ``engine="ray"``, an existing cluster.
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
    settings = resolve(CompareConfig, config, options, of=compare)
    fewest = 3 if settings.merge else 2
    if len(models) < fewest:
        what = (
            "needs the parents, then the merged network" if settings.merge else "needs two networks or more"
        )
        raise BadInputError("compare", what)
    if out is None and (engine != "local" or address is not None):
        raise BadInputError("engine", "other machines need a folder to keep results in; give out=")
    opened = [open_network(model) for model in models]
    networks = with_adapters_merged(opened)
    plain = comparable_layers(networks)
    matching = match([side.layers for side in plain], [side.labels for side in plain])
    if not matching.rows:
        raise BadInputError(networks[-1].path, f"none of its layers corresponds to one of {networks[0].path}")
    matched, only, tied, unmatched = _selected(plain, matching, settings)
    every = [layer for side in plain for layer in side.layers]
    run = Run() if out is None else Run(engine, default_workers(every, settings.workers), address, tick=tick)
    if out is None:
        as_ticker(tick).expect(len(every) if only is None else sum(map(len, only)))
    sides = with_spectra(plain, only, workers=settings.workers, tick=tick, out=out, run=run)
    rows: list[list[Version]] = [
        [(side, side.layers[i]) for side, i in zip(sides, row, strict=True)] for row in matched
    ]
    tied_rows: list[list[Version]] = [list(zip(sides, row, strict=True)) for row in tied]
    every_pair = [(plain[0].layers[row[0]], plain[-1].layers[row[-1]]) for row in matching.rows]
    order, gains = UnitOrder(), {}
    if not settings.series and not settings.merge:
        order = unit_order(networks[0], networks[-1], every_pair, settings.activation)
        gains = folded_gains(networks[0], networks[-1], every_pair)
    steps = updates(
        [
            PairedRow(
                tuple(layer for _, layer in row),
                tuple(_widths(row)),
                order.layers.get(row[-1][1].name),
                gains.get(row[0][1].name, ()),
                settings.series,
            )
            for row in [*rows, *tied_rows]
        ],
        seed=settings.seed,
        merge=settings.merge,
        workers=settings.workers,
        out=out,
        run=replace(run, tick=Ticker(resume=as_ticker(tick).resume)),
    )
    layers = [
        _compare_layer(row, step, tied=n >= len(rows))
        for n, (row, step) in enumerate(zip([*rows, *tied_rows], steps, strict=True))
    ]
    compared_pairs = [(row[0][1], row[-1][1], layer) for row, layer in zip(rows, layers, strict=False)]
    folded = frozenset(step.folded for step in steps if step.folded is not None)
    tables = [side.table() for side in sides]
    places = [Path(n.path) for n in networks]
    changes = [changes_from_first([layer for _, layer in row]) for row in rows] if settings.series else []
    return Comparison(
        networks=tuple(
            ComparedNetwork(
                str(network.path),
                str(network.format),
                network.parameters,
                len(network.tensors),
                str(source.path) if is_adapter(source) else None,
            )
            for network, source in zip(networks, opened, strict=True)
        ),
        matched_by=matching.by,
        layers=tuple(layers),
        roles=tuple(distributions(table) for table in tables),
        role_differences=tuple(differences(table) for table in tables),
        movement=_movement(networks, every_pair, compared_pairs, order, folded),
        series=series_of(places, layers, changes) if settings.series else None,
        unmatched=unmatched,
        warnings=_flags(networks, unmatched, layers, settings),
        stand_out=stand_out(layers),
        related=_related(layers),
        removed_direction=_removed_direction(steps),
        heads=_heads(networks, layers, settings),
        unit_order=order,
        keep_eigenvalues=settings.eigenvalues,
    )


def _heads(
    networks: Sequence[Network], layers: Sequence[ComparedLayer], settings: CompareConfig
) -> tuple[ComparedHead, ...] | None:
    """The heads of the blocks that were compared, from the first network to the last."""
    if not settings.heads:
        return None
    from strati.spectra.head_pairs import compare_heads

    return compare_heads(
        networks[0], networks[-1], {layer.block for layer in layers} if settings.layers else None
    )


def _selected(
    sides: Sequence[NetworkLayers], matching: Matching, settings: CompareConfig
) -> tuple[list[tuple[int, ...]], list[frozenset[str]] | None, list[list[Layer]], tuple[Unmatched, ...]]:
    """Matched rows that the patterns select, the names they need (``None``: all), tied heads, unmatched layers."""
    rows = list(matching.rows)
    if not as_patterns(settings.layers):
        tied, unmatched = tied_heads(sides, matching.unmatched)
        return rows, None, tied, unmatched
    names = {layer.name for layer in select([sides[0].layers[row[0]] for row in rows], settings.layers)}
    rows = [row for row in rows if sides[0].layers[row[0]].name in names]
    only = [frozenset(side.layers[row[n]].name for row in rows) for n, side in enumerate(sides)]
    return rows, only, [], matching.unmatched


def _movement(
    networks: Sequence[Network],
    layers: Sequence[tuple[Layer, Layer]],
    compared: Sequence[tuple[Layer, Layer, ComparedLayer]],
    order: UnitOrder,
    folded: frozenset[str],
) -> Movement | None:
    first, last = networks[0], networks[-1]
    widths = {a.name: tuple(head_widths(first, a) or head_widths(last, b)) for a, b in layers}
    vectors = pair_vectors(first, last, layers, widths)
    compared_vectors = tuple(compare_vectors(first, last, vectors.pairs, order.vectors, folded))
    return movement(first, last, compared, compared_vectors, vectors)


def _removed_direction(steps: Sequence[PairUpdate]) -> int:
    """Number of layers that one and the same direction was projected out of."""
    sketches = [np.array(step.removed) for step in steps if step.removed is not None]
    if len(sketches) < 2 or len({sketch.size for sketch in sketches}) != 1:
        return 0
    unit = np.array([sketch / np.linalg.norm(sketch) for sketch in sketches])
    return int((np.abs(unit @ unit.T) > _SAME_DIRECTION).sum(axis=1).max())


def _related(layers: Sequence[ComparedLayer]) -> bool | None:
    """Whether the weights of the last network come from the first's; ``None`` where it cannot be decided."""
    if any(layer.update_kind in ("untouched", "rounding") for layer in layers):
        return True
    scores = [layer.agreement for layer in layers if layer.agreement is not None]
    if any(score > _NOT_BY_CHANCE for score in scores):
        return True
    distances = [layer.spectral_distance for layer in layers if layer.spectral_distance is not None]
    # Equal spectra of weights that do not resemble each other: the same network in another basis, perhaps.
    if not distances or float(np.median(distances)) < _SAME_SPECTRA:
        return None
    entries = [
        eigenvalues.size**2
        for layer in layers
        if layer.agreement is not None
        for eigenvalues in layer.eigenvalues[:1]
    ]
    return False if sum(entries) >= _ENOUGH_ENTRIES else None


def with_adapters_merged(networks: Sequence[Network]) -> list[Network]:
    """Networks with every adapter replaced by its base with the adapter merged; adapters alone stay as they are.

    The base is the first network that is no adapter. A PEFT model in memory, which holds both, becomes the network that
    it computes.
    """
    plain = [unwrapped(network) if carries_adapter(network) else network for network in networks]
    base = next((network for network in plain if not is_adapter(network)), None)
    if base is None:
        return plain
    return [merged(base, network) if is_adapter(network) else network for network in plain]


@dataclass(frozen=True)
class NetworkLayers:
    """A network, its layers cut as the other networks need them, and, once computed, their spectra."""

    network: Network
    layers: tuple[Layer, ...]
    spectra: Mapping[str, Spectrum] = field(default_factory=dict)

    @cached_property
    def labels(self) -> list[str]:
        """Names that show roles and places: the format's better ones where it has some."""
        names = self.network.names
        return [
            names.label(layer.tensor)
            + layer.name.removeprefix(layer.tensor).replace("[", ".").replace("]", "")
            for layer in self.layers
        ]

    def warnings(self, layer: Layer) -> tuple[Flag, ...]:
        """The warnings that a scan gives the layer."""
        flags: tuple[Flag, ...] = tuple(Scanned(layer, self.spectra[layer.name]).row()["warnings"])
        return flags

    def table(self) -> list[dict[str, Any]]:
        """Role and metrics of every layer with a spectrum, counts also as shares of the eigenvalues."""
        rows = []
        for layer in self.layers:
            if layer.name in self.spectra:
                spectrum = self.spectra[layer.name]
                metrics = spectrum.metrics()
                count = spectrum.eigenvalues.size
                for name in ("spikes", "quasi_null"):
                    value = metrics.get(name)
                    metrics[f"{name}_share"] = value / count if isinstance(value, int) and count else None
                rows.append({"role": str(layer.role)} | metrics)
        return rows


def comparable_layers(networks: Sequence[Network]) -> list[NetworkLayers]:
    """Every network with its layers cut as the others need them.

    Where one network fuses query, key and value (or gate and up) and another keeps them apart, the fused ones are cut.
    """
    roles = [{layer.role for layer in network.layers()} for network in networks]
    separate, gated = (
        next((net for net, held in zip(networks, roles, strict=True) if role in held), None)
        for role in (Role.QUERY, Role.MLP_GATE)
    )
    split = separate is not None and any(Role.QKV in network_roles for network_roles in roles)
    sides = []
    for network, network_roles in zip(networks, roles, strict=True):
        layers = network.layers(split_qkv=split)
        if split and separate is not None and Role.QUERY not in network_roles:
            layers = split_like(layers, separate.layers(), separate.names.heads()[0])
        if gated is not None and Role.MLP_GATE not in network_roles:
            layers = unfused(layers, gated.layers())
        sides.append(NetworkLayers(network, layers))
    return sides


def matched_layers(first: Network, last: Network) -> list[tuple[Layer, Layer]]:
    """Corresponding layers of two networks, cut alike."""
    sides = comparable_layers([first, last])
    rows = match([side.layers for side in sides], [side.labels for side in sides]).rows
    return [(sides[0].layers[a], sides[1].layers[b]) for a, b in rows]


def with_spectra(
    sides: Sequence[NetworkLayers],
    names: Sequence[frozenset[str]] | None,
    *,
    workers: int | None,
    tick: Tick,
    out: str | Path | None,
    run: Run,
) -> list[NetworkLayers]:
    """Add the spectra of the layers of these names (``None``: all), one network after another."""
    measured = []
    for n, side in enumerate(sides):
        layers = [x for x in side.layers if names is None or x.name in names[n]]
        options = SpectrumConfig()
        if out is None:
            pairs = list(zip(layers, spectra(layers, options, workers=workers, tick=tick), strict=True))
        else:
            pairs = list(stored_spectra(layers, options, out=out, run=run))
        by_name = {layer.name: layer for layer, _ in pairs}
        measured.append(
            replace(
                side,
                layers=tuple(by_name.get(layer.name, layer) for layer in side.layers),
                spectra={layer.name: spectrum for layer, spectrum in pairs},
            )
        )
    return measured


def head_widths(network: Network, layer: Layer) -> list[int]:
    """Widths of an attention head that the network's settings allow for a layer; empty where they say nothing."""
    heads, groups, width = network.names.heads()
    if width:
        return [width]
    count = groups if layer.role is Role.KEY else heads
    rows = layer.shape[0] // 3 if layer.role is Role.QKV else layer.shape[0]
    return [rows // count] if count and rows % count == 0 else []


def tied_heads(
    sides: Sequence[NetworkLayers], unmatched: Sequence[Unmatched]
) -> tuple[list[list[Layer]], tuple[Unmatched, ...]]:
    """Compare a head that some networks store with the embedding that the others use for it.

    Returns:
        Rows of layers to compare beyond the matched ones, and the layers that still have no partner.
    """
    lost = {(u.network, u.name) for u in unmatched}
    row: list[Layer] = []
    stored: list[tuple[int, str]] = []
    for n, side in enumerate(sides):
        heads = [layer for layer in side.layers if layer.role is Role.HEAD]
        if len(heads) == 1 and (n, heads[0].name) in lost:
            row.append(heads[0])
            stored.append((n, heads[0].name))
        elif not heads and _tied(side.network):
            tables = [x for x in side.layers if x.role is Role.EMBEDDING]
            if len(tables) != 1:
                return [], tuple(unmatched)
            row.append(tables[0])
        else:
            return [], tuple(unmatched)
    if not stored or len({layer.shape[1] for layer in row}) > 1:
        return [], tuple(unmatched)
    return [row], tuple(u for u in unmatched if (u.network, u.name) not in stored)


def _tied(network: Network) -> bool:
    """Whether a network without a stored head uses its embedding for it."""
    config = network.config or {}
    if network.format == "gguf":  # llama.cpp leaves the output out exactly where it is tied
        return True
    roles = {network.names.by_role(name) for name in network.ties}
    return Role.HEAD in roles or config.get("tie_word_embeddings") is True


def _widths(row: Sequence[Version]) -> list[int]:
    (first_side, first), (last_side, last) = row[0], row[-1]
    return head_widths(first_side.network, first) or head_widths(last_side.network, last)


def _compare_layer(row: Sequence[Version], step: PairUpdate, *, tied: bool) -> ComparedLayer:
    spectra = [side.spectra[layer.name] for side, layer in row]
    metrics = [spectrum.metrics() for spectrum in spectra]
    plain = [k for k, v in metrics[0].items() if isinstance(v, int | float | str | None)]
    shared = [k for k in plain if all(k in m for m in metrics)]
    for values, (side, layer) in zip(metrics, row, strict=True):
        values["state"] = str(Scanned(layer, side.spectra[layer.name]).state)
    update = step.numbers
    codes = {flag.code for flag in update.warnings}
    flags = [flag for flag in _spectrum_flags(row) if flag.code not in codes]
    before = {flag.code for flag in row[0][0].warnings(row[0][1])}
    new = [flag.code for flag in row[-1][0].warnings(row[-1][1]) if flag.code not in before]
    how = [word for word in (update.aligned, "tied-head" if tied else None) if word is not None]
    first = row[0][1]
    changed = {"aligned": ", ".join(how) or None, "warnings": (*flags, *update.warnings)}
    return ComparedLayer(
        **(vars(update) | changed),
        name=first.name,
        partner=tuple(layer.name for _, layer in row[1:]),
        role=str(first.role),
        block=first.block,
        metrics={k: tuple(m[k] for m in metrics) for k in shared},
        spectral_distance=spectral_distance(spectra[0].eigenvalues, spectra[-1].eigenvalues),
        new_warnings=tuple(dict.fromkeys([*new, *(flag.code for flag in update.warnings)])),
        eigenvalues=tuple(spectrum.eigenvalues for spectrum in spectra),
    )


def _spectrum_flags(row: Sequence[Version]) -> list[Flag]:
    """The warnings of all networks: once where all share a code, else with the network's number."""
    by_network = [side.warnings(layer) for side, layer in row]
    flags: list[Flag] = []
    for code in dict.fromkeys(flag.code for warnings in by_network for flag in warnings):
        texts = [next((f.text for f in warnings if f.code == code), None) for warnings in by_network]
        if None not in texts and len(set(texts)) == 1:
            flags.append(Flag(code, str(texts[0])))
        else:
            flags += [Flag(code, f"network {n}: {text}") for n, text in enumerate(texts) if text is not None]
    return flags


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
