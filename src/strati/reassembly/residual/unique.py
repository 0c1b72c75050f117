"""Is the order the only one? Which blocks, pieces or norms could change places without the data noticing.

Blocks have no order that data could show where they commute, where their effect is below the precision of the
recorded outputs, or where they compute the same function (a copy with permuted, rescaled or sign-flipped neurons).
Exchanges are screened by one forward and one backward pass; those near the precision are evaluated in float64. An
exchange that fits clearly better shows that the answer was not the best one, and is taken first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from strati.reassembly.residual.network import fold_norms, input_side_effects, output_side_effects, run
from strati.reassembly.residual.order import flip_effects
from strati.reassembly.residual.search import polish

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.residual.network import Ints, ResidualWeights

    Floats = NDArray[Any]
    Kind = Literal["order", "pair", "norm"]

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

_SAME_FUNCTION = 1e-3
_SAME_UP_TO_ROUNDING = 16 * float(np.finfo(np.float32).eps)
_SCREEN_RESOLUTION = 1e-5
"""Relative difference of two blocks' outputs below which their exchange is evaluated, and below which they are one
function stored in float32; relative effect that the float32 screen resolves."""


@dataclass(frozen=True)
class Exchange:
    """Two blocks that could change places (``order``), output projections (``pair``) or norms (``norm``), by place.

    ``margin`` is the root mean square change of the outputs over the precision of the data. In a ``norm`` exchange the
    place after the last block is the norm of the last layer.
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
        return _connected([(e.a, e.b) for e in self.exchanges if e.kind == "order"])


@dataclass(frozen=True)
class _Candidate:
    """Another arrangement: blocks from ``first`` to ``last`` differ, or the norms (in ``parts``)."""

    kind: Kind
    first: int
    last: int
    ins: Ints
    outs: Ints
    parts: ResidualWeights
    one_function: bool = False


