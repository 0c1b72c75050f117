"""Partitions of a layered graph: the objective, and the search for a partition that makes it small.

Weights ``w = max(0, log(E / eps))`` between nodes of adjacent layers. The cost of a partition is

    sum of w between modules  +  balance * sum_l sum_a out_a,l * in_a,l / m_l

with ``out_a,l`` (``in_a,l``) what leaves (enters) module ``a`` between layers ``l`` and ``l + 1``, ``m_l`` all of it.
The first term is section 5.2.3 of degeneracy-in-the-loss-landscape; alone one single module minimises it. The
second is the balance: what modules of that size would share by chance. One single module costs
``balance * sum_l m_l``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import scipy.linalg
from scipy import sparse

from strati.core.errors import require
from strati.core.rng import derive, stream

if TYPE_CHECKING:
    from strati.core.results import BoolArray, FloatArray, IntArray

_SWEEPS = 100
_FEW = 60
"""Up to so many nodes joining them one by one is a start, too, and so are some partitions at random."""
_RANDOM = 12


class LayeredGraph:
    """Weights between adjacent layers; nodes are numbered through, layer after layer."""

    def __init__(self, weights: Sequence[FloatArray], balance: float = 1.0) -> None:
        self.weights = tuple(np.asarray(w, dtype=np.float64) for w in weights)
        self.balance = balance
        self.sizes = (self.weights[0].shape[1], *(w.shape[0] for w in self.weights))
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)]).astype(int)
        self.nodes = int(self.starts[-1])
        self.totals = np.array([w.sum() for w in self.weights])
        pairs = len(self.weights)
        self.out = np.zeros((self.nodes, pairs))
        self.into = np.zeros((self.nodes, pairs))
        for k, w in enumerate(self.weights):
            self.out[self.starts[k] : self.starts[k + 1], k] = w.sum(axis=0)
            self.into[self.starts[k + 1] : self.starts[k + 2], k] = w.sum(axis=1)
        self._scale = np.divide(balance, self.totals, out=np.zeros(pairs), where=self.totals > 0)

    @property
    def attached(self) -> IntArray:
        """Nodes with an edge above the cutoff."""
        places: IntArray = np.flatnonzero((self.out.sum(axis=1) + self.into.sum(axis=1)) > 0)
        return places

    def without_unattached(self) -> LayeredGraph:
        """The same graph without nodes that have no edge."""
        keep = np.zeros(self.nodes, dtype=bool)
        keep[self.attached] = True
        return self._of(keep)

    def part(self, nodes: IntArray) -> LayeredGraph:
        """The graph of some nodes only, which are numbered in their order."""
        keep = np.zeros(self.nodes, dtype=bool)
        keep[nodes] = True
        return self._of(keep)

    def adjacency(self) -> sparse.csr_matrix:
        """The symmetric weight matrix of all nodes."""
        rows, cols, data = [], [], []
        for k, w in enumerate(self.weights):
            target, source = np.nonzero(w)
            rows.append(target + self.starts[k + 1])
            cols.append(source + self.starts[k])
            data.append(w[target, source])
        shape = (self.nodes, self.nodes)
        half = sparse.coo_matrix((np.concatenate(data), (np.concatenate(rows), np.concatenate(cols))), shape)
        return (half + half.T).tocsr()

    def between(self, labels: IntArray) -> float:
        """The weight between modules: the objective of section 5.2.3."""
        return float(
            sum(
                w[self._layer(labels, k + 1)[:, None] != self._layer(labels, k)[None, :]].sum()
                for k, w in enumerate(self.weights)
            )
        )

    def cost(self, labels: IntArray) -> float:
        """The stated objective: weight between modules plus the balance."""
        out, into = self._sums(labels)
        return self.between(labels) + float(((out * into).sum(axis=0) * self._scale).sum())

    def links(self, labels: IntArray) -> FloatArray:
        """By how much joining each two modules would lower the cost."""
        count = int(labels.max()) + 1
        shared = np.zeros((count, count))
        for k, w in enumerate(self.weights):
            first = _one_hot(self._layer(labels, k), count)
            second = _one_hot(self._layer(labels, k + 1), count)
            shared += second.T @ w @ first
        out, into = self._sums(labels)
        chance = (out * self._scale) @ into.T
        gain: FloatArray = shared + shared.T - chance - chance.T
        np.fill_diagonal(gain, -np.inf)
        return gain

    def improve(self, labels: IntArray, *, fixed: bool = False) -> IntArray:
        """Move single nodes while that lowers the cost; ``fixed`` keeps the number of modules."""
        labels = labels.copy()
        for _ in range(_SWEEPS):
            out, into = self._sums(labels)
            moved = False
            for layer in range(len(self.sizes)):
                for node in self._restless(layer, labels, out, into):
                    moved |= self._move(node, labels, out, into, fixed)
                    if int(labels.max()) >= len(out):  # a module of its own was opened
                        out, into = self._sums(labels)
            if not moved:
                break
        return _renumber(labels)

    def merge(self, labels: IntArray, down_to: int | None = None) -> IntArray:
        """Join modules while that lowers the cost, or until ``down_to`` are left."""
        labels = _renumber(labels)
        gain = self.links(labels)
        while len(gain) > 1 and (down_to is None or len(gain) > down_to):
            first, second = divmod(int(gain.argmax()), len(gain))
            if down_to is None and gain[first, second] <= 1e-12 * self.totals.sum():
                break
            labels = _renumber(np.where(labels == second, first, labels))
            both = gain[first] + gain[second]  # gains add up over the parts of a module
            gain[first], gain[:, first] = both, both
            gain = np.delete(np.delete(gain, second, axis=0), second, axis=1)
        return labels

    def _restless(self, layer: int, labels: IntArray, out: FloatArray, into: FloatArray) -> list[int]:
        """Nodes of a layer that may gain by a move: those of one layer do not change each other's gains."""
        count, here = len(out), self._layer(labels, layer)
        gain = np.zeros((count, here.size))
        if layer < len(self.weights):
            gain += _one_hot(self._layer(labels, layer + 1), count).T @ self.weights[layer]
            gain -= np.outer(into[:, layer] * self._scale[layer], self.out[self._span(layer), layer])
        if layer > 0:
            gain += (self.weights[layer - 1] @ _one_hot(self._layer(labels, layer - 1), count)).T
            gain -= np.outer(
                out[:, layer - 1] * self._scale[layer - 1], self.into[self._span(layer), layer - 1]
            )
        restless = (gain.argmax(axis=0) != here) | (gain.max(axis=0) < 0)
        return [int(node) + int(self.starts[layer]) for node in np.flatnonzero(restless)]

    def _span(self, layer: int) -> slice:
        return slice(self.starts[layer], self.starts[layer + 1])

    def _of(self, keep: BoolArray) -> LayeredGraph:
        parts = [keep[self.starts[k] : self.starts[k + 1]] for k in range(len(self.sizes))]
        weights = [w[parts[k + 1]][:, parts[k]] for k, w in enumerate(self.weights)]
        return LayeredGraph(weights, self.balance)

    def _layer(self, labels: IntArray, k: int) -> IntArray:
        return labels[self._span(k)]

    def _sums(self, labels: IntArray) -> tuple[FloatArray, FloatArray]:
        hot = _one_hot(labels, int(labels.max()) + 1)
        return hot.T @ self.out, hot.T @ self.into

    def _move(self, node: int, labels: IntArray, out: FloatArray, into: FloatArray, fixed: bool) -> bool:
        layer = int(np.searchsorted(self.starts, node, side="right") - 1)
        index, count = node - self.starts[layer], len(out)
        gain = np.zeros(count)
        if layer < len(self.weights):
            gain += np.bincount(self._layer(labels, layer + 1), self.weights[layer][:, index], count)
            gain -= self.out[node, layer] * self._scale[layer] * into[:, layer]
        if layer > 0:
            gain += np.bincount(self._layer(labels, layer - 1), self.weights[layer - 1][index], count)
            gain -= self.into[node, layer - 1] * self._scale[layer - 1] * out[:, layer - 1]
        here = labels[node]
        best = int(gain.argmax())
        slack = 1e-10 * (self.out[node].sum() + self.into[node].sum())
        if not fixed and gain[best] < -slack:  # better alone
            best, alone = count, True
        else:
            alone = False
        if best == here or (not alone and gain[best] <= gain[here] + slack):
            return False
        if (fixed or alone) and (labels == here).sum() == 1:
            return False
        labels[node] = best
        if not alone:
            for sums, weights in ((out, self.out), (into, self.into)):
                sums[here] -= weights[node]
                sums[best] += weights[node]
        return True


