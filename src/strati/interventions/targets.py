"""Layers and blocks that can be changed, and changing one, so that the change undoes itself.

A layer is a module with a weight of at least two dimensions (and its bias): linear, convolution, embedding. A block
is what ``blocks`` finds: it can only be dropped, which makes it the identity.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.io.layers import as_patterns, select
from strati.io.roles import Role, blocks, role_of
from strati.io.views import kernel

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from strati.interventions.expert_removal import ExpertScores


@dataclass(frozen=True)
class Target:
    """A layer that can be changed.

    ``kind`` is ``linear``, ``conv``, ``conv1d`` (GPT-2's transposed linear), ``embedding``, ``block``, or ``experts``;
    ``type`` is the layer's role in the network, by which the audit stratifies. Of a block ``members`` are the names of
    it and those that follow it in its stack, and ``outputs`` the length of the tuple it returns (0: a tensor).
    """

    name: str
    kind: str
    type: str
    shape: tuple[int, ...]
    bias: bool
    members: tuple[str, ...] = ()
    outputs: int = 0

    @property
    def composite(self) -> bool:
        """Whether it is a block or a layer of experts, which has no weight of its own."""
        return self.kind in ("block", "experts")

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
    """New values for a layer: which intervention, setting and draw, and where the values come from.

    ``bias`` is ``None`` where it stays as it is. A change of blocks or experts has no weight but the names of the
    blocks, or the numbers of the experts that are removed, with the scores that merging goes by.
    """

    intervention: str
    draw: int
    weight: NDArray[np.float32] | None
    bias: NDArray[np.float32] | None
    initialiser: str
    setting: str | None = None
    blocks: tuple[str, ...] = ()
    experts: tuple[int, ...] = ()
    scores: ExpertScores | None = field(default=None, repr=False, compare=False)

    @property
    def values(self) -> NDArray[np.float32]:
        """The new weight.

        Raises:
            ValueError: The change is one of blocks.
        """
        if self.weight is None:
            raise ValueError("a change of blocks or experts has no weight")
        return self.weight


def target_of(plain: Mapping[str, Any]) -> Target:
    """A layer from its plain fields."""
    return Target(**{**plain, "shape": tuple(plain["shape"]), "members": tuple(plain["members"])})


def find_targets(model: torch.nn.Module, patterns: Sequence[str] = ("*",)) -> tuple[Target, ...]:
    """The layers of a network that can be changed, in its own order; a tied weight counts once.

    Args:
        model: The network.
        patterns: Which layers to keep, as :mod:`strati.io.layers` reads patterns.

    Raises:
        BadInputError: A pattern matches nothing, or no layer is left.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> [(t.name, t.kind, t.shape) for t in find_targets(net)]
        [('0', 'linear', (3, 4)), ('2', 'linear', (2, 3))]
    """
    weight_ids: set[int] = set()
    targets: list[Target] = []
    block = blocks([f"{name}.weight" for name, _ in model.named_modules()])
    for name, module in model.named_modules():
        kind = _kind(module)
        if kind is None or id(module.weight) in weight_ids:
            continue
        weight_ids.add(id(module.weight))
        shape = tuple(int(n) for n in module.weight.shape)
        bias = getattr(module, "bias", None) is not None
        targets.append(Target(name, kind, _type(name, kind, shape, block[f"{name}.weight"]), shape, bias))
    if not targets:
        raise BadInputError("layers", "the network has no layer that can be changed")
    names = chosen_names([t.name for t in targets], patterns)
    return tuple(t for t in targets if t.name in names)


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Layers that share another one's weight, and the name of the one that :func:`find_targets` gives.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        >>> net[1].weight = net[0].weight
        >>> tied_names(net)
        {'1': '0'}
    """
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, module in model.named_modules():
        if _kind(module) is not None:
            first_name = first.setdefault(id(module.weight), name)
            if first_name != name:
                tied[name] = first_name
    return tied


def chosen_names(
    layers: Sequence[str], patterns: str | Sequence[str], *, whole: Sequence[str] = ()
) -> frozenset[str]:
    """The names of modules that patterns mean: names, ``role:...``, ``block:...``, a leading ``!`` leaves out.

    Args:
        layers: Names of layers.
        patterns: As :mod:`strati.io.layers` reads them.
        whole: Names of whole blocks. A block is also meant where a layer inside it is, unless it is left out itself.

    Raises:
        BadInputError: A pattern matches nothing; the nearest layers are named.

    Examples:
        >>> sorted(chosen_names(["h.0.mlp.fc1", "h.1.mlp.fc1"], ["role:mlp.*", "!block:1"]))
        ['h.0.mlp.fc1']
        >>> sorted(chosen_names(["h.0.mlp.fc1", "h.1.mlp.fc1"], "h.0.mlp.fc1.weight", whole=["h.0", "h.1"]))
        ['h.0', 'h.0.mlp.fc1']
    """
    tensors = {f"{name}.weight": name for name in layers} | {f"{name}.any.weight": name for name in whole}
    numbers = blocks(tensors)
    items = [_Named(name, f"{name}.weight", numbers[tensor]) for tensor, name in tensors.items()]
    pattern_list = as_patterns(patterns)
    names = {item.name for item in select(items, pattern_list)}
    without = [pattern.removeprefix("!") for pattern in pattern_list if pattern.startswith("!")]
    gone = {item.name for item in select(items, without)} if without else set()
    around = {name for name in whole if any(layer.startswith(f"{name}.") for layer in names)}
    return frozenset(names | (around - gone))


@dataclass(frozen=True)
class _Named:
    """A module as :func:`strati.io.layers.select` looks at it."""

    name: str
    tensor: str
    block: int | None

    @property
    def role(self) -> Role:
        return role_of(self.tensor, self.block)


def values_of(
    model: torch.nn.Module, target: Target
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """A layer's weight and bias as arrays of their own.

    Raises:
        BadInputError: The layer has a shape but no values (a model on the ``meta`` device).
    """
    module: Any = model.get_submodule(target.name)
    if module.weight.is_meta:
        raise BadInputError(target.name, "has no values (device meta); load the weights first")
    weight = module.weight.detach().float().cpu().numpy().copy()
    return weight, module.bias.detach().float().cpu().numpy().copy() if target.bias else None


def to_float32(model: torch.nn.Module) -> torch.nn.Module:
    """A module in half or double precision as a copy in single precision, in which a study's data are."""
    others = any(p.is_floating_point() and p.dtype.itemsize != 4 for p in model.parameters())
    return copy.deepcopy(model).float() if others else model


def weights_digest(model: torch.nn.Module) -> str:
    """A short hash of the weights of all layers, whatever the order and precision they are stored in."""
    total = hashlib.sha256()
    for target in sorted(find_targets(model), key=lambda t: t.name):
        weight = values_of(model, target)[0]
        total.update(target.name.encode() + repr(weight.shape).encode() + weight.tobytes())
    return total.hexdigest()[:32]


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
    if target.kind == "experts":
        from strati.interventions.expert_removal import remove_experts

        merge = change.intervention == "merge-experts"
        restore = remove_experts(model.get_submodule(target.name), change.experts, change.scores, merge=merge)
        try:
            yield
        finally:
            restore()
        return
    if change.blocks:
        with rearranged(model, change, target.outputs):
            yield
        return
    module: Any = model.get_submodule(target.name)
    old_weight = module.weight.detach().clone()
    old_bias = module.bias.detach().clone() if target.bias else None
    try:
        put_values(model, target, change)
        yield
    finally:
        _put(target.name, module, old_weight, old_bias)


def put_values(model: torch.nn.Module, target: Target, change: Change) -> None:
    """Put the new values of a change into a layer for good."""
    import torch

    module: Any = model.get_submodule(target.name)
    _put(target.name, module, torch.from_numpy(change.values), change.bias if target.bias else None)


def _put(
    name: str, module: Any, weight: torch.Tensor, bias: NDArray[np.float32] | torch.Tensor | None
) -> None:
    """Write values into a layer where they are.

    Raises:
        BadInputError: The layer's memory cannot be written to.
    """
    import torch

    # A mode of its own: callers may switch gradients back on before they leave, and what was loaded in inference mode
    # can only be written in it.
    with torch.inference_mode() if module.weight.is_inference() else torch.no_grad():
        try:
            module.weight.copy_(weight)
            if bias is not None:
                module.bias.copy_(torch.as_tensor(bias))
        except RuntimeError as error:
            reason = str(error).partition(".")[0].partition("\n")[0]
            raise BadInputError(
                name, f"its weights cannot be written in place ({reason}); clone them first"
            ) from None


@contextmanager
def dropped(model: torch.nn.Module, names: Sequence[str], outputs: int = 0) -> Iterator[None]:
    """Make blocks the identity; ``outputs`` is the length of the tuple they return (0: a tensor).

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> with dropped(net, ["0"]):
        ...     net(torch.ones(1, 2)).tolist()
        [[1.0, 1.0]]
    """

    def identity(*args: Any, **options: Any) -> Any:
        first = args[0] if args else next(iter(options.values()))
        return (first, *[None] * (outputs - 1)) if outputs else first

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(replaced_forward(model.get_submodule(name), identity))
        yield


@contextmanager
def rearranged(model: torch.nn.Module, change: Change, outputs: int = 0) -> Iterator[None]:
    """Blocks dropped, run in reverse order, repeated, or run side by side with their outputs averaged.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
        >>> _ = torch.nn.init.constant_(net[0].weight, -1.0), torch.nn.init.zeros_(net[0].bias)
        >>> with rearranged(net, Change("reorder", 0, None, None, "", None, ("0", "1"))):
        ...     net(torch.ones(1, 1)).item()
        -1.0
    """
    if change.intervention == "drop":
        with dropped(model, change.blocks, outputs):
            yield
        return
    modules: list[Any] = [model.get_submodule(name) for name in change.blocks]
    forwards = [module.forward for module in modules]
    with ExitStack() as stack:
        if change.intervention == "reorder":
            for module, forward in zip(modules, forwards[::-1], strict=True):
                stack.enter_context(replaced_forward(module, forward))
        elif change.intervention == "repeat":
            times = int((change.setting or "times=2").partition("=")[2])
            stack.enter_context(replaced_forward(modules[0], _repeated(forwards[0], times)))
        else:
            stack.enter_context(dropped(model, change.blocks[1:], outputs))
            stack.enter_context(replaced_forward(modules[0], _averaged(forwards)))
        yield


def _repeated(forward: Callable[..., Any], times: int) -> Callable[..., Any]:
    def several(*args: Any, **options: Any) -> Any:
        key = "" if args else next(iter(options))
        output = forward(*args, **options)
        for _ in range(times - 1):
            first = output[0] if isinstance(output, tuple) else output
            output = forward(first, *args[1:], **options) if args else forward(**(options | {key: first}))
        return output

    return several


def _averaged(forwards: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def mean(*args: Any, **options: Any) -> Any:
        outputs = [forward(*args, **options) for forward in forwards]
        if isinstance(outputs[0], tuple):
            return (sum(output[0] for output in outputs) / len(outputs), *outputs[0][1:])
        return sum(outputs) / len(outputs)

    return mean


@contextmanager
def replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """A module with another ``forward``; afterwards its own is back."""
    original = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if original is None:
            del module.forward
        else:
            module.forward = original


def as_matrix(weight: NDArray[Any], kind: str) -> NDArray[Any]:
    """A layer as one matrix, for metrics of the user's: outputs first, a kernel's taps with its inputs."""
    if kind == "conv1d":
        return weight.T
    return weight.reshape(weight.shape[0], -1)


def from_matrix(matrix: NDArray[Any], kind: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A layer's weight from its matrix: undoes :func:`as_matrix`.

    Examples:
        >>> w = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
        >>> bool((from_matrix(as_matrix(w, "conv"), "conv", w.shape) == w).all())
        True
    """
    weight = matrix.T if kind == "conv1d" else matrix.reshape(shape)
    return np.ascontiguousarray(weight, dtype=np.float32)


def as_matrices(weight: NDArray[Any], kind: str) -> list[NDArray[Any]]:
    """The matrices whose eigenvalues ``scan`` pools for such a layer: a kernel's slices, else the one matrix.

    Examples:
        >>> len(as_matrices(np.zeros((8, 4, 3, 3)), "conv")), as_matrices(np.zeros((5, 3)), "conv1d")[0].shape
        (9, (3, 5))
    """
    if kind == "conv":
        return list(kernel(weight.shape, inputs_first=False, flatten=False).matrices(weight))
    return [as_matrix(weight, kind)]


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
