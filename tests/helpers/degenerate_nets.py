"""Small ReLU networks with chosen degeneracies, and the exact count by an oracle that shares no code with strati."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

KINDS = ("dead", "duplicate", "deficient", "subspace")


def mlp(
    widths: list[int], *, bias: bool = True, act: type[nn.Module] = nn.ReLU, seed: int = 0
) -> nn.Sequential:
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for a, b in pairwise(widths):
        parts += [nn.Linear(a, b, bias=bias), act()]
    return nn.Sequential(*parts[:-1]).double()


def spoil(model: nn.Sequential, x: Tensor, kinds: tuple[str, ...], rng: np.random.Generator) -> Tensor:
    """Put degeneracies into a network (in place) and its data."""
    linear = [m for m in model if isinstance(m, nn.Linear)]
    with torch.no_grad():
        for kind in kinds:
            layer = linear[int(rng.integers(0, max(1, len(linear) - 1)))]
            if kind == "dead":
                layer.weight[0] = 0
                if layer.bias is not None:
                    layer.bias[0] = -1
            elif kind == "duplicate":
                scale = float(rng.choice([0.5, 1.0, 2.0]))
                layer.weight[-1] = scale * layer.weight[0]
                if layer.bias is not None:
                    layer.bias[-1] = scale * layer.bias[0]
            elif kind == "deficient":
                any_layer = linear[int(rng.integers(0, len(linear)))]
                u, s, v = torch.linalg.svd(any_layer.weight, full_matrices=False)
                keep = int(rng.integers(1, s.numel() + 1))
                any_layer.weight.copy_(u[:, :keep] * s[:keep] @ v[:keep])
            elif kind == "subspace":
                keep = int(rng.integers(1, x.shape[1] + 1))
                x = x[:, :keep] @ torch.randn(keep, x.shape[1], dtype=x.dtype)
    return x


def random_network(seed: int) -> tuple[nn.Sequential, Tensor, tuple[str, ...]]:
    """One or two hidden layers of 2 to 7 neurons, 50 to 500 data, each degeneracy with probability 0.25."""
    rng = np.random.default_rng(seed)
    widths = [int(rng.integers(2, 8)) for _ in range(int(rng.integers(2, 4)))] + [int(rng.integers(1, 5))]
    model = mlp(widths, bias=bool(rng.integers(0, 2)), seed=seed)
    x = torch.randn(int(rng.choice([50, 200, 500])), widths[0], dtype=torch.float64)
    kinds = tuple(k for k in KINDS if rng.random() < 0.25)
    return model, spoil(model, x, kinds, rng), kinds


def exact_free(model: nn.Module, x: Tensor) -> int:
    """``N - rank(J)`` by singular values of the Jacobian of all outputs, by automatic differentiation."""
    names = [n for n, _ in model.named_parameters()]
    values = tuple(p.detach().double() for p in model.parameters())

    def outputs(*parameters: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, parameters, strict=True)), (x.double(),)).reshape(-1)

    parts = torch.autograd.functional.jacobian(outputs, values, vectorize=True)
    jacobian = torch.cat([p.reshape(p.shape[0], -1) for p in parts], dim=1)
    size = jacobian.norm(dim=0)
    live = size > 1e-12 * size.max()
    if not bool(live.any()):
        return jacobian.shape[1]
    singular = torch.linalg.svdvals(jacobian[:, live] / size[live])
    return jacobian.shape[1] - int((singular > 1e-7 * singular[0]).sum())


def hessian_free(model: nn.Module, x: Tensor) -> int:
    """``N - rank(H)`` of the behavioural loss by second derivatives, nothing else assumed."""
    names = [n for n, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    sizes = [p.numel() for p in model.parameters()]
    theta = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])

    def call(flat: Tensor) -> Tensor:
        parts = torch.split(flat, sizes)
        weights = {n: p.reshape(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        return functional_call(model, weights, (x.double(),))

    target = call(theta).detach()
    matrix = jacrev(jacrev(lambda flat: (call(flat) - target).square().sum() / x.shape[0]))(theta)
    eigenvalues = torch.linalg.eigvalsh(matrix)
    return len(theta) - int((eigenvalues > 1e-11 * eigenvalues[-1]).sum())
