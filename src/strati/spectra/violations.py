"""Which assumption of the noise law a matrix violates.

The Marchenko-Pastur law and its edge are those of independent entries of one variance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Violation(StrEnum):
    """An assumption that fails."""

    SPARSE = "sparse"
    ROW_SIZES = "row-sizes"
    COLUMN_SIZES = "column-sizes"
    SLICE_SIZES = "slice-sizes"
    REGULAR = "regular"
    ROW_CORRELATION = "row-correlation"
    COLUMN_CORRELATION = "column-correlation"


@dataclass(frozen=True)
class Departure:
    """A violation and how strong it is.

    Attributes:
        violation: The assumption that fails.
        amount: Share of zeros, correlation, or largest over smallest slice variance; ``None`` where only the
            violation counts.
        lag: How many places apart the correlated rows or columns are.
    """

    violation: Violation
    amount: float | None = None
    lag: int | None = None


def describe(departures: Iterable[Departure], *, separator: str = "; ") -> str:
    """The violations in words.

    Examples:
        >>> describe([Departure(Violation.ROW_SIZES), Departure(Violation.ROW_CORRELATION, 0.2, 1)])
        'rows differ in size; neighbouring rows are correlated (r = 0.20)'
    """
    return separator.join(dict.fromkeys(map(_phrase, departures)))


def _phrase(departure: Departure) -> str:
    amount = departure.amount or 0.0
    match departure.violation:
        case Violation.SPARSE:
            return f"{amount:.0%} of the weights are zero"
        case Violation.ROW_SIZES:
            return "rows differ in size"
        case Violation.COLUMN_SIZES:
            return "columns differ in size"
        case Violation.SLICE_SIZES:
            return f"the slices of the kernel differ in size (variances up to {amount:.3g} times apart)"
        case Violation.REGULAR:
            return "large weights are placed regularly, as on a diagonal"
        case _:
            side = "rows" if departure.violation == Violation.ROW_CORRELATION else "columns"
            which = f"neighbouring {side}" if departure.lag == 1 else f"{side} {departure.lag} places apart"
            return f"{which} are correlated (r = {amount:.2f})"