def uniqueness(
    parts: ResidualWeights, ins: Ints, outs: Ints, x: NDArray[np.float64], y: NDArray[np.float64]
) -> Uniqueness:
    """Which exchanges of two blocks, of two blocks' output projections or norms fit the data as well.

    Args:
        parts: The pieces.
        ins: Input projections in the order of the answer.
        outs: Output projections.
        x: Inputs, as recorded.
        y: Outputs, rows x outputs, as recorded.
    """
    wide = _in_float64(parts)
    count = int(np.clip(_WORK / max(2 * len(ins) * wide.w_in[0].size, 1), *_ROWS))
    step = max(1, len(x) // count)
    inputs: Floats = np.ascontiguousarray(x[::step][:count], np.float64)
    outputs: Floats = np.ascontiguousarray(y[::step][:count], np.float64)
    rounding = _recording_rounding(y)
    for _ in range(_ROUNDS):
        answer, better = _Arrangement(wide, ins, outs, inputs, outputs, rounding).examine()
        if better is None:
            break
        _, ins, outs, _ = polish(wide, *better, inputs, outputs, floor=rounding**2)
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
        self.sum_rounding = 4 * _rms(self.output - _output_in_other_summation_order(parts, ins, outs, x))
        self.precision = max(float(np.sqrt(self.errors.mean())), recording_rounding)
        self.fits_exactly = self.precision <= max(self.sum_rounding, np.finfo(np.float64).eps * _rms(y))

    def examine(self) -> tuple[Uniqueness, tuple[Ints, Ints] | None]:
        """The exchanges that fit as well, and the best one if it fits clearly better than the answer."""
        open_exchanges: list[Exchange] = []
        margins: list[float] = []
        best: tuple[float, Ints, Ints] | None = None
        for candidate in self._candidates():
            output = self._output_of(candidate)
            change = _rms(output - self.output)
            margins.append(change / self.precision)
            worse = np.square(output - self.y).mean(axis=1) - self.errors
            spread = float(worse.std()) / np.sqrt(len(worse))
            gain = max(_SURE * spread, 0.01 * self.errors.mean(), self.recording_rounding**2)
            unnoticed = change <= max(0.05 * self.precision, self.sum_rounding)
            unnoticed = unnoticed or (candidate.one_function and not self.fits_exactly)
            better = not unnoticed and candidate.kind != "norm" and worse.mean() < -gain
            if better and (best is None or worse.mean() < best[0]):
                best = (float(worse.mean()), candidate.ins, candidate.outs)
            # a change of several times the precision makes a larger error, whatever the spread over rows
            as_good = change <= _SURE * self.precision and worse.mean() <= max(
                _SURE * spread, 0.05 * self.recording_rounding**2
            )
            if unnoticed or as_good:
                open_exchanges.append(
                    Exchange(candidate.kind, candidate.first, candidate.last, change / self.precision)
                )
        answer = Uniqueness(
            self.ins, self.outs, self.precision, min(margins, default=None), tuple(open_exchanges)
        )
        return answer, None if best is None else best[1:]

    def _output_of(self, candidate: _Candidate) -> Floats:
        """The network's output in another arrangement: the changed blocks run, the rest by the adjoint if it may."""
        if candidate.kind == "norm":
            return candidate.parts.output(self.ins, self.outs, self.x)
        streams = self.passes.streams
        z = streams[candidate.first]
        for k in range(candidate.first, candidate.last + 1):
            z = z + self.parts.residual(int(candidate.ins[k]), int(candidate.outs[k]), z)
        change = z - streams[candidate.last + 1]
        linear = np.einsum("oxd,xd->xo", self.passes.adjoint[candidate.last + 1], change)
        second_order = (_rms(change) / max(_rms(streams[candidate.last + 1]), 1e-300)) ** 2 * _rms(
            self.output
        )
        if second_order < 0.01 * self.precision:
            return np.asarray(self.output + linear)
        for k in range(candidate.last + 1, len(self.ins)):
            z = z + self.parts.residual(int(self.ins[k]), int(self.outs[k]), z)
        return np.asarray(self.parts.leave(z) @ self.parts.w_last.T + self.parts.b_last)

    def _candidates(self) -> list[_Candidate]:
        """All exchanges of neighbours, and every other one that may be near the precision; no equal pieces."""
        screened = [*self._order_candidates(), *self._pair_candidates()]
        screened.sort(key=lambda entry: entry[0])
        candidates = [candidate for _, candidate in screened if not self._exchanges_equal_pieces(candidate)]
        return [*candidates[:_TRIALS], *self._norm_candidates()]

    def _order_candidates(self) -> Iterator[tuple[float, _Candidate]]:
        n = len(self.ins)
        if n < 2:
            return
        flips, (first, second) = flip_effects(self.passes)
        sizes = np.sqrt(np.square(flips).mean(axis=0))
        distance = self._function_distances()
        for size, a, b in zip(sizes.tolist(), first.tolist(), second.tolist(), strict=True):
            one_function = bool(distance[a, b] < _SAME_UP_TO_ROUNDING)
            if b == a + 1 or size < 10 * self.precision or distance[a, b] < _SAME_FUNCTION:
                order = np.arange(n)
                order[[a, b]] = b, a
                ins, outs = self.ins[order], self.outs[order]
                effect = 0.0 if distance[a, b] < _SAME_FUNCTION else size
                yield effect, _Candidate("order", a, b, ins, outs, self.parts, one_function)

    def _function_distances(self) -> Floats:
        """Relative root mean square difference of what blocks add to the same streams, blocks x blocks."""
        per_block = -(-_PROBE_ROWS // len(self.ins))
        z = np.concatenate([stream[:per_block] for stream in self.passes.streams[:-1]])
        blocks = zip(self.ins.tolist(), self.outs.tolist(), strict=True)
        added = np.stack([self.parts.residual(i, j, z).reshape(-1) for i, j in blocks])
        size = np.sqrt(np.square(added).sum(axis=1))
        distance = np.full((len(added), len(added)), np.inf)
        for a, b in combinations(range(len(added)), 2):
            # the difference itself, not a difference of products: those cancel to half of the digits
            if abs(size[a] - size[b]) <= _SAME_FUNCTION * max(size[a], size[b]):
                distance[a, b] = np.linalg.norm(added[a] - added[b]) / max(size[a], size[b], 1e-300)
        return distance

    def _pair_candidates(self) -> Iterator[tuple[float, _Candidate]]:
        """Two blocks exchange their output projections, their input projections or, where roles are open, any two."""
        parts, n = _cast(self.parts, np.float32), len(self.ins)
        x = self.x[:: max(1, len(self.x) // _SCREEN_ROWS)][:_SCREEN_ROWS].astype(np.float32)
        passed = run(parts, self.ins, self.outs, x)
        sides = [
            (output_side_effects(parts, passed), self.outs),
            (input_side_effects(parts, self.outs, passed), self.ins),
        ]
        if parts.shared:
            sides = [(np.concatenate([s[0] for s in sides], axis=1), np.concatenate([s[1] for s in sides]))]
        for number, (effects, sockets) in enumerate(sides):
            moved = effects[:, :, sockets]
            present = np.einsum("xss->xs", moved)
            near = max(10 * self.precision, _SCREEN_RESOLUTION * _rms(present))
            for s, t in combinations(range(len(sockets)), 2):
                size = _rms(moved[:, s, t] + moved[:, t, s] - present[:, s] - present[:, t])
                if size < near and s % n != t % n:
                    exchanged = sockets.copy()
                    exchanged[[s, t]] = exchanged[[t, s]]
                    if parts.shared:
                        ins, outs = exchanged[n:], exchanged[:n]
                    else:
                        ins, outs = (exchanged, self.outs) if number else (self.ins, exchanged)
                    a, b = sorted((s % n, t % n))
                    yield size, _Candidate("pair", a, b, ins, outs, self.parts)

    def _norm_candidates(self) -> Iterator[_Candidate]:
        """Exchanges of two norms whose difference hardly changes the projections that they feed."""
        norm_assignment = self.parts.norm_assignment
        if norm_assignment is None or self.parts.norm is None:
            return
        of_blocks, last = norm_assignment.norms_of_blocks(self.ins)
        norms = [int(n) for n in of_blocks] + ([] if last is None else [last])
        readers = [(norm_assignment.w_in[i], norm_assignment.b_in[i]) for i in self.ins] + [
            (norm_assignment.w_last, norm_assignment.b_last)
        ]
        for a, b in combinations(range(len(norms)), 2):
            pair = norms[a], norms[b]
            weights, biases = norm_assignment.weights[[*pair]], norm_assignment.biases[[*pair]]
            if np.array_equal(weights[0], weights[1]) and np.array_equal(biases[0], biases[1]):
                continue
            shifts = [
                np.linalg.norm(weight * (weights[1] - weights[0]))
                / max(float(np.linalg.norm(weight * weights[0])), 1e-300)
                for weight, _ in (readers[a], readers[b])
            ]
            if max(shifts) > _SAME_FUNCTION:
                continue
            assigned = norm_assignment.norm_of_projection.copy()
            assigned[self.ins] = of_blocks
            exchanged_last = last
            for place, number in ((a, pair[1]), (b, pair[0])):
                if place < len(self.ins):
                    assigned[self.ins[place]] = number
                else:
                    exchanged_last = number
            parts = fold_norms(
                self.parts, replace(norm_assignment, norm_of_projection=assigned, last=exchanged_last)
            )
            yield _Candidate("norm", a, b, self.ins, self.outs, parts)

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


def _output_in_other_summation_order(parts: ResidualWeights, ins: Ints, outs: Ints, x: Floats) -> Floats:
    """The same network with neurons and width reversed: its output differs by the rounding of sums alone."""
    mirrored = replace(
        parts,
        w_in=np.ascontiguousarray(parts.w_in[:, ::-1, ::-1]),
        b_in=parts.b_in[:, ::-1],
        w_out=np.ascontiguousarray(parts.w_out[:, ::-1, ::-1]),
        b_out=parts.b_out[:, ::-1],
        w_last=np.ascontiguousarray(parts.w_last[:, ::-1]),
        norm_assignment=None,
    )
    return mirrored.output(ins, outs, np.ascontiguousarray(x[:, ::-1]))


def _in_float64(parts: ResidualWeights) -> ResidualWeights:
    """The parts in float64; norms are taken in again, so that no product was rounded to float32."""
    wide = _cast(parts, np.float64)
    if parts.norm_assignment is None:
        return wide
    names = ("weights", "biases", "w_in", "b_in", "w_last", "b_last")
    norm_assignment = replace(
        parts.norm_assignment, **{n: getattr(parts.norm_assignment, n).astype(np.float64) for n in names}
    )
    return fold_norms(wide, norm_assignment)


def _cast(parts: ResidualWeights, dtype: type[np.floating[Any]]) -> ResidualWeights:
    arrays = {
        name: getattr(parts, name).astype(dtype)
        for name in ("w_in", "b_in", "w_out", "b_out", "w_last", "b_last")
    }
    return replace(parts, **arrays)


def _recording_rounding(y: NDArray[np.float64]) -> float:
    """Root mean square of the outputs' rounding: float32's if they went through it, else float64's."""
    single = bool(np.array_equal(y, y.astype(np.float32).astype(np.float64)))
    eps = float(np.finfo(np.float32 if single else np.float64).eps)
    return eps * _rms(y) / 3


def _rms(values: Floats) -> float:
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))


def _connected(links: list[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    groups: list[set[int]] = []
    for a, b in links:
        touched = [g for g in groups if a in g or b in g]
        groups = [g for g in groups if g not in touched] + [set().union({a, b}, *touched)]
    return tuple(sorted(tuple(sorted(g)) for g in groups))
