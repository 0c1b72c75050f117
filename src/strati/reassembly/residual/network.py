"""A residual network as arrays: activations, norms, and the two passes over a chain of blocks.

A *chain* is two index arrays, ``ins`` and ``outs``: block ``k`` has input projection ``ins[k]`` and output
projection ``outs[k]``. The adjoint is kept per row of data, not summed: with it, the effect of a change of
block ``k``'s output by ``v(x)`` on the network's output is ``<adjoint[k + 1](x), v(x)>`` to first order, so one
forward and one backward pass predict the outcome of every move.

Norms are folded into the projections that they feed: ``W (g * z + c) + b = (W diag(g)) z + (W c + b)``. With gain
``g`` and bias ``c`` folded in, every block reads one normalised stream, whichever norm it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from strati.core.errors import BadInputError

if TYPE_CHECKING:
    from strati.reassembly.residual.pieces import PieceSet

Array = NDArray[Any]
Floats = NDArray[np.float32]
Ints = NDArray[np.intp]


@dataclass(frozen=True)
class Activation:
    """An elementwise function and its derivative."""

    name: str
    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]

    def spend(self, u: Array) -> Array:
        """The value where ``u`` is not needed any more and may be overwritten."""
        return np.maximum(u, 0, out=u) if self.name == "relu" else self.value(u)


def activation(name: str) -> Activation:
    """The activation of that name: ``relu``, ``gelu`` (erf), ``gelu-tanh``, ``tanh``, ``silu``.

    Examples:
        >>> float(activation("silu").value(np.array([0.0]))[0])
        0.0
    """
    if name not in ACTIVATIONS:
        raise BadInputError(name, f"no such activation; there are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _relu(u: Array) -> Array:
    return np.maximum(u, 0)


def _relu_slope(u: Array) -> Array:
    return (u > 0).astype(u.dtype)


def _tanh_slope(u: Array) -> Array:
    t = np.tanh(u)
    return np.asarray(1 - t * t)


def _sigmoid(u: Array) -> Array:
    # tanh does not overflow where exp(-u) would
    return np.asarray(0.5 * (1 + np.tanh(0.5 * u)))


def _silu(u: Array) -> Array:
    return u * _sigmoid(u)


def _silu_slope(u: Array) -> Array:
    s = _sigmoid(u)
    return np.asarray(s * (1 + u * (1 - s)))


def _normal_cdf(u: Array) -> Array:
    from scipy.special import ndtr  # imported here: it costs more than reading all pieces of a ReLU network

    return np.asarray(ndtr(u))


def _gelu(u: Array) -> Array:
    return u * _normal_cdf(u)


def _gelu_slope(u: Array) -> Array:
    return np.asarray(_normal_cdf(u) + u * np.exp(-0.5 * u * u) * u.dtype.type(1 / math.sqrt(2 * math.pi)))


_ROOT = math.sqrt(2 / math.pi)


def _gelu_tanh(u: Array) -> Array:
    return np.asarray(0.5 * u * (1 + np.tanh(_ROOT * (u + 0.044715 * u * u * u))))


def _gelu_tanh_slope(u: Array) -> Array:
    t = np.tanh(_ROOT * (u + 0.044715 * u * u * u))
    return np.asarray(0.5 * (1 + t) + 0.5 * u * (1 - t * t) * _ROOT * (1 + 0.134145 * u * u))


ACTIVATIONS = {
    a.name: a
    for a in (
        Activation("relu", _relu, _relu_slope),
        Activation("gelu", _gelu, _gelu_slope),
        Activation("gelu-tanh", _gelu_tanh, _gelu_tanh_slope),
        Activation("tanh", lambda u: np.asarray(np.tanh(u)), _tanh_slope),
        Activation("silu", _silu, _silu_slope),
    )
}
"""Name -> activation."""


@dataclass(frozen=True)
class Normaliser:
    """LayerNorm (``centred``) or RMSNorm without weights; ``epsilon`` is added to the mean square.

    Examples:
        >>> z = np.array([[1.0, 3.0]])
        >>> Normaliser(epsilon=0.0).value(z).tolist(), Normaliser(centred=False, epsilon=0.0).value(z).round(3).tolist()
        ([[-1.0, 1.0]], [[0.447, 1.342]])
    """

    centred: bool = True
    epsilon: float = 1e-5

    def value(self, z: NDArray[Any], axis: int = -1) -> NDArray[Any]:
        """The normalised stream."""
        return self._parts(z, axis)[0]

    def back(self, z: NDArray[Any], g: NDArray[Any], axis: int = -1) -> NDArray[Any]:
        """The derivative by the stream ``z``, given that by the normalised one."""
        unit, size = self._parts(z, axis)
        inner = g - unit * _mean(g * unit, axis)
        if self.centred:
            inner -= _mean(g, axis)
        inner /= size
        return np.asarray(inner)

    def _parts(self, z: NDArray[Any], axis: int) -> tuple[NDArray[Any], NDArray[Any]]:
        if self.centred:
            z = z - _mean(z, axis)
        size = _mean(np.square(z), axis)
        size += z.dtype.type(self.epsilon)
        np.sqrt(size, out=size)
        return z / size, size


def _mean(z: NDArray[Any], axis: int) -> NDArray[Any]:
    """As ``z.mean``, which looks at its arguments for longer than it adds up a few hundred rows."""
    total: NDArray[Any] = np.add.reduce(z, axis=axis, keepdims=True)
    total *= z.dtype.type(1 / z.shape[axis])
    return total


MEAN = -1
"""Marks an input projection without a norm yet: it gets the mean of all."""


@dataclass(frozen=True)
class NormAssignment:
    """The norms, the weights of the projections without them, and which projection has which norm.

    Attributes:
        weights: Norms x width.
        biases: Norms x width.
        w_in: Input projections as they are in their files.
        b_in: Their biases.
        w_last: The last layer's weight.
        b_last: Its bias.
        norm_of_projection: The norm of each input projection, or :data:`MEAN`.
        last: That of the last layer; ``None`` where it has none.
    """

    weights: Floats
    biases: Floats
    w_in: Floats
    b_in: Floats
    w_last: Floats
    b_last: Floats
    norm_of_projection: Ints
    last: int | None = None

    def norm(self, number: int) -> tuple[Floats, Floats]:
        """Weight and bias of a norm, or of their mean."""
        if number == MEAN:
            return self.weights.mean(axis=0), self.biases.mean(axis=0)
        return self.weights[number], self.biases[number]

    def norms_of_blocks(self, ins: Ints) -> tuple[Ints, int | None]:
        """The norm of each block and of the last layer; unassigned norms go to blocks without one."""
        norms = self.norm_of_projection[ins].copy()
        held = {int(n) for n in norms} | {self.last}
        left = [n for n in range(len(self.weights)) if n not in held]
        for place in np.flatnonzero(norms == MEAN):
            if left:
                norms[place] = left.pop(0)
        return norms, left[0] if self.last == MEAN and left else self.last


def with_mean_norm(parts: ResidualWeights, weights: Floats, biases: Floats) -> ResidualWeights:
    """Give every projection the mean norm; a single norm of several blocks stands before the last layer."""
    last: int | None = None
    if parts.final is not None:
        last = MEAN if parts.norm is not None else 0
    unfolded = NormAssignment(
        weights,
        biases,
        parts.w_in,
        parts.b_in,
        parts.w_last,
        parts.b_last,
        np.full(len(parts.w_in), MEAN),
        last,
    )
    return fold_norms(parts, unfolded)


def fold_norms(parts: ResidualWeights, norm_assignment: NormAssignment) -> ResidualWeights:
    """The weights with gain and bias of the assigned norms folded into the projections."""
    folded = replace(parts, norm_assignment=norm_assignment)
    if parts.norm is not None:
        norms = [norm_assignment.norm(int(n)) for n in norm_assignment.norm_of_projection]
        g, c = np.stack([n[0] for n in norms]), np.stack([n[1] for n in norms])
        bias = norm_assignment.b_in + np.einsum("mhd,md->mh", norm_assignment.w_in, c)
        folded = replace(folded, w_in=np.ascontiguousarray(norm_assignment.w_in * g[:, None, :]), b_in=bias)
    if norm_assignment.last is not None:
        g, c = norm_assignment.norm(norm_assignment.last)
        folded = replace(
            folded,
            w_last=norm_assignment.w_last * g,
            b_last=norm_assignment.b_last + norm_assignment.w_last @ c,
        )
    return folded


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
