"""``lineage``: whether networks share training, what lies between them, and the tree that they make.

Every pair is one unit of work: on threads of this process, or in a folder that keeps finished pairs, so that the same
call goes on after a stop. Of many networks a few blocks are sketched first, in one pass over each file; pairs whose
sketches have nothing in common are not looked at further.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from strati.comparison.compare import matched_layers, with_adapters_merged
from strati.comparison.independence import (
    Agreement,
    Sketch,
    UnitChain,
    chains,
    compare_chains,
    pooled_pvalue,
    screen,
    screening_score,
    sketch,
    spaced,
)
from strati.comparison.lineage_results import BLOCK_LEVEL, Lineage, LineageBlock, LineagePair, TreeEdge
from strati.comparison.merging import mixture
from strati.comparison.pair_update import whole
from strati.comparison.relation import LineageDirection, RelationKind, relation
from strati.comparison.update import spectral_distance
from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.results import Tick, jsonable, silent
from strati.io.adapters.merge import is_adapter
from strati.io.network import Network, Openable
from strati.io.network import open as open_network
from strati.jobs.engine import Load, Outcome, Unit, cores, in_threads, one_thread
from strati.jobs.progress import as_ticker
from strati.jobs.store import Finished, Run, run_cached, unit_key

if TYPE_CHECKING:
    from strati.core.option_types import LineageOptions
    from strati.core.results import FloatArray

STORE = "lineage.sqlite"
"""The store's file in the folder of a resumable lineage."""
LAYOUT = 1
"""Changes whenever what is kept of a pair, or how it is computed, does."""

_UNDECIDED = 0.05  # p-values between the level and this are no ground for either answer
_SET_APART = 0.2  # p-values of sketches above it end the comparison: error rates up to this level stay valid
_SCREENED_FROM = 8  # networks
_ENOUGH_UNITS = 8
_SAME_SPECTRA = 0.02  # distance of log-eigenvalues below which weights may be the other's in another basis
_IN_ORDER = 0.5  # share of units in place above which B's numbering is A's
_MIXED = 0.1  # residual of a merge, relative to the distance of its parents
_NO_PARENT = 0.02  # weight below which a network is no parent of a merge
_CLOSER = 0.5
_COPIES = frozenset({RelationKind.CONVERTED, RelationKind.QUANTISED, RelationKind.PRUNED})
_DIRECT = _COPIES | {RelationKind.IDENTICAL, RelationKind.LORA}
_INDIRECT, _OF_COPY = 1.1, 1.02  # factors of a distance
_FILES = (
    *(".safetensors", ".pt", ".pth", ".bin", ".npz", ".onnx", ".gguf", ".h5", ".keras", ".msgpack"),
    *(".ckpt", ".th"),
)


@dataclass(frozen=True)
class LineageConfig:
    """Options of a lineage.

    Attributes:
        level: P-value of "trained independently" at or below which two networks count as related.
        seed: Seed of the simulated rounding noise.
        workers: Pairs worked on at once; 0 or ``None`` for one per processor.
    """

    level: float = 1e-3
    seed: int = 0
    workers: int | None = None

    def __post_init__(self) -> None:
        """Refuse levels that are no probability."""
        if not 0 < self.level <= _UNDECIDED:
            raise BadInputError("level", f"must be above 0 and at most {_UNDECIDED}")
        if self.workers is not None and self.workers < 0:
            raise BadInputError("workers", "must be 0 (one per processor) or more")


