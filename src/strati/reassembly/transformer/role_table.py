"""Which pieces stand in which place of a transformer: the table that finding roles fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Roles:
    """Slot to its pieces (one per block, in no order), name to the piece that is there once, and doubtful pieces."""

    block: Mapping[str, Sequence[int]]
    whole: Mapping[str, int]
    uncertain: tuple[int, ...] = ()
