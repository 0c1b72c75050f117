r"""Pairing and order searched together with the data, for networks whose weights do not show the pairs.

A proposal is a mixture :math:`P` of output projections for every input projection (each block's is ``sum_j P_ij
W_out^j``), and an order. It comes from a Bayesian regression (:func:`infer_pairing`): the weights give each input
projection a belief :math:`b_{ij}` about its output projection, which is the prior mean of :math:`P`, with the
covariance that one choice of many has (:math:`diag(b)`, each piece used once). The error of the network is linear in
:math:`P` and in the pairs of blocks that are the wrong way round, so the posterior mean is a ridge regression whose
columns are scaled by :math:`\sqrt{b_{ij}}`: what the weights rule out costs no data. The variance of what remains is
the one that makes the data likeliest. A few steps, each around the last answer but with the same prior, correct what
the linear model misses. Rounded to whole pairs, it is improved by :func:`polish`: ordering by regression alternates
with exchanging pieces and norms between blocks, both predicted by the adjoint and accepted only if
the true error falls. With few blocks :func:`search_all` tries all arrangements.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.assignment import assign, match, sinkhorn
from strati.reassembly.residual.network import (
    MEAN,
    NormAssignment,
    fold_norms,
    input_side_effects,
    output_side_effects,
    run,
    run_mixed,
)
from strati.reassembly.residual.order import RIDGES, flip_effects, regress_order, ridge, sorted_by_flips
from strati.reassembly.residual.pairing import unit_responses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strati.reassembly.residual.network import Floats, Ints, Pass, ResidualWeights

    Matrix = NDArray[np.float64]
    Proposal = tuple[ResidualWeights, Matrix, Ints]  # weights, a mixture to round to pairs, an order

_SHARES = (0.5, 0.25, 0.1)
_PART = 0.5
_IDLE = 6
"""Shares of the weights' evidence that are believed in turn; the share of that belief in proposals around the best
arrangement; after so many of these without gain there are no others."""


@dataclass(frozen=True)
class JointOrder:
    """Pairs in an order, their error on the rows searched, and the weights with the norms assigned to them."""

    parts: ResidualWeights
    ins: Ints
    outs: Ints
    mse: float


@dataclass
class JointSearch:
    """The problem, and the best arrangement so far.

    Attributes:
        parts: The weights.
        x: Inputs.
        y: Outputs to reach.
        evidence: Evidence in nats, from the weights, that input and output projection are a pair.
        floor: Mean squared error that counts as exact.
        best: The best arrangement.
    """

    parts: ResidualWeights
    x: Floats
    y: Floats
    evidence: Matrix
    floor: float
    best: JointOrder | None = None

    def consider(self, proposal: Proposal) -> JointOrder:
        """Round a proposal to whole pairs, polish it, and return the best arrangement so far."""
        weights, mixture, order = proposal
        chain = _rounded(weights, mixture, order)
        answer = JointOrder(*polish(weights, *chain, self.x, self.y, floor=self.floor))
        if self.best is None or answer.mse < self.best.mse:
            self.best = answer
        return self.best


def from_evidence(search: JointSearch) -> Iterator[Proposal]:
    """Regressions whose prior is the evidence of the weights, believed more or less."""
    parts, x, y = search.parts, search.x, search.y
    for share in _SHARES:
        belief = soft_belief(parts, search.evidence, share)
        yield parts, *infer_pairing(parts, x, y, belief, first_order(parts, x, y, belief))


def around_best(search: JointSearch) -> Iterator[Proposal]:
    """Regressions around the best order, where the linear model is truer, its pairs believed by half or less."""
    number = idle = 0
    while search.best is not None and idle < _IDLE:
        best = search.best
        mixture, order = soft_permutation(best.parts, best.ins, best.outs, 0.6 - 0.1 * (number % 6))
        belief = soft_belief(search.parts, search.evidence, _SHARES[number % 2])
        mixed = _PART * belief + (1 - _PART) * mixture
        yield best.parts, *infer_pairing(best.parts, search.x, search.y, mixed, order, ordered=True)
        number, idle = number + 1, 0 if search.best.mse < 0.999 * best.mse else idle + 1


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


def _rounded(parts: ResidualWeights, mixture: NDArray[np.float64], order: Ints) -> tuple[Ints, Ints]:
    """Whole pairs from a mixture, in the order of the relaxation."""
    if not parts.shared:
        return order, assign(mixture)[order]
    ins, outs = match(mixture)
    place = np.empty(len(order), dtype=np.intp)
    place[order] = np.arange(len(order))
    by_place = np.argsort(place[ins])
    return ins[by_place], outs[by_place]


def polish(
    parts: ResidualWeights, ins: Ints, outs: Ints, x: Floats, y: Floats, *, floor: float, rounds: int = 30
) -> tuple[ResidualWeights, Ints, Ints, float]:
    """Alternate ordering and exchanging pieces and norms from a given chain until neither lowers the error."""
    mse = parts.mse(ins, outs, x, y)
    for number in range(rounds):
        before = mse
        order, mse = regress_order(parts, ins, outs, x, y, steps=4 if number else 12, floor=floor)
        ins, outs = ins[order], outs[order]
        if mse < floor:
            break
        ins, outs, mse = exchange(parts, ins, outs, x, y)
        if parts.norm_assignment is not None and mse >= floor:
            parts, mse = assign_norms(parts, ins, outs, x, y)
        if mse < floor or mse > 0.999 * before:
            break
    return parts, ins, outs, mse


def exchange(parts: ResidualWeights, ins: Ints, outs: Ints, x: Floats, y: Floats) -> tuple[Ints, Ints, float]:
    """Exchange pieces between blocks once: the best of many reassignments and single exchanges, by the true error.

    A socket is a place for a piece: the output side of each block and, where shape leaves the roles open, the input
    side too. The effect of every piece in every socket is predicted; proposals are made from these effects.
    """
    passed = run(parts, ins, outs, x)
    effects, sockets = output_side_effects(parts, passed), outs
    if parts.shared:
        effects = np.concatenate([effects, input_side_effects(parts, outs, passed)], axis=1)
        sockets = np.concatenate([outs, ins])
    error = (y - passed.output).T.reshape(-1)
    best, chain = float(np.mean(np.square(error, dtype=np.float64))), (ins, outs)
    proposals = _reassignments(effects, np.eye(len(sockets))[sockets], error)
    for proposal in _distinct(proposals + _best_exchanges(effects, sockets, error, count=12)):
        trial = (proposal[len(ins) :], proposal[: len(ins)]) if parts.shared else (ins, proposal)
        mse = parts.mse(*trial, x, y)
        if mse < best:
            best, chain = mse, trial
    return *chain, best


def assign_norms(
    parts: ResidualWeights, ins: Ints, outs: Ints, x: Floats, y: Floats
) -> tuple[ResidualWeights, float]:
    """Assign norms to the blocks of a chain once: the best of many reassignments and single exchanges.

    Returns:
        The weights with the best norms folded in, and the mean squared error.
    """
    norm_assignment = parts.norm_assignment
    best, best_weights = parts.mse(ins, outs, x, y), parts
    if norm_assignment is None or parts.norm is None:
        return best_weights, best
    output, effects = norm_effects(parts, norm_assignment, ins, outs, x)
    error = (y - output).T.reshape(-1)
    now = norm_assignment.norm_of_projection[ins]
    if norm_assignment.last is not None:
        now = np.append(now, norm_assignment.last)
    proposals = _reassignments(effects, _shared_evenly(now, effects.shape[2]), error)
    if not (now == MEAN).any():
        proposals += _best_exchanges(effects, now, error, count=8)
    for proposal in _distinct(proposals):
        trial = fold_norms(parts, _assigned_to(norm_assignment, ins, proposal))
        mse = trial.mse(ins, outs, x, y)
        if mse < best:
            best, best_weights = mse, trial
    return best_weights, best


def _reassignments(effects: Floats, here: Matrix, error: Floats) -> list[Ints]:
    """Assignments of pieces to places that ridge regressions of the error on all effects propose.

    Row and column means are taken out: an assignment keeps all sums, so only the rest matters.
    """
    places = effects.mean(axis=2, keepdims=True)
    centred = effects - places - effects.mean(axis=1, keepdims=True) + places.mean(axis=1, keepdims=True)
    changes = ridge(np.asarray(centred).reshape(len(error), -1), error, RIDGES)
    return [
        assign(here + reach * change.reshape(here.shape)) for change in changes for reach in (1.0, 2.0, 4.0)
    ]


def _best_exchanges(effects: Floats, now: Ints, error: Floats, count: int) -> list[Ints]:
    """The exchanges of two places' pieces with the least predicted error."""
    moved = effects[:, :, now]  # rows, place s, piece now in place t
    present = np.einsum("xss->xs", moved)
    first, second = np.triu_indices(len(now), 1)
    change = moved[:, first, second] + moved[:, second, first] - present[:, first] - present[:, second]
    predicted = np.einsum("xp,xp->p", change, change) - 2 * (error @ change)
    exchanges = []
    for c in np.argsort(predicted, kind="stable")[:count]:
        exchanged = now.copy()
        exchanged[[first[c], second[c]]] = exchanged[[second[c], first[c]]]
        exchanges.append(exchanged)
    return exchanges


