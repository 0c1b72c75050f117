"""A feed-forward network taken apart: linear maps and elementwise nonlinearities, one after the other.

:func:`as_chain` reads the computation itself (by ``torch.fx``), so it makes no difference whether the
network is an ``nn.Sequential`` or a class with a ``forward`` of its own. Anything that is not a single
line of linear maps and elementwise functions is refused here; ``counts.module_counts`` and
``basis.probe_moments`` handle those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from strati.core.errors import BadInputError, UnsupportedError

Elementwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Nonlinearity:
    """An elementwise function.

    Attributes:
        name: ``relu``, ``leaky_relu``, ``identity``, ``gelu``, ...
        function: What it computes.
        slopes: For piecewise-linear ones the slope below and above zero, else ``None``.
        slope: The derivative in a form that does not cancel far from zero (``1 - tanh^2`` does); autograd's otherwise.
    """

    name: str
    function: Elementwise
    slopes: tuple[float, float] | None = None
    slope: Elementwise | None = None

    def __call__(self, p: Tensor) -> Tensor:
        """The activations of preactivations ``p``."""
        return self.function(p)

    def derivative(self, p: Tensor) -> Tensor:
        """The slope at ``p``: the firing pattern of a ReLU; at a kink the lower one, as torch has it.

        Examples:
            >>> RELU.derivative(torch.tensor([-1.0, 0.0, 2.0])).tolist()
            [0.0, 0.0, 1.0]
        """
        if self.slopes is not None:
            below, above = self.slopes
            if below == above:
                return torch.full_like(p, above)
            return torch.where(p > 0, above, below).to(p.dtype)
        if self.slope is not None:
            return self.slope(p)
        with torch.enable_grad():
            variable = p.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.function(variable).sum(), variable)
        return slope

    @property
    def vanishes(self) -> bool:
        """Whether the slope is zero on whole stretches, as a ReLU's is: then a slope of zero is no underflow."""
        return self.slopes is not None or self.name in ("hardtanh", "relu6", "hardswish")


def _same(p: Tensor) -> Tensor:
    return p


IDENTITY = Nonlinearity("identity", _same, (1.0, 1.0))
RELU = Nonlinearity("relu", functional.relu, (0.0, 1.0))