def lineage(
    *models: Openable,
    config: LineageConfig | None = None,
    out: str | Path | None = None,
    engine: str = "local",
    address: str | None = None,
    tick: Tick = silent,
    **options: Unpack[LineageOptions],
) -> Lineage:
    r"""Test whether networks share training, name what lies between them, and join them to a tree.

    Units of two networks are matched once by incoming and once by outgoing weights. If the networks were trained
    independently, the two matchings agree only by chance, as a random permutation has fixed points:
    :math:`P(K \ge k) \approx 1/(e\,k!)` (Zhu, Ahmed, Kuditipudi and Liang 2025, 2502.12292). Networks trained on one
    task hold similar units; so the agreements are also compared with those inside each network.

    Args:
        models: Two networks or more, whatever names them; or a folder of checkpoints.
        config: Options; or give them by name.
        out: A folder that keeps every pair as it is finished. Interrupted? The same call resumes.
        engine: With ``out``, where the work is done: ``local`` (processes) or ``ray``.
        address: With ``engine="ray"``, an existing cluster.
        tick: Called after each pair.
        **options: Fields of :class:`LineageConfig`; ``jobs`` is an alias of ``workers``.

    Raises:
        BadInputError: Fewer than two networks, or two without units in common.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> a = {"0.weight": rng.normal(size=(64, 20)), "2.weight": rng.normal(size=(20, 64))}
        >>> order = rng.permutation(64)
        >>> b = {"0.weight": a["0.weight"][order], "2.weight": a["2.weight"][:, order]}
        >>> pair = lineage(a, b).pairs[0]
        >>> pair.related, str(pair.kind), pair.renumbered, pair.pvalue < 1e-9
        (True, 'identical', True, True)
    """
    settings = resolve(LineageConfig, config, options, of=lineage)
    if out is None and (engine != "local" or address is not None):
        raise BadInputError("engine", "other machines need a folder to keep results in; give out=")
    opened = [open_network(model) for model in expanded(models)]
    networks = with_adapters_merged(opened)
    if networks and all(is_adapter(network) for network in networks):
        raise BadInputError("lineage", "holds adapters only; give their base as well")
    if len(networks) < 2:
        what = str(networks[0].path) if networks else "lineage"
        raise BadInputError(what, "is one network; give two or more, or a folder of checkpoints")
    if len(networks) == 2:
        _refuse_nothing_in_common(*networks)
    names = _unique([str(network.path) for network in opened])
    run = Run(engine, settings.workers or cores(), address, tick=tick)
    pairs = _pairs(dict(zip(names, networks, strict=True)), settings, out, run)
    base = next((name for name, network in zip(names, opened, strict=True) if not is_adapter(network)), None)
    adapters = {name for name, network in zip(names, opened, strict=True) if is_adapter(network)}
    pairs = [_with_adapter_direction(pair, base, adapters) for pair in pairs]
    by_name = dict(zip(names, networks, strict=True))
    pairs = [_with_evidence(pair, by_name) for pair in _with_merges(pairs, by_name)]
    return Lineage(tuple(names), tuple(pairs), tuple(_tree(names, pairs)))


def expanded(models: Iterable[Openable]) -> list[Openable]:
    """The networks named, a folder of checkpoints replaced by what it holds."""
    listed: list[Openable] = []
    for model in models:
        inside = _checkpoints(Path(model)) if isinstance(model, str | Path) and str(model) else []
        listed += inside if len(inside) > 1 else [model]
    return listed


def _checkpoints(folder: Path) -> list[Path]:
    """Networks in a folder that is not itself one."""
    try:
        if not folder.is_dir() or any(folder.glob("*config.json")) or any(folder.glob("*index.json")):
            return []
        entries = sorted(folder.iterdir())
    except (OSError, ValueError):
        return []  # opening it says what is wrong
    return [
        entry
        for entry in entries
        if (entry.is_file() and entry.suffix.lower() in _FILES)
        or (entry.is_dir() and (any(entry.glob("*config.json")) or any(entry.glob("*.safetensors"))))
    ]


def _unique(paths: Sequence[str]) -> list[str]:
    return [path if paths.count(path) == 1 else f"{path} [{n + 1}]" for n, path in enumerate(paths)]


def _refuse_nothing_in_common(first: Network, second: Network) -> None:
    units = chains(first), chains(second)
    for network, network_chains in zip((first, second), units, strict=True):
        if not network_chains:
            raise BadInputError(network.path, "has no hidden units that strati knows; see: strati inspect")
    if not {chain.signature for chain in units[0]} & {chain.signature for chain in units[1]}:
        why = f"has no units in common with {first.path}: another architecture or another width"
        raise BadInputError(second.path, why)


