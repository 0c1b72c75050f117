"""Ranks of Jacobians in 60-digit arithmetic (mpmath), sharing no code with strati: the oracle of exact counts."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import torch
from torch import nn

DIGITS, CUT = 60, 45
"""Digits of the arithmetic, and below which power of ten a pivot is zero."""

FUNCTIONS = {
    nn.ReLU: (lambda p: max(p, mp.mpf(0)), lambda p: mp.mpf(1 if p > 0 else 0)),
    nn.Tanh: (mp.tanh, lambda p: 1 / mp.cosh(p) ** 2),
    nn.Sigmoid: (lambda p: 1 / (1 + mp.exp(-p)), lambda p: 1 / (2 + mp.exp(-p) + mp.exp(p))),
    nn.GELU: (lambda p: p * mp.ncdf(p), lambda p: mp.ncdf(p) + p * mp.npdf(p)),
    nn.SiLU: (lambda p: p / (1 + mp.exp(-p)), lambda p: (1 + mp.exp(-p) * (1 + p)) / (1 + mp.exp(-p)) ** 2),
}
"""Activations and their derivatives."""


def precise_free(model: nn.Sequential, x: torch.Tensor, act: type[nn.Module]) -> int:
    """``N - rank(J)`` of an MLP, its weights and data taken as the exact numbers they are."""
    with mp.workdps(DIGITS):
        jacobian = _jacobian(model, x, act)
        return jacobian.shape[1] - _rank(jacobian)


def _jacobian(model: nn.Sequential, x: torch.Tensor, act: type[nn.Module]) -> np.ndarray:
    function, slope = FUNCTIONS[act]
    layers = [m for m in model if isinstance(m, nn.Linear)]
    weights = [_exact(m.weight) for m in layers]
    biases = [None if m.bias is None else _exact(m.bias) for m in layers]
    rows = []
    for f in _exact(x):
        inputs, slopes = [f], []
        for k, (w, b) in enumerate(zip(weights, biases, strict=True)):
            p = w.dot(inputs[-1]) + (0 if b is None else b)
            last = k + 1 == len(weights)
            slopes.append(np.array([mp.mpf(1) if last else slope(v) for v in p], dtype=object))
            inputs.append(p if last else np.array([function(v) for v in p], dtype=object))
        for output in range(len(inputs[-1])):
            back = np.array([mp.mpf(k == output) for k in range(len(inputs[-1]))], dtype=object)
            row = []
            for k in range(len(weights) - 1, -1, -1):
                seen = inputs[k] if biases[k] is None else np.append(inputs[k], mp.mpf(1))
                row.append(np.outer(back, seen).ravel())
                if k:
                    back = back.dot(weights[k]) * slopes[k - 1]
            rows.append(np.concatenate(row))
    return np.array(rows, dtype=object)


def _exact(tensor: torch.Tensor) -> np.ndarray:
    return np.vectorize(mp.mpf, otypes=[object])(tensor.detach().double().numpy())


def _rank(matrix: np.ndarray) -> int:
    """Gaussian elimination with complete pivoting, rows and columns of size one first."""
    for axis in (0, 1):
        size = np.abs(matrix).max(axis=axis, keepdims=True)
        matrix = np.where(size == 0, mp.mpf(0), matrix / np.where(size == 0, mp.mpf(1), size))
    rank = 0
    while matrix.size:
        row, column = divmod(int(np.abs(matrix).argmax()), matrix.shape[1])
        pivot = matrix[row, column]
        if abs(pivot) < mp.mpf(10) ** -CUT:
            break
        rank += 1
        matrix = matrix - np.outer(matrix[:, column], matrix[row] / pivot)
        matrix = np.delete(np.delete(matrix, row, 0), column, 1)
    return rank
