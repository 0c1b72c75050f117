"""Pairing and order searched together with the data, for networks whose weights do not show the pairs.

Starts are chains that the weights suggest and mixtures rounded to whole pairs. From there, ordering by regression
alternates with exchanging pieces (and norms) between blocks, both predicted by the adjoint and accepted only if the
true error falls. With few blocks all arrangements are tried.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from strati.core.assignment import assign, match
from strati.core.results import Tick, silent
from strati.core.rng import stream
from strati.reassembly.residual.network import MEAN, NormAssignment, fold_norms, run
from strati.reassembly.residual.order import RIDGES, insert, insertion_rows, regress_order, ridge
from strati.reassembly.residual.posterior import (
    first_order,
    infer_pairing,
    soft_belief,
    soft_permutation,
    to_polytope,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from strati.reassembly.residual.network import Floats, Ints, Pass, ResidualWeights

    Matrix = NDArray[np.float64]
    _Proposal = tuple[ResidualWeights, Matrix, Ints]  # weights, a mixture to round to pairs, an order


def assign_norms(
    parts: ResidualWeights, ins: Ints, outs: Ints, x: Floats, y: Floats
) -> tuple[ResidualWeights, float]:
    """One step of assigning norms to the blocks of a chain: the best of many reassignments and single exchanges.

    Returns:
        The weights with the best norms folded in, and the mean squared error.
    """
    norm_assignment = parts.norm_assignment
    best, best_weights = parts.mse(ins, outs, x, y), parts
    if norm_assignment is None or parts.norm is None:
        return best_weights, best
    output, effects = _effects(parts, norm_assignment, ins, outs, x)
    error = (y - output).T.reshape(-1)
    now = norm_assignment.norm_of_projection[ins]
    if norm_assignment.last is not None:
        now = np.append(now, norm_assignment.last)
    centred = effects - effects.mean(axis=2, keepdims=True) - effects.mean(axis=1, keepdims=True)
    centred += effects.mean(axis=(1, 2), keepdims=True)
    here = _weights(now, effects.shape[2])
    changes = ridge(centred.reshape(len(error), -1), error, RIDGES)
    proposals = [assign(here + reach * c.reshape(here.shape)) for c in changes for reach in (1.0, 2.0, 4.0)]
    if not (now == MEAN).any():
        proposals += _exchanges(effects, now, error)
    for proposal in {p.tobytes(): p for p in proposals}.values():
        trial = fold_norms(parts, _assigned_to(norm_assignment, ins, proposal))
        mse = trial.mse(ins, outs, x, y)
        if mse < best:
            best, best_weights = mse, trial
    return best_weights, best


def _assigned_to(norm_assignment: NormAssignment, ins: Ints, norms: Ints) -> NormAssignment:
    """Assign these norms to the input projections of an order, and the mean to all others."""
    assigned = np.full(len(norm_assignment.norm_of_projection), MEAN)
    assigned[ins] = norms[: len(ins)]
    return replace(
        norm_assignment,
        norm_of_projection=assigned,
        last=int(norms[-1]) if norm_assignment.last is not None else None,
    )


def _effects(
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


def _weights(now: Ints, norms: int) -> NDArray[np.float64]:
    """Assignment weights (blocks x norms); unassigned blocks share the remaining norms."""
    here = np.zeros((len(now), norms))
    left = np.setdiff1d(np.arange(norms), now)
    for place, norm in enumerate(now):
        if norm == MEAN:
            here[place, left] = 1 / max(len(left), 1)
        else:
            here[place, norm] = 1
    return here


def _exchanges(effects: Floats, now: Ints, error: Floats, count: int = 8) -> list[Ints]:
    """The exchanges of two places' norms with the least predicted error."""
    swapped_in = effects[:, :, now]
    present = np.einsum("xss->xs", swapped_in)
    first, second = np.triu_indices(len(now), 1)
    change = (
        swapped_in[:, first, second] + swapped_in[:, second, first] - present[:, first] - present[:, second]
    )
    predicted = np.einsum("xp,xp->p", change, change) - 2 * (error @ change)
    exchanges = []
    for c in np.argsort(predicted, kind="stable")[:count]:
        exchanged = now.copy()
        exchanged[[first[c], second[c]]] = exchanged[[second[c], first[c]]]
        exchanges.append(exchanged)
    return exchanges


