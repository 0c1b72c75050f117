"""The norm before a block: what it does to the stream, and how a derivative passes back through it.

Only the part without weights lives here. A norm's weight ``g`` and bias ``c`` are taken into the input projection it
feeds, ``W (g * z + c) + b = (W diag(g)) z + (W c + b)``, so that a block reads one normalised stream whichever norm
piece it has (:mod:`strati.reassembly.norms`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
