"""Cases that no rule of the extrapolation has seen: functions and networks of the same kinds as in ``battery``.

Drawn, with their values from theory, after the rules of the first final check were known and before the rules that are
now used were made. Where a function is a sum of squares of monomials, or becomes one by a change of coordinates, the
value is the least ``|w| / ord_w(f)`` over weights ``w >= 0`` (Newton polyhedron); a power of a curve has also the
``1/2`` of its smooth points; tanh units without biases and a true function of zero have ``(H + i^2 + i)/(4 i + 2)``
with ``i = floor(sqrt H)`` (Aoyagi and Watanabe); deep linear networks are in ``known``.
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


def held_out() -> tuple[KnownCase, ...]:
    """All cases, in a fixed order.

    Examples:
        >>> len(held_out()) >= 40, {c.half for c in held_out()}
        (True, {'held-out'})
    """
    return cases_of(_KINDS, ("held-out",))


def _powers() -> Iterator[Entry]:
    yield function("w^8", "1/8", 1, lambda w: (w**8).sum())
    yield function("w1^2 + w2^6", "2/3", 2, lambda w: w[0] ** 2 + w[1] ** 6)
    yield function("w1^4 + w2^8", "3/8", 2, lambda w: w[0] ** 4 + w[1] ** 8)
    yield function("w1^4 + w2^6 + w3^6", "7/12", 3, lambda w: w[0] ** 4 + w[1] ** 6 + w[2] ** 6)


def _monomials() -> Iterator[Entry]:
    def of(*powers: int) -> Potential:
        return lambda w: torch.stack([w[i] ** p for i, p in enumerate(powers)]).prod(0)

    for powers in ((2, 10), (4, 8), (2, 2, 6), (2, 4, 4), (6, 8), (4, 4, 4)):
        name = " ".join(f"w{i + 1}^{p}" for i, p in enumerate(powers))
        yield function(name, Fraction(1, max(powers)), len(powers), of(*powers))


def _curves() -> Iterator[Entry]:
    yield function("(w1^3 - w2^5)^2", "4/15", 2, lambda w: (w[0] ** 3 - w[1] ** 5) ** 2)
    yield function("(w1^2 - w2^7)^2", "9/28", 2, lambda w: (w[0] ** 2 - w[1] ** 7) ** 2)
    yield function("(w1^3 + w2^7)^2", "5/21", 2, lambda w: (w[0] ** 3 + w[1] ** 7) ** 2)
    yield function("(w1^4 - w2^5)^2", "9/40", 2, lambda w: (w[0] ** 4 - w[1] ** 5) ** 2)
    yield function(
        "(w1 w2 (w1^2 - w2^2))^2", "1/4", 2, lambda w: (w[0] * w[1] * (w[0] ** 2 - w[1] ** 2)) ** 2
    )
    yield function("(w1^2 + w2^2 - w3^3)^2", "1/2", 3, lambda w: (w[0] ** 2 + w[1] ** 2 - w[2] ** 3) ** 2)


def _ideals() -> Iterator[Entry]:
    yield function("w1^2 w2^4 + w3^4", "1/2", 3, lambda w: w[0] ** 2 * w[1] ** 4 + w[2] ** 4)
    yield function(
        "w1^4 + w1^2 w2^4 + w2^10", "3/8", 2, lambda w: w[0] ** 4 + w[0] ** 2 * w[1] ** 4 + w[1] ** 10
    )
    yield function("w1^6 + w1^2 w2^2 + w2^8", "1/2", 2, lambda w: w[0] ** 6 + (w[0] * w[1]) ** 2 + w[1] ** 8)
    yield function("(w1 - w2^2)^2 + w2^6", "2/3", 2, lambda w: (w[0] - w[1] ** 2) ** 2 + w[1] ** 6)
    yield function("(w1 - w2^2)^2 + w1^4", "5/8", 2, lambda w: (w[0] - w[1] ** 2) ** 2 + w[0] ** 4)
    yield function("w1^2 w2^2 + w3^2 w4^2", 1, 4, lambda w: (w[0] * w[1]) ** 2 + (w[2] * w[3]) ** 2)
    yield function(
        "w1^2 w2^2 + w1^2 w3^2 + w2^2 w3^4",
        "2/3",
        3,
        lambda w: (w[0] * w[1]) ** 2 + (w[0] * w[2]) ** 2 + (w[1] * w[2] ** 2) ** 2,
    )


def _tanh() -> Iterator[Entry]:
    grid = torch.linspace(-1.5, 1.5, 31, dtype=torch.float64)[:, None]
    drawn = normal(derive(0, "held-out inputs"), 40, 1)
    for hidden, value, x in ((2, "2/3", drawn), (3, "5/6", grid), (4, "1", drawn), (5, "11/10", grid)):
        zero = [0.0] * hidden
        where = "a grid" if x is grid else "normal data"
        yield network(f"1-{hidden}-1 tanh, true function 0, {where}", value, Bumps(zero, zero), x)


def _deep() -> Iterator[Entry]:
    shapes = ((3, 3, 3), 0), ((4, 2, 3), 1), ((2, 2, 2, 2), 1), ((4, 3, 4), 2), ((6, 2, 3), 0), ((2, 4, 2), 0)
    for widths, rank in shapes:
        name = f"deep linear {'-'.join(map(str, widths))}, rank {rank}"
        x = normal(derive(0, "data", name), 60, widths[0])
        yield network(name, deep_linear(widths, rank).value, linear(widths, rank, derive(0, name)), x)


def _regular() -> Iterator[Entry]:
    for widths in ((4, 3, 1), (2, 4, 2), (5, 6, 2), (3, 3, 3, 1)):
        model, x = perceptron(widths, nn.Tanh)
        size = sum(p.numel() for p in model.parameters())
        yield network(f"{'-'.join(map(str, widths))} tanh", Fraction(size, 2), model, x)


def _symmetric() -> Iterator[Entry]:
    """Each hidden ReLU may be scaled up and its output down."""
    for widths in ((4, 5, 1), (3, 6, 2), (5, 4, 3)):
        model, x = perceptron(widths, nn.ReLU)
        size = sum(p.numel() for p in model.parameters())
        yield network(f"{'-'.join(map(str, widths))} ReLU", Fraction(size - widths[1], 2), model, x)


def _trained() -> Iterator[Entry]:
    """At a minimum of the training loss of noisy data: regular but for the common shift of logits."""
    for widths in ((1, 3, 1), (3, 2, 1)):
        name = f"trained {'-'.join(map(str, widths))} tanh, training loss"
        model, x = perceptron(widths, nn.Tanh)
        with torch.no_grad():
            y = model(x) + 0.1 * normal(derive(0, name), len(x), 1)
        size = sum(p.numel() for p in model.parameters())
        yield name, Fraction(size, 2), on_training(model, x, y)
    name = "trained softmax regression, 4 inputs, 3 classes, training loss"
    model, x = perceptron((4, 3), nn.Tanh)
    with torch.no_grad():
        labels = (2 * model(x) + 1.5 * normal(derive(0, name), len(x), 3)).argmax(1)
    yield name, 5, on_training(model, x, labels, "cross_entropy")


_KINDS: dict[str, Callable[[], Iterator[Entry]]] = {
    "sum of powers": _powers,
    "product of powers": _monomials,
    "cusp or other singular curve": _curves,
    "sum of squares": _ideals,
    "tanh network, true function 0": _tanh,
    "deep linear network": _deep,
    "random tanh network": _regular,
    "ReLU network": _symmetric,
    "trained network": _trained,
}