def _pairs(
    networks: Mapping[str, Network], config: LineageConfig, out: str | Path | None, run: Run
) -> list[LineagePair]:
    """Every two networks, those that sketches set apart without further work."""
    every = list(combinations(networks, 2))
    by_sketch: dict[tuple[str, str], LineagePair] = {}
    if len(networks) >= _SCREENED_FROM:
        with one_thread():
            sketches = dict(
                zip(networks, in_threads(sketch, list(networks.values()), run.workers), strict=True)
            )
        for a, b in every:
            pair = _set_apart(sketches[a], sketches[b])
            if pair is not None:
                by_sketch[a, b] = replace(pair, a=a, b=b)
    left = [names for names in every if names not in by_sketch]
    if out is None:
        as_ticker(run.tick).expect(len(left))

        def work(names: tuple[str, str]) -> LineagePair:
            pair = _pair(networks[names[0]], networks[names[1]], config)
            run.tick(", ".join(names))
            return pair

        with one_thread():
            values = in_threads(work, left, min(run.workers, len(left) or 1))
    else:
        stamps = {name: _stamp(network) for name, network in networks.items()}
        facts = {"level": config.level, "seed": config.seed, "layout": LAYOUT}
        units = [
            Unit(
                unit_key(facts | {"a": stamps[a], "b": stamps[b]}),
                f"{a}, {b}",
                a,
                facts,
                {"a": partial(_itself, networks[a]), "b": partial(_itself, networks[b])},
            )
            for a, b in left
        ]
        records = run_cached(Path(out) / STORE, units, _work, _keep, run, holds="lineage", layout=LAYOUT)
        values = [_from_record(record) for record in records]
    measured = {names: replace(p, a=names[0], b=names[1]) for names, p in zip(left, values, strict=True)}
    return [(by_sketch | measured)[names] for names in every]


def _itself(network: Network) -> Network:
    return network


def _stamp(network: Network) -> Any:
    """What identifies a network's weights: its files, or the hash of what is in memory."""
    if not network.in_memory:
        return [part.contents.stamp() for part in network.parts or (network,)]
    digest = hashlib.sha256()
    for tensor in network.tensors:
        digest.update(tensor.name.encode())
        digest.update(np.ascontiguousarray(network.read(tensor.name)).tobytes())
    return digest.hexdigest()


def _work(unit: Unit, load: Load) -> dict[str, Any]:
    config = LineageConfig(unit.config["level"], unit.config["seed"])
    record: dict[str, Any] = jsonable(_pair(load("a"), load("b"), config))
    return record


def _keep(outcome: Outcome) -> Finished:
    return Finished(outcome.unit.key, outcome.unit.name, outcome.value, outcome.reason)


def _from_record(record: dict[str, Any]) -> LineagePair:
    fields: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in record.items()}
    fields["kind"] = RelationKind(fields["kind"])
    fields["direction"] = None if fields["direction"] is None else LineageDirection(fields["direction"])
    fields["blocks"] = tuple(LineageBlock(**block) for block in fields["blocks"])
    return LineagePair(**fields)


def _with_adapter_direction(pair: LineagePair, base: str | None, adapters: set[str]) -> LineagePair:
    """An adapter comes after the base that it was merged into."""
    if base not in (pair.a, pair.b) or not {pair.a, pair.b} & adapters:
        return pair
    direction = LineageDirection.A_TO_B if base == pair.a else LineageDirection.B_TO_A
    return replace(pair, direction=direction, direction_by="adapter-file")


def _set_apart(first: Sketch | None, second: Sketch | None) -> LineagePair | None:
    """A pair whose sketches have nothing in common; ``None`` where more must be looked at."""
    blocks = screen(first, second) if first is not None and second is not None else None
    if blocks is None or first is None or second is None:
        return None
    pvalue = pooled_pvalue(blocks)
    if pvalue <= _SET_APART or sum(block.units for block in blocks) < _ENOUGH_UNITS:
        return None
    if _perhaps_rotated(first.spectra, second.spectra, first.unit_norms, second.unit_norms):
        return None
    return LineagePair("", "", pvalue, False, RelationKind.UNRELATED, None, _evidence(blocks))


def _evidence(blocks: Sequence[Agreement]) -> tuple[LineageBlock, ...]:
    return tuple(LineageBlock(x.a, x.b, x.share, x.pvalue, x.units) for x in blocks)


def _agreements(
    first: Sequence[UnitChain], second: Sequence[UnitChain]
) -> tuple[list[Agreement], float | None]:
    """Blocks side by side with their evidence, and the p-value of all of them."""
    if [chain.signature for chain in first] == [chain.signature for chain in second]:
        blocks = [block for a, b in zip(first, second, strict=True) for block in compare_chains(a, b)]
        return blocks, pooled_pvalue(blocks)
    blocks, smallest, tests = [], 1.0, 0
    for b in second:
        candidates = [a for a in first if a.signature == b.signature]
        if not candidates:
            continue
        tests += len(candidates)
        best = max(candidates, key=lambda a: screening_score(a, b))
        best_blocks = compare_chains(best, b)
        blocks += best_blocks
        smallest = min(smallest, pooled_pvalue(best_blocks))
    return blocks, min(1.0, smallest * tests) if tests else None


