"""Normalisation layers and the projections they feed; fold gain and bias into the projection.

``W (g * z + c) + b = (W diag(g)) z + (W c + b)``: with gain ``g`` and bias ``c`` folded into the input projection,
every block reads one normalised stream, whichever norm it has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.residual.forward import Floats, Ints, ResidualWeights


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
