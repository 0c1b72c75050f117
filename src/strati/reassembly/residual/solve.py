"""Recover the order of the unlabelled layers of a residual network, with data.

Pairs by the weights where these separate them, then a seed order; from there the strategies of :data:`STRATEGIES` in
turn until the network reproduces its recorded outputs to rounding, that is, with a mean squared error below ``1e-10``
of their variance.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from strati.core.errors import BadInputError
from strati.core.results import Flag, Tick, silent
from strati.reassembly.residual.network import ACTIVATIONS, ResidualWeights, stack
from strati.reassembly.residual.order import Round, Seed, regress_order, seed_order, sweep
from strati.reassembly.residual.pairing import Pairing, Score, pair, scores, with_pairs
from strati.reassembly.residual.pieces import by_likelihood, sort_all
from strati.reassembly.residual.result import Reassembly, Stage
from strati.reassembly.residual.unique import uniqueness

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from strati.reassembly.reassemble import ReassembleConfig
    from strati.reassembly.residual.network import Floats, Ints
    from strati.reassembly.residual.pieces import Piece, PieceSet
    from strati.reassembly.residual.search import JointSearch, Proposal
    from strati.reassembly.residual.unique import Uniqueness

EXACT = 1e-10
"""Mean squared error, as a share of the variance of the outputs, below which an answer is exact."""

_SWEEP = 192
_STRIDE = 17
_JUDGE = 500
_ALIGNED = 2000
_SEEDED = 2000
"""Rows of a sweep; by how many the next sweep's rows are shifted; rows on which a repaired order is measured; rows for
the alignment of pairs with the outputs; rows for the error of the default seed order."""

_WINDOW = 12
"""Places by which two blocks may lie apart to be exchanged in the regression of an order."""

_NO_FIT = 0.5
"""The data are doubted where the error is more than this share of the outputs' variance: the search explains the
outputs of its own network far better than that long before it is exact."""

_STAGES = 200
_DRAWN = 10_000
"""Most stages of the progression, and most blocks in all of them together."""


@dataclass(frozen=True)
class _Rows:
    """The data in float32, in which the search is done, and as they were recorded."""

    x: Floats
    y: Floats
    exact_x: NDArray[np.float64]
    exact_y: NDArray[np.float64]


@dataclass
class _Attempt:
    """The best arrangement so far and the moves that led to it."""

    weights: ResidualWeights
    rows: tuple[Floats, Floats]
    floor: float
    config: ReassembleConfig
    tick: Tick
    pairing: Pairing
    ins: Ints
    outs: Ints
    mse: float = float("inf")
    rounds: list[Round] = field(default_factory=list)
    stages: list[tuple[str, Ints, Ints, float]] = field(default_factory=list)
    searched: bool = False

    @property
    def exact(self) -> bool:
        """Whether the outputs are reproduced to rounding."""
        return self.mse < self.floor

    @property
    def trusts_pairs(self) -> bool:
        """Whether the pairs are separated or were asked for, so that only their order is open."""
        requested = self.config.pairing
        return requested != "joint" and (self.pairing.separated or requested != "auto")

    @cached_property
    def joint(self) -> JointSearch:
        """The joint search of pairs and order, with what the weights and some rows say about the pairs."""
        from strati.reassembly.residual.search import JointSearch

        unknowns, outputs = len(self.weights.w_in) ** 2, self.rows[1].shape[1]
        x, y = _subsample(self.rows, max(1000, min(4 * unknowns, 3000)) // outputs)
        evidence = scores(self.weights, Score.COMBINED, _subsample(self.rows, _ALIGNED))
        return JointSearch(self.weights, x, y, evidence, self.floor)

    @cached_property
    def deadline(self) -> float:
        """When no new proposal of the joint search is made."""
        return time.monotonic() + self.config.seconds

    def measure(self, count: int | None = None) -> None:
        """Measure the error on so many rows, or on all."""
        rows = self.rows if count is None else _subsample(self.rows, count)
        self.mse = self.weights.mse(self.ins, self.outs, *rows)

    def swap(self, place: int, mse: float, name: str) -> None:
        """Exchange the blocks at a place and the next one, and note the stage."""
        order = np.arange(len(self.ins))
        order[[place, place + 1]] = place + 1, place
        self.ins, self.outs, self.mse = self.ins[order], self.outs[order], mse
        self.stages.append((name, self.ins, self.outs, mse))

    def replace(self, ins: Ints, outs: Ints, mse: float, name: str) -> None:
        """Take another arrangement, and note it as a round."""
        moved = int((ins != self.ins).sum() + (outs != self.outs).sum())
        self.ins, self.outs, self.mse = ins, outs, mse
        self.add_round(name, moved)

    def add_round(self, name: str, moves: int) -> None:
        """Note a round that led to the present arrangement and error."""
        self.rounds.append(Round(len(self.rounds) + 1, moves, self.mse))
        self.stages.append((name, self.ins, self.outs, self.mse))

    def correct_round(self) -> None:
        """Replace the predicted error of the last round by the measured one."""
        self.rounds[-1] = replace(self.rounds[-1], mse=self.mse)
        self.stages[-1] = (*self.stages[-1][:3], self.mse)


@dataclass(frozen=True)
class Strategy:
    """One way to improve an arrangement: its name, where it is tried, and what it does."""

    name: str
    applies: Callable[[_Attempt], bool]
    run: Callable[[_Attempt], None]


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
    """Recover the order of the layers of a residual network.

    Args:
        pieces: The unlabelled layers.
        x: Inputs, rows x width.
        y: What the network answered to them (its predictions, not the true targets), rows or rows x outputs.
        config: How.
        where: The name of the pieces in error messages.
        load_seconds: Time already spent on reading, to be recorded.
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
            # half of the remaining time for each: the likeliest last layer is nearly always the right one
            left = config.seconds - (time.perf_counter() - began)
            limited = replace(config, seconds=left / 2 if number + 1 < len(readings) else left)
            parts = stack(reading, config.activation)
            rows = _Rows(inputs, outputs, exact_inputs, exact_outputs)
            answer = _solve(reading, parts, rows, limited, load_seconds, began, tick)
            best = answer if best is None or answer.mse < best.mse else best
            if best.exact or left < 0:
                break
    assert best is not None  # sort_all returns a reading or raises
    return best


