"""Networks that are no chains: skips, convolutions, norms and attention against the exact rank of all parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import strati
from strati.landscape.counts.symmetries import Symmetries


class Residual(nn.Module):
    def __init__(self, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.one = nn.ModuleList(nn.Linear(4, 6) for _ in range(2))
        self.two = nn.ModuleList(nn.Linear(6, 4) for _ in range(2))
        self.out, self.act = nn.Linear(4, 2), act()

    def forward(self, x: Tensor) -> Tensor:
        for one, two in zip(self.one, self.two, strict=True):
            x = x + two(self.act(one(x)))
        return self.out(x)


class Attention(nn.Module):
    def __init__(
        self, *, heads: int = 2, norm: bool = False, bias: bool = True, rotate: bool = False
    ) -> None:
        super().__init__()
        self.num_heads, self.rotate = heads, rotate
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4, bias=bias) for _ in range(4))
        self.norm = nn.LayerNorm(4) if norm else nn.Identity()
        self.head = nn.Linear(4, 2)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def turn(self, x: Tensor) -> Tensor:
        """Rotary positions: the two halves of a head turn with the position."""
        if not self.rotate:
            return x
        angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.turn(self.split(self.q(y))), self.turn(self.split(self.k(y))), self.split(self.v(y))
        pattern = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.head((x + self.o((pattern @ v).transpose(1, 2).flatten(2))).mean(1))


class Convolutional(nn.Module):
    def __init__(self, groups: int = 1, bias: bool = False) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(2, 4, 3, padding=1, groups=groups, bias=bias), nn.BatchNorm2d(4)
        self.two, self.out = nn.Conv2d(4, 3, 3, stride=2), nn.Linear(3, 2)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)
            self.norm.weight.uniform_(0.5, 1.5)
            self.norm.bias.uniform_(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.two(torch.relu(self.norm(self.one(x))))).amax((2, 3)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(3, 5), nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def batch_norm_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, dropout=0.0)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(16, 2))


CASES = {
    # name: (network, shape of a datum, share of the free directions found at least)
    "residual": (Residual, (4,), 1.0),
    "residual gelu": (lambda: Residual(nn.GELU), (4,), 1.0),
    "attention": (Attention, (5, 4), 1.0),
    "one head": (lambda: Attention(heads=1), (5, 4), 1.0),
    "no bias": (lambda: Attention(bias=False), (5, 4), 1.0),
    "norm": (lambda: Attention(norm=True), (5, 4), 1.0),
    "rotary": (lambda: Attention(rotate=True, bias=False), (5, 4), 1.0),
    "gated": (Gated, (3,), 1.0),
    "batch norm": (batch_norm_mlp, (4,), 1.0),
    "convolution": (Convolutional, (2, 6, 6), 0.5),
    "grouped, bias": (lambda: Convolutional(2, True), (2, 6, 6), 0.5),
    "encoder": (encoder, (4, 4), 0.7),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("case", list(CASES))
def test_structure_is_a_bound_and_finds_what_algebra_knows(case: str) -> None:
    make, shape, share = CASES[case]
    torch.manual_seed(1)
    model = make().double().eval()
    x = torch.randn(120, *shape, dtype=torch.float64)
    result = strati.degeneracy(model, x)
    assert result.method == "exact"
    assert share * result.free_at_most <= result.structural_free <= result.free <= result.free_at_most
    listed = sum(layer.free for layer in result.layers) + result.free_elsewhere + result.free_from_few_data
    assert listed == result.free
    alone = strati.degeneracy(model, x, exact=False)
    assert alone.free == result.structural_free and alone.method == "structural"
    assert "in small networks this finds" in alone.warnings[0].text  # how loose the bound is


@pytest.mark.parametrize("seed", range(8))
def test_biases_of_keys_are_free_whatever_rounding_leaves_of_their_gradients(seed: int) -> None:
    """They add the same to every score of a query, which softmax does not see.

    So N - rank is that of the Jacobian without their columns, whose rank numpy tells: its singular values end about
    twelve orders of magnitude above rounding.
    """
    torch.manual_seed(seed)
    model = Attention().double().eval()
    x = torch.randn(60, 5, 4, dtype=torch.float64)
    named = dict(model.named_parameters())
    jacobians = jacrev(lambda p: functional_call(model, p, (x,)).flatten())(
        {k: p.detach() for k, p in named.items()}
    )
    rest = torch.cat([j.flatten(1) for k, j in jacobians.items() if k != "k.bias"], dim=1)
    size = sum(p.numel() for p in named.values())
    result = strati.degeneracy(model, x)
    free = size - int(np.linalg.matrix_rank(rest.numpy(), rtol=1e-9))
    assert (result.method, result.free, result.structural_free) == ("exact", free, free)


@pytest.mark.parametrize("seed", range(6))
def test_no_symmetry_is_believed_that_does_not_hold(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong guesses everywhere: smooth activations, a norm of the keys, shared layers; never above the rank."""
    torch.manual_seed(seed)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(3, 3) for _ in range(4))
            self.again = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            k = nn.functional.normalize(self.k(x), dim=-1)
            y = torch.tanh(self.o(torch.softmax(self.q(x) * k, -1) * self.v(x).sigmoid()))
            return self.again(self.again(y)) + y

    model = Odd().double()
    x = torch.randn(80, 3, dtype=torch.float64)
    result = strati.degeneracy(model, x)
    assert result.structural_free <= result.free_at_most
    if seed == 0:  # a count that believed everything would be above
        monkeypatch.setattr("strati.landscape.counts.symmetries._Trial.holds", lambda *_: True)
        assert strati.degeneracy(model, x, exact=False).free > result.free_at_most


def test_convolutions_are_linear_layers_on_patches() -> None:
    """By hand: three channels of which one repeats another, a kernel that sees 2 x 2 patches of a constant border."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 2, bias=False), nn.Flatten(), nn.Linear(4, 2)).double()
    x = torch.randn(50, 3, 2, 2, dtype=torch.float64)
    x[:, 2] = 2 * x[:, 0]
    first, last = strati.degeneracy(model, x, exact=False).layers
    assert (first.inputs, first.outputs, first.parameters) == (12, 4, 48)
    assert (first.activation_rank, first.jacobian_rank) == (8, 2)
    assert first.free_from_activations == 4 * (12 - 8)
    assert (last.inputs, last.outputs) == (4, 2)
    grouped = nn.Sequential(nn.Conv1d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(8, 1)).double()
    layer = strati.degeneracy(grouped, torch.randn(60, 4, 4, dtype=torch.float64), exact=False).layers[0]
    assert (layer.inputs, layer.outputs, layer.parameters) == (6, 4, 28)


def test_nothing_found_is_nothing_claimed() -> None:
    assert Symmetries() == Symmetries({}, 0, ())
    result = strati.degeneracy(Residual(nn.Tanh), torch.randn(60, 4), exact=False)
    assert "neuron scales" not in result.warnings[0].text
