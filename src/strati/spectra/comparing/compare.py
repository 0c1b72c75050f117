"""The same layers of two or more networks side by side: what changed, where, and into what.

``compare(base, tuned)`` answers what fine-tuning did; ``compare(small, large)`` lays networks of different depth
beside each other; ``compare(*checkpoints, series=True)`` follows a training run; ``compare(a, b, merged,
merge=True)`` takes a merge apart. Networks are read layer by layer: never are two of them in memory at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.errors import BadInputError
from strati.network.adapters.merge import carries_adapter, is_adapter, merged, unwrapped
from strati.network.open import Network, Openable
from strati.network.open import open as open_network
from strati.network.select import as_patterns, select
from strati.options import resolve
from strati.run.driver import Run
from strati.spectra.comparing.matching import Unmatched, match
from strati.spectra.comparing.movement import movement
from strati.spectra.comparing.outliers import stand_out
from strati.spectra.comparing.pairs import PairedRow, PairUpdate, changes_from_first, updates
from strati.spectra.comparing.results import ComparedLayer, ComparedNetwork, Comparison
from strati.spectra.comparing.role_differences import differences, distributions
from strati.spectra.comparing.series import CheckpointSeries, out_of_order, series_of
from strati.spectra.comparing.sides import Side, head_widths, sides_of, tied_heads, with_spectra
from strati.spectra.comparing.update import spectral_distance
from strati.spectra.layerwise import at_once
from strati.types import Flag, Tick, silent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.network.layers import Layer

    Matrix = NDArray[Any]
    Version = tuple[Side, Layer]


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
    *networks: Openable,
    config: CompareConfig | None = None,
    out: str | Path | None = None,
    engine: str = "local",
    address: str | None = None,
    tick: Tick = silent,
    **options: Any,
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
    if len(networks) < fewest:
        what = "needs the parents, then the merged network" if chosen.merge else "needs two networks or more"
        raise BadInputError("compare", what)
    if out is None and (engine != "local" or address is not None):
        raise BadInputError("engine", "other machines need a folder to keep results in; give out=")
    opened = _with_adapters([open_network(n) for n in networks])
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
    sides = with_spectra(plain, only, workers=chosen.workers, tick=tick, out=out, run=run)
    rows = [[(side, side.layers[i]) for side, i in zip(sides, row, strict=True)] for row in places]
    tied = [[(side, layer) for side, layer in zip(sides, row, strict=True)] for row in heads]
    quiet = replace(run, tick=silent)
    steps = updates(
        [PairedRow(tuple(x for _, x in row), tuple(_widths(row))) for row in [*rows, *tied]],
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
        movement=movement(opened[0], opened[-1], measured),
        series=series,
        unmatched=unmatched,
        warnings=_flags(opened, unmatched, layers, chosen),
        stand_out=stand_out(layers),
        keep_eigenvalues=chosen.eigenvalues,
    )


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
    workers: int,
    layers: Sequence[Layer],
    tick: Tick,
    out: str | Path | None,
) -> Run:
    if out is None:
        return Run()
    run = Run(engine, at_once(layers, workers), address, tick=tick)
    expect = getattr(tick, "expect", None)
    return run if expect is None else replace(run, expect=expect, resume=getattr(tick, "resume", run.resume))


def _widths(row: Sequence[Version]) -> list[int]:
    (first_side, first), (last_side, last) = row[0], row[-1]
    return head_widths(first_side.network, first) or head_widths(last_side.network, last)


def _compare_layer(row: Sequence[Version], step: PairUpdate, *, tied: bool) -> ComparedLayer:
    spectra = [side.spectra[layer.name] for side, layer in row]
    metrics = [spectrum.metrics() for spectrum in spectra]
    shared = [k for k in metrics[0] if all(k in m for m in metrics) and _is_scalar(metrics[0][k])]
    own = {flag.code for flag in step.warnings}
    flags = [flag for flag in _spectrum_flags(row) if flag.code not in own]
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
        warnings=(*flags, *step.warnings),
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
