"""How many modules there are: what nothing joins is apart, and what is joined is split only on evidence.

Any graph has a best partition, and a balance between cutting and chance (``partition``) has no natural strength. So the
number of modules is not left to it: the connected components above the cutoff are modules, and a component is split in
two, again and again, only while the best split is clearly better than the best splits of the same graph with its
weights put on edges at random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from strati.landscape.interactions.partition import LayeredGraph, by_size, partition, quality
from strati.rng import stream

if TYPE_CHECKING:
    from strati.types import FloatArray, IntArray

SHUFFLES = 10
"""Random graphs of either kind that a split is compared with."""
DEVIATIONS, MARGIN = 5.0, 1.4
"""A split counts if its quality is so many standard deviations and so many times above that of random graphs."""
LARGEST = 3000
"""Components of more nodes are not split: the comparison would take minutes."""


def separate(graph: LayeredGraph, *, seed: int = 0) -> IntArray:
    """Modules of a graph: its connected components, split further where the evidence asks for it.

    Args:
        graph: The weights; nodes without an edge get the label -1.
        seed: Seed of Leiden and of the random graphs.

    Examples:
        >>> block = np.kron(np.eye(2), np.ones((3, 3)))       # two halves, each fully joined
        >>> separate(LayeredGraph([block, block])).tolist()
        [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]
    """
    labels = np.full(graph.nodes, -1, dtype=np.int64)
    attached = graph.attached
    if attached.size == 0:
        return labels
    joined = graph.adjacency()[attached][:, attached]
    count, member = sparse.csgraph.connected_components(joined, directed=False)
    waiting = [attached[member == k] for k in range(count)]
    modules: list[IntArray] = []
    while waiting:
        nodes = waiting.pop(0)
        parts = _split(graph, nodes, seed)
        if parts is None:
            modules.append(nodes)
        else:
            waiting += parts
    for number, nodes in enumerate(modules):
        labels[nodes] = number
    return by_size(labels)


def by_chance(graph: LayeredGraph, number: int, *, seed: int = 0, thorough: bool = False) -> float | None:
    """Quality of partitions into so many modules of the same weights put on edges at random; ``None`` if too large."""
    if graph.nodes > LARGEST or graph.totals.sum() <= 0:
        return None
    shuffled = [_shuffled(graph, anywhere, seed, k) for k in range(2)]
    return float(np.mean([_best(each, number, seed, thorough)[0] for each in shuffled]))


def _split(graph: LayeredGraph, nodes: IntArray, seed: int) -> list[IntArray] | None:
    """The two parts of a set of nodes, if that split is better than chance."""
    inner = graph.part(nodes)
    if not 4 <= nodes.size <= LARGEST:
        return None
    found, labels = _best(inner, 2, seed)
    for shuffle in (anywhere, among_degrees):
        chance: list[float] = []
        for k in range(SHUFFLES):
            chance.append(_best(_shuffled(inner, shuffle, seed, k), 2, seed)[0])
            if k >= 2 and found <= MARGIN * np.mean(chance):
                return None
        if found <= np.mean(chance) + DEVIATIONS * np.std(chance, ddof=1):
            return None
    return [nodes[labels == k] for k in range(2)]


def _best(graph: LayeredGraph, number: int, seed: int, thorough: bool = False) -> tuple[float, IntArray]:
    labels = partition(graph, number=number, seed=seed, thorough=thorough)
    return quality(graph, labels), labels


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