def partition(
    graph: LayeredGraph, *, number: int | None = None, seed: int = 0, thorough: bool = False
) -> IntArray:
    """A partition of low cost: Leiden and connected components as starts, refined on the stated cost.

    Args:
        graph: The weights; nodes without an edge get the label -1.
        number: How many modules there must be; free by default.
        seed: Seed of Leiden.
        thorough: Try partitions at random as starts, too, where the graph is small and a number is asked for.
    """
    labels = np.full(graph.nodes, -1, dtype=np.int64)
    attached = graph.attached
    if attached.size == 0:
        return labels
    inner = graph.without_unattached()
    refined = [_refine(inner, start, number) for start in _starts(inner, number, seed, thorough)]
    costs = [inner.cost(each) for each in refined]
    slack = 1e-9 * inner.totals.sum()
    best = next(k for k, cost in enumerate(costs) if cost <= min(costs) + slack)
    labels[attached] = refined[best]
    return by_size(labels)


def quality(graph: LayeredGraph, labels: IntArray) -> float:
    """1 - cost / cost of one single module: 0 means that nothing comes apart."""
    single = graph.balance * float(graph.totals.sum())
    return max(0.0, 1 - graph.cost(labels) / single) if single > 0 else 0.0


def _refine(graph: LayeredGraph, labels: IntArray, number: int | None) -> IntArray:
    if number is not None:
        return graph.improve(graph.merge(labels, down_to=number), fixed=True)
    for _ in range(_SWEEPS):
        before = graph.cost(labels)
        labels = graph.merge(graph.improve(labels))
        if graph.cost(labels) >= before - 1e-10 * graph.totals.sum():
            break
    return labels


