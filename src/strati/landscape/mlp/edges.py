"""Squared interaction strengths between directions of adjacent layers of a chain, in closed form.

``E_ji = mean_x (sum_a C_ja r_a(x) W'_ai)^2`` has the data only in ``B = mean_x r r^T``. With
``B = sum_m b_m u_m u_m^T`` it is ``sum_m b_m ((C o u_m) W')_ji^2``: as many matrix products as the layer is
wide, however many data there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from strati.core.results import FloatArray

DOUBLE_WORK = 4e10
"""Up to this many multiplications edges are computed in double precision, above in single."""
_ELEMENTS = 4_000_000


def masked_edges(following: FloatArray, into: FloatArray, gate: FloatArray) -> tuple[FloatArray, float]:
    """Squared edges through one elementwise nonlinearity.

    Args:
        following: ``C`` of the next layer (directions x neurons).
        into: ``W' = W C^-`` (neurons x directions of this layer).
        gate: ``B = mean_x r r^T`` (neurons x neurons).

    Returns:
        ``E`` (directions of the next layer x directions of this one), and its relative error: measured
        against double precision on a sample of rows where single precision was used, 0 otherwise.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> C, W, r = rng.normal(size=(3, 5)), rng.normal(size=(5, 2)), rng.integers(0, 2, (40, 5)) * 1.0
        >>> E, error = masked_edges(C, W, r.T @ r / 40)
        >>> bool(np.allclose(E, np.mean([(C * row @ W) ** 2 for row in r], axis=0)))
        True
    """
    weights, patterns = np.linalg.eigh(gate)
    keep = weights > 1e-15 * max(weights[-1], 0.0)
    scaled = patterns.T[keep] * np.sqrt(weights[keep])[:, None]
    work = float(len(scaled)) * following.size * into.shape[1]
    if work <= DOUBLE_WORK:
        return _sum(following, into, scaled, torch.float64), 0.0
    edges = _sum(following, into, scaled, torch.float32)
    sample = np.unique(np.linspace(0, len(following) - 1, 4).astype(int))
    exact = _sum(following[sample], into, scaled, torch.float64)
    size = float(np.linalg.norm(exact))
    return edges, float(np.linalg.norm(edges[sample] - exact)) / size if size > 0 else 0.0


def _sum(following: FloatArray, into: FloatArray, patterns: FloatArray, dtype: torch.dtype) -> FloatArray:
    c = torch.from_numpy(np.ascontiguousarray(following)).to(dtype)
    w = torch.from_numpy(np.ascontiguousarray(into)).to(dtype)
    u = torch.from_numpy(np.ascontiguousarray(patterns)).to(dtype)
    total = torch.zeros((len(c), w.shape[1]), dtype=torch.float64)
    batch = max(1, _ELEMENTS // max(1, c.numel(), len(c) * w.shape[1]))
    for part in torch.split(u, batch):
        product = (c[None] * part[:, None, :]).reshape(-1, c.shape[1]) @ w
        total += product.square_().reshape(len(part), len(c), w.shape[1]).sum(0)
    result: FloatArray = total.numpy()
    return result
