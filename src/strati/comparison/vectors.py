"""Biases, norm weights and other tensors that are no layers, in two networks.

Vectors are paired by name, biases also through the layers that they belong to (a fused bias against the three that
another file keeps), and what is left by what lies closest in paired blocks, so that files with other names are compared
too. Two ways to store the same norms are undone: weights that multiply as ``1 + w`` in one format and as ``w`` in the
other (``norm-plus-one``), and norms whose weights were multiplied into the layers behind them (``folded-norm``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from strati.comparison.matching import bare_names
from strati.comparison.results import ComparedVector, Movement
from strati.comparison.update_rank import is_conversion
from strati.io.align import align
from strati.io.roles import Role
from strati.io.views import View

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.comparison.results import ComparedLayer
    from strati.comparison.unit_alignment import Renumbering
    from strati.io.checkpoint_file import Tensor
    from strati.io.layers import Layer
    from strati.io.network import Network

    LayerPair = tuple[Layer, Layer]

_CHUNK = 4_000_000  # entries that are converted to float64 at once
_ROW_STEPS = ("rows", "every", "heads")
_CLOSE = 0.5  # squared distance relative to both norms, where the numbers of vectors differ
_NORM = re.compile(r"norm|(?:^|[._/])ln(?:_?[0-9a-z]+)?(?=[._/])", re.IGNORECASE)
_OFFSET_MODELS = ("gemma", "recurrent_gemma", "qwen3_next", "nemotron")
_READS_NORM = (Role.QUERY, Role.KEY, Role.VALUE, Role.QKV, Role.MLP_IN, Role.MLP_GATE, Role.HEAD)


def norm_offset(network: Network) -> int:
    """1 where a network's norms multiply by ``1 + weight``, 0 where they multiply by the weight itself.

    Gemma and its relatives store norms around 0; llama.cpp adds 1 when it converts them.
    """
    kind = str((network.config or {}).get("model_type", ""))
    return int(network.format != "gguf" and kind.startswith(_OFFSET_MODELS))


def is_norm_weight(name: str) -> bool:
    """Whether a tensor's name is that of the weight of a normalisation."""
    last = re.split(r"[./]", name.removesuffix(":0"))[-1]
    return last in ("weight", "gamma", "scale", "w") and bool(_NORM.search(name))


@dataclass(frozen=True)
class _Part:
    """A vector of a network, or the rows of a fused bias that belong to one layer."""

    name: str
    view: View | None = None

    def read(self, network: Network) -> NDArray[Any]:
        vector = network.read(self.name).reshape(-1)
        return vector if self.view is None else next(self.view.matrices(vector[:, None]))[:, 0]


@dataclass(frozen=True)
class _VectorPair:
    first: _Part
    last: _Part
    role: str = ""
    widths: tuple[int, ...] = ()


@dataclass(frozen=True)
class VectorPairs:
    """Paired vectors of two networks, and those that only one of them has."""

    pairs: tuple[_VectorPair, ...] = ()
    only_first: tuple[str, ...] = ()
    only_last: tuple[str, ...] = ()


def pair_vectors(
    first: Network, last: Network, layers: Sequence[LayerPair], widths: Mapping[str, tuple[int, ...]]
) -> VectorPairs:
    """Find corresponding vectors.

    Args:
        first: A network.
        last: Another one.
        layers: Their matched layers.
        widths: Widths of an attention head to try for a layer of the first network.
    """
    here, there = _vectors(first, layers, 0), _vectors(last, layers, 1)
    bare = [dict(zip(bare_names(list(side)), side.values(), strict=True)) for side in (here, there)]
    pairs = [
        _VectorPair(_Part(tensor.name), _Part(bare[1][key].name))
        for key, tensor in bare[0].items()
        if key in bare[1] and bare[1][key].size == tensor.size
    ]
    used = {pair.first.name for pair in pairs}, {pair.last.name for pair in pairs}
    biases = [
        _bias_pair(a, b, here, there, used, widths.get(a.name, ()))
        for a, b in layers
        if a.count == b.count == 1
    ]
    pairs += [pair for pair in biases if pair is not None]

    def unpaired() -> list[tuple[str, ...]]:
        paired = {pair.first.name for pair in pairs}, {pair.last.name for pair in pairs}
        return [
            tuple(n for n in side if n not in names)
            for side, names in zip((here, there), paired, strict=True)
        ]

    pairs += list(_closest(first, last, layers, unpaired()))
    return VectorPairs(tuple(pairs), *unpaired())


def _vectors(network: Network, layers: Sequence[LayerPair], side: int) -> dict[str, Tensor]:
    """Floating-point tensors that are neither layers nor parts of adapters."""
    in_layers = {layer.tensor for layer in network.layers()} | {pair[side].tensor for pair in layers}
    return {
        tensor.name: tensor
        for tensor in network.tensors
        if tensor.floating
        and tensor.size
        and tensor.name not in in_layers
        and tensor.name not in network.contents.adapters
    }


