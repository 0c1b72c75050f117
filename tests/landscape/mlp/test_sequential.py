"""Reading modules as chains: by their computation, not by their class."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from strati.core.errors import BadInputError, UnsupportedError
from strati.landscape.mlp.sequential import RELU, as_chain, leaky


class Written(nn.Module):
    """A forward of its own, with functions instead of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 5), nn.Linear(5, 4, bias=False), nn.Linear(4, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.one(torch.flatten(x, 1)))
        x = self.drop(functional.leaky_relu(self.two(x), 0.2))
        return torch.tanh(self.three(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.one(x)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) if x.sum() > 0 else x


def test_a_chain_computes_what_the_module_computes() -> None:
    model = Written().eval()
    x = torch.randn(7, 2, 3)
    chain = as_chain(model)
    assert [s.name for s in chain.stages] == ["one", "two", "three"]
    assert [s.activation.name for s in chain.stages] == ["relu", "leaky_relu", "tanh"]
    assert chain.widths == (6, 5, 4, 2)
    assert chain.parameters == sum(p.numel() for p in model.parameters())
    activations, preactivations = chain.forward(x)
    assert torch.allclose(activations[-1], model(x), atol=1e-6)
    assert len(preactivations) == 3
    assert torch.equal(activations[0], x.reshape(7, 6))


@pytest.mark.parametrize(
    "kind", [nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, nn.ELU, nn.Softplus]
)
def test_derivatives_are_those_of_autograd(kind: type[nn.Module]) -> None:
    stage = as_chain(nn.Sequential(nn.Linear(2, 3), kind())).stages[0]
    p = torch.randn(20, 3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(kind()(p).sum(), p)
    assert torch.allclose(stage.activation.derivative(p), slope)


def test_slopes_at_a_kink_are_those_of_torch() -> None:
    zero = torch.zeros(1, requires_grad=True)
    for activation in (RELU, leaky(0.3)):
        (slope,) = torch.autograd.grad(activation(zero).sum(), zero)
        assert float(activation.derivative(zero)) == pytest.approx(float(slope))


def test_nested_lone_and_inplace_modules() -> None:
    nested = nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), nn.ReLU(inplace=True), nn.Linear(3, 2)
    )
    assert [s.name for s in as_chain(nested).stages] == ["0.1", "2"]
    assert as_chain(nn.Linear(3, 2)).widths == (3, 2)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Residual(), "branches or joins"),
        (Branching(), "cannot be read"),
        (nn.Sequential(nn.Conv2d(1, 1, 3)), "Conv2d"),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "BatchNorm1d"),
        (nn.Sequential(nn.ReLU(), nn.Linear(3, 3)), "before the first linear"),
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Tanh()), "two nonlinearities"),
        (nn.Sequential(*[nn.Linear(3, 3)] * 2), "used twice"),
    ],
)
def test_what_is_not_a_chain_is_refused_by_name(model: nn.Module, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        as_chain(model)


def test_no_linear_layer_and_wrong_width() -> None:
    with pytest.raises(BadInputError, match="no linear layer"):
        as_chain(nn.Sequential(nn.Flatten()))
    with pytest.raises(BadInputError, match="takes 3"):
        as_chain(nn.Linear(3, 2)).rows(torch.zeros(5, 4))