MOST, MOST_ORDERS = 50_000, 5_040
"""Up to so many arrangements of pieces are tried (five blocks; four whose shapes do not tell inputs from outputs), and
so many orders of blocks (seven), which a wrong pair makes worthless."""
_FINAL = 16  # of the best on some rows are judged on all


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
    inputs, outputs = np.ascontiguousarray(x[::step]), y[::step]
    best: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = []
    with np.errstate(over="ignore", invalid="ignore"):
        for stream, ins, outs in _chains(parts, inputs, (), (), pairs):
            error = parts.leave(stream) @ parts.w_last.T + parts.b_last - outputs
            mse = float(np.mean(np.square(error, dtype=np.float64)))
            entry = (-mse if math.isfinite(mse) else -math.inf, ins, outs)
            if len(best) < _FINAL:
                heapq.heappush(best, entry)
            elif entry > best[0]:
                heapq.heapreplace(best, entry)
    judged = [(parts.mse(np.array(i), np.array(o), x, y), i, o) for _, i, o in sorted(best, reverse=True)]
    mse, ins, outs = min(judged)
    return np.array(ins), np.array(outs), mse


def _chains(
    parts: ResidualWeights,
    stream: Floats,
    ins: tuple[int, ...],
    outs: tuple[int, ...],
    pairs: tuple[Ints, Ints] | None,
) -> Iterator[tuple[Floats, tuple[int, ...], tuple[int, ...]]]:
    """Every way to go on from some blocks: the stream after the last, and the pieces in order."""
    if len(ins) == parts.blocks:
        yield stream, ins, outs
        return
    partner = None if pairs is None else dict(zip(pairs[0].tolist(), pairs[1].tolist(), strict=True))
    for i in range(len(parts.w_in)) if partner is None else partner:
        if i in ins or (parts.shared and i in outs):
            continue
        hidden = parts.act.value(parts.enter(stream) @ parts.w_in[i].T + parts.b_in[i])
        for j in range(len(parts.w_out)) if partner is None else (partner[i],):
            if j in outs or (parts.shared and (j == i or j in ins)):
                continue
            after = stream + hidden @ parts.w_out[j].T + parts.b_out[j]
            yield from _chains(parts, after, (*ins, i), (*outs, j), pairs)


_SHARES = (0.5, 0.25, 0.1)
_PART = 0.5
_IDLE = 6
"""How much of the weights' evidence is believed at the first starts; the share of that belief in later
starts; so many starts from the best chain's order without gain end these."""


@dataclass(frozen=True)
class JointOrder:
    """Pairs in an order, their error on the rows searched, and the weights with the norms assigned to them."""

    parts: ResidualWeights
    ins: Ints
    outs: Ints
    mse: float


@dataclass
class _Problem:
    """What the strategies work on; ``best`` is the best arrangement so far."""

    parts: ResidualWeights
    x: Floats
    y: Floats
    prior: Matrix
    seed: int
    best: JointOrder | None = None


def search(
    parts: ResidualWeights,
    x: Floats,
    y: Floats,
    *,
    prior: Matrix,
    floor: float,
    seconds: float = 60.0,
    seed: int = 0,
    tick: Tick = silent,
) -> JointOrder:
    """Search pairing and order together: the strategies in turn, until one is exact or the time is over.

    Args:
        parts: The weights.
        x: Inputs.
        y: Outputs to reach.
        prior: Evidence in nats, from the weights, that input and output projection are a pair.
        floor: Mean squared error that counts as exact.
        seconds: No new proposal after so long.
        seed: Seed of the restarts.
        tick: Called after each proposal.
    """
    began = time.monotonic()
    problem = _Problem(parts, x, y, prior, seed)
    for name, propose in STRATEGIES:
        for number, (weights, mixture, order) in enumerate(propose(problem), start=1):
            answer = JointOrder(*polish(weights, *_rounded(weights, mixture, order), x, y, floor=floor))
            if problem.best is None or answer.mse < problem.best.mse:
                problem.best = answer
            tick(f"{name} {number}")
            if problem.best.mse < floor or time.monotonic() - began > seconds:
                return problem.best
    assert problem.best is not None  # the first strategy has made a proposal
    return problem.best


def _by_belief(problem: _Problem) -> Iterator[_Proposal]:
    """Evidence of the weights, believed more or less, as the prior of a regression on the data."""
    parts, x, y = problem.parts, problem.x, problem.y
    for share in _SHARES:
        belief = soft_belief(parts, problem.prior, share)
        inferred = infer_pairing(parts, x, y, belief, first_order(parts, x, y, belief))
        yield parts, inferred.mixture, inferred.order


def _around_the_best(problem: _Problem) -> Iterator[_Proposal]:
    """Regressions around the best order, where the linear picture is truer, its pairs believed by half or less."""
    number = idle = 0
    while problem.best is not None and idle < _IDLE:
        best = problem.best
        mixture, order = soft_permutation(best.parts, best.ins, best.outs, 0.6 - 0.1 * (number % 6))
        belief = soft_belief(problem.parts, problem.prior, _SHARES[number % 2])
        mixed = _PART * belief + (1 - _PART) * mixture
        inferred = infer_pairing(best.parts, problem.x, problem.y, mixed, order, ordered=True)
        yield best.parts, inferred.mixture, inferred.order
        number, idle = number + 1, 0 if problem.best.mse < 0.999 * best.mse else idle + 1


