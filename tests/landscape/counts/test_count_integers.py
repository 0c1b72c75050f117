"""Counts against ranks without rounding: integer weights and data, ranks modulo a prime."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import strati

PRIME = 2**31 - 1


def exact_rank(matrix):
    """Rank over the integers modulo a large prime: that over the rationals, but for a chance of about 1e-9."""
    rows = np.asarray(matrix, dtype=np.int64) % PRIME
    found = 0
    for column in range(rows.shape[1]):
        pivots = np.flatnonzero(rows[found:, column])
        if pivots.size == 0:
            continue
        rows[[found, found + pivots[0]]] = rows[[found + pivots[0], found]]
        rows[found] = rows[found] * pow(int(rows[found, column]), PRIME - 2, PRIME) % PRIME
        below = rows[found + 1 :]
        below[:] = (below - below[:, [column]] * rows[found] % PRIME) % PRIME
        found += 1
        if found == len(rows):
            break
    return found


def integer_network(rng):
    """A ReLU network, some layers linear, with dead, parallel, opposite or unread neurons, and its data."""
    depth = int(rng.integers(1, 4))
    widths = [int(rng.integers(1, 6)) for _ in range(depth + 1)]
    weights = [rng.integers(-3, 4, (b, a)) for a, b in pairwise(widths)]
    bias = bool(rng.integers(2))
    biases = [rng.integers(-3, 4, len(w)) * bias for w in weights]
    x = rng.integers(-5, 6, (int(rng.choice([1, 2, 5, 40])), widths[0]))
    if rng.random() < 0.3:
        x[:, -1] = x[:, 0] if rng.random() < 0.5 else 2
    if depth > 1:
        place, kind = int(rng.integers(depth - 1)), int(rng.integers(5))
        if kind == 0:
            weights[place][0], biases[place][0] = 0, -bias
        elif kind in (1, 2):
            factor = (2, -1)[kind - 1]
            weights[place][-1], biases[place][-1] = factor * weights[place][0], factor * biases[place][0]
        elif kind == 3:
            weights[place + 1][:, 0] = 0
    linear = [bool(rng.random() < 0.25) or k == depth - 1 for k in range(depth)]
    return weights, biases if bias else None, linear, x


def ranks_by_hand(weights, biases, linear, x):
    """Ranks of every layer's inputs and Jacobians, and of the Jacobian of all outputs by all parameters."""
    inputs, gates, f = [], [], x
    for k, w in enumerate(weights):
        inputs.append(f if biases is None else np.c_[f, np.ones(len(f), dtype=int)])
        p = f @ w.T + (0 if biases is None else biases[k])
        gates.append(np.ones_like(p) if linear[k] else (p > 0).astype(int))
        f = p * gates[-1]
    size = len(weights[-1])
    slope = np.broadcast_to(np.eye(size, dtype=int), (len(x), size, size))
    slopes = [slope]
    for k in range(len(weights) - 1, 0, -1):
        slope = (slope @ weights[k]) * gates[k - 1][:, None, :]
        slopes.insert(0, slope)
    jacobian = [
        (s[..., None] * f[:, None, None, :]).reshape(len(x) * size, -1)
        for s, f in zip(slopes, inputs, strict=True)
    ]
    return (
        [exact_rank(f) for f in inputs],
        [exact_rank(s.reshape(-1, s.shape[-1])) for s in slopes],
        exact_rank(np.concatenate(jacobian, axis=1)),
    )


def as_module(weights, biases, linear):
    parts: list[nn.Module] = []
    for k, w in enumerate(weights):
        layer = nn.Linear(w.shape[1], w.shape[0], bias=biases is not None).double()
        layer.weight.data = torch.from_numpy(w.astype(float))
        if biases is not None:
            layer.bias.data = torch.from_numpy(biases[k].astype(float))
        parts += [layer] if linear[k] else [layer, nn.ReLU()]
    return nn.Sequential(*parts)


@pytest.mark.parametrize("seed", range(5))
def test_counts_of_integer_networks(seed):
    rng = np.random.default_rng(seed)
    for _ in range(12):
        weights, biases, linear, x = integer_network(rng)
        inputs, jacobians, rank = ranks_by_hand(weights, biases, linear, x)
        found = strati.degeneracy(as_module(weights, biases, linear), torch.from_numpy(x.astype(float)))
        assert found.method == "exact" and found.effective == rank
        assert found.structural_free <= found.free
        assert [layer.activation_rank for layer in found.layers] == inputs
        assert [layer.jacobian_rank for layer in found.layers] == jacobians
        for layer, w, g, k in zip(found.layers, weights, inputs, jacobians, strict=True):
            entries = w.shape[1] + (biases is not None)
            assert layer.free_from_activations == len(w) * (entries - g)
            assert layer.free_from_jacobians == entries * (len(w) - k)
            assert layer.free >= entries * len(w) - g * k