def _solve(
    pieces: PieceSet,
    parts: ResidualWeights,
    data: _Rows,
    options: ReassembleConfig,
    load_seconds: float,
    began: float,
    tick: Tick,
) -> Reassembly:
    rows = (data.x, data.y)
    floor = EXACT * float(np.var(data.y, axis=0, dtype=np.float64).mean())
    pairing = _pairing(parts, options, rows)
    seed = Seed.L1 if options.seed_order == "auto" else Seed(options.seed_order)
    order = seed_order(parts, pairing.ins, pairing.outs, data.x, seed)
    seeded = pairing.ins[order], pairing.outs[order]
    attempt = _Attempt(parts, rows, floor, options, tick, pairing, *seeded)
    tick("paired")
    for strategy in STRATEGIES:
        if not attempt.exact and strategy.applies(attempt):
            strategy.run(attempt)
    solved = time.perf_counter() - began
    attempt.measure()
    unique = None
    if attempt.exact:
        unique = uniqueness(attempt.weights, attempt.ins, attempt.outs, data.exact_x, data.exact_y)
        if not (np.array_equal(unique.ins, attempt.ins) and np.array_equal(unique.outs, attempt.outs)):
            attempt.searched = True
            attempt.ins, attempt.outs = unique.ins, unique.outs
            attempt.measure()
            attempt.add_round("float64", 1)
    # a seed that was asked for is measured on all rows, the default one on enough of them
    seed_rows = _subsample(rows, _SEEDED) if options.seed_order == "auto" else rows
    seed_mse = attempt.weights.mse(*seeded, *seed_rows)
    attempt.stages.insert(0, (f"seed: {seed}", *seeded, seed_mse))
    if attempt.searched:
        pairing = with_pairs(attempt.weights, pairing.score, pairing.matrix, attempt.ins, attempt.outs)
    return Reassembly(
        pieces=pieces,
        ins=tuple(int(i) for i in attempt.ins),
        outs=tuple(int(j) for j in attempt.outs),
        activation=options.activation,
        mse=attempt.mse,
        variance=floor / EXACT,
        exact=attempt.exact,
        unique=unique,
        pairing=pairing,
        searched=attempt.searched,
        seed_method=str(seed),
        seed_mse=seed_mse,
        rounds=tuple(attempt.rounds),
        stages=_stages(attempt),
        load_seconds=load_seconds,
        solve_seconds=solved,
        check_seconds=time.perf_counter() - began - solved,
        warnings=(*_warnings(attempt, pairing), *_ambiguity_warnings(unique)),
        norms=_norms(attempt.weights, attempt.ins),
    )


