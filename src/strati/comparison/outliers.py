r"""Layers that stand out of their role: how far a layer's change lies from what the other layers of its role did.

For each role with enough layers the logarithm of the relative change is fitted by a line over depth, and every layer
is tested against the fit to the others: its externally studentised residual follows Student's t with n - 3 degrees of
freedom if the layer is one of them (n - 2 without a slope). The p-values are Holm-corrected over all layers tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from strati.comparison.role_differences import holm

if TYPE_CHECKING:
    from strati.core.results import FloatArray

FEWEST = 5
"""Layers that a role must have."""


class Changed(Protocol):
    """What is needed of a compared layer."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def role(self) -> str:
        """Its role."""

    @property
    def block(self) -> int | None:
        """Its block."""

    @property
    def relative_change(self) -> float | None:
        """How far it moved."""


@dataclass(frozen=True)
class StandsOut:
    """A layer beside the others of its role.

    Attributes:
        layer: Its name.
        role: Its role.
        relative_change: How far it moved.
        expected: How far the others of its role let expect.
        pvalue: Two-sided, Holm-corrected for the number of layers tested.
    """

    layer: str
    role: str
    relative_change: float
    expected: float
    pvalue: float


def stand_out(layers: Sequence[Changed]) -> tuple[StandsOut, ...]:
    """Every layer of a role with enough layers, the most unusual first.

    Args:
        layers: Compared layers; those that did not move are left out.

    Examples:
        >>> from types import SimpleNamespace as Layer
        >>> layers = [Layer(name=f"{i}", role="mlp.in", block=i, relative_change=0.01 + i % 3 / 1e4) for i in range(9)]
        >>> layers[4].relative_change = 0.05
        >>> first = stand_out(layers)[0]
        >>> first.layer, first.pvalue < 0.001
        ('4', True)
    """
    found: list[StandsOut] = []
    for role in dict.fromkeys(layer.role for layer in layers):
        own = [layer for layer in layers if layer.role == role and layer.relative_change]
        if len(own) >= FEWEST:
            changes = np.array([layer.relative_change for layer in own], np.float64)
            depth = np.array([float(i) if x.block is None else float(x.block) for i, x in enumerate(own)])
            pvalues, expected = _tests(np.log(changes), depth)
            found += [
                StandsOut(layer.name, role, float(change), float(np.exp(fit)), float(p))
                for layer, change, fit, p in zip(own, changes, expected, pvalues, strict=True)
            ]
    corrected = holm([item.pvalue for item in found])
    done = [
        StandsOut(x.layer, x.role, x.relative_change, x.expected, p)
        for x, p in zip(found, corrected, strict=True)
    ]
    order = sorted(range(len(found)), key=lambda i: (corrected[i], found[i].pvalue))
    return tuple(done[i] for i in order)


def _tests(values: FloatArray, depth: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Two-sided p-value of each value against the others, and what they let expect."""
    from scipy.stats import t

    many = values.size
    sloped = many >= 8 and float(np.ptp(depth)) > 0
    pvalues, expected = np.ones(many), np.empty(many)
    for i in range(many):
        others = np.delete(np.arange(many), i)
        columns = [np.ones(many), depth - depth.mean()] if sloped else [np.ones(many)]
        design = np.stack(columns, axis=1)
        fit, _, rank, _ = np.linalg.lstsq(design[others], values[others], rcond=None)
        rest = values[others] - design[others] @ fit
        freedom = many - 1 - int(rank)
        expected[i] = design[i] @ fit
        leverage = float(design[i] @ np.linalg.pinv(design[others].T @ design[others]) @ design[i])
        # Values equal to rounding have no spread to measure against.
        spread = max(float(np.sqrt(rest @ rest / freedom)), 1e-9)
        score = (values[i] - expected[i]) / (spread * np.sqrt(1 + leverage))
        pvalues[i] = 2 * t.sf(abs(score), freedom)
    return pvalues, expected
