"""The same layers of two or more networks side by side: what changed, where, and into what.

``compare(base, tuned)`` answers what fine-tuning did; ``compare(small, large)`` lays networks of different depth
beside each other; ``compare(*checkpoints, series=True)`` follows a training run; ``compare(a, b, merged,
merge=True)`` takes a merge apart. Networks are read layer by layer: never are two of them in memory at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from strati.comparison.matching import Unmatched, match
from strati.comparison.movement import movement
from strati.comparison.outliers import stand_out
from strati.comparison.pairs import PairedRow, PairUpdate, changes_from_first, updates
from strati.comparison.results import ComparedLayer, ComparedNetwork, Comparison
from strati.comparison.role_differences import differences, distributions
from strati.comparison.series import CheckpointSeries, out_of_order, series_of
from strati.comparison.sides import Side, head_widths, sides_of, tied_heads, with_spectra
from strati.comparison.unit_alignment import UnitOrder, unit_order
from strati.comparison.update import spectral_distance
from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.results import Flag, Tick, silent
from strati.io.adapters.merge import carries_adapter, is_adapter, merged, unwrapped
from strati.io.layers import as_patterns, select
from strati.io.network import Network, Openable
from strati.io.network import open as open_network
from strati.jobs.driver import Run
from strati.jobs.progress import Ticker, as_ticker
from strati.spectra.layerwise import default_workers
from strati.spectra.scan import Scanned

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.layers import Layer

    Matrix = NDArray[Any]
    Version = tuple[Side, Layer]
    from strati.core.option_types import CompareOptions


_NOT_BY_CHANCE = 5.0  # standard deviations; chance exceeds it once in three million layers
_SAME_SPECTRA = 0.02  # distance of log-eigenvalues
_ENOUGH_ENTRIES = 2500  # a cosine of 0.2, less than training leaves, is then ten standard deviations


@dataclass(frozen=True)
class CompareConfig:
    """Options of a comparison.

    Attributes:
        series: The networks are checkpoints of one training run, in order.
        merge: The last network is a merge of the others: estimate the mixture.
        layers: Patterns over the first network's names, roles and blocks; empty for all layers.
        eigenvalues: Put the eigenvalues into the JSON form.
        activation: Between plain linear layers, where the network's settings do not say: decides whether units may
            differ in scale (``relu``, the default) or sign (``tanh``).
        seed: Seed of the simulated rounding noise; every layer has a stream of its own.
        workers: Layers analysed at once; 0 or ``None`` for one per processor.
    """

    series: bool = False
    merge: bool = False
    layers: str | Sequence[str] | None = None
    eigenvalues: bool = False
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
    chosen = resolve(CompareConfig, config, options, of=compare)
    fewest = 3 if chosen.merge else 2
    if len(models) < fewest:
        what = "needs the parents, then the merged network" if chosen.merge else "needs two networks or more"
        raise BadInputError("compare", what)
    if out is None and (engine != "local" or address is not None):
        raise BadInputError("engine", "other machines need a folder to keep results in; give out=")
    opened = _with_adapters([open_network(n) for n in models])
    plain = sides_of(opened)
    matching = match([side.layers for side in plain], [side.labels for side in plain])
    if not matching.rows:
        raise BadInputError(opened[-1].path, f"none of its layers corresponds to one of {opened[0].path}")
    places = list(matching.rows)
    heads: list[list[Layer]] = []
    only: list[frozenset[str]] | None = None
    unmatched = matching.unmatched
    if as_patterns(chosen.layers):
        wanted = {layer.name for layer in select([plain[0].layers[row[0]] for row in places], chosen.layers)}
        places = [row for row in places if plain[0].layers[row[0]].name in wanted]
        only = [frozenset(side.layers[row[n]].name for row in places) for n, side in enumerate(plain)]
    else:
        heads, unmatched = tied_heads(plain, matching.unmatched)
    run = _run(engine, address, chosen.workers, [x for side in plain for x in side.layers], tick, out)
    if out is None:
        units = sum(len(side.layers) for side in plain) if only is None else sum(map(len, only))
        as_ticker(tick).expect(units)
    sides = with_spectra(plain, only, workers=chosen.workers, tick=tick, out=out, run=run)
    rows = [[(side, side.layers[i]) for side, i in zip(sides, row, strict=True)] for row in places]
    tied = [[(side, layer) for side, layer in zip(sides, row, strict=True)] for row in heads]
    quiet = replace(run, tick=Ticker(resume=as_ticker(tick).resume))
    order = UnitOrder()
    if not chosen.series and not chosen.merge:
        matched = [(plain[0].layers[row[0]], plain[-1].layers[row[-1]]) for row in matching.rows]
        order = unit_order(opened[0], opened[-1], matched, chosen.activation)
    steps = updates(
        [
            PairedRow(tuple(x for _, x in row), tuple(_widths(row)), order.layers.get(row[-1][1].name))
            for row in [*rows, *tied]
        ],
        seed=chosen.seed,
        merge=chosen.merge,
        workers=chosen.workers,
        out=out,
        run=quiet,
    )
    layers = [
        _compare_layer(row, step, tied=n >= len(rows))
        for n, (row, step) in enumerate(zip([*rows, *tied], steps, strict=True))
    ]
    series = _series(opened, rows, layers) if chosen.series else None
    measured = [(row[0][1], row[-1][1], layer) for row, layer in zip(rows, layers, strict=False)]
    tables = [side.table() for side in sides]
    return Comparison(
        networks=tuple(
            ComparedNetwork(str(n.path), str(n.format), n.parameters, len(n.tensors)) for n in opened
        ),
        matched_by=matching.by,
        layers=tuple(layers),
        roles=tuple(distributions(t) for t in tables),
        role_differences=tuple(differences(t) for t in tables),
        movement=movement(opened[0], opened[-1], measured, order.vectors),
        series=series,
        unmatched=unmatched,
        warnings=_flags(opened, unmatched, layers, chosen),
        stand_out=stand_out(layers),
        related=_related(layers),
        unit_order=order,
        keep_eigenvalues=chosen.eigenvalues,
    )


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


def _with_adapters(networks: list[Network]) -> list[Network]:
    """An adapter beside its base stands for the base with the adapter merged; adapters alone stay as they are.

    A PEFT model in memory, which has both, is the network that it computes.
    """
    networks = [unwrapped(n) if carries_adapter(n) else n for n in networks]
    base = next((n for n in networks if not is_adapter(n)), None)
    if base is None:
        return networks
    return [merged(base, n) if is_adapter(n) else n for n in networks]


def _run(
    engine: str,
    address: str | None,
    workers: int | None,
    layers: Sequence[Layer],
    tick: Tick,
    out: str | Path | None,
) -> Run:
    if out is None:
        return Run()
    return Run(engine, default_workers(layers, workers), address, tick=tick)


def _widths(row: Sequence[Version]) -> list[int]:
    (first_side, first), (last_side, last) = row[0], row[-1]
    return head_widths(first_side.network, first) or head_widths(last_side.network, last)


def _compare_layer(row: Sequence[Version], step: PairUpdate, *, tied: bool) -> ComparedLayer:
    spectra = [side.spectra[layer.name] for side, layer in row]
    metrics = [spectrum.metrics() for spectrum in spectra]
    shared = [k for k in metrics[0] if all(k in m for m in metrics) and _is_scalar(metrics[0][k])]
    for values, (side, layer) in zip(metrics, row, strict=True):
        values["state"] = str(Scanned(layer, side.spectra[layer.name]).state)
    own = {flag.code for flag in step.warnings}
    flags = [flag for flag in _spectrum_flags(row) if flag.code not in own]
    codes = [{flag.code for flag in side.warnings(layer)} for side, layer in (row[0], row[-1])]
    new = [flag.code for flag in row[-1][0].warnings(row[-1][1]) if flag.code not in codes[0]]
    how = [word for word in (step.aligned, "tied-head" if tied else None) if word is not None]
    first = row[0][1]
    return ComparedLayer(
        name=first.name,
        partner=tuple(layer.name for _, layer in row[1:]),
        role=str(first.role),
        block=first.block,
        metrics={k: tuple(m[k] for m in metrics) for k in shared},
        spectral_distance=spectral_distance(spectra[0].eigenvalues, spectra[-1].eigenvalues),
        relative_change=step.relative_change,
        update_stable_rank=step.stable_rank,
        update_rank=step.rank,
        update_rank_pvalue=step.pvalue,
        update_kind=step.kind,
        subspace_overlap=step.overlap,
        overlap_by_chance=step.chance,
        subspace_directions=step.directions,
        aligned=", ".join(how) or None,
        rounding=step.rounding,
        interference=step.interference,
        mixture=step.mixture,
        agreement=step.agreement,
        warnings=(*flags, *step.warnings),
        new_warnings=tuple(dict.fromkeys([*new, *(flag.code for flag in step.warnings)])),
        update_eigenvalues=np.array(step.eigenvalues) if step.eigenvalues is not None else None,
        eigenvalues=tuple(spectrum.eigenvalues for spectrum in spectra),
    )


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, int | float | str)


def _spectrum_flags(row: Sequence[Version]) -> list[Flag]:
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


def _series(
    networks: Sequence[Network],
    rows: Sequence[Sequence[Version]],
    layers: Sequence[ComparedLayer],
) -> CheckpointSeries:
    changes = [changes_from_first([layer for _, layer in row]) for row in rows]
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
