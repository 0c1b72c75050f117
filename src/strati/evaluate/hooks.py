"""Forward hooks on named places of a network: what passes there is shown, and may be replaced.

One contract for all that watches a network from outside: a *place* is the input or the output of a module, and a
*visitor* is called with the place and the tensor each time the network comes by; what it returns goes on. Counts watch
linear layers this way, bases read and replace activations. Plain chains of linear layers need no hooks (``chain``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from strati.evaluate.models import output_tensor

Side = Literal["input", "output"]


@dataclass(frozen=True)
class Site:
    """What goes into (``"input"``) or comes out of a module (``"output"``); ``module=""`` is the network itself."""

    module: str
    side: Side = "output"

    @property
    def name(self) -> str:
        """The name shown: the module, with ``:input`` where what goes in is meant."""
        if self.module == "":
            return self.side
        return self.module if self.side == "output" else f"{self.module}:input"


Visit = Callable[[Site, Tensor], Tensor]
"""Called with a place and the tensor there; what it returns is passed on."""


@contextmanager
def recording(model: nn.Module, places: Iterable[Site], visit: Visit) -> Iterator[None]:
    """Show the tensors at some places while the network runs; all hooks are gone afterwards, whatever happens.

    Args:
        model: The network.
        places: Where to look; of a module that returns several things the first tensor is meant.
        visit: Called at every use, in the order of use.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> seen = []
        >>> def look(place, tensor):
        ...     seen.append((place.name, tuple(tensor.shape)))
        ...     return tensor
        >>> with recording(net, [Site("0", "input"), Site("1")], look):
        ...     _ = net(torch.zeros(5, 2))
        >>> seen
        [('0:input', (5, 2)), ('1', (5, 3))]
    """
    with ExitStack() as stack:
        for place in places:
            module = model.get_submodule(place.module) if place.module else model
            stack.callback(_hook(module, place, visit).remove)
        yield


@contextmanager
def listening(model: nn.Module, modules: Iterable[str], hear: Callable[[str, Any], None]) -> Iterator[None]:
    """Show everything some modules return (attention patterns beside outputs), without changing it."""
    with ExitStack() as stack:
        for name in modules:
            handle = model.get_submodule(name).register_forward_hook(
                lambda _, __, output, name=name: hear(name, output)
            )
            stack.callback(handle.remove)
        yield


class Precision(TorchDispatchMode):
    """The coarsest floating type met while a network runs: some round inside, whatever the type of their weights.

    Examples:
        >>> with Precision() as met:
        ...     _ = torch.ones(2, dtype=torch.float64).float() + 1
        >>> met.coarsest
        torch.float32
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.coarsest = torch.float64

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and look at the type of what it gives."""
        result = func(*args, **(kwargs or {}))
        real = isinstance(result, Tensor) and result.is_floating_point()
        if real and torch.finfo(result.dtype).eps > torch.finfo(self.coarsest).eps:
            self.coarsest = result.dtype
        return result


def _hook(module: nn.Module, place: Site, visit: Visit) -> torch.utils.hooks.RemovableHandle:
    if place.side == "output":

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            changed = visit(place, output_tensor(output))
            return changed if isinstance(output, Tensor) else type(output)((changed, *output[1:]))

        return module.register_forward_hook(after)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (visit(place, args[0]), *args[1:]), kwargs
        key = next(k for k, v in kwargs.items() if isinstance(v, Tensor) and v.is_floating_point())
        return args, kwargs | {key: visit(place, kwargs[key])}

    return module.register_forward_pre_hook(before, with_kwargs=True)
