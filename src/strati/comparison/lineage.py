"""``lineage``: whether networks share training, what lies between them, and the tree that they make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np

from strati.comparison.compare import matched_layers, with_adapters_merged
from strati.comparison.independence import (
    Agreement,
    UnitChain,
    chains,
    compare_chains,
    pooled_pvalue,
    screening_score,
)
from strati.comparison.lineage_results import BLOCK_LEVEL, Lineage, LineageBlock, LineagePair, TreeEdge
from strati.comparison.merging import mixture
from strati.comparison.pair_update import whole
from strati.comparison.relation import LineageDirection, RelationKind, relation
from strati.comparison.update import spectral_distance
from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.results import Tick, silent
from strati.io.adapters.merge import is_adapter
from strati.io.network import Network, Openable
from strati.io.network import open as open_network

if TYPE_CHECKING:
    from strati.comparison.independence import Weights
    from strati.core.option_types import LineageOptions
    from strati.core.results import FloatArray

_UNDECIDED = 0.05  # p-values between the level and this are no ground for either answer
_ENOUGH_UNITS = 8
_SAME_SPECTRA = (
    0.02  # distance of log-eigenvalues below which weights may be those of the other in another basis
)
_IN_ORDER = 0.5  # share of units in place above which B's numbering is A's
_MIXED = 0.1  # residual of a merge, relative to the distance of its parents
_NO_PARENT = 0.02  # weight below which a network is no parent of a merge
_CLOSER = 0.5
_DIRECT = frozenset(
    {
        RelationKind.IDENTICAL,
        RelationKind.CONVERTED,
        RelationKind.QUANTISED,
        RelationKind.LORA,
        RelationKind.PRUNED,
    }
)
_COPIES = frozenset({RelationKind.CONVERTED, RelationKind.QUANTISED, RelationKind.PRUNED})
_INDIRECT, _OF_COPY = 1.1, 1.02  # factors of a distance
_FILES = frozenset(
    {
        ".safetensors",
        ".pt",
        ".pth",
        ".bin",
        ".npz",
        ".onnx",
        ".gguf",
        ".h5",
        ".keras",
        ".msgpack",
        ".ckpt",
        ".th",
    }
)


@dataclass(frozen=True)
class LineageConfig:
    """Options of a lineage.

    Attributes:
        level: P-value of "trained independently" at or below which two networks count as related.
        seed: Seed of the simulated rounding noise.
    """

    level: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse levels that are no probability."""
        if not 0 < self.level <= _UNDECIDED:
            raise BadInputError("level", f"must be above 0 and at most {_UNDECIDED}")