def _bias_pair(
    a: Layer,
    b: Layer,
    here: Mapping[str, Tensor],
    there: Mapping[str, Tensor],
    used: tuple[set[str], set[str]],
    widths: tuple[int, ...],
) -> _VectorPair | None:
    parts = []
    for layer, tensors, taken in ((a, here, used[0]), (b, there, used[1])):
        name = next((n for n in _bias_names(layer.tensor) if n in tensors and n not in taken), None)
        if name is None:
            return None
        steps = tuple(step for step in layer.cut.steps if step[0] in _ROW_STEPS)
        parts.append(_Part(name, View("", layer.shape[0], 1, steps)))
    return _VectorPair(parts[0], parts[1], str(a.role), widths)


def _bias_names(weight: str) -> Iterator[str]:
    """Names under which formats store the bias of a weight."""
    for old, new in (("weight", "bias"), ("kernel", "bias"), ("kernel:0", "bias:0")):
        if weight.endswith(old):
            yield weight.removesuffix(old) + new
    head, separator, tail = weight.rpartition("W_")
    if separator:  # TransformerLens
        yield f"{head}b_{tail}"


def _closest(
    first: Network, last: Network, layers: Sequence[LayerPair], names: Sequence[Sequence[str]]
) -> Iterator[_VectorPair]:
    """Pair the remaining vectors of paired blocks, and those outside of blocks, by their distance."""
    blocks: dict[int | None, Counter[int | None]] = {None: Counter({None: 1})}
    for a, b in layers:
        blocks.setdefault(a.block, Counter())[b.block] += 1
    for block, partners in blocks.items():
        partner = partners.most_common(1)[0][0]
        here = [name for name in names[0] if first.names.blocks[name] == block]
        there = [name for name in names[1] if last.names.blocks[name] == partner]
        for size in {first[name].size for name in here}:
            ours = [name for name in here if first[name].size == size]
            theirs = [name for name in there if last[name].size == size]
            if not theirs:
                continue
            cost = np.array([[_distance(first.read(x), last.read(y)) for y in theirs] for x in ours])
            for i, j in zip(*linear_sum_assignment(cost), strict=True):
                if len(ours) == len(theirs) or cost[i, j] < _CLOSE:
                    yield _VectorPair(_Part(ours[i]), _Part(theirs[j]))


def _distance(x: NDArray[Any], y: NDArray[Any]) -> float:
    """Squared distance over both squared norms, at the offset of -1, 0 or 1 that gives the least."""
    a, b = (np.nan_to_num(np.asarray(v, np.float64).reshape(-1), posinf=0, neginf=0) for v in (x, y))
    sizes = float(a @ a + b @ b)
    best = min(float(np.square(a - b + offset).sum()) for offset in (-1, 0, 1))
    return best / sizes if sizes > 0 else 0.0


def compare_vectors(
    first: Network,
    last: Network,
    pairs: Iterable[_VectorPair],
    renumbered: Mapping[str, Renumbering],
    folded: frozenset[str],
) -> Iterator[ComparedVector]:
    """Compare paired vectors, after what stores them differently is undone.

    Args:
        first: A network.
        last: Another one.
        pairs: Their paired vectors.
        renumbered: How the last network numbers the units of its vectors, where that is not as the first does.
        folded: Norms of either network whose weights the other one keeps in the layers behind them.
    """
    offset = norm_offset(first) - norm_offset(last)
    for pair in pairs:
        before, after = pair.first.read(first), pair.last.read(last)
        how = None
        if pair.last.name in renumbered:
            after, how = renumbered[pair.last.name].apply(after), "units"
        elif pair.role and before.size == after.size and not np.array_equal(before, after):
            ordered = align(before[:, None], after[:, None], pair.role, pair.widths)
            if ordered is not None and ordered.how is not None:
                after, how = ordered.second[:, 0], ordered.how
        if offset and is_norm_weight(pair.first.name):
            moved = np.asarray(before, np.float32) + np.float32(offset)
            if _change(moved, after) is not None and (_change(moved, after) or 0) < 0.5 * (
                _change(before, after) or 0
            ):
                before, how = moved, "norm-plus-one"
        if {pair.first.name, pair.last.name} & folded:
            # The network that keeps these weights in the layers behind the norm must multiply by 1 here.
            folder, after = (last, after) if np.ptp(before) > 0 else (first, before)
            before, how = np.full_like(after, 1 - norm_offset(folder)), "folded-norm"
        change = _change(before, after)
        kind = "untouched" if change == 0 else "rounding" if is_conversion(before, after) else "changed"
        yield ComparedVector(pair.first.name, pair.last.name, change, kind, how)


