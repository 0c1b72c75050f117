"""Norms and who wears them: their weights taken into the projections they feed (:mod:`strati.reassembly.normalise`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from strati.reassembly.passes import Floats, Ints, Parts

MEAN = -1
"""Worn by an input projection that has no norm of its own yet: the mean of all."""


@dataclass(frozen=True)
class Wardrobe:
    """The norms, the weights of the projections without them, and who wears which.

    Attributes:
        weights: Norms x width.
        biases: Norms x width.
        A: Input projections as they are in their files.
        a: Their biases.
        L: The last layer's weight.
        l: Its bias.
        worn: The norm of each input projection, or :data:`MEAN`.
        last: That of the last layer; ``None`` where it has none.
    """

    weights: Floats
    biases: Floats
    A: Floats
    a: Floats
    L: Floats
    l: Floats  # noqa: E741
    worn: Ints
    last: int | None = None

    def norm(self, number: int) -> tuple[Floats, Floats]:
        """Weight and bias of a norm, or of their mean."""
        if number == MEAN:
            return self.weights.mean(axis=0), self.biases.mean(axis=0)
        return self.weights[number], self.biases[number]

    def of_chain(self, ins: Ints) -> tuple[Ints, int | None]:
        """The norm of each block and of the last layer; norms that nobody wears go to those who have none."""
        worn = self.worn[ins].copy()
        held = {int(n) for n in worn} | {self.last}
        left = [n for n in range(len(self.weights)) if n not in held]
        for place in np.flatnonzero(worn == MEAN):
            if left:
                worn[place] = left.pop(0)
        return worn, left[0] if self.last == MEAN and left else self.last


def first_worn(parts: Parts, weights: Floats, biases: Floats) -> Parts:
    """Parts whose projections all wear the mean norm; a single norm of several blocks stands before the last layer."""
    last: int | None = None
    if parts.final is not None:
        last = MEAN if parts.norm is not None else 0
    bare = Wardrobe(weights, biases, parts.A, parts.a, parts.L, parts.l, np.full(len(parts.A), MEAN), last)
    return dressed(parts, bare)


def dressed(parts: Parts, wardrobe: Wardrobe) -> Parts:
    """The parts with their norms' weights taken in."""
    found = replace(parts, wardrobe=wardrobe)
    if parts.norm is not None:
        norms = [wardrobe.norm(int(n)) for n in wardrobe.worn]
        g, c = np.stack([n[0] for n in norms]), np.stack([n[1] for n in norms])
        bias = wardrobe.a + np.einsum("mhd,md->mh", wardrobe.A, c)
        found = replace(found, A=np.ascontiguousarray(wardrobe.A * g[:, None, :]), a=bias)
    if wardrobe.last is not None:
        g, c = wardrobe.norm(wardrobe.last)
        found = replace(found, L=wardrobe.L * g, l=wardrobe.l + wardrobe.L @ c)
    return found
