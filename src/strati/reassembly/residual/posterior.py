r"""Pairs by the data and the weights together: a Bayesian regression around a network of mixtures.

The weights give each input projection a belief :math:`b_{ij}` about its output projection. Taken as a prior of the
mixture :math:`P` (each block's output projection is ``sum_j P_ij W_out^j``), with the covariance that one choice of
many has (:math:`diag(b)`, each piece used once), the error of the network is linear in :math:`P` and in the pairs of
blocks that are the wrong way round, and the posterior mean is a ridge regression whose columns are scaled by
:math:`\sqrt{b_{ij}}`: what the weights rule out costs no data. The variance of what remains is the one that makes the
data likeliest. A few steps, each around the last answer but with the same prior, mend what the linear picture misses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.assignment import sinkhorn
from strati.reassembly.residual.network import Pass, output_side_effects, run_mixed
from strati.reassembly.residual.order import flip_effects, sorted_by_flips
from strati.reassembly.residual.pairing import unit_responses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strati.reassembly.residual.network import Floats, Ints, ResidualWeights

    Matrix = NDArray[np.float64]


def uniform(parts: ResidualWeights) -> Matrix:
    """Every candidate alike."""
    m = len(parts.w_in)
    if not parts.shared:
        return np.full((m, m), 1 / m)
    even = np.full((m, m), 0.5 / max(m - 1, 1))
    np.fill_diagonal(even, 0)
    return even


def soft_permutation(parts: ResidualWeights, ins: Ints, outs: Ints, share: float) -> tuple[Matrix, Ints]:
    """A chain as a mixture that keeps ``share`` of its pairs and spreads the rest, and its order of all blocks."""
    mixture = (1 - share) * uniform(parts)
    mixture[ins, outs] += share
    order = np.stack([ins, outs], axis=1).reshape(-1) if parts.shared else ins
    return to_polytope(mixture, parts.shared), order


def to_polytope(mixture: Matrix, shared: bool, rounds: int = 40) -> Matrix:
    """The nearest thing to a mixture in which every piece is used once: clip, then rescale in turn."""
    return sinkhorn(np.clip(mixture, 1e-6, None), shared, rounds)


def mixed_pass(parts: ResidualWeights, x: Floats, mixture: Matrix, order: Ints) -> Pass:
    """Forward and backward over the chain whose output projections are mixtures of pieces."""
    m = len(parts.w_out)
    weights = mixture[order].astype(np.float32)
    mixed = (weights @ parts.w_out.reshape(m, -1)).reshape(len(order), *parts.w_out.shape[1:])
    return run_mixed(parts, order, list(mixed), list(weights @ parts.b_out), x)


def piece_effects(parts: ResidualWeights, passed: Pass, order: Ints) -> Floats:
    """First-order effect of each ``P_ij`` on the output: (outputs * rows, m, m) in the pieces' own numbering."""
    effects = output_side_effects(parts, passed)[:, np.argsort(order)]
    if parts.shared:
        effects[:, np.arange(len(order)), np.arange(len(order))] = 0
    return effects


_LEAST = 2e-3
_OPEN = 0.1
"""Beliefs below this are left out of the regression, and the share of a belief that is spread over all pieces."""

_FLIP = 0.1
"""Variance of "this pair of blocks is the wrong way round" once there is an order to start from; 1/4 before."""


def soft_belief(parts: ResidualWeights, evidence: Matrix, share: float) -> Matrix:
    """Evidence in nats, less sure of itself by a factor, as a belief in which every piece is used once."""
    scaled = evidence * share
    belief = sinkhorn(np.exp(scaled - scaled.max()) + 1e-300, parts.shared, 100)
    return np.asarray((1 - _OPEN) * belief + _OPEN * uniform(parts))


def first_order(parts: ResidualWeights, x: Floats, y: Floats, belief: Matrix) -> Ints:
    """An order of the input projections to start from, by what training leaves in blocks of different depth.

    Late blocks write along the last layer (``W_last W_out`` is large for its ``W_out``) and read what goes with the
    outputs no more; early ones add most of what goes with them. Ranks of the three, each pair as far as it is believed.
    """
    moved, added = unit_responses(parts, x, y)
    sizes = [
        np.linalg.norm(pieces.reshape(len(pieces), -1), axis=1) + 1e-30
        for pieces in (parts.w_in, parts.w_out)
    ]
    share = belief / np.maximum(belief.sum(axis=1, keepdims=True), 1e-30)
    writes = share @ (np.linalg.norm(added, axis=(1, 2)) / sizes[1])
    reads = np.linalg.norm(moved, axis=(1, 2)) / sizes[0]
    adds = (share * (moved.reshape(len(moved), -1) @ added.reshape(len(added), -1).T)).sum(axis=1)
    ranks = [np.argsort(np.argsort(values, kind="stable")) for values in (writes, -reads, -adds)]
    return np.argsort(sum(ranks), kind="stable")


