"""Pairing and order at once, relaxed: a Gauss-Newton method on mixtures.

Every input projection keeps a block of its own whose output projection is a mixture
``sum_j P_ij W_out^j`` of all candidates. The error of the network's output is regressed on the effect of each
``P_ij`` (first order, by the adjoint) and of each pair of blocks the wrong way round
(:mod:`strati.reassembly.regression`); ``P`` and the order take the step, ``P`` is brought back to the doubly
stochastic matrices, and again. No signal in the weights is needed: data alone do it.

Where hidden and block width are equal, every piece is candidate for both roles: the chain then has a block
per piece, and ``P_ij`` is the weight of "``i`` is the input, ``j`` the output projection of one block", each piece
being used once in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.assignment import used_once
from strati.reassembly.passes import Pass, run_mixed
from strati.reassembly.regression import flip_effects, ridge, sorted_by_flips

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.passes import Floats, Ints, Parts

    Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Relaxed:
    """Where the relaxation ended: the mixture, an order of the input projections, and the error."""

    mixture: Matrix
    order: Ints
    mse: float


def relax(
    parts: Parts,
    x: Floats,
    y: Floats,
    mixture: Matrix,
    order: Ints,
    *,
    steps: int = 8,
    penalty: float = 1e-2,
    ordered: bool = False,
) -> Relaxed:
    """Gauss-Newton on the mixture and the order.

    Args:
        parts: The weights.
        x: Inputs.
        y: Outputs to reach.
        mixture: Where to start, e.g. :func:`uniform`.
        order: Order of the input projections to start from.
        steps: At most so many steps.
        penalty: Ridge, as a share of the mean squared norm of a column; lowered when a step gains nothing.
        ordered: The order given is worth something; otherwise the first step is taken whatever it brings.
    """
    best = mixed_mse(parts, x, y, mixture, order)
    for step in range(steps):
        passed = mixed_pass(parts, x, mixture, order)
        effects = mixing_effects(parts, passed, order)
        flips, pairs = flip_effects(passed)
        scale = _ratio(effects, flips)
        columns = np.concatenate([effects, flips * scale], axis=1)
        target = (y - passed.output).T.reshape(-1)
        # at the first step nothing is known of the order: every pair is half the wrong way round
        blind = step == 0 and not ordered
        half = 0.5 if blind else 0.0
        target = target - half * flips.sum(axis=1)
        (solution,) = ridge(columns, target, (penalty,))
        change = solution[: effects.shape[1]].reshape(mixture.shape)
        turned = order[sorted_by_flips(half + scale * solution[effects.shape[1] :], pairs, len(order))]
        trials = []
        for reach in (1.0, 0.5, 0.25):
            moved = to_polytope(mixture + reach * change, parts.shared)
            for candidate in (turned,) if blind else (turned, order):
                trials.append((mixed_mse(parts, x, y, moved, candidate), moved, candidate))
            if blind or min(t[0] for t in trials) < 0.9 * best:
                break
        mse, moved, candidate = min(trials, key=lambda trial: trial[0])
        if not blind and mse >= 0.999 * best:
            penalty *= 0.3
        if blind or mse < best:
            best, mixture, order = mse, moved, candidate
        if penalty < 1e-4:
            break
    return Relaxed(mixture, order, best)


def uniform(parts: Parts) -> Matrix:
    """Every candidate alike."""
    m = len(parts.A)
    if not parts.shared:
        return np.full((m, m), 1 / m)
    even = np.full((m, m), 0.5 / max(m - 1, 1))
    np.fill_diagonal(even, 0)
    return even


def softened(parts: Parts, ins: Ints, outs: Ints, share: float) -> tuple[Matrix, Ints]:
    """A chain as a mixture that keeps ``share`` of its pairs and spreads the rest, and its order of all blocks."""
    mixture = (1 - share) * uniform(parts)
    mixture[ins, outs] += share
    order = np.stack([ins, outs], axis=1).reshape(-1) if parts.shared else ins
    return to_polytope(mixture, parts.shared), order


def to_polytope(mixture: Matrix, shared: bool, rounds: int = 40) -> Matrix:
    """The nearest thing to a mixture in which every piece is used once: clip, then rescale in turn."""
    return used_once(np.clip(mixture, 1e-6, None), shared, rounds)


def piece_effects(parts: Parts, passed: Pass, order: Ints) -> Floats:
    """First-order effect of each ``P_ij`` on the output: (outputs * rows, m, m) in the pieces' own numbering."""
    m, d, h = parts.B.shape
    rows, outputs = passed.output.shape
    flat = np.ascontiguousarray(parts.B.transpose(1, 0, 2).reshape(d, m * h))
    effects = np.empty((outputs, rows, m, m), dtype=np.float32)
    for k, i in enumerate(order):
        for q in range(outputs):
            g = passed.adjoint[k + 1][q]
            carried = (g @ flat).reshape(rows, m, h)
            effects[q, :, i, :] = np.matmul(carried, passed.hidden[k][:, :, None])[:, :, 0]
            effects[q, :, i, :] += g @ parts.b.T
    if parts.shared:
        effects[..., np.arange(m), np.arange(m)] = 0
    return effects.reshape(outputs * rows, m, m)


