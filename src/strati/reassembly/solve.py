"""The order of the unlabelled layers of a residual network, with data.

Pairs by the weights where these tell them, then an order by a seed and repair; where the pairs are not
told apart, or the order does not come out exact, a joint search with the data. Exact means that the
network reproduces its recorded outputs to rounding: a mean squared error below ``1e-10`` of their variance.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from strati.errors import BadInputError
from strati.reassembly import joint
from strati.reassembly.activations import ACTIVATIONS
from strati.reassembly.exhaustive import MOST, MOST_ORDERS, how_many, try_every
from strati.reassembly.last_layer import by_likelihood
from strati.reassembly.pairing import Pairing, Score, aligned, pair, pairing_of, scores, with_pairs
from strati.reassembly.passes import Parts, stack
from strati.reassembly.pieces import sort_all
from strati.reassembly.regression import regress_order
from strati.reassembly.repair import Round, insert, insertion_rows, sweep
from strati.reassembly.result import Reassembly, Stage
from strati.reassembly.seeds import Seed, seed_order
from strati.reassembly.unique import uniqueness
from strati.rng import stream
from strati.types import Flag, Tick, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strati.reassembly.config import ReassembleConfig
    from strati.reassembly.passes import Floats, Ints
    from strati.reassembly.pieces import Piece, PieceSet
    from strati.reassembly.unique import Uniqueness

EXACT = 1e-10
"""Mean squared error, as a share of the variance of the outputs, below which an answer is exact."""

_SWEEP = 192
_STRIDE = 17
_JUDGE = 500
_ALIGNED = 2000
"""Rows of a sweep, how far the next sweep's rows are shifted, rows on which a repaired order is judged, and rows
for the alignment of pairs with the outputs."""

_NOTHING = 0.5
"""The data are doubted where the error is more than this share of the outputs' variance and of the least error of
random orders: the search explains the outputs of its own network far better than that long before it is exact."""

_STAGES = 200
_DRAWN = 10_000
"""At most so many stages of the progression, and so many blocks in all of them together."""

_NEAR = 12
_MOST = 64
"""Regression of an order: pairs so far apart at most at first, and all of them only up to so many blocks."""


@dataclass(frozen=True)
class _Rows:
    """The data in float32, in which all searching is done, and as they were recorded."""

    x: Floats
    y: Floats
    exact_x: NDArray[np.float64]
    exact_y: NDArray[np.float64]


@dataclass
class _State:
    """The best chain so far, and how it was come by."""

    ins: Ints
    outs: Ints
    mse: float
    rounds: list[Round]
    stages: list[tuple[str, Ints, Ints, float]]

    def move(self, start: int, place: int, mse: float, name: str) -> None:
        """Take the block at one place out, put it at another, and note the stage."""
        order = np.insert(np.delete(np.arange(len(self.ins)), start), place, start)
        self.ins, self.outs, self.mse = self.ins[order], self.outs[order], mse
        self.stages.append((name, self.ins, self.outs, mse))

    def add_round(self, name: str, moves: int) -> None:
        """Note a round that led to the present chain and error."""
        self.rounds.append(Round(len(self.rounds) + 1, moves, self.mse))
        self.stages.append((name, self.ins, self.outs, self.mse))

    def correct_round(self) -> None:
        """The error of the last round, predicted so far, as measured."""
        self.rounds[-1] = Round(self.rounds[-1].round, self.rounds[-1].swaps, self.mse)
        self.stages[-1] = (*self.stages[-1][:3], self.mse)


def solve(
    pieces: Sequence[Piece],
    x: NDArray[Any],
    y: NDArray[Any],
    config: ReassembleConfig,
    *,
    where: object = "pieces",
    load_seconds: float = 0.0,
    tick: Tick = silent,
) -> Reassembly:
    """Put the layers of a residual network back in order.

    Args:
        pieces: The unlabelled layers.
        x: Inputs, rows x width.
        y: What the network answered to them (its predictions, not the true targets), rows or rows x outputs.
        config: How.
        where: What errors about the pieces name.
        load_seconds: Time already spent on reading, for the record.
        tick: Called as the work goes on.

    Raises:
        BadInputError: The pieces make no network, or the data do not fit them.
    """
    began = time.perf_counter()
    exact_inputs, exact_outputs = _data(x, y)
    inputs = np.ascontiguousarray(exact_inputs, dtype=np.float32)
    outputs = np.ascontiguousarray(exact_outputs, dtype=np.float32)
    readings = sort_all(pieces, width=inputs.shape[1], outputs=outputs.shape[1], where=where)
    _check_fit(readings[0], inputs, outputs)
    # the matrices are small: several BLAS threads gain nothing and, on a busy machine, wait for each other
    with threadpool_limits(limits=1, user_api="blas"):
        if len(readings) > 1:
            readings = by_likelihood(readings, inputs, outputs)
        best: Reassembly | None = None
        for number, reading in enumerate(readings):
            # half of the time left for each: the likeliest last layer is nearly always the one
            left = config.seconds - (time.perf_counter() - began)
            limited = replace(config, seconds=left / 2 if number + 1 < len(readings) else left)
            parts = stack(reading, config.activation)
            rows = _Rows(inputs, outputs, exact_inputs, exact_outputs)
            found = _solve(reading, parts, rows, limited, load_seconds, began, tick)
            best = found if best is None or found.mse < best.mse else best
            if best.exact or left < 0:
                break
    assert best is not None  # there is a reading, or sort_all has said why not
    return best


def _solve(
    pieces: PieceSet,
    parts: Parts,
    data: _Rows,
    options: ReassembleConfig,
    load_seconds: float,
    began: float,
    tick: Tick,
) -> Reassembly:
    x, y = data.x, data.y
    floor = EXACT * float(np.var(y, axis=0, dtype=np.float64).mean())
    rows = (x, y)
    pairing = _pairing(parts, options, rows)
    seed = Seed.L1 if options.seed_order == "auto" else Seed(options.seed_order)
    order = seed_order(parts, pairing.ins, pairing.outs, x, seed)
    ins, outs = pairing.ins[order], pairing.outs[order]
    state = _State(ins, outs, float("inf"), [], [])
    seeded = (ins, outs)
    tick("paired")
    if options.pairing != "joint" and (pairing.separated or options.pairing != "auto"):
        _repair(parts, rows, state, floor, tick)
    searched = False
    if state.mse >= floor and (options.pairing in ("auto", "joint")):
        searched = True
        parts = _search(parts, rows, state, floor, options, tick)
    if state.mse >= floor:
        _every(parts, rows, state, paired=not searched)
    solved = time.perf_counter() - began
    state.mse = parts.mse(state.ins, state.outs, x, y)
    unique = None
    if state.mse < floor:
        unique = uniqueness(parts, state.ins, state.outs, data.exact_x, data.exact_y)
        if not (np.array_equal(unique.ins, state.ins) and np.array_equal(unique.outs, state.outs)):
            searched = True
            state.ins, state.outs = unique.ins, unique.outs
            state.mse = parts.mse(state.ins, state.outs, x, y)
            state.add_round("float64", 1)
    seed_mse = parts.mse(*seeded, x, y)
    state.stages.insert(0, (f"seed: {seed}", *seeded, seed_mse))
    if searched:
        pairing = with_pairs(parts, pairing.score, pairing.matrix, state.ins, state.outs)
    return Reassembly(
        pieces=pieces,
        ins=tuple(int(i) for i in state.ins),
        outs=tuple(int(j) for j in state.outs),
        activation=options.activation,
        mse=state.mse,
        variance=floor / EXACT,
        exact=state.mse < floor,
        unique=unique,
        pairing=pairing,
        searched=searched,
        seed_method=str(seed),
        seed_mse=seed_mse,
        rounds=tuple(state.rounds),
        stages=_stages(state),
        load_seconds=load_seconds,
        solve_seconds=solved,
        check_seconds=time.perf_counter() - began - solved,
        warnings=tuple(_warnings(parts, state, pairing, rows, floor) + _several(pieces, state, unique)),
        norms=_norms(parts, state.ins),
    )


def _norms(parts: Parts, ins: Ints) -> tuple[int, ...]:
    """The norm of each block, then that of the last layer."""
    if parts.wardrobe is None:
        return ()
    of_blocks, last = parts.wardrobe.of_chain(ins)
    blocks = () if parts.norm is None else tuple(int(n) for n in of_blocks)
    return blocks if last is None else (*blocks, last)


def _pairing(parts: Parts, options: ReassembleConfig, rows: tuple[Floats, Floats]) -> Pairing:
    """By the score asked for; left alone, the paper's if it separates, else all signals together."""
    if options.pairing not in ("auto", "joint"):
        return pair(parts, Score(options.pairing), _some(rows, _ALIGNED))
    diagonal = pair(parts, Score.DIAGONAL)
    if diagonal.separated:
        return diagonal
    return pair(parts, Score.COMBINED, _some(rows, _ALIGNED))