def _restarts(problem: _Problem) -> Iterator[_Proposal]:
    """By turns the best arrangement loosened, and random mixtures and orders; each with the weights' evidence."""
    for number in count():
        rng = stream(problem.seed, "reassembly", number)
        parts = problem.parts
        loosened = number % 2 == 1 and problem.best is not None
        if loosened and problem.best is not None:
            best, parts = problem.best, problem.best.parts
            mixture, order = soft_permutation(parts, best.ins, best.outs, float(rng.uniform(0.2, 0.9)))
        else:
            noise = rng.uniform(0, 1) * problem.prior + rng.uniform(0, 1) * rng.standard_normal(
                problem.prior.shape
            )
            mixture = to_polytope(np.exp(np.clip(noise, -20, 20)) + 1e-3, parts.shared, rounds=200)
            order = rng.permutation(len(parts.w_in))
        belief = soft_belief(parts, problem.prior, float(rng.uniform(0.05, 0.8)))
        mixed = _PART * belief + (1 - _PART) * mixture
        inferred = infer_pairing(parts, problem.x, problem.y, mixed, order, ordered=loosened)
        yield parts, inferred.mixture, inferred.order


STRATEGIES: tuple[tuple[str, Callable[[_Problem], Iterator[_Proposal]]], ...] = (
    ("belief", _by_belief),
    ("around the best", _around_the_best),
    ("restart", _restarts),
)
"""Names and proposals, in the order in which they are tried. Of 25 networks (random and trained, 8 to 24 blocks, 25 s
each) the first one solved 23, and none of the others the remaining two."""


def polish(
    parts: ResidualWeights, ins: Ints, outs: Ints, x: Floats, y: Floats, *, floor: float, rounds: int = 30
) -> tuple[ResidualWeights, Ints, Ints, float]:
    """Alternate ordering and exchanging pieces (and norms) from a given chain until neither lowers the error."""
    mse = parts.mse(ins, outs, x, y)
    for number in range(rounds):
        before = mse
        order, mse = regress_order(parts, ins, outs, x, y, steps=4 if number else 12, floor=floor)
        ins, outs = ins[order], outs[order]
        if mse >= floor:
            ins, outs, mse = _inserted(parts, ins, outs, x, y, mse)
        if mse < floor:
            break
        ins, outs, mse = exchange(parts, ins, outs, x, y)
        if parts.norm_assignment is not None and mse >= floor:
            parts, mse = assign_norms(parts, ins, outs, x, y)
        if mse < floor or mse > 0.999 * before:
            break
    return parts, ins, outs, mse


