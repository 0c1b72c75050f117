"""Functions and networks whose learning coefficient is known, to hold the estimates against.

The list was fixed before the extrapolation was tuned, and cut in two by its order: every second case of each kind was
kept for a final check. That check led to changes of the rules, so the cases that now decide are those of ``held_out``.
``tools/calibrate_llc_limit.py`` runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import torch
from torch import nn

from strati.core.rng import derive
from strati.landscape.objective import Potential
from strati_reproductions.llc_cases.known import deep_linear
from strati_reproductions.llc_cases.known_cases import (
    Bumps,
    Entry,
    KnownCase,
    cases_of,
    function,
    linear,
    network,
    normal,
    on_training,
    perceptron,
)


def battery() -> tuple[KnownCase, ...]:
    """All cases, in a fixed order.

    Examples:
        >>> len(battery()) >= 40, sorted({c.half for c in battery()})
        (True, ['development', 'final'])
    """
    return cases_of(_KINDS, ("development", "final"))


def _powers() -> Iterator[Entry]:
    yield function("w^4", "1/4", 1, lambda w: (w**4).sum())
    yield function("w1^2 + w2^4", "3/4", 2, lambda w: w[0] ** 2 + w[1] ** 4)
    yield function("w1^4 + w2^4 + w3^6", "2/3", 3, lambda w: w[0] ** 4 + w[1] ** 4 + w[2] ** 6)
    yield function("(w1^2 + w2^2)^2", "1/2", 2, lambda w: (w**2).sum() ** 2)
    yield function("w^6", "1/6", 1, lambda w: (w**6).sum())
    yield function("w1^4 + w2^6", "5/12", 2, lambda w: w[0] ** 4 + w[1] ** 6)
    yield function("w1^6 + w2^10", "4/15", 2, lambda w: w[0] ** 6 + w[1] ** 10)
    yield function("(w1^2 + w2^2 + w3^2)^2", "3/4", 3, lambda w: (w**2).sum() ** 2)


def _monomials() -> Iterator[Entry]:
    def of(*powers: int) -> Potential:
        return lambda w: torch.stack([w[i] ** p for i, p in enumerate(powers)]).prod(0)

    for powers in ((2, 2), (2, 4), (2, 2, 2), (4, 4), (2, 4, 6), (2, 6), (4, 6), (2, 2, 4), (6, 6), (2, 8)):
        name = " ".join(f"w{i + 1}^{p}" for i, p in enumerate(powers))
        yield function(name, Fraction(1, max(powers)), len(powers), of(*powers))


def _curves() -> Iterator[Entry]:
    yield function("(w1^2 - w2^3)^2", "5/12", 2, lambda w: (w[0] ** 2 - w[1] ** 3) ** 2)
    yield function("(w1^3 - w2^4)^2", "7/24", 2, lambda w: (w[0] ** 3 - w[1] ** 4) ** 2)
    yield function("(w1^2 - w2^5)^2", "7/20", 2, lambda w: (w[0] ** 2 - w[1] ** 5) ** 2)
    yield function("(w1 w2 (w1 - w2))^2", "1/3", 2, lambda w: (w[0] * w[1] * (w[0] - w[1])) ** 2)
    yield function("(w1 w2 + w3^2)^2", "1/2", 3, lambda w: (w[0] * w[1] + w[2] ** 2) ** 2)
    yield function("(w1 w2 + w3 w4)^2", "1/2", 4, lambda w: (w[0] * w[1] + w[2] * w[3]) ** 2)
    yield function("(w1^3 + w2^3)^2", "1/3", 2, lambda w: (w[0] ** 3 + w[1] ** 3) ** 2)
    yield function("(w1^2 w2 - w1 w2^3)^2", "3/10", 2, lambda w: (w[0] ** 2 * w[1] - w[0] * w[1] ** 3) ** 2)


def _ideals() -> Iterator[Entry]:
    yield function(
        "(w1 - w2^2)^2 + (w1 w2)^2", "2/3", 2, lambda w: (w[0] - w[1] ** 2) ** 2 + (w[0] * w[1]) ** 2
    )
    yield function(
        "(w1 - w2^3)^2 + (w1 w2)^2", "5/8", 2, lambda w: (w[0] - w[1] ** 3) ** 2 + (w[0] * w[1]) ** 2
    )
    yield function("w1^2 w2^2 + w3^4", "3/4", 3, lambda w: (w[0] * w[1]) ** 2 + w[2] ** 4)
    yield function("w1^2 w2^2 + w3^2", 1, 3, lambda w: (w[0] * w[1]) ** 2 + w[2] ** 2)
    yield function("w1^2 w2^4 + w3^2", "3/4", 3, lambda w: w[0] ** 2 * w[1] ** 4 + w[2] ** 2)
    yield function("w1^4 w2^2 + w1^2 w2^4", "1/3", 2, lambda w: w[0] ** 4 * w[1] ** 2 + w[0] ** 2 * w[1] ** 4)
    yield function("w1^4 + w1^2 w2^2 + w2^6", "1/2", 2, lambda w: w[0] ** 4 + (w[0] * w[1]) ** 2 + w[1] ** 6)
    yield function(
        "pairs of w1 w2 w3, squared",
        "3/4",
        3,
        lambda w: (w[0] * w[1]) ** 2 + (w[1] * w[2]) ** 2 + (w[0] * w[2]) ** 2,
    )
    yield function("w1^2 (w2^2 + w3^2)", "1/2", 3, lambda w: w[0] ** 2 * (w[1] ** 2 + w[2] ** 2))
    yield function("(w1 w2 - w3)^2 + w3^4", "3/4", 3, lambda w: (w[0] * w[1] - w[2]) ** 2 + w[2] ** 4)


def _tanh() -> Iterator[Entry]:
    x = torch.linspace(-2, 2, 21, dtype=torch.float64)[:, None]
    for hidden, value in ((1, "1/2"), (2, "2/3"), (3, "5/6"), (4, "1")):
        zero = [0.0] * hidden
        yield network(f"1-{hidden}-1 tanh, true function 0", value, Bumps(zero, zero), x)
    yield network("1-2-1 tanh, one unit at 0", "3/2", Bumps([0.8, 0.0], [1.1, 0.0]), x)
    yield network("1-2-1 tanh, two equal units", "5/4", Bumps([0.7, 0.5], [0.9, 0.9]), x)


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
        x = normal(derive(0, "data", name), 60, widths[0])
        yield network(name, deep_linear(widths, rank).value, linear(widths, rank, derive(0, name)), x)


def _regular() -> Iterator[Entry]:
    for widths in ((2, 3, 1), (3, 4, 1), (2, 5, 2), (6, 8, 1)):
        model, x = perceptron(widths, nn.Tanh)
        size = sum(p.numel() for p in model.parameters())
        yield network(f"{'-'.join(map(str, widths))} tanh", Fraction(size, 2), model, x)


def _symmetric() -> Iterator[Entry]:
    """Each hidden ReLU may be scaled up and its output down; logits may be shifted together."""
    for widths in ((2, 3, 1), (3, 4, 2), (4, 6, 3), (2, 4, 1)):
        model, x = perceptron(widths, nn.ReLU)
        size = sum(p.numel() for p in model.parameters())
        yield network(f"{'-'.join(map(str, widths))} ReLU", Fraction(size - widths[1], 2), model, x)
    for inputs, classes in ((3, 3), (4, 5)):
        model, x = perceptron((inputs, classes), nn.ReLU)
        rank = (inputs + 1) * (classes - 1)
        name = f"softmax regression, {inputs} inputs, {classes} classes"
        yield network(name, Fraction(rank, 2), model, x, "behavioural-kl")


def _trained() -> Iterator[Entry]:
    """At a minimum of the training loss of noisy data: regular."""
    for inputs, hidden in ((1, 2), (2, 3)):
        name = f"trained {inputs}-{hidden}-1 tanh, training loss"
        model, x = perceptron((inputs, hidden, 1), nn.Tanh)
        with torch.no_grad():
            y = model(x) + 0.1 * normal(derive(0, name), len(x), 1)
        size = sum(p.numel() for p in model.parameters())
        yield name, Fraction(size, 2), on_training(model, x, y)


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