def _pair(first: Network, second: Network, config: LineageConfig) -> LineagePair:
    """What two networks say."""
    ours, theirs = chains(first), chains(second)
    blocks, pvalue = _agreements(ours, theirs)
    pair = LineagePair("", "", pvalue, None, RelationKind.UNDECIDED, None, _evidence(blocks))
    if pvalue is None:
        return pair
    units = sum(block.units for block in blocks)
    if pvalue <= config.level:
        in_order = sum(block.in_place for block in blocks) > _IN_ORDER * units
        deeper = len(ours) != len(theirs) and all(chain.kind != "chain" for chain in (*ours, *theirs))
        which = {x.b: x.a for x in blocks if x.pvalue <= BLOCK_LEVEL} if deeper else None
        related = relation(first, second, in_order=in_order, blocks=which, seed=config.seed)
        return replace(pair, related=True, **vars(related))
    if pvalue < _UNDECIDED or units < _ENOUGH_UNITS:
        return pair
    places = spaced(min(len(ours), len(theirs)))
    spectra = ([chain_list[n].spectra() for n in places] for chain_list in (ours, theirs))
    norms = ([chain_list[n].unit_norms() for n in places] for chain_list in (ours, theirs))
    if _perhaps_rotated(*spectra, *norms):
        return pair
    return replace(pair, related=False, kind=RelationKind.UNRELATED)


def _perhaps_rotated(
    spectra: Sequence[Sequence[FloatArray]],
    other_spectra: Sequence[Sequence[FloatArray]],
    norms: Sequence[Sequence[FloatArray]],
    other_norms: Sequence[Sequence[FloatArray]],
) -> bool:
    """Whether the weights may be each other's in another basis, which leaves spectra and norms of units as they are.

    Units of B must be long where those of A are more clearly than chance allows in one of a thousand comparisons.
    """
    from scipy.stats import spearmanr

    distances = [
        spectral_distance(x, y)
        for ours, theirs in zip(spectra, other_spectra, strict=True)
        for x, y in zip(ours, theirs, strict=False)
        if x.shape == y.shape
    ]
    defined = [distance for distance in distances if distance is not None]
    if not defined or float(np.median(defined)) < _SAME_SPECTRA:
        return True
    for ours, theirs in zip(norms, other_norms, strict=True):
        for x, y in zip(ours, theirs, strict=False):
            if x.shape == y.shape and x.size >= _ENOUGH_UNITS and np.ptp(x) > 0 and np.ptp(y) > 0:
                correlated = spearmanr(x, y, alternative="greater")
                if float(correlated.pvalue) < 1e-3 / max(len(norms), 1):
                    return True
    return False


def _with_merges(pairs: Sequence[LineagePair], networks: dict[str, Network]) -> list[LineagePair]:
    """Pairs whose one network is a mixture of the other and a third are merges."""
    related: dict[str, dict[str, LineagePair]] = {name: {} for name in networks}
    for pair in pairs:
        if (
            pair.related
            and pair.kind in (RelationKind.FINE_TUNED, RelationKind.LORA, RelationKind.CONVERTED)
            and not pair.renumbered
        ):
            related[pair.a][pair.b] = pair
            related[pair.b][pair.a] = pair
    merges: dict[str, tuple[tuple[str, str], tuple[float, ...], tuple[float | None, ...]]] = {}
    for child, relatives in related.items():
        for parents in combinations(relatives, 2):
            between = related[parents[0]].get(parents[1])
            if between is None or between.distance is None:
                continue
            if any((relatives[parent].distance or 0.0) >= between.distance for parent in parents):
                continue  # what lies between two networks is closer to both than they are to each other
            fit = _mixture_of(networks[child], [networks[parent] for parent in parents])
            if fit is not None and child not in merges:
                merges[child] = parents, *fit
    changed = []
    for pair in pairs:
        for child, parent, direction in (
            (pair.b, pair.a, LineageDirection.A_TO_B),
            (pair.a, pair.b, LineageDirection.B_TO_A),
        ):
            if child in merges and parent in merges[child][0]:
                parents, weights, errors = merges[child]
                pair = replace(
                    pair,
                    kind=RelationKind.MERGED,
                    direction=direction,
                    parents=parents,
                    weights=weights,
                    weights_stderr=errors,
                )
        changed.append(pair)
    return changed


_DIRECTION_BY = {
    RelationKind.CONVERTED: "finer-dtype",
    RelationKind.QUANTISED: "grid",
    RelationKind.PRUNED: "zeros-or-units",
    RelationKind.LORA: "absent-update",
    RelationKind.MERGED: "mixture",
}


