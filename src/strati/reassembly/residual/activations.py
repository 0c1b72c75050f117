"""The activations a block may have, each with its slope; numpy arrays in, arrays of the same type out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strati.core.errors import BadInputError

Array = NDArray[Any]


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
