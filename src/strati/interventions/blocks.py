"""Residual blocks: the repeated parts of a network that can become the identity.

A block is a member of a list or sequence of like modules that returns a tensor of its input's shape and still passes
its input on when its own layers are zero. Which ones do is seen by running the network once. How far they turn their
input is :class:`BlockInfluence`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from strati.core.errors import BadInputError
from strati.interventions.targets import Change, Target, chosen_names, find_targets
from strati.interventions.tasks import IGNORED, forward


def find_blocks(
    model: nn.Module,
    run: Callable[[], object],
    patterns: Sequence[str] = ("*",),
    *,
    required: bool = True,
) -> tuple[Target, ...]:
    """The blocks of a network that can be dropped, in its own order.

    Args:
        model: The network.
        run: Runs it once on some input.
        patterns: As :mod:`strati.io.layers` reads them; a block is kept if it or a layer in it is meant.
        required: Whether a network without such blocks is an error.

    Raises:
        BadInputError: There is none, or a pattern matches nothing.

    Examples:
        >>> class Block(nn.Sequential):
        ...     def forward(self, x):
        ...         return x + super().forward(x)
        >>> net = nn.Sequential(*(Block(nn.Linear(3, 3), nn.ReLU()) for _ in range(3)), nn.Linear(3, 2))
        >>> [block.name for block in find_blocks(net, lambda: net(torch.ones(1, 3)))]
        ['0', '1', '2']
    """
    stacks = _stacks(model)
    residual = _residual(model, [name for stack in stacks for name in stack], run)
    inner = [t.name for t in find_targets(model)]
    blocks: list[Target] = []
    taken: list[str] = []
    for stack in stacks:
        inside = any(name.startswith(f"{outer}.") for outer in taken for name in stack)
        # Stages that change the shape are no blocks, though the first of them may keep it: their members are.
        if inside or 2 * sum(name in residual for name in stack) <= len(stack):
            continue
        taken += stack
        for place, name in enumerate(stack):
            following = _unbroken(stack[place:], residual)
            if following:
                size = sum(p.numel() for p in model.get_submodule(name).parameters())
                blocks.append(Target(name, "block", "block", (size,), False, following, residual[name]))
    if not blocks and not required:
        return ()
    if not blocks:
        why = "no residual block found: no repeated part that passes its input on in the same shape"
        raise BadInputError("drop", why)
    meant = chosen_names(inner, patterns, whole=[block.name for block in blocks])
    matching = tuple(block for block in blocks if block.name in meant)
    if not matching:
        there = ", ".join(block.name for block in blocks[:20])
        raise BadInputError("drop", f"no block matches {', '.join(patterns)}; the blocks are {there}")
    return matching


def _unbroken(names: Sequence[str], residual: dict[str, int]) -> tuple[str, ...]:
    """The blocks from the first on that can be dropped together."""
    run: list[str] = []
    for name in names:
        if name not in residual:
            break
        run.append(name)
    return tuple(run)


def _stacks(model: nn.Module) -> list[list[str]]:
    """Lists and sequences of like, composite modules that hold layers, outermost first."""
    layers = [t.name for t in find_targets(model)]
    stacks = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        groups: dict[type, list[str]] = {}
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            if any(True for _ in child.children()) and any(w.startswith(f"{path}.") for w in layers):
                groups.setdefault(type(child), []).append(path)
        stacks += list(groups.values())
    return stacks


def _residual(model: nn.Module, names: list[str], run: Callable[[], object]) -> dict[str, int]:
    """Which modules are residual, and the length of the tuple each returns (0: a tensor)."""
    calls: dict[str, tuple[Any, Any, int]] = {}
    hooks: list[Any] = []
    for name in names:

        def look(_module: Any, args: Any, options: Any, output: Any, name: str = name) -> None:
            first = args[0] if args else next(iter(options.values()), None)
            first_output = output[0] if isinstance(output, tuple) and output else output
            if (
                isinstance(first, Tensor)
                and isinstance(first_output, Tensor)
                and first.shape == first_output.shape
            ):
                calls.setdefault(name, (args, options, len(output) if isinstance(output, tuple) else 0))

        hooks.append(model.get_submodule(name).register_forward_hook(look, with_kwargs=True))
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return {
        name: length
        for name, (args, options, length) in calls.items()
        if _passes_on(model.get_submodule(name), args, options)
    }


@torch.no_grad()
def _passes_on(block: nn.Module, args: Any, options: Any) -> bool:
    """Whether a block's output still depends on its input when its layers' weights and biases are zero."""
    layers = [block.get_submodule(t.name) for t in find_targets(block)]
    tensors = [p for layer in layers for p in layer.parameters(recurse=False)]
    originals = [t.clone() for t in tensors]
    key = None if args else next(iter(options))
    x = args[0] if args else options[key]
    other = x.flip(-1)
    outputs = []
    try:
        for tensor in tensors:
            tensor.zero_()
        for entry in (x, other):
            output = block(entry, *args[1:], **options) if args else block(**(options | {key: entry}))
            outputs.append(output[0] if isinstance(output, tuple) else output)
    finally:
        for tensor, old in zip(tensors, originals, strict=True):
            tensor.copy_(old)
    return torch.equal(x, other) or not torch.equal(outputs[0], outputs[1])


class BlockInfluence:
    """How far each run of blocks turns its input, measured in one pass of the intact network."""

    def __init__(self, model: nn.Module, batches: Iterable[Tensor], target: Target) -> None:
        self.target = target
        self._sums = dict.fromkeys(target.members, 0.0)
        self._angles = dict.fromkeys(target.members, 0.0)
        self._count = 0
        self._measure(model, batches)

    def of(self, change: Change) -> dict[str, float | None]:
        """The influence and the angular distance of the blocks changed together."""
        if not self._count:
            return {"block_influence": None, "angular_distance": None}
        last = change.blocks[-1]
        return {
            "block_influence": 1.0 - self._sums[last] / self._count,
            "angular_distance": self.angular_distance(last),
        }

    def angular_distance(self, last: str) -> float:
        """The angle between what enters the first block and what leaves ``last``, over pi, averaged over tokens."""
        return self._angles[last] / self._count

    @torch.inference_mode()
    def _measure(self, model: nn.Module, batches: Iterable[Tensor]) -> None:
        first: list[Tensor] = []
        turned: dict[str, Tensor] = {}

        def start(_module: Any, args: Any, options: Any) -> None:
            first[:] = [args[0] if args else next(iter(options.values()))]

        hooks: list[Any] = [
            model.get_submodule(self.target.name).register_forward_pre_hook(start, with_kwargs=True)
        ]
        for name in self.target.members:

            def end(_module: Any, _args: Any, output: Any, name: str = name) -> None:
                first_output = output[0] if isinstance(output, tuple) else output
                turned[name] = _cosines(first[0], first_output)

            hooks.append(model.get_submodule(name).register_forward_hook(end))
        try:
            for inputs in batches:
                turned.clear()
                forward(model, inputs)
                real = inputs != IGNORED if not inputs.is_floating_point() else None
                for name, cosines in turned.items():
                    counted = cosines[real] if real is not None and real.shape == cosines.shape else cosines
                    self._sums[name] += float(counted.sum(dtype=torch.float64))
                    angles = torch.arccos(counted.double().clamp(-1.0, 1.0)) / math.pi
                    self._angles[name] += float(angles.sum())
                self._count += counted.numel() if turned else 0
        finally:
            for hook in hooks:
                hook.remove()


def _cosines(before: Tensor, after: Tensor) -> Tensor:
    """One cosine per token, or per image."""
    if before.ndim == 4:
        before, after = before.flatten(1), after.flatten(1)
    return functional.cosine_similarity(before.float(), after.float(), dim=-1)
