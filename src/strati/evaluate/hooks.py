"""Forward hooks: read the tensors at named sites of a network, and optionally replace them.

A *site* is the input or the output of a module. A *visitor* is called with the site and the tensor in every forward
pass, and the network continues with what it returns. Counts read linear layers this way, bases read and replace
activations. Plain MLPs need no hooks (``landscape/mlp``).
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
    """The input (``side="input"``) or the output of a module; ``module=""`` is the network itself."""

    module: str
    side: Side = "output"

    @property
    def name(self) -> str:
        """The name shown: the module, with ``:input`` for its input."""
        if self.module == "":
            return self.side
        return self.module if self.side == "output" else f"{self.module}:input"


Visit = Callable[[Site, Tensor], Tensor]
"""Called with a site and the tensor there; the network continues with what it returns."""


@contextmanager
def capture(model: nn.Module, sites: Iterable[Site], visit: Visit) -> Iterator[None]:
    """Register forward hooks at ``sites``; they are removed on exit.

    Args:
        model: The network.
        sites: Where to read; of a module that returns several objects the first tensor is meant.
        visit: Called at every use of a site, in the order of use.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> shapes = []
        >>> def look(site, tensor):
        ...     shapes.append((site.name, tuple(tensor.shape)))
        ...     return tensor
        >>> with capture(net, [Site("0", "input"), Site("1")], look):
        ...     _ = net(torch.zeros(5, 2))
        >>> shapes
        [('0:input', (5, 2)), ('1', (5, 3))]
    """
    with ExitStack() as stack:
        for site in sites:
            module = model.get_submodule(site.module) if site.module else model
            stack.callback(_hook(module, site, visit).remove)
        yield


@contextmanager
def on_output(
    model: nn.Module, modules: Iterable[str], callback: Callable[[str, Any], None]
) -> Iterator[None]:
    """Call ``callback`` with everything that some modules return (outputs, attention patterns); removed on exit."""
    with ExitStack() as stack:
        for name in modules:
            handle = model.get_submodule(name).register_forward_hook(
                lambda _, __, output, name=name: callback(name, output)
            )
            stack.callback(handle.remove)
        yield


class Precision(TorchDispatchMode):
    """The coarsest floating-point type of a forward pass; some networks round inside, whatever their weights' type.

    Examples:
        >>> with Precision() as precision:
        ...     _ = torch.ones(2, dtype=torch.float64).float() + 1
        >>> precision.coarsest
        torch.float32
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.coarsest = torch.float64

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and keep the coarsest type of its outputs."""
        output = func(*args, **(kwargs or {}))
        real = isinstance(output, Tensor) and output.is_floating_point()
        if real and torch.finfo(output.dtype).eps > torch.finfo(self.coarsest).eps:
            self.coarsest = output.dtype
        return output


def _hook(module: nn.Module, site: Site, visit: Visit) -> torch.utils.hooks.RemovableHandle:
    if site.side == "output":

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            changed = visit(site, output_tensor(output))
            return changed if isinstance(output, Tensor) else type(output)((changed, *output[1:]))

        return module.register_forward_hook(after)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (visit(site, args[0]), *args[1:]), kwargs
        key = next(k for k, v in kwargs.items() if isinstance(v, Tensor) and v.is_floating_point())
        return args, kwargs | {key: visit(site, kwargs[key])}

    return module.register_forward_pre_hook(before, with_kwargs=True)
