"""The flat view of a module and its losses, against direct computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from strati.core.errors import BadInputError, UnsupportedError
from strati.landscape.objective import (
    FlatModel,
    behavioural_loss,
    collect,
    exact_hessian,
    gauss_newton_matrix,
    objective,
)


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def inputs(rows: int = 7) -> torch.Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_flat_view_equals_the_module_and_leaves_it_alone(net):
    before = [p.clone() for p in net.parameters()]
    flat = FlatModel(net)
    assert flat.size == sum(p.numel() for p in net.parameters())
    assert torch.equal(flat(flat.theta, inputs()), net(inputs()))
    flat(flat.theta + 1, inputs())
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_layers_restrict_what_varies(net):
    flat = FlatModel(net, layers=["2"])
    assert flat.names == ("2.weight", "2.bias") and flat.size == 10
    with pytest.raises(BadInputError, match="matches no layer"):
        FlatModel(net, layers=["3"])


def test_tied_parameters_count_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2, bias=False)
            self.b = nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    model = Tied()
    flat = FlatModel(model)
    assert flat.size == 4
    x = torch.ones(1, 2)
    doubled = flat(2 * flat.theta, x)
    assert torch.allclose(doubled, 4 * model(x))


def test_dropout_is_switched_off():
    model = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5)).train()
    flat = FlatModel(model)
    x = torch.ones(2, 3)
    assert torch.equal(flat(flat.theta, x), flat(flat.theta, x)) and model.training


@torch.no_grad()
def test_named_losses_against_torch(net):
    x, y = inputs(), torch.tensor([0, 1, 1, 0, 1, 0, 0])
    loss = objective(net, "cross_entropy", (x, y))
    assert float(loss(loss.flat.theta)) == pytest.approx(float(functional.cross_entropy(net(x), y)))
    target = torch.zeros(7, 2)
    squares = objective(net, "mse", (x, target))
    assert float(squares(squares.flat.theta)) == pytest.approx(float((net(x) ** 2).sum(1).mean()))
    moved = loss.flat.theta + 0.1
    kl = behavioural_loss(net, x, kind="kl")
    p, q = net(x).log_softmax(-1), loss.flat(moved, x).log_softmax(-1)
    assert float(kl(moved)) == pytest.approx(
        float(functional.kl_div(q, p, log_target=True, reduction="batchmean"))
    )
    assert float(kl(kl.flat.theta)) == 0.0


@pytest.mark.parametrize("kind", ["mse", "kl"])
def test_gauss_newton_is_the_hessian_at_the_minimum(net, kind):
    loss = behavioural_loss(net, inputs(), kind=kind)
    exact = exact_hessian(loss, loss.flat.theta)
    assert torch.allclose(gauss_newton_matrix(loss.flat, inputs(), kind=kind), exact, atol=1e-10)
    with pytest.raises(UnsupportedError):
        gauss_newton_matrix(loss.flat, inputs(), kind="hinge")


def test_hessian_of_a_polynomial():
    matrix = exact_hessian(lambda w: w[0] ** 2 * w[1] + w[2] ** 3, torch.tensor([1.0, 2.0, 3.0]))
    assert matrix.tolist() == [[4.0, 2.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 18.0]]


def test_data_in_every_form(net):
    x, y = inputs(8), torch.arange(8) % 2
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=3)
    for data in ((x, y), (x.numpy(), y.numpy()), loader):
        loss = objective(net, "cross_entropy", data)
        assert loss.count == 8
        assert float(loss(loss.flat.theta)) == pytest.approx(
            float(functional.cross_entropy(net(x), y).detach())
        )
    assert collect(x)[1] is None


@pytest.mark.parametrize(
    ("loss", "data", "message"),
    [
        ("mse", torch.ones(4, 3), "no targets"),
        ("mse", (torch.ones(4, 5), torch.ones(4, 2)), "do not fit the model"),
        ("mse", (torch.ones(4, 3), torch.ones(3, 2)), "one target for each input"),
        ("mse", (torch.full((4, 3), np.nan), torch.ones(4, 2)), "not finite"),
        ("mse", (torch.ones(0, 3), torch.ones(0, 2)), "at least one row"),
        ("hinge", torch.ones(4, 3), "no such loss"),
        (lambda out, y: (out.sum() * 0 + 1) / 0, (torch.ones(4, 3), torch.ones(4, 2)), "not finite"),
        (lambda out, y: out, (torch.ones(4, 3), torch.ones(4, 2)), "scalar"),
    ],
)
def test_bad_input_is_one_clear_line(net, loss, data, message):
    with pytest.raises(BadInputError, match=message) as caught:
        objective(net.float(), loss, data)
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_finite_are_refused(net):
    net[0].weight.data[0, 0] = float("nan")
    with pytest.raises(BadInputError, match="not finite"):
        behavioural_loss(net, inputs())