def _inserted(
    parts: ResidualWeights, ins: Ints, outs: Ints, x: Floats, y: Floats, mse: float, rounds: int = 6
) -> tuple[Ints, Ints, float]:
    """Blocks put elsewhere, judged on some rows, while that lowers the error on all of them."""
    step = max(1, len(x) // insertion_rows(len(ins)))
    for _ in range(rounds):
        order, _, moves = insert(parts, ins, outs, x[::step], y[::step])
        new = parts.mse(ins[order], outs[order], x, y) if moves else mse
        if new >= 0.99 * mse:
            break
        ins, outs, mse = ins[order], outs[order], new
    return ins, outs, mse


def exchange(parts: ResidualWeights, ins: Ints, outs: Ints, x: Floats, y: Floats) -> tuple[Ints, Ints, float]:
    """One step of exchanging pieces between blocks: the best of many reassignments and single exchanges.

    The effect of putting piece ``p`` into socket ``s`` is predicted for all sockets and pieces; a ridge
    regression of the error on these effects proposes reassignments (Hungarian), and the best single
    exchanges are proposed by their predicted error. Each proposal is judged by a true forward pass.
    """
    sockets = to_sockets(parts, ins, outs)
    output, effects = socket_effects(parts, ins, outs, x)
    error = (y - output).T.reshape(-1)
    best, chain = float(np.mean(np.square(error, dtype=np.float64))), sockets
    size = len(sockets)
    here = np.zeros((size, size))
    here[np.arange(size), sockets] = 1
    proposals = [
        assign(here + reach * change.reshape(size, size))
        for change in ridge(_centred(effects).reshape(len(error), -1), error, RIDGES)
        for reach in (1.0, 2.0, 4.0)
    ]
    for s, t in _best_exchanges(effects, sockets, error, count=12):
        exchanged = sockets.copy()
        exchanged[[s, t]] = exchanged[[t, s]]
        proposals.append(exchanged)
    for proposal in {p.tobytes(): p for p in proposals}.values():
        mse = parts.mse(*from_sockets(parts, proposal, ins), x, y)
        if mse < best:
            best, chain = mse, proposal
    return *from_sockets(parts, chain, ins), best


def _rounded(parts: ResidualWeights, mixture: NDArray[np.float64], order: Ints) -> tuple[Ints, Ints]:
    """Whole pairs from a mixture, in the order of the relaxation."""
    if not parts.shared:
        return order, assign(mixture)[order]
    ins, outs = match(mixture)
    place = np.empty(len(order), dtype=np.intp)
    place[order] = np.arange(len(order))
    by_place = np.argsort(place[ins])
    return ins[by_place], outs[by_place]


# A socket is a place for a piece: the output side of each block and, where shape does not tell the roles
# apart, the input side too (sockets n to 2n - 1).


def to_sockets(parts: ResidualWeights, ins: Ints, outs: Ints) -> Ints:
    """The piece in each socket of a chain."""
    return np.concatenate([outs, ins]) if parts.shared else outs.copy()


def from_sockets(parts: ResidualWeights, sockets: Ints, ins: Ints) -> tuple[Ints, Ints]:
    """The chain that the pieces in the sockets make; ``ins`` where only outputs have sockets."""
    n = len(ins)
    return (sockets[n:], sockets[:n]) if parts.shared else (ins, sockets)


def socket_effects(parts: ResidualWeights, ins: Ints, outs: Ints, x: Floats) -> tuple[Floats, Floats]:
    """The output, and the effect of each piece in each socket: (outputs * rows, sockets, pieces)."""
    passed = run(parts, ins, outs, x)
    effects = output_side_effects(parts, passed)
    if parts.shared:
        effects = np.concatenate([effects, input_side_effects(parts, outs, passed)], axis=1)
    return passed.output, effects


def output_side_effects(parts: ResidualWeights, passed: Pass) -> Floats:
    """First-order effect of each output projection in each block: (outputs * rows, blocks, pieces)."""
    m, d, h = parts.w_out.shape
    rows, outputs = passed.output.shape
    flat = np.ascontiguousarray(parts.w_out.transpose(1, 0, 2).reshape(d, m * h))
    effects = np.empty((outputs, rows, len(passed.hidden), m), dtype=np.float32)
    for k, hidden in enumerate(passed.hidden):
        for q, g in enumerate(passed.adjoint[k + 1]):
            carried = (g @ flat).reshape(rows, m, h)
            effects[q, :, k] = np.matmul(carried, hidden[:, :, None])[:, :, 0] + g @ parts.b_out.T
    return effects.reshape(outputs * rows, *effects.shape[2:])


def input_side_effects(parts: ResidualWeights, outs: Ints, passed: Pass) -> Floats:
    """The same of each input projection, but for a constant of each block: its output bias stays."""
    m, h, d = parts.w_in.shape
    rows, outputs = passed.output.shape
    flat = np.ascontiguousarray(parts.w_in.reshape(m * h, d).T)
    effects = np.empty((outputs, rows, len(outs), m), dtype=np.float32)
    for k, j in enumerate(outs):
        before = parts.enter(passed.streams[k]) @ flat + parts.b_in.reshape(-1)
        hidden = parts.act.value(before).reshape(rows, m, h)
        for q, g in enumerate(passed.adjoint[k + 1]):
            effects[q, :, k] = np.matmul(hidden, (g @ parts.w_out[j])[:, :, None])[:, :, 0]
    return effects.reshape(outputs * rows, *effects.shape[2:])


def _centred(effects: Floats) -> Floats:
    """Row and column means taken out: a reassignment keeps all sums, so only the rest matters."""
    sockets = effects.mean(axis=2, keepdims=True)
    pieces = effects.mean(axis=1, keepdims=True)
    return np.asarray(effects - sockets - pieces + sockets.mean(axis=1, keepdims=True))


def _best_exchanges(effects: Floats, sockets: Ints, error: Floats, count: int) -> list[tuple[int, int]]:
    """The single exchanges of two sockets' pieces with the least predicted error."""
    size = len(sockets)
    moved = effects[:, :, sockets]  # rows, socket s, piece now in socket t
    present = np.einsum("xss->xs", moved)
    upper = np.triu_indices(size, 1)
    change = (
        moved[:, upper[0], upper[1]]
        + moved[:, upper[1], upper[0]]
        - present[:, upper[0]]
        - present[:, upper[1]]
    )
    predicted = np.einsum("xp,xp->p", change, change) - 2 * (error @ change)
    best = np.argsort(predicted, kind="stable")[:count]
    return [(int(upper[0][c]), int(upper[1][c])) for c in best]
