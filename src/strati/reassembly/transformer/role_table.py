"""Which pieces stand in which place of a transformer: the table that finding roles fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Roles:
    """What was found of the pieces' roles.

    Attributes:
        block: Slot to its pieces, one per block; in no order, but twins in the same.
        whole: Name to the piece that is there once.
        uncertain: Pieces whose role is doubtful.
        twins: Two roles of a unit whose pairs are told, but not which of a pair is which; or ``embedding`` and
            ``head``.
    """

    block: Mapping[str, Sequence[int]]
    whole: Mapping[str, int]
    uncertain: tuple[int, ...] = ()
    twins: tuple[tuple[str, str], ...] = ()