def folded_gains(
    first: Network, last: Network, layers: Sequence[LayerPair]
) -> dict[str, tuple[tuple[str, tuple[float, ...], int], ...]]:
    """Norm weights that the other network may have multiplied into the layers behind them.

    Returns:
        For a layer of the first network the candidates: name and values of a norm weight, and which network has it.
        The other network lacks this norm, or its weights are all 1.
    """
    gains: list[dict[int | None, list[tuple[str, NDArray[Any]]]]] = []
    for network in (first, last):
        by_block: dict[int | None, list[tuple[str, NDArray[Any]]]] = {}
        for tensor in network.tensors:
            if tensor.floating and len(tensor.shape) == 1 and is_norm_weight(tensor.name):
                weights = np.asarray(network.read(tensor.name), np.float64) + norm_offset(network)
                if np.ptp(weights) > 0 and np.isfinite(weights).all():
                    by_block.setdefault(network.names.blocks[tensor.name], []).append((tensor.name, weights))
        gains.append(by_block)
    if len(list(_flat(gains[0]))) == len(list(_flat(gains[1]))):
        return {}
    candidates = {}
    for a, b in layers:
        if a.role in _READS_NORM:
            blocks = (a.block, b.block)
            side = int(len(gains[0].get(blocks[0], ())) < len(gains[1].get(blocks[1], ())))
            norms = [
                (name, tuple(weights.tolist()), side)
                for name, weights in gains[side].get(blocks[side], ())
                if weights.size == a.shape[1]
            ]
            if norms:
                candidates[a.name] = tuple(norms)
    return candidates


def _flat(by_block: Mapping[int | None, list[tuple[str, NDArray[Any]]]]) -> Iterator[str]:
    return (name for norms in by_block.values() for name, _ in norms)


def movement(
    first: Network,
    last: Network,
    measured: Iterable[tuple[Layer, Layer, ComparedLayer]],
    vectors: Sequence[ComparedVector],
    unpaired: VectorPairs,
) -> Movement | None:
    """Count the tensors that two networks share and that differ; ``None`` where no tensor is in both.

    Args:
        first: A network.
        last: Another one.
        measured: The layers that were compared: in the first, in the last, and the comparison.
        vectors: The vectors that were compared.
        unpaired: Names the vectors that only one network has.
    """
    changes = dict(_layer_changes(first, last, measured))
    changes |= {vector.name: vector.relative_change for vector in vectors}
    if not changes:
        return None
    differ = [change for change in changes.values() if change is None or change > 0]
    sizes = [change for change in differ if change is not None]
    changed = [vector for vector in vectors if vector.kind == "changed"]
    return Movement(
        shared=len(changes),
        moved=len(differ),
        median_relative_change=float(np.median(sizes)) if sizes else None,
        untouched=tuple(name for name, change in changes.items() if change == 0),
        vectors_moved=len(changed),
        moved_vectors=tuple(vector.partner for vector in changed),
        vectors=tuple(vectors),
        only_first=unpaired.only_first,
        only_last=unpaired.only_last,
    )


def _layer_changes(
    first: Network, last: Network, measured: Iterable[tuple[Layer, Layer, ComparedLayer]]
) -> Iterator[tuple[str, float | None]]:
    """Changes of the tensors that hold layers: from the layers where these hold every entry, else read again."""
    parts: dict[tuple[str, str], list[tuple[int, float | None, float | None]]] = {}
    for layer, other, compared in measured:
        norm = compared.metrics.get("frobenius_norm", (None,))[0]
        size = layer.cut.rows * layer.cut.cols * layer.count
        parts.setdefault((layer.tensor, other.tensor), []).append((size, compared.relative_change, norm))
    for (name, partner), layer_changes in parts.items():
        if name in first.contents.adapters or partner in last.contents.adapters:
            continue
        numbers = np.array([(change, norm) for _, change, norm in layer_changes], np.float64)
        if sum(size for size, *_ in layer_changes) == first[name].size and np.isfinite(numbers).all():
            weights = numbers[:, 1] / max(float(numbers[:, 1].max()), np.finfo(np.float64).tiny)
            total = float(np.square(weights).sum())
            if total > 0:
                yield name, float(np.sqrt(np.square(numbers[:, 0] * weights).sum() / total))
                continue
        if first[name].shape == last[partner].shape:
            yield name, _change(first.read(name), last.read(partner))


def _change(a: NDArray[Any], b: NDArray[Any]) -> float | None:
    """``||B - A|| / ||A||``; ``None`` where only ``A`` is zero, or the sizes differ."""
    x, y = a.reshape(-1), b.reshape(-1)
    if x.size != y.size:
        return None
    size = step = 0.0
    for start in range(0, x.size, _CHUNK):
        chunk = x[start : start + _CHUNK].astype(np.float64)
        size += float(chunk @ chunk)
        chunk -= y[start : start + _CHUNK].astype(np.float64)
        step += float(chunk @ chunk)
    if size > 0:
        return float(np.sqrt(step) / np.sqrt(size))
    return 0.0 if step == 0 else None