def _distinct(proposals: list[Ints]) -> list[Ints]:
    return list({proposal.tobytes(): proposal for proposal in proposals}.values())


def _assigned_to(norm_assignment: NormAssignment, ins: Ints, norms: Ints) -> NormAssignment:
    """Assign these norms to the input projections of an order, and the mean to all others."""
    assigned = np.full(len(norm_assignment.norm_of_projection), MEAN)
    assigned[ins] = norms[: len(ins)]
    return replace(
        norm_assignment,
        norm_of_projection=assigned,
        last=int(norms[-1]) if norm_assignment.last is not None else None,
    )


def norm_effects(
    parts: ResidualWeights, norm_assignment: NormAssignment, ins: Ints, outs: Ints, x: Floats
) -> tuple[Floats, NDArray[np.float32]]:
    """The output, and the first-order effect of each norm in each place: (outputs * rows, places, norms)."""
    passed = run(parts, ins, outs, x)
    rows, outputs = passed.output.shape
    places = len(ins) + (norm_assignment.last is not None)
    effects = np.empty((outputs, rows, places, len(norm_assignment.weights)), dtype=np.float32)
    for k, (i, j) in enumerate(zip(ins, outs, strict=True)):
        read = parts.enter(passed.streams[k])
        slope = parts.act.slope(read @ parts.w_in[i].T + parts.b_in[i])
        for q in range(outputs):
            back = ((passed.adjoint[k + 1][q] @ parts.w_out[j]) * slope) @ norm_assignment.w_in[i]
            effects[q, :, k] = (back * read) @ norm_assignment.weights.T + back @ norm_assignment.biases.T
    if norm_assignment.last is not None:
        read = parts.leave(passed.streams[-1])
        for q in range(outputs):
            effects[q, :, -1] = (
                read * norm_assignment.w_last[q]
            ) @ norm_assignment.weights.T + norm_assignment.w_last[q] @ norm_assignment.biases.T
    return passed.output, effects.reshape(outputs * rows, places, -1)


