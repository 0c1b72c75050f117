"""Pairing and order searched together with the data, for networks whose weights do not tell the pairs.

The first starts are the chains that the weights' signals suggest, every other a relaxation
(:mod:`strati.reassembly.relaxed`) rounded to whole pairs. From there, ordering by
regression alternates with exchanging pieces between blocks, both predicted by the adjoint and accepted only
if the true error falls; single exchanges finish. If that ends short of exact, every second start loosens the
best chain so far and relaxes again, the others begin from another mixture and order, until the time is over.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.assignment import assign, match
from strati.reassembly.norms import dress
from strati.reassembly.passes import run
from strati.reassembly.posterior import first_order, settle, softened_belief
from strati.reassembly.regression import RIDGES, regress_order, ridge
from strati.reassembly.relaxed import relax, softened, to_polytope, uniform
from strati.reassembly.repair import insert, insertion_rows
from strati.rng import stream
from strati.types import Tick, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strati.reassembly.passes import Floats, Ints, Parts


_SHARES = (0.5, 0.25, 0.1)
_PART = 0.5
_IDLE = 6
"""How much of the weights' evidence is believed at the first starts; the share of that belief in later
starts; so many starts from the best chain's order without gain end these."""


@dataclass(frozen=True)
class JointOrder:
    """A chain and its error on the rows searched; ``starts`` counts the starts it took, ``parts`` wear their norms."""

    parts: Parts
    ins: Ints
    outs: Ints
    mse: float
    starts: int


