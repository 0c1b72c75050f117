"""The pieces as arrays, and the two passes over a chain of them: forward, and the adjoint of the output.

A *chain* is two index arrays, ``ins`` and ``outs``: block ``k`` has input projection ``ins[k]`` and output
projection ``outs[k]``. The adjoint is kept per row of data, not summed: with it, the effect of a change of
block ``k``'s output by ``v(x)`` on the network's output is ``<adjoint[k + 1](x), v(x)>`` to first order, so one
forward and one backward pass predict the outcome of every move.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.reassembly.residual.activations import Activation, activation
from strati.reassembly.residual.norms import Normaliser, NormAssignment, with_mean_norm

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.residual.pieces import PieceSet

    Floats = NDArray[np.float32]
    Ints = NDArray[np.intp]

_CHUNK = 256
"""Rows pushed through the chain at a time: they and a block's weights stay in the cache."""


@dataclass(frozen=True)
class ResidualWeights:
    """Stacked weights. ``shared`` says that ``w_in`` and ``w_out`` are one pool (square pieces, roles unknown).

    Shapes, with ``m`` candidates, ``n`` blocks, width ``d``, hidden ``h``, outputs ``o``: ``w_in``
    (m, h, d), ``b_in`` (m, h), ``w_out`` (m, d, h), ``b_out`` (m, d), ``w_last`` (o, d), ``b_last`` (o). ``norm``
    stands before every block, ``final`` before the last layer; their weights are folded into ``w_in``, ``b_in``,
    ``w_last`` and ``b_last``, as ``norm_assignment`` says.
    """

    w_in: Floats
    b_in: Floats
    w_out: Floats
    b_out: Floats
    w_last: Floats
    b_last: Floats
    act: Activation
    blocks: int
    shared: bool = False
    norm: Normaliser | None = None
    final: Normaliser | None = None
    norm_assignment: NormAssignment | None = None

    def enter(self, z: Any, axis: int = -1) -> Any:
        """What a block reads of the stream."""
        return z if self.norm is None else self.norm.value(z, axis)

    def leave(self, z: Any, axis: int = -1) -> Any:
        """What the last layer reads of the stream."""
        return z if self.final is None else self.final.value(z, axis)

    def entered_back(self, z: Any, g: Any, axis: int = -1) -> Any:
        """The derivative by the stream, given that by what a block reads of it."""
        return g if self.norm is None else self.norm.back(z, g, axis)

    def left_back(self, z: Any, g: Any, axis: int = -1) -> Any:
        """The derivative by the stream, given that by what the last layer reads of it."""
        return g if self.final is None else self.final.back(z, g, axis)

    def residual(self, i: int, j: int, z: Floats) -> Floats:
        """``W_out act(W_in z + b_in) + b_out`` of input projection ``i`` and output projection ``j``."""
        u = self.enter(z) @ self.w_in[i].T
        u += self.b_in[i]
        r: Floats = self.act.spend(u) @ self.w_out[j].T
        r += self.b_out[j]
        return r

    def output(self, ins: Ints, outs: Ints, x: Floats) -> Floats:
        """The network's output, rows x outputs."""
        chunks = []
        for start in range(0, len(x), _CHUNK):
            z = x[start : start + _CHUNK].T.copy()
            for i, j in zip(ins, outs, strict=True):
                u = self.w_in[i] @ self.enter(z, 0)
                u += self.b_in[i][:, None]
                r = self.w_out[j] @ self.act.spend(u)
                r += self.b_out[j][:, None]
                z += r
            chunks.append((self.w_last @ self.leave(z, 0) + self.b_last[:, None]).T)
        return np.concatenate(chunks)

    def mse(self, ins: Ints, outs: Ints, x: Floats, y: Floats) -> float:
        """Mean squared error over rows and outputs; infinite where the output overflows."""
        with np.errstate(over="ignore", invalid="ignore"):
            error = self.output(ins, outs, x) - y
            value = float(np.mean(np.square(error, dtype=np.float64)))
        return value if np.isfinite(value) else float("inf")


@dataclass(frozen=True)
class Pass:
    """What a forward and a backward pass over ``n`` blocks leave behind.

    ``streams[k]`` is the input of block ``k`` (``streams[n]`` that of the last layer), ``hidden[k]`` its
    activations, ``adjoint[k]`` (outputs, rows, width) the derivative of the output by ``streams[k]``.
    """

    output: Floats
    streams: list[Floats]
    hidden: list[Floats]
    adjoint: list[Floats]

    @property
    def residuals(self) -> list[Floats]:
        """What each block adds to the stream."""
        return [after - before for before, after in zip(self.streams, self.streams[1:], strict=False)]


def run(parts: ResidualWeights, ins: Ints, outs: Ints, x: Floats) -> Pass:
    """Forward and backward over a chain of pieces."""
    return run_mixed(parts, ins, [parts.w_out[j] for j in outs], [parts.b_out[j] for j in outs], x)


def run_mixed(parts: ResidualWeights, ins: Ints, B: list[Floats], b: list[Floats], x: Floats) -> Pass:
    """The same with output projections given as matrices, which may be mixtures of several pieces."""
    streams, pre, hidden = [x], [], []
    for i, Bk, bk in zip(ins, B, b, strict=True):
        u = parts.enter(streams[-1]) @ parts.w_in[i].T
        u += parts.b_in[i]
        f = parts.act.value(u)
        pre.append(u)
        hidden.append(f)
        z = f @ Bk.T
        z += bk
        z += streams[-1]
        streams.append(z)
    output = parts.leave(streams[-1]) @ parts.w_last.T + parts.b_last
    g: Floats = np.ascontiguousarray(np.broadcast_to(parts.w_last[:, None, :], (len(parts.w_last), *x.shape)))
    g = parts.left_back(streams[-1], g)
    adjoint = [g]
    for k in range(len(B) - 1, -1, -1):
        inner = ((g @ B[k]) * parts.act.slope(pre[k])) @ parts.w_in[ins[k]]
        g = g + parts.entered_back(streams[k], inner)
        adjoint.append(g)
    return Pass(output, streams, hidden, adjoint[::-1])


def stack(pieces: PieceSet, name: str) -> ResidualWeights:
    """The arrays of a sorted set of pieces, for one activation; every projection gets the mean norm first."""
    A = np.stack([p.weight for p in pieces.inner])
    a = np.stack([p.bias for p in pieces.inner])
    B = np.stack([p.weight for p in pieces.outer])
    b = np.stack([p.bias for p in pieces.outer])
    act = activation(name)
    parts = ResidualWeights(
        A, a, B, b, pieces.last.weight, pieces.last.bias, act, pieces.blocks, pieces.square
    )
    if not pieces.norms:
        return parts
    norm = Normaliser(centred=pieces.centred)
    parts = replace(
        parts,
        norm=norm if len(pieces.norms) >= max(pieces.blocks, 2) else None,
        final=norm if len(pieces.norms) != pieces.blocks or pieces.blocks == 1 else None,
    )
    weights, biases = (np.stack([getattr(p, side) for p in pieces.norms]) for side in ("weight", "bias"))
    return with_mean_norm(parts, weights, biases)
