"""Decide which end of the block order comes first, from several statistics weighted by their log-odds.

Readers follow writers, likeness with embedding and head rises or falls, sizes change along the depth; how much each
sign is worth is measured on networks whose answer is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.reassembly.transformer import similarity
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
    """Log-odds that the chain lies as it should (negative: turn it), and the signs that say so most."""

    log_odds: float
    by: tuple[str, ...]


def signs(
    stacked: Mapping[str, Floats],
    similar: Similarity,
    ends: Mapping[str, NDArray[np.float32]],
    blueprint: Blueprint,
) -> dict[str, float]:
    """Numbers that would change sign if the chain were turned round, each between -1 and 1.

    Args:
        stacked: Role to matrices in the order of the chain.
        similar: Similarities in the same order.
        ends: ``embedding`` and ``head`` as rows by width, where there are any.
        blueprint: The architecture; signs of networks whose norms stand after the blocks are others.
    """
    sign_values: dict[str, float] = {}
    count = similar.count
    if count < 2:
        return sign_values
    place = np.arange(count) - (count - 1) / 2
    places = {kind: np.arange(count) for kind in similar.units}
    for (a, b), (_, later, earlier, _) in coefficients(similar, places).items():
        if a != b and count > 2:
            sign_values[f"{a} before {b}"] = (later - earlier) / (abs(later) + abs(earlier) + 0.02)
    flat = {role: similarity.features(role, stack) for role, stack in stacked.items()}
    for end, table in ends.items():
        if blueprint.tied and end == "embedding":
            continue
        for role, values in similarity.ends(flat, table).items():
            sign_values[f"{'tied' if blueprint.tied else end} {role}"] = _trend(place, values)
    for role, stack in stacked.items():
        size = np.log(np.linalg.norm(stack.reshape(count, -1), axis=1) + 1e-30)
        sign_values[f"size {role}"] = _trend(place, size)
    return (
        sign_values
        if blueprint.before
        else {f"post-norm {name}": value for name, value in sign_values.items()}
    )


def direction(
    sign_values: Mapping[str, float], expected: Mapping[str, Expected], more: Mapping[str, float]
) -> Direction:
    """Combine the statistics, weighted by their log-odds on other networks.

    Args:
        sign_values: Signs.
        expected: Log-odds of each statistic, measured on other networks.
        more: Other evidence, in nats.
    """
    odds = {
        name: 2 * value * expected[name].mean / (expected[name].spread ** 2 + _NOISE)
        for name, value in sign_values.items()
        if name in expected
    }
    odds = {name: _SHARE * value for name, value in odds.items()} | dict(more)
    total = sum(odds.values())
    order = sorted(odds, key=lambda name: -odds[name] * (1 if total >= 0 else -1))
    return Direction(float(total), tuple(order[:3]))


def _trend(place: NDArray[Any], values: NDArray[Any]) -> float:
    around = values - values.mean()
    size = float(np.linalg.norm(place) * np.linalg.norm(around))
    return float(place @ around) / size if size > 0 else 0.0