def search(
    parts: Parts,
    x: Floats,
    y: Floats,
    *,
    prior: NDArray[np.float64] | None = None,
    chains: Sequence[tuple[Ints, Ints]] = (),
    floor: float,
    seconds: float = 60.0,
    seed: int = 0,
    tick: Tick = silent,
) -> JointOrder:
    """Search pairing and order together.

    Args:
        parts: The weights.
        x: Inputs.
        y: Outputs to reach.
        prior: Evidence in nats, from the weights, that input and output projection are a pair; used to start some
            of the searches.
        chains: Pairs in an order to start from, likeliest first, one for each signal of the weights: where one of
            them tells most pairs, a few exchanges are enough.
        floor: Mean squared error that counts as exact.
        seconds: No new start after so long.
        seed: Seed of the starts after the first two.
        tick: Called after each start.
    """
    began = time.monotonic()
    best: JointOrder | None = None
    for share in _SHARES:
        if prior is None or (best is not None and (best.mse < floor or time.monotonic() - began > seconds)):
            break
        believed = softened_belief(parts, prior, share)
        settled = settle(parts, x, y, believed, first_order(parts, x, y, believed))
        tried = JointOrder(
            *polish(parts, *_rounded(parts, settled.mixture, settled.order), x, y, floor=floor), 0
        )
        tick(f"belief {share:g}")
        best = tried if best is None or tried.mse < best.mse else best
    number = idle = 0
    while best is not None and prior is not None and idle < _IDLE:
        if best.mse < floor or time.monotonic() - began > seconds:
            break
        # around the best chain's order the linear picture is truer: its pairs are believed by half, or less
        held, order = softened(best.parts, best.ins, best.outs, 0.6 - 0.1 * (number % 6))
        mixed = _PART * softened_belief(parts, prior, _SHARES[number % 2]) + (1 - _PART) * held
        settled = settle(best.parts, x, y, mixed, order, ordered=True)
        rounded = _rounded(parts, settled.mixture, settled.order)
        tried = JointOrder(*polish(best.parts, *rounded, x, y, floor=floor), 0)
        number, idle = number + 1, 0 if tried.mse < 0.999 * best.mse else idle + 1
        tick(f"refined {number}")
        best = tried if tried.mse < best.mse else best
    for chain in chains:
        if best is not None and (best.mse < floor or time.monotonic() - began > seconds):
            break
        tried = JointOrder(*polish(parts, *chain, x, y, floor=floor), 0)
        best = tried if best is None or tried.mse < best.mse else best
    start = 0
    while best is None or (best.mse >= floor and time.monotonic() - began < seconds):
        rng = stream(seed, "reassembly", start)
        if best is not None and start % 2:
            # what is nearly right is loosened rather than thrown away: a few pieces are usually entangled
            parts = best.parts
            mixture, order = softened(parts, best.ins, best.outs, float(rng.uniform(0.2, 0.9)))
        else:
            mixture = _start(parts, prior, start // 2, rng)
            order = np.arange(len(parts.A)) if start < 3 else rng.permutation(len(parts.A))
        if prior is not None and start % 4 in (1, 2):
            # what the weights say, believed more or less, and mixed with the best chain or with chance
            mixed = (
                _PART * softened_belief(parts, prior, float(rng.uniform(0.05, 0.8))) + (1 - _PART) * mixture
            )
            relaxed = settle(parts, x, y, mixed, order, ordered=start % 4 == 1)
        else:
            relaxed = relax(parts, x, y, mixture, order, steps=6 + 2 * (start % 3), ordered=bool(start % 2))
        ins, outs = _rounded(parts, relaxed.mixture, relaxed.order)
        tried = JointOrder(*polish(parts, ins, outs, x, y, floor=floor), start)
        start += 1
        tick(f"start {start}")
        best = replace(tried if best is None or tried.mse < best.mse else best, starts=start)
    return best


def polish(
    parts: Parts, ins: Ints, outs: Ints, x: Floats, y: Floats, *, floor: float, rounds: int = 30
) -> tuple[Parts, Ints, Ints, float]:
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
        if parts.wardrobe is not None and mse >= floor:
            parts, mse = dress(parts, ins, outs, x, y)
        if mse < floor or mse > 0.999 * before:
            break
    return parts, ins, outs, mse


def _inserted(
    parts: Parts, ins: Ints, outs: Ints, x: Floats, y: Floats, mse: float, rounds: int = 6
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


def exchange(parts: Parts, ins: Ints, outs: Ints, x: Floats, y: Floats) -> tuple[Ints, Ints, float]:
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


def _start(
    parts: Parts, prior: NDArray[np.float64] | None, start: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Start 0 knows nothing, start 1 believes the weights, later ones mix belief and chance."""
    if start == 0 or (prior is None and start == 1):
        return uniform(parts)
    belief = np.zeros(uniform(parts).shape) if prior is None else prior
    if start > 1:
        belief = rng.uniform(0, 1) * belief + rng.uniform(0, 1) * rng.standard_normal(belief.shape)
    return to_polytope(np.exp(np.clip(belief, -20, 20)) + 1e-3, parts.shared, rounds=200)


def _rounded(parts: Parts, mixture: NDArray[np.float64], order: Ints) -> tuple[Ints, Ints]:
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


def to_sockets(parts: Parts, ins: Ints, outs: Ints) -> Ints:
    """The piece in each socket of a chain."""
    return np.concatenate([outs, ins]) if parts.shared else outs.copy()


def from_sockets(parts: Parts, sockets: Ints, ins: Ints) -> tuple[Ints, Ints]:
    """The chain that the pieces in the sockets make; ``ins`` where only outputs have sockets."""
    n = len(ins)
    return (sockets[n:], sockets[:n]) if parts.shared else (ins, sockets)


def socket_effects(parts: Parts, ins: Ints, outs: Ints, x: Floats) -> tuple[Floats, Floats]:
    """The output, and the effect of each piece in each socket: (outputs * rows, sockets, pieces)."""
    passed = run(parts, ins, outs, x)
    n, (m, d, h) = len(ins), parts.B.shape
    rows, outputs = passed.output.shape
    flat_B = np.ascontiguousarray(parts.B.transpose(1, 0, 2).reshape(d, m * h))
    flat_A = np.ascontiguousarray(parts.A.reshape(m * h, d).T)
    effects = np.empty((outputs, rows, 2 * n if parts.shared else n, m), dtype=np.float32)
    for k in range(n):
        for q in range(outputs):
            g = passed.adjoint[k + 1][q]
            carried = (g @ flat_B).reshape(rows, m, h)
            effects[q, :, k] = np.matmul(carried, passed.hidden[k][:, :, None])[:, :, 0] + g @ parts.b.T
        if parts.shared:
            hidden = parts.act.value(parts.enter(passed.streams[k]) @ flat_A + parts.a.reshape(-1)).reshape(
                rows, m, h
            )
            for q in range(outputs):
                carried = passed.adjoint[k + 1][q] @ parts.B[outs[k]]
                effects[q, :, n + k] = np.matmul(hidden, carried[:, :, None])[:, :, 0]
    return passed.output, effects.reshape(outputs * rows, *effects.shape[2:])


def _centred(effects: Floats) -> Floats:
    """Row and column means taken out: a reassignment keeps all sums, so only the rest matters."""
    sockets = effects.mean(axis=2, keepdims=True)
    pieces = effects.mean(axis=1, keepdims=True)
    return np.asarray(effects - sockets - pieces + sockets.mean(axis=1, keepdims=True))


def _best_exchanges(effects: Floats, sockets: Ints, error: Floats, count: int) -> list[tuple[int, int]]:
    """The single exchanges of two sockets' pieces with the least predicted error."""
    size = len(sockets)
    moved = effects[:, :, sockets]  # rows, socket s, piece now in socket t
    own = np.einsum("xss->xs", moved)
    upper = np.triu_indices(size, 1)
    change = moved[:, upper[0], upper[1]] + moved[:, upper[1], upper[0]] - own[:, upper[0]] - own[:, upper[1]]
    predicted = np.einsum("xp,xp->p", change, change) - 2 * (error @ change)
    chosen = np.argsort(predicted, kind="stable")[:count]
    return [(int(upper[0][c]), int(upper[1][c])) for c in chosen]
