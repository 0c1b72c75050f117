r"""Which end of a chain of blocks comes first.

Signs of direction are numbers that change sign when the chain is turned round: how similarity with the
embedding (what is
written first) and with the head (what is read last) grows along the chain; by how much readers are more alike
to writers
before them than after them; how the sizes of matrices grow. What each is worth on networks whose order is
known, its mean and
spread, is measured like the other signals; the log-odds of the two directions are their sum, weighed by reliability.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.reassembly.transformer import stream
from strati.reassembly.transformer.timeline import coefficients

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Blueprint
    from strati.reassembly.transformer.evidence import Expected
    from strati.reassembly.transformer.timeline import Similarity

    Floats = NDArray[np.float32]

_NOISE = 0.15
_SHARE = 0.25
"""Added to the spread of every sign; signs are correlated, so each counts for a part of what it would alone."""


@dataclass(frozen=True)
class Direction:
    """Log-odds that the chain lies as it should (negative: turn it), and the signs that say so most.

    ``lead`` is by how many nats the embedding is not the head, where that is not told.
    """

    log_odds: float
    by: tuple[str, ...]
    lead: float = float("inf")


def signs(
    stacked: Mapping[str, Floats],
    given: Similarity,
    ends: Mapping[str, NDArray[np.float32]],
    blueprint: Blueprint,
) -> dict[str, float]:
    """Numbers that would change sign if the chain were turned round, each between -1 and 1.

    Args:
        stacked: Role to matrices in the order of the chain.
        given: Similarities in the same order.
        ends: ``embedding`` and ``head`` as rows by width, where there are any.
        blueprint: The architecture; signs of networks whose norms stand after the blocks are others.
    """
    found: dict[str, float] = {}
    count = given.count
    if count < 2:
        return found
    place = np.arange(count) - (count - 1) / 2
    places = {kind: np.arange(count) for kind in given.units}
    for (a, b), (_, later, earlier, _) in coefficients(given, places).items():
        if a != b and count > 2:
            found[f"{a} before {b}"] = (later - earlier) / (abs(later) + abs(earlier) + 0.02)
    flat = {role: stream.features(role, stack) for role, stack in stacked.items()}
    for end, table in ends.items():
        if blueprint.tied and end == "embedding":
            continue
        for role, values in stream.ends(flat, table).items():
            found[f"{'tied' if blueprint.tied else end} {role}"] = _trend(place, values)
    for role, stack in stacked.items():
        size = np.log(np.linalg.norm(stack.reshape(count, -1), axis=1) + 1e-30)
        found[f"size {role}"] = _trend(place, size)
    return found if blueprint.before else {f"post-norm {name}": value for name, value in found.items()}


def direction(
    found: Mapping[str, float], known: Mapping[str, Expected], more: Mapping[str, float]
) -> Direction:
    """Weigh the signs by what they are worth elsewhere.

    Args:
        found: Signs.
        known: What they are worth.
        more: Other evidence, in nats.
    """
    odds = {
        name: 2 * value * known[name].mean / (known[name].spread ** 2 + _NOISE)
        for name, value in found.items()
        if name in known
    }
    odds = {name: _SHARE * value for name, value in odds.items()} | dict(more)
    total = sum(odds.values())
    order = sorted(odds, key=lambda name: -odds[name] * (1 if total >= 0 else -1))
    return Direction(float(total), tuple(order[:3]))


def _trend(place: NDArray[Any], values: NDArray[Any]) -> float:
    around = values - values.mean()
    size = float(np.linalg.norm(place) * np.linalg.norm(around))
    return float(place @ around) / size if size > 0 else 0.0
