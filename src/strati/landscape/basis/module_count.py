"""How many modules there are: what nothing joins is apart, and what is joined is split only on evidence.

Any graph has a best partition, and a balance between cutting and chance (``partition``) has no natural strength. So the
number of modules is not left to it. A set of nodes is split into 2, 3, ... parts, again and again, only while the best
split stands out: its excess over chance, in standard deviations of a random split of the same sizes, must be clearly
larger than that of the best splits of the same graph with its weights put on edges at random. Counted in standard
deviations, a small module that is cut off stands out as a large one does. What was not split comes with the power of
the test: how well two halves would have had to be separated to be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from strati.core.rng import stream
from strati.landscape.basis.partition import LayeredGraph, by_size, partition, quality

if TYPE_CHECKING:
    from strati.core.results import FloatArray, IntArray

SHUFFLES, FIRST = 10, 3
"""Random graphs of either kind that a split is compared with, and after how many hopeless ones are given up."""
DEVIATIONS, MARGIN = 5.0, 1.4
"""A split counts if it stands out by so many standard deviations of the random graphs, and so many times as far as
they do. ``benchmarks/bench_modules.py`` gives the rates: networks of one piece reach 1.33 times at most, since their
bases couple each direction to one of the next layer more than to others."""
BETTER = 1.1
"""And its quality must be this many times that of weights put on edges at random: it must also cut little."""
MOST_PARTS, MANY = 6, 400
"""Splits into more than two parts at once are tried up to this many parts, in graphs of at most this many nodes."""
LARGEST = 3000
"""Components of more nodes are not split: the comparison would take minutes."""


@dataclass(frozen=True)
class Separation:
    """The modules of a graph, and what could have been seen.

    Attributes:
        labels: Module of each node, largest first; -1 for those without an edge.
        seen_below: Two equal halves of the largest module would have been told apart with less than this share of its
            interaction between them; 0 if not even without any, ``None`` if the module was too large to test.
    """

    labels: IntArray
    seen_below: float | None


def separate(graph: LayeredGraph, *, apart: IntArray | None = None, seed: int = 0) -> Separation:
    """Modules of a graph: what is apart, split further where the evidence asks for it.

    Args:
        graph: The weights; nodes without an edge get the label -1.
        apart: Groups of nodes between which there is nothing at all, edges below the cutoff included; by default the
            connected components.
        seed: Seed of Leiden and of the random graphs.

    Examples:
        >>> block = np.kron(np.eye(2), np.ones((3, 3)))       # two halves, each fully joined
        >>> separate(LayeredGraph([block, block])).labels.tolist()
        [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]
    """
    labels = np.full(graph.nodes, -1, dtype=np.int64)
    attached = graph.attached
    if attached.size == 0:
        return Separation(labels, None)
    groups = components(graph) if apart is None else apart
    waiting = [attached[groups[attached] == k] for k in np.unique(groups[attached])]
    modules: list[tuple[IntArray, float | None]] = []
    while waiting:
        nodes = waiting.pop(0)
        parts, power = _split(graph, nodes, seed)
        if len(parts) > 1:
            waiting += parts
        else:
            modules.append((nodes, power))
    for number, (nodes, _) in enumerate(modules):
        labels[nodes] = number
    largest = max(modules, key=lambda module: module[0].size)
    return Separation(by_size(labels), largest[1])


def components(graph: LayeredGraph) -> IntArray:
    """Connected components, numbered; each node without an edge is one by itself."""
    labels: IntArray = sparse.csgraph.connected_components(graph.adjacency(), directed=False)[1].astype(
        np.int64
    )
    return labels


def by_chance(graph: LayeredGraph, number: int, *, seed: int = 0, thorough: bool = False) -> float | None:
    """Quality of partitions into so many modules of the same weights put on edges at random; ``None`` if too large."""
    if graph.nodes > LARGEST or graph.totals.sum() <= 0:
        return None
    shuffled = [_shuffled(graph, anywhere, seed, k) for k in range(2)]
    labels = [partition(each, number=number, seed=seed, thorough=thorough) for each in shuffled]
    return float(
        np.mean([quality(each, assignment) for each, assignment in zip(shuffled, labels, strict=True)])
    )


def excess(graph: LayeredGraph, labels: IntArray) -> float:
    """How much less a partition cuts than chance, in standard deviations of a random one of the same sizes.

    With residuals ``r = w - out in / m`` the cut falls short of chance by ``- sum_cross r``; were the residuals put on
    edges at random, its variance would be ``n_cross (1 - n_cross / n) var(r)`` per pair of layers.

    Examples:
        >>> block = np.kron(np.eye(2), np.ones((3, 3)))
        >>> round(excess(LayeredGraph([block]), np.array([0, 0, 0, 1, 1, 1] * 2)), 3)  # 9 / sqrt(18 (1 - 1/2) / 4)
        6.0
    """
    gain = variance = 0.0
    for k, w in enumerate(graph.weights):
        if (total := w.sum()) <= 0:
            continue
        residual = w - np.outer(w.sum(axis=1), w.sum(axis=0)) / total
        before = labels[graph.starts[k] : graph.starts[k + 1]]
        after = labels[graph.starts[k + 1] : graph.starts[k + 2]]
        cross = after[:, None] != before[None, :]
        number = int(cross.sum())
        gain -= float(residual[cross].sum())
        variance += float(residual.var()) * number * (1 - number / w.size)
    return float(gain / np.sqrt(variance)) if variance > 0 else 0.0


def _split(graph: LayeredGraph, nodes: IntArray, seed: int) -> tuple[list[IntArray], float | None]:
    """The parts of a set of nodes, if a split stands out, and the power of the test if none does."""
    if nodes.size > LARGEST:
        return [nodes], None
    inner = graph.part(nodes)
    if nodes.size < 4 or inner.totals.sum() <= 0:
        return [nodes], 0.0
    pieces = int(np.unique(components(inner)).size)
    most = min(MOST_PARTS, nodes.size // 2) if nodes.size <= MANY else 2
    numbers = sorted({*range(2, most + 1), *([pieces] if 2 <= pieces <= nodes.size // 2 else [])})
    partitions = {k: partition(inner, number=k, seed=seed) for k in numbers}
    values = {k: excess(inner, _own(labels)) for k, labels in partitions.items()}
    ratios: dict[int, float] = dict.fromkeys(numbers, np.inf)
    needed = 0.0
    cuts: dict[int, list[float]] = {k: [] for k in numbers}  # qualities of weights put anywhere
    for shuffle in (anywhere, among_degrees):
        chance: dict[int, list[float]] = {k: [] for k in (*ratios, 2)}
        for turn in range(SHUFFLES):
            other = _shuffled(inner, shuffle, seed, turn)
            for k in {*ratios, 2} if turn < FIRST else set(ratios):
                labels = partition(other, number=k, seed=seed)
                chance[k].append(excess(other, _own(labels)))
                if shuffle is anywhere:
                    cuts[k].append(quality(other, _own(labels)))
            if turn + 1 >= FIRST:
                ratios = {k: r for k, r in ratios.items() if values[k] > MARGIN * np.mean(chance[k])}
                best = sorted(ratios, key=lambda k: -values[k] / max(float(np.mean(chance[k])), 1e-9))[:2]
                ratios = {k: ratios[k] for k in best}
            if turn + 1 >= FIRST and not ratios:
                break
        needed = max(needed, _needed(chance[2]))
        ratios = {
            k: min(r, values[k] / max(float(np.mean(chance[k])), 1e-9))
            for k, r in ratios.items()
            if values[k] > _needed(chance[k])
            and quality(inner, _own(partitions[k])) > BETTER * float(np.mean(cuts[k]))
        }
    if not ratios:
        return [nodes], min(_seen_below(inner, needed), max(0.0, 0.5 - BETTER * float(np.mean(cuts[2]))))
    parts = _own(partitions[max(ratios, key=lambda k: ratios[k])])
    return [nodes[parts == k] for k in np.unique(parts)], None


def _needed(chance: list[float]) -> float:
    """What a split must reach to stand out from those of random graphs."""
    mean = float(np.mean(chance))
    return max(MARGIN * mean, mean + DEVIATIONS * float(np.std(chance, ddof=1)))


def _seen_below(graph: LayeredGraph, needed: float) -> float:
    """The share of interaction between two equal halves below which they would have stood out.

    With a share ``c`` between the halves the cut falls short of chance by ``(1/2 - c) m``; the residuals then vary by
    ``var(r) + mean(w)^2 (1 - 2c)^2``. Solved for the ``c`` at which that reaches what is needed.
    """
    total = float(graph.totals.sum())
    noise = signal = 0.0
    for w in graph.weights:
        if (m := w.sum()) > 0:
            noise += w.size * float((w - np.outer(w.sum(axis=1), w.sum(axis=0)) / m).var())
            signal += w.size * float(w.mean()) ** 2
    margin = total**2 - needed**2 * signal
    if margin <= 0:
        return 0.0
    return max(0.0, float(1 - needed * np.sqrt(noise / margin)) / 2)


def _own(labels: IntArray) -> IntArray:
    """Nodes without an edge go with the first module: they cut nothing."""
    return np.where(labels < 0, 0, labels)


def _shuffled(
    graph: LayeredGraph, how: Callable[[FloatArray, np.random.Generator], FloatArray], seed: int, number: int
) -> LayeredGraph:
    rng = stream(seed, "shuffled", how.__name__, number)
    return LayeredGraph([how(w, rng) for w in graph.weights], graph.balance)


def anywhere(weights: FloatArray, rng: np.random.Generator) -> FloatArray:
    """The weights put on edges at random."""
    return rng.permuted(weights.ravel()).reshape(weights.shape)


def among_degrees(weights: FloatArray, rng: np.random.Generator) -> FloatArray:
    """The same, what leaves and enters each node kept: its excess over the product of the sums is shuffled.

    Examples:
        >>> w = np.arange(12.0).reshape(3, 4)
        >>> other = among_degrees(w, np.random.default_rng(0))
        >>> bool(np.allclose(other.sum(axis=0), w.sum(axis=0))), bool(np.allclose(other, w))
        (True, False)
    """
    rows, columns = weights.sum(axis=1), weights.sum(axis=0)
    expected = np.outer(rows, columns)
    live = expected > 0
    other = np.zeros_like(weights)
    other[live] = rng.permuted(weights[live] / expected[live]) * expected[live]
    for _ in range(30):
        other *= _ratio(rows, other.sum(axis=1))[:, None]
        other *= _ratio(columns, other.sum(axis=0))[None, :]
    return other


def _ratio(wanted: FloatArray, found: FloatArray) -> FloatArray:
    result: FloatArray = np.divide(wanted, found, out=np.zeros_like(wanted), where=found > 0)
    return result
