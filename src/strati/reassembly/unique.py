"""Is the order found the only one? Which blocks, or pieces of blocks, could change places without the data noticing.

Blocks that commute, or whose effect is below the precision of the recorded outputs, have no order that data could tell.
The effect of every exchange is predicted by one forward and one backward pass in float64; what is predicted to be near
the precision is tried in full. If such a trial fits better, the answer was not the best one and is improved first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from strati.reassembly.joint import from_sockets, polish, socket_effects, to_sockets
from strati.reassembly.passes import run
from strati.reassembly.regression import flip_effects

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.passes import Ints, Parts

    Floats = NDArray[Any]

_ROWS = 400
_TRIALS = 400
_ROUNDS = 20
_SURE = 4.0
"""Rows used; exchanges tried in full at most; improvements at most; standard errors by which a worse fit must
be worse to be believed."""


@dataclass(frozen=True)
class Exchange:
    """Two blocks that could change places (``order``) or output projections (``pair``), by place in the network.

    ``margin`` is the root mean square change of the outputs over the precision of the data.
    """

    kind: Literal["order", "pair"]
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
        least_margin: The least margin of all exchanges tried; ``None`` for a single block.
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
        return _groups([(e.a, e.b) for e in self.exchanges if e.kind == "order"])


def uniqueness(
    parts: Parts, ins: Ints, outs: Ints, x: NDArray[np.float64], y: NDArray[np.float64]
) -> Uniqueness:
    """Which exchanges of two blocks, or of two blocks' output projections, fit the data as well.

    Args:
        parts: The pieces.
        ins: Input projections in the order found.
        outs: Output projections.
        x: Inputs, as recorded.
        y: Outputs, rows x outputs, as recorded.
    """
    wide = _wide(parts)
    step = max(1, len(x) // _ROWS)
    rows: tuple[Floats, Floats] = (
        np.ascontiguousarray(x[::step][:_ROWS], np.float64),
        np.ascontiguousarray(y[::step][:_ROWS], np.float64),
    )
    rounding = _rounding(y)
    for _ in range(_ROUNDS):
        found, better = _look(wide, ins, outs, *rows, rounding)
        if better is None:
            return found
        _, ins, outs, _ = polish(wide, *better, *rows, floor=rounding**2)
    return found


def _look(
    parts: Parts, ins: Ints, outs: Ints, x: Floats, y: Floats, rounding: float
) -> tuple[Uniqueness, tuple[Ints, Ints] | None]:
    """The exchanges that fit as well, and the best one if it fits clearly better than what there is."""
    error = np.square(parts.output(ins, outs, x) - y).mean(axis=1)
    noise = max(float(np.sqrt(error.mean())), rounding)
    now = parts.output(ins, outs, x)
    kept: list[Exchange] = []
    margins: list[float] = []
    best: tuple[float, Ints, Ints] | None = None
    for kind, a, b, new_ins, new_outs in _candidates(parts, ins, outs, x, noise):
        if _same(parts, ins, outs, new_ins, new_outs):
            continue
        output = parts.output(new_ins, new_outs, x)
        margin = float(np.sqrt(np.square(output - now).mean())) / noise
        margins.append(margin)
        worse = np.square(output - y).mean(axis=1) - error
        spread = float(worse.std()) / np.sqrt(len(worse))
        fits_better = worse.mean() < -max(_SURE * spread, 0.01 * error.mean(), rounding**2)
        if fits_better and (best is None or worse.mean() < best[0]):
            best = (float(worse.mean()), new_ins, new_outs)
        if margin < 0.05 or worse.mean() <= max(_SURE * spread, 0.05 * rounding**2):
            kept.append(Exchange(kind, a, b, margin))
    found = Uniqueness(ins, outs, noise, min(margins, default=None), tuple(kept))
    return found, None if best is None else best[1:]


def _candidates(
    parts: Parts, ins: Ints, outs: Ints, x: Floats, noise: float
) -> list[tuple[Literal["order", "pair"], int, int, Ints, Ints]]:
    """All exchanges of neighbours, and every other one whose predicted effect is near the precision, least first."""
    n = len(ins)
    near = 10 * noise
    found: list[tuple[float, Literal["order", "pair"], int, int, Ints, Ints]] = []
    passed = run(parts, ins, outs, x)
    if n > 1:
        flips, (first, second) = flip_effects(passed)
        size = np.sqrt(np.square(flips).mean(axis=0))
        for rms, a, b in zip(size.tolist(), first.tolist(), second.tolist(), strict=True):
            if b == a + 1 or rms < near:
                order = np.arange(n)
                order[[a, b]] = b, a
                found.append((rms, "order", a, b, ins[order], outs[order]))
    sockets = to_sockets(parts, ins, outs)
    effects = socket_effects(parts, ins, outs, x)[1]
    moved = effects[:, :, sockets]
    own = np.einsum("xss->xs", moved)
    for s in range(len(sockets)):
        for t in range(s + 1, len(sockets)):
            change = moved[:, s, t] + moved[:, t, s] - own[:, s] - own[:, t]
            rms = float(np.sqrt(np.square(change, dtype=np.float64).mean()))
            if rms < near and s % n != t % n:
                exchanged = sockets.copy()
                exchanged[[s, t]] = exchanged[[t, s]]
                found.append((rms, "pair", s % n, t % n, *from_sockets(parts, exchanged, ins)))
    found.sort(key=lambda entry: entry[0])
    return [entry[1:] for entry in found[:_TRIALS]]


def _same(parts: Parts, ins: Ints, outs: Ints, new_ins: Ints, new_outs: Ints) -> bool:
    """Whether an exchange only exchanged equal pieces."""
    return all(
        i == j or (np.array_equal(weights[i], weights[j]) and np.array_equal(biases[i], biases[j]))
        for old, new, weights, biases in (
            (ins, new_ins, parts.A, parts.a),
            (outs, new_outs, parts.B, parts.b),
        )
        for i, j in zip(old.tolist(), new.tolist(), strict=True)
    )


def _wide(parts: Parts) -> Parts:
    arrays = {name: getattr(parts, name).astype(np.float64) for name in ("A", "a", "B", "b", "L", "l")}
    return replace(parts, **arrays, wardrobe=None)  # norms stay with those who wear them


def _rounding(y: NDArray[np.float64]) -> float:
    """Root mean square of the outputs' rounding: float32's if they went through it, else float64's."""
    single = bool(np.array_equal(y, y.astype(np.float32).astype(np.float64)))
    eps = float(np.finfo(np.float32 if single else np.float64).eps)
    return eps * float(np.sqrt(np.square(y).mean())) / 3


def _groups(links: list[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    groups: list[set[int]] = []
    for a, b in links:
        touched = [g for g in groups if a in g or b in g]
        groups = [g for g in groups if g not in touched] + [set().union({a, b}, *touched)]
    return tuple(sorted(tuple(sorted(g)) for g in groups))
