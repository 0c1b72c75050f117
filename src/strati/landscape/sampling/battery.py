"""Functions and networks whose learning coefficient is known, to hold the estimates against.

The list was fixed before the extrapolation was tuned, and cut in two by its order: every second case of each
kind is kept for the final check (``held_out``). ``tools/calibrate_llc_limit.py`` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from strati.landscape.behaviour import Potential
from strati.landscape.sampling.config import LLCConfig
from strati.landscape.sampling.known import deep_linear
from strati.landscape.sampling.llc import LearningCoefficient, learning_coefficient, llc
from strati.rng import derive


@dataclass(frozen=True)
class KnownCase:
    """A loss with a known learning coefficient.

    Attributes:
        name: What it is.
        kind: Its family.
        value: The learning coefficient.
        held_out: Whether it is kept for the final check.
        run: Estimates the coefficient with given settings.
    """

    name: str
    kind: str
    value: Fraction
    held_out: bool
    run: Callable[[LLCConfig], LearningCoefficient]


def battery() -> tuple[KnownCase, ...]:
    """All cases, in a fixed order.

    Examples:
        >>> len(battery()) >= 40, {c.held_out for c in battery()} == {True, False}
        (True, True)
    """
    cases: list[KnownCase] = []
    for kind, entries in _KINDS.items():
        for place, (name, value, run) in enumerate(entries()):
            cases.append(KnownCase(name, kind, Fraction(value), place % 2 == 1, run))
    return tuple(cases)


Entry = tuple[str, Any, Callable[[LLCConfig], LearningCoefficient]]


def _function(name: str, value: Any, size: int, potential: Potential) -> Entry:
    point = torch.zeros(size, dtype=torch.float64)
    return name, value, lambda config: learning_coefficient(potential, point, config=config)


def _powers() -> Iterator[Entry]:
    yield _function("w^4", "1/4", 1, lambda w: (w**4).sum())
    yield _function("w1^2 + w2^4", "3/4", 2, lambda w: w[0] ** 2 + w[1] ** 4)
    yield _function("w1^4 + w2^4 + w3^6", "2/3", 3, lambda w: w[0] ** 4 + w[1] ** 4 + w[2] ** 6)
    yield _function("(w1^2 + w2^2)^2", "1/2", 2, lambda w: (w**2).sum() ** 2)
    yield _function("w^6", "1/6", 1, lambda w: (w**6).sum())
    yield _function("w1^4 + w2^6", "5/12", 2, lambda w: w[0] ** 4 + w[1] ** 6)
    yield _function("w1^6 + w2^10", "4/15", 2, lambda w: w[0] ** 6 + w[1] ** 10)
    yield _function("(w1^2 + w2^2 + w3^2)^2", "3/4", 3, lambda w: (w**2).sum() ** 2)


def _monomials() -> Iterator[Entry]:
    def of(*powers: int) -> Potential:
        return lambda w: torch.stack([w[i] ** p for i, p in enumerate(powers)]).prod(0)

    for powers in ((2, 2), (2, 4), (2, 2, 2), (4, 4), (2, 4, 6), (2, 6), (4, 6), (2, 2, 4), (6, 6), (2, 8)):
        name = " ".join(f"w{i + 1}^{p}" for i, p in enumerate(powers))
        yield _function(name, Fraction(1, max(powers)), len(powers), of(*powers))


def _curves() -> Iterator[Entry]:
    yield _function("(w1^2 - w2^3)^2", "5/12", 2, lambda w: (w[0] ** 2 - w[1] ** 3) ** 2)
    yield _function("(w1^3 - w2^4)^2", "7/24", 2, lambda w: (w[0] ** 3 - w[1] ** 4) ** 2)
    yield _function("(w1^2 - w2^5)^2", "7/20", 2, lambda w: (w[0] ** 2 - w[1] ** 5) ** 2)
    yield _function("(w1 w2 (w1 - w2))^2", "1/3", 2, lambda w: (w[0] * w[1] * (w[0] - w[1])) ** 2)
    yield _function("(w1 w2 + w3^2)^2", "1/2", 3, lambda w: (w[0] * w[1] + w[2] ** 2) ** 2)
    yield _function("(w1 w2 + w3 w4)^2", "1/2", 4, lambda w: (w[0] * w[1] + w[2] * w[3]) ** 2)
    yield _function("(w1^3 + w2^3)^2", "1/3", 2, lambda w: (w[0] ** 3 + w[1] ** 3) ** 2)
    yield _function("(w1^2 w2 - w1 w2^3)^2", "3/10", 2, lambda w: (w[0] ** 2 * w[1] - w[0] * w[1] ** 3) ** 2)


def _ideals() -> Iterator[Entry]:
    yield _function(
        "(w1 - w2^2)^2 + (w1 w2)^2", "2/3", 2, lambda w: (w[0] - w[1] ** 2) ** 2 + (w[0] * w[1]) ** 2
    )
    yield _function(
        "(w1 - w2^3)^2 + (w1 w2)^2", "5/8", 2, lambda w: (w[0] - w[1] ** 3) ** 2 + (w[0] * w[1]) ** 2
    )
    yield _function("w1^2 w2^2 + w3^4", "3/4", 3, lambda w: (w[0] * w[1]) ** 2 + w[2] ** 4)
    yield _function("w1^2 w2^2 + w3^2", 1, 3, lambda w: (w[0] * w[1]) ** 2 + w[2] ** 2)
    yield _function("w1^2 w2^4 + w3^2", "3/4", 3, lambda w: w[0] ** 2 * w[1] ** 4 + w[2] ** 2)
    yield _function(
        "w1^4 w2^2 + w1^2 w2^4", "1/3", 2, lambda w: w[0] ** 4 * w[1] ** 2 + w[0] ** 2 * w[1] ** 4
    )
    yield _function("w1^4 + w1^2 w2^2 + w2^6", "1/2", 2, lambda w: w[0] ** 4 + (w[0] * w[1]) ** 2 + w[1] ** 6)
    yield _function(
        "pairs of w1 w2 w3, squared",
        "3/4",
        3,
        lambda w: (w[0] * w[1]) ** 2 + (w[1] * w[2]) ** 2 + (w[0] * w[2]) ** 2,
    )
    yield _function("w1^2 (w2^2 + w3^2)", "1/2", 3, lambda w: w[0] ** 2 * (w[1] ** 2 + w[2] ** 2))
    yield _function("(w1 w2 - w3)^2 + w3^4", "3/4", 3, lambda w: (w[0] * w[1] - w[2]) ** 2 + w[2] ** 4)


class _Bumps(nn.Module):
    """``sum_h a_h tanh(b_h x)``."""

    def __init__(self, outer: Sequence[float], inner: Sequence[float]) -> None:
        super().__init__()
        self.outer = nn.Parameter(torch.tensor(outer, dtype=torch.float64))
        self.inner = nn.Parameter(torch.tensor(inner, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x * self.inner) * self.outer).sum(-1, keepdim=True)


def _network(name: str, value: Any, model: nn.Module, x: Tensor, loss: str = "behavioural-mse") -> Entry:
    return name, value, lambda config: llc(model, loss, x, config=config)


def _tanh() -> Iterator[Entry]:
    x = torch.linspace(-2, 2, 21, dtype=torch.float64)[:, None]
    for hidden, value in ((1, "1/2"), (2, "2/3"), (3, "5/6"), (4, "1")):
        zero = [0.0] * hidden
        yield _network(f"1-{hidden}-1 tanh, true function 0", value, _Bumps(zero, zero), x)
    yield _network("1-2-1 tanh, one unit at 0", "3/2", _Bumps([0.8, 0.0], [1.1, 0.0]), x)
    yield _network("1-2-1 tanh, two equal units", "5/4", _Bumps([0.7, 0.5], [0.9, 0.9]), x)


def _deep() -> Iterator[Entry]:
    for widths, rank in (
        ((2, 2, 2), 1),
        ((2, 2, 2), 0),
        ((5, 3, 5), 0),
        ((5, 3, 5), 1),
        ((3, 8, 4), 2),
        ((4, 4, 4, 4), 1),
        ((2, 3, 2, 3), 1),
        ((3, 2, 2, 3), 0),
    ):
        name = f"deep linear {'-'.join(map(str, widths))}, rank {rank}"
        x = _normal(derive(0, "data", name), 60, widths[0])
        yield _network(name, deep_linear(widths, rank).value, _linear(widths, rank, derive(0, name)), x)


def _linear(widths: Sequence[int], rank: int, seed: int) -> nn.Module:
    layers = []
    for i, (before, after) in enumerate(pairwise(widths)):
        layer = nn.Linear(before, after, bias=False).double()
        left, right = _normal(derive(seed, i, "left"), after, rank), _normal(derive(seed, i), rank, before)
        layer.weight.data = left @ right / max(1.0, (rank * before) ** 0.5)
        layers.append(layer)
    return nn.Sequential(*layers)


def _regular() -> Iterator[Entry]:
    for widths in ((2, 3, 1), (3, 4, 1), (2, 5, 2), (6, 8, 1)):
        model, x = _perceptron(widths, nn.Tanh)
        size = sum(p.numel() for p in model.parameters())
        yield _network(f"{'-'.join(map(str, widths))} tanh", Fraction(size, 2), model, x)


def _symmetric() -> Iterator[Entry]:
    """Each hidden ReLU may be scaled up and its output down; logits may be shifted together."""
    for widths in ((2, 3, 1), (3, 4, 2), (4, 6, 3), (2, 4, 1)):
        model, x = _perceptron(widths, nn.ReLU)
        size = sum(p.numel() for p in model.parameters())
        yield _network(f"{'-'.join(map(str, widths))} ReLU", Fraction(size - widths[1], 2), model, x)
    for inputs, classes in ((3, 3), (4, 5)):
        model, x = _perceptron((inputs, classes), nn.ReLU)
        rank = (inputs + 1) * (classes - 1)
        name = f"softmax regression, {inputs} inputs, {classes} classes"
        yield _network(name, Fraction(rank, 2), model, x, "behavioural-kl")


def _trained() -> Iterator[Entry]:
    """At a minimum of the training loss of noisy data: regular."""
    for inputs, hidden in ((1, 2), (2, 3)):
        name = f"trained {inputs}-{hidden}-1 tanh, training loss"
        model, x = _perceptron((inputs, hidden, 1), nn.Tanh)
        with torch.no_grad():
            y = model(x) + 0.1 * _normal(derive(0, name), len(x), 1)
        size = sum(p.numel() for p in model.parameters())
        yield name, Fraction(size, 2), _on_training(model, x, y)


def _on_training(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[LLCConfig], LearningCoefficient]:
    return lambda config: llc(_minimised(model, x, y), "mse", (x, y), config=config)


def _minimised(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    optimiser = torch.optim.LBFGS(
        model.parameters(),
        max_iter=3000,
        tolerance_grad=1e-13,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss: Tensor = ((model(x) - y) ** 2).mean()
        loss.backward()
        return loss

    optimiser.step(closure)
    return model


def _perceptron(widths: Sequence[int], activation: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(pairwise(widths)):
        layer = nn.Linear(before, after).double()
        seed = derive(0, "perceptron", activation.__name__, *widths, i)
        layer.weight.data = _normal(seed, after, before) / before**0.5
        layer.bias.data = 0.3 * _normal(derive(seed, "bias"), after)
        layers += [layer, activation()]
    return nn.Sequential(*layers[:-1]), _normal(derive(0, "inputs", *widths), 150, widths[0])


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


_KINDS: dict[str, Callable[[], Iterator[Entry]]] = {
    "sum of powers": _powers,
    "monomial": _monomials,
    "singular curve or surface": _curves,
    "ideal": _ideals,
    "tanh network with a known singularity": _tanh,
    "deep linear network": _deep,
    "regular network": _regular,
    "network with symmetries": _symmetric,
    "trained network": _trained,
}