def _with_evidence(pair: LineagePair, networks: Mapping[str, Network]) -> LineagePair:
    """What shows the direction, and the scheme of a quantisation."""
    scheme = None
    if pair.kind is RelationKind.QUANTISED:
        child = networks[pair.a if pair.direction is LineageDirection.B_TO_A else pair.b]
        schemes = Counter(
            layer.quantisation.scheme for layer in child.layers() if layer.quantisation is not None
        )
        scheme = schemes.most_common(1)[0][0] if schemes else "grid"
    shown_by = None if pair.direction is None else pair.direction_by or _DIRECTION_BY.get(pair.kind)
    return replace(pair, direction_by=shown_by, scheme=scheme)


def _mixture_of(
    child: Network, parents: Sequence[Network]
) -> tuple[tuple[float, ...], tuple[float | None, ...]] | None:
    """Weights of two parents, averaged over layers, where these explain every layer that the parents differ in."""
    ours, theirs = (matched_layers(child, parent) for parent in parents)
    second = {layer.name: other for layer, other in theirs}
    weights, errors = [], []
    for layer, other in ours:
        third = second.get(layer.name)
        if third is None or not layer.shape == other.shape == third.shape:
            continue
        merged_matrix, first_matrix, second_matrix = (
            whole(list(x.matrices())) for x in (layer, other, third)
        )
        if np.array_equal(first_matrix, second_matrix):
            continue
        fit = mixture([first_matrix, second_matrix], merged_matrix)
        if fit.residual is None or fit.residual > _MIXED or None in fit.weights:
            return None
        weights.append([float(w or 0.0) for w in fit.weights])
        errors.append([float(e or 0.0) for e in fit.stderr])
    if not weights:
        return None
    means = np.mean(weights, axis=0)
    if means.min() < _NO_PARENT or abs(means.sum() - 1) > _NO_PARENT:
        return None
    spread = np.std(weights, axis=0) / np.sqrt(len(weights))
    stderr = np.maximum(spread, np.sqrt(np.mean(np.square(errors), axis=0) / len(errors)))
    return tuple(means.tolist()), tuple(stderr.tolist())


def _tree(names: Sequence[str], pairs: Sequence[LineagePair]) -> list[TreeEdge]:
    """The tree of least total distance over every family (Kruskal), with both parents of every merge."""
    by_names = {frozenset((pair.a, pair.b)): pair for pair in pairs}
    merges = {_ends(pair)[1]: pair.parents for pair in pairs if pair.parents}
    copies = {_ends(pair)[1] for pair in pairs if pair.kind in _COPIES and pair.direction is not None}
    root = {name: name for name in names}

    def find(name: str) -> str:
        while root[name] != name:
            name = root[name]
        return name

    def length(pair: LineagePair) -> float:
        """A kind that accounts for every weight is evidence of a direct step; copies seldom have children."""
        separation = (pair.separation or 0.0) * (1.0 if pair.kind in _DIRECT else _INDIRECT)
        return separation * _OF_COPY ** len(copies & {pair.a, pair.b})

    related = [pair for pair in pairs if pair.related]
    nearest: dict[str, float] = {}
    for pair in related:
        for name, other in ((pair.a, pair.b), (pair.b, pair.a)):
            if other not in merges:
                nearest[name] = min(nearest.get(name, np.inf), length(pair))

    def possible(pair: LineagePair) -> bool:
        """A merge's further edges lead to its own children, which are closer to it than to anything else."""
        for name, other in ((pair.a, pair.b), (pair.b, pair.a)):
            if name in merges and length(pair) > _CLOSER * nearest.get(other, np.inf):
                return False
        return not pair.parents

    joined_pairs: list[LineagePair] = []
    for child, parents in merges.items():
        joined_pairs += [by_names[frozenset((child, parent))] for parent in parents]
        root[find(child)] = find(parents[0])
    for pair in sorted(filter(possible, related), key=length):
        ends = find(pair.a), find(pair.b)
        if ends[0] != ends[1]:
            root[ends[0]] = ends[1]
            joined_pairs.append(pair)
    return [TreeEdge(*_ends(pair), pair.kind, pair.direction is not None) for pair in joined_pairs]


def _ends(pair: LineagePair) -> tuple[str, str]:
    """The parent and the child, in the order given where there is no direction."""
    return (pair.b, pair.a) if pair.direction is LineageDirection.B_TO_A else (pair.a, pair.b)