def _starts(graph: LayeredGraph, number: int | None, seed: int, thorough: bool) -> list[IntArray]:
    adjacency = graph.adjacency()
    adjacency.sort_indices()
    if number is None:
        parts = [np.zeros(graph.nodes, dtype=np.int64)]
        parts.append(sparse.csgraph.connected_components(adjacency, directed=False)[1].astype(np.int64))
        parts += [_leiden(graph, adjacency, resolution, seed) for resolution in (0.5, 1.0, 2.0, 4.0)]
        return [_renumber(part) for part in parts]
    parts = [_halves(graph, adjacency)] if number == 2 else []
    parts += [_leiden(graph, adjacency, resolution, seed) for resolution in (1.0, 2.0)]
    resolution = 4.0
    while resolution < 100 and sum(_fits(part, number) for part in parts) < 2:
        parts.append(_leiden(graph, adjacency, resolution, seed))
        resolution *= 2
    parts = [part for part in parts if _fits(part, number)]
    if not parts or graph.nodes <= _FEW:
        parts.append(np.arange(graph.nodes))
    if thorough and graph.nodes <= _FEW:
        rng = stream(seed, "starts", number)
        parts += [_at_random(graph.nodes, number, rng) for _ in range(_RANDOM)]
    return [_renumber(part) for part in parts]


def _at_random(nodes: int, number: int, rng: np.random.Generator) -> IntArray:
    """Nodes dealt out at random, none of the modules empty (as far as there are nodes)."""
    labels = rng.integers(0, number, nodes)
    first = rng.permutation(nodes)[:number]
    labels[first] = np.arange(first.size)
    return labels


def _fits(labels: IntArray, number: int) -> bool:
    return np.unique(labels).size >= number  # an eigenvector may put all nodes on one side


def _leiden(graph: LayeredGraph, adjacency: sparse.csr_matrix, resolution: float, seed: int) -> IntArray:
    native = require("graspologic_native", "torch", "finding modules")
    _, communities = native.leiden_csr(
        adjacency.indptr.astype(np.int64),
        adjacency.indices.astype(np.int32),
        adjacency.data.astype(np.float64),
        graph.nodes,
        resolution=resolution * max(graph.balance, 1e-6),
        iterations=4,
        trials=2,
        seed=derive(seed, "leiden", str(resolution)) % 2**32,
    )
    return np.array([communities[k] for k in range(graph.nodes)], dtype=np.int64)


def _halves(graph: LayeredGraph, adjacency: sparse.csr_matrix) -> IntArray:
    """Two modules by the sign of the leading eigenvector of the weights less what chance gives."""
    excess = adjacency.toarray()
    chance = (graph.out * graph._scale) @ graph.into.T
    excess -= chance + chance.T
    _, vectors = scipy.linalg.eigh(excess, subset_by_index=(graph.nodes - 1, graph.nodes - 1))
    halves: IntArray = (vectors[:, -1] > 0).astype(np.int64)
    return halves


def _one_hot(labels: IntArray, count: int) -> FloatArray:
    return np.eye(count)[labels]


def _renumber(labels: IntArray) -> IntArray:
    return np.unique(labels, return_inverse=True)[1].reshape(-1).astype(np.int64)


def by_size(labels: IntArray) -> IntArray:
    """Largest module first, ties by the first node; -1 stays."""
    ids = [label for label in np.unique(labels) if label >= 0]
    order = sorted(ids, key=lambda k: (-int((labels == k).sum()), int(np.flatnonzero(labels == k)[0])))
    names = {label: rank for rank, label in enumerate(order)} | {-1: -1}
    return np.array([names[int(label)] for label in labels], dtype=np.int64)
