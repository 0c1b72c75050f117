"""Partitions of a layered graph: the objective, and the search for a partition that makes it small.

Weights ``w = max(0, log(E / eps))`` between nodes of adjacent layers. The cost of a partition is

    sum of w between modules  +  balance * sum_l sum_a out_a,l * in_a,l / m_l

with ``out_a,l`` (``in_a,l``) what leaves (enters) module ``a`` between layers ``l`` and ``l + 1``, ``m_l`` all of it.
The first term is section 5.2.3 of degeneracy-in-the-loss-landscape; alone one single module minimises it. The
second is the balance: what modules of that size would share by chance. One single module costs
``balance * sum_l m_l``.

Any graph has a best partition, and the balance has no natural strength. So the number of modules is not left to it: a
set of nodes is split into 2, 3, ... parts, again and again, only while the best split stands out. Its excess over
chance, in standard deviations of a random split of the same sizes, must be clearly larger than that of the best splits
of the same graph with its weights put on edges at random. What was not split comes with the power of the test: how well
two halves would have had to be separated to be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy.linalg
from scipy import sparse

from strati.core.plugins import require
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
