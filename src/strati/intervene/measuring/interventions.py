"""Layers that can be changed, and changing one: re-initialise, re-randomise, and back again.

A layer is a module with a weight of at least two dimensions (and its bias): linear, convolution, embedding. One
layer is changed at a time and the change undoes itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.errors import BadInputError
from strati.network.roles import blocks, role_of

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Target:
    """A layer that can be changed.

    ``kind`` is ``linear``, ``conv``, ``conv1d`` (GPT-2's transposed linear) or ``embedding``; ``type`` is the
    layer's role in the network, by which the audit stratifies.
    """

    name: str
    kind: str
    type: str
    shape: tuple[int, ...]
    bias: bool

    @property
    def fan_in(self) -> int:
        """Inputs to one output."""
        if self.kind in ("conv1d", "embedding"):
            return self.shape[0]
        return int(np.prod(self.shape[1:]))

    @property
    def fan_out(self) -> int:
        """Outputs one input reaches."""
        if self.kind in ("conv1d", "embedding"):
            return self.shape[1]
        return int(self.shape[0] * np.prod(self.shape[2:]))


@dataclass(frozen=True)
class Change:
    """New values for a layer: which intervention, which draw, from what distribution."""

    intervention: str
    draw: int
    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    initialiser: str


def find_targets(model: torch.nn.Module, patterns: Sequence[str] = ("*",)) -> tuple[Target, ...]:
    """The layers of a network that can be changed, in its own order; a tied weight counts once.

    Args:
        model: The network.
        patterns: Shell patterns of layer names to keep.

    Raises:
        BadInputError: No layer is left.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> [(t.name, t.kind, t.shape) for t in find_targets(net)]
        [('0', 'linear', (3, 4)), ('2', 'linear', (2, 3))]
    """
    seen: set[int] = set()
    found: list[Target] = []
    block = blocks([f"{name}.weight" for name, _ in model.named_modules()])
    for name, module in model.named_modules():
        kind = _kind(module)
        if kind is None or id(module.weight) in seen:
            continue
        seen.add(id(module.weight))
        shape = tuple(int(n) for n in module.weight.shape)
        bias = getattr(module, "bias", None) is not None
        found.append(Target(name, kind, _type(name, kind, shape, block[f"{name}.weight"]), shape, bias))
    kept = tuple(t for t in found if any(fnmatchcase(t.name, p) for p in patterns))
    if not kept:
        known = ", ".join(t.name for t in found[:20]) or "none"
        why = f"no layer matches {', '.join(patterns)}; the layers are {known}"
        raise BadInputError("layers", why)
    return kept


def values_of(
    model: torch.nn.Module, target: Target
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """A layer's weight and bias as arrays of their own."""
    module: Any = model.get_submodule(target.name)
    weight = module.weight.detach().float().numpy().copy()
    return weight, module.bias.detach().float().numpy().copy() if target.bias else None


@contextmanager
def changed(model: torch.nn.Module, target: Target, change: Change) -> Iterator[None]:
    """Put new values into a layer; afterwards the old ones are back, whatever happened.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> (target,), before = find_targets(net), net[0].weight.clone()
        >>> with changed(net, target, Change("rerandomise", 0, np.zeros((2, 2), np.float32), None, "zero")):
        ...     float(net[0].weight.abs().sum().detach())
        0.0
        >>> bool((net[0].weight == before).all())
        True
    """
    import torch

    module: Any = model.get_submodule(target.name)
    old_weight = module.weight.detach().clone()
    old_bias = module.bias.detach().clone() if target.bias else None
    with torch.no_grad():
        try:
            module.weight.copy_(torch.from_numpy(change.weight))
            if target.bias and change.bias is not None:
                module.bias.copy_(torch.from_numpy(change.bias))
            yield
        finally:
            module.weight.copy_(old_weight)
            if old_bias is not None:
                module.bias.copy_(old_bias)


def as_matrix(weight: NDArray[Any], kind: str) -> NDArray[Any]:
    """The matrix of a layer that spectral metrics look at: outputs first, a kernel's taps with its inputs."""
    if kind == "conv1d":
        return weight.T
    return weight.reshape(weight.shape[0], -1)


def _kind(module: Any) -> str | None:
    weight = getattr(module, "weight", None)
    if weight is None or getattr(weight, "ndim", 0) < 2 or not weight.is_floating_point():
        return None
    name = type(module).__name__
    if name == "Conv1D" and weight.ndim == 2:
        return "conv1d"
    if name == "Embedding":
        return "embedding"
    if weight.ndim == 2 and hasattr(module, "in_features"):
        return "linear"
    if (
        weight.ndim in (3, 4, 5)
        and hasattr(module, "kernel_size")
        and not getattr(module, "transposed", False)
    ):
        return "conv"
    return None


def _type(name: str, kind: str, shape: tuple[int, ...], block: int | None) -> str:
    """Layers that play one part share a type: their role in a transformer, the size of their kernel."""
    if kind == "conv":
        return "conv" + "x".join(str(n) for n in shape[2:])
    return kind if kind == "embedding" else str(role_of(f"{name}.weight", block))
