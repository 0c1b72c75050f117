"""Constrained losses of eqs. 31 and 32, surfaces between modules, and the parameters of modules that were found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import strati
import strati_reproductions
from strati.core.errors import BadInputError, UnsupportedError


def halves(link: float = 0.0, seed: int = 0) -> tuple[nn.Sequential, torch.Tensor]:
    """Two modules 2-3-1 side by side in one chain; ``link`` lets the second read a hidden neuron of the first."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        for layer, (rows, columns) in ((net[0], (3, 2)), (net[2], (1, 3))):
            layer.weight[:rows, columns:] = 0.0
            layer.weight[rows:, :columns] = 0.0
        net[2].weight[1, 0] = link
        net[0].bias[:] = 1.0
    return net, torch.randn(80, 4, dtype=torch.float64)


def test_the_loss_is_the_formula() -> None:
    net, x = halves(0.3)
    weights = (0.5, 2.0)
    loss = strati_reproductions.constrained_loss(
        net, x, layers="0", outputs=[0], nodes=["1:0", "1:4"], weights=weights
    )
    moved = loss.theta + 0.1 * torch.randn(
        loss.theta.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    other = nn.Linear(4, 6).double()
    other.weight.data, other.bias.data = moved[:24].reshape(6, 4), moved[24:]
    hidden = [torch.relu(layer(x)) for layer in (other, net[0])]
    outputs = [net[2](h)[:, 0] for h in hidden]
    expected = (outputs[0] - outputs[1]).square().mean()
    for node, w in zip((0, 4), weights, strict=True):
        expected = expected + w**2 * (hidden[0][:, node] - hidden[1][:, node]).square().mean()
    assert float(loss(moved)) == pytest.approx(float(expected.detach()), rel=1e-12)
    assert float(loss(loss.theta)) == 0.0


def test_more_is_held_in_place_by_more_nodes_and_weights_of_zero_hold_nothing() -> None:
    net, x = halves(0.3)
    free = strati_reproductions.constrained_loss(net, x, layers="0", outputs=[0])
    one = strati_reproductions.constrained_loss(net, x, layers="0", outputs=[0], nodes=["1:4"])
    every = strati_reproductions.constrained_loss(net, x, layers="0", outputs=[0], nodes=["1"])
    nothing = strati_reproductions.constrained_loss(
        net, x, layers="0", outputs=[0], nodes=["1:4"], weights=[0.0]
    )
    assert free.rank() < one.rank() < every.rank()
    assert nothing.rank() == free.rank() == one.without_nodes().rank()


def test_the_rank_is_that_of_the_exact_hessian() -> None:
    from strati.landscape.objective import exact_hessian

    net, x = halves(0.3, seed=3)
    loss = strati_reproductions.constrained_loss(
        net, x[:, :], layers="0", outputs=[1], nodes=["1:0"], weights=[0.1]
    )
    values = np.linalg.eigvalsh(exact_hessian(loss, loss.theta).numpy())
    assert loss.rank() == int((values > 1e-14 * values.max()).sum())
    curvature = 2 / len(x) * loss.singular_values() ** 2
    assert np.allclose(np.sort(curvature)[::-1], np.sort(values)[::-1][: len(curvature)], atol=1e-12)


def test_the_constrained_loss_goes_into_the_sampler() -> None:
    """One weight read at full strength: lambda = 1/2."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    x = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    loss = strati_reproductions.constrained_loss(net, x, layers="0", outputs=(), nodes=["0:0"])
    found = strati.learning_coefficient(loss, loss.theta, seed=0)
    assert found.estimate == pytest.approx(0.5, abs=5 * found.stderr + 0.02)


def found_modules(link: float, epsilon: float = 1e-9) -> strati.Modules:
    net, _ = halves(link)
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(12, 2)), rng.normal(size=(12, 2))
    x = np.array([[*u, *v] for u in a for v in b])  # a product set: no edges by chance between the halves
    basis = strati.interaction_basis(net, x, "neuron")
    return strati.modules(strati.interaction_graph(basis), epsilon=epsilon, number=2)


def test_modules_that_nothing_joins_have_no_surface_and_keep_all_their_freedom() -> None:
    found = found_modules(0.0)
    assert {len(m.members) for m in found.modules} == {6}
    for number in (0, 1):
        assert strati_reproductions.interaction_surface(found, number).nodes == ()
        own = strati_reproductions.module_parameters(found, number)
        assert (own.parameters, own.effective) == (9, own.unconstrained)


def test_the_surface_is_the_neuron_that_is_read_and_its_weight_the_link() -> None:
    found = found_modules(0.05)
    reader = found.labels[2][1]
    surface = strati_reproductions.interaction_surface(found, 1 - reader, reader)
    assert [(node.layer, node.direction) for node in surface.nodes] == [(1, 0)]
    assert surface.nodes[0].weight == pytest.approx(0.05, rel=1e-9)
    assert strati_reproductions.interaction_surface(found, reader, 1 - reader).nodes == ()
    assert surface.size(1e-4) == pytest.approx(1 - 2 * np.log(0.05) / np.log(1e-4))
    assert surface.size(0.05**2) == pytest.approx(0.0, abs=1e-12)
    own = strati_reproductions.module_parameters(found, 1 - reader)
    assert own.effective > own.unconstrained
    weighted = strati_reproductions.module_parameters(found, 1 - reader, weighted=True)
    assert weighted.loss.weights[-1] == pytest.approx(0.05, rel=1e-9)


def test_wrong_questions_are_refused() -> None:
    net, x = halves()
    found = found_modules(0.0)
    with pytest.raises(BadInputError, match="module 7: there is none"):
        strati_reproductions.interaction_surface(found, 7)
    with pytest.raises(BadInputError, match="no such node"):
        strati_reproductions.constrained_loss(net, x, nodes=["9:0"])
    with pytest.raises(BadInputError, match="outputs 0 to 5"):
        strati_reproductions.constrained_loss(net, x, nodes=["1:6"])
    with pytest.raises(BadInputError, match="outputs 0 to 1"):
        strati_reproductions.constrained_loss(net, x, outputs=[2])
    with pytest.raises(BadInputError, match="one for each"):
        strati_reproductions.constrained_loss(net, x, nodes=["1:0"], weights=[1.0, 2.0])
    with pytest.raises(BadInputError, match="loss scale between 0 and 1"):
        strati_reproductions.interaction_surface(found, 0).size(2.0)
    with pytest.raises(BadInputError, match=r"strati\.modules first"):
        strati_reproductions.interaction_surface("modules", 0)  # type: ignore[arg-type]


def test_modules_of_other_networks_are_named_by_layers_instead() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + torch.tanh(block(x))
            return x

    torch.manual_seed(0)
    net = Residual().double()
    x = torch.randn(40, 3, dtype=torch.float64)
    basis = strati.interaction_basis(net, x, "neuron", sites=["blocks.0", "blocks.1"])
    found = strati.modules(strati.interaction_graph(basis))
    with pytest.raises(UnsupportedError, match="constrained_loss"):
        strati_reproductions.module_parameters(found, 0)
    assert strati_reproductions.constrained_loss(net, x, layers="blocks.0", nodes=["blocks.0:1"]).rank() == 12
