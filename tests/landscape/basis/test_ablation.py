"""Ablation curves and the comparison of bases, and their pictures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import strati
from strati.core.errors import BadInputError
from strati.landscape.basis.ablation import ablation_curve, compare_bases


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3)).double()
    x = torch.randn(200, 6, dtype=torch.float64)
    return net, x, net(x).argmax(dim=1).numpy()


@pytest.mark.parametrize("kind", ["interaction", "local", "pca", "neuron"])
@pytest.mark.parametrize("centre", [True, False])
def test_ends_of_the_curve(network, kind, centre):
    net, x, labels = network
    basis = strati.interaction_basis(net, x, kind, centre=centre)
    for layer in range(3):
        points = ablation_curve(basis, layer, labels=labels)
        assert points[-1].kept == basis.layers[layer].directions
        assert points[-1].loss < 1e-12 and points[-1].accuracy == 1.0
        assert points[0].kept == 0 and points[0].loss > 0.5  # every datum at the mean: no variance is left


def test_loss_of_a_linear_network_is_the_dropped_eigenvalues():
    """Keeping k directions of a linear map loses exactly the sum of the other eigenvalues."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double()
    basis = strati.interaction_basis(net, torch.randn(300, 6, dtype=torch.float64))
    values = basis.layers[1].eigenvalues
    for point in ablation_curve(basis, 1):
        assert point.loss == pytest.approx(values[point.kept :].sum() / values.sum(), abs=1e-12)


def test_no_basis_beats_the_interaction_basis_on_a_linear_network():
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(10, 12), nn.Linear(12, 5)).double()
    found = compare_bases(net, torch.randn(300, 10, dtype=torch.float64) * torch.linspace(1, 9, 10), layer=0)
    best = {p.kept: p.loss for p in found.ablation if p.kind == "interaction"}
    for point in found.ablation:
        if point.kept in best:
            assert best[point.kept] <= point.loss + 1e-9
    needed = found.needed(0.95)
    assert needed["interaction"] == min(v for v in needed.values() if v is not None)


def test_labels_that_are_not_classes_give_no_accuracy(network):
    net, x, _ = network
    basis = strati.interaction_basis(net, x)
    assert ablation_curve(basis, 1, labels=np.ones(200))[0].accuracy is None
    with pytest.raises(BadInputError):
        ablation_curve(basis, 3)


def test_pictures(network, tmp_path):
    from strati.report.plots.landscape import plot_ablation, plot_strengths

    net, x, labels = network
    found = compare_bases(net, x, labels=labels)
    graph = found.graphs[0]
    for number, figure in enumerate(
        [
            graph.basis.plot(),
            graph.plot(),
            strati.modules(graph).plot(),
            plot_strengths(found.graphs),
            plot_ablation(found.ablation),
        ]
    ):
        figure.savefig(tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 3000


def test_results_show_themselves(network):
    net, x, _ = network
    graph = strati.interaction_graph(strati.interaction_basis(net, x))
    results = {"interaction-basis": graph.basis, "interaction-graph": graph, "basis": strati.modules(graph)}
    for verb, result in (results | {"sparsify": strati.sparsify(net, x)}).items():
        assert "<table" in result._repr_html_()
        assert result.to_dict()["schema"] == f"strati.{verb}/1"
