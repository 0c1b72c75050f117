"""Coordinates in which the loss is about as curved as its eigenvalues say, for any number of parameters.

Up to some thousands of parameters these are the eigenvectors of the curvature itself. Beyond, each linear layer's
curvature is taken for the Kronecker product of the Gram matrix of its inputs and that of the output's Jacobians
with respect to its preactivations (eq. 37 of degeneracy-in-the-loss-landscape), whose eigenvectors cost two small
decompositions. It only has to be near the truth: the sampler is exact in any coordinates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from strati.evaluate.models import output_tensor
from strati.landscape.objective import Objective

_MOST_OUTPUTS = 64  # beyond, random combinations of outputs stand for all
_MOST_ROWS = 2048
_LEAST_SHARE = 0.9  # of the parameters in linear layers, for the products to be worth it


class Rotation(Protocol):
    """An orthogonal change of coordinates of flat parameter vectors ``(..., d)``."""

    def rotate(self, offset: Tensor) -> Tensor:
        """Into the new coordinates."""

    def unrotate(self, coordinates: Tensor) -> Tensor:
        """Back."""

    @property
    def cost(self) -> int:
        """Multiply-adds there and back."""


@dataclass(frozen=True)
class Dense:
    """Eigenvectors as columns of one matrix; ``None`` keeps the coordinates."""

    basis: Tensor | None

    def rotate(self, offset: Tensor) -> Tensor:
        """Coordinates in the eigenbasis."""
        return offset if self.basis is None else offset @ self.basis

    def unrotate(self, coordinates: Tensor) -> Tensor:
        """Back from the eigenbasis."""
        return coordinates if self.basis is None else coordinates @ self.basis.T

    @property
    def cost(self) -> int:
        """Multiply-adds there and back."""
        return 0 if self.basis is None else 2 * self.basis.numel()


@dataclass(frozen=True)
class KroneckerLayer:
    """Where a linear layer's parameters lie in the flat vector, and its two bases.

    Attributes:
        weight: Its place.
        bias: Its place, if it has one that varies.
        left: Eigenvectors of the Jacobians' Gram matrix, ``(out, out)``.
        right: Those of the inputs' (with a one for the bias), ``(in [+ 1], in [+ 1])``.
    """

    weight: slice
    bias: slice | None
    left: Tensor
    right: Tensor

    def gather(self, flat: Tensor) -> Tensor:
        """Weight and bias as one matrix ``(..., out, in [+ 1])``."""
        rows = self.left.shape[0]
        matrix = flat[..., self.weight].reshape(*flat.shape[:-1], rows, -1)
        return matrix if self.bias is None else torch.cat([matrix, flat[..., self.bias, None]], dim=-1)

    def scatter(self, matrix: Tensor, flat: Tensor) -> None:
        """Write such a matrix back into a flat vector."""
        weight = matrix if self.bias is None else matrix[..., :-1]
        flat[..., self.weight] = weight.reshape(*flat.shape[:-1], -1)
        if self.bias is not None:
            flat[..., self.bias] = matrix[..., -1]


@dataclass(frozen=True)
class Kronecker:
    """One product of two small rotations per linear layer; other parameters keep their coordinates."""

    layers: tuple[KroneckerLayer, ...]

    def rotate(self, offset: Tensor) -> Tensor:
        """``L^T W R`` in every layer."""
        out = offset.clone()
        for layer in self.layers:
            layer.scatter(layer.left.T @ layer.gather(offset) @ layer.right, out)
        return out

    def unrotate(self, coordinates: Tensor) -> Tensor:
        """``L W R^T`` in every layer."""
        out = coordinates.clone()
        for layer in self.layers:
            layer.scatter(layer.left @ layer.gather(coordinates) @ layer.right.T, out)
        return out

    @property
    def cost(self) -> int:
        """Multiply-adds there and back."""
        sides = [(len(layer.left), len(layer.right)) for layer in self.layers]
        return sum(2 * m * n * (m + n) for m, n in sides)


def kronecker(objective: Objective, points: Tensor | None = None) -> tuple[Kronecker, Tensor] | None:
    """Bases and curvatures of the linear layers of a network; ``None`` where they hold too few of its parameters.

    Args:
        objective: A network, loss and data.
        points: Parameters ``(P, d)`` over which the curvature is averaged; those of the network by default.

    Returns:
        The rotation, and the curvature ``c k_i g_j`` of every new coordinate (``c`` is 2 for squared errors, 1 for
        divergences; other parameters get the mean).

    Examples:
        >>> from strati.landscape.objective import behavioural_loss
        >>> rotation, curvature = kronecker(behavioural_loss(nn.Linear(1, 1, bias=False), torch.tensor([[2.0]])))
        >>> curvature.tolist()  # 2 x^2
        [8.0]
    """
    flat = objective.flat
    places: dict[str, slice] = {}
    start = 0
    for name, size in zip(flat.names, flat.sizes, strict=True):
        places[name] = slice(start, start + size)
        start += size
    modules = {
        name: module
        for name, module in flat.module.named_modules()
        if isinstance(module, nn.Linear) and _of(name, "weight") in places
    }
    inside = sum(p.numel() for m in modules.values() for p in m.parameters(recurse=False))
    if inside < _LEAST_SHARE * flat.size:
        return None
    squared = objective.name is not None and objective.name.squared
    places_seen = flat.theta.detach()[None] if points is None else points
    every = [_grams(objective, modules, squared, theta) for theta in places_seen]
    grams = {
        name: tuple(torch.stack([factors_at[name][k] for factors_at in every]).mean(0) for k in (0, 1))
        for name in every[0]
    }
    curvature = torch.full_like(flat.theta, torch.nan)
    layers = []
    for name, (inputs, jacobians) in grams.items():
        bias = places.get(_of(name, "bias"))
        if bias is None:
            inputs = inputs[:-1, :-1]
        (k, left), (g, right) = (torch.linalg.eigh(m) for m in (jacobians, inputs))
        layer = KroneckerLayer(places[_of(name, "weight")], bias, left, right)
        layer.scatter((2.0 if squared else 1.0) * k.clamp(min=0)[:, None] * g.clamp(min=0), curvature)
        layers.append(layer)
    return Kronecker(tuple(layers)), torch.where(curvature.isnan(), curvature.nanmean(), curvature)


def _grams(
    objective: Objective, modules: dict[str, nn.Linear], squared: bool, theta: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """For each layer the mean Gram matrices of its inputs (a one appended) and of the output's Jacobians."""
    flat = objective.flat
    x: Any = objective.x
    few = slice(0, _MOST_ROWS)
    x = x[few] if isinstance(x, Tensor) else {k: v[few] for k, v in x.items()}
    weights = {k: v.detach() for k, v in flat.fixed.items()} | flat.split(theta)
    with _caught(modules) as (inputs, before), torch.enable_grad():
        output = output_tensor(
            functional_call(flat.module, weights, (x,))
            if isinstance(x, Tensor)
            else functional_call(flat.module, weights, (), x)
        )
        rows = output.reshape(-1, output.shape[-1])
        captured = {}
        total = {n: p.new_zeros(p.shape[-1], p.shape[-1]) for n, p in before.items()}
        for cotangent in _cotangents(rows.detach(), squared):
            slopes = torch.autograd.grad(rows, list(before.values()), cotangent, retain_graph=True)
            for name, slope in zip(before, slopes, strict=True):
                flattened = slope.reshape(-1, slope.shape[-1])
                total[name] += flattened.T @ flattened / len(rows)
        for name, value in inputs.items():
            a = value.detach().reshape(-1, value.shape[-1])
            folded = torch.cat([a, a.new_ones(len(a), 1)], dim=1)
            captured[name] = (folded.T @ folded / len(a), total[name])
    return captured


def _cotangents(output: Tensor, squared: bool) -> Iterator[Tensor]:
    """Vectors whose outer products add up to the output's metric: the identity, or ``diag p - p p^T``."""
    outputs = output.shape[-1]
    p = None if squared else torch.softmax(output, dim=-1)
    if outputs <= _MOST_OUTPUTS:
        directions = torch.eye(outputs, dtype=output.dtype, device=output.device)
    else:
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (_MOST_OUTPUTS, outputs), generator=generator).to(output)
        directions = (2 * signs - 1) / _MOST_OUTPUTS**0.5
    for direction in directions:
        vector = direction.expand_as(output)
        if p is not None:
            root = p.sqrt() * vector
            vector = root - p * root.sum(-1, keepdim=True)  # (diag sqrt p - p sqrt p^T) e
        yield vector


@contextmanager
def _caught(modules: dict[str, nn.Linear]) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Each layer's input and output of the next forward pass, the output as a leaf of its own gradient."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def keep(_: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
            inputs[name] = given[0]
            outputs[name] = out if out.requires_grad else out.requires_grad_(True)
            return outputs[name]

        return keep

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    try:
        yield inputs, outputs
    finally:
        for handle in handles:
            handle.remove()


def _of(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter
