"""Residual networks to drop: random ones in PyTorch's default initialisation, without torch."""

from __future__ import annotations

import numpy as np

from strati.reassembly.residual.network import activation


def drop(blocks, width, hidden, *, outputs=1, act="relu", rows=800, seed=0):
    """Shuffled pieces, inputs, outputs, and the permutation that puts them back."""
    rng = np.random.default_rng(seed)

    def linear(rows_out, columns):
        k = 1 / np.sqrt(columns)
        weight = rng.uniform(-k, k, (rows_out, columns)).astype(np.float32)
        return weight, rng.uniform(-k, k, rows_out).astype(np.float32)

    layers = [linear(*shape) for _ in range(blocks) for shape in ((hidden, width), (width, hidden))]
    layers.append(linear(outputs, width))
    x = rng.standard_normal((rows, width)).astype(np.float32)
    y = forward(layers, x, act)
    shuffle = rng.permutation(len(layers))
    return [layers[k] for k in shuffle], x, y, tuple(int(k) for k in np.argsort(shuffle))


def forward(layers, x, act="relu"):
    z = x
    for (W, w), (V, v) in zip(layers[:-1:2], layers[1:-1:2], strict=True):
        z = z + activation(act).value(z @ W.T + w) @ V.T + v
    return z @ layers[-1][0].T + layers[-1][1]
