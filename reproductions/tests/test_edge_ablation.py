"""Ablation curves of edges between two layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import strati
from strati.core.errors import BadInputError
from strati_reproductions.degeneracy.edge_ablation import edge_ablation_curve


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3)).double()
    x = torch.randn(200, 6, dtype=torch.float64)
    return net, x, net(x).argmax(dim=1).numpy()


@pytest.mark.parametrize("kind", ["interaction", "pca", "neuron"])
def test_edges_kept_and_dropped(network, kind):
    net, x, labels = network
    graph = strati.interaction_graph(strati.interaction_basis(net, x, kind))
    for site in range(3):
        points = edge_ablation_curve(graph, site, labels=labels)
        assert points[-1].kept == graph.edges[site].size
        assert points[-1].loss < 1e-12 and points[-1].accuracy == 1.0
        assert points[0].kept == 0 and points[0].loss > 0.5
    with pytest.raises(BadInputError):
        edge_ablation_curve(graph, 3)


def test_edges_of_a_network_that_is_no_chain(network):
    _, x, _ = network

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    torch.manual_seed(3)
    graph = strati.interaction_graph(
        strati.interaction_basis(nn.Sequential(Block(), Block(), nn.Linear(6, 2)).double(), x)
    )
    points = edge_ablation_curve(graph, 0)
    assert points[-1].loss < 1e-12 < points[0].loss
    # one edge to each direction is most of a residual stream: far fewer than all are needed
    assert min(p.kept for p in points if p.loss < 0.1) <= graph.edges[0].size // 2


def test_edges_of_a_linear_network_are_its_diagonal():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double()
    graph = strati.interaction_graph(strati.interaction_basis(net, torch.randn(300, 6, dtype=torch.float64)))
    losses = {p.kept: p.loss for p in edge_ablation_curve(graph, 0)}
    assert losses[4] < 1e-12 < losses[3]