def infer_pairing(
    parts: ResidualWeights,
    x: Floats,
    y: Floats,
    belief: Matrix,
    order: Ints,
    *,
    steps: int = 4,
    ordered: bool = False,
) -> tuple[Matrix, Ints]:
    """The posterior mean of the mixture, and an order of the input projections.

    Args:
        parts: The weights.
        x: Inputs.
        y: Outputs to reach.
        belief: Prior probability of each pair, every piece used once.
        order: Order of the input projections to start from.
        steps: Linearisations.
        ordered: The order given is worth something.
    """
    mixture = belief
    first, second = np.nonzero(belief > _LEAST)
    root = np.sqrt(belief[first, second])
    noise: float | None = None
    with np.errstate(over="ignore", invalid="ignore"):
        for step in range(steps):
            passed = mixed_pass(parts, x, mixture, order)
            effects = centred(piece_effects(parts, passed, order), belief, parts.shared)
            flips, pairs = flip_effects(passed)
            target = (y - passed.output).T.reshape(-1).astype(np.float64)
            if not bool(np.isfinite(target).all() and np.isfinite(effects).all()):
                break
            mean, variance = (0.0, _FLIP) if step or ordered else (0.5, 0.25)
            target += effects.reshape(len(target), -1) @ (mixture - belief).reshape(-1)
            target -= mean * flips.sum(axis=1)
            columns = np.concatenate(
                [effects[:, first, second] * root.astype(np.float32), flips * np.float32(np.sqrt(variance))],
                axis=1,
            )
            (solution,), noise = posterior_means(columns, target, noise)
            target_mixture = belief.copy()
            target_mixture[first, second] += root * solution[: len(first)]
            target_mixture = to_polytope(target_mixture, parts.shared)
            mixture = target_mixture if step == 0 else (mixture + target_mixture) / 2
            turned = mean + np.sqrt(variance) * solution[len(first) :]
            order = order[sorted_by_flips(turned, pairs, len(order))]
    return mixture, order


def centred(effects: NDArray[Any], belief: Matrix, shared: bool, rounds: int = 3) -> NDArray[Any]:
    """Effects without what every piece used once takes out, each choice counted as far as it is believed."""
    weight = belief.astype(effects.dtype)
    if shared:
        used = (weight.sum(axis=1) + weight.sum(axis=0))[None, :]
        for _ in range(rounds):
            part = (
                (np.einsum("xij,ij->xi", effects, weight) + np.einsum("xij,ij->xj", effects, weight))
                / used
                / 2
            )
            effects = effects - part[:, :, None] - part[:, None, :]
        return effects
    for _ in range(rounds):
        effects = effects - (np.einsum("xij,ij->xi", effects, weight) / weight.sum(axis=1))[:, :, None]
        effects = effects - (np.einsum("xij,ij->xj", effects, weight) / weight.sum(axis=0))[:, None, :]
    return effects


def posterior_means(
    columns: NDArray[Any], target: Matrix, noise: float | None = None, factors: Sequence[float] = (1.0,)
) -> tuple[list[Matrix], float]:
    """Means of weights of unit prior variance given the target, for the likeliest noise times each factor; that noise.

    The likelihood is climbed by halving and doubling the noise, from ``noise`` or from a tenth of the target. More
    noise than is likely allows for errors of the linear model, which are not independent between rows.
    """
    rows, count = columns.shape
    dual = rows < count
    gram = (columns @ columns.T if dual else columns.T @ columns).astype(np.float64)
    side = target if dual else columns.T.astype(np.float64) @ target
    size = float(target @ target)
    # less noise than the rounding of the Gram matrix is not to be had
    rounding = 8 * float(np.finfo(columns.dtype).eps)
    least = rounding * float(np.trace(gram)) + float(np.finfo(np.float64).tiny)
    start = max(0.1 * size / rows if noise is None else noise, least)

    def solved(variance: float) -> tuple[float, Matrix]:
        shifted = gram.copy()
        shifted[np.diag_indices_from(shifted)] += variance
        # Two factorisations cost less than half a second for importing scipy's triangular solver.
        solution = np.linalg.solve(shifted, side)
        diagonal = np.diag(np.linalg.cholesky(shifted))
        logs = 2 * float(np.log(diagonal).sum()) + (rows - len(gram)) * float(np.log(variance))
        left = float(side @ solution) if dual else (size - float(side @ solution)) / variance
        return -0.5 * (left + logs), np.asarray(solution)

    tried: dict[int, float] = {}

    def at(level: int) -> float:
        if level not in tried:
            tried[level] = solved(max(start * 2.0**level, least))[0]
        return tried[level]

    level = 0
    for _ in range(40):
        near = max((level - 1, level, level + 1), key=at)
        if near == level:
            break
        level = near
    likeliest = max(start * 2.0**level, least)
    solutions = [solved(likeliest * factor)[1] for factor in factors]
    means = [
        columns.T.astype(np.float64) @ dual_solution if dual else dual_solution for dual_solution in solutions
    ]
    return means, likeliest
