"""Modules: known structure must come apart, the cost must be what it says, chance must be named."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import strati
from strati.errors import BadInputError
from strati.landscape.partition import LayeredGraph, partition


def two_halves(seed, widths=(3, 5, 4, 2), *, mix=True, condition=30.0):
    """Two disjoint ReLU halves; every layer's activations mixed by a random invertible map."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    layers: list[nn.Module] = []
    undo = np.eye(2 * widths[0])
    start = None
    for k, (a, b) in enumerate(itertools.pairwise(widths)):
        weight = np.zeros((2 * b, 2 * a))
        weight[:b, :a], weight[b:, a:] = rng.normal(size=(b, a)), rng.normal(size=(b, a))
        R = mixing(rng, 2 * a, condition) if mix else np.eye(2 * a)
        if k == 0:
            start = R
        else:
            layers.append(linear(R))  # f -> R f after the nonlinearity ...
        undo = np.linalg.inv(R)
        layers.append(linear(weight @ undo, rng.normal(size=2 * b) * 0.3))  # ... and W -> W R^-1
        if k + 2 < len(widths):
            layers.append(nn.ReLU())
    first, second = rng.normal(size=(25, widths[0])), rng.normal(size=(25, widths[0]))
    x = np.concatenate([np.repeat(first, 25, axis=0), np.tile(second, (25, 1))], axis=1)
    return nn.Sequential(*layers), x @ start.T, start


def mixing(rng, d, condition):
    left, right = (np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(2))
    return left * np.geomspace(1, 1 / condition, d) @ right


def linear(weight, bias=None):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).double()
    layer.weight.data = torch.from_numpy(weight)
    if bias is not None:
        layer.bias.data = torch.from_numpy(bias)
    return layer


@pytest.mark.parametrize("kind", ["interaction", "local"])
@pytest.mark.parametrize("seed", range(6))
def test_two_hidden_halves_come_apart(seed, kind):
    net, x, start = two_halves(seed)
    basis = strati.interaction_basis(net, x, kind)
    found = strati.modules(strati.interaction_graph(basis), epsilon=1e-8)
    # at the input the truth is known: which half a direction reads is seen after undoing the mixing
    pure = basis.layers[0].matrix @ start
    half = (pure[:, 3:] ** 2).sum(axis=1) > (pure[:, :3] ** 2).sum(axis=1)
    of_input = np.array(found.labels[0])
    assert found.between == 0
    for module in found.modules:
        assert len({bool(half[d]) for layer, d in module.members if layer == 0}) <= 1
    halves_of = [
        {bool(h) for h, label in zip(half, of_input, strict=True) if label == m.id} for m in found.modules
    ]
    assert {h for s in halves_of for h in s} == {False, True}
    assert len(found.modules) == 2
    assert found.quality == pytest.approx(0.5, abs=0.1)
    assert found.shuffled < 0.75 * found.quality
    assert not found._warnings()


def test_the_neuron_basis_does_not_show_the_hidden_halves():
    net, x, _ = two_halves(1)
    found = strati.modules(strati.interaction_graph(strati.interaction_basis(net, x, "neuron")), epsilon=1e-8)
    assert found.between > 0 or len(found.modules) == 1


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


def test_a_dense_network_is_called_chance():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12)
    ).double()
    x = torch.randn(400, 12, dtype=torch.float64)
    found = strati.modules(strati.interaction_graph(strati.interaction_basis(net, x, "neuron")), epsilon=1e-4)
    assert len(found.modules) == 1 or any(flag.code == "chance-modules" for flag in found._warnings())


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
        strati.modules("graph", 0.1)