def _shared_evenly(now: Ints, norms: int) -> NDArray[np.float64]:
    """Assignment weights (blocks x norms); unassigned blocks share the remaining norms."""
    here = np.zeros((len(now), norms))
    left = np.setdiff1d(np.arange(norms), now)
    for place, norm in enumerate(now):
        if norm == MEAN:
            here[place, left] = 1 / max(len(left), 1)
        else:
            here[place, norm] = 1
    return here


MOST = 50_000
"""Up to so many arrangements are tried: five blocks; four where shapes leave the roles open."""
_FINAL = 16  # of the best on some rows are measured on all


def arrangement_count(parts: ResidualWeights) -> int:
    """Number of arrangements of the pieces.

    Examples:
        >>> from strati.reassembly.residual.network import activation
        >>> from strati.reassembly.residual.network import ResidualWeights
        >>> A = np.ones((4, 3, 2), dtype=np.float32)
        >>> last = A[0, :1], A[0, 0, :1]
        >>> four = ResidualWeights(A, A[:, :, 0], A.transpose(0, 2, 1), A[:, 0], *last, activation("relu"), 4)
        >>> arrangement_count(four)
        576
    """
    return math.factorial(2 * parts.blocks) if parts.shared else math.factorial(parts.blocks) ** 2


def search_all(parts: ResidualWeights, x: Floats, y: Floats, *, rows: int = 96) -> tuple[Ints, Ints, float]:
    """The arrangement of least mean squared error, and that error.

    Args:
        parts: The pieces.
        x: Inputs.
        y: Outputs.
        rows: Of the data, taken evenly, on which all arrangements are tried; the best are judged on all.
    """
    step = max(1, len(x) // rows)
    few = np.ascontiguousarray(x[::step]), y[::step]
    best = heapq.nsmallest(_FINAL, _arrangements(parts), key=lambda a: parts.mse(a[0], a[1], *few))
    ins, outs = min(best, key=lambda a: parts.mse(a[0], a[1], x, y))
    return ins, outs, parts.mse(ins, outs, x, y)


def _arrangements(parts: ResidualWeights) -> Iterator[tuple[Ints, Ints]]:
    n = parts.blocks
    if parts.shared:
        for order in permutations(range(2 * n)):
            yield np.array(order[:n]), np.array(order[n:])
    else:
        for ins, outs in product(permutations(range(n)), repeat=2):
            yield np.array(ins), np.array(outs)
