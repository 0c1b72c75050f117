"""Is the order the only one? Which blocks or pieces could change places without the data noticing.

Blocks have no order that data could show where they commute, where their effect is below the precision of the
recorded outputs, or where they compute the same function (a copy with permuted, rescaled or sign-flipped neurons).
Exchanges are screened by one forward and one backward pass; those near the precision are evaluated in float64. An
exchange that fits clearly better shows that the answer was not the best one, and is taken first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from strati.reassembly.residual.network import fold_norms, input_side_effects, output_side_effects, run
from strati.reassembly.residual.order import flip_effects
from strati.reassembly.residual.search import polish

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.residual.network import Ints, NormAssignment, ResidualWeights

    Floats = NDArray[Any]
    Kind = Literal["order", "pair"]

    Weights = TypeVar("Weights", ResidualWeights, NormAssignment)

_WORK = 3e7
_ROWS = (100, 400)
_SCREEN_ROWS = 32
_PROBE_ROWS = 128
_TRIALS = 400
_ROUNDS = 20
"""Multiplications of one forward pass, which set the number of rows within these bounds; rows that screen exchanges of
pieces; rows on which the functions of blocks are compared; exchanges evaluated and improvements at most."""

_SURE = 4.0
"""Standard errors by which a fit must be worse to be believed, and precisions by which outputs must change."""

_SUMS = 64 * float(np.finfo(np.float64).eps)
_SAME_FUNCTION = 1e-3
_SAME_UP_TO_ROUNDING = 16 * float(np.finfo(np.float32).eps)
_SCREEN_RESOLUTION = 1e-5
"""Relative rounding of the sums of a forward pass in float64; relative difference of two blocks' outputs below which
their exchange is evaluated, and below which they are one function stored in float32; relative effect that the float32
screen resolves."""


@dataclass(frozen=True)
class Exchange:
    """Two blocks that could change places (``order``) or exchange a projection (``pair``), by place.

    ``margin`` is the root mean square change of the outputs over the precision of the data.
    """

    kind: Kind
    a: int
    b: int
    margin: float


@dataclass(frozen=True)
class Uniqueness:
    """What the data say about other arrangements.

    Attributes:
        ins: The input projections in order, possibly improved.
        outs: The output projections.
        precision: Root mean square error that remains, or the rounding of the outputs if that is more.
        least_margin: The least margin of all exchanges evaluated; ``None`` for a single block.
        exchanges: Those that the data do not rule out.
    """

    ins: Ints
    outs: Ints
    precision: float
    least_margin: float | None
    exchanges: tuple[Exchange, ...]

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Places of blocks that could change places among themselves, directly or through others."""
        groups: list[set[int]] = []
        for link in ({e.a, e.b} for e in self.exchanges if e.kind == "order"):
            touched = [group for group in groups if group & link]
            groups = [group for group in groups if group not in touched] + [link.union(*touched)]
        return tuple(sorted(tuple(sorted(group)) for group in groups))


@dataclass(frozen=True)
class _Candidate:
    """Another arrangement, of which blocks from ``first`` to ``last`` differ, and its predicted effect."""

    kind: Kind
    first: int
    last: int
    ins: Ints
    outs: Ints
    effect: float
    one_function: bool = False


