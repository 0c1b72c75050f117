"""Cases with a known learning coefficient: plain functions, and networks at a given point.

The cases themselves are in ``battery`` (for tuning the extrapolation) and ``held_out`` (for checking it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from strati.core.rng import derive
from strati.landscape.llc.config import LLCConfig
from strati.landscape.llc.llc import LearningCoefficient, learning_coefficient, llc
from strati.landscape.objective import Potential


@dataclass(frozen=True)
class KnownCase:
    """A loss with a known learning coefficient.

    Attributes:
        name: What it is.
        kind: Its family.
        value: The learning coefficient.
        half: ``development``, ``final`` or ``held-out``.
        run: Estimates the coefficient with given settings.
    """

    name: str
    kind: str
    value: Fraction
    half: str
    run: Callable[[LLCConfig], LearningCoefficient]


Entry = tuple[str, Any, Callable[[LLCConfig], LearningCoefficient]]


def cases_of(
    kinds: Mapping[str, Callable[[], Iterator[Entry]]], halves: Sequence[str]
) -> tuple[KnownCase, ...]:
    """All entries in order, given to the halves in turn."""
    return tuple(
        KnownCase(name, kind, Fraction(value), halves[place % len(halves)], run)
        for kind, entries in kinds.items()
        for place, (name, value, run) in enumerate(entries())
    )


def function(name: str, value: Any, size: int, potential: Potential) -> Entry:
    """A plain function at the origin."""
    point = torch.zeros(size, dtype=torch.float64)
    return name, value, lambda config: learning_coefficient(potential, point, config=config)


class Bumps(nn.Module):
    """``sum_h a_h tanh(b_h x)``, without biases."""

    def __init__(self, outer: Sequence[float], inner: Sequence[float]) -> None:
        super().__init__()
        self.outer = nn.Parameter(torch.tensor(outer, dtype=torch.float64))
        self.inner = nn.Parameter(torch.tensor(inner, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """One output per row."""
        return (torch.tanh(x * self.inner) * self.outer).sum(-1, keepdim=True)


def network(name: str, value: Any, model: nn.Module, x: Tensor, loss: str = "behavioural-mse") -> Entry:
    """A network as it is, by a behavioural loss."""
    return name, value, lambda config: llc(model, loss, x, config=config)


def linear(widths: Sequence[int], rank: int, seed: int) -> nn.Module:
    """A deep linear network, every layer of this rank."""
    layers = []
    for i, (before, after) in enumerate(pairwise(widths)):
        layer = nn.Linear(before, after, bias=False).double()
        left, right = normal(derive(seed, i, "left"), after, rank), normal(derive(seed, i), rank, before)
        layer.weight.data = left @ right / max(1.0, (rank * before) ** 0.5)
        layers.append(layer)
    return nn.Sequential(*layers)


def on_training(
    model: nn.Module, x: Tensor, y: Tensor, loss: str = "mse"
) -> Callable[[LLCConfig], LearningCoefficient]:
    """The training loss at its minimum, reached from the given model."""
    return lambda config: llc(minimised(model, x, y, loss), loss, (x, y), config=config)


def minimised(model: nn.Module, x: Tensor, y: Tensor, loss: str = "mse") -> nn.Module:
    """The given model at a minimum of its training loss."""
    optimiser = torch.optim.LBFGS(
        model.parameters(),
        max_iter=3000,
        tolerance_grad=1e-13,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        out = model(x)
        value: Tensor = ((out - y) ** 2).mean() if loss == "mse" else nn.functional.cross_entropy(out, y)
        value.backward()
        return value

    optimiser.step(closure)
    return model


def perceptron(widths: Sequence[int], activation: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    """A fully connected network with random weights, and 150 random inputs."""
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(pairwise(widths)):
        layer = nn.Linear(before, after).double()
        seed = derive(0, "perceptron", activation.__name__, *widths, i)
        layer.weight.data = normal(seed, after, before) / before**0.5
        layer.bias.data = 0.3 * normal(derive(seed, "bias"), after)
        layers += [layer, activation()]
    return nn.Sequential(*layers[:-1]), normal(derive(0, "inputs", *widths), 150, widths[0])


def normal(seed: int, *shape: int) -> Tensor:
    """Normal random numbers in double precision."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
