"""The pieces as arrays, and the two passes over a chain of them: forward, and the adjoint of the output.

A *chain* is two index arrays, ``ins`` and ``outs``: block ``k`` has input projection ``ins[k]`` and output
projection ``outs[k]``. The adjoint is kept per row of data, not summed: with it, the effect of a change of
block ``k``'s output by ``v(x)`` on the network's output is ``<adjoint[k + 1](x), v(x)>`` to first order, so one
forward and one backward pass predict the outcome of every move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.activations import Activation, activation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.pieces import PieceSet

    Floats = NDArray[np.float32]
    Ints = NDArray[np.intp]


_CHUNK = 256
"""Rows pushed through the chain at a time: they and a block's weights stay in the cache."""


@dataclass(frozen=True)
class Parts:
    """Stacked weights. ``shared`` says that ``A`` and ``B`` are one pool (square pieces, roles unknown).

    Shapes, with ``m`` candidates, ``n`` blocks, width ``d``, hidden ``h``, outputs ``o``: ``A`` (m, h, d),
    ``a`` (m, h), ``B`` (m, d, h), ``b`` (m, d), ``L`` (o, d), ``l`` (o).
    """

    A: Floats
    a: Floats
    B: Floats
    b: Floats
    L: Floats
    l: Floats  # noqa: E741
    act: Activation
    blocks: int
    shared: bool = False

    def residual(self, i: int, j: int, z: Floats) -> Floats:
        """``W_out act(W_in z + b_in) + b_out`` of input projection ``i`` and output projection ``j``."""
        u = z @ self.A[i].T
        u += self.a[i]
        r: Floats = self.act.spend(u) @ self.B[j].T
        r += self.b[j]
        return r

    def output(self, ins: Ints, outs: Ints, x: Floats) -> Floats:
        """The network's output, rows x outputs."""
        chunks = []
        for start in range(0, len(x), _CHUNK):
            z = x[start : start + _CHUNK].T.copy()
            for i, j in zip(ins, outs, strict=True):
                u = self.A[i] @ z
                u += self.a[i][:, None]
                r = self.B[j] @ self.act.spend(u)
                r += self.b[j][:, None]
                z += r
            chunks.append((self.L @ z + self.l[:, None]).T)
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


def run(parts: Parts, ins: Ints, outs: Ints, x: Floats) -> Pass:
    """Forward and backward over a chain of pieces."""
    return run_mixed(parts, ins, [parts.B[j] for j in outs], [parts.b[j] for j in outs], x)


def run_mixed(parts: Parts, ins: Ints, B: list[Floats], b: list[Floats], x: Floats) -> Pass:
    """The same with output projections given as matrices, which may be mixtures of several pieces."""
    streams, pre, hidden = [x], [], []
    for i, Bk, bk in zip(ins, B, b, strict=True):
        u = streams[-1] @ parts.A[i].T
        u += parts.a[i]
        f = parts.act.value(u)
        pre.append(u)
        hidden.append(f)
        z = f @ Bk.T
        z += bk
        z += streams[-1]
        streams.append(z)
    output = streams[-1] @ parts.L.T + parts.l
    g: Floats = np.ascontiguousarray(np.broadcast_to(parts.L[:, None, :], (len(parts.L), *x.shape)))
    adjoint = [g]
    for k in range(len(B) - 1, -1, -1):
        g = g + ((g @ B[k]) * parts.act.slope(pre[k])) @ parts.A[ins[k]]
        adjoint.append(g)
    return Pass(output, streams, hidden, adjoint[::-1])


def stack(pieces: PieceSet, name: str) -> Parts:
    """The arrays of a sorted set of pieces, for one activation."""
    A = np.stack([p.weight for p in pieces.inner])
    a = np.stack([p.bias for p in pieces.inner])
    B = np.stack([p.weight for p in pieces.outer])
    b = np.stack([p.bias for p in pieces.outer])
    act = activation(name)
    return Parts(A, a, B, b, pieces.last.weight, pieces.last.bias, act, pieces.blocks, pieces.square)