def _norms(parts: ResidualWeights, ins: Ints) -> tuple[int, ...]:
    """The norm of each block, then that of the last layer."""
    if parts.norm_assignment is None:
        return ()
    of_blocks, last = parts.norm_assignment.norms_of_blocks(ins)
    blocks = () if parts.norm is None else tuple(int(n) for n in of_blocks)
    return blocks if last is None else (*blocks, last)


def _pairing(parts: ResidualWeights, options: ReassembleConfig, rows: tuple[Floats, Floats]) -> Pairing:
    """Pairs by the requested score; by default by the paper's if it separates them, else by all signals together."""
    if options.pairing not in ("auto", "joint"):
        return pair(parts, Score(options.pairing), _subsample(rows, _ALIGNED))
    diagonal = pair(parts, Score.DIAGONAL)
    if diagonal.separated:
        return diagonal
    return pair(parts, Score.COMBINED, _subsample(rows, _ALIGNED))


def _adjacent_swaps(attempt: _Attempt) -> None:
    """Sweeps of adjacent swaps on few rows each; changing the rows avoids a minimum of those rows only.

    The error that a sweep reached is measured by the next one, on other rows; an order without error on those is
    measured on :data:`_JUDGE` rows before it is accepted.
    """
    x, y = attempt.rows
    step = max(1, len(x) // _SWEEP)
    stalled, best = 0, float("inf")
    for number in range(1, 61):
        part = slice(number * _STRIDE % step, None, step)
        swept = sweep(attempt.weights, attempt.ins, attempt.outs, x[part], y[part], floor=attempt.floor)
        attempt.mse = swept.before
        if attempt.rounds:
            attempt.correct_round()
        if attempt.exact:
            break
        for move, (place, mse) in enumerate(swept.moves, start=1):
            attempt.swap(place, mse, f"round {number}, move {move}")
        attempt.add_round(f"round {number}", len(swept.moves))
        attempt.tick(f"round {number}")
        stalled = 0 if swept.before < 0.8 * best else stalled + 1
        best = min(best, swept.before)
        if stalled >= 4:
            break
    attempt.measure(_JUDGE)
    if attempt.rounds:
        attempt.correct_round()


def _regression(attempt: _Attempt) -> None:
    """Regress the error on the exchanges of all blocks near each other at once."""
    n = len(attempt.ins)
    rows = _subsample(attempt.rows, max(2000, 2 * n * min(_WINDOW, n // 2)))
    order, mse = regress_order(
        attempt.weights, attempt.ins, attempt.outs, *rows, floor=attempt.floor, window=_WINDOW
    )
    attempt.ins, attempt.outs, attempt.mse = attempt.ins[order], attempt.outs[order], mse
    attempt.add_round("regression", int((order != np.arange(n)).sum()))


def _from_evidence(attempt: _Attempt) -> None:
    from strati.reassembly.residual.search import from_evidence

    _joint_search(attempt, "joint search", from_evidence(attempt.joint))


def _around_best(attempt: _Attempt) -> None:
    from strati.reassembly.residual.search import around_best

    _joint_search(attempt, "joint search around the best", around_best(attempt.joint))


def _joint_search(attempt: _Attempt, name: str, proposals: Iterator[Proposal]) -> None:
    """Take the best of some proposals; the very first one is made even if there is no time left."""
    attempt.searched = True
    if attempt.joint.best is not None and time.monotonic() > attempt.deadline:
        return
    for number, proposal in enumerate(proposals, start=1):
        best = attempt.joint.consider(proposal)
        attempt.tick(f"{name} {number}")
        if best.mse < attempt.floor or time.monotonic() > attempt.deadline:
            break
    best_so_far = attempt.joint.best
    if best_so_far is not None and best_so_far.mse < attempt.mse:
        attempt.weights = best_so_far.parts
        attempt.replace(best_so_far.ins, best_so_far.outs, best_so_far.mse, name)


def _exhaustive(attempt: _Attempt) -> None:
    """Try all arrangements of the pieces of few blocks."""
    from strati.reassembly.residual.search import MOST, arrangement_count, search_all

    weights = attempt.weights
    if arrangement_count(weights) > MOST:
        return
    ins, outs, mse = search_all(weights, *attempt.rows)
    if mse < weights.mse(attempt.ins, attempt.outs, *attempt.rows):
        attempt.replace(ins, outs, mse, "all arrangements")


def _may_search(attempt: _Attempt) -> bool:
    return attempt.config.pairing in ("auto", "joint")


STRATEGIES = (
    Strategy("adjacent swaps", lambda attempt: attempt.trusts_pairs, _adjacent_swaps),
    Strategy("regression", lambda attempt: attempt.trusts_pairs, _regression),
    Strategy("joint search", _may_search, _from_evidence),
    Strategy("joint search around the best", _may_search, _around_best),
    Strategy("all arrangements", _may_search, _exhaustive),
)
"""What is tried in turn until the arrangement is exact. Of the 35 networks that ``reproduce dropped-net-battery``
solves, regression decides 3, the joint search 29 and around the best 3. Adjacent swaps decide the public puzzle, and
all arrangements some strongly nonlinear networks of few blocks."""


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
        raise BadInputError("data", "the outputs are constant; they do not depend on the order")
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


def _subsample(rows: tuple[Floats, Floats], count: int) -> tuple[Floats, Floats]:
    """So many rows, taken evenly from the whole file: files are often sorted."""
    step = max(1, len(rows[0]) // count)
    return np.ascontiguousarray(rows[0][::step][:count]), np.ascontiguousarray(rows[1][::step][:count])


def _stages(attempt: _Attempt) -> tuple[Stage, ...]:
    """The arrangements on the way, each block by its final position, few enough to be drawn."""
    final = {int(i): k for k, i in enumerate(attempt.ins)}
    # where roles are open, a piece that ended as output projection has the position of its block
    final |= {int(j): k for k, j in enumerate(attempt.outs) if int(j) not in final}
    stages = [*_thinned(attempt.stages), ("final", attempt.ins, attempt.outs, attempt.mse)]
    return tuple(Stage(name, tuple(final[int(i)] for i in ins), mse) for name, ins, _, mse in stages)


def _thinned(stages: list[tuple[str, Ints, Ints, float]]) -> list[tuple[str, Ints, Ints, float]]:
    """The first of the stages and as many others, evenly, as can be drawn."""
    most = max(2, min(_STAGES, _DRAWN // max(len(stages[0][1]), 1))) - 1
    return stages[:: -(-len(stages) // most)]


def _warnings(attempt: _Attempt, pairing: Pairing) -> list[Flag]:
    flags = []
    if not pairing.separated:
        text = "the weights do not separate the pairs (matched scores are no higher than unmatched ones)"
        flags.append(Flag("not-separated", text))
    if attempt.exact:
        return flags
    share = attempt.mse * EXACT / attempt.floor
    text = f"not exact: the error is {share:.2g} of the variance of the outputs"
    other = _other_activation(attempt)
    if other is not None:
        text += f"; with --activation {other} this very order is exact"
    elif share > _NO_FIT:
        text += "; the data do not look like this network's. Is it the right file, target and activation?"
    else:
        text += "; the search ended before it found the order. A longer --seconds or more rows may help"
    flags.append(Flag("not-exact", text))
    return flags


def _ambiguity_warnings(unique: Uniqueness | None) -> list[Flag]:
    """Warnings where other orders or pairs fit the data as well."""
    flags: list[Flag] = []
    if unique is None or not unique.exchanges:
        return flags
    if unique.groups:
        listed = "; ".join(", ".join(map(str, group)) for group in unique.groups)
        text = f"this order is one of several: blocks {listed} can change places within the precision of the data"
        flags.append(Flag("order-not-unique", text))
    swapped = [(e.a, e.b) for e in unique.exchanges if e.kind == "pair"]
    if swapped:
        listed = ", ".join(f"{a} and {b}" for a, b in swapped[:6]) + (", ..." if len(swapped) > 6 else "")
        text = (
            f"these pairs are one choice of several: blocks {listed} can exchange a piece within the precision "
            "of the data"
        )
        flags.append(Flag("pairs-not-unique", text))
    return flags


def _other_activation(attempt: _Attempt) -> str | None:
    x, y = _subsample(attempt.rows, 500)
    for name, act in ACTIVATIONS.items():
        other = replace(attempt.weights, act=act)
        if name != attempt.weights.act.name and other.mse(attempt.ins, attempt.outs, x, y) < attempt.floor:
            return name
    return None
