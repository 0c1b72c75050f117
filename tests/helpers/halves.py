"""Networks of two disjoint halves hidden by mixing every layer's activations, and which half a direction is of."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

import strati

SHAPES = [
    ((3, 5, 2), None),
    ((2, 3, 1), None),
    ((6, 12, 4), None),
    ((3, 6, 2), (5, 9, 4)),
    ((3, 5, 4, 2), None),
    ((4, 4, 4, 4), None),
    ((2, 8, 8, 1), (4, 5, 5, 2)),
    ((5, 10, 10, 10, 3), None),
]


def two_halves(
    seed: int,
    widths: tuple[int, ...] = (3, 5, 4, 2),
    other: tuple[int, ...] | None = None,
    *,
    activation: type[nn.Module] = nn.ReLU,
    condition: float = 30.0,
    draws: int = 25,
    product: bool = True,
) -> tuple[nn.Sequential, np.ndarray, np.ndarray]:
    """The network, its data (a product set, or independent draws), and the mixing of its inputs."""
    rng = np.random.default_rng(seed)
    other = other or widths
    layers: list[nn.Module] = []
    start = np.eye(1)
    for k, ((a, b), (c, d)) in enumerate(zip(pairwise(widths), pairwise(other), strict=True)):
        weight = np.zeros((b + d, a + c))
        weight[:b, :a] = rng.normal(size=(b, a)) * (1.0 if seed % 2 else a**-0.5)
        weight[b:, a:] = rng.normal(size=(d, c)) * (1.0 if seed % 2 else c**-0.5)
        mix = mixing(rng, a + c, condition)
        if k == 0:
            start = mix
        else:
            layers.append(linear(mix))  # f -> R f after the nonlinearity ...
        layers.append(
            linear(weight @ np.linalg.inv(mix), rng.normal(size=b + d) * 0.3)
        )  # ... and W -> W R^-1
        if k + 2 < len(widths):
            layers.append(activation())
    count = draws if product else draws**2
    first, second = rng.normal(size=(count, widths[0])), rng.normal(size=(count, other[0]))
    if product:
        first, second = np.repeat(first, draws, axis=0), np.tile(second, (draws, 1))
    return nn.Sequential(*layers), np.concatenate([first, second], axis=1) @ start.T, start


def mixing(rng: np.random.Generator, d: int, condition: float) -> np.ndarray:
    left, right = (np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(2))
    return left * np.geomspace(1, 1 / condition, d) @ right


def linear(weight: np.ndarray, bias: np.ndarray | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).double()
    layer.weight.data = torch.from_numpy(weight)
    if bias is not None:
        layer.bias.data = torch.from_numpy(bias)
    return layer


def true_halves(graph: Any, start: np.ndarray, inputs: int) -> list[np.ndarray]:
    """Which half a direction is of: seen at the input by undoing the mixing, further on by what acts on it."""
    pure = graph.basis.layers[0].matrix @ start
    found = [(pure[:, inputs:] ** 2).sum(axis=1) > (pure[:, :inputs] ** 2).sum(axis=1)]
    for edges in graph.edges:
        found.append(edges[:, found[-1]].sum(axis=1) > edges[:, ~found[-1]].sum(axis=1))
    return found


def mixed(found: Any, truth: list[np.ndarray]) -> int:
    """How many modules hold directions of both halves."""
    return sum(len({bool(truth[layer][k]) for layer, k in m.members}) > 1 for m in found.modules)


def dense(seed: int, widths: tuple[int, ...], activation: type[nn.Module] = nn.ReLU) -> Any:
    """The interaction graph of a random network in which everything is joined."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), activation()]
    x = torch.randn(500, widths[0], dtype=torch.float64)
    return strati.interaction_graph(strati.interaction_basis(nn.Sequential(*layers[:-1]).double(), x))


def planted(
    seed: int, sizes: list[int], cross: float, *, layers: int = 4, sigma: float = 1.0
) -> tuple[list[np.ndarray], np.ndarray]:
    """Edges of a layered graph of known modules, and each node's module.

    Every edge inside a module is there, one between modules with probability ``cross``; strengths are lognormal.
    """
    rng = np.random.default_rng(seed)
    one = np.repeat(np.arange(len(sizes)), sizes)
    inside = one[:, None] == one[None, :]
    edges = []
    for _ in range(layers - 1):
        strength = rng.lognormal(0, sigma, inside.shape)
        edges.append(np.where(inside | (rng.random(inside.shape) < cross), strength, 0.0))
    return edges, np.tile(one, layers)


def as_graph(edges: list[np.ndarray]) -> Any:
    """Edges as the interaction graph of a network that nobody has."""
    from strati.landscape.basis.graph import InteractionGraph
    from strati.landscape.basis.result import BasisLayer, InteractionBasis

    widths = [edges[0].shape[1], *(len(e) for e in edges)]
    layers = tuple(
        BasisLayer(str(k), np.eye(n), np.eye(n), np.ones(n), np.zeros(n), np.zeros(n), n)
        for k, n in enumerate(widths)
    )
    basis = InteractionBasis("neuron", layers, True, 1e-12, 0.0, 1, 0, (), None)
    return InteractionGraph(basis, tuple(edges), (0.0,) * len(edges))


def agreement(first: np.ndarray, second: np.ndarray) -> float:
    """Adjusted Rand index of two partitions."""
    table = np.zeros((first.max() + 1, second.max() + 1))
    np.add.at(table, (first, second), 1)

    def pairs(counts: np.ndarray) -> float:
        return float((counts * (counts - 1) / 2).sum())

    both, rows, columns = pairs(table), pairs(table.sum(1)), pairs(table.sum(0))
    chance = rows * columns / pairs(np.array([first.size]))
    most = (rows + columns) / 2
    return (both - chance) / (most - chance) if most != chance else 1.0
