"""Edges against exact Jacobians, their precision, and how sparsity is measured."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import strati
from strati.core.errors import BadInputError
from strati.landscape.basis.result import needed
from strati.landscape.mlp import basis_moments as edges_module
from strati.landscape.mlp.basis_moments import masked_edges


def mlp(*widths, seed=0, activation=nn.ReLU):
    torch.manual_seed(seed)
    layers = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1]).double()


def normal(n, d, *, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("kind", ["interaction", "local", "pca", "neuron"])
def test_edges_by_exact_jacobians(kind, activation):
    net, x = mlp(4, 6, 5, 3, activation=activation), normal(30, 4)
    basis = strati.interaction_basis(net, x, kind)
    graph = strati.interaction_graph(basis)
    f = x
    for site, parts in enumerate((net[0:2], net[2:4], net[4:])):
        J = torch.func.vmap(torch.func.jacrev(parts))(f).detach().numpy()
        hat = basis.layers[site + 1].matrix @ J @ basis.layers[site].inverse
        assert np.allclose(graph.edges[site], (hat**2).mean(axis=0), rtol=1e-8, atol=1e-10)
        f = parts(f).detach()


def test_what_leaves_a_direction_of_the_local_basis_sums_to_one():
    basis = strati.interaction_basis(mlp(8, 12, 9, 4), normal(200, 8), "local")
    for edges in strati.interaction_graph(basis).edges:
        assert np.allclose(edges.sum(axis=0), 1.0)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 40), d=st.integers(1, 8))
def test_masked_edges_property(seed, n, d):
    rng = np.random.default_rng(seed)
    C, W, r = (
        rng.normal(size=(3, d)),
        rng.normal(size=(d, 4)),
        rng.normal(size=(n, d)) * rng.integers(0, 2, (n, d)),
    )
    E, error = masked_edges(C, W, r.T @ r / n)
    assert error == 0
    assert np.allclose(E, np.mean([(C * row @ W) ** 2 for row in r], axis=0), rtol=1e-8, atol=1e-10)


def test_single_precision_states_its_error(monkeypatch):
    rng = np.random.default_rng(0)
    C, W = rng.normal(size=(40, 50)), rng.normal(size=(50, 30))
    r = rng.integers(0, 2, (200, 50)) * 1.0
    exact, _ = masked_edges(C, W, r.T @ r / 200)
    monkeypatch.setattr(edges_module, "DOUBLE_WORK", 0)
    single, error = masked_edges(C, W, r.T @ r / 200)
    truth = np.linalg.norm(single - exact) / np.linalg.norm(exact)
    assert 0 < error < 1e-5
    assert truth < 3 * error


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def test_edges_of_a_residual_network_by_exact_jacobians():
    torch.manual_seed(0)
    net, x = nn.Sequential(Block(), Block(), nn.Linear(4, 2)).double(), normal(90, 4)
    basis = strati.interaction_basis(net, x)
    graph, f = strati.interaction_graph(basis), x
    assert graph.errors == (0.0, 0.0, 0.0)
    for site in range(3):
        J = torch.func.vmap(torch.func.jacrev(net[site]))(f).detach().numpy()
        hat = basis.layers[site + 1].matrix @ J @ basis.layers[site].inverse
        assert np.allclose(graph.edges[site], (hat**2).mean(axis=0), rtol=1e-8, atol=1e-10)
        f = net[site](f).detach()


def test_positions_are_summed_without_bias():
    """Edges of a position-mixing layer: the mean over seeds approaches the exact sum over positions."""

    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.mix = nn.Linear(3, 3), nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

        def forward(self, x):
            return x + torch.tanh(self.mix @ self.inner(x))

    torch.manual_seed(0)
    net = nn.Sequential(Mix(), Mix()).double()
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(300, 4, 3)))
    basis = strati.interaction_basis(net, x, "pca")
    graph = strati.interaction_graph(basis)
    J = torch.func.vmap(torch.func.jacrev(net[0]))(x).detach().numpy()  # (n, t', j, t, i)
    hat = np.einsum(
        "ja,nsati,ik->nsjtk", basis.layers[1].matrix, J.transpose(0, 1, 2, 3, 4), basis.layers[0].inverse
    )
    exact = (hat**2).sum(axis=(1, 3)).mean(axis=0)
    found = np.linalg.norm(graph.edges[0] - exact) / np.linalg.norm(exact)
    assert found < 4 * graph.errors[0] < 0.5


def test_sparsity_measures():
    assert needed(np.array([1.0, 1.0, 1.0, 1.0]), 0.5) == 2
    assert needed(np.zeros(3), 0.9) == 0
    linear = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    graph = strati.interaction_graph(strati.interaction_basis(linear, normal(100, 6)))
    table = graph.sparsity()
    assert np.allclose(table["participation"], 1 / 6)
    assert np.allclose(table["for_99%"], 1 / 6)
    dense = strati.interaction_graph(strati.interaction_basis(linear, normal(100, 6), "neuron")).sparsity()
    assert (dense["participation"] > table["participation"]).all()


def test_normalised_edges_do_not_see_the_scale_of_neurons():
    net, x = mlp(4, 6, 3), normal(100, 4)
    other = mlp(4, 6, 3)
    scale = torch.linspace(0.1, 10, 6, dtype=torch.float64)
    with torch.no_grad():
        other[0].weight *= scale[:, None]
        other[0].bias *= scale
        other[2].weight /= scale
    one, two = (strati.interaction_graph(strati.interaction_basis(m, x, "neuron")) for m in (net, other))
    assert not np.allclose(one.edges[0], two.edges[0])
    for site in (0, 1):
        assert np.allclose(one.normalised(site), two.normalised(site))


def test_json_lists_edges_strongest_first(monkeypatch):
    from strati.landscape.basis import graph as graph_module

    graph = strati.interaction_graph(strati.interaction_basis(mlp(4, 6, 3), normal(50, 4)))
    plain = graph.to_dict()
    assert plain["schema"] == "strati.interaction-graph/1"
    strengths = [edge["strength"] for edge in plain["edges"]]
    assert strengths == sorted(strengths, reverse=True)
    for edge in plain["edges"]:
        assert graph.edges[edge["layer"]][edge["target"], edge["source"]] == edge["strength"]
    monkeypatch.setattr(graph_module, "EDGES_SHOWN", 5)
    cut = graph.to_dict()
    assert len(cut["edges"]) == 5 and cut["edges_total"] == sum(e.size for e in graph.edges)
    assert any(flag["code"] == "edges-cut" for flag in cut["warnings"])


def test_a_graph_needs_a_basis():
    with pytest.raises(BadInputError, match="interaction_basis"):
        strati.interaction_graph("basis")