@dataclass(frozen=True)
class ChainStage:
    """One linear map and the nonlinearity after it: ``f' = act(W f + b)``.

    Attributes:
        name: The linear layer's name in the module.
        weight: ``(outputs, inputs)``; the module's own tensor, detached.
        bias: ``(outputs,)`` or ``None``.
        activation: What follows; the identity where nothing does.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    activation: Nonlinearity = IDENTITY

    @property
    def inputs(self) -> int:
        """Width of what comes in, without the constant that carries the bias."""
        return int(self.weight.shape[1])

    @property
    def outputs(self) -> int:
        """Width of what goes out."""
        return int(self.weight.shape[0])

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        return self.outputs * (self.inputs + (self.bias is not None))

    def preactivations(self, f: Tensor) -> Tensor:
        """``p = W f + b`` for rows ``f``."""
        return functional.linear(f, self.weight, self.bias)


@dataclass(frozen=True)
class Chain:
    """A feed-forward network as a line of stages.

    Examples:
        >>> chain = as_chain(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
        >>> chain.widths, [s.activation.name for s in chain.stages], chain.parameters
        ((3, 4, 2), ['relu', 'identity'], 26)
    """

    stages: tuple[ChainStage, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """Inputs of the first stage, then the outputs of each."""
        return (self.stages[0].inputs, *(s.outputs for s in self.stages))

    @property
    def parameters(self) -> int:
        """Number of weights and biases in all stages."""
        return sum(s.parameters for s in self.stages)

    def to(self, dtype: torch.dtype, device: str | torch.device | None = None) -> Chain:
        """The same chain with weights of another type, or on another device."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype)

        return Chain(
            tuple(
                replace(s, weight=moved(s.weight), bias=None if s.bias is None else moved(s.bias))
                for s in self.stages
            )
        )

    def rows(self, x: Tensor) -> Tensor:
        """Data as rows of the first stage's width and type (images are flattened).

        Raises:
            BadInputError: The width is another.
        """
        flat = x.reshape(x.shape[0], -1) if x.ndim != 1 else x[:, None]
        if flat.shape[1] != self.widths[0]:
            raise BadInputError(
                "data",
                f"have {flat.shape[1]} inputs a row; the first layer ({self.stages[0].name}) takes {self.widths[0]}",
            )
        return flat.to(self.stages[0].weight.dtype)

    def slopes(self, preactivations: list[Tensor]) -> list[Tensor]:
        """Derivative of each stage's nonlinearity at its preactivations."""
        return [s.activation.derivative(p) for s, p in zip(self.stages, preactivations, strict=True)]

    def forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """All activations ``[f_0, ..., f_L]`` (inputs first) and preactivations ``[p_1, ..., p_L]``."""
        activations, preactivations = [self.rows(x)], []
        for stage in self.stages:
            preactivations.append(stage.preactivations(activations[-1]))
            activations.append(stage.activation(preactivations[-1]))
        return activations, preactivations


def as_chain(model: nn.Module) -> Chain:
    """Read a module as a line of linear maps and elementwise functions.

    Flattening, dropout and identities on the way are passed over (the network is taken in evaluation mode).

    Args:
        model: Any module; it is traced, not run.

    Raises:
        UnsupportedError: It branches, or holds a layer of another kind; the message names it.
        BadInputError: It has no linear layer.

    Examples:
        >>> as_chain(nn.Sequential(nn.Linear(2, 2), nn.Tanh())).stages[0].activation.name
        'tanh'
    """
    graph, modules = _trace(model)
    stages: list[ChainStage] = []
    previous: fx.Node | None = None
    visited: set[int] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            previous = _first(node, previous)
            continue
        if node.op == "output":
            if node.args[0] is not previous:
                raise UnsupportedError(
                    "model", "returns more than its last layer's output; a plain chain is needed"
                )
            break
        if list(node.all_input_nodes) != [previous]:
            raise UnsupportedError(
                str(node.target), "the network branches or joins here; a plain chain is needed"
            )
        previous = node
        if node.op == "call_module" and isinstance(modules[str(node.target)], nn.Linear):
            linear = modules[str(node.target)]
            if id(linear.weight) in visited:
                raise UnsupportedError(
                    str(node.target), "its weights are used twice; a plain chain is needed"
                )
            visited.add(id(linear.weight))
            bias = None if linear.bias is None else linear.bias.detach()
            name = getattr(linear, "checkpoint_name", str(node.target))
            stages.append(ChainStage(name, linear.weight.detach(), bias))
        else:
            activation = _activation(node, modules)
            if activation is not None:
                stages = _follow(stages, activation, str(node.target))
    if not stages:
        raise BadInputError("model", "has no linear layer; there is nothing to count")
    return Chain(tuple(stages))


def _trace(model: nn.Module) -> tuple[fx.Graph, dict[str, Any]]:
    if hasattr(model, "save_pretrained"):  # tracing would run all of its code on stand-ins, in vain
        raise UnsupportedError(type(model).__name__, "is a transformers model, not a plain chain")
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:  # tracing runs the module's own code, which may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(type(model).__name__, f"cannot be read as a plain chain ({reason})") from error
    modules = dict(model.named_modules())
    modules[""] = model
    if isinstance(model, nn.Linear):  # a lone layer is traced into, having no child to call
        graph = fx.Tracer().trace(nn.Sequential(model))
        modules["0"] = model
    return graph, modules


def _first(node: fx.Node, previous: fx.Node | None) -> fx.Node:
    if previous is None:
        return node
    if node.users:
        raise UnsupportedError(str(node.target), "a second input is used; a plain chain has one")
    return previous


def _follow(stages: list[ChainStage], activation: Nonlinearity, where: str) -> list[ChainStage]:
    """Put a nonlinearity behind the last stage, unless one is there already."""
    if activation.name == "identity":
        return stages
    if not stages:
        raise UnsupportedError(
            where, "a nonlinearity comes before the first linear layer; apply it to the data"
        )
    last = stages[-1]
    if last.activation is not IDENTITY:
        raise UnsupportedError(where, "two nonlinearities in a row; a plain chain has a linear layer between")
    return [*stages[:-1], ChainStage(last.name, last.weight, last.bias, activation)]


def _activation(node: fx.Node, modules: dict[str, Any]) -> Nonlinearity | None:
    """The elementwise function of a node; ``None`` for nodes that only reshape."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        if isinstance(module, nn.Flatten | nn.Dropout | nn.AlphaDropout | nn.Identity):
            return None
        if type(module) in _MODULES:
            return _MODULES[type(module)](module)
        raise UnsupportedError(
            str(node.target), f"a layer of type {type(module).__name__} is not supported in a chain"
        )
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
    if name in ("flatten", "view", "reshape", "float", "double", "contiguous", "dropout", "squeeze"):
        return None
    if name in _FUNCTIONS:
        options = {k: v for k, v in node.kwargs.items() if k != "inplace"}
        return _FUNCTIONS[name](*node.args[1:], **options)
    raise UnsupportedError(
        name, "this operation is not supported in a chain of linear layers and activations"
    )


def leaky(slope: float = 0.01) -> Nonlinearity:
    """A leaky ReLU of the given slope below zero."""
    return Nonlinearity("leaky_relu", lambda p: functional.leaky_relu(p, slope), (slope, 1.0))


def _relu(*_: Any, **__: Any) -> Nonlinearity:
    return RELU


def _smooth(name: str, function: Callable[..., Tensor]) -> Callable[..., Nonlinearity]:
    return lambda *args, **options: Nonlinearity(
        name, lambda p: function(p, *args, **options), slope=None if args or options else _SLOPES.get(name)
    )


def _leaky_function(slope: float = 0.01, *_: Any, negative_slope: float | None = None) -> Nonlinearity:
    return leaky(slope if negative_slope is None else negative_slope)


def _module(name: str) -> Callable[[nn.Module], Nonlinearity]:
    return lambda module: Nonlinearity(name, module, slope=_SLOPES.get(name) if _plain(module) else None)


def _plain(module: nn.Module) -> bool:
    """Whether an activation has its usual options, so that its derivative is the one written down here."""
    usual = {"approximate": "none", "alpha": 1.0, "beta": 1.0, "threshold": 20.0}
    return all(getattr(module, name, value) == value for name, value in usual.items())


def _silu_slope(p: Tensor) -> Tensor:
    return torch.sigmoid(p) * (1 + p * torch.sigmoid(-p))


def _gelu_slope(p: Tensor) -> Tensor:
    slope: Tensor = torch.special.ndtr(p) + p * torch.exp(-p * p / 2) / math.sqrt(2 * math.pi)
    return slope


_SLOPES: dict[str, Elementwise] = {
    "tanh": lambda p: torch.cosh(p).pow(-2),
    "sigmoid": lambda p: torch.sigmoid(p) * torch.sigmoid(-p),
    "silu": _silu_slope,
    "gelu": _gelu_slope,
    "elu": lambda p: torch.exp(p.clamp(max=0)),
    "softplus": lambda p: torch.where(p > 20, torch.ones_like(p), torch.sigmoid(p)),
}
"""Derivatives with a small relative error far from zero, too."""


_MODULES: dict[type[nn.Module], Callable[[Any], Nonlinearity]] = {
    nn.ReLU: lambda _: RELU,
    nn.LeakyReLU: lambda m: leaky(m.negative_slope),
    **{
        kind: _module(kind.__name__.lower())
        for kind in (nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.Mish)
    },
    **{kind: _module(kind.__name__.lower()) for kind in (nn.Hardtanh, nn.ReLU6, nn.Hardswish, nn.Softsign)},
}

_FUNCTIONS: dict[str, Callable[..., Nonlinearity]] = {
    "relu": _relu,
    "relu_": _relu,
    "leaky_relu": _leaky_function,
    "tanh": _smooth("tanh", torch.tanh),
    "sigmoid": _smooth("sigmoid", torch.sigmoid),
    "gelu": _smooth("gelu", functional.gelu),
    "silu": _smooth("silu", functional.silu),
    "elu": _smooth("elu", functional.elu),
    "softplus": _smooth("softplus", functional.softplus),
}