def uniqueness(
    parts: ResidualWeights, ins: Ints, outs: Ints, x: NDArray[np.float64], y: NDArray[np.float64]
) -> Uniqueness:
    """Which exchanges of two blocks, or of two blocks' projections, fit the data as well.

    Args:
        parts: The pieces.
        ins: Input projections in the order of the answer.
        outs: Output projections.
        x: Inputs, as recorded.
        y: Outputs, rows x outputs, as recorded.
    """
    wide = _cast(parts, np.float64)
    if parts.norm_assignment is not None:  # folded again, so that no product was rounded to float32
        wide = fold_norms(wide, _cast(parts.norm_assignment, np.float64))
    count = int(np.clip(_WORK / max(2 * len(ins) * wide.w_in[0].size, 1), *_ROWS))
    step = max(1, len(x) // count)
    inputs: Floats = np.ascontiguousarray(x[::step][:count], np.float64)
    outputs: Floats = np.ascontiguousarray(y[::step][:count], np.float64)
    # outputs that went through float32 carry its rounding
    single = bool(np.array_equal(y, y.astype(np.float32).astype(np.float64)))
    rounding = float(np.finfo(np.float32 if single else np.float64).eps) * _rms(y) / 3
    for _ in range(_ROUNDS):
        answer, better = _Arrangement(wide, ins, outs, inputs, outputs, rounding).examine()
        if better is None:
            break
        _, ins, outs, _ = polish(wide, better.ins, better.outs, inputs, outputs, floor=rounding**2)
    return answer


class _Arrangement:
    """The answer in float64 on some rows, with the forward and backward pass that predict exchanges."""

    def __init__(
        self, parts: ResidualWeights, ins: Ints, outs: Ints, x: Floats, y: Floats, recording_rounding: float
    ) -> None:
        self.parts, self.ins, self.outs, self.x, self.y = parts, ins, outs, x, y
        self.passes = run(parts, ins, outs, x)
        self.output = self.passes.output
        self.errors = np.square(self.output - y).mean(axis=1)
        self.recording_rounding = recording_rounding
        self.sum_rounding = _SUMS * _rms(self.output)
        self.precision = max(float(np.sqrt(self.errors.mean())), recording_rounding)

    def examine(self) -> tuple[Uniqueness, _Candidate | None]:
        """The exchanges that fit as well, and the best one if it fits clearly better than the answer."""
        open_exchanges: list[Exchange] = []
        margins: list[float] = []
        best: tuple[float, _Candidate | None] = (0.0, None)
        for candidate in self._candidates():
            output = self._output_of(candidate)
            change = _rms(output - self.output)
            margins.append(change / self.precision)
            worse = np.square(output - self.y).mean(axis=1) - self.errors
            mean, spread = float(worse.mean()), float(worse.std()) / np.sqrt(len(worse))
            unnoticed = change <= max(0.05 * self.precision, self.sum_rounding)
            unnoticed = unnoticed or (candidate.one_function and self.precision > self.sum_rounding)
            gain = max(_SURE * spread, 0.01 * self.errors.mean(), self.recording_rounding**2)
            if not unnoticed and mean < min(-gain, best[0]):
                best = (mean, candidate)
            # a change of several times the precision makes a larger error, whatever the spread over rows
            as_good = change <= _SURE * self.precision and mean <= max(
                _SURE * spread, 0.05 * self.recording_rounding**2
            )
            if unnoticed or as_good:
                open_exchanges.append(Exchange(candidate.kind, candidate.first, candidate.last, margins[-1]))
        least = min(margins, default=None)
        return Uniqueness(self.ins, self.outs, self.precision, least, tuple(open_exchanges)), best[1]

    def _output_of(self, candidate: _Candidate) -> Floats:
        """The network's output in another arrangement: the changed blocks run, the rest by the adjoint if it may."""
        streams = self.passes.streams
        z, after = streams[candidate.first], streams[candidate.last + 1]
        for k in range(candidate.first, candidate.last + 1):
            z = z + self.parts.residual(int(candidate.ins[k]), int(candidate.outs[k]), z)
        second_order = (_rms(z - after) / max(_rms(after), 1e-300)) ** 2 * _rms(self.output)
        if second_order < 0.01 * self.precision:
            linear = np.einsum("oxd,xd->xo", self.passes.adjoint[candidate.last + 1], z - after)
            return np.asarray(self.output + linear)
        rest = slice(candidate.last + 1, None)
        return self.parts.output(self.ins[rest], self.outs[rest], z)

    def _candidates(self) -> list[_Candidate]:
        """All exchanges of neighbours, and every other one that may be near the precision; no equal pieces."""
        screened = [*self._order_candidates(), *self._pair_candidates()]
        screened.sort(key=lambda candidate: candidate.effect)
        return [candidate for candidate in screened if not self._exchanges_equal_pieces(candidate)][:_TRIALS]

    def _order_candidates(self) -> Iterator[_Candidate]:
        if len(self.ins) < 2:
            return
        flips, (first, second) = flip_effects(self.passes)
        sizes = np.sqrt(np.square(flips).mean(axis=0))
        distance = self._function_distances()
        for size, a, b in zip(sizes.tolist(), first.tolist(), second.tolist(), strict=True):
            alike = bool(distance[a, b] < _SAME_FUNCTION)
            if b == a + 1 or size < 10 * self.precision or alike:
                ins, outs = _exchanged(self.ins, a, b), _exchanged(self.outs, a, b)
                one_function = bool(distance[a, b] < _SAME_UP_TO_ROUNDING)
                yield _Candidate("order", a, b, ins, outs, 0.0 if alike else size, one_function)

    def _function_distances(self) -> Floats:
        """Relative root mean square difference of what blocks add to the same streams, blocks x blocks."""
        per_block = -(-_PROBE_ROWS // len(self.ins))
        z = np.concatenate([stream[:per_block] for stream in self.passes.streams[:-1]])
        blocks = zip(self.ins.tolist(), self.outs.tolist(), strict=True)
        added = np.stack([self.parts.residual(i, j, z).reshape(-1) for i, j in blocks])
        size = np.linalg.norm(added, axis=1)
        distance = np.full((len(added), len(added)), np.inf)
        for a, b in combinations(range(len(added)), 2):
            # the difference itself, not a difference of products: those cancel to half of the digits
            if abs(size[a] - size[b]) <= _SAME_FUNCTION * max(size[a], size[b]):
                distance[a, b] = np.linalg.norm(added[a] - added[b]) / max(size[a], size[b], 1e-300)
        return distance

    def _pair_candidates(self) -> Iterator[_Candidate]:
        """Two blocks exchange their output projections, their input projections or, where roles are open, any two."""
        parts, n = _cast(self.parts, np.float32), len(self.ins)
        x = self.x[:: max(1, len(self.x) // _SCREEN_ROWS)][:_SCREEN_ROWS].astype(np.float32)
        passed = run(parts, self.ins, self.outs, x)
        writes, reads = output_side_effects(parts, passed), input_side_effects(parts, self.outs, passed)
        sides = [(writes, self.outs), (reads, self.ins)]
        if parts.shared:
            sides = [(np.concatenate([writes, reads], axis=1), np.concatenate([self.outs, self.ins]))]
        for number, (effects, sockets) in enumerate(sides):
            moved = effects[:, :, sockets]
            present = np.einsum("xss->xs", moved)
            near = max(10 * self.precision, _SCREEN_RESOLUTION * _rms(present))
            for s, t in combinations(range(len(sockets)), 2):
                size = _rms(moved[:, s, t] + moved[:, t, s] - present[:, s] - present[:, t])
                if size < near and s % n != t % n:
                    exchanged = _exchanged(sockets, s, t)
                    ins, outs = (exchanged, self.outs) if number else (self.ins, exchanged)
                    if parts.shared:
                        ins, outs = exchanged[n:], exchanged[:n]
                    a, b = sorted((s % n, t % n))
                    yield _Candidate("pair", a, b, ins, outs, size)

    def _exchanges_equal_pieces(self, candidate: _Candidate) -> bool:
        """Whether only pieces of equal bytes change places: that is the same network, piece by piece."""
        parts = self.parts
        return all(
            i == j or (np.array_equal(weights[i], weights[j]) and np.array_equal(biases[i], biases[j]))
            for old, new, weights, biases in (
                (self.ins, candidate.ins, parts.w_in, parts.b_in),
                (self.outs, candidate.outs, parts.w_out, parts.b_out),
            )
            for i, j in zip(old.tolist(), new.tolist(), strict=True)
        )


def _exchanged(order: Ints, a: int, b: int) -> Ints:
    order = order.copy()
    order[[a, b]] = order[[b, a]]
    return order


def _cast(weights: Weights, dtype: type[np.floating[Any]]) -> Weights:
    values = {f.name: getattr(weights, f.name) for f in fields(weights)}
    is_float = {name: isinstance(v, np.ndarray) and v.dtype.kind == "f" for name, v in values.items()}
    changed: dict[str, Any] = {name: v.astype(dtype) for name, v in values.items() if is_float[name]}
    return replace(weights, **changed)


def _rms(values: Floats) -> float:
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))