def _repair(parts: Parts, rows: tuple[Floats, Floats], state: _State, floor: float, tick: Tick) -> None:
    """Sweeps of predicted neighbour exchanges on changing rows; if these stall, insertions, then regression."""
    _sweeps(parts, rows, state, floor, tick)
    if state.mse >= floor:
        _insertions(parts, rows, state, floor, tick)
    # near pairs first, which is enough for an order that is nearly right; then, where they are not too many, all
    n = len(state.ins)
    for window in (_NEAR, n) if n <= _MOST else (_NEAR,):
        if state.mse < floor:
            return
        enough = _some(rows, max(2000, 2 * n * min(window, n // 2)))
        order, mse = regress_order(parts, state.ins, state.outs, *enough, floor=floor, window=window)
        state.ins, state.outs, state.mse = state.ins[order], state.outs[order], mse
        state.add_round("regression", int((order != np.arange(n)).sum()))


def _sweeps(parts: Parts, rows: tuple[Floats, Floats], state: _State, floor: float, tick: Tick) -> None:
    """Few rows make a sweep cheap; changing them keeps it from settling in a minimum of those rows only.

    What a sweep has reached is known to the next one, on other rows; an order without error on those is judged
    on the rows that :data:`_JUDGE` says before it is believed.
    """
    x, y = rows
    step = max(1, len(x) // _SWEEP)
    stalled, best = 0, float("inf")
    for number in range(1, 61):
        part = slice(number * _STRIDE % step, None, step)
        swept = sweep(parts, state.ins, state.outs, x[part], y[part], floor=floor)
        state.mse = swept.before
        if state.rounds:
            state.correct_round()
        if swept.before < floor:
            state.mse = parts.mse(state.ins, state.outs, *_some(rows, _JUDGE))
            if state.rounds:
                state.correct_round()
            return
        for move, (place, mse) in enumerate(swept.moves, start=1):
            state.move(place, place + 1, mse, f"round {number}, move {move}")
        state.add_round(f"round {number}", len(swept.moves))
        tick(f"round {number}")
        stalled = 0 if swept.before < 0.8 * best else stalled + 1
        best = min(best, swept.before)
        if stalled >= 4:
            break
    state.mse = parts.mse(state.ins, state.outs, *_some(rows, _JUDGE))
    state.correct_round()


def _insertions(parts: Parts, rows: tuple[Floats, Floats], state: _State, floor: float, tick: Tick) -> None:
    """Rounds of insertions while they gain: for a block that no exchange of neighbours brings to its place."""
    part = _some(rows, insertion_rows(len(state.ins)))
    before = float("inf")
    for _ in range(40):
        if state.mse < floor or state.mse > 0.7 * before:  # slow gains are better left to the regression
            return
        before = state.mse
        moves = insert(parts, state.ins, state.outs, *part, tries=8)[2]
        if not moves:
            return
        for number, (start, place, mse) in enumerate(moves, start=1):
            state.move(start, place, mse, f"round {len(state.rounds) + 1}, insertion {number}")
        state.add_round(f"round {len(state.rounds) + 1}", len(moves))
        tick(f"round {len(state.rounds)}")


def _search(
    parts: Parts,
    rows: tuple[Floats, Floats],
    state: _State,
    floor: float,
    options: ReassembleConfig,
    tick: Tick,
) -> Parts:
    """The joint search from the chain at hand and from others; the parts, wearing the norms that were found."""
    unknowns = len(parts.A) ** 2
    outputs = rows[1].shape[1]
    found = joint.search(
        parts,
        *_some(rows, max(1000, min(4 * unknowns, 3000)) // outputs),
        prior=scores(parts, Score.COMBINED, _some(rows, _ALIGNED)),
        chains=() if options.pairing == "joint" else _chains(parts, state, rows),
        floor=floor,
        seconds=options.seconds,
        seed=options.seed,
        tick=tick,
    )
    if found.mse < state.mse:
        moved = int((found.ins != state.ins).sum() + (found.outs != state.outs).sum())
        state.ins, state.outs, state.mse = found.ins, found.outs, found.mse
        state.add_round("joint search", moved)
        return found.parts
    return parts


def _chains(parts: Parts, state: _State, rows: tuple[Floats, Floats]) -> list[tuple[Ints, Ints]]:
    """The chain at hand, then the pairs of each signal alone in the seed's order: one strong signal is enough."""
    found = [(state.ins, state.outs)]
    some = _some(rows, _ALIGNED)
    alone = [pairing_of(parts, "aligned", aligned(parts, *some))]
    alone += [
        pair(parts, score, some)
        for score in (Score.COMBINED, Score.NORMS, Score.GRAM, Score.DIAGONAL, Score.READOUT)
    ]
    for pairing in alone:
        order = seed_order(parts, pairing.ins, pairing.outs, some[0], Seed.L1)
        found.append((pairing.ins[order], pairing.outs[order]))
    return found


def _every(parts: Parts, rows: tuple[Floats, Floats], state: _State, *, paired: bool) -> None:
    """With few blocks, all arrangements: of the pairs if these were asked for, else of the pieces."""
    paired = paired or how_many(parts, paired=False) > MOST
    if how_many(parts, paired=paired) > (MOST_ORDERS if paired else MOST):
        return
    ins, outs, mse = try_every(parts, *rows, pairs=(state.ins, state.outs) if paired else None)
    if mse < parts.mse(state.ins, state.outs, *rows):
        moved = int((ins != state.ins).sum() + (outs != state.outs).sum())
        state.ins, state.outs, state.mse = ins, outs, mse
        state.add_round("all arrangements", moved)


def _data(x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    inputs, outputs = np.asarray(x), np.asarray(y)
    if inputs.ndim != 2 or outputs.ndim not in (1, 2):
        raise BadInputError(
            "data", f"inputs {inputs.shape} and outputs {outputs.shape} are not rows x columns"
        )
    if len(inputs) != len(outputs):
        raise BadInputError("data", f"{len(inputs)} rows of inputs and {len(outputs)} of outputs")
    if len(inputs) < 2:
        raise BadInputError("data", "needs two rows or more; more rows make the order certain")
    outputs = outputs.reshape(len(outputs), -1)
    for name, array in (("inputs", inputs), ("outputs", outputs)):
        if array.dtype.kind not in "fiu":
            raise BadInputError("data", f"the {name} are {array.dtype}, not numbers")
        if not bool(np.isfinite(array).all()):
            raise BadInputError("data", f"the {name} hold NaN or infinite values; fill or drop them")
    if not float(np.var(outputs, axis=0, dtype=np.float64).mean()) > 0:
        raise BadInputError("data", "the outputs are constant; they say nothing about the order")
    return np.asarray(inputs, dtype=np.float64), np.asarray(outputs, dtype=np.float64)


def _check_fit(pieces: PieceSet, x: Floats, y: Floats) -> None:
    if x.shape[1] != pieces.width:
        raise BadInputError(
            "data",
            f"has {x.shape[1]} input columns, the network takes {pieces.width}; name the right ones in `inputs`",
        )
    if y.shape[1] != len(pieces.last.weight):
        raise BadInputError(
            "data",
            f"has {y.shape[1]} target column(s), the network's last layer {len(pieces.last.weight)}; "
            "name them in `target`",
        )


def _some(rows: tuple[Floats, Floats], count: int) -> tuple[Floats, Floats]:
    """So many rows, taken evenly from the whole file: files are often sorted."""
    step = max(1, len(rows[0]) // count)
    return np.ascontiguousarray(rows[0][::step][:count]), np.ascontiguousarray(rows[1][::step][:count])


def _stages(state: _State) -> tuple[Stage, ...]:
    final = {int(i): k for k, i in enumerate(state.ins)}
    # where roles are open, a piece that ended as output projection has the position of its block
    final |= {int(j): k for k, j in enumerate(state.outs) if int(j) not in final}
    stages = [*_thinned(state.stages), ("final", state.ins, state.outs, state.mse)]
    return tuple(Stage(name, tuple(final[int(i)] for i in ins), mse) for name, ins, _, mse in stages)


def _thinned(stages: list[tuple[str, Ints, Ints, float]]) -> list[tuple[str, Ints, Ints, float]]:
    """All stages, or as many of them, evenly, as can be drawn; the first always."""
    most = max(2, min(_STAGES, _DRAWN // max(len(stages[0][1]), 1))) - 1
    return stages[:: -(-len(stages) // most)]


def _warnings(
    parts: Parts, state: _State, pairing: Pairing, rows: tuple[Floats, Floats], floor: float
) -> list[Flag]:
    found = []
    if not pairing.separated:
        text = "the weights do not tell the pairs apart (matched scores are no higher than unmatched ones)"
        found.append(Flag("not-separated", text))
    if state.mse < floor:
        return found
    share = state.mse * EXACT / floor
    text = f"not exact: the error is {share:.2g} of the variance of the outputs"
    other = _other_activation(parts, state, rows, floor)
    if other is not None:
        text += f"; with --activation {other} this very order is exact"
    elif share > _NOTHING and state.mse > _NOTHING * _by_chance(parts, rows):
        text += (
            "; random orders fit hardly worse: the data do not look like this network's. Is it the right file, target "
            "and activation?"
        )
    else:
        text += (
            "; the search ended short of the order. A longer --seconds, another --seed or more rows may help"
        )
    found.append(Flag("not-exact", text))
    return found


def _by_chance(parts: Parts, rows: tuple[Floats, Floats], tries: int = 40) -> float:
    """The least error of random arrangements: what the data of another network would be fitted by too."""
    x, y = _some(rows, 300)
    rng = stream(0, "reassembly", "chance")
    least = float("inf")
    for _ in range(tries):
        if parts.shared:
            order = rng.permutation(len(parts.A))
            ins, outs = order[: parts.blocks], order[parts.blocks :]
        else:
            ins, outs = rng.permutation(parts.blocks), rng.permutation(parts.blocks)
        least = min(least, parts.mse(ins, outs, x, y))
    return least


def _several(pieces: PieceSet, state: _State, unique: Uniqueness | None) -> list[Flag]:
    """That the order, or some pairs, are one choice of several that the data do not tell apart."""
    found: list[Flag] = []
    if unique is None or not unique.exchanges:
        return found
    if unique.groups:
        listed = "; ".join(", ".join(map(str, group)) for group in unique.groups)
        text = f"this order is one of several: blocks {listed} can change places within the precision of the data"
        found.append(Flag("order-not-unique", text))
    swapped = [(e.a, e.b) for e in unique.exchanges if e.kind == "pair"]
    if swapped:
        listed = ", ".join(f"{a} and {b}" for a, b in swapped[:6]) + (", ..." if len(swapped) > 6 else "")
        text = (
            f"these pairs are one choice of several: blocks {listed} can exchange a piece within the precision "
            "of the data"
        )
        found.append(Flag("pairs-not-unique", text))
    return found


def _other_activation(parts: Parts, state: _State, rows: tuple[Floats, Floats], floor: float) -> str | None:
    x, y = _some(rows, 500)
    for name, act in ACTIVATIONS.items():
        if name != parts.act.name and replace(parts, act=act).mse(state.ins, state.outs, x, y) < floor:
            return name
    return None
