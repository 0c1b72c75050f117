"""Modules: known structure must come apart, the cost must be what it says, chance must be named."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from halves import SHAPES, agreement, as_graph, dense, mixed, planted, true_halves, two_halves
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import strati
from strati.core.errors import BadInputError
from strati.landscape.basis.partition import (
    LayeredGraph,
    among_degrees,
    anywhere,
    components,
    excess,
    partition,
    quality,
    separate,
)

KINDS = list(itertools.product([nn.ReLU, nn.Tanh], ["interaction", "local"]))
HALVES = [
    pytest.param(*shape, *kind, marks=() if number % 4 == turn else pytest.mark.slow)
    for number, shape in enumerate(SHAPES)
    for turn, kind in enumerate(KINDS)
]
"""Every shape with one of the four kinds; all of them in ``make test-all``."""


@pytest.mark.parametrize(("widths", "other", "activation", "kind"), HALVES)
def test_two_hidden_halves_come_apart(widths, other, activation, kind):
    """Exactly two modules, whatever the cutoff; benchmarks/bench_modules.py does it with more seeds."""
    seed = 9008 + len(widths)
    net, x, start = two_halves(seed, widths, other, activation=activation, draws=16)
    graph = strati.interaction_graph(strati.interaction_basis(net, x, kind))
    truth = true_halves(graph, start, widths[0])
    for epsilon in (None, 1e-8) if kind == "local" else (None, 1e-4):
        found = strati.modules(graph, epsilon=epsilon)
        assert mixed(found, truth) == 0
        assert found.between == 0
        assert len(found.modules) == 2
        assert found.quality == pytest.approx(0.5, abs=0.15)
        assert not found._warnings()


@pytest.mark.parametrize("condition", [1.0, 1e3])
def test_strong_mixing_hides_nothing(condition):
    for seed in range(9020, 9024):
        net, x, start = two_halves(seed, condition=condition, draws=16)
        graph = strati.interaction_graph(strati.interaction_basis(net, x))
        found = strati.modules(graph)
        assert len(found.modules) == 2 and mixed(found, true_halves(graph, start, 3)) == 0


def test_independent_draws_of_wide_halves_come_apart():
    """No edge is exactly zero then: the split must be found by its cost and believed on evidence."""
    net, x, start = two_halves(9030, (8, 16, 16, 8), activation=nn.Tanh, product=False)
    graph = strati.interaction_graph(strati.interaction_basis(net, x))
    truth = true_halves(graph, start, 8)
    found = strati.modules(graph, epsilon=1e-2)
    assert found.between > 0
    assert len(found.modules) == 2
    wrong = [
        min(np.mean([truth[k][d] == side for k, d in m.members]) for side in (True, False))
        for m in found.modules
    ]
    assert max(wrong) < 0.1


@pytest.mark.parametrize("widths", [(12, 12, 12, 12), (8, 16, 4), (20, 40, 10)])
def test_networks_of_one_piece_are_left_whole(widths):
    for seed in (9040, 9041):
        graph = dense(seed, widths, (nn.ReLU, nn.Tanh)[seed % 2])
        for epsilon in (None, 1e-6):
            assert len(strati.modules(graph, epsilon=epsilon).modules) == 1


def test_threads_of_a_linear_network_are_its_modules():
    graph = dense(0, (6, 7, 5), nn.Identity)
    found = strati.modules(graph, epsilon=1e-9)
    assert [m.members for m in found.modules] == [((0, k), (1, k), (2, k)) for k in range(5)]
    assert found.between == 0 and not found._warnings()


def test_the_neuron_basis_does_not_show_the_hidden_halves():
    net, x, _ = two_halves(1)
    found = strati.modules(strati.interaction_graph(strati.interaction_basis(net, x, "neuron")), epsilon=1e-8)
    assert len(found.modules) == 1


def random_graph(rng, sizes=(4, 5, 3)):
    weights = [np.maximum(rng.normal(size=(b, a)), 0) for a, b in itertools.pairwise(sizes)]
    return LayeredGraph(weights, balance=float(rng.uniform(0.5, 2)))


def brute_cost(graph, labels):
    cost, start = 0.0, 0
    for w in graph.weights:
        source, target = labels[start : start + w.shape[1]], labels[start + w.shape[1] :][: w.shape[0]]
        total = w.sum()
        for j, i in itertools.product(range(w.shape[0]), range(w.shape[1])):
            if target[j] != source[i]:
                cost += w[j, i]
            elif total > 0:
                cost += graph.balance * w[j].sum() * w[:, i].sum() / total
        start += w.shape[1]
    return cost


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 4))
def test_cost_moves_and_joins_agree_with_the_definition(seed, count):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    labels = np.unique(rng.integers(0, count, graph.nodes), return_inverse=True)[1]
    assert graph.cost(labels) == pytest.approx(brute_cost(graph, labels))
    better = graph.improve(labels)
    assert graph.cost(better) <= graph.cost(labels) + 1e-9
    assert graph.cost(graph.merge(labels)) <= graph.cost(labels) + 1e-9
    if labels.max() > 0:
        joined = np.where(labels == 1, 0, labels)
        assert graph.links(labels)[0, 1] == pytest.approx(
            brute_cost(graph, labels) - brute_cost(graph, joined)
        )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 5))
def test_in_the_end_no_single_move_and_no_join_lowers_the_cost(seed, count):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    labels = np.unique(rng.integers(0, count, graph.nodes), return_inverse=True)[1]
    settled = graph.improve(labels)
    for node, module in itertools.product(range(graph.nodes), range(int(settled.max()) + 2)):
        moved = settled.copy()
        moved[node] = module
        assert brute_cost(graph, moved) >= brute_cost(graph, settled) - 1e-8
    merged = graph.merge(labels)
    for one, two in itertools.combinations(range(int(merged.max()) + 1), 2):
        joined = np.where(merged == two, one, merged)
        assert brute_cost(graph, joined) >= brute_cost(graph, merged) - 1e-8


def test_partition_is_the_best_of_all_on_small_graphs():
    """Exhaustive check: every partition of 7 nodes into at most 3 modules."""
    hits = 0
    for seed in range(20):
        graph = random_graph(np.random.default_rng(seed), (3, 2, 2))
        keep = graph.attached
        best = min(
            brute_cost(graph, np.array(labels)) for labels in itertools.product(range(3), repeat=graph.nodes)
        )
        found = partition(graph)
        found = np.where(found < 0, 99, found)
        assert keep.size and brute_cost(graph, found) >= 0
        hits += brute_cost(graph, found) <= best + 1e-9
    assert hits >= 18  # a local search: the optimum in 18 of 20 at least


def test_number_of_modules_can_be_asked_for():
    net, x, _ = two_halves(0)
    graph = strati.interaction_graph(strati.interaction_basis(net, x))
    for number in (1, 2, 3, 5):
        found = strati.modules(graph, epsilon=1e-8, number=number)
        assert len(found.modules) == number
        assert found.payload()["modularity"]["number"] == number
    assert strati.modules(graph, epsilon=1e-8, number=1).between == 0


def test_every_direction_is_in_one_module_or_unattached():
    net, x, _ = two_halves(2)
    graph = strati.interaction_graph(strati.interaction_basis(net, x))
    found = strati.modules(graph)
    members = [m for module in found.modules for m in module.members] + list(found.unattached)
    assert len(members) == len(set(members)) == sum(layer.directions for layer in graph.basis.layers)


def test_same_seed_same_modules_and_epsilon_cuts():
    net, x, _ = two_halves(3)
    graph = strati.interaction_graph(strati.interaction_basis(net, x))
    assert strati.modules(graph, seed=4).to_json() == strati.modules(graph, seed=4).to_json()
    nothing = strati.modules(graph, epsilon=1e9)
    assert nothing.modules == () and nothing.to_dict()["warnings"][-1]["code"] == "no-edges"


def test_modules_asked_for_in_a_dense_network_are_called_chance():
    graph = dense(0, (12, 12, 12, 12))
    found = strati.modules(graph, epsilon=1e-4, number=3)
    assert len(found.modules) == 3
    assert [flag.code for flag in found._warnings()] == ["chance-modules"]
    assert found.quality == pytest.approx(found.shuffled, rel=0.4)


def test_a_balance_leaves_the_number_to_the_cost():
    graph = dense(0, (12, 12, 12, 12))
    counts = [len(strati.modules(graph, epsilon=1e-4, balance=b).modules) for b in (0.3, 1.0, 2.0)]
    assert counts == sorted(counts) and counts[0] == 1 < counts[-1]
    assert strati.modules(graph, balance=1.0).to_dict()["modularity"]["how"] == "balance"


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), rows=st.integers(2, 6), columns=st.integers(2, 6))
def test_shuffles_keep_what_they_promise(seed, rows, columns):
    rng = np.random.default_rng(seed)
    w = np.maximum(rng.normal(size=(rows, columns)) + 0.5, 0)
    assert np.allclose(np.sort(anywhere(w, rng).ravel()), np.sort(w.ravel()))
    other = among_degrees(w, rng)
    assert (other >= 0).all() and (other[:, w.sum(axis=0) == 0] == 0).all()
    if (w > 0).all():
        assert np.allclose(other.sum(axis=0), w.sum(axis=0)) and np.allclose(
            other.sum(axis=1), w.sum(axis=1), rtol=0.05
        )


def test_splits_of_random_graphs_are_rarely_believed():
    """Five deviations of ten shuffles and a margin of 1.4: none of 20 random graphs."""
    found = [separate(random_graph(np.random.default_rng(seed), (8, 10, 7))) for seed in range(20)]
    assert sum(each.labels.max() > 0 for each in found) == 0
    assert all(each.seen_below < 0.5 for each in found)
    graph = random_graph(np.random.default_rng(0))
    assert quality(graph, np.zeros(graph.nodes, dtype=np.int64)) == pytest.approx(0, abs=1e-12)


def test_bad_calls():
    net, x, _ = two_halves(0)
    graph = strati.interaction_graph(strati.interaction_basis(net, x))
    for options in (
        {"epsilon": 0.0},
        {"epsilon": -1.0},
        {"balance": 0.0},
        {"number": 0},
        {"epsilon": float("nan")},
    ):
        with pytest.raises(BadInputError):
            strati.modules(graph, **options)
    with pytest.raises(BadInputError, match="interaction_graph"):
        strati.modules("graph", epsilon=0.1)


def _all_partitions(count, labels=()):
    if len(labels) == count:
        yield np.array(labels)
        return
    for label in range(max(labels, default=-1) + 2):
        yield from _all_partitions(count, (*labels, label))


def _cost_in_words(weights, labels, balance):
    """Weight between modules, plus what modules of that size share by chance; edge by edge."""
    starts = np.cumsum([0, weights[0].shape[1], *(len(w) for w in weights)])
    cost = 0.0
    for k, w in enumerate(weights):
        before, after = labels[starts[k] : starts[k + 1]], labels[starts[k + 1] : starts[k + 2]]
        cost += sum(w[j, i] for j, i in np.ndindex(w.shape) if after[j] != before[i])
        for module in np.unique(labels) if w.sum() > 0 else ():
            cost += balance * w[:, before == module].sum() * w[after == module].sum() / w.sum()
    return cost


@pytest.mark.parametrize("seed", range(12))
def test_no_partition_of_a_tiny_graph_costs_less(seed):
    """Against every partition there is: free, and into two and three modules."""
    rng = np.random.default_rng(seed)
    sizes = [(2, 3, 2), (1, 5), (3, 3), (2, 2, 2, 1)][seed % 4]
    weights = [rng.random((b, a)) * (rng.random((b, a)) < 0.7) for a, b in itertools.pairwise(sizes)]
    weights[0][0] += 0.1
    weights = [w + 1e-3 for w in weights]  # every node attached
    balance = (0.5, 1.0, 2.0)[seed % 3]
    graph = LayeredGraph(weights, balance)
    costs: dict[int, float] = {}
    for labels in _all_partitions(sum(sizes)):
        count = int(labels.max()) + 1
        costs[count] = min(costs.get(count, np.inf), _cost_in_words(weights, labels, balance))
    free = partition(graph, seed=seed)
    assert _cost_in_words(weights, free, balance) == pytest.approx(graph.cost(free))
    assert graph.cost(free) == pytest.approx(min(costs.values()), rel=1e-9)
    for number in (2, 3):
        asked = partition(graph, number=number, seed=seed, thorough=True)
        assert np.unique(asked).size == number
        assert graph.cost(asked) == pytest.approx(costs[number], rel=1e-9)


def test_a_star_gives_as_many_modules_as_are_asked_for():
    """Its weights are what chance gives, so that an eigenvector puts all nodes on one side."""
    found = partition(LayeredGraph([np.array([[3.7], [4.0]])]), number=2)
    assert np.unique(found).size == 2


def found_in(edges, **options):
    found = strati.modules(as_graph(edges), **options)
    return found, np.concatenate([np.array(row) for row in found.labels])


@pytest.mark.parametrize(
    ("sizes", "cross", "least"), [([4] * 4, 0.2, 0.9), ([3, 7], 0.05, 0.8), ([3, 9], 0.05, 0.8)]
)
def test_modules_with_edges_between_them_are_found(sizes, cross, least):
    """Equal and unequal modules, three seeds each: all found, nearly every direction in its place."""
    for seed in range(3):
        edges, truth = planted(seed, sizes, cross)
        found, labels = found_in(edges)
        assert len(found.modules) == len(sizes), seed
        assert agreement(labels, truth) >= least


@pytest.mark.parametrize("sigma", [1.0, 3.0])
def test_heavy_tailed_strengths_alone_are_no_modules(sigma):
    """Lognormal strengths on all edges: cut at 1e-3 of the strongest, pieces fall off, as from any such graph."""
    fell_apart = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        edges = [rng.lognormal(0, sigma, (6, 6)) for _ in range(3)]
        found, _ = found_in(edges)
        assert len(found.modules) == 1, seed
        strong = LayeredGraph([np.where(e > found.epsilon, 1.0, 0.0) for e in edges])
        fell_apart += np.unique(components(strong)[strong.attached]).size > 1
    assert (fell_apart > 0) == (sigma == 3.0)


def test_one_module_says_what_would_have_been_seen():
    """Halves with a smaller share between them than stated are found, with a much larger one they are not."""
    rng = np.random.default_rng(0)
    whole, _ = found_in([rng.lognormal(0, 1, (16, 16)) for _ in range(3)])
    assert len(whole.modules) == 1 and 0.3 < whole.seen_below < 0.5
    assert whole.payload()["modularity"]["seen_below"] == whole.seen_below
    halves = np.repeat([0, 1], 8)
    inside = halves[:, None] == halves[None, :]
    seen = []
    for share in (whole.seen_below - 0.08, 0.495):  # of the interaction, as the cost counts it
        weights = [
            np.where(inside, 2 * (1 - share), 2 * share) * rng.uniform(0.5, 1.5, (16, 16)) for _ in range(3)
        ]
        seen.append(np.unique(separate(LayeredGraph(weights)).labels).size)
    assert seen == [2, 1]
    tiny, _ = found_in([rng.lognormal(0, 1, (2, 2))])
    assert tiny.seen_below == 0 and "too small to show any split" in repr(tiny)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_excess_is_that_of_a_permutation_test(seed):
    """Mean zero and variance one over random relabellings of one pair of layers, as far as 200 of them tell."""
    rng = np.random.default_rng(seed)
    graph = LayeredGraph([rng.random((9, 8))])
    labels = np.concatenate([np.arange(8) % 2, np.arange(9) % 2])
    drawn = [
        excess(graph, np.concatenate([rng.permutation(labels[:8]), rng.permutation(labels[8:])]))
        for _ in range(200)
    ]
    assert abs(np.mean(drawn)) < 0.35 and 0.6 < np.std(drawn) < 1.6