def mixing_effects(parts: Parts, passed: Pass, order: Ints) -> Floats:
    """First-order effect of each ``P_ij`` on the output, free of what keeps each piece used once.

    Returns:
        (outputs * rows, m * m) in the pieces' own numbering, projected so that a ridge solution keeps the sums.
    """
    effects = piece_effects(parts, passed, order)
    rows, m, _ = effects.shape
    if parts.shared:
        diagonal = np.arange(m)
        total = effects.sum(axis=2) + effects.sum(axis=1)
        share = total.sum(axis=1, keepdims=True) / (4 * (m - 1))
        used = (total / 2 - share) / max(m - 2, 1)
        effects -= used[..., :, None] + used[..., None, :]
        effects[..., diagonal, diagonal] = 0
    else:
        rows_mean = effects.mean(axis=2, keepdims=True)
        columns_mean = effects.mean(axis=1, keepdims=True)
        effects -= rows_mean + columns_mean - rows_mean.mean(axis=1, keepdims=True)
    return effects.reshape(rows, m * m)


def _ratio(effects: Floats, flips: Floats) -> float:
    """What makes a typical flip column as long as a typical mixture column, so that one ridge fits both."""
    short = float(np.mean(np.square(flips, dtype=np.float64))) if flips.size else 0.0
    long = float(np.mean(np.square(effects, dtype=np.float64)))
    return float(np.sqrt(long / short)) if short > 0 else 1.0


def _mixed(parts: Parts, mixture: Matrix, order: Ints) -> tuple[list[Floats], list[Floats]]:
    m = len(parts.B)
    weights = mixture[order].astype(np.float32)
    B = (weights @ parts.B.reshape(m, -1)).reshape(len(order), *parts.B.shape[1:])
    return list(B), list(weights @ parts.b)


def mixed_pass(parts: Parts, x: Floats, mixture: Matrix, order: Ints) -> Pass:
    """Forward and backward over the chain of mixtures."""
    B, b = _mixed(parts, mixture, order)
    return run_mixed(parts, order, B, b, x)


def mixed_mse(parts: Parts, x: Floats, y: Floats, mixture: Matrix, order: Ints) -> float:
    """The mean squared error of the chain of mixtures; infinite where it overflows."""
    z: Floats = x
    with np.errstate(over="ignore", invalid="ignore"):
        for i, B, b in zip(order, *_mixed(parts, mixture, order), strict=True):
            hidden = parts.act.value(parts.enter(z) @ parts.A[i].T + parts.a[i])
            z = np.asarray(z + hidden @ B.T + b, dtype=np.float32)
        value = float(np.mean(np.square(parts.leave(z) @ parts.L.T + parts.l - y, dtype=np.float64)))
    return value if np.isfinite(value) else float("inf")