def lineage(
    *models: Openable,
    config: LineageConfig | None = None,
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
        tick: Called after each pair.
        **options: Fields of :class:`LineageConfig`.

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
    opened = [open_network(model) for model in expanded(models)]
    networks = with_adapters_merged(opened)
    base = next((n for n, network in enumerate(opened) if not is_adapter(network)), None)
    if networks and all(is_adapter(network) for network in networks):
        raise BadInputError("lineage", "holds adapters only; give their base as well")
    if len(networks) < 2:
        what = str(networks[0].path) if networks else "lineage"
        raise BadInputError(what, "is one network; give two or more, or a folder of checkpoints")
    names = _unique([str(network.path) for network in opened])
    expect = getattr(tick, "expect", None)
    if expect is not None:
        expect(len(networks) * (len(networks) - 1) // 2)
    units = [chains(network) for network in networks]
    pairs: list[LineagePair] = []
    separations: dict[frozenset[str], float] = {}
    for i, j in combinations(range(len(networks)), 2):
        if len(networks) == 2:
            _refuse_nothing_in_common(networks, units)
        pair, separation = _pair(networks[i], networks[j], units[i], units[j], settings)
        if separation is not None:
            separations[frozenset((names[i], names[j]))] = separation
        if base in (i, j) and is_adapter(opened[i + j - base]):
            direction = LineageDirection.A_TO_B if base == i else LineageDirection.B_TO_A
            pair = replace(pair, direction=direction, direction_by="adapter-file")
        pairs.append(replace(pair, a=names[i], b=names[j]))
        tick(f"{names[i]}, {names[j]}")
    by_name = dict(zip(names, networks, strict=True))
    pairs = [_with_evidence(pair, by_name) for pair in _with_merges(pairs, by_name)]
    return Lineage(tuple(names), tuple(pairs), tuple(_tree(names, pairs, separations)))


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


def _refuse_nothing_in_common(networks: Sequence[Network], units: Sequence[Sequence[UnitChain]]) -> None:
    for network, network_chains in zip(networks, units, strict=True):
        if not network_chains:
            raise BadInputError(network.path, "has no hidden units that strati knows; see: strati inspect")
    if not _comparable(units[0], units[1]):
        raise BadInputError(
            networks[1].path,
            f"has no units in common with {networks[0].path}: another architecture or another width",
        )


def _comparable(first: Sequence[UnitChain], second: Sequence[UnitChain]) -> bool:
    return any(_fit(a, b) for a in first for b in second)


def _fit(a: UnitChain, b: UnitChain) -> bool:
    if a.kind != b.kind or len(a.names) != len(b.names):
        return False
    ours, theirs = a.weights, b.weights
    # Kernels and gates must be alike as well; hidden widths may differ.
    return a.ends == b.ends and all(
        len(x) == len(y) and all(p.shape[0] == q.shape[0] for p, q in zip(x, y, strict=True))
        for x, y in zip(ours, theirs, strict=True)
    )


def _agreements(
    first: Sequence[UnitChain], second: Sequence[UnitChain]
) -> tuple[list[Agreement], float | None]:
    """Blocks side by side with their evidence, and the p-value of all of them."""
    if len(first) == len(second) and all(_fit(a, b) for a, b in zip(first, second, strict=True)):
        blocks = [block for a, b in zip(first, second, strict=True) for block in compare_chains(a, b)]
        return blocks, pooled_pvalue(blocks)
    blocks, smallest, tests = [], 1.0, 0
    for b in second:
        candidates = [a for a in first if _fit(a, b)]
        if not candidates:
            continue
        tests += len(candidates)
        best = max(candidates, key=lambda a: screening_score(a, b))
        own_blocks = compare_chains(best, b)
        blocks += own_blocks
        smallest = min(smallest, pooled_pvalue(own_blocks))
    return blocks, min(1.0, smallest * tests) if tests else None


def _pair(
    first: Network,
    second: Network,
    ours: Sequence[UnitChain],
    theirs: Sequence[UnitChain],
    config: LineageConfig,
) -> tuple[LineagePair, float | None]:
    """What two networks say, and how far apart related ones are."""
    blocks, pvalue = _agreements(ours, theirs)
    evidence = tuple(LineageBlock(x.a, x.b, x.share, x.pvalue, x.units) for x in blocks)
    pair = LineagePair("", "", pvalue, None, RelationKind.UNDECIDED, None, evidence)
    if pvalue is None:
        return pair, None
    if pvalue <= config.level:
        units = sum(block.units for block in blocks)
        in_order = sum(block.in_place for block in blocks) > _IN_ORDER * units
        deeper = len(ours) != len(theirs) and all(chain.kind != "chain" for chain in (*ours, *theirs))
        which = {x.b: x.a for x in blocks if x.pvalue <= BLOCK_LEVEL} if deeper else None
        related = relation(first, second, in_order=in_order, blocks=which, seed=config.seed)
        described = replace(
            pair,
            related=True,
            kind=related.kind,
            direction=related.direction,
            distance=related.distance,
            new_layers=related.new_layers,
            rank=related.rank,
            renumbered=related.renumbered,
        )
        return described, related.separation
    if pvalue < _UNDECIDED or sum(block.units for block in blocks) < _ENOUGH_UNITS:
        return pair, None
    if _perhaps_rotated(ours, theirs):
        return pair, None
    return replace(pair, related=False, kind=RelationKind.UNRELATED), None


def _perhaps_rotated(first: Sequence[UnitChain], second: Sequence[UnitChain]) -> bool:
    """Whether the weights may be each other's in another basis, which leaves spectra and norms of units as they are."""
    distances: list[float] = []
    for a, b in zip(first, second, strict=False):
        for ours, theirs in zip(a.weights, b.weights, strict=False):
            for x, y in zip(ours, theirs, strict=False):
                if x.shape == y.shape:
                    distance = spectral_distance(_eigenvalues(x), _eigenvalues(y))
                    distances += [] if distance is None else [distance]
    if not distances or float(np.median(distances)) < _SAME_SPECTRA:
        return True
    return _norms_agree(first, second)


def _norms_agree(first: Sequence[UnitChain], second: Sequence[UnitChain]) -> bool:
    """Whether unit i of B is long where unit i of A is: by chance once in a thousand comparisons."""
    from scipy.stats import spearmanr

    for a, b in zip(first, second, strict=False):
        for ours, theirs in zip(a.weights[:-1], b.weights[:-1], strict=False):
            x, y = (np.linalg.norm(layer[0], axis=(0, 2)) for layer in (ours, theirs))
            if x.shape == y.shape and x.size >= _ENOUGH_UNITS and np.ptp(x) > 0 and np.ptp(y) > 0:
                correlated = spearmanr(x, y, alternative="greater")
                if float(correlated.pvalue) < 1e-3 / max(len(first), 1):
                    return True
    return False


def _eigenvalues(weights: Weights) -> FloatArray:
    flat = np.concatenate(list(np.asarray(weights, np.float64)), axis=1)
    gram = flat @ flat.T if flat.shape[0] <= flat.shape[1] else flat.T @ flat
    return np.asarray(np.linalg.eigvalsh(gram), np.float64)


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


def _tree(
    names: Sequence[str], pairs: Sequence[LineagePair], separations: Mapping[frozenset[str], float]
) -> list[TreeEdge]:
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
        separation = separations[frozenset((pair.a, pair.b))]
        separation *= 1.0 if pair.kind in _DIRECT else _INDIRECT
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
