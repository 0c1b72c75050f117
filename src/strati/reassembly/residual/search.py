"""Pairing and order searched together with the data, for networks whose weights do not show the pairs.

A proposal is a mixture of output projections for every input projection, and an order; it comes from a regression of
the data (:mod:`strati.reassembly.residual.posterior`). Rounded to whole pairs, it is improved by :func:`polish`:
ordering by regression alternates with exchanging pieces and norms between blocks, both predicted by the adjoint and
accepted only if the true error falls. With few blocks :func:`try_every` tries all arrangements.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import TYPE_CHECKING

import numpy as np

from strati.core.assignment import assign, match
from strati.reassembly.residual.network import (
    MEAN,
    NormAssignment,
    fold_norms,
    input_side_effects,
    output_side_effects,
    run,
)
from strati.reassembly.residual.order import RIDGES, regress_order, ridge
from strati.reassembly.residual.posterior import (
    first_order,
    infer_pairing,
    soft_belief,
    soft_permutation,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.residual.network import Floats, Ints, ResidualWeights

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


MOST, MOST_ORDERS = 50_000, 5_040
"""Up to so many arrangements of pieces are tried (five blocks; four where shapes leave the roles open), and so many
orders of paired blocks (seven)."""
_FINAL = 16  # of the best on some rows are measured on all


def how_many(parts: ResidualWeights, *, paired: bool) -> int:
    """Number of arrangements: of whole blocks if the pieces are paired, of single pieces otherwise.

    Examples:
        >>> from strati.reassembly.residual.network import activation
        >>> from strati.reassembly.residual.network import ResidualWeights
        >>> A = np.ones((4, 3, 2), dtype=np.float32)
        >>> last = A[0, :1], A[0, 0, :1]
        >>> four = ResidualWeights(A, A[:, :, 0], A.transpose(0, 2, 1), A[:, 0], *last, activation("relu"), 4)
        >>> how_many(four, paired=True), how_many(four, paired=False)
        (24, 576)
    """
    if paired:
        return math.factorial(parts.blocks)
    return math.factorial(2 * parts.blocks) if parts.shared else math.factorial(parts.blocks) ** 2


def try_every(
    parts: ResidualWeights, x: Floats, y: Floats, *, pairs: tuple[Ints, Ints] | None = None, rows: int = 96
) -> tuple[Ints, Ints, float]:
    """The arrangement of least mean squared error, and that error.

    Args:
        parts: The pieces.
        x: Inputs.
        y: Outputs.
        pairs: Which pieces form a block, if that is known: then only their order is open.
        rows: Of the data, taken evenly, on which all arrangements are tried; the best are judged on all.
    """
    step = max(1, len(x) // rows)
    few = np.ascontiguousarray(x[::step]), y[::step]
    best = heapq.nsmallest(_FINAL, _arrangements(parts, pairs), key=lambda chain: parts.mse(*chain, *few))
    ins, outs = min(best, key=lambda chain: parts.mse(*chain, x, y))
    return ins, outs, parts.mse(ins, outs, x, y)


def _arrangements(parts: ResidualWeights, pairs: tuple[Ints, Ints] | None) -> Iterator[tuple[Ints, Ints]]:
    n = parts.blocks
    if pairs is not None:
        for order in permutations(range(n)):
            yield pairs[0][list(order)], pairs[1][list(order)]
    elif parts.shared:
        for order in permutations(range(2 * n)):
            yield np.array(order[:n]), np.array(order[n:])
    else:
        for ins, outs in product(permutations(range(n)), repeat=2):
            yield np.array(ins), np.array(outs)
