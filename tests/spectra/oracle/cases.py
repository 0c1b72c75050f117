"""Matrices that weightwatcher and strati are both given: made from a seed, float32, full rank, 20 columns or more."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CASES = {
    "gaussian-512x512": ("gaussian", (512, 512)),
    "gaussian-300x100": ("gaussian", (300, 100)),
    "gaussian-wide-20x64": ("gaussian", (20, 64)),
    "gaussian-small-24x24": ("gaussian", (24, 24)),
    "uniform-784x256": ("uniform", (784, 256)),
    "uniform-wide-128x512": ("uniform", (128, 512)),
    "spiked-400x200": ("spiked", (400, 200)),
    "spiked-wide-200x500": ("spiked", (200, 500)),
    "pareto-1.5-200x200": ("pareto-1.5", (200, 200)),
    "pareto-3-500x300": ("pareto-3", (500, 300)),
    "pareto-4.2-wide-100x300": ("pareto-4.2", (100, 300)),
    "decaying-256x256": ("decaying", (256, 256)),
    "tall-3000x64": ("gaussian", (3000, 64)),
}


def make(name: str) -> NDArray[np.float32]:
    kind, shape = CASES[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    if kind == "gaussian":
        W = rng.normal(size=shape)
    elif kind == "uniform":
        W = rng.uniform(-1, 1, size=shape)
    elif kind == "spiked":
        W = rng.normal(size=shape)
        W += (
            sum(k * 30 * np.outer(rng.normal(size=shape[0]), rng.normal(size=shape[1])) for k in (1, 2, 3))
            / 100
        )
    elif kind == "decaying":
        W = rng.normal(size=shape) * np.arange(1, shape[1] + 1) ** -0.6
    else:
        size = (1 - rng.random(shape)) ** (-1 / float(kind.split("-")[1]))
        W = np.where(rng.random(shape) < 0.5, size, -size)
    return W.astype(np.float32)
